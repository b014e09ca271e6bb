"""`compile`: what is compiled, where graphs are cut and break, and that a run comes out as without it."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.engine import compiling
from ddprun.engine.compiling import CompiledGraph, compile_model, select_blocks
from ddprun.explain.explain import explain
from ddprun.explain.text import render_text
from ddprun.zoo.models import MODELS
from tests.checkpoint.runs import CNN, check
from tests.engine.running import events, lines, summary, to_its_end, weights
from tests.ranks import as_processes

COMPILING_S = 180  # a C++ compiler builds a run's kernels, on cores that other tests use as well
pytestmark = [
    # Torch looks whether inputs of blocks have gradients. It hides its own warning of that, not the error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.timeout(3 * COMPILING_S),
]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))),
    reason="torch.compile needs a C++ compiler: apt-get install g++",
)

BASE = "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\noptimizer: sgd\n"


class Layer(nn.Module):
    """Made of modules."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    """Layers in a list, and others beside it."""

    def __init__(self, *, branch: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.branch = nn.Linear(8, 8), nn.Linear(8, 8), branch
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.pair = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.branch and x.sum() > 1e9:
            x = 2 * x
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.last(self.pair(x))
        return result


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Any]:
    """Load a pipeline with this `compile`; torch's own settings are as before afterwards."""

    def loaded(settings: str, more: str = "") -> LoadedPipeline:
        (tmp_path / "p.yaml").write_text(f"{BASE}compile: {settings}\n{more}")
        return load(tmp_path / "p.yaml")

    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8, accumulated_recompile_limit=256):
        yield loaded
    torch._dynamo.reset()


def fault(wanted: Any) -> str:
    with pytest.raises(PipelineError) as refused:
        wanted()
    (found,) = refused.value.faults
    return found.headline.partition("p.yaml:")[2]


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ("null", [""]),
        ("auto", ["layers.0", "layers.1", "layers.2", "pair.0.0", "pair.0.1"]),
        ("Layer", ["layers.0", "layers.1", "layers.2", "pair.0.0", "pair.0.1"]),
        ('["layers*", last]', ["last", "layers.0", "layers.1", "layers.2"]),
        (
            "[Linear, pair]",
            ["first", "last", "layers.0.linear", "layers.1.linear", "layers.2.linear", "pair"],
        ),
    ],
)
def test_blocks_are_found(pipeline: Any, blocks: str, names: list[str]) -> None:
    """By patterns of their names, their class, or because they repeat; the outermost, never a bare list."""
    loaded = pipeline(f"{{blocks: {blocks}}}")
    assert sorted(select_blocks(loaded, Net(), loaded.pipeline.compile)) == names


def test_blocks_that_are_not_there(pipeline: Any) -> None:
    """The fault is at the pattern, and lists what there is."""
    loaded = pipeline('{blocks: ["layers.*", "block.*"]}')
    found = fault(lambda: select_blocks(loaded, Net(), loaded.pipeline.compile))
    assert found.startswith('4:32: compile.blocks[1]: no module or module class is called "block.*"; ')
    assert "there are first, last, " in found
    assert "of the classes Linear, Layer, " in found
    loaded = pipeline("{blocks: auto}")
    settings = loaded.pipeline.compile
    mlp = MODELS["mlp"](inputs=64, hidden=[8, 8], outputs=10, activation="relu")
    assert "no block of the model repeats" in fault(lambda: select_blocks(loaded, mlp, settings))


def graphs(loaded: LoadedPipeline, model: nn.Module, *sizes: int) -> compiling.GraphCompiler:
    """Forward and backward passes on batches of these sizes, without kernels."""
    inputs = next(iter(model.parameters())).shape[1]
    compiler, _ = compile_model(loaded, model, backend="aot_eager")
    for size in sizes:
        model(torch.randn(size, inputs)).sum().backward()
    return compiler


