"""Sends parameters, buffers and optimizer state over the ranks, and notes in the recorder what that cost.

What becomes of an entry of the optimizer's state goes by its name and kind, never by its shape: the counters
that torch's optimizers keep become those of the rank with most steps, every other tensor of floating-point
(or complex) numbers its mean over ranks. Plain numbers and whole numbers of other names, as an optimizer of
one's own may keep, are not averaged: each rank keeps its own, and where ranks begin anew from one state it is
rank 0's.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from ddprun.telemetry.recorder import StepRecorder
from ddprun_hooks.buckets import TensorBuckets
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.comm_queue import CommQueue
from ddprun_hooks.payload import Payload, PayloadKind
from ddprun_hooks.stack import Stack, broadcast_stack

PendingExchange = tuple[Future[Tensor], BucketTrace[Any]]  # a payload under way: its mean, and its trace


class TensorExchanger:
    """What policies send with. The recorder takes the traces, and how long the training thread waited for
    them; `cap_bytes` is the largest size of a bucket.
    """

    def __init__(self, exchange: CommContext, recorder: StepRecorder, cap_bytes: float) -> None:
        self.exchange, self.cap_bytes, self._recorder = exchange, cap_bytes, recorder
        self._all_reduce_stack = Stack([])

    def send(self, queue: CommQueue, payload: Payload, stack: Stack, group: RankGroup) -> PendingExchange:
        """Start sending a payload; `wait` waits for it. All ranks send in one order."""
        traces: list[BucketTrace[Any]] = []
        future = queue.send(payload, stack, traces, group)
        self._recorder.non_backward_exchanges.sent.append(traces[0])
        return future, traces[0]

    def wait(self, pending: PendingExchange) -> Tensor:
        """Wait for a payload: the mean over ranks, in the payload's own memory."""
        future, trace = pending
        marks, start = self._recorder.non_backward_exchanges, self._recorder.mark()
        mean: Tensor = future.wait()
        marks.waits.append((start, self._recorder.mark()))
        marks.completed.append(trace)
        return mean

    def equalize(
        self,
        named: Mapping[str, Tensor] | TensorBuckets,
        kind: PayloadKind,
        source: int | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """Overwrite floating-point numbers with their mean over ranks, or any with those of rank `source`,
        exactly: no hook touches them. The group is of the plain queue; None: all ranks.
        """
        queue = self.exchange.plain_queue
        group = group or queue.world
        stack = self._all_reduce_stack if source is None else broadcast_stack(source)
        buckets = named if isinstance(named, TensorBuckets) else TensorBuckets(named, self.cap_bytes)
        pending = []
        for index, layout in enumerate(buckets.layouts):
            flat = buckets.flatten(index)
            if source is None:
                flat.mul_(1.0 / group.size)
            payload = Payload(flat, layout.params, kind, layout.index)
            pending.append(self.send(queue, payload, stack, group))
        for index, one in enumerate(pending):
            buckets.copy_to_tensors(index, self.wait(one))


_OPTIMIZER_COUNTERS = {
    "step": 0.0,
    "mu_product": 1.0,
}  # torch's counts, and what is made of them, before a step


def averageable_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state that has a mean, by the parameter's index and the state's name."""
    return {
        f"{index}.{name}": value
        for index, param in enumerate(_params(optimizer))
        for name, value in sorted(optimizer.state.get(param, {}).items())
        if isinstance(value, Tensor) and not _is_optimizer_counter(name, value) and can_be_averaged(value)
    }


def average_optimizer_state(
    optimizer: Optimizer, exchanger: TensorExchanger, group: RankGroup | None = None
) -> None:
    """Overwrite the optimizer's state by its mean over ranks, and counters by those of the rank with most
    steps: one whose gradients were not finite has taken less, or none.

    A group (of the plain queue) of fewer than all ranks leaves counters alone, and does not compare what they
    keep: they are not to wait for others. Raises DisagreementError if the ranks' optimizers keep different
    state.
    """
    initialize_optimizer_state(optimizer)
    named = averageable_state(optimizer)
    control = exchanger.exchange.control
    if group is None:
        shapes = str([(name, tuple(value.shape)) for name, value in named.items()])
        control.check_agreement("the optimizer's state", shapes)
        states = [optimizer.state.get(param, {}) for param in _params(optimizer)]
        pairs = ((kept, name) for kept in states for name in _OPTIMIZER_COUNTERS)
        counters = [(kept, name) for kept, name in pairs if _is_optimizer_counter(name, kept.get(name))]
        if counters:
            numbers = [float(kept[name]) for kept, name in counters]
            gathered = control.all_gather(numbers, "optimizers' counters")  # (ranks, counters)
            for (kept, name), of_ranks in zip(counters, gathered.unbind(1), strict=True):
                _set_counter(kept, name, float(of_ranks.max() if name == "step" else of_ranks.min()))
    exchanger.equalize(named, "optimizer", group=group)


def merge_optimizer_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for optimizers of another number of ranks, as `average_optimizer_state` makes it, from
    `Optimizer.state_dict` of each rank. A rank that has not stepped has no state of a parameter; the others'
    is averaged.
    """
    params: dict[Any, dict[str, Any]] = {}
    for param in dict.fromkeys(param for state in states for param in state["state"]):
        kept = [state["state"][param] for state in states if param in state["state"]]
        params[param] = {
            name: _merge_entry(name, [one[name] for one in kept if name in one])
            for name in dict.fromkeys(name for one in kept for name in one)
        }
    return {**states[0], "state": params}


def _merge_entry(name: str, values: Sequence[Any]) -> Any:
    if _is_optimizer_counter(name, values[0]):
        return (max if name == "step" else min)(values)
    if isinstance(values[0], Tensor) and can_be_averaged(values[0]):
        return mean_of(values)
    return values[0]


def can_be_averaged(tensor: Tensor) -> bool:
    """Whether its numbers are such that a mean over ranks is one of them."""
    return tensor.is_floating_point() or tensor.is_complex()


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their mean, of their dtype, summed in double precision."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    stacked = torch.stack([tensor.to(wide) for tensor in tensors])
    if stacked.is_sparse:  # of which torch takes no mean
        return (stacked.sum(0) / len(tensors)).to(tensors[0].dtype)
    return stacked.mean(0).to(tensors[0].dtype)


@contextmanager
def restore_values_on_exit(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, tensors may change; then they have their values again, bit for bit."""
    own = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in own:
                tensor.copy_(value)


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def initialize_optimizer_state(optimizer: Optimizer) -> None:
    """Create the optimizer state of parameters that have none yet, as it is before the first step. Ranks then
    keep the same entries, whatever steps they have skipped. A step on zero gradients creates it; the weights
    are restored.
    """
    everything = _params(optimizer)
    lacking = [param for param in everything if param.requires_grad and not optimizer.state.get(param)]
    if not lacking:
        return
    gradients = [param.grad for param in everything]
    settings = [dict(group) for group in optimizer.param_groups]
    for param in everything:
        param.grad = None
    for param in lacking:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0  # or the weights would enter the state
    with restore_values_on_exit(lacking):
        takes_closure = "closure" in inspect.signature(optimizer.step).parameters
        optimizer.step(*([lambda: 0.0] if takes_closure else []))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)  # some optimizers count their steps there
    for param in lacking:
        for name, start in _OPTIMIZER_COUNTERS.items():
            if _is_optimizer_counter(name, optimizer.state[param].get(name)):
                _set_counter(optimizer.state[param], name, start)
    for param, gradient in zip(everything, gradients, strict=True):
        param.grad = gradient


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_optimizer_counter(name: str, value: Any) -> bool:
    """Whether an entry of a parameter's state is one of torch's counters."""
    if isinstance(value, Tensor):
        return name in _OPTIMIZER_COUNTERS and value.numel() == 1
    return name in _OPTIMIZER_COUNTERS and isinstance(value, int | float)


def _set_counter(kept: dict[str, Any], name: str, number: float) -> None:
    if isinstance(kept[name], Tensor):
        kept[name].fill_(number)
    else:
        kept[name] = type(kept[name])(number)
