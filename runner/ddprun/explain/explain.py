"""What a pipeline sends, when, among whom and how much, without a run: as dataclasses and as JSON."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from ddprun.config import AverageStage, BroadcastStage, LoadedPipeline, Stage, StepStage, StepStageSettings
from ddprun.engine.data import Feed
from ddprun.engine.optimizers import takes_closure
from ddprun.engine.stage_actions import (
    ActionPhase,
    AverageGradients,
    EqualizeBuffers,
    EqualizeState,
    StageAction,
    StageActions,
    equalizing_actions,
)
from ddprun.engine.turns import build_turns
from ddprun.engine.weights import initial_ema_tensors, optimizer_has_train_eval
from ddprun.explain.model_probe import ModelProbe, WorldShape, probe_model
from ddprun.explain.traffic import Bucket, Route, SentBytes, TrafficSimulator
from ddprun.host.code_folders import private_code_caches
from ddprun.host.device import default_rank_count
from ddprun.host.rank_files import temporary_launcher_folder
from ddprun.sync.buffers import split_averaged_and_broadcast
from ddprun.sync.exchanger import averageable_state, can_be_averaged, initialize_optimizer_state
from ddprun.sync.plan import DueTransfers, ReplicaConsistency, SyncPlan, Transfer
from ddprun.sync.synchronizer import buckets_by_fragment
from ddprun_hooks.buckets import BucketLayout, TensorBuckets

VERSION = 1

BucketLayouts = tuple[BucketLayout, ...]  # of buckets that are sent together
PlannedSend = tuple[ActionPhase, Route, BucketLayouts]


@dataclass(frozen=True, slots=True)
class PlannedExchange:
    """Buckets that are sent at the same moment in the same way."""

    number: int  # within its stage, from 0
    moment: ActionPhase
    route: Route
    ranks: int  # how many ranks are in each group that exchanges
    buckets: tuple[Bucket, ...]
    sent: SentBytes  # what ranks send for it in a step

    def to_json_data(self) -> dict[str, Any]:
        return {
            "exchange": self.number,
            "when": self.moment,
            "kind": self.route.kind,
            "turn": self.route.turn,
            "through": self.route.through,
            "source": self.route.source if self.route.through == "broadcast" else None,
            "among": self.route.among,
            "ranks": self.ranks,
            "sent": json_value(self.sent),
            "buckets": json_value(self.buckets),
        }


@dataclass(frozen=True, slots=True)
class StepPattern:
    """Steps in which the same is sent."""

    steps: tuple[int, ...]  # which of the first `StageExplanation.cycle` steps; the rest follows from them
    exchanges: tuple[PlannedExchange, ...]
    sent: SentBytes  # of one such step


@dataclass(frozen=True, slots=True)
class EvaluationGroup:
    """Evaluations inside a stage that send the same."""

    times: int
    exchanges: tuple[PlannedExchange, ...]
    sent: SentBytes  # of one evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExplanation:
    """What one stage of the pipeline sends, and when."""

    stage: Stage
    settings: StepStageSettings | None = None  # None for a stage without steps
    steps: int | None = None  # None: not known, or the stage has none
    cycle: int = 0  # after so many steps it begins again; at most as many as the stage has
    patterns: tuple[StepPattern, ...] = ()  # the rarest first
    control_message_steps: tuple[int, ...] = ()  # first steps with one; they repeat with `control_cycle`
    control_cycle: int = 0  # which is longer than `cycle` where an audit has steps of its own
    evaluations: tuple[EvaluationGroup, ...] = ()  # of an unknown number of steps, one of each kind
    begin: tuple[PlannedExchange, ...] = ()  # before the first step
    end: tuple[PlannedExchange, ...] | None  # after the last step; all of a stage without; None: not known
    exchanges: tuple[PlannedExchange, ...]  # all of them, by number
    takes_closure: bool = False  # the optimizer may call for more backward passes, which are not counted
    left_apart: bool = False  # the next stage wants ranks as they are: nothing makes them equal at the end
    ranks: int  # of the run

    @property
    def index(self) -> int:
        return self.stage.index

    def step_buckets(self) -> Iterator[tuple[StepPattern, PlannedExchange, Bucket]]:
        """Each bucket that is sent in steps."""
        for pattern in self.patterns:
            for exchange in pattern.exchanges:
                yield from ((pattern, exchange, bucket) for bucket in exchange.buckets)

    @property
    def sent_per_cycle(self) -> SentBytes:
        """What is sent in `cycle` steps."""
        return self._sent_in_first_steps(self.cycle)

    @property
    def sent_in_stage(self) -> SentBytes | None:
        """What is sent in the whole stage; None: it is not known how many steps it has."""
        if self.end is None or (self.steps is None and self.patterns):
            return None
        sent_parts = [exchange.sent for exchange in (*self.begin, *self.end)]
        sent_parts += [one.sent * one.times for one in self.evaluations]
        return sum(sent_parts, self._sent_in_first_steps(self.steps or 0))

    def _sent_in_first_steps(self, count: int) -> SentBytes:
        cycle = self.cycle
        sent_parts = [one.sent * sum((count - at) // cycle + 1 for at in one.steps) for one in self.patterns]
        return sum(sent_parts, SentBytes(self.ranks))

    def to_json_data(self) -> dict[str, Any]:
        settings, cycle = self.settings, self.sent_per_cycle
        found: dict[str, Any] = {"stage": self.index, "kind": self.stage.name}
        names = ["begin", "end", "takes_closure", "left_apart"]
        if settings is not None:
            names += ["steps", "cycle", "patterns", "evaluations", "control_message_steps", "control_cycle"]
            found |= {
                "sync": settings.sync.to_plain_data(),
                "hooks": settings.hook_specs,
                "buffers": settings.buffers.to_plain_data(),
                "accumulate": settings.accumulate,
                "mutate": settings.mutate and settings.mutate.to_plain_data(),
                "update": settings.update and settings.update.to_plain_data(),
                "gradients": settings.plan.gradients,
                "mean_step": cycle.mean_step_bytes(self.cycle),
            }
        found |= {name: json_value(getattr(self, name)) for name in names}
        found["exchanges"] = [exchange.to_json_data() for exchange in self.exchanges]
        return found | {"whole": json_value(self.sent_in_stage)}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a pipeline sends: in each stage, and in the broadcast before the first step."""

    loaded: LoadedPipeline
    world: WorldShape
    probe: ModelProbe
    sent_at_start: SentBytes  # sent before the first step, so that ranks are equal
    stages: tuple[StageExplanation, ...]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.probe.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.probe.model.named_buffers())

    @property
    def ema_bytes(self) -> int | None:
        """What the moving average of the weights takes on each rank; None: there is none."""
        if self.loaded.pipeline.ema is None:
            return None
        return sum(one.nbytes for one in initial_ema_tensors(self.probe.model, "meta").values())

    def to_json_data(self) -> dict[str, Any]:
        """For `--format json` (`docs/explain.md`); bytes throughout."""
        parameters, buffers = self.parameters.values(), self.buffers.values()
        trained = [one for one in parameters if one.requires_grad]
        model = {
            "name": self.loaded.pipeline.model.name,
            "parameters": len(parameters),
            "numel": sum(one.numel() for one in parameters),
            "bytes": sum(one.nbytes for one in parameters),
            "trained": len(trained),
            "trained_bytes": sum(one.nbytes for one in trained),
            "ema_bytes": self.ema_bytes,
        }
        held = {"count": len(buffers), "bytes": sum(one.nbytes for one in buffers)}
        settings = self.loaded.pipeline.compile
        facts = {name: getattr(self.probe.compiled, name, None) for name in ("blocks", "graphs", "breaks")}
        compiled = {name: json_value(value) for name, value in facts.items()}
        return {
            "v": VERSION,
            "pipeline": self.loaded.pipeline.name,
            "ranks": self.world.ranks,
            "hosts": self.world.hosts,
            "model": model,
            "compile": settings and {"mode": settings.mode} | compiled,
            "buffers": held | json_value(self.probe.buffer_use),
            "start": json_value(self.sent_at_start),
            "stages": [stage.to_json_data() for stage in self.stages],
        }


