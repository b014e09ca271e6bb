"""Where a script's steps begin and end, found from hooks of the model, of autograd and of torch.optim.

::

    the loader gives a batch          data_us      where `ObservedRun.steps` wraps the loader
    DDP broadcasts the buffers        sync_us
    model(...)                        forward_us
    the loss; its own backward pass   other_us
    backward, from the model's output backward_us, exposed_*_us
    clipping, GradScaler.unscale_     other_us
    optimizer.step()                  optimizer_us
    all until the next forward pass   other_us

A step ends when the next forward pass, or the search for the next batch, begins after an optimizer has
stepped. With a GradScaler it also ends when that has skipped the optimizer's step. Ranks exchange messages
where a step ends, and wait for each other at the beginning of a forward pass with gradients alone: one rank
may evaluate, or get other batches, while the others do something else.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ddprun.sync.exchanger import TensorExchanger
from ddprun.telemetry.recorder import StepRecorder
from ddprun.watchdog.rank_watchdog import RankWatchdog
from ddprun_hooks.comm_context import BROADCAST_BUCKET_BYTES
from ddprun_hooks.dispatcher import call_after_backward
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.standalone import Handle

_T = TypeVar("_T")
_MAX_PASSES = 256  # backward passes without an optimizer's step, until that is told


# A hook that does nothing, from the standard library: a saved model can be loaded without ddprun.
_DO_NOTHING = nullcontext().__exit__


class EagerHook:
    """A hook that torch.compile does not look into; a copy of the model calls `in_copy` instead."""

    def __init__(self, call: Callable[..., None], in_copy: Callable[..., None] = _DO_NOTHING) -> None:
        self._call, self._in_copy = call, in_copy

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # only then: `disable` takes time in each call
            self._call_eagerly(*arguments)
        else:
            self._call(*arguments)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call_eagerly(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._in_copy,)


def _broadcast_buffers(_: object, buffers: Mapping[str, Tensor]) -> None:
    """What DDP itself does with the buffers of a model."""
    world = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(world, [*buffers.values()], BROADCAST_BUCKET_BYTES, 0)


def sends_buffers(model: DistributedDataParallel) -> bool:
    """Whether DDP broadcasts the model's buffers, and by its own code."""
    return bool(model.broadcast_buffers and model.modules_buffers) and not hasattr(model, "buffer_hook")


def _has_entry_per_sample(value: object) -> bool:
    """Whether it is a list with an entry for each sample, such as the boxes of each image."""
    entries = value if isinstance(value, (list, tuple)) else ()
    return bool(entries) and all(isinstance(one, (str, Mapping)) for one in entries)


def _count_samples(inputs: Sequence[Any], options: Mapping[str, Any]) -> int:
    """How many samples a call to the model is given."""
    given = (*inputs, *options.values())
    if given and isinstance(given[0], Tensor):
        return given[0].shape[:1].numel()
    leaves = [leaf for one in given for leaf in tree_leaves(one, _has_entry_per_sample)]
    sizes = (leaf.shape[:1].numel() for leaf in leaves if isinstance(leaf, Tensor))
    return next(map(len, filter(_has_entry_per_sample, leaves)), next(sizes, 1))


class TimedLoader(Iterable[_T]):
    """A loader in whose place a script uses this; in all but iteration it is the loader."""

    def __init__(self, loader: Iterable[_T], marks: "StepMarker") -> None:
        self._loader, self._marks = loader, marks

    def __iter__(self) -> Iterator[_T]:
        return self._marks.time_batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length says so itself

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


