"""What a pipeline sends, when, among whom and how much, without a run: as dataclasses and as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun.config import Loaded, StepStage
from ddprun.explain.model_probe import ModelProbe, World, probe_model
from ddprun.explain.stage_plans import Moment, Sent, StagePlan, stage_plans
from ddprun.explain.traffic import Amount, Carried, Route, Simulations, total
from ddprun.host.device import default_ranks
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets
from ddprun_hooks.payload import nbytes

VERSION = 1

_MESSAGE_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Buckets that set out together, in the same route."""

    number: int  # within its stage, from 0
    moment: Moment
    route: Route
    ranks: int  # how many ranks are in each group that exchanges
    times: int  # how often it happens in a step: before each of several forward passes
    buckets: tuple[BucketLayout, ...] | None  # None: not known
    carried: tuple[Carried, ...] | None  # what each bucket costs, once; None: not known
    unknown: str  # why something of it is not known; empty if all is
    amount: Amount | None  # what ranks send for it in a step; None: not known


@dataclass(frozen=True, slots=True)
class Pattern:
    """Steps in which the same is sent."""

    steps: tuple[int, ...]  # which of the first `StageExplained.cycle` steps; the rest follows from them
    exchanges: tuple[Exchange, ...]
    amount: Amount | None  # of one such step; None: not known


@dataclass(frozen=True, slots=True)
class StageExplained:
    """What one stage sends."""

    plan: StagePlan
    patterns: tuple[Pattern, ...]  # the rarest first
    begin: tuple[Exchange, ...]  # before the first step
    end: tuple[Exchange, ...] | None  # after the last step, or of a stage without steps; None: not known
    ranks: int

    @property
    def index(self) -> int:
        """In `stages`."""
        return self.plan.stage.index

    @property
    def steps(self) -> int | None:
        """None: not known, or the stage has none."""
        return self.plan.steps

    @property
    def cycle(self) -> int:
        """After so many steps it begins again; at most as many as the stage has."""
        return len(self.plan.by_step)

    @property
    def exchanges(self) -> list[Exchange]:
        """All of them, by number."""
        found = {e.number: e for pattern in self.patterns for e in pattern.exchanges}
        found |= {e.number: e for e in (*self.begin, *(self.end or ()))}
        return [found[number] for number in sorted(found)]

    @property
    def cycle_amount(self) -> Amount | None:
        """Of `cycle` steps."""
        return self._of_steps(self.cycle)

    @property
    def whole_amount(self) -> Amount | None:
        """Of the whole stage; None if it is not known."""
        if self.end is None or (self.steps is None and self.patterns):
            return None
        amounts = [exchange.amount for exchange in (*self.begin, *self.end)]
        if self.steps is not None:
            cycles, rest = divmod(self.steps, self.cycle)
            cycle = self._of_steps(self.cycle)
            amounts += [None if cycle is None else cycle * cycles, self._of_steps(rest)]
        return total(amounts, self.ranks)

    def _of_steps(self, count: int) -> Amount | None:
        counted = [(one.amount, sum(step <= count for step in one.steps)) for one in self.patterns]
        amounts = [None if amount is None else amount * steps for amount, steps in counted if steps]
        return total(amounts, self.ranks)


@dataclass(frozen=True, slots=True)
class Explained:
    """A pipeline, explained."""

    loaded: Loaded
    world: World
    probe: ModelProbe
    start: Amount | None  # sent before the first step, so that ranks are equal; None: not known
    stages: tuple[StageExplained, ...]

    @property
    def parameters(self) -> dict[str, Tensor] | None:
        """By name; None: not known."""
        return None if self.probe.model is None else dict(self.probe.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor] | None:
        """By name; None: not known."""
        return None if self.probe.model is None else dict(self.probe.model.named_buffers())

    def as_object(self) -> dict[str, Any]:
        """For `--format json` (`docs/explain.md`); bytes throughout."""
        unknown = self.probe.unknown
        return {
            "v": VERSION,
            "pipeline": self.loaded.pipeline.name,
            "ranks": self.world.ranks,
            "hosts": self.world.hosts,
            "model": _model_object(self.loaded.pipeline.model.name, self.parameters),
            "buffers": self._buffers_object(),
            "unknown": list(dict.fromkeys(filter(None, (unknown.model, unknown.batch, unknown.optimizer)))),
            "start": _sent(self.start),
            "stages": [_stage_object(stage) for stage in self.stages],
        }

    def _buffers_object(self) -> dict[str, Any] | None:
        use, buffers = self.probe.buffer_use, self.buffers
        if use is None or buffers is None:
            return None
        return {
            "count": len(buffers),
            "bytes": sum(map(nbytes, buffers.values())),
            "changing": list(use.changing),
            "changing_bytes": use.bytes,
            "constant": list(use.constant),
            "counters": list(use.counters),
            "read_in_training": use.read,
        }