def json_value(value: Any) -> Any:
    """As JSON holds it: a dataclass as an object, but SentBytes as its sizes, an exchange as its number."""
    if isinstance(value, SentBytes):
        return value.mean_step_bytes()
    if isinstance(value, PlannedExchange):
        return value.number
    if isinstance(value, tuple):
        return list(map(json_value, value))
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    return value


def explain(
    loaded: LoadedPipeline,
    *,
    hosts: int | None = None,
    ranks_per_host: int | None = None,
    probe: ModelProbe | None = None,
) -> Explanation:
    """Find out what a pipeline sends. No rank is started and nothing is sent.

    The model and the data are built and run as on rank 0, hooks and sync policies are the engine's own, and
    bytes are counted as a run counts them. A hook is asked about its first payload only.

    `hosts` and `ranks_per_host` are by default as the file says, or as a run on this machine would have it.
    `probe`: of the same model and data, from an earlier call for other ranks, hooks, policies or sizes of
    buckets; they are not looked at again, unless it takes more than the probe knows. Raises PipelineError for
    what only a run can see, and UnsafeFolderError: others may write to a folder from which libraries load
    code.
    """
    launch = loaded.pipeline.launch
    ranks_per_host = ranks_per_host or launch.nproc_per_node or default_rank_count(loaded)
    world = WorldShape(hosts or launch.host_range[1], ranks_per_host)
    with (
        chdir(os.getcwd()),  # the user's code may leave it
        temporary_launcher_folder() as scratch,
        private_code_caches(scratch),
    ):
        if probe is None or not probe.suffices_for(loaded):
            probe = probe_model(loaded, world)
        simulator = TrafficSimulator(loaded, world, probe.device)
        planner = _TrafficPlanner(loaded, probe, simulator)
        stages = tuple(planner.explain_stage(stage) for stage in loaded.pipeline.stages)
        held = [*probe.model.parameters(), *probe.model.buffers()]
        sent_at_start = simulator.broadcast_sent_bytes(0, sum(one.nbytes for one in held))
        return Explanation(loaded, world, probe, sent_at_start, stages)


