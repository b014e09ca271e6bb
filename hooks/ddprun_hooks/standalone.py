"""The hooks in your own DistributedDataParallel script.

```python
model = DistributedDataParallel(net)
handle = ddprun_hooks.register(model, ["fp16"])
```
"""

import itertools
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.collective_observer import NULL_OBSERVER, CollectiveObserver
from ddprun_hooks.comm.control_channel import ControlChannel, open_control_channel
from ddprun_hooks.comm.gpu import DeferredScalar, StreamTimestamp
from ddprun_hooks.comm.groups import RankPlacement, merge_requirements
from ddprun_hooks.comm.intercepting_group import InterceptingGroup
from ddprun_hooks.comm.trace import BucketTrace, read_finding_codes
from ddprun_hooks.comm_context import ALL_RANKS, CommContext
from ddprun_hooks.comm_queue import AllReduceInFlight, HostCommQueue, await_callback_at_exit
from ddprun_hooks.dispatcher import BucketDispatcher
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.payload import Payload
from ddprun_hooks.registry import AnyHook, make_stack
from ddprun_hooks.stack import Stack

# The newest process groups of a script, which then never frees them. torch 2.13 frees a group with the GIL
# held, and waits for a thread of Gloo's that may want the GIL to drop a tensor: a script that frees its group
# right after a collective hangs now and then.
_groups_kept: list[object] = []

_models_without_hooks = weakref.WeakSet[DistributedDataParallel]()  # models with a `NoHooksHandle`