class StepMarker:
    """Marks the steps of a script in the `recorder`.

    `optimized`: the parameters by which an optimizer is known as the script's. `after_step` is called where a
    step ends: with whether ranks exchanged gradients in it, and with the mark of its end, if that was before.
    `before_forward` is called before each forward pass with gradients, which all ranks take together.
    """

    def __init__(
        self,
        handle: Handle,
        recorder: StepRecorder,
        watchdog: RankWatchdog,
        optimized: Iterable[Tensor],
        after_step: Callable[[bool, Any], None],
        before_forward: Callable[[], None],
    ) -> None:
        self.step = 0  # steps that are over
        self.scaler: torch.amp.GradScaler | None = None
        self._handle, self._recorder, self._watchdog = handle, recorder, watchdog
        self._after_step, self._before_forward = after_step, before_forward
        self._optimized = {id(param) for param in optimized}
        self._running = self._updated = self._exchanged = self._in_closure = False
        self._in_forward = self._in_backward = False
        self._ended_at: Any = None  # the mark of the running step's end, where an evaluation has begun
        self._passes = 0  # backward passes in the running step
        self._stepping: Optimizer | None = None
        self._scale_version = self._version_of_scale()
        self._param_groups: list[Mapping[str, Any]] = []  # of the optimizers that have stepped in this step
        self._micro_batches: list[tuple[Tensor | None, int]] = []  # loss and samples, not noted yet

    def attach(self, model: DistributedDataParallel) -> None:
        """Begin to watch. Nothing here changes a value that the script computes."""
        begins, inner_begins = EagerHook(self._forward_begins), EagerHook(self._inner_forward_begins)
        self._hooks = [
            model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True),
            model.register_forward_hook(EagerHook(self._forward_ends), with_kwargs=True),
            model.module.register_forward_pre_hook(inner_begins, prepend=True),
            register_optimizer_step_pre_hook(EagerHook(self._optimizer_begins)),
            register_optimizer_step_post_hook(EagerHook(self._optimizer_ends)),
        ]
        self._handle.on_backward = self._backward_begins
        if sends_buffers(model):
            before = _BufferCommHookLocation.PRE_FORWARD
            model._register_buffer_comm_hook(None, EagerHook(self._send_buffers, _broadcast_buffers), before)

    def detach(self) -> None:
        """End the running step, and watch no longer."""
        self._end_step_if_over()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._handle.on_backward, self._in_forward = [], None, False
        self._handle.detach()
        if self._running:
            self._recorder.cancel_step()
        self._running = False

    def time_batches(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The batches of a loader, with the time that it takes for each."""
        source = iter(loader)
        while self._hooks:
            self._end_step_if_over()
            self._begin_part(b"data")
            try:
                batch = next(source)
            except StopIteration:
                self._pause_before_step()
                return
            self._recorder.lap("data_us")
            yield batch
        yield from source

    def note_loss(self, loss: Tensor) -> None:
        """The mean loss of the newest forward pass, shape (), which may change in place afterwards; that of
        an evaluation after a step is left out.
        """
        if loss.numel() != 1:
            raise ValueError(f"a loss is one number, got a tensor of shape {tuple(loss.shape)}")
        if self._micro_batches and self._ended_at is None:
            own = loss.detach().clone()
            self._micro_batches[-1] = own.view(()) if own.dim() else own, self._micro_batches[-1][1]

    # Hooks.

    def _forward_begins(
        self, model: DistributedDataParallel, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self._in_forward = False  # of a pass that has failed
        if not torch.is_grad_enabled():
            self._evaluation_begins()  # before DDP's broadcast of the buffers
            return
        if model._join_config.enable:
            text = "Join is not supported: ranks whose data has ended would not meet the others"
            raise HookSetupError(f"{text}; give all ranks equally many batches")
        self._end_step_if_over()
        self._before_forward()
        self._in_backward = False  # of a pass that has failed
        if not self._in_closure:
            self._stepping = None  # an optimizer that has failed
        self._begin_part(b"forward")
        self._in_forward = True
        self._note_micro_batches()
        self._micro_batches.append((None, _count_samples(inputs, options)))

    def _forward_ends(
        self, model: torch.nn.Module, inputs: Sequence[Any], options: Mapping[str, Any], output: Any
    ) -> None:
        self._in_forward = False
        if not torch.is_grad_enabled() or not self._running:
            return
        self._recorder.lap("forward_us")
        self._watchdog.set_phase(b"the script's code")
        # A hook of a parameter would stay.
        for tensor in [output] if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        # By this argument, transformers has a model divide its loss by the tokens of all batches of a step.
        if isinstance(loss, Tensor) and not loss.dim() and options.get("num_items_in_batch") is None:
            self.note_loss(loss)

    def _send_buffers(self, _: object, buffers: Mapping[str, Tensor]) -> None:
        """Overwrite the buffers with rank 0's, as DDP's own code does, which nobody can time or watch."""
        recorder, watchdog = self._recorder, self._watchdog
        sync = recorder.non_backward_exchanges
        known: list[list[Any]] = [sync.sent, sync.completed, sync.waits]
        lengths = [len(entries) for entries in known]
        if self._in_forward:
            recorder.lap("forward_us")
            watchdog.set_phase(b"sync")
        TensorExchanger(self._handle.exchange, recorder, BROADCAST_BUCKET_BYTES).equalize(
            buffers, "buffers", source=0
        )
        if self._in_forward:
            recorder.lap("sync_us")
            watchdog.set_phase(b"forward")
            return
        for entries, length in zip(known, lengths, strict=True):  # an evaluation is no step's time
            del entries[length:]

    def _inner_forward_begins(self, module: torch.nn.Module, inputs: Sequence[Any]) -> None:
        """The model is called, under DDP or not: without gradients, after a step or before one, that is an
        evaluation. Maybe only this rank's, so nothing is exchanged here.
        """
        if not torch.is_grad_enabled():
            self._evaluation_begins()
        elif self._in_forward:
            self._handle.note_buckets()

    def _evaluation_begins(self) -> None:
        if not self._running or self._ended_at is not None:
            return
        if self._is_over():
            self._ended_at = self._recorder.mark()
        elif not (self._micro_batches or self._passes):
            self._pause_before_step()
        self._watchdog.set_phase(b"evaluate")

    def _backward_begins(self, *_: Tensor) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._begin_part(b"backward")
        # DDP waits for its buckets in a callback of its own, which comes between these two.
        call_after_backward(lambda: call_after_backward(self._backward_ends))

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._passes += 1
        if self._handle.traces:
            self._handle.complete_traces()
            self._recorder.traces.extend(self._handle.traces)
            self._handle.traces = []
            self._exchanged = True
            self._recorder.end_backward()
        else:  # under `no_sync`
            self._handle.check_no_other_hook()
            self._recorder.lap("backward_us")
        self._watchdog.set_phase(b"the script's code")
        if self._passes == _MAX_PASSES:
            warnings.warn(
                f"no step of an optimizer seen in {_MAX_PASSES} backward passes, so nothing is recorded: "
                "pass the torch.optim optimizer that holds the model's parameters to ddprun.observe",
                stacklevel=2,
            )
            self._recorder.cancel_step()
            self._running, self._passes = False, 0
            self._micro_batches.clear()

    def _optimizer_begins(
        self, optimizer: Optimizer, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        if self._stepping not in (None, optimizer) or self._optimized.isdisjoint(map(id, params)):
            return
        self._stepping = optimizer
        self._in_closure = any(map(callable, (*inputs[1:], *options.values())))
        if not self._in_closure:  # else the step before ends with the closure's forward pass
            self._begin_part(b"optimizer")

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self._stepping:
            self._stepping, self._in_closure = None, False
            if not self._running or self._ended_at is not None:  # a closure without a forward pass
                self._begin_part(b"optimizer")
            self._recorder.lap("optimizer_us")
            self._param_groups += optimizer.param_groups
            self._recorder.note_update(self._param_groups, None, None)
            self._updated = True
            self._watchdog.set_phase(b"the script's code")

    # Steps.

    def _begin_part(self, phase: bytes) -> None:
        """Something that is timed begins; what was before it in the step is `other_us`."""
        if self._running:
            self._ended_at = None  # the step continues after an evaluation
            # The model itself may call backward and an optimizer, as under Lightning's manual optimization.
            self._recorder.lap("forward_us" if self._in_forward else "other_us")
            self._watchdog.set_phase(phase)
        else:
            self._watchdog.set_phase(phase, self.step + 1)
            self._recorder.begin_step(self.step + 1, 0)
            self._running, self._scale_version = True, self._version_of_scale()

    def _pause_before_step(self) -> None:
        """There is no further batch: what comes until the next step is no step's time."""
        if self._micro_batches or self._passes:  # of a step that continues with another loader's batches
            self._recorder.lap("data_us")
            return
        self._recorder.cancel_step()
        self._running = False
        self._recorder.pause_timing()
        self._watchdog.set_phase(b"the script's code")

    def _is_over(self) -> bool:
        """Whether an optimizer has stepped, or a GradScaler has skipped that: before a backward pass it was
        updated for another model.
        """
        return self._updated or (self._passes > 0 and self._version_of_scale() != self._scale_version)

    def _end_step_if_over(self) -> None:
        if not self._running or not self._is_over():
            return
        self._note_micro_batches()
        self.step += 1
        exchanged, ended_at = self._exchanged, self._ended_at
        self._running = self._updated = self._exchanged = False
        self._ended_at, self._passes, self._param_groups = None, 0, []
        self._after_step(exchanged, ended_at)

    def _note_micro_batches(self) -> None:
        for loss, samples in self._micro_batches:
            self._recorder.note_loss(loss, samples)
        self._micro_batches.clear()

    def _version_of_scale(self) -> int:
        """Counts `GradScaler.update`, which comes after each step, whether the optimizer took it or not."""
        scale = getattr(self.scaler, "_scale", None)  # one that is disabled has none
        return 0 if scale is None else scale._version
