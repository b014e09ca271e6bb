"""A stage that takes steps: what begins it and ends it (`loop.py` has its loop). What makes ranks equal."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from ddprun.config import AverageStage, BroadcastStage, EvaluateStage, SaveStage, StepStage, StepStageSettings
from ddprun.engine import build, seeding
from ddprun.engine.audit import audit_parameters
from ddprun.engine.balance import ShareBalancer
from ddprun.engine.checkpoint_state import replay_schedule, restore_stage_state
from ddprun.engine.data import StepBatches, transform_step, weight_micro_batches
from ddprun.engine.optimizers import build_schedule, change_group_options, takes_closure
from ddprun.engine.resume import translate_checkpoint_errors
from ddprun.engine.session import Session
from ddprun.engine.stage_actions import (
    AuditParameters,
    EqualizeBuffers,
    EqualizeState,
    StageAction,
    StageActions,
    equalizing_actions,
)
from ddprun.engine.turns import Turn
from ddprun.sync.exchanger import (
    average_optimizer_state,
    averageable_state,
    initialize_optimizer_state,
    restore_values_on_exit,
)
from ddprun.sync.plan import DueTransfers
from ddprun.sync.synchronizer import Synchronizer
from ddprun.telemetry.records import StageStarted
from ddprun.telemetry.writer import log_event
from ddprun_hooks import Hook

_OWN_BUFFERS = "buffers differ between ranks (buffers: never)"


@dataclass(frozen=True, slots=True)
class StageRun:
    """A train or forward stage that is running."""

    session: Session
    stage: StepStage
    settings: StepStageSettings
    sequence: StageActions
    synchronizer: Synchronizer
    mutate: Callable[[nn.Module], Any] | None
    steps: int | None  # None where nobody can know
    balance: ShareBalancer  # of the ranks' shares
    choosing_hooks: list[Hook]  # those whose choices are reported
    takes_closure: bool  # the optimizer may call for the loss and its gradients again, within a step

    @property
    def steps_done(self) -> int:
        """Steps of this stage that are done, in all attempts."""
        state = self.session.state
        return state.step - state.cursor.first_step

    def due_turns(self, stage_step: int) -> list[Turn]:
        """What a step trains, one after the other; steps count from 1 in the stage."""
        turns = self.session.runtime.turns.by_stage[self.stage.index]
        return [turns[index] for index in self.settings.due_turns(stage_step)]

    def batches(self) -> Iterator[StepBatches]:
        """The micro-batches of each step that is left, until the stage's length or the data is at its end."""
        session, settings = self.session, self.settings
        left = epochs = None
        if settings.steps is not None:
            left = max(0, settings.steps - self.steps_done)  # a resumed stage may be shorter now
        if settings.epochs is not None:
            epochs = _epochs_left(session, self.stage, settings.epochs)
        feed = session.runtime.feeds.for_stage(self.stage.index)
        of_feed = feed.steps(settings.accumulate, epochs=epochs, ranks=self._ranks_in_total_weight())
        steps: Iterator[StepBatches] = islice(of_feed, left)
        objective, pipeline = session.runtime.objective, session.runtime.loaded.pipeline
        if pipeline.batch.transform is not None:
            steps = (transform_step(step, objective.transform_batch) for step in steps)
        if not pipeline.has_batch_weights:
            return steps
        return (
            weight_micro_batches(step, objective.batch_weight, self._sum_weight_over_ranks) for step in steps
        )

    def apply_sample_shares(self) -> None:
        """Have each rank take its share of samples, from the next step on."""
        session, balance = self.session, self.balance
        session.runtime.feeds.for_stage(self.stage.index).set_shares(balance.shares, balance.local_batch)
        step, speeds = session.state.current_step, balance.speeds
        session.reporter.report_sample_shares(self.stage.index, step, balance.shares, speeds)

    def _ranks_in_total_weight(self) -> Sequence[int]:
        """The ranks whose weights add up to a step's total, which is scaled to the world size: those that
        average gradients with this one; in a round all, since its exchange weighs the ranks.
        """
        plan, ranks = self.settings.plan, self.session.runtime.ranks
        if plan.gradients == "all" or plan.round is not None:
            return range(ranks.size)
        if plan.gradients is None:
            return [ranks.rank]
        return next(block for block in ranks.placement.split_by_host(plan.hosts) if ranks.rank in block)

    def _sum_weight_over_ranks(self, mine: float) -> float:
        """This step's total weight. Ranks that train apart use their own, and send nothing."""
        runtime, plan, counted = self.session.runtime, self.settings.plan, self._ranks_in_total_weight()
        if plan.gradients is None and plan.round is None:
            return mine * runtime.ranks.size
        weights = runtime.exchange.control.all_gather([mine], "what counts in the step")[:, 0].tolist()
        return math.fsum(weights[rank] for rank in counted) * runtime.ranks.size / len(counted)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether held-out data is measured now, between two steps; the stage's end measures after itself."""
        state = self.session.state
        missing = self.is_evaluation_step and state.results.evaluated_step != state.step
        return missing and self.steps_done not in (0, self.steps)

    @property
    def is_evaluation_step(self) -> bool:
        """Whether held-out data is measured after this step, or would be if the stage were longer."""
        evaluation = self.stage.evaluate
        if evaluation is None:
            return False
        if evaluation.every == "epoch":
            return not self.session.runtime.feeds.for_stage(self.stage.index).mid_epoch
        return self.steps_done % evaluation.every == 0

    @property
    def early_stop_is_due(self) -> bool:
        """Whether evaluations have not become better for so long that the stage ends."""
        stop = self.stage.stop
        return stop is not None and self.session.state.results.since_best >= stop.patience

    def warmup_steps_done(self, stage_step: int) -> int:
        """Steps of the warm-up before this step of the stage; counted in the run, where the schedule is."""
        return self.session.state.cursor.updates if self.settings.has_run_schedule else stage_step - 1


