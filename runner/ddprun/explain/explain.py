"""What a pipeline sends, when, among whom and how much, without a run: as dataclasses and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from ddprun.config import AverageStage, BroadcastStage, Loaded, Stage, StepStage, TrainSettings
from ddprun.engine.ema import averages_of
from ddprun.explain.model_probe import ModelProbe, WorldShape, probe_model
from ddprun.explain.traffic import Amount, Bucket, Route, Simulations, total
from ddprun.host.device import default_ranks
from ddprun.sync.buffers import BufferPlan, BufferUse, counters_of, split_by_transfer
from ddprun.sync.exchanger import complete_state, floating_state, has_mean
from ddprun.sync.frozen import trained_parameters
from ddprun.sync.plan import PlanProgress, ReplicaConsistency, SyncPlan, Transfer
from ddprun.sync.synchronizer import buckets_of
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets
from ddprun_hooks.payload import nbytes

VERSION = 1

_MESSAGE_BYTES = 25 << 20
_AS_THEY_ARE = Route("parameters", "plain", "sum")

Moment = Literal["begin", "before_forward", "backward", "after_step", "evaluate", "end", "once"]
"""`begin`, `end`: before a stage's first step and after its last. `evaluate`: in an evaluation inside it.
`once`: by a stage without steps.
"""


@dataclass(frozen=True, slots=True)
class Sent:
    """Buckets that are sent together."""

    moment: Moment
    route: Route
    layouts: tuple[BucketLayout, ...] | None  # None: not known


@dataclass(frozen=True, slots=True)
class PlannedExchange:
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
    exchanges: tuple[PlannedExchange, ...]
    amount: Amount | None  # of one such step; None: not known


@dataclass(frozen=True, slots=True)
class StageEvaluations:
    """Evaluations inside a stage that send the same."""

    times: int
    exchanges: tuple[PlannedExchange, ...]
    amount: Amount | None  # of one evaluation; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExplained:
    """What one stage sends."""

    stage: Stage
    settings: TrainSettings | None = None  # None for a stage without steps
    steps: int | None = None  # None: not known, or the stage has none
    cycle: int = 0  # after so many steps it begins again; at most as many as the stage has
    patterns: tuple[Pattern, ...] = ()  # the rarest first
    control_messages: tuple[int, ...] = ()  # first steps with one; they repeat with the cycle
    evaluations: tuple[StageEvaluations, ...] = ()  # of an unknown number of steps, one of each kind
    begin: tuple[PlannedExchange, ...] = ()  # before the first step
    end: tuple[PlannedExchange, ...] | None  # after the last step; all of a stage without; None: not known
    exchanges: tuple[PlannedExchange, ...]  # all of them, by number
    left_apart: bool = False  # the next stage wants ranks as they are: nothing makes them equal at the end
    counts: tuple[int, ...]  # how many ranks each simulated one stands for

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(self.counts)

    @property
    def index(self) -> int:
        """In `stages`."""
        return self.stage.index

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
        amounts += [one.amount and one.amount * one.times for one in self.evaluations]
        if self.steps is not None:
            cycles, rest = divmod(self.steps, self.cycle)
            cycle = self._of_steps(self.cycle)
            amounts += [None if cycle is None else cycle * cycles, self._of_steps(rest)]
        return total(amounts, self.counts)

    def _of_steps(self, count: int) -> Amount | None:
        counted = [(one.amount, sum(step <= count for step in one.steps)) for one in self.patterns]
        amounts = [None if amount is None else amount * steps for amount, steps in counted if steps]
        return total(amounts, self.counts)

    def as_object(self) -> dict[str, Any]:
        """For `--format json`."""
        settings, cycle = self.settings, self.cycle_amount
        found: dict[str, Any] = {"stage": self.index, "kind": self.stage.name}
        if settings is not None:
            found |= {
                "steps": self.steps,
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
                "evaluations": [
                    {"times": one.times, "exchanges": _numbers(one.exchanges), "sent": plain(one.amount)}
                    for one in self.evaluations
                ],
                "control_words": list(self.control_messages),
                "mean_step": cycle and cycle.sizes(self.cycle),
                "thousand_steps": cycle and cycle.sizes(self.cycle, 1000),
            }
        return found | {
            "exchanges": [exchange.as_object() for exchange in self.exchanges],
            "begin": _numbers(self.begin),
            "end": None if self.end is None else _numbers(self.end),
            "left_apart": self.left_apart,
            "whole": plain(self.whole_amount),
        }


@dataclass(frozen=True, slots=True)
class Explained:
    """A pipeline, explained."""

    loaded: Loaded
    world: WorldShape
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

    @property
    def ema_bytes(self) -> int | None:
        """What the moving average of the weights takes on each rank; None: there is none, or not known."""
        model = self.probe.model
        if self.loaded.pipeline.ema is None or model is None:
            return None
        return sum(map(nbytes, averages_of(model).values()))

    def as_object(self) -> dict[str, Any]:
        """For `--format json` (`docs/explain.md`); bytes throughout."""
        unknown, use, held = self.probe.unknown, self.probe.buffer_use, self.parameters
        model: dict[str, Any] = {"name": self.loaded.pipeline.model.name}
        model |= dict.fromkeys(("parameters", "numel", "bytes", "trained", "trained_bytes"))
        model["ema_bytes"] = self.ema_bytes
        if held is not None:
            model |= {"parameters": len(held), "numel": sum(one.numel() for one in held.values())}
            model["bytes"] = sum(map(nbytes, held.values()))
            trained = [one for one in held.values() if one.requires_grad]
            model |= {"trained": len(trained), "trained_bytes": sum(map(nbytes, trained))}
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
            "compile": self._compile(),
            "buffers": buffers,
            "unknown": list(dict.fromkeys(filter(None, (unknown.model, unknown.batch, unknown.optimizer)))),
            "start": plain(self.start),
            "stages": [stage.as_object() for stage in self.stages],
        }

    def _compile(self) -> dict[str, Any] | None:
        settings, compiled = self.loaded.pipeline.compile, self.probe.compiled
        if settings is None:
            return None
        found: dict[str, Any] = {"mode": settings.mode, "blocks": None, "graphs": None, "breaks": None}
        if compiled is not None:
            found |= {"blocks": list(compiled.blocks), "breaks": plain(compiled.breaks)}
            found["graphs"] = plain(compiled.graphs)
        return found


def plain(value: Any) -> Any:
    """A value as JSON holds it: a dataclass as an object, an amount as its sizes."""
    if isinstance(value, Amount):
        return value.sizes()
    if isinstance(value, tuple):
        return list(map(plain, value))
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def _numbers(exchanges: Sequence[PlannedExchange]) -> list[int]:
    return [exchange.number for exchange in exchanges]


def explain(
    loaded: Loaded,
    *,
    hosts: int | None = None,
    ranks_per_host: int | None = None,
    importing: bool = True,
    probe: ModelProbe | None = None,
) -> Explained:
    """Find out what a pipeline sends. No rank is started and nothing is sent.

    The model and the data are built and run as on rank 0, hooks and sync policies are the engine's own, and
    bytes are counted as a run counts them. A hook is asked about its first payload only.

    `hosts` and `ranks_per_host` are by default as the file says, or as a run on this machine would have it.
    `importing`: what the pipeline names by a dotted name may be imported. `probe`: of the same model and
    data, from an earlier call for other ranks, hooks, policies or sizes of buckets; they are not looked at
    again, unless it takes more than the probe knows.

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    launch = loaded.pipeline.launch
    world = WorldShape(
        hosts or launch.host_range[1], ranks_per_host or launch.nproc_per_node or default_ranks(loaded)
    )
    if probe is None or not probe.fits(loaded):
        probe = probe_model(loaded, world, importing=importing)
    simulations = Simulations(loaded, world, probe.device, importing=importing)
    planner = _Planner(loaded, probe, simulations)
    stages = tuple(planner.explained(stage) for stage in loaded.pipeline.stages)
    return Explained(loaded, world, probe, _start(probe, simulations), stages)