def explain(
    loaded: Loaded, *, hosts: int | None = None, ranks_per_host: int | None = None, importing: bool = True
) -> Explained:
    """Find out what a pipeline sends. No rank is started and nothing is sent.

    The model and the data are built and run as on rank 0, hooks and sync policies are the engine's own, and
    bytes are counted as a run counts them. A hook is asked about its first payload only.

    Args:
        loaded: the pipeline.
        hosts: how many there would be; None: as the file says.
        ranks_per_host: None: as the file says, or as a run on this machine would have it.
        importing: what the pipeline names by a dotted name may be imported.

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    launch = loaded.pipeline.launch
    world = World(hosts or launch.hosts[1], ranks_per_host or launch.nproc_per_node or default_ranks(loaded))
    probe = probe_model(loaded, world, importing=importing)
    simulations = Simulations(loaded, world, probe.device, importing=importing)
    stages = tuple(_Exchanges(plan, probe, simulations).explained() for plan in stage_plans(loaded, probe))
    return Explained(loaded, world, probe, _start(probe, simulations), stages)


class _Exchanges:
    """The exchanges of one stage."""

    def __init__(self, plan: StagePlan, probe: ModelProbe, simulations: Simulations) -> None:
        self._plan, self._probe, self._simulations = plan, probe, simulations
        self._ranks = len(simulations.groups)
        self._known: dict[tuple[Any, ...], Exchange] = {}

    def explained(self) -> StageExplained:
        plan, steps = self._plan, dict[tuple[Sent, ...], list[int]]()
        begin = tuple(self._exchanges(plan.begin))
        for step, sent in enumerate(plan.by_step, 1):
            steps.setdefault(sent, []).append(step)
        patterns = []
        for sent, numbers in steps.items():
            before = [one for one in sent if one.moment == "before_forward"]
            later = [one for one in sent if one.moment != "before_forward"]
            found = tuple(self._exchanges([*before, *plan.backward, *later]))
            amount = total([exchange.amount for exchange in found], self._ranks)
            patterns.append(Pattern(tuple(numbers), found, amount))
        patterns.sort(key=lambda pattern: len(pattern.steps))
        end = None if plan.end is None else tuple(self._exchanges(plan.end))
        return StageExplained(plan, tuple(patterns), begin, end, self._ranks)

    def _exchanges(self, sent: Sequence[Sent]) -> Iterator[Exchange]:
        """Those that set out at one moment in one route together; repeated ones as one with its `times`."""
        groups: dict[tuple[Moment, Route], Counter[tuple[BucketLayout, ...] | None]] = {}
        for one in sent:
            groups.setdefault((one.moment, one.route), Counter())[one.layouts] += 1
        for (moment, route), counted in groups.items():
            times, buckets = next(iter(counted.values())), None
            if None not in counted:
                buckets = tuple(layout for layouts in counted for layout in layouts or ())
            key = moment, route, buckets, times
            if key not in self._known:
                self._known[key] = self._exchange(*key)
            yield self._known[key]

    def _exchange(
        self, moment: Moment, route: Route, buckets: tuple[BucketLayout, ...] | None, times: int
    ) -> Exchange:
        stage, missing = self._plan.stage, self._probe.unknown
        of = stage if isinstance(stage, StepStage) else None
        unknown, carried, amount = self._simulations.unknown(of, route), None, None
        if buckets is None:
            reasons = {"gradient": missing.batch, "buffers": missing.batch, "optimizer": missing.optimizer}
            unknown = reasons.get(route.kind) or missing.model
        else:
            found = [self._simulations.carry(of, route, layout) for layout in buckets]
            carried = tuple(one for one in found if one is not None) if None not in found else None
        if carried is not None:
            amount = total([one.amount * times for one in carried], self._ranks)
        ranks = route.group(self._simulations.groups[0][route.queue]).size
        return Exchange(len(self._known), moment, route, ranks, times, buckets, carried, unknown, amount)


def _start(probe: ModelProbe, simulations: Simulations) -> Amount | None:
    """What rank 0 gives all others, before the first step."""
    if probe.model is None:
        return None
    held = dict[str, Tensor]([*probe.model.named_parameters(), *probe.model.named_buffers()])
    route = Route("parameters", "plain", "broadcast")
    carried = [simulations.carry(None, route, one) for one in ParameterBuckets(held, _MESSAGE_BYTES).layouts]
    return total([None if one is None else one.amount for one in carried], len(simulations.groups))


def bucket_bytes(layout: BucketLayout) -> int:
    """Size of a bucket before any hook, in bytes."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return layout.numel * dtype.itemsize