class _TrafficPlanner:
    """Goes through the stages by the sequence of what they do, which a run carries out."""

    def __init__(self, loaded: LoadedPipeline, probe: ModelProbe, simulator: TrafficSimulator) -> None:
        self._loaded, self._pipeline, self._probe, self._simulator = loaded, loaded.pipeline, probe, simulator
        self._ranks, self._cap_bytes = simulator.world.ranks, loaded.pipeline.ddp.largest_cap_bytes
        self._turns = build_turns(loaded, probe.model)
        self._trained = self._turns.trained  # by the stage
        self._named_buffers = dict(probe.model.named_buffers())
        self._buffer_settings = loaded.pipeline.buffers
        self._buffers_used = False  # by steps, since they were last made equal
        self._ema_tensors: Mapping[str, Tensor] = {}  # without values
        if loaded.pipeline.ema is not None:
            self._ema_tensors = initial_ema_tensors(probe.model, "meta")
        self._takes_closure = takes_closure(loaded, probe.optimizer)
        self._replicas = ReplicaConsistency(optimizer_is_read=optimizer_has_train_eval(probe.optimizer))
        self._stage: Stage  # whose hooks carry what is sent
        self._plan = SyncPlan()  # of that stage
        self._stage_exchanges: dict[tuple[Any, ...], PlannedExchange] = {}
        self._used: dict[Feed, int] = {}  # micro-batches of data of the epoch that has begun

    def explain_stage(self, stage: Stage) -> StageExplanation:
        """What a stage sends, and what that costs; stages are asked for in order."""
        self._stage, self._stage_exchanges = stage, {}
        self._trained = self._turns.trained
        match stage:
            case StepStage():
                self._trained = self._turns.of_stage[stage.index]
                return self._explain_step_stage(stage)
            case AverageStage():
                sends = self._planned_sends("once", equalizing_actions(self._replicas))
            case BroadcastStage():
                sends = self._planned_sends("once", equalizing_actions(self._replicas, stage.source))
            case _:
                sends = self._sends_before_eval_or_save("once")
                self._buffers_used &= self._buffer_settings.when == "never"
        end = self._group_into_exchanges(sends)
        return StageExplanation(stage=stage, end=end, exchanges=end, ranks=self._ranks)

    def _explain_step_stage(self, stage: StepStage) -> StageExplanation:
        settings = stage.effective_settings(self._pipeline)
        plan = self._plan = settings.plan
        self._buffer_settings = settings.buffers
        buffers = self._probe.buffer_use.plan(
            settings.buffers, self._named_buffers, gradients_everywhere=plan.gradients == "all"
        )
        periods = [settings.buffers.every, *(turn.every for turn in settings.turns)]
        cycle, steps = plan.cycle(*periods), self._probe.feeds.steps_of(stage.index, settings)
        # What the last steps leave behind depends on how far they are in a cycle, not on how many came.
        planned_steps = cycle if steps is None else min(steps, cycle + steps % cycle)
        last_step = None if steps is None else planned_steps
        sequence = StageActions(self._pipeline, stage, settings, buffers, self._replicas, last_step)
        begin = self._group_into_exchanges(self._planned_sends("begin", sequence.actions_at_begin()))
        self._buffers_used = True
        steps_by_sends: dict[tuple[PlannedSend, ...], list[int]] = {}  # steps of one cycle
        evaluation_sends: list[tuple[PlannedSend, ...]] = []  # of an evaluation after each step
        for step in range(1, planned_steps + 1):
            actions = sequence.actions_in_step(step)
            sends = tuple(one for moment, action in actions for one in self._planned_sends(moment, [action]))
            if step <= cycle:
                steps_by_sends.setdefault(sends, []).append(step)
            if stage.evaluate is not None:
                evaluation_sends.append(self._sends_before_eval_or_save("evaluate"))
        last = self._planned_sends("end", sequence.actions_at_end(planned_steps))
        epoch_ends = self._advance_to_epoch_ends(stage, settings, steps)
        evaluations = self._evaluation_groups(stage, steps, epoch_ends, evaluation_sends[:cycle])
        patterns = []
        for sends, pattern_steps in steps_by_sends.items():
            found = self._group_into_exchanges(sends)
            sent = sum([one.sent for one in found], SentBytes(self._ranks))
            patterns.append(StepPattern(tuple(pattern_steps), found, sent))
        return StageExplanation(
            stage=stage,
            settings=settings,
            steps=steps,
            cycle=min(cycle, planned_steps),
            patterns=tuple(sorted(patterns, key=lambda pattern: len(pattern.steps))),
            control_message_steps=tuple(_control_message_steps(sequence, steps)),
            control_cycle=sequence.exchange_cycle,
            evaluations=evaluations,
            begin=begin,
            end=None if steps is None and cycle > 1 else self._group_into_exchanges(last),
            exchanges=tuple(self._stage_exchanges.values()),
            takes_closure=settings.has_backward and self._takes_closure,
            left_apart=self._replicas.parameters != "common",
            ranks=self._ranks,
        )

    def _advance_to_epoch_ends(
        self, stage: StepStage, settings: StepStageSettings, steps: int | None
    ) -> tuple[int, int] | None:
        """The step of the stage that ends an epoch of its data first, and the steps in each epoch after it;
        None: not known. An epoch that an earlier stage began goes on, except in a stage that counts epochs.
        """
        feed = self._probe.feeds.for_stage(stage.index)
        whole = feed.steps_per_epoch(1)
        if not whole or steps is None:
            return None
        per_epoch = -(-whole // settings.accumulate)
        used = self._used.get(feed, 0) if settings.epochs is None else 0
        first = -(-(whole - used) // settings.accumulate)
        used += steps * settings.accumulate
        self._used[feed] = used if steps < first else (steps - first) % per_epoch * settings.accumulate
        return first, per_epoch

    def _group_into_exchanges(self, sends: Sequence[PlannedSend]) -> tuple[PlannedExchange, ...]:
        """What is sent at one moment by one route is one exchange."""
        groups: dict[tuple[ActionPhase, Route], BucketLayouts] = {}
        for moment, route, layouts in sends:
            groups[moment, route] = groups.get((moment, route), ()) + layouts
        found, known = [], self._stage_exchanges
        for (moment, route), layouts in groups.items():
            if (key := (moment, route, layouts)) not in known:
                buckets = tuple(self._simulator.simulate_bucket(self._stage, route, one) for one in layouts)
                sent = sum([one.sent for one in buckets], SentBytes(self._ranks))
                ranks = self._simulator.rank_group(route).size
                known[key] = PlannedExchange(len(known), moment, route, ranks, buckets, sent)
            found.append(known[key])
        return tuple(found)

    def _planned_sends(self, moment: ActionPhase, actions: Iterable[StageAction]) -> tuple[PlannedSend, ...]:
        """What actions of the current stage send, without empty ones; what is compared is not counted."""
        routes = (found for action in actions for found in self._action_routes_and_layouts(action))
        return tuple((moment, route, layouts) for route, layouts in routes if layouts)

    def _action_routes_and_layouts(self, action: StageAction) -> Iterator[tuple[Route, BucketLayouts]]:
        match action:
            case EqualizeBuffers(names):
                named = {name: self._named_buffers[name] for name in names}
                averaged, broadcast = split_averaged_and_broadcast(named, self._buffer_settings)
                yield Route("buffers", "plain", "sum"), self._bucket_layouts(averaged)
                yield Route("buffers", "plain", "broadcast"), self._bucket_layouts(broadcast)
            case AverageGradients(turn):
                yield self._gradient_route_and_layouts(turn)
            case DueTransfers(started=started):
                yield from (
                    self._transfer_route_and_layouts(self._plan.transfers[index]) for index in started
                )
            case EqualizeState(what, source):
                route = Route("parameters", "plain", "sum", ema=what == "averages")
                if source is not None:
                    route = replace(route, through="broadcast", source=source)
                if what == "optimizer":
                    yield (
                        replace(route, kind="optimizer"),
                        self._bucket_layouts(self._create_averageable_optimizer_state()),
                    )
                else:
                    yield route, self._bucket_layouts(self._ema_tensors if route.ema else self._trained)

    def _create_averageable_optimizer_state(self) -> dict[str, Tensor]:
        """What of the optimizer's state is averaged, made as a run makes it."""
        optimizer = self._probe.optimizer
        for stage in self._pipeline.stages_with_steps():
            if stage.index <= self._stage.index and stage.effective_settings(self._pipeline).updates_weights:
                self._turns.set_trainable(self._turns.of_stage[stage.index])
                initialize_optimizer_state(optimizer)
        self._turns.set_trainable(None)
        return averageable_state(optimizer)

    def _sends_before_eval_or_save(self, moment: ActionPhase) -> tuple[PlannedSend, ...]:
        """What an evaluation or a save stage sends first, now: buffers, and the weights if ranks differ in
        what is read. Inside a stage ranks are made equal only while an evaluation runs.
        """
        average = self._planned_sends(
            moment, [EqualizeState("parameters")] if self._replicas.weights_differ else []
        )
        if self._buffer_settings.when == "never" or not self._buffers_used:
            return average
        # Whole numbers that training changes are the same on all ranks, as far as one batch shows.
        changing = self._probe.buffer_use.changing
        changed = [name for name in changing if can_be_averaged(self._named_buffers[name])]
        return (*self._planned_sends(moment, [EqualizeBuffers(tuple(changed))]), *average)

    def _evaluation_groups(
        self,
        stage: StepStage,
        steps: int | None,
        epoch_ends: tuple[int, int] | None,
        after: Sequence[tuple[PlannedSend, ...]],
    ) -> tuple[EvaluationGroup, ...]:
        """The evaluations of a stage, grouped by what they send. `after`: what an evaluation would send after
        each step of a cycle. The state now is that at the stage's end.
        """
        if stage.evaluate is None:
            return ()
        if stage.evaluate.every == "epoch":  # where its length is not known, after any step
            first, every = epoch_ends or (1, 1)
        else:
            first = every = stage.evaluate.every
        inside = range(first, math.lcm(every, len(after)) + 1 if steps is None else steps, every)
        times = Counter[tuple[PlannedSend, ...]]()
        for place, often in Counter((step - 1) % len(after) for step in inside).items():
            times[after[place]] += often
        times[self._sends_before_eval_or_save("evaluate")] += 1
        found = []
        for sends, often in times.items():
            exchanges = self._group_into_exchanges(sends)
            sent = sum([one.sent for one in exchanges], SentBytes(self._ranks))
            found.append(EvaluationGroup(1 if steps is None else often, exchanges, sent))
        return tuple(found)

    def _gradient_route_and_layouts(self, turn: int) -> tuple[Route, BucketLayouts]:
        route = Route("gradient", "world", "hooks")
        if self._plan.gradients == "host":
            route = Route("gradient", "world", "host_hooks", True, self._plan.hosts)
        assert isinstance(self._stage, StepStage)
        if turns := self._stage.effective_settings(self._pipeline).turns:
            route = replace(route, turn=turns[turn].name)
        found: list[BucketLayout] = []  # of this turn and of those before it, by number
        wanted = self._turns.by_stage[self._stage.index][turn]
        for one in self._turns.exchanging_turns(self._loaded):
            layouts = self._probe.gradient_buckets[one.key].layouts_for_caps(
                self._pipeline.ddp.bucket_caps_bytes
            )
            assert layouts is not None, "the probe suffices for the pipeline"
            first = len(found)
            found += [replace(layout, index=first + layout.index) for layout in layouts]
            if one is wanted:
                break
        return route, tuple(found[first:])

    def _transfer_route_and_layouts(self, one: Transfer) -> tuple[Route, BucketLayouts]:
        inside_host = one.among == "host"
        hosts = self._plan.hosts if inside_host else None
        match one.what:
            case "change":
                route = Route("delta", "deltas", "host_hooks" if inside_host else "hooks", inside_host, hosts)
            case "parameters" if one.source is not None:
                route = Route("parameters", "plain", "broadcast", source=one.source)
            case kind:
                route = Route(kind, "plain", "sum", inside_host, hosts, rank_partition=one.partition)
        if one.what == "optimizer":
            return route, self._bucket_layouts(self._create_averageable_optimizer_state())
        return route, buckets_by_fragment(self._plan, self._trained, self._cap_bytes)[one.fragment].layouts

    def _bucket_layouts(self, named: Mapping[str, Tensor]) -> BucketLayouts:
        return TensorBuckets(named, self._cap_bytes).layouts


def _control_message_steps(sequence: StageActions, steps: int | None) -> Iterator[int]:
    """An exchange that overlaps with training may be applied, for the first time, in the second cycle."""
    known, cycle = set[int](), sequence.exchange_cycle
    for step in range(1, min(2 * cycle, steps or 2 * cycle) + 1):
        if sequence.exchanges_in_step(step) and step % cycle not in known:
            known.add(step % cycle)
            yield step
