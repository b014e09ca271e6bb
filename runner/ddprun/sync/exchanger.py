"""Sends parameters and their like over the ranks, and notes in the recorder what that cost."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from ddprun.telemetry.recorder import StepRecorder
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.exchange import Exchange
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.queue import CommQueue
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Kind, Payload
from ddprun_hooks.stack import Stack, all_reduce_stack, broadcast_stack


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """A payload under way."""

    future: Future[Tensor]
    trace: BucketTrace[Any]


class ParameterExchanger:
    """What policies send with.

    Args:
        exchange: of the run.
        recorder: takes the traces, and how long the training thread waited for them.
        cap_bytes: largest size of a bucket.
    """

    def __init__(self, exchange: Exchange, recorder: StepRecorder, cap_bytes: float) -> None:
        self.exchange = exchange
        self.cap_bytes = cap_bytes
        self._recorder = recorder
        self._plain = all_reduce_stack()

    def send(self, queue: CommQueue, payload: Payload, stack: Stack, group: RankGroup) -> PendingExchange:
        """Start sending a payload; `land` waits for it. All ranks send in one order."""
        traces: list[BucketTrace[Any]] = []
        future = queue.send(payload, stack, traces, group)
        self._recorder.sync.sent.append(traces[0])
        return PendingExchange(future, traces[0])

    def land(self, pending: PendingExchange) -> Tensor:
        """Wait for a payload: the mean over ranks, in the payload's own memory."""
        marks = self._recorder.sync
        start = self._recorder.mark()
        mean: Tensor = pending.future.wait()
        marks.waits.append((start, self._recorder.mark()))
        marks.landed.append(pending.trace)
        return mean

    def average(self, buckets: ParameterBuckets, kind: Kind, group: RankGroup | None = None) -> None:
        """Overwrite the floating-point numbers in the buckets with their mean over ranks, exactly: no hook
        touches them. The group is of the plain queue; None: all ranks.
        """
        group = group or self.exchange.plain.world
        self._exchange(buckets, kind, self._plain, group, 1.0 / group.size)

    def broadcast(self, buckets: ParameterBuckets, kind: Kind, source: int) -> None:
        """Overwrite what is in the buckets with what rank `source` has in them."""
        self._exchange(buckets, kind, broadcast_stack(source), self.exchange.plain.world, None)

    def _exchange(
        self, buckets: ParameterBuckets, kind: Kind, stack: Stack, group: RankGroup, share: float | None
    ) -> None:
        pending = []
        for index, layout in enumerate(buckets.layouts):
            flat = buckets.flat(index)
            if share is not None:
                flat.mul_(share)
            payload = Payload(flat, layout.params, kind, layout.index)
            pending.append(self.send(self.exchange.plain, payload, stack, group))
        for index, one in enumerate(pending):
            buckets.put(index, self.land(one))
