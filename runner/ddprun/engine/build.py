"""From what the file chooses to live objects; errors that only a run can see name their place in the file."""

import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, DistributedSampler, Sampler

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
from ddprun.config.choices import object_ref
from ddprun.config.signatures import options_model
from ddprun.config.tree import KeyPath, parse_path
from ddprun.engine.data import Feed, Refuse, is_iterable
from ddprun.engine.samples import Collate
from ddprun.engine.stateful_metric import StatefulMetric
from ddprun.engine.weights import freeze, parameter_groups
from ddprun.sync.frozen import trained_parameters
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
    """Mutation: add Gaussian noise, drawn from this rank's own generator, to every parameter that is trained;
    `std` is in units of the weights.
    """
    with torch.no_grad():
        for param in trained_parameters(model).values():
            param.add_(torch.randn_like(param), alpha=std)


def evolution_strategies(
    model: nn.Module, closure: Callable[[], Tensor], *, std: float, population: int
) -> None:
    """Leave an estimate of the gradient in the parameters' `grad`, for the optimizer to step on.

    Each of `population` random directions ε is tried forwards and backwards (antithetic sampling), and the
    estimate is the mean of ε (L(w + std ε) - L(w - std ε)) / (2 std)
    (Salimans et al. 2017, arXiv:1703.03864, section 2).
    `closure` gives the loss of the model as it is, shape (); `std` is in units of the weights, which end as
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
                losses.append(closure())
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
        Wanted("a function of (model, closure) is wanted", kind="update"),
        Wanted(
            "a metric is a function of (output, target), or a class with update and compute",
            methods=("compute",),
            kind="metric",
        ),
        Wanted(
            "a function of (samples) or a class of such objects is wanted",
            methods=("__call__",),
            kind="collate",
        ),
        Wanted(
            "a Sampler class or a function that gives indices is wanted",
            Sampler,
            ("__iter__",),
            kind="sampler",
        ),
        Wanted("a function of (batch) is wanted", kind="weight"),
    )
}  # by the kind of a choice


class _Chosen:
    """A choice of the file, or an object that its options ask for, at its place in the file."""

    def __init__(
        self, loaded: Loaded, key: KeyPath, kind: str, name: str, source: str, options: Mapping[str, Any]
    ) -> None:
        self.loaded, self.key, self.kind, self.name, self.source = loaded, key, kind, name, source
        self.options = dict(options)

    @classmethod
    def at(cls, loaded: Loaded, path: str, choice: Choice) -> "_Chosen":
        """A choice at a key path. The objects in the options of a dotted name are made."""
        key = tuple(segment for segment, _ in parse_path(path))
        options = loaded.filled(path, choice).options
        if choice.source == "dotted":
            options = {
                name: _made(loaded, value, (*key, choice.name, name)) for name, value in options.items()
            }
        key = key if "." in choice.name else (*key, choice.name)
        return cls(loaded, key, choice.kind, choice.name, choice.source, options)

    def refused(self, problem: str, allowed: str | None = None) -> PipelineError:
        return self.loaded.error(self.key, problem, allowed)

    def imported(self) -> Any:
        """What a dotted name leads to."""
        try:
            return import_dotted(self.name, _WANTED.get(self.kind))
        except UntrustedError as error:
            raise self.refused(str(error), error.allowed) from None
        except TrustSettingError as error:
            raise self.refused(str(error)) from None
        except DottedNameError as error:
            where = f"names are looked up among installed packages, then in {self.loaded.folder}"
            raise self.refused(str(error), where) from None
        except Exception as error:  # of the module itself
            error.add_note(self._at(f'while importing "{self.name}"'))
            raise

    def callable(self, *positional: Any, wanted: str = "a function") -> Callable[..., Any]:
        """The same with its options, which must fit its signature next to positional arguments."""
        target = self.imported()
        if not callable(target):
            problem = f'"{self.name}" is of type {type(target).__name__}, which cannot be called'
            raise self.refused(problem, f"write the name of {wanted}")
        try:
            # A class may wrap its `__init__` to take more than that shows, as transformers does.
            signature = inspect.signature(target, follow_wrapped=not inspect.isclass(target))
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
        """What a dotted class or function makes. What it raises gets a note of its place in the file."""
        make = self.callable(wanted="a class or a function")
        try:
            return make()
        except Exception as error:
            error.add_note(self._at(f'while calling "{self.name}"'))
            for note in self._hints(error):
                error.add_note(note)
            raise

    def _hints(self, error: Exception) -> Iterator[str]:
        """What may be wrong with the options, as far as an error of the call shows."""
        name = error.filename if isinstance(error, FileNotFoundError) else None
        if isinstance(name, str) and not os.path.isabs(name):
            yield (
                f"a relative path is looked up in the current folder, {os.getcwd()}; "
                f'"{{here}}/{name}" is in the folder of the pipeline'
            )
        for key, value in self.options.items():
            module, _, attribute = value.rpartition(".") if isinstance(value, str) else ("", "", "")
            if hasattr(sys.modules.get(module), attribute):
                yield f'{key}: "{value}" is passed on as a string; {{ref: {value}}} passes the object itself'

    def _at(self, text: str) -> str:
        """A text behind its place in the file."""
        return self.loaded.fault(self.key, text).headline

    def over_dataset(self, dataset: Any) -> Callable[[], Any]:
        """What makes an object over a data set: its argument `dataset`, or else the first, unless the options
        give that.
        """
        target = self.imported()
        try:
            names = list(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            names = []
        if "dataset" in names:
            self.options = {"dataset": dataset, **self.options}
            return self.callable()
        if names and names[0] in self.options:
            return self.callable()
        return functools.partial(self.callable(dataset), dataset)

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


def _made(loaded: Loaded, value: Any, key: KeyPath) -> Any:
    """An option of a dotted name with the objects that it asks for, innermost first."""
    wanted = object_ref(value)
    if wanted is not None:
        key = (*key, wanted.step)
        options = {name: _made(loaded, item, (*key, name)) for name, item in (wanted.options or {}).items()}
        chosen = _Chosen(loaded, key, "", wanted.name, "dotted", options)
        return chosen.imported() if wanted.options is None else chosen.call()
    if isinstance(value, dict):
        return {name: _made(loaded, item, (*key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_made(loaded, item, (*key, index)) for index, item in enumerate(value)]
    return value


def build_model(loaded: Loaded) -> nn.Module:
    """The model that the file chooses, on the CPU, with what it freezes."""
    chosen = _Chosen.at(loaded, "model", loaded.pipeline.model)
    made = MODELS[chosen.name](**chosen.options) if chosen.source == "built-in" else chosen.call()
    if not isinstance(made, nn.Module):
        raise chosen.refused(chosen.gives(made), _WANTED["model"].words)
    if not any(param.requires_grad for param in made.parameters()):
        raise chosen.refused(f'"{chosen.name}" has no parameter to train')
    freeze(loaded, made)
    return made


def build_data(loaded: Loaded) -> Split:
    """Training data, and evaluation data where there is any."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        evaluate = _dataset(loaded, "data.evaluate", data.evaluate).train if data.evaluate else None
        return Split(_dataset(loaded, "data.train", data.train).train, evaluate)
    return _dataset(loaded, "data", data)


