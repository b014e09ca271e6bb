"""From what the file chooses to live objects; errors that only a run can see name their place in the file."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ddprun.config import (
    BroadcastStage,
    Choice,
    DataPair,
    Evaluate,
    Loaded,
    PipelineError,
    StepStage,
    length_option,
    tensor_options,
)
from ddprun.engine.accumulating import Accumulating
from ddprun.engine.data import is_iterable
from ddprun.sync.synchronizer import averaged_parameters
from ddprun.zoo.data import DATA, DataError, Split
from ddprun.zoo.models import MODELS
from ddprun_hooks.config.import_path import import_dotted
from ddprun_hooks.config.options import parse_spec
from ddprun_hooks.config.trust import TrustSettingError, UntrustedError, Wanted
from ddprun_hooks.errors import DottedNameError, HookSetupError
from ddprun_hooks.registry import make_hook
from ddprun_hooks.stack import Stack

_T = TypeVar("_T")


def noise(model: nn.Module, *, std: float) -> None:
    """Mutation: add Gaussian noise, drawn from this rank's own generator, to every parameter that has a mean;
    `std` is in units of the weights.
    """
    with torch.no_grad():
        for param in averaged_parameters(model).values():
            param.add_(torch.randn_like(param), alpha=std)


def evolution_strategies(
    model: nn.Module, score: Callable[[], Tensor], *, std: float, population: int
) -> None:
    """Leave an estimate of the gradient in the parameters' `grad`, for the optimizer to step on.

    Each of `population` random directions ε is tried forwards and backwards (antithetic sampling), and the
    estimate is the mean of ε (L(w + std ε) - L(w - std ε)) / (2 std)
    (Salimans et al. 2017, arXiv:1703.03864, section 2).
    `score` gives the loss of the model as it is, shape (); `std` is in units of the weights, which end as
    they were.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    own = [param.detach().clone() for param in params]
    estimate = [torch.zeros_like(param) for param in params]
    with torch.no_grad():
        for _ in range(population):
            direction = [torch.randn_like(param) for param in params]
            losses = []
            for sign in (1.0, -1.0):
                for param, value, change in zip(params, own, direction, strict=True):
                    torch.add(value, change, alpha=sign * std, out=param)
                losses.append(score())
            slope = (losses[0] - losses[1]) / (2 * std * population)
            for total, change in zip(estimate, direction, strict=True):
                total.add_(change * slope.to(change.dtype))
        for param, value in zip(params, own, strict=True):
            param.copy_(value)
    for param, total in zip(params, estimate, strict=True):
        param.grad = total


_FUNCTIONS: dict[str, Callable[..., None]] = {"noise": noise, "evolution_strategies": evolution_strategies}

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
        Wanted(
            "a metric is a function of (output, target), or a class with update and compute",
            methods=("compute",),
            kind="metric",
        ),
    )
}  # by the kind of a choice


class _Chosen:
    """A choice of the file, at its place in it."""

    def __init__(self, loaded: Loaded, path: str, choice: Choice) -> None:
        self.loaded, self.kind = loaded, choice.kind
        self.name, self.source = choice.name, choice.source
        self.options = dict(loaded.filled(path, choice).options)
        self.key = path if "." in self.name else f"{path}.{self.name}"

    def refused(self, problem: str, allowed: str | None = None) -> PipelineError:
        return self.loaded.error(self.key, problem, allowed)

    def imported(self) -> Any:
        """What a dotted name leads to."""
        try:
            return import_dotted(self.name, _WANTED[self.kind])
        except UntrustedError as error:
            raise self.refused(str(error), error.allowed) from None
        except TrustSettingError as error:
            raise self.refused(str(error)) from None
        except DottedNameError as error:
            where = f"names are looked up among installed packages, then in {self.loaded.folder}"
            raise self.refused(str(error), where) from None

    def callable(self, *positional: Any, wanted: str = "a function") -> Callable[..., Any]:
        """The same with its options, which must fit its signature next to positional arguments."""
        target = self.imported()
        if not callable(target):
            problem = f'"{self.name}" is of type {type(target).__name__}, which cannot be called'
            raise self.refused(problem, f"write the name of {wanted}")
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):
            pass  # written in C: the call itself will say
        else:
            try:
                signature.bind(*positional, **self.options)
            except TypeError as error:
                takes = ", ".join(map(str, list(signature.parameters.values())[len(positional) :]))
                raise self.refused(f'"{self.name}": {error}', f"it takes ({takes})") from None
        return functools.partial(target, **self.options)

    def call(self) -> Any:
        """What a dotted class or function makes."""
        return self.callable(wanted="a class or a function")()

    def construct(self, of_torch: Any, first: Any, wanted: type[_T]) -> _T:
        """An object of torch's, or of a dotted class, over `first`; ValueErrors are about its options."""
        if self.source == "torch":
            make: Callable[..., Any] = functools.partial(getattr(of_torch, self.name), **self.options)
        else:
            make = self.callable(first)
        made = self.checked(lambda: make(first))
        if not isinstance(made, wanted):
            raise self.refused(self.gives(made), f"an {wanted.__name__} is wanted")
        return made

    def checked(self, make: Callable[[], _T]) -> _T:
        """Call a constructor of torch, whose errors are about the options."""
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise self.refused(str(error)) from None

    def gives(self, made: Any) -> str:
        return f'"{self.name}" gives {type(made).__name__}'


