"""What each bucket costs: every rank's part in it, simulated.

Ranks that send alike are simulated once, so that the cost grows with the buckets and not with the ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, mul
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from ddprun.config import BroadcastStage, Loaded, StepStage
from ddprun.engine import build
from ddprun.explain.model_probe import WorldShape, is_foreign
from ddprun.sync.plan import Partition
from ddprun.sync.synchronizer import QueueRequirements, requirements
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.groups import GroupRequirements, RankGroup, check_device, combine
from ddprun_hooks.comm.simulate import example_payload, simulate, simulated_group
from ddprun_hooks.comm.trace import BucketTrace, CollectiveTrace
from ddprun_hooks.config.options import BUILT_IN, parse_spec
from ddprun_hooks.errors import HooksError, HookSetupError
from ddprun_hooks.payload import Kind, nbytes
from ddprun_hooks.stack import Stack, all_reduce_stack, broadcast_stack

QueueName = Literal["world", "deltas", "plain"]
"""As `ddprun_hooks.comm.exchange.Exchange` calls their groups; `world` is that of gradients."""

Among = Literal["all", "host", "across", "part"]
"""All ranks, those of each host, of one local rank on every host, or of each part of a partition."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that ranks send: each simulated rank's own, in rank order."""

    by_rank: tuple[int, ...]
    between_hosts: tuple[int, ...]  # the part that leaves each rank's host
    counts: tuple[int, ...]  # how many ranks each stands for

    @classmethod
    def none(cls, counts: Sequence[int]) -> Amount:
        """Nothing."""
        return cls((0,) * len(counts), (0,) * len(counts), tuple(counts))

    def __add__(self, other: Amount) -> Amount:
        between_hosts = map(add, self.between_hosts, other.between_hosts)
        return replace(
            self, by_rank=tuple(map(add, self.by_rank, other.by_rank)), between_hosts=tuple(between_hosts)
        )

    def __mul__(self, times: int) -> Amount:
        by_rank, between_hosts = (tuple(times * b for b in of) for of in (self.by_rank, self.between_hosts))
        return replace(self, by_rank=by_rank, between_hosts=between_hosts)

    @property
    def all_ranks(self) -> int:
        """Of all ranks together."""
        return sum(map(mul, self.by_rank, self.counts))

    def sizes(self, steps: int = 1, wanted: int = 1) -> dict[str, float]:
        """What `wanted` average steps send, in bytes, if `steps` of them send this amount."""
        sent = (self.all_ranks, sum(map(mul, self.between_hosts, self.counts)))
        all_ranks, between_hosts = (one * wanted / steps for one in sent)
        sizes = {
            "per_rank": all_ranks / sum(self.counts),
            "all_ranks": all_ranks,
            "between_hosts": between_hosts,
        }
        return {name: int(sent) if sent.is_integer() else sent for name, sent in sizes.items()}


def total(amounts: Iterable[Amount | None], counts: Sequence[int]) -> Amount | None:
    """The sum; None if one of them is not known."""
    known = list(amounts)
    return None if None in known else sum(filter(None, known), Amount.none(counts))


@dataclass(frozen=True, slots=True)
class Route:
    """How a bucket travels."""

    kind: Kind
    queue: QueueName
    through: Literal["hooks", "host_hooks", "sum", "broadcast"]  # `host_hooks`: inside a host
    inside: bool = False  # among the ranks of each host only
    hosts: int | None = None  # into how many hosts the ranks are split for that; None: as they were launched
    source: int = 0  # whose payload is broadcast
    part: Partition | None = None  # among the ranks of each of its groups
    ema: bool = False  # of the moving average of the weights

    @property
    def hooked(self) -> bool:
        """Whether hooks handle the bucket."""
        return self.through in ("hooks", "host_hooks")

    @property
    def among(self) -> Among:
        """Which ranks are in one of its groups."""
        return "part" if self.part is not None else "host" if self.inside else "all"

    def group(self, world: RankGroup) -> RankGroup:
        """The ranks among which it goes, of those of its queue."""
        if self.part is not None:
            return world.parts[self.part.parts(world.size)]
        return world.splits[self.hosts][0] if self.inside else world


