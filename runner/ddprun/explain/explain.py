"""What a pipeline sends, when, among whom and how much, without a run: as dataclasses and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from ddprun.config import Loaded, StepStage
from ddprun.explain.model_probe import ModelProbe, World, probe_model
from ddprun.explain.stage_plans import Moment, Sent, StagePlan, stage_plans
from ddprun.explain.traffic import Amount, Bucket, Route, Simulations, total
from ddprun.host.device import default_ranks
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets
from ddprun_hooks.payload import nbytes

VERSION = 1

_MESSAGE_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Buckets that are sent at the same moment in the same way."""

    number: int  # within its stage, from 0
    moment: Moment
    route: Route
    ranks: int  # how many ranks are in each group that exchanges
    times: int  # how often it happens in a step: before each of several forward passes
    buckets: tuple[Bucket, ...] | None  # None: not known
    unknown: str  # why something of it is not known; empty if all is
    amount: Amount | None  # what ranks send for it in a step; None: not known

    def as_object(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "exchange": self.number,
            "when": self.moment,
            "times": self.times,
            "kind": self.route.kind,
            "through": self.route.through,
            "source": self.route.source if self.route.through == "broadcast" else None,
            "among": self.route.among,
            "ranks": self.ranks,
            "unknown": self.unknown or None,
            "sent": plain(self.amount),
            "buckets": plain(self.buckets),
        }


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
    exchanges: tuple[Exchange, ...]  # all of them, by number
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

    def as_object(self) -> dict[str, Any]:
        """For `--format json`."""
        plan, settings, cycle = self.plan, self.plan.settings, self.cycle_amount
        found: dict[str, Any] = {"stage": self.index, "kind": plan.stage.name}
        if settings is not None:
            found |= {
                "steps": plan.steps,
                "sync": settings.sync.plain(),
                "hooks": [hook.plain() for hook in settings.hooks],
                "buffers": settings.buffers.plain(),
                "accumulate": settings.accumulate,
                "mutate": settings.mutate and settings.mutate.plain(),
                "update": settings.update and settings.update.plain(),
                "gradients": settings.gradients,
                "cycle": self.cycle,
                "patterns": [
                    {
                        "steps": list(one.steps),
                        "exchanges": _numbers(one.exchanges),
                        "sent": plain(one.amount),
                    }
                    for one in self.patterns
                ],
                "control_words": list(plan.control_messages),
                "mean_step": cycle and cycle.sizes(self.cycle),
                "thousand_steps": cycle and cycle.sizes(self.cycle, 1000),
            }
        return found | {
            "exchanges": [exchange.as_object() for exchange in self.exchanges],
            "begin": _numbers(self.begin),
            "end": None if self.end is None else _numbers(self.end),
            "left_apart": plan.left_apart,
            "whole": plain(self.whole_amount),
        }


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
        unknown, use, held = self.probe.unknown, self.probe.buffer_use, self.parameters
        model: dict[str, Any] = {"name": self.loaded.pipeline.model.name}
        model |= dict.fromkeys(("parameters", "numel", "bytes"))
        if held is not None:
            model |= {"parameters": len(held), "numel": sum(one.numel() for one in held.values())}
            model["bytes"] = sum(map(nbytes, held.values()))
        buffers = None
        if use is not None and self.buffers is not None:
            buffers = {
                "count": len(self.buffers),
                "bytes": sum(map(nbytes, self.buffers.values())),
                "changing": list(use.changing),
                "changing_bytes": use.bytes,
                "constant": list(use.constant),
                "counters": list(use.counters),
                "read_in_training": use.read,
            }
        return {
            "v": VERSION,
            "pipeline": self.loaded.pipeline.name,
            "ranks": self.world.ranks,
            "hosts": self.world.hosts,
            "model": model,
            "buffers": buffers,
            "unknown": list(dict.fromkeys(filter(None, (unknown.model, unknown.batch, unknown.optimizer)))),
            "start": plain(self.start),
            "stages": [stage.as_object() for stage in self.stages],
        }


def plain(value: Any) -> Any:
    """A value as JSON holds it: a dataclass as an object, an amount as its sizes."""
    if isinstance(value, Amount):
        return value.sizes()
    if isinstance(value, tuple):
        return list(map(plain, value))
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _numbers(exchanges: Sequence[Exchange]) -> list[int]:
    return [exchange.number for exchange in exchanges]