def build_model(loaded: Loaded) -> nn.Module:
    """The model that the file chooses, on the CPU."""
    chosen = _Chosen(loaded, "model", loaded.pipeline.model)
    if chosen.source == "built-in":
        return MODELS[chosen.name](**chosen.options)
    made = chosen.call()
    if not isinstance(made, nn.Module):
        raise chosen.refused(chosen.gives(made), _WANTED["model"].words)
    if not any(param.requires_grad for param in made.parameters()):
        raise chosen.refused(f'"{chosen.name}" has no parameter to train')
    return made


def build_data(loaded: Loaded) -> Split:
    """Training data, and evaluation data where there is any."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        evaluate = _dataset(loaded, "data.evaluate", data.evaluate).train if data.evaluate else None
        return Split(_dataset(loaded, "data.train", data.train).train, evaluate)
    return _dataset(loaded, "data", data)


def _dataset(loaded: Loaded, path: str, choice: Choice) -> Split:
    chosen = _Chosen(loaded, path, choice)
    if chosen.source == "built-in":
        try:
            return DATA[chosen.name](folder=loaded.folder, **chosen.options)
        except DataError as error:
            raise chosen.refused(str(error)) from None
    made = chosen.call()
    if not (hasattr(made, "__iter__") or hasattr(made, "__getitem__")):
        raise chosen.refused(chosen.gives(made), "a map-style or iterable PyTorch dataset is wanted")
    if not is_iterable(made) and not hasattr(made, "__len__"):
        raise chosen.refused(f'"{chosen.name}" has no __len__', "a map-style dataset has one")
    return Split(made, None)


def data_refused(
    loaded: Loaded, part: Literal["train", "evaluate"], problem: str, allowed: str | None
) -> PipelineError:
    """An error about the data that a run has read, at its place in the file."""
    data = loaded.pipeline.data
    pair = isinstance(data, DataPair)
    chosen: Any = getattr(data, part) if pair else data
    path = f"data.{part}" if pair else "data"
    return loaded.error(path, f'"{chosen.name}": {problem}', allowed)


def build_loss(loaded: Loaded, device: torch.device) -> Callable[[Any, Any], Tensor] | None:
    """The loss as a function of (output, target); None where the model returns its own."""
    chosen = _Chosen(loaded, "loss", loaded.pipeline.loss)
    if chosen.source == "built-in":
        return None
    if chosen.source == "torch":
        tensors = tensor_options("loss", chosen.name)
        options = {
            name: torch.tensor(value, dtype=torch.float32) if name in tensors and value is not None else value
            for name, value in chosen.options.items()
        }
        made = chosen.checked(lambda: getattr(nn, chosen.name)(**options))
        return made.to(device)  # type: ignore[no-any-return]
    target = chosen.imported()
    if not inspect.isclass(target):
        return functools.partial(target, **chosen.options) if chosen.options else target
    made = chosen.call()
    return made.to(device) if isinstance(made, nn.Module) else made


def build_optimizer(
    loaded: Loaded, model: nn.Module, choice: Choice | None = None, path: str = "optimizer"
) -> Optimizer:
    """The optimizer over all parameters that require a gradient."""
    params = [param for param in model.parameters() if param.requires_grad]
    return _Chosen(loaded, path, choice or loaded.pipeline.optimizer).construct(
        torch.optim, params, Optimizer
    )


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
    """A schedule; a length that is left out becomes the `steps` of the stage, or of the run."""
    if choice is None:
        return None
    chosen = _Chosen(loaded, path, choice)
    length = length_option(chosen.name, chosen.options) if chosen.source == "torch" else None
    if length is not None:
        if steps is None:
            raise chosen.refused(
                f"{length} is left out, but nobody knows how many steps an epoch of iterable data has",
                f"write {length}, or give the stage steps instead of epochs",
            )
        chosen.options[length] = steps
    return chosen.construct(torch.optim.lr_scheduler, optimizer, LRScheduler)


def build_stack(loaded: Loaded, path: str, hooks: tuple[Choice, ...], *, inside_host: bool = False) -> Stack:
    """A stack of hooks; inside one host, only the hooks `within` of `hierarchical` remain of it."""
    named = []
    for index, written in enumerate(hooks):
        chosen = _Chosen(loaded, f"{path}[{index}]", written)
        specs = [(chosen.name, chosen.options)]
        if inside_host and chosen.name == "hierarchical" and chosen.source == "built-in":
            specs = [parse_spec(spec) for spec in chosen.options.get("within", ())]
        for name, options in specs:
            try:
                named.append((name, make_hook(name, options)))
            except HookSetupError as error:
                raise chosen.refused(str(error)) from None
    try:
        return Stack(named, described=repr([choice.plain() for choice in hooks]))
    except HookSetupError as error:
        raise loaded.error(path, str(error)) from None


@dataclass(slots=True)
class Stacks:
    """The hooks of each stage, by its index in `stages`. Stages with the same hooks share them; their state
    goes from stage to stage.
    """

    all_ranks: dict[int, Stack] = field(default_factory=dict)
    # Among the ranks of one host, where `hierarchical` has one level less.
    within_hosts: dict[int, Stack] = field(default_factory=dict)
    used: dict[str, Stack] = field(default_factory=dict)  # each once, by its description, in order

    @property
    def first(self) -> Stack:
        """Of the first stage."""
        return next(iter(self.used.values()), Stack([]))

    def enter(self, stage: int) -> None:
        """A stage begins: its hooks take over the state of hooks of the same name in earlier stages."""
        for stacks in (self.all_ranks, self.within_hosts):
            stack = stacks[stage]
            stack.adopt_state([other for other in stacks.values() if other is not stack])

    def state_dict(self) -> dict[str, Any]:
        """State of every stack."""
        return {described: stack.state_dict() for described, stack in self.used.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring it back. Hooks of a stack that is described otherwise now take over what is of their name."""
        for described, own in self._assigned(state).items():
            self.used[described].load_state_dict(own)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of all ranks, for ranks of another world or with other buckets."""
        assigned = [self._assigned(state) for state in states]
        return {
            described: stack.merge([hooks[described] for hooks in assigned])
            for described, stack in self.used.items()
        }

    def _assigned(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The state of each stack; no hook's state goes to two of them."""
        found = {described: dict(state.get(described, {})) for described in self.used}
        for hooks in [hooks for described, hooks in state.items() if described not in self.used]:
            for name, own in hooks.items():
                heirs = (d for d, stack in self.used.items() if name in stack.names and name not in found[d])
                if heir := next(heirs, None):
                    found[heir][name] = own
        return found


