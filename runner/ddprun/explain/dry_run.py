"""The engine's own stages, run on a model without values: what is sent after which step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import SGD

from ddprun.config import (
    Audit,
    AverageStage,
    BroadcastStage,
    Choice,
    Evaluate,
    Loaded,
    Save,
    Stage,
    StepStage,
    Train,
    TrainSettings,
)
from ddprun.engine import loop, replicas, stage_run
from ddprun.engine.reporter import Reporter
from ddprun.engine.session import RunState, Runtime, Session
from ddprun.engine.stacks import Stacks
from ddprun.explain.model_probe import ModelProbe, ModelShapes
from ddprun.explain.traffic import Hooks, QueueName, Route, Simulations
from ddprun.sync.buffers import BufferSync, BufferUse, counters_of
from ddprun.sync.exchanger import ParameterExchanger, PendingExchange
from ddprun.telemetry.events import event_log
from ddprun.telemetry.recorder import StepRecorder
from ddprun_hooks.buckets import BucketLayout, ParameterBuckets
from ddprun_hooks.comm.control import Control
from ddprun_hooks.comm.exchange import Exchange
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.queue import CommQueue, HostQueue, new_trace
from ddprun_hooks.payload import Kind, Payload, dtype_name
from ddprun_hooks.stack import Broadcast, Stack

Moment = Literal["begin", "before_forward", "backward", "after_step", "end", "once"]
"""`begin`, `end`: before a stage's first step and after its last. `once`: by a stage without steps."""

