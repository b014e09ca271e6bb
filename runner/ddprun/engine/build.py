"""From what the file chooses to live objects; what only a run can see is told with its place in the file."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ddprun.config import (
    BroadcastStage,
    Choice,
    DataPair,
    Loaded,
    PipelineError,
    StepStage,
    length_option,
    tensor_options,
)
from ddprun.engine.data import is_iterable
from ddprun.engine.evolution import evolution_strategies
from ddprun.sync.synchronizer import averaged_parameters, noise
from ddprun.zoo.data import DATA, DataError, Split
from ddprun.zoo.models import MODELS
from ddprun_hooks.config.import_path import import_dotted
from ddprun_hooks.config.options import parse_spec
from ddprun_hooks.config.trust import TrustSettingError, UntrustedError, Wanted
from ddprun_hooks.errors import DottedNameError, HookSetupError
from ddprun_hooks.registry import make_hook
from ddprun_hooks.stack import Stack

MUTATIONS: dict[str, Callable[..., None]] = {"noise": noise}
UPDATES: dict[str, Callable[..., None]] = {"evolution_strategies": evolution_strategies}

_WANTED = {
    wanted.kind: wanted
    for wanted in (
        Wanted(
            "a model is an nn.Module class or a function that returns one",
            nn.Module,
            returns=nn.Module,
            kind="model",
        ),
        Wanted(
            "data is a Dataset class or a function that returns a dataset",
            Dataset,
            ("__getitem__", "__iter__"),
            kind="data",
        ),
        Wanted("a loss is a function of (output, target) or an nn.Module class", nn.Module, kind="loss"),
        Wanted("an Optimizer class is wanted", Optimizer, returns=Optimizer, kind="optimizer"),
        Wanted("an LRScheduler class is wanted", LRScheduler, returns=LRScheduler, kind="schedule"),
        Wanted("a function of (model) is wanted", kind="mutate"),
        Wanted("a function of (model, score) is wanted", kind="update"),
        Wanted("a metric is a function of (output, target)", kind="metric"),
    )
}
"""By the kind of a choice."""


def build_model(loaded: Loaded) -> nn.Module:
    """The model that the file chooses, on the CPU."""
    choice = loaded.filled("model", loaded.pipeline.model)
    if choice.source == "built-in":
        return MODELS[choice.name](**choice.options)
    made = _call(loaded, "model", choice)
    if not isinstance(made, nn.Module):
        raise _refused(
            loaded,
            _key("model", choice),
            f'"{choice.name}" gives {type(made).__name__}',
            "a model is an nn.Module class or a function that returns one",
        )
    if not any(param.requires_grad for param in made.parameters()):
        raise _refused(loaded, _key("model", choice), f'"{choice.name}" has no parameter to train')
    return made


def build_data(loaded: Loaded) -> Split:
    """Training data, and evaluation data where there is any."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        evaluate = _dataset(loaded, "data.evaluate", data.evaluate).train if data.evaluate else None
        return Split(_dataset(loaded, "data.train", data.train).train, evaluate)
    return _dataset(loaded, "data", data)


def build_loss(loaded: Loaded, device: torch.device) -> Callable[[Any, Any], Tensor] | None:
    """The loss as a function of (output, target); None where the model returns its own."""
    choice = loaded.filled("loss", loaded.pipeline.loss)
    if choice.source == "built-in":
        return None
    if choice.source == "torch":
        tensors = tensor_options("loss", choice.name)
        options = {
            name: torch.tensor(value, dtype=torch.float32) if name in tensors and value is not None else value
            for name, value in choice.options.items()
        }
        made = _checked(loaded, _key("loss", choice), lambda: getattr(nn, choice.name)(**options))
        return made.to(device)  # type: ignore[no-any-return]
    target = _imported(loaded, "loss", choice)
    if not inspect.isclass(target):
        if choice.options:
            return lambda output, wanted: target(output, wanted, **choice.options)
        return target  # type: ignore[no-any-return]
    made = _call(loaded, "loss", choice)
    return made.to(device) if isinstance(made, nn.Module) else made


def build_optimizer(
    loaded: Loaded, model: nn.Module, choice: Choice | None = None, path: str = "optimizer"
) -> Optimizer:
    """The optimizer over all parameters that require a gradient."""
    choice = loaded.filled(path, choice or loaded.pipeline.optimizer)
    path = _key(path, choice)
    params = [param for param in model.parameters() if param.requires_grad]
    if choice.source == "torch":
        target: Any = getattr(torch.optim, choice.name)
    else:
        target = _imported(loaded, path, choice)
        _bind(loaded, path, choice, target, params)
    made = _checked(loaded, path, lambda: target(params, **choice.options))
    if not isinstance(made, Optimizer):
        raise _refused(loaded, path, f'"{choice.name}" gives {type(made).__name__}', "an Optimizer is wanted")
    return made


