"""Who exchanges with whom: the rank groups that stacks need, made by all ranks together before step 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.comm.collective_observer import (
    NULL_OBSERVER,
    CollectiveObserver,
    CollectiveSequence,
    observed_wait,
)
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.shm.group import ShmGroup
from ddprun_hooks.shm.progress_thread import progress_thread
from ddprun_hooks.shm.setup import open_shm_groups


class GroupRequirement(NamedTuple):
    """Ranks among which a stack exchanges: process groups are made for them before the first step."""

    # `world`: all ranks that the stack reduces over. `within`, `across`: the two legs of `hierarchical`.
    # `part`: the groups of a partition, as a sync policy may want them.
    scope: str
    hosts: int | None = None  # into how many `hierarchical` splits the ranks; None: as launched
    via_shared_memory: bool = False  # through shared memory
    parts: tuple[tuple[int, ...], ...] = ()  # of the leg `part`: the ranks of each group, each rank once


GroupRequirements = Mapping[GroupRequirement, int]  # how many collectives one payload needs among which ranks


Op = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast"]
Transport = Literal["network", "shared_memory"]


@dataclass(slots=True, eq=False)
class CollectiveRequest:
    """A collective that a hook asks for: `await` it to have it done. It is a request: the queue decides on
    which process group it travels and when it starts, so that all ranks issue collectives in one order.
    """

    group: RankGroup
    op: Op
    tensor: Tensor
    output: Tensor
    via_shared_memory: bool = False
    sizes: Sequence[int] | None = None  # elements of each rank's part of a tensor; None: equal parts
    source: int = 0

    @property
    def uses_all_to_all(self) -> bool:
        """Whether each rank sends every other rank its part directly, instead of in a ring or a chain."""
        # Gloo gathers equal lengths only.
        unequal = self.sizes is not None and len(set(self.sizes)) > 1
        return self.op == "all_to_all" or (self.op == "all_gather" and unequal)

    def __await__(self) -> Generator[CollectiveRequest, Tensor, Tensor]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks, with a process group or an area of shared memory for each round of collectives.

    Collectives of different rounds travel on different process groups, so that the k-th collective of one
    bucket can pass the (k+1)-th of another without the two being matched with each other on another rank.
    """

    name: str
    rank: int  # this rank in the group
    hosts: tuple[str, ...]  # host of each rank, in group order
    process_groups: Sequence[dist.ProcessGroup] = ()
    shm_groups: Sequence[ShmGroup] = ()
    # For each number of hosts that a hook splits this group into (None: as launched): the ranks of this
    # rank's host, and the ranks of the same index on every host.
    splits_by_host_count: Mapping[int | None, tuple[RankGroup, RankGroup]] = field(default_factory=dict)
    # For each partition of this group's ranks: the part with this rank.
    partition_groups: Mapping[tuple[tuple[int, ...], ...], RankGroup] = field(default_factory=dict)
    # Observes the collectives of each round.
    sequences: Mapping[Transport, Sequence[CollectiveSequence]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.hosts)

    def sequence(self, collective: CollectiveRequest, round_index: int) -> CollectiveSequence:
        """What observes a collective of this round."""
        sequences = self.sequences.get("shared_memory" if collective.via_shared_memory else "network", ())
        return sequences[round_index] if round_index < len(sequences) else CollectiveSequence()

    def launch(self, collective: CollectiveRequest, round_index: int) -> dist.Work | Future[None]:
        """Start a collective on the group of its round, which must exist."""
        tensor, output, sizes = collective.tensor, collective.output, collective.sizes
        if collective.via_shared_memory:
            shm = self.shm_groups[round_index]
            parts = sizes or [tensor.numel()] * self.size
            match collective.op:
                case "all_reduce":
                    operation = shm.all_reduce(tensor)
                case "reduce_scatter":
                    operation = shm.reduce_scatter(tensor, parts, output)
                case "all_gather":
                    operation = shm.all_gather(tensor, parts, output)
                case _:
                    raise HookSetupError(f'"{collective.op}" does not go through shared memory')
            return progress_thread.submit(shm, operation)
        group = self.process_groups[round_index]
        match collective.op:
            case "all_reduce":
                return group.allreduce([tensor], dist.ReduceOp.SUM)
            case "all_gather" if not collective.uses_all_to_all:
                return group._allgather_base(output, tensor)  # a list would cost NCCL a second copy
            case "all_gather":
                assert sizes is not None
                copies = tensor.repeat(self.size)
                return group.alltoall_base(output, copies, list(sizes), [tensor.numel()] * self.size)
            case "all_to_all":
                mine = [] if sizes is None else [sizes[self.rank]] * self.size
                return group.alltoall_base(output, tensor, mine, list(sizes or ()))
            case "broadcast":
                options = dist.BroadcastOptions()
                options.rootRank = collective.source
                return group.broadcast([tensor], options)
        raise HookSetupError(f'"{collective.op}" goes through shared memory only')

    def wire_bytes(self, collective: CollectiveRequest) -> int:
        """Bytes this rank sends, for the ring algorithms that Gloo and NCCL use on large tensors.

        All-reduce: 2(n-1)/n of the tensor; all-gather: (n-1) shards; all-to-all: (n-1)/n of the tensor
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Broadcast: a chain in which
        every rank but the last passes the tensor on once. Through shared memory: none.
        """
        n, size = self.size, collective.tensor.nbytes
        if collective.via_shared_memory:
            return 0
        match collective.op:
            case "all_reduce":
                return round(2 * (n - 1) * size / n)
            case "all_gather":
                return (n - 1) * size
            case "all_to_all":
                return size - self._part_bytes(collective, self.rank)
            case "broadcast":
                return size if (self.rank - collective.source) % n != n - 1 else 0
        return 0

    def between_hosts_bytes(self, collective: CollectiveRequest) -> int:
        """The part of `wire_bytes` that leaves this rank's host."""
        here, n = self.hosts[self.rank], self.size
        if collective.uses_all_to_all and not collective.via_shared_memory:
            return sum(self._part_bytes(collective, rank) for rank in range(n) if self.hosts[rank] != here)
        leaves = self.hosts[(self.rank + 1) % n] != here
        return self.wire_bytes(collective) if leaves else 0

    def _part_bytes(self, collective: CollectiveRequest, rank: int) -> int:
        """Size of what goes to `rank` of a collective that sends to each, in bytes."""
        if collective.op == "all_gather":
            return collective.tensor.nbytes
        if collective.sizes is None:
            return collective.tensor.nbytes // self.size
        return collective.sizes[rank] * collective.tensor.element_size()


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where the ranks are."""

    rank: int
    hosts: tuple[str, ...]  # host name of each rank
    local_sizes: tuple[int, ...]  # for each rank, how many ranks its launcher started on its host

    @property
    def size(self) -> int:
        return len(self.hosts)

    def ranks_by_host(self) -> list[list[int]]:
        """Ranks by host, in the order of their first ranks. Several launchers under one host name count as
        hosts of their own: the name's ranks are cut into runs of `local_sizes`.
        """
        of_name: dict[str, list[int]] = {}
        for rank, name in enumerate(self.hosts):
            of_name.setdefault(name, []).append(rank)
        found = []
        for ranks in of_name.values():
            while ranks:
                size = max(1, self.local_sizes[ranks[0]])
                found.append(ranks[:size])
                ranks = ranks[size:]
        return sorted(found)

    def split_by_host(self, host_count: int | None) -> list[list[int]]:
        """The ranks of each host, in rank order as process groups have them: of `host_count` equal hosts,
        those of one host together as far as possible, or (None) as launched. Raises HookSetupError.
        """
        launched = self.ranks_by_host()
        if host_count is None:
            if len({len(ranks) for ranks in launched}) > 1:
                counts = ", ".join(f"{self.hosts[ranks[0]]}: {len(ranks)}" for ranks in launched)
                raise HookSetupError(
                    f"two levels need equally many ranks on each host; here they are {counts}"
                )
            return launched
        if self.size % host_count:
            raise HookSetupError(
                f"two levels with hosts: {host_count} need equally many ranks on each host, but {host_count} "
                f"does not divide {self.size} ranks"
            )
        per_host, by_host = self.size // host_count, [rank for ranks in launched for rank in ranks]
        return sorted(sorted(by_host[at : at + per_host]) for at in range(0, self.size, per_host))


def check_placement(placement: RankPlacement, requirements: GroupRequirements) -> None:
    """Raise HookSetupError if the ranks do not lie as groups with these requirements need them.

    Every rank finds the same, before any group is made: while one is, a rank whose peer has raised and ended
    would wait for it until the timeout.
    """
    for one in requirements:
        groups = _ranks_by_group(placement, one)
        if one.via_shared_memory:
            for ranks in groups:
                check_one_host([placement.hosts[rank] for rank in ranks])


def _ranks_by_group(placement: RankPlacement, wanted: GroupRequirement) -> list[list[int]]:
    """The ranks of each group of a leg, in rank order, which torch's process groups have whatever order they
    are given.
    """
    everybody = list(range(placement.size))
    if wanted.scope == "world":
        return [everybody]
    if wanted.scope == "part":
        if sorted(itertools.chain(*wanted.parts)) != everybody:
            raise HookSetupError(
                f"a partition of {placement.size} ranks has each of them once: {wanted.parts}"
            )
        return [sorted(ranks) for ranks in wanted.parts]
    blocks = placement.split_by_host(wanted.hosts)
    return blocks if wanted.scope == "within" else [sorted(ranks) for ranks in zip(*blocks, strict=True)]


def merge_requirements(requirements: Iterable[GroupRequirements]) -> dict[GroupRequirement, int]:
    """What serves each of several stacks, one at a time."""
    combined: dict[GroupRequirement, int] = {}
    for one in requirements:
        for requirement, rounds in one.items():
            combined[requirement] = max(rounds, combined.get(requirement, 0))
    return combined


def requirements_in_scope(
    leg: str, requirements: GroupRequirements, host_count: int | None
) -> dict[GroupRequirement, int]:
    """What a stack requires among the ranks of this leg only; `host_count` is `GroupRequirement.hosts`."""
    return merge_requirements(
        {GroupRequirement(leg, host_count, one.via_shared_memory): rounds}
        for one, rounds in requirements.items()
    )


@dataclass(frozen=True, slots=True)
class GroupFactory:
    """Makes rank groups. Every rank makes the same ones, in the same order."""

    placement: RankPlacement
    # Makes a new process group of a unique name and these ranks. Every rank calls it for every set of ranks,
    # as `new_group` demands; the result is dropped for sets without this rank.
    make_process_group: Callable[[str, list[int]], Any]
    all_gather_bytes: Callable[[bytes], Sequence[bytes]]  # gives every rank's bytes
    timeout_s: float
    observer: CollectiveObserver = NULL_OBSERVER  # sees every collective
    one_group_for_all_rounds: bool = False  # all rounds of a group have one process group

    def make_group(
        self, name: str, requirements: GroupRequirements, existing: Sequence[Any] = ()
    ) -> RankGroup:
        """Make the group of all ranks, called `name`, and those into which the stacks' hooks split it.

        `existing` process groups of all ranks serve the first rounds among these, instead of new ones. Raises
        HookSetupError, on all ranks alike, if the ranks do not lie as a hook needs them.
        """
        check_placement(self.placement, requirements)
        make = partial(self._make_own_group, requirements)
        splits, partition_groups = {}, {}
        prefix = "" if name == "world" else f"{name} "
        host_counts = {one.hosts for one in requirements if one.scope in ("within", "across")}
        for host_count in sorted(host_counts, key=lambda count: count or 0):
            tag = "" if host_count is None else f"/{host_count}"
            within = make(f"{prefix}within{tag}", GroupRequirement("within", host_count))
            splits[host_count] = within, make(f"{prefix}across{tag}", GroupRequirement("across", host_count))
        for number, parts in enumerate(sorted({one.parts for one in requirements if one.parts})):
            partition_groups[parts] = make(f"{prefix}part/{number}", GroupRequirement("part", parts=parts))
        world = make(name, GroupRequirement("world"), existing)
        return replace(world, splits_by_host_count=splits, partition_groups=partition_groups)

    def _make_own_group(
        self,
        requirements: GroupRequirements,
        name: str,
        wanted: GroupRequirement,
        existing: Sequence[Any] = (),
    ) -> RankGroup:
        """This rank's group of a leg, through all ways that are required."""
        groups = _ranks_by_group(self.placement, wanted)
        mine = next(ranks for ranks in groups if self.placement.rank in ranks)
        rank = mine.index(self.placement.rank)
        needed, shared = (
            requirements.get(wanted, 0),
            requirements.get(wanted._replace(via_shared_memory=True), 0),
        )
        different = min(needed, 1) if self.one_group_for_all_rounds else needed  # process groups
        process_groups, shm_groups = [*existing], []
        for index in range(len(process_groups), different):
            made = {
                ranks[0]: self.make_process_group(f"{name}.{index} of {ranks[0]}", ranks) for ranks in groups
            }
            process_groups.append(made[mine[0]])
        process_groups = (process_groups * needed)[:needed]  # one may serve all rounds
        if shared:
            # A sequence of its own: a rank may still be lost between the last exchange and this one.
            sharing = self.observer.new_sequence(f"{name}, being shared", mine)

            def all_gather_in_group(data: bytes) -> list[bytes]:
                of_all = self.all_gather_bytes(data)
                return [of_all[one] for one in mine]

            with observed_wait(sharing, "share", f"making {shared} areas of shared memory"):
                shm_groups = open_shm_groups(
                    rank=rank,
                    labels=mine,
                    count=shared,
                    all_gather_bytes=all_gather_in_group,
                    timeout_s=self.timeout_s,
                )
        sequences: dict[Transport, list[CollectiveSequence]] = {
            "network": [self.observer.new_sequence(f"{name}.{index}", mine) for index in range(different)],
            "shared_memory": [
                self.observer.new_sequence(f"{name}.{index} in shared memory", mine)
                for index in range(shared)
            ],
        }
        hosts = tuple(self.placement.hosts[one] for one in mine)
        return RankGroup(name, rank, hosts, process_groups, shm_groups, sequences=sequences)


def check_one_host(hosts: Sequence[str]) -> None:
    """Raise HookSetupError if ranks that are to share memory are on several hosts."""
    names = list(dict.fromkeys(hosts))
    if len(names) > 1:
        raise HookSetupError(
            f'"shared_memory" sums over the ranks of one host, but these are on {", ".join(names)}: '
            "write hierarchical: {within: [shared_memory]}"
        )


def check_shared_memory_device(device: torch.device, requirements: Iterable[GroupRequirement]) -> None:
    """Raise HookSetupError for shared memory where tensors are on a GPU."""
    if device.type == "cuda" and any(one.via_shared_memory for one in requirements):
        raise HookSetupError(
            '"shared_memory" sums tensors on the CPU, and these are on a GPU: remove the hook, NCCL uses '
            "shared memory by itself; or run on the CPU"
        )
