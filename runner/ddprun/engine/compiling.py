"""`compile`: torch.compile of the model, or of its blocks, before DDP wraps it.

DDP sends a bucket when the gradients in it are there, and a graph gives all its gradients at its end. So a
model that is one graph is cut where torch would cut it for DDP, at the size of a bucket. A block is not cut:
its gradients are there when its backward pass is over, and the next block's overlaps with sending them.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters, get_optimize_ddp_mode

from ddprun.config import Compile, LoadedPipeline, PipelineError
from ddprun.engine.model_with_loss import bare_model
from ddprun.engine.weights import matches
from ddprun.units import abbreviated_list

_MODULES_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
# Training and evaluation have one for each size of batches, which differ; torch's limit, 8, is soon reached.
_MAX_GRAPHS_PER_BLOCK = 16

_GraphBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Something that torch.compile leaves to Python: a graph ends there, and another begins."""

    reason: str
    where: str  # file and line; empty where torch does not say


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A record of one graph that torch.compile has compiled."""

    parts: tuple[tuple[str, ...], ...]  # where it is cut for DDP: the trained parameters of each part
    training: bool  # it has a backward pass


class GraphCompiler:
    """The backend that torch.compile gives its graphs to. It cuts them for DDP, and keeps count of them.

    Torch itself cuts graphs only if they are first met inside a DDP forward pass
    (`torch._dynamo.config.optimize_ddp`), so bits would depend on whether a batch of some size came first in
    a stage that averages gradients or in another. Here a graph is cut wherever it comes from.

    `backend` compiles one graph. `cut_bytes`: the sizes of the first part and of the others; None: no cuts.
    """

    def __init__(self, model: nn.Module, backend: _GraphBackend, cut_bytes: tuple[int, int] | None) -> None:
        self.graphs: list[CompiledGraph] = []
        self.reported_graphs = 0  # how many have been reported
        self._backend, self._cut_bytes = backend, cut_bytes
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._breaks: dict[GraphBreak, None] = {}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._note_break(graph)
        named = dict(self._input_parameter_names(graph))
        training = torch.is_grad_enabled() and bool(named)
        parts = [list(named.values())]
        if training and self._cut_bytes is not None:
            from torch._dynamo.backends.distributed import DDPOptimizer

            first, others = self._cut_bytes
            cutter = DDPOptimizer(others, self._backend, first_bucket_cap=first)
            made = cutter.compile_fn(graph, list(inputs))
            parts = [[named.get(name, name) for name in bucket.params] for bucket in cutter.buckets]
        else:
            made = self._backend(graph, inputs)
        self.graphs.append(CompiledGraph(tuple(tuple(dict.fromkeys(part)) for part in parts), training))
        return made

    @property
    def breaks(self) -> tuple[GraphBreak, ...]:
        """Each graph break once, in the order of occurrence; those that came before any graph are last."""
        others = (GraphBreak(_shorten_reason(reason), "") for reason in counters["graph_break"])
        with_graph = {one.reason for one in self._breaks}
        unexplained = {one: None for one in others if one.reason not in with_graph}
        return tuple({**self._breaks, **unexplained})

    @property
    def at_recompile_limit(self) -> bool:
        """Batches have had more sizes than graphs are made for: those of further sizes run uncompiled."""
        return any(reason.startswith("Dynamo recompile limit") for reason in counters["unimplemented"])

    def _note_break(self, graph: fx.GraphModule) -> None:
        ended: Any = getattr(graph, "compile_subgraph_reason", None)
        if ended is None or not ended.graph_break:
            return
        frame = ended.user_stack[-1] if ended.user_stack else None
        where = f"{frame.filename}:{frame.lineno}" if frame is not None else ""
        self._breaks[GraphBreak(_shorten_reason(ended.reason), where)] = None

    def _input_parameter_names(self, graph: fx.GraphModule) -> Iterator[tuple[str, str]]:
        """The trained parameters that a graph takes: the name of its input, and the model's."""
        for node in graph.graph.nodes:
            held = getattr(node.meta.get("grapharg"), "example", None) if node.op == "placeholder" else None
            if isinstance(held, Tensor) and held.requires_grad and id(held) in self._names:
                yield str(node.target), self._names[id(held)]


_CACHE_HINT = "set TORCHINDUCTOR_CACHE_DIR to a folder in which files can be written and executed"