def begin_stage(session: Session, stage: StepStage) -> StageRun:
    """Begin a stage, or resume in the middle of one: settings, hooks and policy, on which all ranks agree."""
    runtime, state = session.runtime, session.state
    loaded, cursor = runtime.loaded, state.cursor
    settings, feed = stage.effective_settings(loaded.pipeline), runtime.feeds.for_stage(stage.index)
    saved, state.resume_state = state.resume_state, None
    balance = runtime.share_balancers[settings.plan.round]
    balance.begin_stage(state.step, resumed=saved is not None)
    if saved is None:
        if settings.epochs is not None:
            feed.skip_rest_of_epoch()
        cursor.begin_stage(stage.index, state.step, feed.first_unused_epoch)
    results = state.results  # `kept` stays, since the file does
    stop_metric = None if stage.stop is None else stage.stop.metric
    if saved is None or stop_metric != results.stop_metric:
        results.stop_metric, results.best, results.since_best = stop_metric, None, 0
    steps, done = settings.steps, state.step - cursor.first_step
    if steps is not None:
        steps = max(steps, done)
    if settings.epochs is not None:
        left = feed.steps_left(settings.accumulate, _epochs_left(session, stage, settings.epochs))
        steps = None if left is None else done + left
    cursor.steps[-1] = steps
    of_run = settings.has_run_schedule
    length = runtime.feeds.steps_of_run(loaded.pipeline, cursor.steps) if of_run else steps
    same_length, cursor.length = cursor.length == length, length
    if state.schedule is None or not of_run:
        # A schedule of an earlier stage has changed the optimizer's settings; its state stays.
        own_settings = runtime.optimizer_settings[stage.index]
        for group, own in zip(runtime.optimizer.param_groups, own_settings, strict=True):
            group.pop("initial_lr", None)
            change_group_options(runtime.optimizer, group, own)
        state.schedule = build_schedule(
            loaded, stage.key_path("schedule"), settings.schedule, runtime.optimizer, length
        )
        if of_run and state.schedule is not None and saved is None:
            replay_schedule(state.schedule, cursor.updates)
        state.loaded_schedule = None
    mutate = None
    if settings.mutate is not None:
        mutate = build.build_mutate_or_update(loaded, f"{stage.path}.mutate", settings.mutate)

    runtime.stacks.adopt_earlier_state(stage.index)
    stack, host_stack = runtime.stacks.all_ranks[stage.index], runtime.stacks.within_hosts[stage.index]
    plan = settings.plan
    turns = runtime.turns.by_stage[stage.index]
    runtime.turns.set_trainable(runtime.turns.of_stage[stage.index])
    runtime.frozen.set_trained_names(runtime.turns.of_stage[stage.index])
    runtime.buffers.begin_stage(settings.buffers, gradients_everywhere=plan.gradients == "all")
    buffers, replicas = runtime.buffers.plan, state.replicas
    sequence = StageActions(loaded.pipeline, stage, settings, buffers, replicas, steps, cursor.first_step)
    exchanged = runtime.frozen, runtime.optimizer, runtime.exchanger
    synchronizer = Synchronizer(sequence.progress, *exchanged, stack, host_stack, state.outer_momentum)
    state.synchronizer = synchronizer
    runtime.recorder.control_delay_steps = plan.control_delay_steps
    replicas_used = [turn.replica for turn in turns if plan.gradients and turn.replica is not None]
    turn_names = tuple(turn.name for turn in turns if turn.name is not None)
    runtime.recorder.begin_stage([one.dispatcher.params_by_bucket for one in replicas_used], turn_names)
    signature = f"{synchronizer.agreement_description()}; {stack.description}"
    for replica in replicas_used:
        hooks, ranks = stack, runtime.exchange.gradient_queue.world
        if plan.gradients == "host":
            hooks, ranks = host_stack, ranks.splits_by_host_count[plan.hosts][0]
        signature += replica.begin_stage(hooks, ranks)
    runtime.exchange.control.check_agreement("the buckets, the hooks and the sync policy", signature)
    closure = takes_closure(loaded, runtime.optimizer)
    runtime.recorder.on_messages = balance.add_messages if balance.by_speed else None
    choosing = [*stack.hooks_with_choices(), *host_stack.hooks_with_choices()]
    actors = mutate, steps, balance, choosing, closure
    run = StageRun(session, stage, settings, sequence, synchronizer, *actors)
    synchronizer.set_delta_bases()
    if saved is not None:
        with translate_checkpoint_errors(session, saved["checkpoint"]):
            by_metric = settings.schedule_metric is not None
            new_rates = saved["new_rates"] or not (same_length or by_metric)
            restore_stage_state(session, saved, new_rates=new_rates)
        if new_rates and state.schedule is not None and not by_metric:
            # Follow the new schedule from its start to here.
            replay_schedule(state.schedule, cursor.updates - (0 if of_run else cursor.first_update))
        saved["accept"]()
        if new_rates and by_metric:
            rates = dict.fromkeys(f"{group['lr']:g}" for group in runtime.optimizer.param_groups)
            begins = f"the schedule begins anew, at a learning rate of {', '.join(rates)}"
            session.reporter.note(f"{stage.name}: {begins}")
        seeding.restore_rng_state(saved["generators"], runtime.device)
    event = StageStarted(
        stage=stage.index,
        kind=stage.name,
        steps=steps,
        turns=turn_names,
        sync=settings.sync.to_plain_data(),
        hooks=tuple(stack.names),
        buffers=settings.buffers.to_plain_data(),
    )
    log_event(session.reporter.events, event)
    run.apply_sample_shares()
    if saved is not None:
        return run
    for action in sequence.actions_at_begin():
        execute_action(run, action, state.step)
        if isinstance(action, EqualizeState):
            runtime.recorder.record_between_step_exchanges(stage.index, state.step)
            session.reporter.events.info("optimizer_state_averaged", stage=stage.index, step=state.step)
    return run


