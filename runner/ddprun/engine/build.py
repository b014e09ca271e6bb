"""From what the file chooses to live objects; errors that only a run can see name their place in the file."""

import functools
import inspect
import operator
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from ddprun.config import (
    BroadcastStage,
    Choice,
    DataPair,
    EvaluateStage,
    LoadedPipeline,
    PipelineError,
    StepStage,
    tensor_options,
)
from ddprun.config.choices import CHOICE_KINDS, parse_object_spec
from ddprun.config.tree import KeyPath, format_path, parse_path
from ddprun.engine.data import ErrorFactory, is_iterable_dataset
from ddprun.engine.model_with_loss import ModelWithLoss, bare_model, loss_joins_model
from ddprun.engine.samples import CollateFunction
from ddprun.engine.stateful_metric import StatefulMetric
from ddprun.engine.turns import Turns
from ddprun.engine.weights import freeze_in_all_stages
from ddprun.units import format_count
from ddprun.zoo.data import DATASETS, DataError, TrainEvalSplit
from ddprun.zoo.models import MODELS
from ddprun.zoo.weight_functions import WEIGHT_FUNCTIONS
from ddprun_hooks.config.import_path import import_trusted
from ddprun_hooks.config.trust import (
    FOLDER_PREFIX,
    TRUST_VARIABLE,
    ExpectedObject,
    TrustSettingError,
    UntrustedError,
    read_trust_policy,
)
from ddprun_hooks.errors import ImportPathError

_T = TypeVar("_T")

_REQUIREMENTS_BY_KIND = {  # what an import path must lead to, by the kind of a choice
    kind: ExpectedObject(f"expected {CHOICE_KINDS[kind].dotted_description}", base, methods, returns, kind)
    for kind, base, methods, returns in (
        ("model", nn.Module, (), nn.Module),
        ("data", Dataset, ("__getitem__", "__iter__"), None),
        ("loss", nn.Module, (), None),
        ("optimizer", Optimizer, (), Optimizer),
        ("schedule", LRScheduler, (), LRScheduler),
        ("mutate", None, (), None),
        ("update", None, (), None),
        ("metric", None, ("compute",), None),
        ("collate", None, ("__call__",), None),
        ("sampler", Sampler, ("__iter__",), None),
        ("transform", None, ("__call__",), None),
        ("weight", None, (), None),
    )
}