@dataclass(frozen=True, slots=True)
class Leg:
    """One collective, of all ranks that take part in it; its fields are those of JSON."""

    op: str
    among: Among
    ranks: int  # how many ranks are in each of its groups
    dtype: str
    bytes: int  # size of what is summed, gathered or exchanged, in bytes; where ranks differ, the largest
    sent: Amount


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and what it takes to carry it over the ranks once; its fields are those of JSON."""

    bucket: int
    dtype: str
    numel: int
    bytes: int  # before any hook
    params: tuple[str, ...]
    sent: Amount | None  # None: not known, as `legs`
    legs: tuple[Leg, ...] | None
    state: int | None  # what hooks keep of it until the next, in bytes; where ranks differ, the largest


class Simulations:
    """Carries buckets, on `device`, over ranks that are not there.

    Raises:
        PipelineError: the ranks do not lie as a stage needs them.
    """

    def __init__(self, loaded: Loaded, world: WorldShape, device: torch.device, *, importing: bool) -> None:
        self._loaded, self._world, self._device, self._importing = loaded, world, device, importing
        needed: list[QueueRequirements] = []
        for stage in loaded.pipeline.step_stages():
            settings = stage.effective(loaded.pipeline)
            stacks = self._hooks(stage), self._hooks(stage, inside_host=True)
            needed.append(requirements(settings.plan, *stacks, world.ranks))
            self._check(stage, stacks[0], combine(needed[-1]))
        names: tuple[QueueName, ...] = ("world", "deltas", "plain")
        by_queue: dict[QueueName, GroupRequirements] = dict(
            zip(names, QueueRequirements.of_stages(needed), strict=True)
        )
        alike = _ranks_alike(world, combine(by_queue.values()), _sources(loaded))
        self.counts = tuple(count for count, _ in alike.values())
        """How many ranks each simulated one stands for."""

        self._ranks, self._by_queue = list(alike), by_queue
        # Of each simulated rank, the one that sends the same in all that is no broadcast.
        self._like = [self._ranks.index(like) for _, like in alike.values()]
        self._worlds: dict[tuple[int, QueueName], RankGroup] = {}
        self._known: dict[tuple[str, Route, BucketLayout], Bucket] = {}

    def unknown(self, stage: StepStage | None, route: Route) -> str:
        """Why it cannot be known what the hooks on a route send; empty if it can."""
        names = self._not_imported(stage) if stage is not None and route.hooked else []
        return f'"hooks: {names[0]}" is not imported' if names else ""

    def group(self, route: Route, index: int = 0) -> RankGroup:
        """The group on a route of the simulated rank of this index."""
        key = index, route.queue
        if key not in self._worlds:
            placement = self._world.placement(self._ranks[index])
            self._worlds[key] = simulated_group(route.queue, placement, self._by_queue[route.queue])
        return route.group(self._worlds[key])

    def carry(self, stage: StepStage | None, route: Route, layout: BucketLayout) -> Bucket:
        """What it takes to carry a bucket that meets the hooks of `stage`, if the route has any.

        Raises:
            PipelineError: a hook that would break the run.
        """
        if self.unknown(stage, route):
            return _bucket(layout, None, None, None)
        stack = self._stack(stage, route)
        key = stack.described if route.hooked else "", route, layout
        if key not in self._known:
            # Hooks of ours look at no values unless they are in host memory; those of others may.
            device = self._device if stack.foreign and route.hooked else torch.device("meta")
            first = example_payload(layout, route.kind, device)
            like = range(len(self._ranks)) if route.through == "broadcast" else self._like
            found: dict[int, BucketTrace[int]] = {}
            state = 0
            try:
                for index in set(like):
                    payload = replace(first, tensor=first.tensor.clone(), findings=[])
                    hooks = self._stack(stage, route)
                    found[index] = simulate(payload, hooks, self.group(route, index))
                    state = max(state, sum(map(_held_bytes, tree_leaves(hooks.state_dict()))))
            except HooksError as error:
                path = stage.key_path("hooks") if stage is not None else ""
                raise self._loaded.error(path, str(error)) from None
            traces = [found[index] for index in like]
            by_name = _groups_by_name(self._worlds[like[0], route.queue])
            legs = tuple(_joined([trace.collectives for trace in traces], by_name, self.counts))
            self._known[key] = _bucket(layout, _sent_by(traces, self.counts), legs, state)
        return self._known[key]

    def _stack(self, stage: StepStage | None, route: Route) -> Stack:
        """What carries a bucket on a route; made anew each time, since hooks keep state."""
        if route.through == "sum":
            return all_reduce_stack()
        if route.through == "broadcast":
            return broadcast_stack(route.source)
        assert stage is not None, "hooks are a stage's"
        return self._hooks(stage, inside_host=route.through == "host_hooks")

    def _hooks(self, stage: StepStage, *, inside_host: bool = False) -> Stack:
        """The stage's hooks, made anew; plain all-reduce where they are not known.

        Raises:
            PipelineError: a hook that cannot be had.
        """
        if self._not_imported(stage):
            return Stack([])
        hooks = stage.effective(self._loaded.pipeline).hooks
        return build.build_stack(self._loaded, stage.key_path("hooks"), hooks, inside_host=inside_host)

    def _not_imported(self, stage: StepStage) -> list[str]:
        """Names of the stage's hooks that are somebody else's code, legs included."""
        found = []
        for hook in () if self._importing else stage.effective(self._loaded.pipeline).hooks:
            if is_foreign(hook):
                found.append(hook.name)
            elif hook.name == "hierarchical":
                specs = [spec for leg in ("within", "across") for spec in hook.options.get(leg, ())]
                found += [name for spec in specs if (name := parse_spec(spec)[0]) not in BUILT_IN]
        return found

    def _check(self, stage: StepStage, stack: Stack, needs: GroupRequirements) -> None:
        """Check that the ranks lie as a stage needs them; a fault names what of it needs them otherwise."""
        layout = self._world.placement(0)
        for key, of in (
            ("hooks", {need: needs[need] for need in stack.requirements if need in needs}),
            ("sync", needs),
        ):
            try:
                check_device(self._device, of)
                simulated_group("world", layout, of)
            except HookSetupError as error:
                raise self._loaded.error(stage.key_path(key), str(error)) from None


def _held_bytes(value: Any) -> int:
    """The size of a part of a hook's state, of which only tensors count."""
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