def test_a_graph_is_cut_where_gradients_fill_a_bucket(pipeline: Any) -> None:
    """Torch's own Sequential, too, which `Module.compile` leaves alone. Names stay as they are. Blocks are
    not cut, those that are alike share a graph, and without a backward pass nothing is cut.
    """
    torch.manual_seed(0)
    model = MODELS["mlp"](inputs=64, hidden=[600, 600], outputs=10, activation="relu")
    names, plain = list(model.state_dict()), [one.clone() for one in model.parameters()]
    x = torch.randn(4, 64)
    expected = model(x)
    compiler = graphs(pipeline("true", "ddp: {bucket_cap_mb: 1}\n"), model, 4)
    (graph,) = compiler.graphs
    assert graph.training
    assert [set(part) for part in graph.parts] == [set(names[:2]), set(names[2:])]
    assert list(model.state_dict()) == names
    model.load_state_dict(dict(zip(names, plain, strict=True)))
    assert torch.allclose(model(x), expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        model(x)
    assert compiler.graphs[1:] == [CompiledGraph((tuple(names),), training=False)]

    # The first size, then the largest.
    for caps, parts in (("0.01", 3), ("[2, 0.01]", 1), ("[0.01, 2]", 2)):
        model = MODELS["mlp"](inputs=64, hidden=[600, 600], outputs=10, activation="relu")
        compiler = graphs(pipeline("true", f"ddp: {{bucket_cap_mb: {caps}}}\n"), model, 4)
        assert [len(graph.parts) for graph in compiler.graphs] == [parts], caps

    net = Net()
    compiler = graphs(pipeline("{blocks: [layers.*]}", "ddp: {bucket_cap_mb: 1}\n"), net, 4)
    assert [len(graph.parts) for graph in compiler.graphs] == [1]
    assert all(param.grad is not None for param in net.layers.parameters())


def test_graph_breaks_are_named_with_their_place(pipeline: Any) -> None:
    """Each once; with `fullgraph` the first is the fault."""
    compiler = graphs(pipeline("true"), Net(branch=True), 4)
    assert len(compiler.graphs) == 2
    (found,) = compiler.breaks
    assert found.reason == "a branch depends on a tensor's value"
    lines_of_it = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, one in enumerate(lines_of_it) if "if self.branch and" in one)
    assert found.where == f"{__file__}:{line}"

    loaded = pipeline("{fullgraph: true}")
    with pytest.raises(torch._dynamo.exc.Unsupported) as broken:
        graphs(loaded, Net(branch=True), 4)
    error = compiling.as_compile_error(loaded, broken.value)
    assert error is not None
    assert f"4:22: compile.fullgraph: the graph breaks: {found.reason} ({found.where}); change" in str(error)
    assert compiling.as_compile_error(loaded, ValueError("of the pipeline's own")) is None


def test_batches_of_many_sizes(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each of the first, whatever came before, and none for more than that; or one for all."""
    monkeypatch.setattr(compiling, "_MAX_GRAPHS_PER_BLOCK", 3)
    compiler = graphs(pipeline("true"), Net(), 4, 2, 3, 4)
    assert (len(compiler.graphs), compiler.at_recompile_limit) == (3, False)
    torch._dynamo.reset()
    compiler = graphs(pipeline("true"), Net(), 2, 3, 4, 5)
    assert (len(compiler.graphs), compiler.at_recompile_limit) == (3, True)
    torch._dynamo.reset()
    compiler = graphs(pipeline("{dynamic: true}"), Net(), 2, 3, 4, 5)
    assert (len(compiler.graphs), compiler.at_recompile_limit) == (1, False)


def test_settings_that_keep_buckets_from_hooks_are_refused(pipeline: Any) -> None:
    """Of the pipeline's own code, whether the file compiles or not."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        found = fault(lambda: compiling.check_dynamo_config(pipeline("null")))
        assert 'ddp: torch._dynamo.config.optimize_ddp is "python_reducer": hooks would get' in found
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = fault(lambda: compiling.check_dynamo_config(pipeline("true")))
        assert "compile: torch._dynamo.config.compiled_autograd is on" in found


# Runs with kernels. What these compile is compiled once: they share a cache.

RUN = """
model: {mlp: {inputs: 64, hidden: [600, 600], outputs: 10}}
data: digits
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
ddp: {bucket_cap_mb: 1}
ema: 0.9
freeze: ["1.bias"]
groups: [{match: "5.*", lr: 0.05}]
timings: {gradients: true, fidelity_every: 2}
stages:
  - train: {steps: 3}
  - train: {steps: 2, accumulate: 2, hooks: [fp16]}
  - train: {steps: 4, sync: {local_sgd: {every: 2}}, mutate: {noise: {std: 1e-6}}, evaluate: {every: 2}}
  - forward: {steps: 2}
  - evaluate: {metrics: [accuracy]}
  - save
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def rank(file: Path, run_dir: Path, said: Path, variables: dict[str, str]) -> int:
    os.environ.update(variables)
    return to_its_end(load(file), run_dir, said)


def run(folder: Path, cache: Path, more: str, name: str, **variables: str) -> tuple[Path, list[int], str]:
    """Two ranks; gives the run's folder, the exit codes, and what they said."""
    (folder / f"{name}.yaml").write_text(RUN + more)
    said = folder / f"{name}.txt"
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **variables}
    arguments = folder / f"{name}.yaml", folder / name, said, settings
    codes = as_processes(2, rank, *arguments, cwd=folder, timeout_s=COMPILING_S)
    return folder / name, codes, said.read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Path]:
    """The same pipeline, compiled and not."""
    folder, found = tmp_path_factory.mktemp("compiled"), {}
    for name in ("true", "null"):
        found[name], codes, said = run(folder, cache, f"compile: {name}\n", name)
        assert codes == [0, 0], said
        assert ("compiled the model in" in said) == (name == "true")
    return found


