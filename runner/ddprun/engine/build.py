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
    EvaluateStage,
    LoadedPipeline,
    PipelineError,
    StepStage,
    length_option,
    tensor_options,
)
from ddprun.config.choices import parse_object_ref
from ddprun.config.signatures import torch_options_model
from ddprun.config.tree import KeyPath, parse_path
from ddprun.engine.data import ErrorFactory, Feed, is_iterable
from ddprun.engine.samples import Collate
from ddprun.engine.stateful_metric import StatefulMetric
from ddprun.engine.weights import freeze, parameter_groups
from ddprun.sync.frozen import trainable_parameters
from ddprun.zoo.data import DATASETS, DataError, Split
from ddprun.zoo.models import MODELS
from ddprun_hooks.config.import_path import import_trusted
from ddprun_hooks.config.options import parse_spec
from ddprun_hooks.config.trust import ExpectedObject, TrustSettingError, UntrustedError
from ddprun_hooks.errors import DottedNameError, HookSetupError
from ddprun_hooks.registry import make_hook
from ddprun_hooks.stack import Stack

_T = TypeVar("_T")


def noise(model: nn.Module, *, std: float) -> None:
    """Mutation: add Gaussian noise, drawn from this rank's own generator, to every parameter that is trained;
    `std` is in units of the weights.
    """
    with torch.no_grad():
        for param in trainable_parameters(model).values():
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


_BUILT_IN_FUNCTIONS: dict[str, Callable[..., None]] = {
    "noise": noise,
    "evolution_strategies": evolution_strategies,
}

_REQUIREMENTS_BY_KIND = {
    expected.kind: expected
    for expected in (
        ExpectedObject(
            "a model is an nn.Module class or a function that returns one",
            nn.Module,
            returns=nn.Module,
            kind="model",
        ),
        ExpectedObject(
            "data is a Dataset class or a function that returns a dataset",
            Dataset,
            ("__getitem__", "__iter__"),
            kind="data",
        ),
        ExpectedObject(
            "a loss is a function of (output, target) or an nn.Module class", nn.Module, kind="loss"
        ),
        ExpectedObject("an Optimizer class is wanted", Optimizer, returns=Optimizer, kind="optimizer"),
        ExpectedObject("an LRScheduler class is wanted", LRScheduler, returns=LRScheduler, kind="schedule"),
        ExpectedObject("a function of (model) is wanted", kind="mutate"),
        ExpectedObject("a function of (model, closure) is wanted", kind="update"),
        ExpectedObject(
            "a metric is a function of (output, target), or a class with update and compute",
            methods=("compute",),
            kind="metric",
        ),
        ExpectedObject(
            "a function of (samples) or a class of such objects is wanted",
            methods=("__call__",),
            kind="collate",
        ),
        ExpectedObject(
            "a Sampler class or a function that gives indices is wanted",
            Sampler,
            ("__iter__",),
            kind="sampler",
        ),
        ExpectedObject("a function of (batch) is wanted", kind="weight"),
    )
}  # by the kind of a choice