def explain(
    loaded: Loaded, *, hosts: int | None = None, ranks_per_host: int | None = None, importing: bool = True
) -> Explained:
    """Find out what a pipeline sends. No rank is started and nothing is sent.

    The model and the data are built and run as on rank 0, hooks and sync policies are the engine's own, and
    bytes are counted as a run counts them. A hook is asked about its first payload only.

    `hosts` and `ranks_per_host` are by default as the file says, or as a run on this machine would have it.
    `importing`: what the pipeline names by a dotted name may be imported.

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    launch = loaded.pipeline.launch
    world = World(hosts or launch.hosts[1], ranks_per_host or launch.nproc_per_node or default_ranks(loaded))
    probe = probe_model(loaded, world, importing=importing)
    simulations = Simulations(loaded, world, probe.device, importing=importing)
    stages = tuple(_explained(plan, probe, simulations) for plan in stage_plans(loaded, probe))
    return Explained(loaded, world, probe, _start(probe, simulations), stages)


def _explained(plan: StagePlan, probe: ModelProbe, simulations: Simulations) -> StageExplained:
    """What a stage sends by its plan, with what that costs."""
    ranks, missing = len(simulations.groups), probe.unknown
    reasons = {"gradient": missing.batch, "buffers": missing.batch, "optimizer": missing.optimizer}
    of = plan.stage if isinstance(plan.stage, StepStage) else None
    known: dict[tuple[Any, ...], Exchange] = {}

    def exchanges(sent: Sequence[Sent]) -> tuple[Exchange, ...]:
        """What goes at one moment by one route is one exchange; repeated ones have their `times`."""
        groups: dict[tuple[Moment, Route], Counter[tuple[BucketLayout, ...] | None]] = {}
        for one in sent:
            groups.setdefault((one.moment, one.route), Counter())[one.layouts] += 1
        found = []
        for (moment, route), counted in groups.items():
            times, layouts = next(iter(counted.values())), None
            if None not in counted:
                layouts = tuple(layout for layouts in counted for layout in layouts or ())
            key = moment, route, layouts, times
            if key not in known:
                known[key] = exchange(len(known), *key)
            found.append(known[key])
        return tuple(found)

    def exchange(
        number: int, moment: Moment, route: Route, layouts: tuple[BucketLayout, ...] | None, times: int
    ) -> Exchange:
        buckets, amount, unknown = None, None, simulations.unknown(of, route)
        if layouts is None:
            unknown = reasons.get(route.kind) or missing.model
        else:
            buckets = tuple(simulations.carry(of, route, layout) for layout in layouts)
            amount = total([one.sent and one.sent * times for one in buckets], ranks)
        group = route.group(simulations.groups[0][route.queue])
        return Exchange(number, moment, route, group.size, times, buckets, unknown, amount)

    begin, steps = exchanges(plan.begin), dict[tuple[Sent, ...], list[int]]()
    for step, sent in enumerate(plan.by_step, 1):
        steps.setdefault(sent, []).append(step)
    patterns = []
    for sent, numbers in steps.items():
        before = [one for one in sent if one.moment == "before_forward"]
        later = [one for one in sent if one.moment != "before_forward"]
        of_step = exchanges([*before, *plan.backward, *later])
        patterns.append(Pattern(tuple(numbers), of_step, total([one.amount for one in of_step], ranks)))
    patterns.sort(key=lambda pattern: len(pattern.steps))
    end = None if plan.end is None else exchanges(plan.end)
    return StageExplained(plan, tuple(patterns), begin, end, tuple(known.values()), ranks)


def _start(probe: ModelProbe, simulations: Simulations) -> Amount | None:
    """What rank 0 gives all others, before the first step."""
    if probe.model is None:
        return None
    held = dict[str, Tensor]([*probe.model.named_parameters(), *probe.model.named_buffers()])
    route = Route("parameters", "plain", "broadcast")
    buckets = [simulations.carry(None, route, one) for one in ParameterBuckets(held, _MESSAGE_BYTES).layouts]
    return total([one.sent for one in buckets], len(simulations.groups))