def end_stage(run: StageRun) -> None:
    """Make the ranks equal again, unless the next stage wants them as they are."""
    session, stage, step = run.session, run.stage, run.session.state.step
    for action in run.sequence.actions_at_end(run.steps_done):
        execute_action(run, action, step)
        if isinstance(action, EqualizeState) and action.what == "parameters":
            session.reporter.events.info("reconciled", stage=stage.index, step=step, how="average")
            text = "the ranks' parameters differ; averaging them at the stage's end"
            session.reporter.note(f"{stage.name}: {text}")


def execute_action(run: StageRun, action: StageAction, step: int) -> None:
    """Do on this rank what the stage's sequence says, after `step` steps of the run."""
    session, runtime = run.session, run.session.runtime
    match action:
        case DueTransfers():
            run.synchronizer.apply_and_start_transfers(action)
        case EqualizeBuffers(names):
            runtime.buffers.average_or_broadcast(names)
        case EqualizeState():
            _execute_equalize_state(session, action)
        case "compare frozen":
            runtime.frozen.equalize_differing()
        case AuditParameters(recorded, at_end):
            where = f"at the end of {run.stage.path}" if at_end else f"after step {step} of {run.stage.path}"
            audit_parameters(session, where, step, at_end=at_end, recorded=recorded)
        case "mutate":
            assert run.mutate is not None, "the stage mutates"
            run.mutate(runtime.model)


