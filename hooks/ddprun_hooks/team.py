"""A team: one set of ranks, what they exchange over, and what a collective on it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.arena import Arena
from ddprun_hooks.channel import Collective
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.porter import Porter
from ddprun_hooks.watch import NOBODY, Line


@dataclass(frozen=True, slots=True)
class Team:
    """One set of ranks with a process group, or an area of shared memory, for each round.

    Collectives of different rounds travel on different groups, so that the k-th collective of one bucket can
    pass the (k+1)-th of another without the two being matched with each other on another rank.
    """

    name: str
    rank: int
    """This rank's place in the team."""

    hosts: tuple[str, ...]
    """Host of each member, in team order."""

    groups: Sequence[dist.ProcessGroup] = ()
    arenas: Sequence[Arena] = ()
    porter: Porter | None = None
    """Moves what goes through the arenas."""

    splits: Mapping[int | None, tuple[Team, Team]] = field(default_factory=dict)
    """For each number of hosts that a hook splits this team into (None: as launched): the ranks of this
    rank's host, and the ranks of its place on every host."""

    lines: Mapping[bool, Sequence[Line]] = field(default_factory=dict)
    """Who is told of the collectives of each round: through shared memory (True) and over the network."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def line(self, wanted: Collective, round_index: int) -> Line:
        """Who is told of a collective of this round."""
        lines = self.lines.get(wanted.shared, ())
        return lines[round_index] if round_index < len(lines) else NOBODY

    def launch(self, wanted: Collective, round_index: int) -> dist.Work | SharedWork:
        """Start a collective on the group of its round.

        Raises:
            IndexError: no group was made for this round.
        """
        if wanted.shared:
            return self._launch_shared(wanted, self.arenas[round_index])
        group = self.groups[round_index]
        match wanted.op:
            case "all_reduce":
                reduction = dist.ReduceOp.MAX if wanted.maximum else dist.ReduceOp.SUM
                return group.allreduce([wanted.tensor], reduction)
            case "all_gather":
                return self._all_gather(wanted, group)
            case "all_to_all":
                mine = [] if wanted.sizes is None else [wanted.sizes[self.rank]] * self.size
                return group.alltoall_base(wanted.output, wanted.tensor, mine, list(wanted.sizes or ()))
            case "broadcast":
                options = dist.BroadcastOptions()
                options.rootRank = wanted.source
                options.rootTensor = 0
                return group.broadcast([wanted.tensor], options)
        raise HookSetupError(f'"{wanted.op}" goes through shared memory only')

    def _all_gather(self, wanted: Collective, group: dist.ProcessGroup) -> dist.Work:
        sizes = wanted.sizes
        if sizes is None or len(set(sizes)) == 1:
            return group.allgather([list(wanted.output.chunk(self.size))], [wanted.tensor])
        # Gloo gathers equal lengths only: each rank sends its own to every other instead.
        copies = wanted.tensor.repeat(self.size)
        return group.alltoall_base(wanted.output, copies, list(sizes), [wanted.tensor.numel()] * self.size)

    def _launch_shared(self, wanted: Collective, arena: Arena) -> SharedWork:
        assert self.porter is not None, "a team with arenas has a porter"
        match wanted.op:
            case "all_reduce":
                steps = arena.all_reduce(wanted.tensor)
            case "reduce_scatter":
                assert wanted.sizes is not None
                steps = arena.reduce_scatter(wanted.tensor, wanted.sizes, wanted.output)
            case "all_gather":
                sizes = wanted.sizes or [wanted.tensor.numel()] * self.size
                steps = arena.all_gather(wanted.tensor, sizes, wanted.output)
            case _:
                raise HookSetupError(f'"{wanted.op}" does not go through shared memory')
        return SharedWork(self.porter.submit(arena, steps))

    def wire_bytes(self, wanted: Collective) -> int:
        """Bytes this rank sends, for the ring algorithms that Gloo and NCCL use on large tensors.

        All-reduce: 2(n-1)/n of the tensor; all-gather: (n-1) shards; all-to-all: (n-1)/n of the tensor
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Broadcast: a chain in which
        every rank but the last passes the tensor on once. Through shared memory: none.
        """
        n, size = self.size, nbytes(wanted.tensor)
        if wanted.shared:
            return 0
        match wanted.op:
            case "all_reduce":
                return round(2 * (n - 1) * size / n)
            case "all_gather":
                return (n - 1) * size
            case "all_to_all":
                return size - self._part_bytes(wanted, self.rank)
            case "broadcast":
                return size if (self.rank - wanted.source) % n != n - 1 else 0
        return 0

    def between_hosts_bytes(self, wanted: Collective) -> int:
        """The part of `wire_bytes` that leaves this rank's host."""
        here, n = self.hosts[self.rank], self.size
        if wanted.shared:
            return 0
        if wanted.op == "all_to_all":
            return sum(self._part_bytes(wanted, rank) for rank in range(n) if self.hosts[rank] != here)
        leaves = self.hosts[(self.rank + 1) % n] != here
        return self.wire_bytes(wanted) if leaves else 0

    def _part_bytes(self, wanted: Collective, rank: int) -> int:
        """Size of the part of an all-to-all that goes to `rank`, in bytes."""
        if wanted.sizes is None:
            return nbytes(wanted.tensor) // self.size
        return wanted.sizes[rank] * wanted.tensor.element_size()


class SharedWork:
    """A collective under way in shared memory."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def get_future(self) -> Future[None]:
        """Done when the collective is."""
        return self._future

    def wait(self) -> bool:
        """Wait for it."""
        self._future.wait()
        return True


def nbytes(tensor: Tensor) -> int:
    """Size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
