"""The one owner of what ranks exchange: process groups, lanes, and the small control word."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.errors import DisagreementError
from ddprun_hooks.flight import now_us
from ddprun_hooks.hook import Collective
from ddprun_hooks.lane import HostLane, Lane, StreamLane
from ddprun_hooks.team import Team


class Posted:
    """A control word on its way."""

    __slots__ = ("_gathered", "_work")

    def __init__(self, work: dist.Work, gathered: list[Tensor]) -> None:
        self._work = work
        self._gathered = gathered

    def wait(self) -> Tensor:
        """Every rank's word: shape (world size, length), float64."""
        self._work.wait()
        return torch.stack(self._gathered)


class Control:
    """Small numbers between ranks, over Gloo in host memory whatever the device is.

    Args:
        group: a Gloo process group that nothing else uses.
        rank, size: this rank's place in it, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def post(self, word: Sequence[float]) -> Posted:
        """Send this rank's numbers to all ranks without waiting. All ranks post words of one length."""
        mine = torch.tensor(word, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        return Posted(self._group.allgather([gathered], [mine]), gathered)

    def gather(self, word: Sequence[float]) -> Tensor:
        """Every rank's numbers: shape (world size, len(word)), float64."""
        return self.post(word).wait()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather([0.0])

    def agree(self, what: str, described: str) -> None:
        """Make sure that every rank describes `what` alike.

        Raises:
            DisagreementError: names the ranks that differ from rank 0.
        """
        digest = hashlib.sha256(described.encode()).digest()
        words = self.gather([float(byte) for byte in digest])
        odd = [rank for rank in range(self.size) if not torch.equal(words[rank], words[0])]
        if odd:
            ranks = ", ".join(map(str, odd))
            raise DisagreementError(
                f"rank {ranks} and rank 0 disagree about {what}; on rank {self.rank} it is: {described}"
            )

    def clock_offset(self, rounds: int = 12) -> tuple[float, float]:
        """How far this rank's monotonic clock is ahead of rank 0's, and the error bound, in microseconds.

        Cristian's algorithm (Distributed Computing 3, 1989): rank 0 answers each rank in turn; of `rounds`
        exchanges the one with the shortest round trip counts, and half of it is the error bound.
        """
        if self.rank == 0:
            for peer in range(1, self.size):
                for _ in range(rounds):
                    self._receive(peer)
                    self._send(now_us(), peer)
            return 0.0, 0.0
        best: tuple[float, float] | None = None
        for _ in range(rounds):
            sent = now_us()
            self._send(sent, 0)
            theirs = self._receive(0)
            received = now_us()
            bound = (received - sent) / 2
            if best is None or bound < best[1]:
                best = (sent + bound - theirs, bound)
        assert best is not None
        return best

    def send_bytes(self, data: bytes, target: int) -> None:
        """Send bytes to one rank, which has to call `receive_bytes`."""
        self._send(len(data), target)
        if data:
            self._group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], target, 0).wait()

    def receive_bytes(self, source: int) -> bytes:
        """Receive what `send_bytes` on rank `source` sends."""
        length = self._receive(source)
        if not length:
            return b""
        buffer = torch.empty(length, dtype=torch.uint8)
        self._group.recv([buffer], source, 0).wait()
        return buffer.numpy().tobytes()

    def _send(self, number: int, target: int) -> None:
        self._group.send([torch.tensor([number], dtype=torch.int64)], target, 0).wait()

    def _receive(self, source: int) -> int:
        number = torch.empty(1, dtype=torch.int64)
        self._group.recv([number], source, 0).wait()
        return int(number.item())


@dataclass(frozen=True, slots=True)
class Exchange:
    """Everything over which the ranks exchange; made once, before the first step, by all ranks together."""

    gradients: Lane
    """For gradient buckets."""

    parameters: Team
    """For parameters and buffers: a lane of its own, so that it can never meet gradient traffic."""

    control: Control

    @classmethod
    def open(
        cls, *, device: torch.device, backend: str, hosts: Sequence[str], rounds: int, timeout: timedelta
    ) -> "Exchange":
        """Make all process groups. Every rank of the default group has to call this, with equal arguments.

        Args:
            device: where this rank's gradients are.
            backend: "gloo" or "nccl".
            hosts: host of each rank, in rank order.
            rounds: the most collectives that any stack of the run needs for one payload.
            timeout: how long a collective may take before it fails.
        """
        rank, size = dist.get_rank(), dist.get_world_size()

        def groups(count: int) -> list[dist.ProcessGroup]:
            return [dist.new_group(backend=backend, timeout=timeout) for _ in range(count)]

        on_gpu = device.type == "cuda"
        world = Team("world", rank, tuple(hosts), groups(1 if on_gpu else max(1, rounds)))
        return cls(
            gradients=StreamLane(world, device) if on_gpu else HostLane(world),
            parameters=Team("parameters", rank, tuple(hosts), groups(1)),
            control=Control(dist.new_group(backend="gloo", timeout=timeout), rank, size),
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors`, in place, with those of rank `source`: one flat message for each dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            self.parameters.launch(Collective("broadcast", flat, flat, source), 0).wait()
            start = 0
            for tensor in group:
                tensor.detach().copy_(flat[start : start + tensor.numel()].view_as(tensor))
                start += tensor.numel()
