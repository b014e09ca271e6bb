"""The one owner of what ranks exchange: process groups, lanes, and the small control word."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.channel import Channel, Collective
from ddprun_hooks.errors import DisagreementError
from ddprun_hooks.flight import now_us
from ddprun_hooks.hook import Need, Needs
from ddprun_hooks.lane import HostLane, Lane, StreamLane
from ddprun_hooks.payload import Payload
from ddprun_hooks.plain import broadcast_from
from ddprun_hooks.porter import Porter
from ddprun_hooks.team import Team
from ddprun_hooks.teams import Ground, Layout, open_teams
from ddprun_hooks.watch import NOBODY, Ticket, Watch, waiting

_TOLD_BYTES = 64
_MESSAGE_BYTES = 25 << 20
_NOBODY: Needs = MappingProxyType({})
_ALL_RANKS: Needs = MappingProxyType({Need("world"): 1})


class Posted:
    """A control word on its way."""

    __slots__ = ("_gathered", "_ticket", "_work")

    def __init__(self, work: dist.Work, gathered: list[Tensor], ticket: Ticket) -> None:
        self._work = work
        self._gathered = gathered
        self._ticket = ticket
        ticket.done_when(work.is_completed)

    def wait(self) -> Tensor:
        """Every rank's word: shape (world size, length), float64."""
        try:
            self._work.wait()
        except BaseException:
            self._ticket.broke()
            raise
        self._ticket.done()
        return torch.stack(self._gathered)


class Control:
    """Small numbers between ranks, over Gloo in host memory whatever the device is.

    Args:
        group: a Gloo process group that nothing else uses.
        rank, size: this rank's place in it, and how many there are.
        watch: is told of what is exchanged.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, watch: Watch = NOBODY) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self._words = watch.line("control", range(size))
        self._letters = watch.line("control, between two ranks", range(size))

    def post(self, word: Sequence[float] | Tensor, what: str = "the control word") -> Posted:
        """Send this rank's numbers to all ranks without waiting. All ranks post words of one length.

        Args:
            word: the numbers, shape (length,); not to be changed before they have been sent.
            what: they are, for whoever looks on.
        """
        mine = torch.as_tensor(word, dtype=torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        ticket = self._words.issue("all_gather", what=what)
        return Posted(self._group.allgather([gathered], [mine]), gathered, ticket)

    def gather(self, word: Sequence[float], what: str = "numbers of every rank") -> Tensor:
        """Every rank's numbers: shape (world size, len(word)), float64."""
        return self.post(word, what).wait()

    def tell(self, data: bytes, what: str = "bytes of every rank") -> list[bytes]:
        """Every rank's bytes, at most 64, in rank order."""
        if len(data) > _TOLD_BYTES:
            raise ValueError(f"at most {_TOLD_BYTES} bytes can be told, got {len(data)}")
        words = self.gather([float(len(data)), *map(float, data.ljust(_TOLD_BYTES))], what)
        return [bytes(int(byte) for byte in word[1 : 1 + int(word[0])]) for word in words.tolist()]

    def barrier(self, what: str = "a barrier") -> None:
        """Wait until every rank is here."""
        self.gather([0.0], what)

    def agree(self, what: str, described: str) -> None:
        """Make sure that every rank describes `what` alike.

        Raises:
            DisagreementError: names the ranks that differ from rank 0.
        """
        digests = self.tell(hashlib.sha256(described.encode()).digest(), f"agreement on {what}")
        odd = [rank for rank in range(self.size) if digests[rank] != digests[0]]
        if odd:
            ranks = ", ".join(map(str, odd))
            raise DisagreementError(
                f"rank {ranks} and rank 0 disagree about {what}; on rank {self.rank} it is: {described}"
            )

    def clock_offset(self, rounds: int = 12) -> tuple[float, float]:
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
            apart, step = step, step // 2
            if self.rank % apart == step:
                offset, bound = self._ask_for_time(self.rank - step, rounds)
            elif self.rank % apart == 0 and self.rank + step < self.size:
                self._tell_time(self.rank + step, rounds, offset, bound)
        return offset, bound

    def _ask_for_time(self, peer: int, rounds: int) -> tuple[float, float]:
        """Offset and bound, of a rank that knows its own."""
        best = 0.0, math.inf
        answer = torch.empty(2, dtype=torch.float64)
        with waiting(self._letters, "receive", "comparing clocks", [peer]):
            for _ in range(rounds):
                sent = now_us()
                self._send(sent, peer)
                self._group.recv([answer], peer, 0).wait()
                received = now_us()
                theirs, their_bound = answer.tolist()
                half = (received - sent) / 2
                if half + 1.0 + their_bound < best[1]:
                    best = sent + half - theirs, half + 1.0 + their_bound
        return best

    def _tell_time(self, peer: int, rounds: int, offset: float, bound: float) -> None:
        """Answer by rank 0's clock, as far as this rank knows it."""
        with waiting(self._letters, "receive", "comparing clocks", [peer]):
            for _ in range(rounds):
                self._receive(peer)
                answer = torch.tensor([now_us() - offset, bound], dtype=torch.float64)
                self._group.send([answer], peer, 0).wait()

    def send_bytes(self, data: bytes, target: int) -> None:
        """Send bytes to one rank, which has to call `receive_bytes`."""
        with waiting(self._letters, "send", f"{len(data)} bytes of records", [target]):
            self._send(len(data), target)
            if data:
                self._group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], target, 0).wait()

    def receive_bytes(self, source: int) -> bytes:
        """Receive what `send_bytes` on rank `source` sends."""
        with waiting(self._letters, "receive", "records", [source]):
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