class _ChoiceBuilder:
    """Builds what a choice of the file, or an object in its options, names; errors point at its place in the
    file.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        key: KeyPath,
        kind: str,
        name: str,
        source: str,
        options: Mapping[str, Any],
    ) -> None:
        self.loaded, self.key, self.kind, self.name, self.source = loaded, key, kind, name, source
        self.options = dict(options)

    @classmethod
    def from_path(cls, loaded: LoadedPipeline, path: str, choice: Choice) -> "_ChoiceBuilder":
        """A choice at a key path. The objects in the options of a dotted name are made."""
        key = tuple(segment for segment, _ in parse_path(path))
        options = loaded.fill_placeholders(path, choice).options
        if choice.source == "dotted":
            options = {
                name: _build_option(loaded, value, (*key, choice.name, name))
                for name, value in options.items()
            }
        key = key if "." in choice.name else (*key, choice.name)
        return cls(loaded, key, choice.kind, choice.name, choice.source, options)

    def error(self, problem: str, allowed: str | None = None) -> PipelineError:
        return self.loaded.error(self.key, problem, allowed)

    def import_target(self) -> Any:
        """What a dotted name leads to."""
        try:
            return import_trusted(self.name, _REQUIREMENTS_BY_KIND.get(self.kind))
        except UntrustedError as error:
            raise self.error(str(error), error.allowed) from None
        except TrustSettingError as error:
            raise self.error(str(error)) from None
        except DottedNameError as error:
            where = f"names are looked up among installed packages, then in {self.loaded.folder}"
            raise self.error(str(error), where) from None
        except Exception as error:  # of the module itself
            error.add_note(self._with_location(f'while importing "{self.name}"'))
            raise

    def bound_callable(self, *positional: Any, wanted: str = "a function") -> Callable[..., Any]:
        """The imported target with its options bound. Raises a PipelineError if the options do not fit its
        signature together with `positional`.
        """
        target = self.import_target()
        if not callable(target):
            problem = f'"{self.name}" is of type {type(target).__name__}, which cannot be called'
            raise self.error(problem, f"write the name of {wanted}")
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
                raise self.error(f'"{self.name}": {error}', f"it takes ({takes})") from None
        return functools.partial(target, **self.options)

    def call(self) -> Any:
        """What a dotted class or function makes. What it raises gets a note of its place in the file."""
        make = self.bound_callable(wanted="a class or a function")
        try:
            return make()
        except Exception as error:
            error.add_note(self._with_location(f'while calling "{self.name}"'))
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

    def _with_location(self, text: str) -> str:
        """A text prefixed with its place in the file."""
        return self.loaded.fault(self.key, text).headline

    def factory_over_dataset(self, dataset: Any) -> Callable[[], Any]:
        """A factory of an object over a data set, which is passed as the argument `dataset`, or else as the
        first one, unless the options set that.
        """
        target = self.import_target()
        try:
            names = list(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            names = []
        if "dataset" in names:
            self.options = {"dataset": dataset, **self.options}
            return self.bound_callable()
        if names and names[0] in self.options:
            return self.bound_callable()
        return functools.partial(self.bound_callable(dataset), dataset)

    def construct(self, torch_module: Any, first: Any, expected_type: type[_T]) -> _T:
        """An object of torch's, or of a dotted class, over `first`; ValueErrors are about its options."""
        if self.source == "torch":
            make: Callable[..., Any] = functools.partial(getattr(torch_module, self.name), **self.options)
        else:
            make = self.bound_callable(first)
        made = self.call_constructor(lambda: make(first))
        if not isinstance(made, expected_type):
            raise self.error(self.describe_result(made), f"an {expected_type.__name__} is wanted")
        return made

    def call_constructor(self, make: Callable[[], _T]) -> _T:
        """Call a constructor; a ValueError or TypeError of it becomes a PipelineError about the options."""
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise self.error(str(error)) from None

    def describe_result(self, made: Any) -> str:
        return f'"{self.name}" gives {type(made).__name__}'