def optimizer_settings(
    loaded: Loaded, stage: StepStage, model: nn.Module, optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The optimizer's settings in one stage, for each parameter group."""
    if "optimizer" in stage.model_fields_set and stage.optimizer is not None:
        optimizer = build_optimizer(loaded, model, stage.optimizer, f"{stage.path}.optimizer")
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def build_schedule(
    loaded: Loaded, path: str, choice: Choice | None, optimizer: Optimizer, steps: int | None
) -> LRScheduler | None:
    """The schedule of one stage; a length that is left out becomes the stage's `steps`."""
    if choice is None:
        return None
    choice = loaded.filled(path, choice)
    options, where = dict(choice.options), _key(path, choice)
    if choice.source == "torch":
        target: Any = getattr(torch.optim.lr_scheduler, choice.name)
        length = length_option(choice.name, options)
        if length is not None:
            if steps is None:
                raise _refused(
                    loaded,
                    where,
                    f"{length} is left out, but nobody knows how many steps an epoch of iterable data has",
                    f"write {length}, or give the stage steps instead of epochs",
                )
            options[length] = steps
    else:
        target = _imported(loaded, path, choice)
        _bind(loaded, where, choice, target, optimizer)
    made = _checked(loaded, where, lambda: target(optimizer, **options))
    if not isinstance(made, LRScheduler):
        raise _refused(
            loaded, where, f'"{choice.name}" gives {type(made).__name__}', "an LRScheduler is wanted"
        )
    return made


def build_stack(loaded: Loaded, path: str, hooks: tuple[Choice, ...], *, inside_host: bool = False) -> Stack:
    """A stack of hooks.

    Args:
        loaded: the pipeline.
        path: where the hooks stand in the file.
        hooks: in the order in which a payload meets them.
        inside_host: only the ranks of one host go through it: of `hierarchical` that leaves its hooks
            `within`.
    """
    named = []
    for place, written in enumerate(hooks):
        choice = loaded.filled(f"{path}[{place}]", written)
        chosen = [(choice.name, dict(choice.options))]
        if inside_host and choice.name == "hierarchical" and choice.source == "built-in":
            chosen = [parse_spec(spec) for spec in choice.options.get("within", ())]
        for name, options in chosen:
            try:
                named.append((name, make_hook(name, options)))
            except HookSetupError as error:
                raise _refused(loaded, _key(f"{path}[{place}]", choice), str(error)) from None
    try:
        return Stack(named, described=repr([choice.plain() for choice in hooks]))
    except HookSetupError as error:
        raise _refused(loaded, path, str(error)) from None


def build_mutation(loaded: Loaded, path: str, choice: Choice) -> Callable[[nn.Module], Any]:
    """What changes a rank's weights: a function of the model."""
    choice = loaded.filled(path, choice)
    if choice.source == "built-in":
        return functools.partial(MUTATIONS[choice.name], **choice.options)
    return _function(loaded, path, choice, None)


def build_update(
    loaded: Loaded, path: str, choice: Choice
) -> Callable[[nn.Module, Callable[[], Tensor]], Any]:
    """What a forward stage does in a step: a function of the model and of its score."""
    choice = loaded.filled(path, choice)
    if choice.source == "built-in":
        return functools.partial(UPDATES[choice.name], **choice.options)
    return _function(loaded, path, choice, None, None)


def _function(loaded: Loaded, path: str, choice: Choice, *positional: Any) -> Callable[..., Any]:
    """A dotted function with its options bound."""
    target, where = _imported(loaded, path, choice), _key(path, choice)
    if not callable(target):
        raise _refused(loaded, where, f'"{choice.name}" cannot be called', "a function is wanted")
    _bind(loaded, where, choice, target, *positional)
    return functools.partial(target, **choice.options)


def build_metric(loaded: Loaded, path: str, choice: Choice) -> Callable[[Any, Any], Any]:
    """A dotted metric: a function of (output, target) that returns a number."""
    choice = loaded.filled(path, choice)
    target = _imported(loaded, path, choice)
    if not callable(target):
        raise _refused(
            loaded, _key(path, choice), f'"{choice.name}" cannot be called', "a function is wanted"
        )
    return lambda output, wanted: target(output, wanted, **choice.options)


def _dataset(loaded: Loaded, path: str, choice: Choice) -> Split:
    choice = loaded.filled(path, choice)
    if choice.source == "built-in":
        try:
            return DATA[choice.name](folder=loaded.folder, **choice.options)
        except DataError as error:
            raise _refused(loaded, _key(path, choice), str(error)) from None
    made = _call(loaded, path, choice)
    if not (hasattr(made, "__iter__") or hasattr(made, "__getitem__")):
        raise _refused(
            loaded,
            _key(path, choice),
            f'"{choice.name}" gives {type(made).__name__}',
            "a map-style or iterable PyTorch dataset is wanted",
        )
    if not is_iterable(made) and not hasattr(made, "__len__"):
        raise _refused(
            loaded, _key(path, choice), f'"{choice.name}" has no __len__', "a map-style dataset has one"
        )
    return Split(made, None)


def _call(loaded: Loaded, path: str, choice: Choice) -> Any:
    target = _imported(loaded, path, choice)
    where = _key(path, choice)
    if not callable(target):
        raise _refused(
            loaded,
            where,
            f'"{choice.name}" is {type(target).__name__}, which cannot be called',
            "a class or a function is wanted",
        )
    _bind(loaded, where, choice, target)
    return target(**choice.options)


def _imported(loaded: Loaded, path: str, choice: Choice) -> Any:
    try:
        return import_dotted(choice.name, _WANTED[choice.kind])
    except UntrustedError as error:
        raise _refused(loaded, _key(path, choice), str(error), error.allowed) from None
    except TrustSettingError as error:
        raise _refused(loaded, _key(path, choice), str(error)) from None
    except DottedNameError as error:
        raise _refused(
            loaded,
            _key(path, choice),
            str(error),
            f"names are looked for among what is installed, then in {loaded.folder}",
        ) from None


def _bind(loaded: Loaded, where: str, choice: Choice, target: Any, *positional: Any) -> None:
    """Hold the options against the signature of what they are for."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # written in C: it tells when it is called
    try:
        signature.bind(*positional, **choice.options)
    except TypeError as error:
        takes = ", ".join(
            str(parameter) for parameter in list(signature.parameters.values())[len(positional) :]
        )
        raise _refused(loaded, where, f'"{choice.name}": {error}', f"it takes ({takes})") from None


def _checked(loaded: Loaded, where: str, make: Callable[[], Any]) -> Any:
    """Call a constructor of torch, whose ValueErrors are about the options."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise _refused(loaded, where, str(error)) from None


def _key(path: str, choice: Choice) -> str:
    return f"{path}.{choice.name}" if "." not in choice.name else path


def _refused(loaded: Loaded, path: str, problem: str, allowed: str | None = None) -> PipelineError:
    return PipelineError([loaded.fault(path, problem, allowed)])


def check_sync(loaded: Loaded, model: nn.Module, ranks: int) -> None:
    """Refuse what only a run can see of sync policies and hooks.

    Args:
        loaded: the pipeline.
        model: of this rank.
        ranks: how many there are.

    Raises:
        PipelineError: a source that is no rank, more fragments than parameters, hooks on complex gradients.
    """
    faults = []
    count = len(averaged_parameters(model))
    is_complex = any(param.is_complex() and param.requires_grad for param in model.parameters())
    for stage in loaded.pipeline.stages:
        path, sources = stage.path, [stage.source] if isinstance(stage, BroadcastStage) else []
        if isinstance(stage, StepStage):
            settings = stage.effective(loaded.pipeline)
            path = f"{stage.key_path('sync')}.{settings.sync.name}"
            transfers = settings.plan.transfers
            sources = [one.source for one in transfers if one.source is not None]
            fragments = max([0, *(one.fragment[1] for one in transfers)])
            if fragments > max(1, count):
                text = f"{fragments} fragments of {count} parameters: each needs at least one"
                faults.append(loaded.fault(f"{path}.fragments", text, f"at most {count}"))
            if is_complex and settings.gradients and settings.hooks:
                text = "the model has complex parameters, and hooks carry gradients of real numbers only"
                faults.append(loaded.fault(stage.key_path("hooks"), text, "remove the hooks"))
        for source in sources:
            if source >= ranks:
                text = f"there is no rank {source}: the run has {ranks} ranks"
                faults.append(loaded.fault(f"{path}.source", text, f"0 to {ranks - 1}"))
    if faults:
        raise PipelineError(faults)