_LONGEST_CYCLE = 100_000
"""Periods that have no smaller common multiple are looked at for so many steps."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket that sets out."""

    moment: Moment
    way: Route
    layout: BucketLayout | None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one stage sends."""

    stage: Stage
    settings: TrainSettings | None = None
    """None for a stage without steps."""

    steps: int | None = None
    """None: not known, or the stage has none."""

    begin: tuple[Sent, ...] = ()
    """What is sent before the first step."""

    backward: tuple[Sent, ...] = ()
    """What backward sends, in every step."""

    by_step: tuple[tuple[Sent, ...], ...] = ()
    """What else is sent, by step, up to where it begins again from the first."""

    control_words: tuple[int, ...] = ()
    """The first steps in which ranks exchange a control message; they come again with the cycle."""

    end: tuple[Sent, ...] | None = ()
    """What is sent after the last step, or by a stage without steps. None: not known."""

    left_apart: bool = False
    """The next stage wants the ranks as they are, so that nothing makes them equal at the end."""


def dry_run(loaded: Loaded, probe: ModelProbe, hooks: Hooks, simulations: Simulations) -> Iterator[Plan]:
    """What each stage sends, in order."""
    return _DryRun(loaded, probe, hooks, simulations).plans()


class _DryRun:
    """Goes through the stages as a run does, as rank 0."""

    def __init__(self, loaded: Loaded, probe: ModelProbe, hooks: Hooks, simulations: Simulations) -> None:
        self._pipeline = loaded.pipeline
        self._probe = probe
        self._model = probe.shapes or self._stand_in()
        exchange = _exchange(simulations.groups[0])
        cap_bytes = self._pipeline.ddp.bucket_cap_mb * 2**20
        self._exchanger = _Exchanger(exchange, cap_bytes, known=probe.shapes is not None)
        verdict = probe.verdict or _nothing_excluded(self._model)
        self._buffers = BufferSync(self._model, self._exchanger, verdict, self._pipeline.buffers)
        self._buffers_used = False  # by steps, since they were last made equal
        stacks = Stacks()
        for stage in self._pipeline.step_stages():
            stacks.all_ranks[stage.index] = hooks.make(stage)
            stacks.within_hosts[stage.index] = hooks.make(stage, inside_host=True)
        self._optimizer = probe.optimizer or SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        # What the engine's stages touch of a session beside computing. Parameters have no values to audit.
        unaudited = self._pipeline.model_copy(update={"audit": Audit(), "schedule": None})
        settings = [dict[str, Any]()] * len(self._optimizer.param_groups)
        runtime = SimpleNamespace(
            loaded=replace(loaded, pipeline=unaudited),
            model=self._model,
            optimizer=self._optimizer,
            optimizer_settings={stage.index: settings for stage in self._pipeline.stages},
            stacks=stacks,
            exchanger=self._exchanger,
            exchange=exchange,
            buffers=self._buffers,
            replica=None,
            feed=SimpleNamespace(epoch=0),
            recorder=SimpleNamespace(
                lap=lambda part: None,
                write_aside=lambda stage, step: None,
                begin_stage=lambda params: None,
            ),
        )
        reporter = SimpleNamespace(events=event_log(None, dict), note=lambda text: None)
        self._session = Session(cast(Runtime, runtime), RunState(), cast(Reporter, reporter))

    def plans(self) -> Iterator[Plan]:
        for stage in self._pipeline.stages:
            match stage:
                case StepStage():
                    yield self._steps(stage)
                case AverageStage():
                    yield Plan(stage, end=self._sent("once", partial(replicas.average, self._session, stage)))
                case BroadcastStage():
                    yield Plan(
                        stage, end=self._sent("once", partial(replicas.broadcast, self._session, stage))
                    )
                case Evaluate() | Save():
                    yield Plan(stage, end=self._sent("once", partial(self._before_reading, stage)))

    def _steps(self, stage: StepStage) -> Plan:
        settings = stage.effective(self._pipeline)
        steps, cycle = self._length(settings), _cycle(settings)
        # What the last steps leave behind depends on how far they are in a cycle, not on how many came.
        length = cycle if steps is None else steps if steps <= cycle else cycle + steps % cycle
        shortened = _without_user_code(stage, length)
        self._exchanger.stacks = (
            self._session.runtime.stacks.all_ranks[stage.index],
            self._session.runtime.stacks.within_hosts[stage.index],
        )
        self._exchanger.moment = "begin"
        ours = stage_run.begin_stage(self._session, shortened)
        begin = self._exchanger.taken()
        if isinstance(stage, Train) or settings.update is not None:
            self._optimizer.state.update(self._probe.optimizer_state)
            self._exchanger.known_state = not self._probe.unknown.optimizer
        self._buffers_used = True
        by_step: list[tuple[Sent, ...]] = []
        for step in range(1, length + 1):
            self._exchanger.moment = "before_forward"
            for _ in range(settings.accumulate):
                self._buffers.before_forward()
            self._exchanger.moment = "after_step"
            loop.synchronize(ours, step)
            by_step.append(self._exchanger.taken())
        end = self._sent("end", partial(stage_run.end_stage, ours))
        return Plan(
            stage,
            settings,
            steps,
            begin,
            tuple(self._gradients(settings)),
            tuple(by_step[:cycle]),
            tuple(_control_words(ours, steps, cycle)),
            None if steps is None and cycle > 1 else end,
            left_apart=self._session.state.replicas.parameters != "common",
        )

    def _length(self, settings: TrainSettings) -> int | None:
        if settings.steps is not None or self._probe.feed is None:
            return settings.steps
        per_epoch = self._probe.feed.steps_per_epoch(settings.accumulate)
        assert settings.epochs is not None, "a stage has steps or epochs"
        return None if per_epoch is None else settings.epochs * per_epoch

    def _gradients(self, settings: TrainSettings) -> Iterator[Sent]:
        if settings.gradients is None:
            return
        way = Route("gradient", "world", "hooks")
        if settings.gradients == "host":
            way = Route("gradient", "world", "host_hooks", True, settings.sync.options["hosts"])
        buckets = self._probe.gradients
        for layout in [None] if buckets is None else buckets:
            yield Sent("backward", way, layout)

    def _sent(self, moment: Moment, send: Callable[[], object]) -> tuple[Sent, ...]:
        self._exchanger.moment = moment
        send()
        return self._exchanger.taken()

    def _before_reading(self, stage: Evaluate | Save) -> None:
        held = dict(self._model.named_buffers())
        if self._buffers.setting.when == "never":
            return
        if self._probe.verdict is None and (held or self._probe.shapes is None):
            self._exchanger.note(Route("buffers", "plain", "broadcast"), None)
            return
        if self._buffers_used:
            for name in self._buffers.verdict.changing:
                held[name].copy_(held[name] == 0)  # other values than those that ranks last had in common
        replicas.make_buffers_equal(self._session, stage)
        self._buffers_used = False

    def _stand_in(self) -> ModelShapes:
        """For a model that is not known: enough parameters for every policy to have something to send."""
        options = [stage.effective(self._pipeline).sync.options for stage in self._pipeline.step_stages()]
        count = max([1, *(option.get("fragments", 1) for option in options)])
        return ModelShapes({str(place): torch.empty(1) for place in range(count)}, {})


def _without_user_code(stage: StepStage, steps: int) -> StepStage:
    """The stage with so many steps, and with nothing in it that would want a model with values."""
    noise = Choice("mutate", "noise", {"std": 1.0}, "built-in")
    changed = {
        "steps": steps,
        "epochs": None,
        "schedule": None,
        "mutate": None if stage.mutate is None else noise,
    }
    return stage.model_copy(update=changed)


class _Exchanger(ParameterExchanger):
    """Notes what sets out, and gives everybody back what they sent."""

    def __init__(self, exchange: Exchange, cap_bytes: float, *, known: bool) -> None:
        super().__init__(exchange, cast(StepRecorder, None), cap_bytes)
        self.moment: Moment = "begin"
        self.stacks: tuple[Stack, Stack] | None = None
        """The stage's hooks among all ranks, and inside a host."""

        self.known_state = True
        """It is known which state the optimizer has."""

        self._sent: list[Sent] = []
        self._known = known

    def taken(self) -> tuple[Sent, ...]:
        """What has been sent since this was last asked."""
        sent, self._sent = self._sent, []
        return tuple(sent)

    def send(self, queue: CommQueue, payload: Payload, stack: Stack, group: RankGroup) -> PendingExchange:
        layout = BucketLayout(
            payload.bucket, dtype_name(payload.tensor.dtype), payload.tensor.numel(), payload.params
        )
        self.note(self._way(queue, payload.kind, stack, group), layout if self._known else None)
        future: Future[Tensor] = Future()
        future.set_result(payload.tensor)
        return PendingExchange(future, new_trace(payload, stack, 0))

    def land(self, pending: PendingExchange) -> Tensor:
        landed: Tensor = pending.future.wait()
        return landed

    def average(self, buckets: ParameterBuckets, kind: Kind, group: RankGroup | None = None) -> None:
        if kind == "optimizer" and not self.known_state:
            plain = self.exchange.plain
            self.note(self._way(plain, kind, self._plain, group or plain.world), None)
            return
        super().average(buckets, kind, group)

    def note(self, way: Route, layout: BucketLayout | None) -> None:
        """Note a bucket that sets out; one that is not known, only once."""
        sent = Sent(self.moment, way, layout)
        if layout is not None or sent not in self._sent:
            self._sent.append(sent)

    def _way(self, queue: CommQueue, kind: Kind, stack: Stack, group: RankGroup) -> Route:
        name = cast(QueueName, queue.world.name)
        inside, hosts = False, None
        for split, (host, _) in queue.world.splits.items():
            if group is host:
                inside, hosts = True, split
        last = stack.hooks[-1]
        if isinstance(last, Broadcast):
            return Route(kind, name, "broadcast", source=last.source)
        if self.stacks is not None and stack is self.stacks[0]:
            return Route(kind, name, "hooks", inside, hosts)
        if self.stacks is not None and stack is self.stacks[1]:
            return Route(kind, name, "host_hooks", inside, hosts)
        return Route(kind, name, "sum", inside, hosts)


