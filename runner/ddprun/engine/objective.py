"""From a batch to a loss, in its precision; and the passes before step 1: what buffers do, DDP's buckets."""

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddprun.config import LoadedPipeline, PipelineError
from ddprun.config.built_in_options import WeightByTargetsOptions
from ddprun.engine.data import Feed, all_gather_number
from ddprun.engine.model_with_loss import loss_joins_model
from ddprun.engine.samples import describe_sample
from ddprun.engine.seeding import preserve_rng_state, preserve_state
from ddprun.engine.turns import Turns
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.buffers import BufferUse, clone_buffers, load_buffers, probe_buffer_use
from ddprun.units import abbreviated_list
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.gpu import CopyStream, GpuStreams

_TARGETS_HINT = "write weight_by: {targets: {of: labels}}, with the key of the targets"

# Means over the targets that count, each by its class's weight.
_CROSS_ENTROPIES: tuple[Any, ...] = (nn.CrossEntropyLoss, nn.NLLLoss)
if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    _CROSS_ENTROPIES = (*_CROSS_ENTROPIES, nn.LinearCrossEntropyLoss)

_BATCH_NORM_ERROR = "more than 1 value per channel"  # torch's, of a batch of one sample
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class UnscaledGradScaler(torch.amp.GradScaler):
    """A GradScaler for gradients that are unscaled already.

    Torch's own divides by the loss scale after the reduction. Here the dispatcher has done it before the
    first hook saw the gradient, so that what travels and what error feedback keeps are true gradients; what
    is left to do is to look for non-finite values, skip the step, and move the scale. The reduction spreads a
    non-finite value to every rank, so all of them skip the same step.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, True)

    def step_and_update(self, optimizer: Optimizer) -> bool:
        """Step, unless a gradient is not finite, and move the scale; whether it did. Waits for the device."""
        found_inf = self._found_inf_per_device(optimizer)  # by `unscale_`
        finite = not sum(found.item() for found in found_inf.values())
        if finite:
            optimizer.step()
        self.update()
        return finite


class Precision:
    """One of the five kinds of `precision`, and the memory format of images.

    `fp32`; `bf16` and `fp16`: autocast, weights stay fp32; `pure_bf16` and `pure_fp16`: weights, gradients
    and optimizer state are half themselves. Both kinds of fp16 scale the loss.
    """

    def __init__(self, name: str, device: torch.device, *, channels_last: bool = False) -> None:
        self.device, self._channels_last = device, channels_last
        pure, half = name.startswith("pure_"), _HALF.get(name.removeprefix("pure_"))
        # What the model's floating-point parameters become; None leaves them as they are.
        self.parameter_dtype = half if pure else None
        self._autocast_dtype = None if pure else half
        # A half-precision loss passes its own scale on as a gradient, and fp16 ends below torch's 2^16.
        first_scale = 2.0**15 if pure else 2.0**16
        self.scaler = UnscaledGradScaler(device.type, first_scale) if half == torch.float16 else None
        self._copy_stream = CopyStream(GpuStreams(device)) if device.type == "cuda" else None

    def autocast(self) -> AbstractContextManager[None]:
        """Around forward and loss; does nothing for `fp32`, nor where weights are half themselves."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def to_device(self, content: Any, *, cast: bool = True) -> Any:
        """Move a batch to the device; a GPU copies while it still computes. `cast`: floats in the model's
        type and memory format. Objects with a `to` of their own move themselves, and keep their types.
        """
        if self._copy_stream is not None:
            content = map_tensors(content, self._copy_stream.copy_to_gpu, change_object=lambda one: one)
            self._copy_stream.block_current_stream()
        change = self._to_device_dtype if cast else partial(Tensor.to, device=self.device)
        return map_tensors(content, change, change_object=lambda one: one.to(self.device))

    def _to_device_dtype(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(self.device)
        images = self._channels_last and tensor.dim() == 4
        memory_format = torch.channels_last if images else torch.preserve_format
        return tensor.to(self.device, self.parameter_dtype or tensor.dtype, memory_format=memory_format)

    def loss_scale(self) -> Tensor | None:
        """The factor on the loss of this step, shape (); None where nothing is scaled."""
        if self.scaler is None:
            return None
        return self.scaler.scale(torch.ones((), device=self.device))

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide gradients that no hook has seen by the loss scale."""
        scale = self.loss_scale()
        if scale is not None:
            for param in parameters:
                if param.grad is not None:
                    param.grad.div_(scale)

    def note_nonfinite_gradients(self, optimizer: Optimizer) -> None:
        """Have the loss scaler note gradients that are not finite, before clipping would hide them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step; False if it was skipped because a gradient is not finite."""
        if self.scaler is None:
            optimizer.step()
            return True
        return self.scaler.step_and_update(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def map_tensors(
    content: Any, change: Callable[[Tensor], Tensor], change_object: Callable[[Any], Any] | None = None
) -> Any:
    """A batch, each of its tensors (in tuples, lists, mappings and dataclasses) changed. `change_object` is
    for objects that move as a whole, by a method `to`, such as a PackedSequence or a TensorDict.
    """
    if isinstance(content, Tensor):
        return change(content)
    onward = partial(map_tensors, change=change, change_object=change_object)
    # Tokenizers of Hugging Face give UserDicts, whose `to` waits for the device. Keys of a dict may be its
    # attributes, too.
    owner = type(content) if isinstance(content, dict) else content
    if change_object and not isinstance(content, UserDict) and callable(getattr(owner, "to", None)):
        return change_object(content)
    if isinstance(content, Mapping):
        mapped = {key: onward(value) for key, value in content.items()}
        if type(content) is dict or not isinstance(content, dict | UserDict):
            return mapped
        with suppress(Exception):  # one that cannot be changed becomes a plain dict
            same_class = copy.copy(content)
            for key, value in mapped.items():
                same_class[key] = value
            return same_class
        return mapped
    if isinstance(content, tuple | list):
        items = [onward(value) for value in content]
        if hasattr(content, "_fields"):
            return type(content)(*items)
        return tuple(items) if isinstance(content, tuple) else items
    if is_dataclass(content) and not isinstance(content, type):
        changed = copy.copy(content)
        for field in fields(content):
            object.__setattr__(changed, field.name, onward(getattr(content, field.name)))
        return changed
    return content


class ForwardResult(NamedTuple):
    """What one forward pass gave."""

    loss: Tensor  # shape ()
    output: Any  # what the model returned
    target: Any  # what the loss compared it with; the batch where the model returns its loss
    content: Any  # the batch
    values: Mapping[str, Tensor] = MappingProxyType({})  # numbers beside the loss, by name, shape () each


class Objective:
    """Calls the model on a batch and makes the loss, in a precision.

    A batch of (input, target) calls `model(input)` and `loss(output, target)`, where an input that is a
    mapping becomes keyword arguments. With `loss: model` it calls `model(input, target)`, and a batch that is
    a mapping becomes the model's keyword arguments, a tensor or an object its only argument. `batch` in the
    file names other parts.

    `loss` is of (output, target), or None: the model returns its own. `weight` is the file's own `weight_by`.
    `transform` changes the batches of training.
    The model or the loss may return a mapping with `loss` and other numbers. In a turn, the model's forward
    gets the name of the turn, and the loss is also one of these numbers, under this name.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        loss: Callable[[Any, Any], Any] | None,
        precision: Precision,
        weight: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._loaded, self.loss, self.precision, self._weight_function = loaded, loss, precision, weight
        self._transform = transform
        self._joined = loss_joins_model(loss)
        self.value_names: dict[str, None] = {}  # of numbers beside the loss, in the passes so far
        self.called: set[str | None] = set()  # the turns of passes so far
        self._batch, self._weight_by = loaded.pipeline.batch, loaded.pipeline.weight_by
        ignored = getattr(loss, "ignore_index", loaded.pipeline.loss.options.get("ignore_index"))
        # Targets of this value do not count; None: all do.
        self.ignore_index = ignored if isinstance(ignored, int) else None

    def transform_batch(self, content: Any) -> Any:
        """A batch as training weighs it: changed on the device by the file's `transform`, if there is one."""
        if self._transform is None:
            return content
        changed = self._transform(self.precision.to_device(content, cast=False))
        if changed is None:
            raise self._loaded.error("batch.transform", "gives None", "expected the changed batch")
        return changed

    def prepare_batch(self, content: Any) -> Any:
        """A batch as training passes it to calls: transformed, on the device, and cast."""
        return self.precision.to_device(self.transform_batch(content))

    def __call__(self, model: nn.Module, content: Any, turn: str | None = None) -> ForwardResult:
        """Forward and loss of what is trained; a PipelineError if batch, model and loss do not fit."""
        positional, named, target = self._split_batch(content)
        if turn is not None:
            named = {**named, "turn": turn}
        call = partial(self._output_and_loss, positional, named, target)
        with self.precision.autocast():
            output, loss, found = model(call) if self._joined else call(model, self.loss)
        if turn is not None:
            if torch.is_grad_enabled() and not loss.requires_grad:
                text = f'the loss of turn "{turn}" depends on no parameter that it trains'
                raise self._loaded.error("stages", text, f'check that forward knows a turn called "{turn}"')
            found[turn] = loss.detach().float()
        self.called.add(turn)
        self.value_names |= dict.fromkeys(found)
        return ForwardResult(loss, output, content if self.loss is None else target, content, found)

    def _output_and_loss(
        self,
        positional: Sequence[Any],
        named: Mapping[str, Any],
        target: Any,
        model: nn.Module,
        criterion: Callable[[Any, Any], Any] | None,
    ) -> tuple[Any, Tensor, dict[str, Tensor]]:
        try:
            output = model(*positional, **named)
        except Exception as error:
            error.add_note(f"the model was called as {describe_call('model', positional, named)}")
            if _BATCH_NORM_ERROR in str(error):
                error.add_note("write loader: {drop_last: true} if an epoch's last batch is a single sample")
            if criterion is None and self._batch.inputs is None and len(positional) > 1:
                error.add_note("write batch: {inputs: …} if its arguments are different")
            raise
        returned = output
        if criterion is not None:
            try:
                returned = criterion(output, target)
            except Exception as error:
                error.add_note(f"the loss was called as {describe_call('loss', (output, target))}")
                raise
        loss: Any = returned.get("loss") if isinstance(returned, Mapping) else returned
        if criterion is None and not isinstance(returned, Mapping | Tensor):
            loss = getattr(returned, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            problem = f"gives {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
            allowed = "expected one number: the mean over the batch"
            if criterion is None:
                problem = f"the model returned {type(returned).__name__} without a loss of one number"
                allowed = "with loss: model it returns the loss, or an object or mapping that has `loss`"
            raise self._loaded.error("loss", problem, allowed)
        loss = loss.reshape(())
        return output, loss, _numbers_beside_loss(returned, loss)

    def _split_batch(self, content: Any) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
        """The model's positional and named arguments, and the target."""
        wanted = self._batch
        if wanted.inputs is not None:
            inputs = self._pick(content, wanted.inputs, "batch.inputs")
            target = None if wanted.target is None else self._pick(content, wanted.target, "batch.target")
            if isinstance(wanted.inputs, Mapping):
                return (), inputs, target
            return inputs if isinstance(wanted.inputs, tuple) else (inputs,), {}, target
        if self.loss is None and isinstance(content, Mapping):
            return (), content, None
        if self.loss is None and not isinstance(content, list | tuple):
            return (content,), {}, None
        if not isinstance(content, list | tuple) or len(content) != 2:
            parts = "{inputs: …}" if self.loss is None else "{inputs: …, target: …}, or loss: model"
            allowed = f"expected pairs (input, target); or write batch: {parts}"
            raise self._loaded.error("data", f"its batches are {describe_sample(content)}", allowed)
        given, target = content
        if self.loss is None:
            return (given, target), {}, None
        return ((), given, target) if isinstance(given, Mapping) else ((given,), {}, target)

    def select_metric_inputs(
        self, keys: Mapping[str, Any], path: str, result: ForwardResult
    ) -> ForwardResult:
        """What a metric at `path` gets: by its `keys` a part of what the model returned, and of the batch."""
        if "output" not in keys:
            return result
        output = self._pick(result.output, keys["output"], f"{path}.output", "the model's outputs have no")
        target = self._pick(result.content, keys["target"], f"{path}.target")
        return result._replace(output=output, target=target)

    def _pick(self, content: Any, parts: Any, path: str, lacks: str = "batches have no") -> Any:
        """A part of a batch, a tuple of parts, or a mapping of them."""
        if isinstance(parts, Mapping):
            return {name: self._pick(content, key, f"{path}.{name}") for name, key in parts.items()}
        if isinstance(parts, tuple):
            return tuple(self._pick(content, key, f"{path}[{index}]") for index, key in enumerate(parts))
        if isinstance(content, Mapping):
            if parts in content.keys():  # noqa: SIM118 - a TensorDict iterates over its batch, not its keys
                return content[parts]
            has = f"have {', '.join(map(str, content.keys()))}"
        elif isinstance(parts, str) and hasattr(content, parts):
            return getattr(content, parts)
        elif isinstance(content, list | tuple):
            if isinstance(parts, int) and -len(content) <= parts < len(content):
                return content[parts]
            has = f"have {len(content)} items, which are counted from 0"
        else:
            has = f"are of type {type(content).__name__}"
        shown = f'"{parts}"' if isinstance(parts, str) else f"item {parts}"
        raise self._loaded.error(path, f"{lacks} {shown}", f"they {has}")

    def batch_weight(self, content: Any) -> float:
        """The weight of a batch's mean loss, by the file's `weight_by`."""
        if self._weight_function is None:
            return float(self._count_targets(content))
        found = self._weight_function(content)
        value = math.nan
        with suppress(TypeError, ValueError):  # no number
            value = float(found)
        if not (math.isfinite(value) and value >= 0):
            raise self._loaded.error("weight_by", f"gives {found!r:.60}", "expected a number, at least 0")
        return value

    def _count_targets(self, content: Any) -> Tensor | int:
        """How many targets of a batch count; of a cross-entropy each by its class's weight."""
        wanted = self._weight_by.settings if self._weight_by is not None else None
        assert isinstance(wanted, WeightByTargetsOptions)
        loss = self.loss if wanted.of is None else None
        if wanted.of is not None:
            target = self._pick(content, wanted.of, "weight_by.targets.of")
        elif self.loss is None and (self._batch.inputs is not None or not isinstance(content, list | tuple)):
            problem = "it is not known which part of a batch holds the targets"
            raise self._loaded.error("weight_by", problem, _TARGETS_HINT)
        else:
            target = content[1] if self.loss is None else self._split_batch(content)[2]
        if not isinstance(target, Tensor):
            problem = f"the targets are {type(target).__name__}, expected a tensor"
            raise self._loaded.error("weight_by", problem, _TARGETS_HINT)
        if wanted.shift and target.dim() < 2:
            problem = f"the targets are {describe_sample(target)}, without a sequence to leave targets out of"
            raise self._loaded.error("weight_by.targets.shift", problem, "remove it")
        ignored = wanted.ignore_index if wanted.ignore_index is not None else self.ignore_index
        return _count_weighted_targets(target[..., wanted.shift :] if wanted.shift else target, loss, ignored)

    def evaluation_weight(self, content: Any, result: ForwardResult, samples: int) -> Tensor | float:
        """The weight of a batch's loss in a mean over batches: by `weight_by` of its `content`, which is not
        cast; without it, the number of targets that count for a cross-entropy (each by its class's weight),
        and the number of samples for another loss.
        """
        if self._weight_by is not None:
            return self.batch_weight(content) if self._loaded.pipeline.has_batch_weights else samples
        loss, target = self.loss, result.target
        if not isinstance(loss, _CROSS_ENTROPIES) or not isinstance(target, Tensor):
            return samples
        return _count_weighted_targets(target, loss, self.ignore_index)

    def unused_parameters_error(self, missing: Mapping[str, Tensor], loss_name: str) -> PipelineError:
        """An error for parameters that took no part in a loss, where DDP waits for all gradients."""
        static, key = self._loaded.pipeline.ddp.static_graph, "ddp.find_unused_parameters"
        value = "is false" if self._loaded.is_given(key) else "is false, its default"
        if static:
            key, value = "ddp.static_graph", "is true"
        problem = f"{value}, but {abbreviated_list([*missing], 8)} took no part in {loss_name}"
        problem += ", so ranks would wait for their gradients forever"
        unused = "write ddp: {find_unused_parameters: true}" + (" in its place" if static else "")
        allowed = f"{unused}, or leave them out of the model, or freeze them "
        allowed += "(requires_grad_(False)), or, if they are in a reentrant checkpoint, use_reentrant=False"
        if not all(param.requires_grad for param in missing.values()):
            allowed = "their requires_grad was turned off after the start: write it as freeze of a stage, or "
            allowed += unused
        return self._loaded.error(key, problem, allowed)


def _numbers_beside_loss(returned: Any, loss: Tensor) -> dict[str, Tensor]:
    """The numbers beside `loss` in a mapping, detached, shape () each, on the loss's device."""
    found: dict[str, Tensor] = {}
    for name, value in returned.items() if isinstance(returned, Mapping) else ():
        if isinstance(value, float | int) and not isinstance(value, bool):
            # Filled there: a copy would make a GPU's host wait.
            value = torch.full((), value, dtype=torch.float32, device=loss.device)
        if name != "loss" and isinstance(value, Tensor) and value.dim() == 0:
            found[str(name)] = value.detach().to(device=loss.device, dtype=torch.float32)
    return found


def _count_weighted_targets(target: Tensor, loss: Any, ignored: int | None) -> Tensor | int:
    """How many targets count; of torch's own cross-entropy each by its class's weight: a class derived from
    it may compute another mean. `ignored`: None is -100.
    """
    by_class = isinstance(loss, _CROSS_ENTROPIES)
    weighted = by_class and any(type(loss).forward is known.forward for known in _CROSS_ENTROPIES)
    if target.is_floating_point():  # of a cross-entropy probabilities of classes, which lie on dimension 1
        return target.numel() // (target.shape[min(1, target.dim() - 1)] if by_class else 1)
    counts = target != (-100 if ignored is None else ignored)
    if not weighted or loss.weight is None:
        return counts.sum()
    of_classes: Tensor = loss.weight.to(target.device)
    return of_classes[target[counts]].sum(dtype=torch.promote_types(of_classes.dtype, torch.float32))


@contextmanager
def zero_gradients_in_backward(model: nn.Module) -> Iterator[None]:
    """Around the backward pass of a loss of weight 0: it adds zeros to the gradients, even where the mean
    over no targets has made them NaN.
    """

    def zeros(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else torch.zeros_like(grad)

    with ExitStack() as hooks:
        for param in model.parameters():
            if param.requires_grad:
                hooks.enter_context(param.register_hook(zeros))  # type: ignore[no-untyped-call]
        yield


def initialize_lazy_parameters(model: nn.Module, objective: Objective, feed: Feed, turns: Turns) -> None:
    """Give lazy parameters their shapes and values by passes on the first batch, as in torch's docs.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.lazy.LazyModuleMixin.html
    """
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        model.eval()
        for name in turns.names or [None]:  # a pipeline may only evaluate
            objective(model, objective.prepare_batch(feed.first_batch()), name)
        objective.called.clear()  # passes in training may give other numbers beside the loss
        objective.value_names.clear()
        model.train()


def check_last_batch(
    loaded: LoadedPipeline,
    model: nn.Module,
    objective: Objective,
    feed: Feed,
    turn_names: Iterable[str | None],
    control: ControlChannel,
) -> None:
    """Raise a PipelineError if an epoch ends with one sample on some rank, which BatchNorm cannot take. All
    ranks try it together, since a model may call collectives itself.
    """
    if not any(isinstance(one, _BatchNorm) for one in model.modules()):
        return
    if min(all_gather_number(control, feed.last_batch_size(), "samples of the last batch")) > 1:
        return
    with preserve_state(objective.precision.device, model, objective.loss):
        model.train()
        try:
            for name in turn_names:
                objective(model, objective.prepare_batch(feed.first_batch(1)), name)
        except ValueError as error:
            if _BATCH_NORM_ERROR not in str(error):
                raise
            text = "the last batch of an epoch is one sample on some rank, and BatchNorm needs more than one"
            hint = "write drop_last: true, or another batch_size"
            raise loaded.error("loader.drop_last", text, hint) from None


def find_buffer_use(
    model: nn.Module, objective: Objective, feed: Feed, turns: Turns, *, automatic: bool
) -> BufferUse:
    """What training does with buffers, seen on this rank's first batch; not `automatic`, or nothing trains:
    all may change.
    """
    named = dict(model.named_buffers())
    if not (automatic and named and turns.names):
        return BufferUse.from_changes(named, named, read=False)
    precision = objective.precision
    with preserve_rng_state(precision.device):
        content = objective.prepare_batch(feed.first_batch())

    def forward(buffers: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # It restores the generators, too: each pass draws the same numbers.
        with preserve_state(precision.device, model, objective.loss):
            model.train()
            load_buffers(model, buffers)
            losses = [objective(model, content, name).loss.detach() for name in turns.names]
            return torch.stack(losses), clone_buffers(model)

    return probe_buffer_use(model, forward)


def warmup_pass(
    model: nn.Module, objective: Objective, feed: Feed, turn: str | None = None, *, backward: bool
) -> None:
    """Two passes without a trace on the first batch: a model may go another way once it has been called."""
    with preserve_state(objective.precision.device, model, objective.loss), torch.set_grad_enabled(backward):
        model.train()
        content = objective.prepare_batch(feed.first_batch())
        for _ in range(2):
            loss = objective(model, content, turn).loss
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)


def describe_call(name: str, positional: Sequence[Any], named: Mapping[str, Any] | None = None) -> str:
    """A call with the types and shapes of its arguments: `model(float32 (8, 4), mask=bool (8, 4))`."""
    given = [describe_sample(value) for value in positional]
    given += [f"{key}={describe_sample(value)}" for key, value in (named or {}).items()]
    return f"{name}({', '.join(given)})"


def freeze_bucket_layout(
    replica: DdpReplica, objective: Objective, feed: Feed, turn: str | None, barrier: Callable[[], None]
) -> None:
    """Run throw-away passes on the first batch until DDP's buckets are as they stay; a PipelineError if
    parameters go unused, for which DDP would wait. `barrier` waits for all ranks.

    DDP starts with one layout and rebuilds it after its first backward pass, with `static_graph` one pass
    later. Were step 1 to run in the first layout, a resumed run would sum its first step in another order
    than the unbroken run did, and end with other bits.
    """
    model, settings = replica.model, replica.settings
    with preserve_state(objective.precision.device, model, objective.loss):
        content = objective.prepare_batch(feed.first_batch())
        model.train()
        for _ in range(3 if settings.static_graph else 2):
            objective(replica.ddp, content, turn).loss.backward()  # type: ignore[no-untyped-call]
            missing = replica.params_without_gradient()
            if missing and not (settings.find_unused_parameters or settings.static_graph):
                raise objective.unused_parameters_error(missing, "the loss of a rank's first batch")
            model.zero_grad(set_to_none=True)
            barrier()  # the next pass begins with an exchange of DDP's own, which no watchdog sees
    replica.dispatcher.layout_frozen = True