@needs_compiler
def test_a_compiled_run_ends_as_one_that_is_not(runs: dict[str, Path]) -> None:
    """Its weights, by the same names, up to rounding; its loss, and the held-out one."""
    compiled, plain = weights(runs["true"]), weights(runs["null"])
    assert list(compiled) == list(plain)
    for name, value in plain.items():
        assert torch.allclose(compiled[name], value, rtol=1e-3, atol=1e-4), name
    ends = [summary(runs[name]) for name in ("true", "null")]
    assert ends[1]["loss"] < 2.2, "it has learned something"
    assert ends[0]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-3)
    assert ends[0]["metrics"]["loss"] == pytest.approx(ends[1]["metrics"]["loss"], rel=1e-3)


@needs_compiler
def test_hooks_get_the_buckets_of_ddp(runs: dict[str, Path]) -> None:
    """Every step sends the same bytes, of the same parameters; they may be ready in another order."""
    sent = {}
    for name, run_dir in runs.items():
        counted, params = Counter[tuple[Any, ...]](), set()
        for line in lines(run_dir, "buckets"):
            key = line["rank"], line["step"], line["kind"], tuple(line["hooks"])
            counted[(*key, "bytes")] += line["bytes"]
            counted[(*key, "wire")] += line["wire_bytes"]
            params |= {(*key, param) for param in line["params"]}
        sent[name] = counted, params
    assert sent["true"] == sent["null"]
    assert sum(sent["true"][0].values()) > 10e6
    fidelities = [line["fidelity"] for line in lines(runs["true"], "buckets") if line.get("fidelity")]
    assert fidelities
    complete = [line for line in lines(runs["true"], "buckets") if line["kind"] == "gradient"]
    assert {line["bucket"] for line in complete} == {0, 1}, "graphs are cut, so buckets come one by one"
    assert all(line["completed_by"] in line["params"] for line in complete if line.get("completed_by"))


@needs_compiler
def test_no_step_holds_the_time_of_compiling(runs: dict[str, Path]) -> None:
    """Before step 1 there is a graph for training, and one for forward passes; evaluation makes its own."""
    found = events(runs["true"])
    (compiled,) = [event for event in found if event["event"] == "compiled"]
    assert (compiled["graphs"], compiled["parts"], compiled["breaks"]) == (2, 3, [])
    assert compiled["blocks"] == [""]
    more = [(event["step"], event["graphs"]) for event in found if event["event"] == "compiled_more"]
    assert {step for step, _ in more} <= {7, 11}, "in the first evaluations"
    first = [line for line in lines(runs["true"], "steps") if line["step"] == 1]
    assert all(line["step_us"] < 1e6 * compiled["seconds"] for line in first)
    assert not any(event["event"].startswith("compiled") for event in events(runs["null"]))