class _Alone(Control):
    """Control messages that every other rank seems to have sent alike."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def all_gather(self, numbers: Sequence[float], what: str = "") -> Tensor:
        return torch.tensor([list(numbers)] * self.size, dtype=torch.float64)


def _exchange(groups: dict[QueueName, RankGroup]) -> Exchange:
    """What rank 0 would exchange over."""
    return Exchange(
        gradients=HostQueue(groups["world"]),
        deltas=HostQueue(groups["deltas"]),
        plain=HostQueue(groups["plain"]),
        exact=groups["plain"],
        control=_Alone(groups["plain"].size),
    )


def _cycle(settings: TrainSettings) -> int:
    """After how many steps everything begins again."""
    periods = [settings.sync.options.get(key) for key in ("every", "within", "across")]
    return min(math.lcm(*(period for period in [*periods, settings.buffers.every] if period)), _LONGEST_CYCLE)


def _control_words(ours: stage_run.StageRun, steps: int | None, cycle: int) -> Iterator[int]:
    """An exchange that goes on beside training may be applied, for the first time, in the second cycle."""
    known: set[int] = set()
    for step in range(1, min(2 * cycle, steps or 2 * cycle) + 1):
        if ours.synchronizes(step) and step % cycle not in known:
            known.add(step % cycle)
            yield step


def _nothing_excluded(model: nn.Module) -> BufferUse:
    """Where nobody has looked: every buffer but a counter may change."""
    counters = counters_of(model)
    names = [name for name, _ in model.named_buffers()]
    return BufferUse(tuple(name for name in names if name not in counters), (), counters)
