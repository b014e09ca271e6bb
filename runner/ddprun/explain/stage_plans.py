"""What each stage sends after which step: its sync plan and buffer plan, followed without a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from ddprun.config import (
    AverageStage,
    BroadcastStage,
    Evaluate,
    Loaded,
    Save,
    Stage,
    StepStage,
    TrainSettings,
)
from ddprun.explain.model_probe import ModelProbe
from ddprun.explain.traffic import Route
from ddprun.sync.buffers import BufferPlan, BufferUse, counters_of, split_by_transfer
from ddprun.sync.optimizer_state import complete_state, floating_state, has_mean
from ddprun.sync.plan import PlanProgress, ReplicaConsistency, SyncPlan, Transfer
from ddprun.sync.synchronizer import averaged_parameters, buckets_of
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets

Moment = Literal["begin", "before_forward", "backward", "after_step", "end", "once"]
"""`begin`, `end`: before a stage's first step and after its last. `once`: by a stage without steps."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Buckets that set out together."""

    moment: Moment
    route: Route
    layouts: tuple[BucketLayout, ...] | None  # None: not known


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage sends."""

    stage: Stage
    settings: TrainSettings | None = None  # None for a stage without steps
    steps: int | None = None  # None: not known, or the stage has none
    begin: tuple[Sent, ...] = ()  # before the first step
    backward: tuple[Sent, ...] = ()  # what backward sends, in every step
    by_step: tuple[tuple[Sent, ...], ...] = ()  # what else is sent, by step of a cycle
    control_messages: tuple[int, ...] = ()  # first steps with one; they repeat with the cycle
    end: tuple[Sent, ...] | None = ()  # at the end, or by a stage without steps; None: not known
    left_apart: bool = False  # the next stage wants ranks as they are: nothing makes them equal at the end


def stage_plans(loaded: Loaded, probe: ModelProbe) -> Iterator[StagePlan]:
    """What each stage sends, in order."""
    planner = _Planner(loaded, probe)
    for stage in loaded.pipeline.stages:
        match stage:
            case StepStage():
                yield planner.steps(stage)
            case AverageStage():
                planner.replicas.parameters = "common"
                yield StagePlan(stage, end=planner.average("once"))
            case BroadcastStage():
                planner.replicas.parameters = "common"
                yield StagePlan(stage, end=planner.broadcast(stage.source))
            case Evaluate() | Save():
                yield StagePlan(stage, end=planner.before_reading())


class _Planner:
    """Goes through the stages as a run does."""

    def __init__(self, loaded: Loaded, probe: ModelProbe) -> None:
        self._pipeline, self._probe = loaded.pipeline, probe
        self._cap_bytes = loaded.pipeline.ddp.bucket_cap_mb * 2**20
        self._model = probe.model
        self._named_buffers = dict(self._model.named_buffers()) if self._model is not None else {}
        self._use = probe.buffer_use or _nothing_excluded(self._model)
        self._setting = loaded.pipeline.buffers
        self._buffers_used = False  # by steps, since they were last made equal
        self.replicas = ReplicaConsistency()

    def steps(self, stage: StepStage) -> StagePlan:
        settings = stage.effective(self._pipeline)
        plan, self._setting = settings.plan, settings.buffers
        names = tuple(name for name in self._named_buffers if name not in self._use.counters)
        buffers = BufferPlan(settings.buffers, self._use, names, plan.gradients == "all")
        steps, cycle = self._length(settings), plan.cycle(settings.buffers.every)
        noop = any(hook.name == "noop" for hook in settings.hooks)
        progress, replicas = PlanProgress(plan), self.replicas
        begin: tuple[Sent, ...] = ()
        if replicas.needs_equal_state(plan):
            begin = self._transfer("begin", Transfer("optimizer", 1), plan)
            replicas.optimizer = "common"
        if settings.mutate is not None:
            replicas.mutated(0)
        self._buffers_used = True
        # What the last steps leave behind depends on how far they are in a cycle, not on how many came.
        length = cycle if steps is None else steps if steps <= cycle else cycle + steps % cycle
        by_step: list[tuple[Sent, ...]] = []
        for step in range(1, length + 1):
            sent = self._buffers("before_forward", buffers.before_forward()) * settings.accumulate
            _, setting_out, effect = progress.after_step(step)
            for index in setting_out:
                sent += self._transfer("after_step", plan.transfers[index], plan)
            replicas.note(effect, plan, noop=noop)
            met = plan.synchronizes(step)
            sent += self._buffers("after_step", buffers.after_step(step, synchronized=met))
            if settings.mutate is not None and met and step != length:
                replicas.mutated(step)
            by_step.append(sent)
        end = self._end(stage, plan, progress, noop=noop)
        return StagePlan(
            stage,
            settings,
            steps,
            begin,
            self._gradients(plan),
            tuple(by_step[:cycle]),
            tuple(_control_messages(plan, buffers, steps, cycle)),
            None if steps is None and cycle > 1 else end,
            left_apart=replicas.parameters != "common",
        )

    def average(self, moment: Moment) -> tuple[Sent, ...]:
        """Parameters as they are, averaged."""
        route = Route("parameters", "plain", "sum")
        named = None if self._model is None else averaged_parameters(self._model)
        return self._bucketed(moment, route, named)

    def broadcast(self, source: int) -> tuple[Sent, ...]:
        """Parameters of one rank."""
        route = Route("parameters", "plain", "broadcast", source=source)
        named = None if self._model is None else dict[str, Tensor](self._model.named_parameters())
        return self._bucketed("once", route, named)

    def before_reading(self) -> tuple[Sent, ...]:
        """Buffers that an evaluate or save stage reads."""
        if self._setting.when == "never":
            return ()
        if self._probe.buffer_use is None and (self._named_buffers or self._model is None):
            return (Sent("once", Route("buffers", "plain", "broadcast"), None),)
        used, self._buffers_used = self._buffers_used, False
        if not used:
            return ()
        # Whole numbers that training changes are the same on all ranks, as far as one batch shows.
        changed = [name for name in self._use.changing if has_mean(self._named_buffers[name])]
        return self._buffers("once", changed)

    def _end(
        self, stage: StepStage, plan: SyncPlan, progress: PlanProgress, *, noop: bool
    ) -> tuple[Sent, ...]:
        replicas = self.replicas
        reconcile = self._pipeline.reconciles_after(stage)
        _, setting_out, effect = progress.finish(reconcile=reconcile and replicas.parameters != "common")
        sent: tuple[Sent, ...] = ()
        for index in setting_out:
            sent += self._transfer("end", plan.transfers[index], plan)
        if effect != "nothing":
            replicas.note(effect, plan, noop=noop)
        if reconcile and replicas.parameters != "common":
            sent += self.average("end")
            replicas.parameters = "common"
        return sent

    def _length(self, settings: TrainSettings) -> int | None:
        if settings.steps is not None or self._probe.feed is None:
            return settings.steps
        per_epoch = self._probe.feed.steps_per_epoch(settings.accumulate)
        assert settings.epochs is not None, "a stage has steps or epochs"
        return None if per_epoch is None else settings.epochs * per_epoch

    def _gradients(self, plan: SyncPlan) -> tuple[Sent, ...]:
        if plan.gradients is None:
            return ()
        route = Route("gradient", "world", "hooks")
        if plan.gradients == "host":
            route = Route("gradient", "world", "host_hooks", True, plan.hosts)
        return _sent("backward", route, self._probe.gradients)

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
                optimizer.state.update(self._probe.optimizer_state)
                complete_state(optimizer)
                return self._bucketed(moment, route, floating_state(optimizer))
            case "parameters" if one.source is not None:
                route = Route("parameters", "plain", "broadcast", source=one.source)
            case "parameters":
                route = Route("parameters", "plain", "sum", inside, hosts, part=one.partition)
            case "change":
                route = Route("delta", "deltas", "host_hooks" if inside else "hooks", inside, hosts)
        if self._model is None:
            return _sent(moment, route, None)
        return _sent(moment, route, buckets_of(plan, self._model, self._cap_bytes)[one.fragment].layouts)

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