def open_control(timeout: timedelta, watch: Watch = NOBODY) -> Control:
    """Control among all ranks of the default group, each of which has to call this."""
    size = dist.get_world_size()
    with waiting(watch.line("set-up", range(size)), "new_group", "making the process group of control"):
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    return Control(group, dist.get_rank(), size, watch)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Everything over which the ranks exchange; made once, before the first step, by all ranks together."""

    gradients: Lane
    """For gradient buckets."""

    deltas: Lane
    """For changes of parameters, through hooks: a lane of its own, so that it can never meet gradients."""

    plain: Lane
    """For parameters, buffers and optimizer state as they are. It has a lane of its own, too: what is sent
    here never waits for an exchange of deltas that is still under way."""

    exact: Team
    """For looking at the ranks from beside (fidelity, audit): what it carries is no stack's."""

    control: Control

    @classmethod
    def open(
        cls,
        *,
        control: Control,
        device: torch.device,
        backend: str,
        hosts: Sequence[str],
        local_sizes: Sequence[int],
        gradients: Needs,
        deltas: Needs = _NOBODY,
        plain: Needs = _ALL_RANKS,
        timeout: timedelta,
        watch: Watch = NOBODY,
    ) -> "Exchange":
        """Make all process groups. Every rank of the default group has to call this, with equal arguments.

        Args:
            control: of all ranks.
            device: where this rank's gradients are.
            backend: "gloo" or "nccl".
            hosts: host of each rank, in rank order.
            local_sizes: for each rank, how many ranks its launcher started on its host.
            gradients: among which ranks that lane exchanges, and how many collectives one payload needs there
                at most.
            deltas: the same for that lane.
            plain: the same for that lane.
            timeout: how long a collective may take before it fails.
            watch: is told of every collective.

        Raises:
            HookSetupError: the ranks do not lie as a stack needs them.
        """
        layout = Layout(dist.get_rank(), tuple(hosts), tuple(local_sizes))
        on_gpu = device.type == "cuda"

        everybody = list(range(layout.size))
        set_up = watch.line("set-up of groups", everybody)

        def make_group(name: str, ranks: list[int]) -> Any:
            with waiting(set_up, "new_group", f"making the process group {name}"):
                return dist.new_group(ranks, backend=backend, timeout=timeout, group_desc=name)

        ground = Ground(make_group, control.tell, timeout.total_seconds(), Porter(), watch)

        def lane(name: str, needs: Needs) -> Lane:
            # A stream keeps collectives in order: there, one group serves every round.
            rounds = dict.fromkeys(needs, 1) if on_gpu else needs
            world = open_teams(name, layout, rounds, ground)
            return StreamLane(world, device) if on_gpu else HostLane(world)

        exact = Team(
            "exact",
            layout.rank,
            layout.hosts,
            [make_group("exact", everybody)],
            lines={False: [watch.line("exact", everybody)]},
        )
        return cls(
            gradients=lane("world", gradients),
            deltas=lane("deltas", deltas),
            plain=lane("plain", plain),
            exact=exact,
            control=control,
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors`, in place, with those of rank `source`, in flat messages of one dtype each."""
        buckets = ParameterBuckets(
            {str(place): tensor for place, tensor in enumerate(tensors)}, _MESSAGE_BYTES
        )
        stack = broadcast_from(source)
        for place, layout in enumerate(buckets.layouts):
            payload = Payload(buckets.flat(place), layout.params, "parameters", layout.index)
            buckets.put(place, self.plain.send(payload, stack, []).wait())

    def exact_sum(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Sum `tensor` over the ranks, in place, beside every stack; gives it, and the bytes sent."""
        wanted = Channel(self.exact).all_reduce(tensor)
        self._beside(wanted, "the exact mean")
        return tensor, self.exact.wire_bytes(wanted)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of the ranks' values at each place of `tensor`, in place, beside every stack."""
        self._beside(Channel(self.exact).all_reduce_max(tensor), "the largest value, for the audit")
        return tensor

    def _beside(self, wanted: Collective, what: str) -> None:
        """A collective beside every lane, waited for."""
        ticket = self.exact.line(wanted, 0).issue(wanted.op, what=what)
        work = self.exact.launch(wanted, 0)
        if isinstance(work, dist.Work):
            ticket.done_when(work.is_completed)  # with NCCL, `wait` waits on the stream alone
        try:
            work.wait()
        except BaseException:
            ticket.broke()
            raise
