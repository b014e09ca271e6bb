"""What each bucket costs: every rank's part in it, simulated.

Ranks that send alike are simulated once, so that the cost grows with the buckets and not with the ranks. A
broadcast, in which two ranks are unlike all others, is counted by its rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch.utils._pytree import tree_leaves

from ddprun.config import LoadedPipeline, Stage, StepStage
from ddprun.engine.hook_stacks import build_hook_stack
from ddprun.explain.model_probe import WorldShape
from ddprun.sync.plan import Partition
from ddprun.sync.synchronizer import GroupsByQueue, queue_requirements
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.groups import (
    GroupRequirements,
    RankGroup,
    check_shared_memory_device,
    merge_requirements,
)
from ddprun_hooks.comm.trace import BucketTrace, CollectiveTrace
from ddprun_hooks.errors import HooksError, HookSetupError
from ddprun_hooks.payload import PayloadKind
from ddprun_hooks.simulate import dummy_payload, simulate, simulated_group
from ddprun_hooks.stack import Stack

CommGroupName = Literal["world", "deltas", "plain"]
"""As `ddprun_hooks.comm_context.CommContext` calls their groups; `world` is that of gradients."""

GroupScope = Literal["all", "host", "across", "part"]
"""All ranks, those of each host, of one local rank on every host, or of each part of a partition."""


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that all ranks send together."""

    ranks: int
    all_ranks: int = 0
    between_hosts: int = 0  # the part that leaves a rank's host

    def __add__(self, other: SentBytes) -> SentBytes:
        all_ranks, between_hosts = self.all_ranks + other.all_ranks, self.between_hosts + other.between_hosts
        return SentBytes(self.ranks, all_ranks, between_hosts)

    def __mul__(self, times: int) -> SentBytes:
        return SentBytes(self.ranks, times * self.all_ranks, times * self.between_hosts)

    @property
    def per_rank(self) -> float:
        """Bytes that a rank sends, on average."""
        return self.all_ranks / self.ranks

    def mean_step_bytes(self, steps: int = 1) -> dict[str, float]:
        """What an average step sends, in bytes, if `steps` of them send this amount."""
        all_ranks, between_hosts = self.all_ranks / steps, self.between_hosts / steps
        sizes = {"per_rank": all_ranks / self.ranks, "all_ranks": all_ranks, "between_hosts": between_hosts}
        return {name: int(sent) if sent.is_integer() else sent for name, sent in sizes.items()}


@dataclass(frozen=True, slots=True)
class Route:
    """How a bucket is exchanged: through which queue, in which way, and among which ranks."""

    kind: PayloadKind
    queue: CommGroupName
    through: Literal["hooks", "host_hooks", "sum", "broadcast"]  # `host_hooks`: inside a host
    inside_host: bool = False  # among the ranks of each host only
    # Into how many hosts the ranks are split for that; None: as they were launched.
    split_hosts: int | None = None
    source: int = 0  # whose payload is broadcast
    rank_partition: Partition | None = None  # among the ranks of each of its groups
    ema: bool = False  # of the moving average of the weights
    turn: str | None = None  # whose gradients

    @property
    def uses_hooks(self) -> bool:
        return self.through in ("hooks", "host_hooks")

    @property
    def among(self) -> GroupScope:
        """Which ranks are in one of its groups."""
        return "part" if self.rank_partition is not None else "host" if self.inside_host else "all"

    def subgroup_of(self, world: RankGroup) -> RankGroup:
        """The ranks among which it goes, of those of its queue."""
        if self.rank_partition is not None:
            return world.partition_groups[self.rank_partition.parts(world.size)]
        return world.splits_by_host_count[self.split_hosts][0] if self.inside_host else world