@dataclass(slots=True)
class ChoiceBuilder:
    """Builds what a choice of the file, or an object in its options, names; errors point at its place."""

    loaded: LoadedPipeline
    key: KeyPath
    kind: str
    name: str
    source: str
    options: dict[str, Any]

    @classmethod
    def from_key_path(cls, loaded: LoadedPipeline, path: str, choice: Choice) -> "ChoiceBuilder":
        """A choice at a key path. The objects in the options of an import path are made."""
        key = tuple(segment for segment, _ in parse_path(path))
        options = dict(loaded.expand_env_and_folder(path, choice).options)
        if choice.source == "dotted":
            options = {
                name: _build_option(loaded, value, (*key, choice.name, name))
                for name, value in options.items()
            }
        key = key if "." in choice.name else (*key, choice.name)
        return cls(loaded, key, choice.kind, choice.name, choice.source, options)

    def error(self, problem: str, allowed: str | None = None) -> PipelineError:
        return self.loaded.error(format_path(self.key), problem, allowed)

    def import_target(self) -> Any:
        try:
            return import_trusted(self.name, _REQUIREMENTS_BY_KIND.get(self.kind))
        except UntrustedError as error:
            raise self.error(str(error), error.allowed) from None
        except TrustSettingError as error:
            raise self.error(str(error)) from None
        except ImportPathError as error:
            root, folder = self.name.partition(".")[0], self.loaded.folder
            where = f"names are looked up among installed packages, then in {folder}"
            if not folder.is_dir():  # of a run that is resumed
                again = f"ddprun PIPELINE --run-dir {shlex.quote(str(self.loaded.path.parent))} --or-resume"
                where += f", which is gone: if it has moved, resume with {again}"
            own = next((path for path in (folder / f"{root}.py", folder / root) if path.exists()), None)
            found = getattr(sys.modules.get(root), "__file__", None)
            if own is not None and found is not None and not Path(found).is_relative_to(folder):
                where = f'"{root}" is {found}, which comes before {own}: rename yours'
            if read_trust_policy().restricts_imports:
                where += f", there only what {TRUST_VARIABLE} lists as {FOLDER_PREFIX}package"
            raise self.error(str(error), where) from None
        except Exception as error:  # of the module itself
            error.add_note(self._with_location(f'while importing "{self.name}"'))
            raise

    def bound_callable(self, *positional: Any, wanted: str = "a function") -> Callable[..., Any]:
        """The imported target with its options; a PipelineError if these and `positional` do not fit it."""
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
                allowed = f"it takes ({takes})"
                if not self.kind and str(error).startswith("missing"):  # an object in the options
                    allowed += f"; {{ref: {self.name}}} passes {self.name} itself, without calling it"
                raise self.error(f'"{self.name}": {error}', allowed) from None
        return functools.partial(target, **self.options)

    def call_target(self) -> Any:
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
        return self.loaded.fault(format_path(self.key), text).headline

    def factory_with_argument(self, argument: str, value: Any) -> Callable[[], Any]:
        """A factory of objects over `value`, given as `argument` or, if free, as the first one."""
        target = self.import_target()
        try:
            takes = dict(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            takes = {}
        first = [name for name, one in takes.items() if one.kind is not one.KEYWORD_ONLY][:1]
        if argument in takes and argument not in first:
            self.options = {argument: value, **self.options}
        elif next(iter(takes), None) not in self.options:
            return functools.partial(self.bound_callable(value), value)
        return self.bound_callable()

    def construct(self, torch_module: Any, value: Any, expected_type: type[_T], *, argument: str = "") -> _T:
        """An object of torch's, or of a dotted class, over `value`: the first argument, or if there is one
        of that name, `argument`. ValueErrors are about its options.
        """
        make: Callable[[], Any]
        if self.source == "torch":
            make = functools.partial(getattr(torch_module, self.name), value, **self.options)
        elif argument:
            make = self.factory_with_argument(argument, value)
        else:
            make = functools.partial(self.bound_callable(value), value)
        made = self.call_constructor(make)
        if not isinstance(made, expected_type):
            raise self.error(self.describe_result(made), f"expected an {expected_type.__name__}")
        return made

    def call_constructor(self, make: Callable[[], _T]) -> _T:
        """Call a constructor; its ValueError or TypeError becomes a PipelineError, and of torch's also a
        RuntimeError or ArithmeticError.
        """
        try:
            return make()
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            if isinstance(error, RuntimeError | ArithmeticError) and self.source != "torch":
                raise
            raise self.error(str(error), "; ".join(self._hints(error)) or None) from None

    def describe_result(self, made: Any) -> str:
        return f'"{self.name}" gives {type(made).__name__}'


def _build_option(loaded: LoadedPipeline, value: Any, key: KeyPath) -> Any:
    """An option of an import path, with the objects that it refers to built, innermost first."""
    wanted = parse_object_spec(value)
    if wanted is not None:
        key = (*key, wanted.key)
        given = wanted.options or {}
        options = {name: _build_option(loaded, item, (*key, name)) for name, item in given.items()}
        chosen = ChoiceBuilder(loaded, key, "", wanted.name, "dotted", options)
        return chosen.import_target() if wanted.options is None else chosen.call_target()
    if isinstance(value, dict):
        return {name: _build_option(loaded, item, (*key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_build_option(loaded, item, (*key, index)) for index, item in enumerate(value)]
    return value


def build_model(loaded: LoadedPipeline) -> nn.Module:
    chosen = ChoiceBuilder.from_key_path(loaded, "model", loaded.pipeline.model)
    made = MODELS[chosen.name](**chosen.options) if chosen.source == "built-in" else chosen.call_target()
    if not isinstance(made, nn.Module):
        raise chosen.error(chosen.describe_result(made), _REQUIREMENTS_BY_KIND["model"].description)
    return made


def move_and_convert_model(
    loaded: LoadedPipeline, model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """A model on its device, in the file's memory format. With `sync_batchnorm`, its BatchNorm is
    converted, except on a CPU, where torch has no SyncBatchNorm.
    """
    pipeline = loaded.pipeline
    lazy = any(map(is_lazy, (*model.parameters(), *model.buffers())))
    for key in ("sync_batchnorm", "channels_last") if lazy else ():
        if getattr(pipeline, key):
            text = "torch cannot convert modules with lazy parameters"
            raise loaded.error(key, text, "give the modules their numbers of features")
    if pipeline.sync_batchnorm and device.type != "cpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    model = model.to(device=device, dtype=dtype)
    held = [*model.parameters(), *model.buffers()] if pipeline.channels_last else []
    for tensor in held:
        if tensor.dim() == 4:  # torch's own conversion fails on those of 3D convolutions
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return model


@dataclass(slots=True)
class HeldOutData:
    """Data to evaluate on."""

    dataset: Any  # None: there is none
    make_error: ErrorFactory  # at its place in the file
    collate: CollateFunction | None


def build_datasets(loaded: LoadedPipeline) -> tuple[Any, HeldOutData]:
    """Training data, and what is held out."""
    data = loaded.pipeline.data
    if not isinstance(data, DataPair):
        train, rest = build_dataset(loaded, "data", data)
        return train, _wrap_held_out(loaded, "data", data, rest)
    path, choice = "data.evaluate", data.evaluate
    rest = None if choice is None else build_dataset(loaded, path, choice).train
    held_out = _wrap_held_out(loaded, path, choice, rest)
    return build_dataset(loaded, "data.train", data.train).train, held_out


def build_dataset(loaded: LoadedPipeline, path: str, choice: Choice) -> TrainEvalSplit:
    """The data that a choice names: training data, and evaluation data if a built-in brings some."""
    chosen = ChoiceBuilder.from_key_path(loaded, path, choice)
    if chosen.source == "built-in":
        try:
            return DATASETS[chosen.name](folder=loaded.folder, **chosen.options)
        except DataError as error:
            raise chosen.error(str(error)) from None
    made = chosen.call_target()
    if not (hasattr(made, "__iter__") or hasattr(made, "__getitem__")):
        raise chosen.error(chosen.describe_result(made), "expected a map-style or iterable PyTorch dataset")
    if not is_iterable_dataset(made) and not hasattr(made, "__len__"):
        raise chosen.error(f'"{chosen.name}" has no __len__', "a map-style dataset has one")
    if isinstance(made, DataLoader):
        allowed = "give the data set itself; batch_size, workers and collate are under `loader`"
        raise chosen.error(chosen.describe_result(made), allowed)
    return TrainEvalSplit(made, None)


def data_error_factory(loaded: LoadedPipeline, path: str, choice: Choice | None) -> ErrorFactory:
    """Makes errors about data that a run has read, at its place in the file."""
    name = choice and choice.name
    return lambda problem, allowed: loaded.error(path, f'"{name}": {problem}', allowed)


def build_stage_held_out(loaded: LoadedPipeline) -> dict[int, HeldOutData]:
    """The data of evaluate stages that name some, by their index in `stages`."""
    found = {}
    for stage in loaded.pipeline.stages:
        if isinstance(stage, EvaluateStage) and stage.data is not None:
            path, choice = f"{stage.path}.data", stage.data
            dataset = build_dataset(loaded, path, choice).train
            found[stage.index] = _wrap_held_out(loaded, path, choice, dataset)
    return found


def _wrap_held_out(loaded: LoadedPipeline, path: str, choice: Choice | None, dataset: Any) -> HeldOutData:
    collate = build_collate(loaded, held_out=True)
    return HeldOutData(dataset, data_error_factory(loaded, path, choice), collate)


def build_collate(loaded: LoadedPipeline, *, held_out: bool = False) -> CollateFunction | None:
    """What makes a batch of a list of samples; None: torch's `default_collate`."""
    loader = loaded.pipeline.loader
    own = loader.evaluate_collate if held_out else None
    choice = own or loader.collate
    if choice is None:
        return None
    path = "loader.evaluate_collate" if own else "loader.collate"
    return _build_unary_callable(loaded, path, choice, "a list of samples")


def _build_unary_callable(
    loaded: LoadedPipeline, path: str, choice: Choice, argument: str
) -> Callable[[Any], Any]:
    """A function with its options, or an object of a class with these: either is called with one argument."""
    chosen = ChoiceBuilder.from_key_path(loaded, path, choice)
    if not inspect.isclass(chosen.import_target()):
        return chosen.bound_callable(None)
    made: Callable[[Any], Any] = chosen.call_target()
    try:
        inspect.signature(made).bind(None)
    except TypeError as error:
        allowed = f"objects of the class are called with {argument}"
        raise chosen.error(f"{chosen.describe_result(made)}: {error}", allowed) from None
    return made


def build_sampler_order(loaded: LoadedPipeline, dataset: Any) -> Callable[[int], list[int]] | None:
    """What gives an epoch's indices by the file's sampler, under generators that the caller has seeded."""
    choice = loaded.pipeline.loader.sampler
    if choice is None:
        return None
    chosen = ChoiceBuilder.from_key_path(loaded, "loader.sampler", choice)
    make = chosen.factory_with_argument("dataset", dataset)

    def order(epoch: int) -> list[int]:
        sampler = make()
        if isinstance(sampler, DistributedSampler):
            problem = f'"{chosen.name}" divides the samples among ranks, and ddprun would divide them again'
            raise chosen.error(problem, "name a sampler that yields the order for all ranks")
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        try:
            indices = [operator.index(index) for index in sampler]
        except TypeError as error:
            problem = f"{chosen.describe_result(sampler)}: {error}"
            raise chosen.error(problem, "a sampler yields indices, one at a time") from None
        wrong = next((index for index in indices if not 0 <= index < len(dataset)), None)
        if wrong is not None:
            size = f"a data set with {len(dataset)} samples"
            raise chosen.error(f'"{chosen.name}" gives the index {wrong} of {size}')
        return indices

    return order


def build_batch_weight_function(loaded: LoadedPipeline) -> Callable[[Any], Any] | None:
    """The user's `weight_by` function of a batch: the weight of its mean loss. None: there is none."""
    choice = loaded.pipeline.weight_by
    if choice is None or choice.source == "built-in":
        return None
    return ChoiceBuilder.from_key_path(loaded, "weight_by", choice).bound_callable(None)


def build_transform(loaded: LoadedPipeline) -> Callable[[Any], Any] | None:
    """What changes a batch in training; None: nothing does."""
    choice = loaded.pipeline.batch.transform
    return None if choice is None else _build_unary_callable(loaded, "batch.transform", choice, "a batch")


def build_loss(loaded: LoadedPipeline) -> Callable[[Any, Any], Tensor] | None:
    """The loss as a function of (output, target), on the CPU; None where the model returns its own."""
    chosen = ChoiceBuilder.from_key_path(loaded, "loss", loaded.pipeline.loss)
    if chosen.source == "built-in":
        return None
    made: Callable[[Any, Any], Tensor]
    if chosen.source == "torch":
        tensors = tensor_options(chosen.name)
        options = {
            name: torch.tensor(value, dtype=torch.float32) if name in tensors and value is not None else value
            for name, value in chosen.options.items()
        }
        made = chosen.call_constructor(lambda: getattr(nn, chosen.name)(**options))
    elif inspect.isclass(target := chosen.import_target()):
        made = chosen.call_target()
    elif any(isinstance(option, nn.Module) for option in chosen.options.values()):
        text = "a loss that is a function has a module among its options, which nothing would train"
        raise chosen.error(text, "write a class, an nn.Module, that holds the module")
    else:
        made = functools.partial(target, **chosen.options) if chosen.options else target
    return made


def join_loss_and_freeze(
    loaded: LoadedPipeline, model: nn.Module, loss: object, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """What is trained: the model, on its device already, and a loss that is a module, moved there; frozen as
    the file says. A PipelineError: nothing is left to train, or both have a parameter or buffer of one name.
    """
    joined = model
    if loss_joins_model(loss):
        joined = ModelWithLoss(model, loss.to(device=device, dtype=dtype))
        of_model = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
        of_loss = {f"loss.{name}" for name, _ in chain(loss.named_parameters(), loss.named_buffers())}
        if both := of_model & of_loss:
            text = f'the model has a "{min(both)}" of its own, which is also the name of a part of the loss'
            raise loaded.error("loss", text, "rename the model's part")
    if not any(param.requires_grad for param in joined.parameters()):
        raise loaded.error("model", f'"{loaded.pipeline.model.name}" has no parameter to train')
    freeze_in_all_stages(loaded, joined)
    return joined


def build_mutate_or_update(loaded: LoadedPipeline, path: str, choice: Choice) -> Callable[..., Any]:
    """A `mutate` of (model), an `update` of (model, closure); dotted ones get the model without its loss."""
    chosen = ChoiceBuilder.from_key_path(loaded, path, choice)
    if chosen.source == "built-in":
        return functools.partial(WEIGHT_FUNCTIONS[chosen.name], **chosen.options)
    function = chosen.bound_callable(*([None] if choice.kind == "mutate" else [None, None]))
    return lambda model, *closure: function(bare_model(model), *closure)


def build_custom_metric(
    loaded: LoadedPipeline, path: str, choice: Choice, device: torch.device
) -> Callable[..., Any] | StatefulMetric:
    """A dotted metric: a function of (output, target) that returns a number, or one that accumulates."""
    chosen = ChoiceBuilder.from_key_path(loaded, path, choice)
    if not inspect.isclass(target := chosen.import_target()):
        return chosen.bound_callable(None, None)
    if not (hasattr(target, "update") and hasattr(target, "compute")):
        problem = f'"{chosen.name}" lacks update or compute'
        raise chosen.error(problem, _REQUIREMENTS_BY_KIND["metric"].description)
    return StatefulMetric(lambda: chosen.call_constructor(chosen.call_target), chosen.error, device)


def check_sync_fits_run(loaded: LoadedPipeline, turns: Turns, world_size: int) -> None:
    """Refuse sources, hosts and fragments that this world and model lack, and hooks on complex gradients."""
    faults = []
    for stage in loaded.pipeline.stages:
        path, sources = stage.path, [stage.source] if isinstance(stage, BroadcastStage) else []
        if isinstance(stage, StepStage):
            settings, trained = stage.effective_settings(loaded.pipeline), turns.of_stage[stage.index]
            count, is_complex = len(trained), any(param.is_complex() for param in trained.values())
            path = f"{stage.key_path('sync')}.{settings.sync.name}"
            transfers = settings.plan.transfers
            sources = [one.source for one in transfers if one.source is not None]
            fragments = max([0, *(one.fragment[1] for one in transfers)])
            if fragments > max(1, count):
                text = f"{fragments} fragments of {count} trained parameters: each needs at least one"
                faults.append(loaded.fault(f"{path}.fragments", text, f"at most {count}"))
            if (hosts := settings.plan.hosts) and world_size % hosts:
                text = f"{hosts} hosts cannot share {world_size} ranks equally"
                faults.append(loaded.fault(f"{path}.hosts", text, f"a number that divides {world_size}"))
            if is_complex and settings.plan.gradients and settings.hooks:
                text = "the model has complex parameters, and hooks carry gradients of real numbers only"
                faults.append(loaded.fault(stage.key_path("hooks"), text, "remove the hooks"))
        for source in sources:
            if source >= world_size:
                text = f"there is no rank {source}: the run has {format_count(world_size, 'rank')}"
                faults.append(loaded.fault(f"{path}.source", text, f"at most {world_size - 1}"))
    if faults:
        raise PipelineError(dict.fromkeys(faults))