def _dataset(loaded: Loaded, path: str, choice: Choice) -> Split:
    chosen = _Chosen.at(loaded, path, choice)
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


def refused_data(
    loaded: Loaded, path: str, choice: Choice, problem: str, allowed: str | None
) -> PipelineError:
    """An error about data that a run has read, at its place in the file."""
    return loaded.error(path, f'"{choice.name}": {problem}', allowed)


@dataclass(slots=True)
class HeldOut:
    """Data to evaluate on."""

    dataset: Any  # None: there is none
    path: str  # where the file chooses it
    choice: Choice | None
    sharded: bool | None = None  # each rank has samples of its own; None: ranks have not compared them


def held_out(loaded: Loaded, dataset: Any) -> HeldOut:
    """What `data` holds out for evaluation; `dataset` is made already."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        return HeldOut(dataset, "data.evaluate", data.evaluate)
    return HeldOut(dataset, "data", data)


def held_out_of_stages(loaded: Loaded) -> dict[int, HeldOut]:
    """The data of evaluate stages that name some, by their index in `stages`."""
    return {
        stage.index: HeldOut(_dataset(loaded, path, stage.data).train, path, stage.data)
        for stage in loaded.pipeline.stages
        if isinstance(stage, Evaluate) and stage.data is not None and (path := f"{stage.path}.data")
    }


def build_collate(loaded: Loaded) -> Collate | None:
    """What makes a batch of a list of samples; None: torch's `default_collate`."""
    choice = loaded.pipeline.loader.collate
    if choice is None:
        return None
    chosen = _Chosen.at(loaded, "loader.collate", choice)
    if not inspect.isclass(chosen.imported()):
        return chosen.callable([])
    made: Collate = chosen.call()
    if not callable(made):
        raise chosen.refused(chosen.gives(made), "objects of the class are called with a list of samples")
    return made


def build_order(loaded: Loaded, dataset: Any) -> Callable[[int], list[int]] | None:
    """A function of an epoch that gives its indices, by a sampler that is made for it; None: there is none.

    Whoever calls it has seeded the generators from which samplers draw.
    """
    choice = loaded.pipeline.loader.sampler
    if choice is None:
        return None
    chosen = _Chosen.at(loaded, "loader.sampler", choice)
    make = chosen.over_dataset(dataset)

    def order(epoch: int) -> list[int]:
        sampler = make()
        if isinstance(sampler, DistributedSampler):
            raise chosen.refused(
                f'"{chosen.name}" divides the samples among ranks, and ddprun does so once more',
                "name a sampler of the whole order",
            )
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        try:
            indices = [operator.index(index) for index in sampler]
        except TypeError as error:
            raise chosen.refused(
                f"{chosen.gives(sampler)}: {error}", "it gives indices, one by one"
            ) from None
        wrong = next((index for index in indices if not 0 <= index < len(dataset)), None)
        if wrong is not None:
            raise chosen.refused(
                f'"{chosen.name}" gives the index {wrong} of a data set with {len(dataset)} samples'
            )
        return indices

    return order