def _bucket(
    layout: BucketLayout, sent: Amount | None, legs: tuple[Leg, ...] | None, state: int | None
) -> Bucket:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    params = tuple(param.name for param in layout.params)
    bytes_before = layout.numel * dtype.itemsize
    return Bucket(layout.index, layout.dtype, layout.numel, bytes_before, params, sent, legs, state)


def _ranks_alike(
    world: WorldShape, needs: GroupRequirements, sources: Iterable[int]
) -> dict[int, tuple[int, int]]:
    """Ranks of which at least one sends as any other does; how many ranks each of them stands for, and which
    of them sends the same in all that is no broadcast.

    What a rank sends goes by its place in its host, and in the hosts into which a hook or a policy splits the
    ranks, and that comes again from one block of ranks to the next. Only the ends of a broadcast's chain,
    from one of `sources` round to the rank before it, send otherwise than others of their place.
    """
    ranks = world.ranks
    splits = [ranks // one.hosts for one in needs if one.hosts]
    block = math.lcm(world.ranks_per_host, *splits)
    special = {rank % ranks // block for source in sources for rank in (source, source - 1)}
    plain = [index for index in range(ranks // block) if index not in special]
    if ranks % block or len(plain) < 2 or any(one.parts for one in needs):
        return {rank: (1, rank) for rank in range(ranks)}
    first = plain[0]
    return {
        index * block + place: (len(plain) if index == first else 1, first * block + place)
        for index in sorted([*special, first])
        for place in range(block)
    }


def _sources(loaded: Loaded) -> set[int]:
    """Ranks whose parameters all others take, at the start or later."""
    stages = loaded.pipeline.stages
    plans = [stage.effective(loaded.pipeline).plan for stage in loaded.pipeline.step_stages()]
    chosen = {one.source or 0 for plan in plans for one in plan.transfers}
    return {0, *chosen, *(stage.source for stage in stages if isinstance(stage, BroadcastStage))}


def _sent_by(
    traces: Sequence[BucketTrace[int] | CollectiveTrace[int] | None], counts: tuple[int, ...]
) -> Amount:
    """What each simulated rank has sent; None: nothing."""
    return Amount(
        tuple(0 if trace is None else trace.wire_bytes for trace in traces),
        tuple(0 if trace is None else trace.between_hosts_bytes for trace in traces),
        counts,
    )


def _groups_by_name(world: RankGroup) -> dict[str, tuple[Among, int]]:
    """By the name of each group: which ranks are in one, and how many."""
    found: dict[str, tuple[Among, int]] = {world.name: ("all", world.size)}
    for host, across in world.splits.values():
        found |= {host.name: ("host", host.size), across.name: ("across", across.size)}
    return found | {part.name: ("part", part.size) for part in world.parts.values()}


def _joined(
    legs: list[list[CollectiveTrace[int]]], groups: dict[str, tuple[Among, int]], counts: tuple[int, ...]
) -> Iterator[Leg]:
    """The legs of all ranks, with those joined that are one collective on each.

    A rank may have fewer than others: one whose share of a bucket is empty sends nothing between hosts.
    """
    rows: dict[tuple[str, str, str, int], list[CollectiveTrace[int] | None]] = {}
    for rank, own in enumerate(legs):
        times: Counter[tuple[str, str, str]] = Counter()
        for leg in own:
            what = leg.op, leg.group.rpartition(".")[0], leg.dtype
            rows.setdefault((*what, times[what]), [None] * len(legs))[rank] = leg
            times[what] += 1
    for (op, group, dtype, _), row in rows.items():
        yield Leg(
            op, *groups[group], dtype, max(leg.bytes for leg in row if leg is not None), _sent_by(row, counts)
        )