def check_dynamo_config(loaded: LoadedPipeline) -> None:
    """Refuse, by a PipelineError, settings of the pipeline's own code that keep buckets from the hooks."""
    key = "ddp" if loaded.pipeline.compile is None else "compile"
    if get_optimize_ddp_mode() == "python_reducer":
        text = 'torch._dynamo.config.optimize_ddp is "python_reducer": hooks would get parameters one by one '
        raise loaded.error(key, f"{text}instead of buckets", "remove it from your code")
    if torch._dynamo.config.compiled_autograd:
        text = "torch._dynamo.config.compiled_autograd is on: it bypasses DDP's buckets"
        raise loaded.error(key, text, "remove it from your code")


def select_blocks(loaded: LoadedPipeline, model: nn.Module, settings: Compile) -> dict[str, nn.Module]:
    """What is compiled, by name, the model itself being ""; a PipelineError if there is no such module."""
    if settings.blocks is None:
        return {"": bare_model(model)}
    if settings.blocks == ("auto",):
        if found := dict(_repeated_blocks(bare_model(model), "")):
            return found
        text = "no block of the model repeats: no list of modules holds two of one class that are made of "
        raise loaded.error("compile.blocks", f"{text}modules", "write compile: true, or name the modules")
    named = {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, _MODULES_WITHOUT_FORWARD)
    }
    chosen: dict[str, nn.Module] = {}
    faults = []
    for index, pattern in enumerate(settings.blocks):
        fitting = [n for n, m in named.items() if matches(n, [pattern]) or type(m).__name__ == pattern]
        if not fitting:
            classes = [*dict.fromkeys(type(module).__name__ for module in named.values())]
            text = f'no module or module class is called "{pattern}"'
            there_are = f"there are {abbreviated_list([*named])}; of the classes {abbreviated_list(classes)}"
            faults.append(loaded.fault(f"compile.blocks[{index}]", text, there_are))
        chosen |= {name: named[name] for name in fitting}
    if faults:
        raise PipelineError(faults)
    # A block inside of another is compiled with it.
    inner = {name for name in chosen if any(name.startswith(f"{outer}.") for outer in chosen)}
    return {name: module for name, module in chosen.items() if name not in inner}


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that repeat in a list or Sequential: with parameters, and no leaves of torch."""
    children = dict(module.named_children())
    counted = Counter[type[nn.Module]]()
    if isinstance(module, (nn.Sequential, *_MODULES_WITHOUT_FORWARD)):
        counted.update(type(child) for child in children.values() if _may_be_block(child))
    for name, child in children.items():
        if counted[type(child)] > 1 and _may_be_block(child):
            yield f"{prefix}{name}", child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _may_be_block(module: nn.Module) -> bool:
    if isinstance(module, _MODULES_WITHOUT_FORWARD) or next(module.parameters(), None) is None:
        return False
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")


def compile_model(
    loaded: LoadedPipeline, model: nn.Module, *, ranks_here: int = 1, backend: str = "inductor"
) -> tuple[GraphCompiler, dict[str, nn.Module]]:
    """Have the model, or its blocks, compiled when they are first called; gives the blocks by name, too.

    Modules stay where they are, under their names. DDP and compiled autograd know nothing of it: bits must
    not depend on them (`GraphCompiler`), and with compiled autograd DDP's hooks would get no buckets.
    `ranks_here` share this host's cores. A `backend` that builds no kernels shows the same graphs.
    """
    settings = loaded.pipeline.compile
    assert settings is not None, "the pipeline compiles its model"
    blocks = select_blocks(loaded, model, settings)
    if backend == "inductor":
        _link_precompiled_headers()
    import torch._inductor.config

    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = _MAX_GRAPHS_PER_BLOCK * len(blocks)
    torch._dynamo.config.accumulated_recompile_limit = 32 * _MAX_GRAPHS_PER_BLOCK * len(blocks)
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch._inductor.config.compile_threads = max(1, min(32, cores // ranks_here))
    for name in ("graph_break", "unimplemented"):
        counters[name].clear()
    ddp = loaded.pipeline.ddp
    cut = (ddp.bucket_caps_bytes[0], ddp.largest_cap_bytes) if settings.blocks is None else None
    compiler = GraphCompiler(model, _load_backend(settings, backend), cut)
    call = torch.compile(
        _call_module, backend=compiler, dynamic=settings.dynamic, fullgraph=settings.fullgraph
    )
    for block in blocks.values():
        # What `Module.compile` sets. That leaves torch's own modules, such as Sequential, as they are without
        # a word: torch.compile skips all calls that begin in torch's code. This one begins here.
        block._compiled_call_impl = partial(call, block)
    return compiler, blocks


def _link_precompiled_headers() -> None:
    """Torch builds headers below the temporary folder: have it use its cache if that is gone with the run."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    if os.stat(tempfile.gettempdir()).st_mode & 0o077 == 0:
        with suppress(OSError):
            os.symlink(cache_dir(), default_cache_dir())


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _load_backend(settings: Compile, name: str) -> _GraphBackend:
    if name != "inductor":
        return cast("_GraphBackend", torch._dynamo.lookup_backend(name))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(settings.mode, settings.dynamic)
    return cast("_GraphBackend", partial(compile_fx, config_patches=patches))