@dataclass(frozen=True, slots=True)
class Feeds:
    """The training data of all stages, batch by batch."""

    main: Feed
    own: Mapping[int, Feed]  # of stages with data of their own, by their index in `stages`

    def of(self, stage: int) -> Feed:
        """What a stage reads."""
        return self.own.get(stage, self.main)

    def named(self) -> dict[str, Feed]:
        """Each once, by its name in messages."""
        return {"data": self.main} | {f"data of stages[{index}]": feed for index, feed in self.own.items()}

    def state_dict(self) -> dict[str, Any]:
        """The position in each."""
        return {str(index): feed.state_dict() for index, feed in self.own.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a stage that has no position begins its data."""
        for index, feed in self.own.items():
            if str(index) in state:
                feed.load_state_dict(state[str(index)])


def open_feeds(
    loaded: Loaded, dataset: Any, *, rank: int, ranks: int, pin: bool = False, workers: int | None = None
) -> Feeds:
    """The training data, `dataset`, and that of stages which name some; `workers`: not those of the file."""
    own = dict[int, Feed]()
    share: dict[str, Any] = {"rank": rank, "ranks": ranks, "pin": pin, "workers": workers}
    for stage in loaded.pipeline.step_stages():
        if stage.data is not None:
            path = f"{stage.path}.data"
            refuse = functools.partial(refused_data, loaded, path, stage.data)
            own[stage.index] = open_feed(
                loaded, _dataset(loaded, path, stage.data).train, refuse=refuse, **share
            )
    return Feeds(open_feed(loaded, dataset, **share), own)


def open_feed(
    loaded: Loaded,
    dataset: Any,
    *,
    rank: int,
    ranks: int,
    pin: bool = False,
    workers: int | None = None,
    refuse: Refuse | None = None,
) -> Feed:
    """Training data, batch by batch; `workers`: not those of the file."""
    path = "data.train" if isinstance(loaded.pipeline.data, DataPair) else "data"
    loader = loaded.pipeline.loader
    return Feed(
        dataset,
        loader if workers is None else loader.model_copy(update={"workers": workers}),
        seed=loaded.pipeline.seed,
        rank=rank,
        ranks=ranks,
        collate=build_collate(loaded),
        order=None if is_iterable(dataset) else build_order(loaded, dataset),
        pin=pin,
        refuse=refuse or functools.partial(refused_data, loaded, path, loaded.pipeline.train_data()),
    )


def build_weight(loaded: Loaded) -> Callable[[Any], Any] | None:
    """The pipeline's own function of (batch) that says what its mean loss counts; None: there is none."""
    choice = loaded.pipeline.weight_by
    if choice is None or choice.source == "built-in":
        return None
    return _Chosen.at(loaded, "weight_by", choice).callable(None)


def build_loss(loaded: Loaded, device: torch.device) -> Callable[[Any, Any], Tensor] | None:
    """The loss as a function of (output, target); None where the model returns its own."""
    chosen = _Chosen.at(loaded, "loss", loaded.pipeline.loss)
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
    """The optimizer over all parameters that require a gradient, in groups if the file has some."""
    choice = choice or loaded.pipeline.optimizer
    options = []
    for index, group in enumerate(loaded.pipeline.groups):
        own = loaded.filled(f"groups[{index}]", dict(group.options))
        if choice.source == "torch":  # lists become what torch takes
            model_of = options_model("optimizer", choice.name)
            read = model_of.model_validate({**choice.options, **own})
            own = {key: getattr(read, key) for key in own}
        options.append(own)
    params = parameter_groups(loaded, model, options)
    return _Chosen.at(loaded, path, choice).construct(torch.optim, params, Optimizer)


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
    chosen = _Chosen.at(loaded, path, choice)
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
        chosen = _Chosen.at(loaded, f"{path}[{index}]", written)
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
    """By the kind of the choice: a `mutate` of (model), or an `update` of (model, closure)."""
    chosen = _Chosen.at(loaded, path, choice)
    if chosen.source == "built-in":
        return functools.partial(_FUNCTIONS[chosen.name], **chosen.options)
    return chosen.callable(*([None] if choice.kind == "mutate" else [None, None]))


def build_metric(
    loaded: Loaded, path: str, choice: Choice, device: torch.device
) -> Callable[..., Any] | StatefulMetric:
    """A dotted metric: a function of (output, target) that returns a number, or one that accumulates."""
    chosen = _Chosen.at(loaded, path, choice)
    if not inspect.isclass(target := chosen.imported()):
        return chosen.callable(None, None)
    if not (hasattr(target, "update") and hasattr(target, "compute")):
        raise chosen.refused(f'"{chosen.name}" lacks update or compute', _WANTED["metric"].words)
    return StatefulMetric(lambda: chosen.checked(chosen.call), chosen.refused, device)


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
    count = len(trained_parameters(model))
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
                text = f"{fragments} fragments of {count} trained parameters: each needs at least one"
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