class Handle(BucketDispatcher):
    """What `register` returns: the hooks' state, and the traces of the latest backward pass.

    DDP rebuilds its buckets after its first steps. Until then, gradients are sent by a plain all-reduce, and
    ranks compare the layout of each bucket first.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: CommContext,
        stack: Stack,
    ) -> None:
        self._model, self.exchange, self._control = model, exchange, exchange.control
        self._all_reduce_stack = Stack([])
        self._passes_until_layout = 3 if model.static_graph else 2
        self._scaler: torch.amp.GradScaler | None = None
        self._last_scale = 0.0
        self._noted_scale: tuple[int, DeferredScalar] | None = None  # the scale's version and value
        self.warns_of_overflow = bool(stack.names)  # until it has
        self.on_backward: Callable[[], None] | None = None  # is called when a pass has its first bucket
        self._traces_with_findings: list[BucketTrace[Any]] = []  # hooks may have found something in them
        super().__init__(model, exchange.gradient_queue, stack)

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """From the next forward pass on, hooks see the gradients of losses that it scales unscaled."""
        if scaler is not None and scaler.is_enabled():
            self._scaler = scaler
            self._model.register_forward_pre_hook(self._note_scale)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's hooks, by hook and parameter name. Each rank has its own state."""
        return self.stack.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or `merge` for the states of all ranks."""
        self.stack.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks, in rank order, into one that other ranks or buckets can load."""
        return self.stack.merge(states)

    def note_buckets(self) -> None:
        """DDP is about to call the model, with gradients: its buckets are those of the next backward pass."""

    def complete_traces(self) -> None:
        """A backward pass has ended: complete its traces."""

    def detach(self) -> None:
        """Nobody calls `note_buckets` and `complete_traces` any more."""

    def check_no_other_hook(self) -> None:
        """Raise HookSetupError if a hook was registered after this, which DDP may then use instead."""

    def _on_bucket_before_layout_frozen(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        layout = self._layout[bucket.index()]
        self._control.check_agreement(f"bucket {layout.index}", repr(layout))
        if bucket.is_last():
            self._count_pass_until_frozen()
        return self._send_bucket(bucket.buffer(), layout, self._all_reduce_stack)

    def _count_pass_until_frozen(self) -> None:
        self._passes_until_layout -= 1
        self.layout_frozen = self._passes_until_layout <= 0

    def _send_dense(self, buffer: Tensor, layout: BucketLayout, stack: Stack) -> torch.futures.Future[Tensor]:
        if layout.index == 0:
            self._begin_backward(buffer.device)
        future = super()._send_dense(buffer, layout, stack)
        scale = self._loss_scale
        if scale is None:
            return future
        return future.then(await_callback_at_exit(lambda done: done.value().mul_(scale)))

    def _take_back(self, means: dict[str, Tensor]) -> None:
        if (scale := self._loss_scale) is not None:
            means = {name: mean / scale for name, mean in means.items()}
        super()._take_back(means)

    def _begin_backward(self, device: torch.device) -> None:
        """Warn of overflows in earlier passes, end the step before, and begin the next one."""
        if self.on_backward is not None:
            self.on_backward()
        if self.warns_of_overflow:
            self._traces_with_findings += [trace for trace in self.traces if trace.findings]
            # A stream ends them in their order.
            finished = list(itertools.takewhile(_payload_arrived, self._traces_with_findings))
            del self._traces_with_findings[: len(finished)]
            read_finding_codes(finished)
            overflows = [
                (trace.bucket, one.hook) for trace in finished for one in trace.findings if one.code == 1
            ]
            if overflows:
                self.warns_of_overflow = False
                bucket, hook = overflows[0]
                text = f"bucket {bucket} overflowed in {hook}: finite gradients came back as infinity"
                warnings.warn(f"{text}; use bf16, or a smaller loss", stacklevel=2)
        self.traces.clear()
        if self._scaler is None or self._scaler._scale is None:  # it has not scaled a loss yet
            return
        # A smaller scale says that GradScaler has skipped a step.
        scale = self._read_loss_scale()
        self.end_step(applied=scale >= self._last_scale)
        self._last_scale = scale
        self.begin_step(self._scaler.scale(torch.ones((), device=device)))

    def _note_scale(self, *_: Any) -> None:
        """A forward pass begins: note the scale, which is read in its backward pass. To ask for it only then
        would be to wait for all that a GPU has still to do of both passes.
        """
        assert self._scaler is not None
        scale = self._scaler._scale
        self._noted_scale = None if scale is None else (scale._version, DeferredScalar(scale))

    def _read_loss_scale(self) -> float:
        assert self._scaler is not None
        scale, noted = self._scaler._scale, self._noted_scale
        if scale is None or noted is None or noted[0] != scale._version:
            return float(self._scaler.get_scale())
        return noted[1].read()


class NoHooksHandle(Handle):
    """The handle of an observed script without hooks: in place of DDP's process group, it makes the
    all-reduces that DDP asks for.

    DDP divides a gradient while it copies it into a bucket. With any communication hook, torch's own in C++
    included, the division is one more pass over all gradients.
    """

    _queue: HostCommQueue

    def _attach(self, model: DistributedDataParallel) -> None:
        self._ddp_group = model.process_group
        self._next_bucket = 0
        self._in_flight: list[AllReduceInFlight] = []  # of the backward pass
        self._group = InterceptingGroup(self._ddp_group, self._all_reduce)
        model.reducer._update_process_group(self._group)
        _models_without_hooks.add(model)

    def note_buckets(self) -> None:
        self._next_bucket = 0
        if not self.layout_frozen:
            for bucket in self._model.reducer._get_zeros_like_grad_buckets():  # the only way to ask DDP
                self._record_layout(bucket)

    def complete_traces(self) -> None:
        for one in self._in_flight:
            one.complete_trace()
        self._in_flight.clear()  # before DDP replaces its buckets: they keep the memory

    def detach(self) -> None:
        self._model.reducer._update_process_group(self._ddp_group)
        _models_without_hooks.discard(self._model)

    def check_no_other_hook(self) -> None:
        if self._model.require_backward_grad_sync:  # else no exchange was due, and asking DDP takes time
            check_no_comm_hook(self._model)

    def _all_reduce(self, buffer: Tensor) -> dist.Work:
        if not buffer.is_floating_point():  # which parameters ranks have used
            return self._ddp_group.allreduce([buffer], dist.ReduceOp.SUM)
        index, count = self._next_bucket, len(self._layout)
        layout = self._matching_layout(index, buffer)
        # Nobody has noted it: a script may call `model.forward`, or rebuild buckets, itself.
        if layout is None:
            return self._queue.world.process_groups[0].allreduce([buffer], dist.ReduceOp.SUM)
        if index == 0:
            self._begin_backward(buffer.device)
        payload = Payload(buffer, layout.params, "gradient", layout.index)
        started = self._queue.start_all_reduce(payload, self.traces)
        self._in_flight.append(started)
        self._next_bucket = (index + 1) % count
        if self._next_bucket == 0:
            self._count_pass_until_frozen()
            if self.on_last_bucket_sent is not None:
                self.on_last_bucket_sent()
        return started.work


def register(
    model: DistributedDataParallel,
    hooks: AnyHook | Sequence[AnyHook],
    *,
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Handle:
    """Send a model's gradients through hooks. Every rank must call it, with the same hooks.

    Args:
        model: on the default process group; no other hook may be registered with it.
        hooks: one hook or a list. Write hooks as in a pipeline file, such as `"fp16"` or
            `[{"hierarchical": {"across": ["int8"]}}]`, or pass `Hook` objects and async functions.
        scaler: the GradScaler, if one scales the loss: hooks then see unscaled gradients, and a skipped step
            does not change their state. A disabled scaler is ignored.
        timeout: how long a collective may take.

    Raises:
        HookSetupError: unknown hook, wrong options, a stack that cannot work, or an unsuitable model.
        DisagreementError: the ranks were given different hooks; the error names the ranks.
    """
    check_model(model)
    handle = register_stack(model, make_stack(hooks), open_control_channel(timeout), timeout=timeout)
    handle.use_scaler(scaler)
    return handle


def check_model(model: DistributedDataParallel) -> None:
    """Raise HookSetupError for a model that hooks cannot work on."""
    if not isinstance(model, DistributedDataParallel):
        raise HookSetupError(
            f"the model must be a DistributedDataParallel, got {type(model).__name__}: frameworks make one "
            "only if there are several processes, and none with FSDP or DeepSpeed"
        )
    if model.process_group is not dist.group.WORLD:
        raise HookSetupError("the model has a process group of its own: hooks work on the default group")
    if model in _models_without_hooks:
        raise HookSetupError("the model is observed already")
    check_no_comm_hook(model)


def check_no_comm_hook(model: DistributedDataParallel) -> None:
    """Raise HookSetupError for a model with a communication hook, in Python or in C++."""
    if model._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        raise HookSetupError("the model has a communication hook already: DDP accepts only one")


def register_stack(
    model: DistributedDataParallel,
    stack: Stack,
    control: ControlChannel,
    *,
    timeout: timedelta,
    observer: CollectiveObserver = NULL_OBSERVER,
    sends_buffers: bool = False,
    notes_buckets: bool = False,
) -> Handle:
    """As `register`, with a stack and a control channel that exist, and an `observer` of the collectives,
    without a scaler. If it `sends_buffers`, the exchange's plain queue can be used. `notes_buckets`: the
    caller calls `note_buckets`, so that a model in host memory without hooks can have a `NoHooksHandle`.
    """
    control.check_agreement("the hooks", stack.description)
    device = device_of(model)
    hosts = tuple(name.decode() for name in control.all_gather_bytes(socket.gethostname().encode()))
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE") or str(hosts.count(hosts[control.rank]))
    local_sizes = tuple(int(size) for size in control.all_gather_bytes(local_world_size.encode()))
    exchange = CommContext.open(
        control=control,
        device=device,
        backend=backend_of(device),
        placement=RankPlacement(control.rank, hosts, local_sizes),
        gradients=merge_requirements([stack.requirements, Stack([]).requirements]),
        plain=ALL_RANKS if sends_buffers else {},
        timeout=timeout,
        observer=observer,
    )
    _groups_kept[:] = [dist.group.WORLD, exchange]
    plain = notes_buckets and not stack.names and device.type == "cpu"
    make = NoHooksHandle if plain else Handle
    return make(model, exchange, stack)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's gradients are."""
    return next(param.device for param in model.parameters() if param.requires_grad)


def backend_of(device: torch.device) -> str:
    """`gloo` or `nccl`: the default group's for a device, which `get_backend` does not always know."""
    of_devices = dict(one.split(":") for one in dist.get_backend_config().split(","))
    return "nccl" if of_devices.get(device.type) == "nccl" else "gloo"


def _payload_arrived(trace: BucketTrace[Any]) -> bool:
    if isinstance(trace.done, StreamTimestamp):
        return trace.done.has_passed()
    return trace.done is not None