def describe_blocks(blocks: Mapping[str, nn.Module]) -> str:
    """What is compiled, in plain words."""
    if "" in blocks:
        return "the model"
    classes = abbreviated_list([*dict.fromkeys(type(block).__name__ for block in blocks.values())])
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''} of {classes} ({abbreviated_list([*blocks])})"


def as_compile_error(
    loaded: LoadedPipeline, error: BaseException, *, compiling: bool = False
) -> PipelineError | None:
    """A failure of torch.compile as a PipelineError, or None; `compiling`: in a pass that worked before."""
    ours = isinstance(error, PipelineError) or not isinstance(error, Exception)
    if loaded.pipeline.compile is None or ours:
        return None
    from torch._inductor import exc as of_inductor

    kinds = (
        torch._dynamo.exc.TorchDynamoException,
        torch._dynamo.exc.FailOnRecompileLimitHit,
        of_inductor.InvalidCxxCompiler,
        of_inductor.CppCompileError,
    )
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    # What an operation refuses, such as shapes that do not fit, is no matter of compiling.
    of_the_model = any(isinstance(one, torch._dynamo.exc.TorchRuntimeError) for one in chain)
    if compiling or (not of_the_model and any(isinstance(one, kinds) for one in chain)):
        return _make_compile_error(loaded, error)
    return None


def _make_compile_error(loaded: LoadedPipeline, error: BaseException) -> PipelineError:
    settings = loaded.pipeline.compile
    assert settings is not None, "the pipeline compiles its model"
    key, text, cause = "compile", str(error), type(error).__name__
    if "InvalidCxxCompiler" in f"{cause} {text}" or "No working C++ compiler" in text:
        problem = "torch.compile finds no C++ compiler on this host"
        hint = 'install g++ (in the image: --build-arg PACKAGES="gcc g++ python3-dev"), or name one in CXX'
    elif "Python.h" in text:
        problem = "torch.compile finds no Python.h on this host"
        hint = "install the headers of Python (python3-dev)"
    elif any(one in text for one in ("failed to map segment", "Permission denied", "Read-only file system")):
        problem, hint = "torch.compile may not execute what it has built", _CACHE_HINT
    elif isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        key = "compile.fullgraph"
        problem = f'"fullgraph: true" clashes with more than {_MAX_GRAPHS_PER_BLOCK} batch sizes'
        hint = "write dynamic: true, fullgraph: false, or loader: {drop_last: true}"
    elif settings.fullgraph and isinstance(error, torch._dynamo.exc.Unsupported):
        key, place = "compile.fullgraph", re.findall(r'File "([^"]+)", line ([0-9]+)', text)
        at = f" ({place[-1][0]}:{place[-1][1]})" if place else ""
        problem = f"the graph breaks: {_shorten_reason(text)}{at}"
        hint = "change the model there, or write fullgraph: false"
    else:
        problem = f"torch.compile failed: {_shorten_reason(text) or cause}"
        hint = "write compile: false, or compile other blocks; TORCH_LOGS=dynamo,inductor says more"
    return loaded.error(key, problem, hint)


def _shorten_reason(reason: str) -> str:
    """Torch's reason for a graph break, or its error, in one line."""
    if reason.startswith("generic_jump") or "data-dependent branching" in reason:
        return "a branch depends on a tensor's value"
    explained = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
    first = explained[1] if explained else next(iter(reason.strip().splitlines()), "")
    return " ".join(first.split()).rstrip(".")