@dataclass(frozen=True, slots=True)
class Leg:
    """One collective, of all ranks that take part in it; its fields are those of JSON."""

    op: str
    among: GroupScope
    ranks: int  # how many ranks are in each of its groups
    dtype: str
    bytes: int  # size of what is summed, gathered or exchanged, in bytes; where ranks differ, the largest
    sent: SentBytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and what it takes to carry it over the ranks once; its fields are those of JSON."""

    bucket: int
    dtype: str
    numel: int
    bytes: int  # before any hook
    params: tuple[str, ...]
    sent: SentBytes
    legs: tuple[Leg, ...]
    state: int  # bytes that hooks keep of it until the next; where ranks differ, the largest


class TrafficSimulator:
    """Simulates exchanges among ranks that do not run; raises PipelineError if they do not lie as needed."""

    def __init__(self, loaded: LoadedPipeline, world: WorldShape, device: torch.device) -> None:
        self._loaded, self.world, self._device = loaded, world, device
        needed: list[GroupsByQueue] = []
        for stage, settings in loaded.pipeline.stages_and_settings():
            stacks = self._build_hook_stack(stage), self._build_hook_stack(stage, inside_host=True)
            needed.append(queue_requirements(settings.plan, *stacks, world.ranks))
            self._check_placement(stage, stacks[0], merge_requirements(needed[-1]))
        needs_by_queue: dict[CommGroupName, GroupRequirements] = dict(
            zip(get_args(CommGroupName), GroupsByQueue.for_stages(needed), strict=True)
        )
        self._needs_by_queue = needs_by_queue
        self._simulated_ranks = _representative_rank_count(world, merge_requirements(needs_by_queue.values()))
        self._groups_by_queue: dict[tuple[int, CommGroupName], RankGroup] = {}
        self._simulated_buckets: dict[tuple[str, Route, BucketLayout], Bucket] = {}

    def rank_group(self, route: Route, rank: int = 0) -> RankGroup:
        """The group of a rank on a route."""
        key = rank, route.queue
        if key not in self._groups_by_queue:
            needs = self._needs_by_queue[route.queue]
            self._groups_by_queue[key] = simulated_group(route.queue, self.world.placement(rank), needs)
        return route.subgroup_of(self._groups_by_queue[key])

    def simulate_bucket(self, stage: Stage, route: Route, layout: BucketLayout) -> Bucket:
        """What it takes to carry a bucket that meets the hooks of `stage`, if the route has any; raises
        PipelineError for a hook that would break the run.
        """
        key = self._build_route_stack(stage, route).description if route.uses_hooks else "", route, layout
        if key not in self._simulated_buckets:
            nbytes = layout.numel * getattr(torch, layout.dtype).itemsize
            params = tuple(param.name for param in layout.params)
            if route.through != "broadcast":
                sent, legs, state = self._simulate_hooks(stage, route, layout)
            else:
                sent, state = self.broadcast_sent_bytes(route.source, nbytes), 0
                legs = (Leg("broadcast", "all", self.world.ranks, layout.dtype, nbytes, sent),)
            size = layout.index, layout.dtype, layout.numel, nbytes
            self._simulated_buckets[key] = Bucket(*size, params, sent, legs, state)
        return self._simulated_buckets[key]

    def broadcast_sent_bytes(self, source: int, nbytes: int) -> SentBytes:
        """What is sent in a chain from the source on, in which every rank but the last passes so many bytes
        on once, as `RankGroup.wire_bytes` has it.
        """
        hosts, ranks = self.world.placement(0).hosts, self.world.ranks
        crossings = sum(hosts[rank - 1] != hosts[rank] for rank in range(ranks) if rank != source % ranks)
        return SentBytes(ranks, (ranks - 1) * nbytes, crossings * nbytes)

    def _simulate_hooks(
        self, stage: Stage, route: Route, layout: BucketLayout
    ) -> tuple[SentBytes, tuple[Leg, ...], int]:
        """What ranks send for a bucket, and the bytes of the hooks' state."""
        # Hooks of ours look at no values unless they are in host memory; those of others may.
        device = self._device if self._build_route_stack(stage, route).custom_hooks else torch.device("meta")
        first = dummy_payload(layout, route.kind, device)
        traces: list[BucketTrace[int]] = []
        state = 0
        try:
            for rank in range(self._simulated_ranks):
                payload = replace(first, tensor=first.tensor.clone(), findings=[])
                hooks = self._build_route_stack(stage, route)
                traces.append(simulate(payload, hooks, self.rank_group(route, rank)))
                kept = [one for one in tree_leaves(hooks.state_dict()) if isinstance(one, torch.Tensor)]
                state = max(state, sum(one.nbytes for one in kept))
        except HooksError as error:
            assert isinstance(stage, StepStage)
            raise self._loaded.error(stage.key_path("hooks"), str(error)) from None
        groups = _group_scopes_and_sizes(self._groups_by_queue[0, route.queue])
        legs = tuple(_merge_legs(traces, groups, self.world.ranks))
        return _sent_bytes(traces, self.world.ranks), legs, state

    def _build_route_stack(self, stage: Stage, route: Route) -> Stack:
        """What carries a bucket on a route; made anew each time, since hooks keep state."""
        if route.through == "sum":
            return Stack([])
        assert isinstance(stage, StepStage), "others have no hooks"
        return self._build_hook_stack(stage, inside_host=route.through == "host_hooks")

    def _build_hook_stack(self, stage: StepStage, *, inside_host: bool = False) -> Stack:
        """The stage's hooks, made anew; raises PipelineError."""
        hooks = stage.effective_settings(self._loaded.pipeline).hooks
        return build_hook_stack(self._loaded, stage.key_path("hooks"), hooks, inside_host=inside_host)

    def _check_placement(self, stage: StepStage, stack: Stack, needs: GroupRequirements) -> None:
        """Check that the ranks lie as a stage needs them; a fault names what of it needs them otherwise."""
        placement = self.world.placement(0)
        needs_of_hooks = {need: needs[need] for need in stack.requirements if need in needs}
        for key, wanted in (("hooks", needs_of_hooks), ("sync", needs)):
            try:
                check_shared_memory_device(self._device, wanted)
                simulated_group("world", placement, wanted)
            except HookSetupError as error:
                raise self._loaded.error(stage.key_path(key), str(error)) from None