def _build_option(loaded: LoadedPipeline, value: Any, key: KeyPath) -> Any:
    """An option of a dotted name, with the objects that it refers to built, innermost first."""
    wanted = parse_object_ref(value)
    if wanted is not None:
        key = (*key, wanted.key)
        options = {
            name: _build_option(loaded, item, (*key, name)) for name, item in (wanted.options or {}).items()
        }
        chosen = _ChoiceBuilder(loaded, key, "", wanted.name, "dotted", options)
        return chosen.import_target() if wanted.options is None else chosen.call()
    if isinstance(value, dict):
        return {name: _build_option(loaded, item, (*key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_build_option(loaded, item, (*key, index)) for index, item in enumerate(value)]
    return value


def build_model(loaded: LoadedPipeline) -> nn.Module:
    """The model that the file chooses, on the CPU, with what it freezes."""
    chosen = _ChoiceBuilder.from_path(loaded, "model", loaded.pipeline.model)
    made = MODELS[chosen.name](**chosen.options) if chosen.source == "built-in" else chosen.call()
    if not isinstance(made, nn.Module):
        raise chosen.error(chosen.describe_result(made), _REQUIREMENTS_BY_KIND["model"].description)
    if not any(param.requires_grad for param in made.parameters()):
        raise chosen.error(f'"{chosen.name}" has no parameter to train')
    freeze(loaded, made)
    return made


def build_data(loaded: LoadedPipeline) -> Split:
    """Training data, and evaluation data where there is any."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        evaluate = _dataset(loaded, "data.evaluate", data.evaluate).train if data.evaluate else None
        return Split(_dataset(loaded, "data.train", data.train).train, evaluate)
    return _dataset(loaded, "data", data)


def _dataset(loaded: LoadedPipeline, path: str, choice: Choice) -> Split:
    chosen = _ChoiceBuilder.from_path(loaded, path, choice)
    if chosen.source == "built-in":
        try:
            return DATASETS[chosen.name](folder=loaded.folder, **chosen.options)
        except DataError as error:
            raise chosen.error(str(error)) from None
    made = chosen.call()
    if not (hasattr(made, "__iter__") or hasattr(made, "__getitem__")):
        raise chosen.error(chosen.describe_result(made), "a map-style or iterable PyTorch dataset is wanted")
    if not is_iterable(made) and not hasattr(made, "__len__"):
        raise chosen.error(f'"{chosen.name}" has no __len__', "a map-style dataset has one")
    return Split(made, None)


def data_error(
    loaded: LoadedPipeline, path: str, choice: Choice, problem: str, allowed: str | None
) -> PipelineError:
    """An error about data that a run has read, at its place in the file."""
    return loaded.error(path, f'"{choice.name}": {problem}', allowed)


@dataclass(slots=True)
class HeldOutData:
    """Data to evaluate on."""

    dataset: Any  # None: there is none
    path: str  # key path of its choice in the file
    choice: Choice | None
    sharded: bool | None = None  # each rank has samples of its own; None: ranks have not compared them


def build_held_out(loaded: LoadedPipeline, dataset: Any) -> HeldOutData:
    """The held-out data of `data`, around a `dataset` that has been built."""
    data = loaded.pipeline.data
    if isinstance(data, DataPair):
        return HeldOutData(dataset, "data.evaluate", data.evaluate)
    return HeldOutData(dataset, "data", data)


def build_stage_held_out(loaded: LoadedPipeline) -> dict[int, HeldOutData]:
    """The data of evaluate stages that name some, by their index in `stages`."""
    return {
        stage.index: HeldOutData(_dataset(loaded, path, stage.data).train, path, stage.data)
        for stage in loaded.pipeline.stages
        if isinstance(stage, EvaluateStage) and stage.data is not None and (path := f"{stage.path}.data")
    }


def build_collate(loaded: LoadedPipeline) -> Collate | None:
    """What makes a batch of a list of samples; None: torch's `default_collate`."""
    choice = loaded.pipeline.loader.collate
    if choice is None:
        return None
    chosen = _ChoiceBuilder.from_path(loaded, "loader.collate", choice)
    if not inspect.isclass(chosen.import_target()):
        return chosen.bound_callable([])
    made: Collate = chosen.call()
    allowed = "objects of the class are called with a list of samples"
    if not callable(made):
        raise chosen.error(chosen.describe_result(made), allowed)
    return made


def build_sampler_order(loaded: LoadedPipeline, dataset: Any) -> Callable[[int], list[int]] | None:
    """A function that gives the indices of an epoch, from a sampler that is built for it; None: the file
    names no sampler.

    Whoever calls it has seeded the generators from which samplers draw.
    """
    choice = loaded.pipeline.loader.sampler
    if choice is None:
        return None
    chosen = _ChoiceBuilder.from_path(loaded, "loader.sampler", choice)
    make = chosen.factory_over_dataset(dataset)

    def order(epoch: int) -> list[int]:
        sampler = make()
        if isinstance(sampler, DistributedSampler):
            raise chosen.error(
                f'"{chosen.name}" divides the samples among ranks, and ddprun does so once more',
                "name a sampler of the whole order",
            )
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        try:
            indices = [operator.index(index) for index in sampler]
        except TypeError as error:
            problem = f"{chosen.describe_result(sampler)}: {error}"
            raise chosen.error(problem, "it gives indices, one by one") from None
        wrong = next((index for index in indices if not 0 <= index < len(dataset)), None)
        if wrong is not None:
            raise chosen.error(
                f'"{chosen.name}" gives the index {wrong} of a data set with {len(dataset)} samples'
            )
        return indices

    return order


@dataclass(frozen=True, slots=True)
class Feeds:
    """The training data of all stages, batch by batch."""

    main: Feed
    by_stage: Mapping[int, Feed]  # of stages with data of their own, by their index in `stages`

    def for_stage(self, stage: int) -> Feed:
        """What a stage reads."""
        return self.by_stage.get(stage, self.main)

    def by_name(self) -> dict[str, Feed]:
        """Each once, by its name in messages."""
        named = {f"data of stages[{index}]": feed for index, feed in self.by_stage.items()}
        return {"data": self.main} | named

    def state_dict(self) -> dict[str, Any]:
        """The position in each."""
        return {str(index): feed.state_dict() for index, feed in self.by_stage.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken; a stage that has no position begins its data."""
        for index, feed in self.by_stage.items():
            if str(index) in state:
                feed.load_state_dict(state[str(index)])


def open_feeds(
    loaded: LoadedPipeline,
    dataset: Any,
    *,
    rank: int,
    ranks: int,
    pin: bool = False,
    workers: int | None = None,
) -> Feeds:
    """The training data, `dataset`, and that of stages which name some; `workers`: not those of the file."""
    by_stage = dict[int, Feed]()
    share: dict[str, Any] = {"rank": rank, "ranks": ranks, "pin": pin, "workers": workers}
    for stage in loaded.pipeline.step_stages():
        if stage.data is not None:
            path = f"{stage.path}.data"
            make_error = functools.partial(data_error, loaded, path, stage.data)
            train = _dataset(loaded, path, stage.data).train
            by_stage[stage.index] = open_feed(loaded, train, make_error=make_error, **share)
    return Feeds(open_feed(loaded, dataset, **share), by_stage)


def open_feed(
    loaded: LoadedPipeline,
    dataset: Any,
    *,
    rank: int,
    ranks: int,
    pin: bool = False,
    workers: int | None = None,
    make_error: ErrorFactory | None = None,
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
        sampler_order=None if is_iterable(dataset) else build_sampler_order(loaded, dataset),
        pin=pin,
        make_error=make_error or functools.partial(data_error, loaded, path, loaded.pipeline.train_data()),
    )


def build_batch_weight(loaded: LoadedPipeline) -> Callable[[Any], Any] | None:
    """The user's `weight_by` function of a batch: the weight of its mean loss. None: there is none."""
    choice = loaded.pipeline.weight_by
    if choice is None or choice.source == "built-in":
        return None
    return _ChoiceBuilder.from_path(loaded, "weight_by", choice).bound_callable(None)


def build_loss(loaded: LoadedPipeline, device: torch.device) -> Callable[[Any, Any], Tensor] | None:
    """The loss as a function of (output, target); None where the model returns its own."""
    chosen = _ChoiceBuilder.from_path(loaded, "loss", loaded.pipeline.loss)
    if chosen.source == "built-in":
        return None
    if chosen.source == "torch":
        tensors = tensor_options("loss", chosen.name)
        options = {
            name: torch.tensor(value, dtype=torch.float32) if name in tensors and value is not None else value
            for name, value in chosen.options.items()
        }
        made = chosen.call_constructor(lambda: getattr(nn, chosen.name)(**options))
        return made.to(device)  # type: ignore[no-any-return]
    target = chosen.import_target()
    if not inspect.isclass(target):
        return functools.partial(target, **chosen.options) if chosen.options else target
    made = chosen.call()
    return made.to(device) if isinstance(made, nn.Module) else made


def build_optimizer(
    loaded: LoadedPipeline, model: nn.Module, choice: Choice | None = None, path: str = "optimizer"
) -> Optimizer:
    """The optimizer over all parameters that require a gradient, in groups if the file has some."""
    choice = choice or loaded.pipeline.optimizer
    options = []
    for index, group in enumerate(loaded.pipeline.groups):
        own = loaded.fill_placeholders(f"groups[{index}]", dict(group.options))
        if choice.source == "torch":  # lists become what torch takes
            model_of = torch_options_model("optimizer", choice.name)
            read = model_of.model_validate({**choice.options, **own})
            own = {key: getattr(read, key) for key in own}
        options.append(own)
    params = parameter_groups(loaded, model, options)
    return _ChoiceBuilder.from_path(loaded, path, choice).construct(torch.optim, params, Optimizer)


def optimizer_settings(
    loaded: LoadedPipeline, stage: StepStage, model: nn.Module, optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The optimizer's settings in one stage, for each parameter group."""
    if "optimizer" in stage.model_fields_set and stage.optimizer is not None:
        optimizer = build_optimizer(loaded, model, stage.optimizer, f"{stage.path}.optimizer")
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def build_schedule(
    loaded: LoadedPipeline, path: str, choice: Choice | None, optimizer: Optimizer, steps: int | None
) -> LRScheduler | None:
    """A schedule; a length that is left out becomes the `steps` of the stage, or of the run."""
    if choice is None:
        return None
    chosen = _ChoiceBuilder.from_path(loaded, path, choice)
    length = length_option(chosen.name, chosen.options) if chosen.source == "torch" else None
    if length is not None:
        if steps is None:
            raise chosen.error(
                f"{length} is left out, but nobody knows how many steps an epoch of iterable data has",
                f"write {length}, or give the stage steps instead of epochs",
            )
        chosen.options[length] = steps
    return chosen.construct(torch.optim.lr_scheduler, optimizer, LRScheduler)


def build_stack(
    loaded: LoadedPipeline, path: str, hooks: tuple[Choice, ...], *, inside_host: bool = False
) -> Stack:
    """A stack of hooks; inside one host, only the hooks `within` of `hierarchical` remain of it."""
    named = []
    for index, written in enumerate(hooks):
        chosen = _ChoiceBuilder.from_path(loaded, f"{path}[{index}]", written)
        specs = [(chosen.name, chosen.options)]
        if inside_host and chosen.name == "hierarchical" and chosen.source == "built-in":
            specs = [parse_spec(spec) for spec in chosen.options.get("within", ())]
        for name, options in specs:
            try:
                named.append((name, make_hook(name, options)))
            except HookSetupError as error:
                raise chosen.error(str(error)) from None
    try:
        return Stack(named, description=repr([choice.to_plain_data() for choice in hooks]))
    except HookSetupError as error:
        raise loaded.error(path, str(error)) from None


@dataclass(slots=True)
class Stacks:
    """The hook stacks of each stage, by the stage's index. Stages with the same hooks share a stack, so its
    state carries over.
    """

    all_ranks: dict[int, Stack] = field(default_factory=dict)
    # Among the ranks of one host, where `hierarchical` has one level less.
    within_hosts: dict[int, Stack] = field(default_factory=dict)
    by_description: dict[str, Stack] = field(default_factory=dict)  # each once, by its description, in order

    @property
    def first(self) -> Stack:
        """Of the first stage."""
        return next(iter(self.by_description.values()), Stack([]))

    def enter(self, stage: int) -> None:
        """A stage begins: its hooks take over the state of hooks of the same name in earlier stages."""
        for stacks in (self.all_ranks, self.within_hosts):
            stack = stacks[stage]
            stack.adopt_state([other for other in stacks.values() if other is not stack])

    def state_dict(self) -> dict[str, Any]:
        """State of every stack."""
        return {description: stack.state_dict() for description, stack in self.by_description.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. A stack whose description has changed takes over the state of hooks with the
        same names.
        """
        for description, own in self._assign_states(state).items():
            self.by_description[description].load_state_dict(own)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of all ranks, for ranks of another world or with other buckets."""
        assigned = [self._assign_states(state) for state in states]
        return {
            description: stack.merge([hooks[description] for hooks in assigned])
            for description, stack in self.by_description.items()
        }

    def _assign_states(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The state of each stack; no hook's state goes to two of them."""
        stacks = self.by_description
        assigned = {description: dict(state.get(description, {})) for description in stacks}
        for hooks in [hooks for description, hooks in state.items() if description not in stacks]:
            for name, own in hooks.items():
                heirs = (d for d, stack in stacks.items() if name in stack.names and name not in assigned[d])
                if heir := next(heirs, None):
                    assigned[heir][name] = own
        return assigned


def open_stacks(loaded: LoadedPipeline) -> Stacks:
    """Make the hooks of every stage that takes steps; a PipelineError names one that cannot be made."""
    opened = Stacks()
    names: dict[tuple[str, bool], str] = {}
    for stage in loaded.pipeline.step_stages():
        hooks = stage.effective_settings(loaded.pipeline).hooks
        path = stage.key_path("hooks")
        for inside, stacks in ((False, opened.all_ranks), (True, opened.within_hosts)):
            wanted = repr([hook.to_plain_data() for hook in hooks]), inside
            if wanted not in names:
                # A checkpoint has this name, so secrets in the hooks' options are hidden in it.
                name = f"{loaded.secrets.redact_pipeline([hook.to_plain_data() for hook in hooks])!r}"
                name += ", inside a host" if inside else ""
                while name in opened.by_description:
                    name += "'"
                names[wanted] = name
                opened.by_description[name] = build_stack(loaded, path, hooks, inside_host=inside)
            stacks[stage.index] = opened.by_description[names[wanted]]
    return opened


def build_function(loaded: LoadedPipeline, path: str, choice: Choice) -> Callable[..., Any]:
    """By the kind of the choice: a `mutate` of (model), or an `update` of (model, closure)."""
    chosen = _ChoiceBuilder.from_path(loaded, path, choice)
    if chosen.source == "built-in":
        return functools.partial(_BUILT_IN_FUNCTIONS[chosen.name], **chosen.options)
    return chosen.bound_callable(*([None] if choice.kind == "mutate" else [None, None]))


def build_metric(
    loaded: LoadedPipeline, path: str, choice: Choice, device: torch.device
) -> Callable[..., Any] | StatefulMetric:
    """A dotted metric: a function of (output, target) that returns a number, or one that accumulates."""
    chosen = _ChoiceBuilder.from_path(loaded, path, choice)
    if not inspect.isclass(target := chosen.import_target()):
        return chosen.bound_callable(None, None)
    if not (hasattr(target, "update") and hasattr(target, "compute")):
        problem = f'"{chosen.name}" lacks update or compute'
        raise chosen.error(problem, _REQUIREMENTS_BY_KIND["metric"].description)
    return StatefulMetric(lambda: chosen.call_constructor(chosen.call), chosen.error, device)


def check_metrics(loaded: LoadedPipeline, device: torch.device) -> None:
    """Refuse, by a PipelineError, dotted metrics that cannot be made, before a run trains for hours."""
    for stage in loaded.pipeline.stages:
        evaluation = stage if isinstance(stage, EvaluateStage) else getattr(stage, "evaluate", None)
        inside = "" if evaluation is stage else ".evaluate"
        for index, choice in enumerate(() if evaluation is None else evaluation.metrics):
            if choice.source != "built-in":
                build_metric(loaded, f"{stage.path}{inside}.metrics[{index}]", choice, device)


def check_sync(loaded: LoadedPipeline, model: nn.Module, ranks: int) -> None:
    """Refuse, by a PipelineError, what only a run of so many ranks can see of sync policies and hooks: a
    source that is no rank, more fragments than parameters, hooks on complex gradients.
    """
    faults = []
    count = len(trainable_parameters(model))
    is_complex = any(param.is_complex() and param.requires_grad for param in model.parameters())
    for stage in loaded.pipeline.stages:
        path, sources = stage.path, [stage.source] if isinstance(stage, BroadcastStage) else []
        if isinstance(stage, StepStage):
            settings = stage.effective_settings(loaded.pipeline)
            path = f"{stage.key_path('sync')}.{settings.sync.name}"
            transfers = settings.plan.transfers
            sources = [one.source for one in transfers if one.source is not None]
            fragments = max([0, *(one.fragment[1] for one in transfers)])
            if fragments > max(1, count):
                text = f"{fragments} fragments of {count} trained parameters: each needs at least one"
                faults.append(loaded.fault(f"{path}.fragments", text, f"at most {count}"))
            if is_complex and settings.gradient_averaging and settings.hooks:
                text = "the model has complex parameters, and hooks carry gradients of real numbers only"
                faults.append(loaded.fault(stage.key_path("hooks"), text, "remove the hooks"))
        for source in sources:
            if source >= ranks:
                text = f"there is no rank {source}: the run has {ranks} ranks"
                faults.append(loaded.fault(f"{path}.source", text, f"0 to {ranks - 1}"))
    if faults:
        raise PipelineError(faults)