def _epochs_left(session: Session, stage: StepStage, epochs: int) -> int:
    return epochs - (session.runtime.feeds.for_stage(stage.index).epoch - session.state.cursor.first_epoch)


# Making ranks equal.


def run_averaging_stage(session: Session, stage: AverageStage | BroadcastStage) -> dict[str, Any]:
    """Run an average or a broadcast stage; gives its entry in the summary."""
    step, reporter = session.state.step, session.reporter
    source = stage.source if isinstance(stage, BroadcastStage) else None
    for action in equalizing_actions(session.state.replicas, source):
        _execute_equalize_state(session, action)
    reporter.events.info(stage.name, stage=stage.index, step=step)
    what = "the mean of all ranks' parameters" if source is None else f"the parameters of rank {source}"
    reporter.note(f"{stage.name}: every rank holds {what}")
    audit_parameters(session, f"after {stage.path}", step, at_end=True)
    return {"step": step}


def _execute_equalize_state(session: Session, action: EqualizeState) -> None:
    """Exactly: there is no common base, and no hook is used."""
    runtime, exchanger, source = session.runtime, session.runtime.exchanger, action.source
    match action.what:
        case "parameters":
            exchanger.equalize(runtime.frozen.trainable, "parameters", source)
            runtime.frozen.equalize_differing(source)
        case "optimizer" if source is None:
            average_optimizer_state(runtime.optimizer, exchanger)
        case "optimizer":
            initialize_optimizer_state(runtime.optimizer)
            exchanger.equalize(averageable_state(runtime.optimizer), "optimizer", source)
        case "averages":
            assert runtime.ema is not None, "only their averages differ"
            exchanger.equalize(runtime.ema.tensors, "parameters", source)


@contextmanager
def evaluation_weights(session: Session) -> Iterator[None]:
    """Inside, the model has the weights that are measured and saved: the average (`ema`) or those of the
    optimizer's `eval()`, if there is one, and the mean over ranks of what differs between them. Then each
    rank has its own again, bit for bit.
    """
    trainable, replicas, ema = session.runtime.frozen.trainable, session.state.replicas, session.runtime.ema
    optimizer: Any = session.runtime.optimizer
    if replicas.parameters == "common":
        audit_parameters(session, f"in {session.reporter.location}", session.state.step, recorded=False)
    ranks_differ, switching = replicas.weights_differ, replicas.optimizer_is_read
    if ema is None and not ranks_differ and not switching:
        yield
        return
    with restore_values_on_exit(session.runtime.turns.trained.values()):  # a stage may freeze some of them
        if switching:
            optimizer.eval()
        if ema is not None:
            ema.copy_to_model()
        if ranks_differ:
            session.runtime.exchanger.equalize(trainable, "parameters")
        try:
            yield
        finally:
            if switching:
                optimizer.train()


@contextmanager
def evaluation_mode(session: Session) -> Iterator[None]:
    """Inside, the model is the one that is measured: `evaluation_weights`, equal frozen parameters and
    buffers, in evaluation mode. Then all of that is on each rank as it was, and
    nothing has been drawn at random. An exchange of the sync policy that is in flight goes on: this uses
    another queue.
    """
    runtime = session.runtime
    modes = [(module, module.training) for module in runtime.model.modules()]
    with (
        seeding.preserve_rng_state(runtime.device),
        runtime.frozen.temporarily_equal(),
        evaluation_weights(session),  # compares ranks before buffers are made equal
        runtime.buffers.temporarily_equal() as differing,
    ):
        if differing and runtime.buffers.plan.setting.when == "never":
            session.reporter.note_once(f"evaluate: {_OWN_BUFFERS}: each rank measures with its own")
        runtime.model.eval()
        try:
            yield
        finally:
            runtime.model.train(modes[0][1])
            for module, mode in modes:
                module.training = mode


def make_buffers_equal(session: Session, stage: EvaluateStage | SaveStage) -> None:
    """What the stage reads or writes is to be the same on all ranks, unless the file says `never`."""
    runtime, state, reporter = session.runtime, session.state, session.reporter
    names = runtime.buffers.equalize_before_evaluate_or_save()
    if not names:
        return
    if runtime.buffers.plan.setting.when == "never":
        evaluates = isinstance(stage, EvaluateStage)
        whose = "each rank measures with its own" if evaluates else "rank 0's are saved"
        reporter.note_once(f"{stage.name}: {_OWN_BUFFERS}: {whose}")
    else:
        reporter.events.info("buffers_sent", stage=stage.index, step=state.step, names=list(names))