def _start(probe: ModelProbe, simulations: Simulations) -> Amount | None:
    """What rank 0 gives all others, before the first step."""
    if probe.model is None:
        return None
    held = dict[str, Tensor]([*probe.model.named_parameters(), *probe.model.named_buffers()])
    route = Route("parameters", "plain", "broadcast")
    buckets = [simulations.carry(None, route, one) for one in ParameterBuckets(held, _MESSAGE_BYTES).layouts]
    return total([one.sent for one in buckets], simulations.counts)


class _Planner:
    """Goes through the stages as a run does, by their sync plans and buffer plans."""

    def __init__(self, loaded: Loaded, probe: ModelProbe, simulations: Simulations) -> None:
        self._pipeline, self._probe, self._simulations = loaded.pipeline, probe, simulations
        self._cap_bytes = loaded.pipeline.ddp.bucket_cap_mb * 2**20
        self._model = probe.model
        self._trained = trained_parameters(probe.model) if probe.model is not None else None
        self._named_buffers = dict(self._model.named_buffers()) if self._model is not None else {}
        self._use = probe.buffer_use or _nothing_excluded(self._model)
        self._setting = loaded.pipeline.buffers
        self._buffers_used = False  # by steps, since they were last made equal
        self._averages = None  # of the weights (`ema`), without values; None: there are none, or not known
        if loaded.pipeline.ema is not None and self._model is not None:
            self._averages = averages_of(self._model, "meta")
        self._averages_apart = False  # ranks have different ones
        self._replicas = ReplicaConsistency()
        self._stage: StepStage | None = None  # whose hooks carry what is sent
        self._known: dict[tuple[Any, ...], PlannedExchange] = {}  # those of the stage

    def explained(self, stage: Stage) -> StageExplained:
        """What a stage sends, and what that costs; stages are asked for in order."""
        self._stage, self._known = None, {}
        match stage:
            case StepStage():
                self._stage = stage
                return self._with_steps(stage)
            case AverageStage():
                sent = self._make_equal("once")
            case BroadcastStage():
                sent = self._make_equal("once", stage.source)
            case _:
                sent = self._before_reading("once")
                self._buffers_used &= self._setting.when == "never"
        end = self._exchanges(sent)
        return StageExplained(stage=stage, end=end, exchanges=end, counts=self._simulations.counts)

    def _with_steps(self, stage: StepStage) -> StageExplained:
        settings = stage.effective(self._pipeline)
        plan, self._setting = settings.plan, settings.buffers
        names = tuple(name for name in self._named_buffers if name not in self._use.counters)
        buffers = BufferPlan(settings.buffers, self._use, names, plan.gradients == "all")
        steps, cycle = self._length(stage, settings), plan.cycle(settings.buffers.every)
        noop = any(hook.name == "noop" for hook in settings.hooks)
        progress, replicas = PlanProgress(plan), self._replicas
        begin: tuple[PlannedExchange, ...] = ()
        if replicas.needs_equal_state(plan):
            begin = self._exchanges(self._transfer("begin", Transfer("optimizer", 1), plan))
            replicas.optimizer = "common"
        if settings.mutate is not None:
            replicas.mutated(0)
        self._buffers_used = True
        # What the last steps leave behind depends on how far they are in a cycle, not on how many came.
        length = cycle if steps is None else steps if steps <= cycle else cycle + steps % cycle
        alike: dict[tuple[Sent, ...], list[int]] = {}  # steps of a cycle, by what is sent in them
        evaluated: list[tuple[Sent, ...]] = []  # what an evaluation would send after each step
        for step in range(1, length + 1):
            if settings.updates and (plan.gradients != "all" or replicas.parameters != "common"):
                self._averages_apart = self._pipeline.ema is not None
            sent = self._buffers("before_forward", buffers.before_forward()) * settings.accumulate
            sent += self._gradients(plan)
            _, setting_out, effect = progress.after_step(step)
            for index in setting_out:
                sent += self._transfer("after_step", plan.transfers[index], plan)
            replicas.note(effect, plan, noop=noop)
            met = plan.synchronizes(step)
            sent += self._buffers("after_step", buffers.after_step(step, synchronized=met))
            if settings.mutate is not None and met and step != length:
                replicas.mutated(step)
            if step <= cycle:
                alike.setdefault(sent, []).append(step)
            evaluated.append(self._evaluation())
        last = self._end(stage, plan, progress, noop=noop)
        evaluations = self._evaluations(stage, steps, evaluated[:cycle])
        patterns = []
        for sent, steps_alike in alike.items():
            found = self._exchanges(sent)
            amount = total([one.amount for one in found], self._simulations.counts)
            patterns.append(Pattern(tuple(steps_alike), found, amount))
        end = None if steps is None and cycle > 1 else self._exchanges(last)
        return StageExplained(
            stage=stage,
            settings=settings,
            steps=steps,
            cycle=min(cycle, length),
            patterns=tuple(sorted(patterns, key=lambda pattern: len(pattern.steps))),
            control_messages=tuple(_control_messages(plan, buffers, steps, cycle)),
            evaluations=evaluations,
            begin=begin,
            end=end,
            exchanges=tuple(self._known.values()),
            left_apart=replicas.parameters != "common",
            counts=self._simulations.counts,
        )

    def _exchanges(self, sent: Sequence[Sent]) -> tuple[PlannedExchange, ...]:
        """What is sent at one moment by one route is one exchange, sent `times` times."""
        groups: dict[tuple[Moment, Route], Counter[tuple[BucketLayout, ...] | None]] = {}
        for one in sent:
            groups.setdefault((one.moment, one.route), Counter())[one.layouts] += 1
        found = []
        for (moment, route), counted in groups.items():
            times, layouts = next(iter(counted.values())), None
            if None not in counted:
                layouts = tuple(layout for layouts in counted for layout in layouts or ())
            key = moment, route, layouts, times
            if key not in self._known:
                self._known[key] = self._exchange(*key)
            found.append(self._known[key])
        return tuple(found)

    def _exchange(
        self, moment: Moment, route: Route, layouts: tuple[BucketLayout, ...] | None, times: int
    ) -> PlannedExchange:
        missing, buckets, amount = self._probe.unknown, None, None
        unknown = self._simulations.unknown(self._stage, route)
        if layouts is None:
            reasons = {"gradient": missing.batch, "buffers": missing.batch, "optimizer": missing.optimizer}
            unknown = reasons.get(route.kind) or missing.model
        else:
            buckets = tuple(self._simulations.carry(self._stage, route, layout) for layout in layouts)
            amount = total([one.sent and one.sent * times for one in buckets], self._simulations.counts)
        ranks = self._simulations.group(route).size
        return PlannedExchange(len(self._known), moment, route, ranks, times, buckets, unknown, amount)

    def _make_equal(self, moment: Moment, source: int | None = None) -> tuple[Sent, ...]:
        """Parameters as they are, averaged or those of rank `source`, and the averages of the weights."""
        self._replicas.parameters = "common"
        route = _AS_THEY_ARE
        if source is not None:
            route = replace(route, through="broadcast", source=source)
        return self._bucketed(moment, route, self._trained) + self._make_averages_equal(moment, route)

    def _make_averages_equal(self, moment: Moment, route: Route) -> tuple[Sent, ...]:
        if not self._averages_apart:
            return ()
        self._averages_apart = False
        return self._bucketed(moment, replace(route, ema=True), self._averages)

    def _before_reading(self, moment: Moment) -> tuple[Sent, ...]:
        """Buffers that an evaluation or a save stage reads."""
        if self._setting.when == "never":
            return ()
        if self._probe.buffer_use is None and (self._named_buffers or self._model is None):
            return (Sent(moment, Route("buffers", "plain", "broadcast"), None),)
        if not self._buffers_used:
            return ()
        # Whole numbers that training changes are the same on all ranks, as far as one batch shows.
        changed = [name for name in self._use.changing if has_mean(self._named_buffers[name])]
        return self._buffers(moment, changed)

    def _evaluation(self) -> tuple[Sent, ...]:
        """What an evaluation inside a stage would send now, for a while: nothing stays equal by it."""
        sent = self._before_reading("evaluate")
        if self._replicas.parameters != "common" or self._averages_apart:
            sent += self._bucketed("evaluate", _AS_THEY_ARE, self._trained)
        return sent

    def _evaluations(
        self, stage: StepStage, steps: int | None, after: Sequence[tuple[Sent, ...]]
    ) -> tuple[StageEvaluations, ...]:
        """Those of a stage that has ended, by what they send: `after` each step of a cycle, and now."""
        if stage.evaluate is None:
            return ()
        every, times = stage.evaluate.every, Counter[tuple[Sent, ...]]()
        inside = None if steps is None else (steps - 1) // every
        repeat = math.lcm(every, len(after)) // every
        for number in range(1, repeat + 1 if inside is None else min(repeat, inside) + 1):
            sent = after[(number * every - 1) % len(after)]
            times[sent] += 0 if inside is None else (inside - number) // repeat + 1
        times[self._evaluation()] += 1 if inside is not None else 0
        found = []
        for sent, often in times.items():
            exchanges = self._exchanges(sent)
            amount = total([one.amount for one in exchanges], self._simulations.counts)
            found.append(StageEvaluations(often or 1, exchanges, amount))
        return tuple(found)

    def _end(
        self, stage: StepStage, plan: SyncPlan, progress: PlanProgress, *, noop: bool
    ) -> tuple[Sent, ...]:
        replicas = self._replicas
        reconcile = self._pipeline.reconciles_after(stage)
        _, setting_out, effect = progress.finish(reconcile=reconcile and replicas.parameters != "common")
        sent: tuple[Sent, ...] = ()
        for index in setting_out:
            sent += self._transfer("end", plan.transfers[index], plan)
        if effect != "nothing":
            replicas.note(effect, plan, noop=noop)
        if reconcile and replicas.parameters != "common":
            sent += self._make_equal("end")
        elif reconcile:
            sent += self._make_averages_equal("end", _AS_THEY_ARE)
        return sent

    def _length(self, stage: StepStage, settings: TrainSettings) -> int | None:
        if settings.steps is not None or self._probe.feeds is None:
            return settings.steps
        per_epoch = self._probe.feeds.of(stage.index).steps_per_epoch(settings.accumulate)
        assert settings.epochs is not None, "a stage has steps or epochs"
        return None if per_epoch is None else settings.epochs * per_epoch

    def _gradients(self, plan: SyncPlan) -> tuple[Sent, ...]:
        if plan.gradients is None:
            return ()
        route = Route("gradient", "world", "hooks")
        if plan.gradients == "host":
            route = Route("gradient", "world", "host_hooks", True, plan.hosts)
        known = self._probe.gradients
        cap_mb = self._pipeline.ddp.bucket_cap_mb
        return _sent("backward", route, None if known is None else known.of(cap_mb))

    def _transfer(self, moment: Moment, one: Transfer, plan: SyncPlan) -> tuple[Sent, ...]:
        """The buckets of a transfer that sets out."""
        inside = one.among == "host"
        hosts = plan.hosts if inside else None
        match one.what:
            case "optimizer":
                route = Route("optimizer", "plain", "sum", inside, hosts, part=one.partition)
                optimizer = self._probe.optimizer
                if optimizer is None:
                    return self._bucketed(moment, route, None)
                optimizer.state.update(self._probe.optimizer_state or {})
                complete_state(optimizer)
                return self._bucketed(moment, route, floating_state(optimizer))
            case "parameters" if one.source is not None:
                route = Route("parameters", "plain", "broadcast", source=one.source)
            case "parameters":
                route = Route("parameters", "plain", "sum", inside, hosts, part=one.partition)
            case "change":
                route = Route("delta", "deltas", "host_hooks" if inside else "hooks", inside, hosts)
        if self._trained is None:
            return _sent(moment, route, None)
        return _sent(moment, route, buckets_of(plan, self._trained, self._cap_bytes)[one.fragment].layouts)

    def _buffers(self, moment: Moment, names: Sequence[str]) -> tuple[Sent, ...]:
        named = {name: self._named_buffers[name] for name in names}
        averaged, broadcast = split_by_transfer(named, self._setting)
        return (
            *self._bucketed(moment, Route("buffers", "plain", "sum"), averaged),
            *self._bucketed(moment, Route("buffers", "plain", "broadcast"), broadcast),
        )

    def _bucketed(self, moment: Moment, route: Route, named: Mapping[str, Tensor] | None) -> tuple[Sent, ...]:
        """Tensors in their buckets; None: not known."""
        layouts = None if named is None else ParameterBuckets(named, self._cap_bytes).layouts
        return _sent(moment, route, layouts)


def _sent(moment: Moment, route: Route, layouts: tuple[BucketLayout, ...] | None) -> tuple[Sent, ...]:
    """Nothing where there are no buckets."""
    return () if layouts == () else (Sent(moment, route, layouts),)


def _control_messages(plan: SyncPlan, buffers: BufferPlan, steps: int | None, cycle: int) -> Iterator[int]:
    """An exchange that overlaps with training may be applied, for the first time, in the second cycle."""
    known: set[int] = set()
    for step in range(1, min(2 * cycle, steps or 2 * cycle) + 1):
        if (plan.synchronizes(step) or buffers.synchronizes(step)) and step % cycle not in known:
            known.add(step % cycle)
            yield step


def _nothing_excluded(model: nn.Module | None) -> BufferUse:
    """Where nobody has looked: every buffer but a counter may change."""
    if model is None:
        return BufferUse()
    counters = counters_of(model)
    names = [name for name, _ in model.named_buffers()]
    return BufferUse(tuple(name for name in names if name not in counters), (), counters)