# As JSON.


def _stage_object(stage: StageExplained) -> dict[str, Any]:
    plan, settings, cycle = stage.plan, stage.plan.settings, stage.cycle_amount
    found: dict[str, Any] = {"stage": stage.index, "kind": plan.stage.name}
    if settings is not None:
        found |= {
            "steps": plan.steps,
            "sync": settings.sync.plain(),
            "hooks": [hook.plain() for hook in settings.hooks],
            "buffers": settings.buffers.plain(),
            "accumulate": settings.accumulate,
            "mutate": settings.mutate.plain() if settings.mutate is not None else None,
            "update": settings.update.plain() if settings.update is not None else None,
            "gradients": settings.gradients,
            "cycle": stage.cycle,
            "patterns": [
                {
                    "steps": list(pattern.steps),
                    "exchanges": [exchange.number for exchange in pattern.exchanges],
                    "sent": _sent(pattern.amount),
                }
                for pattern in stage.patterns
            ],
            "control_words": list(plan.control_messages),
            "mean_step": _sent(cycle, stage.cycle),
            "thousand_steps": _sent(cycle, stage.cycle, 1000),
        }
    return found | {
        "exchanges": [_exchange_object(exchange) for exchange in stage.exchanges],
        "begin": [exchange.number for exchange in stage.begin],
        "end": None if stage.end is None else [exchange.number for exchange in stage.end],
        "left_apart": plan.left_apart,
        "whole": _sent(stage.whole_amount),
    }


def _exchange_object(exchange: Exchange) -> dict[str, Any]:
    route, buckets = exchange.route, None
    if exchange.buckets is not None:
        carried = exchange.carried or [None] * len(exchange.buckets)
        buckets = [_bucket_object(*one) for one in zip(exchange.buckets, carried, strict=True)]
    return {
        "exchange": exchange.number,
        "when": exchange.moment,
        "times": exchange.times,
        "kind": route.kind,
        "through": route.through,
        "source": route.source if route.through == "broadcast" else None,
        "among": route.among,
        "ranks": exchange.ranks,
        "unknown": exchange.unknown or None,
        "sent": _sent(exchange.amount),
        "buckets": buckets,
    }


def _bucket_object(layout: BucketLayout, carried: Carried | None) -> dict[str, Any]:
    legs = None
    if carried is not None:
        legs = [
            {
                "op": leg.op,
                "among": leg.among,
                "ranks": leg.ranks,
                "dtype": leg.dtype,
                "bytes": leg.bytes,
                "sent": _sent(leg.amount),
            }
            for leg in carried.legs
        ]
    return {
        "bucket": layout.index,
        "dtype": layout.dtype,
        "numel": layout.numel,
        "bytes": bucket_bytes(layout),
        "params": [param.name for param in layout.params],
        "sent": _sent(carried.amount) if carried is not None else None,
        "legs": legs,
    }


def _model_object(name: str, tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    if tensors is None:
        return {"name": name, "parameters": None, "numel": None, "bytes": None}
    return {
        "name": name,
        "parameters": len(tensors),
        "numel": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(map(nbytes, tensors.values())),
    }


def _sent(amount: Amount | None, steps: int = 1, wanted: int = 1) -> dict[str, float] | None:
    if amount is None:
        return None
    sizes = amount.sizes(steps, wanted)
    return {name: int(sent) if float(sent).is_integer() else sent for name, sent in sizes.items()}