def open_stacks(loaded: Loaded) -> Stacks:
    """Make the hooks of every stage that takes steps; a PipelineError names one that cannot be made."""
    found = Stacks()
    names: dict[tuple[str, bool], str] = {}
    for stage in loaded.pipeline.step_stages():
        hooks = stage.effective(loaded.pipeline).hooks
        path = stage.key_path("hooks")
        for inside, stacks in ((False, found.all_ranks), (True, found.within_hosts)):
            wanted = repr([hook.plain() for hook in hooks]), inside
            if wanted not in names:
                # A checkpoint has this name, so secrets in the hooks' options are hidden in it.
                name = f"{loaded.secrets.hidden([hook.plain() for hook in hooks])!r}"
                name += ", inside a host" if inside else ""
                while name in found.used:
                    name += "'"
                names[wanted] = name
                found.used[name] = build_stack(loaded, path, hooks, inside_host=inside)
            stacks[stage.index] = found.used[names[wanted]]
    return found


def build_function(loaded: Loaded, path: str, choice: Choice) -> Callable[..., Any]:
    """By the kind of the choice: a `mutate` of (model), or an `update` of (model, score)."""
    chosen = _Chosen(loaded, path, choice)
    if chosen.source == "built-in":
        return functools.partial(_FUNCTIONS[chosen.name], **chosen.options)
    return chosen.callable(*([None] if choice.kind == "mutate" else [None, None]))


def build_metric(
    loaded: Loaded, path: str, choice: Choice, device: torch.device
) -> Callable[..., Any] | Accumulating:
    """A dotted metric: a function of (output, target) that returns a number, or one that accumulates."""
    chosen = _Chosen(loaded, path, choice)
    if not inspect.isclass(target := chosen.imported()):
        return chosen.callable(None, None)
    if not (hasattr(target, "update") and hasattr(target, "compute")):
        raise chosen.refused(f'"{chosen.name}" lacks update or compute', _WANTED["metric"].words)
    return Accumulating(lambda: chosen.checked(chosen.call), chosen.refused, device)


def check_metrics(loaded: Loaded, device: torch.device) -> None:
    """Refuse, by a PipelineError, dotted metrics that cannot be made, before a run trains for hours."""
    for stage in loaded.pipeline.stages:
        evaluation = stage if isinstance(stage, Evaluate) else getattr(stage, "evaluate", None)
        inside = "" if evaluation is stage else ".evaluate"
        for index, choice in enumerate(() if evaluation is None else evaluation.metrics):
            if choice.source != "built-in":
                build_metric(loaded, f"{stage.path}{inside}.metrics[{index}]", choice, device)


def check_sync(loaded: Loaded, model: nn.Module, ranks: int) -> None:
    """Refuse, by a PipelineError, what only a run of so many ranks can see of sync policies and hooks: a
    source that is no rank, more fragments than parameters, hooks on complex gradients.
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
