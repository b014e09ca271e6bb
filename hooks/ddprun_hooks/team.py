"""A team: the process groups over which one set of ranks exchanges, and what a collective on it costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ddprun_hooks.hook import Collective


@dataclass(frozen=True, slots=True)
class Team:
    """One set of ranks with a process group for each round.

    Collectives of different rounds travel on different groups, so that the k-th collective of one bucket can
    pass the (k+1)-th of another without the two being matched with each other on another rank.
    """

    name: str
    rank: int
    """This rank's place in the team."""

    hosts: tuple[str, ...]
    """Host of each member, in team order."""

    groups: Sequence[dist.ProcessGroup]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def launch(self, wanted: Collective, round_index: int) -> dist.Work:
        """Start a collective on the group of its round."""
        group = self.groups[round_index]
        match wanted.op:
            case "all_reduce":
                return group.allreduce([wanted.tensor], dist.ReduceOp.SUM)
            case "all_gather":
                return group.allgather([list(wanted.output.chunk(self.size))], [wanted.tensor])
            case "all_to_all":
                return group.alltoall_base(wanted.output, wanted.tensor, [], [])
            case "broadcast":
                options = dist.BroadcastOptions()
                options.rootRank = wanted.source
                options.rootTensor = 0
                return group.broadcast([wanted.tensor], options)

    def wire_bytes(self, wanted: Collective) -> int:
        """Bytes this rank sends, for the ring algorithms that Gloo and NCCL use on large tensors.

        All-reduce: 2(n-1)/n of the tensor; all-gather: (n-1) shards; all-to-all: (n-1)/n of the tensor
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Broadcast: a chain in which
        every rank but the last passes the tensor on once.
        """
        n, size = self.size, nbytes(wanted.tensor)
        match wanted.op:
            case "all_reduce":
                return round(2 * (n - 1) * size / n)
            case "all_gather":
                return (n - 1) * size
            case "all_to_all":
                return round((n - 1) * size / n)
            case "broadcast":
                return size if (self.rank - wanted.source) % n != n - 1 else 0

    def between_hosts_bytes(self, wanted: Collective) -> int:
        """The part of `wire_bytes` that leaves this rank's host."""
        here, n = self.hosts[self.rank], self.size
        if wanted.op == "all_to_all":
            away = sum(host != here for host in self.hosts)
            return round(away * nbytes(wanted.tensor) / n)
        leaves = self.hosts[(self.rank + 1) % n] != here
        return self.wire_bytes(wanted) if leaves else 0


def nbytes(tensor: Tensor) -> int:
    """Size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
