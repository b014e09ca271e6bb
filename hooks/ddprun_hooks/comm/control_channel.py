"""Small messages between ranks, over Gloo in host memory whatever the device is."""

import hashlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.comm.collective_observer import NULL_OBSERVER, CollectiveObserver, observed_wait
from ddprun_hooks.comm.trace import now_us
from ddprun_hooks.errors import DisagreementError, format_ranks


class ControlChannel:
    """Numbers and bytes of every rank, a barrier, and agreement, over a Gloo group used in one order."""

    def __init__(self, group: dist.ProcessGroup, observer: CollectiveObserver = NULL_OBSERVER) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._gather_sequence = observer.new_sequence("control", range(self.size))
        self._p2p_sequence = observer.new_sequence("control, between two ranks", range(self.size))

    def all_gather_async(
        self, numbers: Sequence[float] | Tensor, what: str = "the control message"
    ) -> Callable[[], Tensor]:
        """Send numbers, shape (length,), to all ranks, as many on each; leave them until they are sent. Gives
        what waits for every rank's: shape (world size, length), float64.
        """
        mine = torch.as_tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        pending = self._gather_sequence.record_issued("all_gather", what=what)
        with pending:
            work = self.group.allgather([gathered], [mine])
        pending.set_completion_check(work.is_completed)

        def wait() -> Tensor:
            with pending:
                work.wait()
            pending.mark_done()
            return torch.stack(gathered)

        return wait

    def all_gather(self, numbers: Sequence[float], what: str = "numbers of every rank") -> Tensor:
        """Every rank's numbers: shape (world size, len(numbers)), float64."""
        return self.all_gather_async(numbers, what)()

    def all_gather_bytes(self, data: bytes, what: str = "bytes of every rank") -> list[bytes]:
        """Every rank's bytes, as many as there are, in rank order."""
        lengths = [int(length) for length in self.all_gather([len(data)], what)[:, 0].tolist()]
        padded = bytearray(data.ljust(-(-max(1, *lengths) // 8) * 8, b"\0"))  # as numbers, copied bit for bit
        rows = self.all_gather_async(torch.frombuffer(padded, dtype=torch.float64), what)()
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def differing_ranks(self, data: bytes, what: str) -> list[int]:
        """The ranks whose bytes are others than rank 0's."""
        of_ranks = self.all_gather_bytes(data, what)
        return [rank for rank, one in enumerate(of_ranks) if one != of_ranks[0]]

    def all_reduce_max(self, values: Tensor, what: str) -> Tensor:
        """The largest of the ranks' values at each place, in host memory; `values` stay as they are."""
        values = values.to("cpu", copy=True)
        with observed_wait(self._gather_sequence, "all_reduce", what):
            self.group.allreduce([values], dist.ReduceOp.MAX).wait()
        return values

    def barrier(self, what: str = "a barrier") -> None:
        self.all_gather([0.0], what)

    def check_agreement(self, what: str, description: str) -> None:
        """Raise DisagreementError, which names the ranks, unless all describe `what` alike."""
        digest = hashlib.sha256(description.encode()).digest()
        if odd := self.differing_ranks(digest, f"agreement on {what}"):
            raise DisagreementError(
                f"{format_ranks(odd)} and rank 0 disagree about {what}; "
                f"on rank {self.rank} it is: {description}"
            )

    def measure_clock_offset(self, rounds: int = 12) -> tuple[float, float]:
        """How far this rank's monotonic clock is ahead of rank 0's, and the error bound, in microseconds.

        Cristian's algorithm (Distributed Computing 3, 1989) along a binomial tree: at each of its levels
        every rank that knows its offset answers one that does not, all of these pairs at the same time, so
        that n ranks take as long as log2 n pairs. Of `rounds` exchanges of a pair the one with the shortest
        round trip counts. Half of it, and what whole microseconds leave out, is the pair's error bound; the
        bounds on the way to rank 0 add up.
        """
        offset = bound = 0.0
        step = 1 << (self.size - 1).bit_length()
        while step > 1:
            span, step = step, step // 2
            if self.rank % span == step:
                offset, bound = self._measure_offset_to_peer(self.rank - step, rounds)
            elif self.rank % span == 0 and self.rank + step < self.size:
                self._answer_clock_queries(self.rank + step, rounds, offset, bound)
        return offset, bound

    def _measure_offset_to_peer(self, peer: int, rounds: int) -> tuple[float, float]:
        """Offset and bound, of a rank that knows its own."""
        best = 0.0, math.inf
        answer = torch.empty(2, dtype=torch.float64)
        with observed_wait(self._p2p_sequence, "receive", "comparing clocks", [peer]):
            for _ in range(rounds):
                sent = now_us()
                self._send(sent, peer)
                self.group.recv([answer], peer, 0).wait()
                received = now_us()
                theirs, their_bound = answer.tolist()
                half = (received - sent) / 2
                if half + 1.0 + their_bound < best[1]:
                    best = sent + half - theirs, half + 1.0 + their_bound
        return best

    def _answer_clock_queries(self, peer: int, rounds: int, offset: float, bound: float) -> None:
        """Answer by rank 0's clock, as far as this rank knows it."""
        with observed_wait(self._p2p_sequence, "receive", "comparing clocks", [peer]):
            for _ in range(rounds):
                self._receive(peer)
                answer = torch.tensor([now_us() - offset, bound], dtype=torch.float64)
                self.group.send([answer], peer, 0).wait()

    def send_bytes(self, data: bytes, target: int, what: str) -> None:
        """Send bytes to one rank, which has to call `receive_bytes`; `what` they are, for the observer."""
        with observed_wait(self._p2p_sequence, "send", f"{len(data)} bytes of {what}", [target]):
            self._send(len(data), target)
            if data:
                self.group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], target, 0).wait()

    def receive_bytes(self, source: int, what: str) -> bytes:
        """Receive what `send_bytes` on rank `source` sends."""
        with observed_wait(self._p2p_sequence, "receive", what, [source]):
            length = self._receive(source)
            if not length:
                return b""
            buffer = torch.empty(length, dtype=torch.uint8)
            self.group.recv([buffer], source, 0).wait()
        return buffer.numpy().tobytes()

    def _send(self, number: int, target: int) -> None:
        self.group.send([torch.tensor([number], dtype=torch.int64)], target, 0).wait()

    def _receive(self, source: int) -> int:
        number = torch.empty(1, dtype=torch.int64)
        self.group.recv([number], source, 0).wait()
        return int(number.item())


def open_control_channel(timeout: timedelta, observer: CollectiveObserver = NULL_OBSERVER) -> ControlChannel:
    """Open the control channel of the default group. Every rank of it has to call this."""
    set_up = observer.new_sequence("set-up", range(dist.get_world_size()))
    with observed_wait(set_up, "new_group", "making the process group of control"):
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    return ControlChannel(group, observer)
