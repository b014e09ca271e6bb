"""Sends parameters and their like over the ranks, and notes in the ledger what that cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from ddprun.telemetry.ledger import Ledger
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.exchange import Exchange
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.queue import CommQueue
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Kind, Payload
from ddprun_hooks.stack import Stack, all_reduce_stack, broadcast_stack


@dataclass(frozen=True, slots=True)
class Parcel:
    """A payload under way."""

    future: Future[Tensor]
    trace: BucketTrace[Any]


class Carrier:
    """What policies send with.

    Args:
        exchange: of the run.
        ledger: takes the traces, and how long the training thread waited for them.
        cap_bytes: largest size of a bucket.
    """

    def __init__(self, exchange: Exchange, ledger: Ledger, cap_bytes: float) -> None:
        self.exchange = exchange
        self.cap_bytes = cap_bytes
        self._ledger = ledger
        self._plain = all_reduce_stack()

    def send(self, lane: CommQueue, payload: Payload, stack: Stack, team: RankGroup) -> Parcel:
        """Start a payload on its way; `land` waits for it. All ranks send in one order."""
        traces: list[BucketTrace[Any]] = []
        future = lane.send(payload, stack, traces, team)
        self._ledger.sync.sent.append(traces[0])
        return Parcel(future, traces[0])

    def land(self, parcel: Parcel) -> Tensor:
        """Wait for a payload: the mean over ranks, in the payload's own memory."""
        marks = self._ledger.sync
        start = self._ledger.mark()
        mean: Tensor = parcel.future.wait()
        marks.waits.append((start, self._ledger.mark()))
        marks.landed.append(parcel.trace)
        return mean

    def average(self, buckets: ParameterBuckets, kind: Kind, team: RankGroup | None = None) -> None:
        """Overwrite what is in the buckets with its mean over ranks, exactly: no hook touches it.

        Args:
            buckets: of floating-point tensors.
            kind: what they are.
            team: the ranks, of the plain lane; None: all of them.
        """
        team = team or self.exchange.plain.world
        self._exchange(buckets, kind, self._plain, team, 1.0 / team.size)

    def broadcast(self, buckets: ParameterBuckets, kind: Kind, source: int) -> None:
        """Overwrite what is in the buckets with what rank `source` has in them."""
        self._exchange(buckets, kind, broadcast_stack(source), self.exchange.plain.world, None)

    def _exchange(
        self, buckets: ParameterBuckets, kind: Kind, stack: Stack, team: RankGroup, share: float | None
    ) -> None:
        parcels = []
        for place, layout in enumerate(buckets.layouts):
            flat = buckets.flat(place)
            if share is not None:
                flat.mul_(share)
            payload = Payload(flat, layout.params, kind, layout.index)
            parcels.append(self.send(self.exchange.plain, payload, stack, team))
        self.settle(buckets, parcels)

    def settle(self, buckets: ParameterBuckets, parcels: Sequence[Parcel]) -> None:
        """Put what has come back in its place."""
        for place, parcel in enumerate(parcels):
            buckets.put(place, self.land(parcel))