@needs_compiler
def test_explain_shows_the_graphs_and_buckets_of_the_run(runs: dict[str, Path]) -> None:
    """Without building a kernel."""
    explained = explain(load(runs["true"].parent / "true.yaml"), hosts=1, ranks_per_host=2)
    (started,) = [event for event in events(runs["true"]) if event["event"] == "started"]
    (buckets,) = explained.probe.gradient_buckets.values()
    assert [[p.name for p in one.params] for one in buckets.layouts] == [
        bucket["params"] for bucket in started["buckets"]
    ]
    said = " ".join(render_text(explained).split())
    assert "Compile The model, mode default: 1 graph, without a graph break." in said
    shown = json.loads(json.dumps(explained.to_json_data()))["compile"]
    assert (shown["mode"], shown["blocks"], len(shown["graphs"][0]["parts"])) == ("default", [""], 2)
    plain = explain(load(runs["null"].parent / "null.yaml"), hosts=1, ranks_per_host=2)
    assert plain.to_json_data()["compile"] is None


def rank_without_kernels(file: Path, run_dir: Path, said: Path) -> int:
    compiling.compile_model = partial(compile_model, backend="aot_eager")
    return to_its_end(load(file), run_dir, said)


def test_passes_before_step_1_record_gradients_as_steps_do(tmp_path: Path) -> None:
    """A loss may compute some itself: in the passes that compile, and in those before, as `explain` does."""
    (tmp_path / "penalised.py").write_text(
        """
import torch


def loss(output, target):
    loss = torch.nn.functional.cross_entropy(output, target)
    (slopes,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + slopes.square().sum()
"""
    )
    (tmp_path / "p.yaml").write_text(
        f"{BASE}loss: penalised.loss\ncompile: true\nstages: [train: {{steps: 2}}]\n"
    )
    arguments = tmp_path / "p.yaml", tmp_path / "run", (said := tmp_path / "said.txt")
    codes = as_processes(1, rank_without_kernels, *arguments, cwd=tmp_path, timeout_s=COMPILING_S)
    assert codes == [0], said.read_text()
    explained = explain(load(tmp_path / "p.yaml"), hosts=1, ranks_per_host=2)
    assert explained.probe.compiled is not None
    (compiled,) = [event for event in events(tmp_path / "run") if event["event"] == "compiled"]
    assert compiled["graphs"] == len(explained.probe.compiled.graphs) == 1


@needs_compiler
def test_a_compiled_run_that_was_killed_goes_on_bit_for_bit(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BatchNorm, a codec with error feedback, and last batches that are smaller."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    check(tmp_path, 2, "every_step", "[int8]", CNN, "fp32\ncompile: true")


def test_without_a_compiler_the_run_says_so(tmp_path: Path, cache: Path) -> None:
    """Before anything is exchanged, at the key, with what to do."""
    _, codes, said = run(tmp_path, cache, "compile: true\n", "run", PATH=str(tmp_path))
    assert codes == [2, 2]
    assert ":10: compile: torch.compile finds no C++ compiler on this host; install g++" in said
    assert "Traceback" not in said


@needs_compiler
def test_a_cache_that_may_not_execute_is_refused(tmp_path: Path) -> None:
    """As `/tmp` in a container that mounts it so; on a mount of a namespace of its own."""
    (tmp_path / "p.yaml").write_text(f"{BASE}compile: true\nstages: [{{train: {{steps: 1}}}}]\n")
    (tmp_path / "cache").mkdir()
    enter = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("this user may make no namespace of mounts")
    mount = f'mount -t tmpfs -o noexec tmpfs {tmp_path}/cache && exec "$@"'
    command = [sys.executable, "-m", "ddprun", "p.yaml", "--nproc-per-node=1"]
    done = subprocess.run(
        [*enter, "sh", "-c", mount, "sh", *command],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/cache/kernels"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=COMPILING_S,
        check=False,
    )
    assert done.returncode == 2
    assert "p.yaml:4:10: compile: torch.compile may not execute what it has built; set TORCH" in done.stderr