def _representative_rank_count(world: WorldShape, needs: GroupRequirements) -> int:
    """How many ranks, from the first on, stand for all: every rank sends the same as one of them.

    What a rank sends depends on its place in its host, and in the splits of ranks into hosts that hooks or
    policies make; that repeats from one block of ranks to the next. (Not so in a broadcast.)
    """
    block = math.lcm(world.ranks_per_host, *[world.ranks // one.hosts for one in needs if one.hosts])
    return world.ranks if world.ranks % block or any(one.parts for one in needs) else block


def _sent_bytes(traces: Sequence[BucketTrace[int] | CollectiveTrace[int] | None], ranks: int) -> SentBytes:
    """What so many ranks have sent, from what each simulated one has; None: nothing."""
    each, sending = ranks // len(traces), [trace for trace in traces if trace is not None]
    return SentBytes(
        ranks,
        each * sum(trace.wire_bytes for trace in sending),
        each * sum(trace.between_hosts_bytes for trace in sending),
    )


def _group_scopes_and_sizes(world: RankGroup) -> dict[str, tuple[GroupScope, int]]:
    """By the name of each group: which ranks are in one, and how many."""
    found: dict[str, tuple[GroupScope, int]] = {world.name: ("all", world.size)}
    for host, across in world.splits_by_host_count.values():
        found |= {host.name: ("host", host.size), across.name: ("across", across.size)}
    return found | {part.name: ("part", part.size) for part in world.partition_groups.values()}


def _merge_legs(
    traces: Sequence[BucketTrace[int]], groups: dict[str, tuple[GroupScope, int]], ranks: int
) -> Iterator[Leg]:
    """The legs of all ranks, with those joined that are one collective on each. A rank may have fewer than
    others: one whose share of a bucket is empty sends nothing between hosts.
    """
    rows: dict[tuple[str, str, str, int], list[CollectiveTrace[int] | None]] = {}
    for rank, trace in enumerate(traces):
        times: Counter[tuple[str, str, str]] = Counter()
        for leg in trace.collectives:
            what = leg.op, leg.group.rpartition(".")[0], leg.dtype
            rows.setdefault((*what, times[what]), [None] * len(traces))[rank] = leg
            times[what] += 1
    for (op, group, dtype, _), row in rows.items():
        nbytes = max(leg.bytes for leg in row if leg is not None)
        yield Leg(op, *groups[group], dtype, nbytes, _sent_bytes(row, ranks))
