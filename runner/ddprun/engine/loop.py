"""The training loop: every step of a train or forward stage, and everything that happens between two steps.

```
for each step:
    handle_time_slice_and_profiler
                          time slice of a comparison, profiler          no step's time
    next batch                                                          data_us
    step_function         train_step, or forward_step; in each turn
                            buffers, if forward passes want them        sync_us
                            forward, loss                               forward_us
                            backward; hooks reduce buckets as they fill backward_us, exposed_*_us
                            fidelity, if this step measures it          sync_us
                            optimizer_step: clip, optimizer             optimizer_us
                          step_schedule_and_ema                         optimizer_us
    sync_after_step       sync policy, buffers, audit, mutate           sync_us, exposed_*_us
    end_step_and_read_messages
                          this step's control message (loss, stop?,
                          checkpoint?); read those of earlier steps
    act_on_messages       act on what all ranks know by them:
                          progress; fail or stop; shares of samples     sync_us of the next step
                          evaluate_in_stage, if it is due               no step's time
                          checkpoint, clocks                            sync_us of the next step
agree_on_stage_end        unless the steps failed or stopped: read the messages that are left
end_stage                 if the stage is complete: make ranks equal, evaluate_in_stage once more
```
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ddprun.config import ForwardStage, StepStage
from ddprun.engine import build, seeding
from ddprun.engine.checkpoint_state import replay_schedule, report_checkpoint_outcomes, take_checkpoint
from ddprun.engine.closure import StepClosure
from ddprun.engine.data import MicroBatch, StepBatches
from ddprun.engine.evaluate import evaluate_in_stage, report_early_stop, summarize_evaluations
from ddprun.engine.objective import zero_gradients_in_backward
from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun, begin_stage, end_stage, execute_action
from ddprun.engine.turns import Turn, only_groups_of
from ddprun.parallel.ddp import DdpReplica
from ddprun.sync.plan import is_due
from ddprun.telemetry.recorder import AgreedSteps
from ddprun.telemetry.writer import log_event

StepFunction = Callable[[StageRun, StepBatches, int], None]
"""A step's own work, the optimizer's step included: a function of the stage, of batches and of `stage_step`.

Here and below `stage_step` counts from 1 in the stage, and `step`, as in records, from 1 in the run.
`state.step` is the number of steps that are done; `state.current_step` is the one under way.
"""

UpdateFunction = Callable[[nn.Module, Callable[[], Tensor]], Any]
"""What a forward stage does in a step: a function of the model and of a closure that gives its loss."""

StageEnd = Literal["complete", "stopped", "failed"]
"""How a stage's steps ended, alike on all ranks. `stopped`: some rank was asked to. `failed`: weights are not
finite any more, and `on_nan` is `stop`."""


def run_step_stage(session: Session, stage: StepStage) -> dict[str, Any]:
    """Run a train stage, or a forward stage with its `update`; gives its entry in the summary.

    If any rank was asked to stop, all stop after the same step. With `on_nan: stop`, weights that are not
    finite stop all ranks, and the run has failed. Either way the entry's `interrupted` is true.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    step_function: StepFunction = train_step
    if isinstance(stage, ForwardStage):
        path, choice = f"{stage.path}.update", stage.update
        update = None if choice is None else build.build_mutate_or_update(runtime.loaded, path, choice)
        step_function = partial(forward_step, update)
    run = begin_stage(session, stage)
    reporter.begin_stage(stage.name, run.steps, steps_before=state.cursor.first_step, step=state.step)
    runtime.model.train()
    state.cursor.count_time(in_stage=False)
    try:
        end = run_steps(run, step_function)
    finally:
        reporter.screen.end_stage()
    stopped_early = run.early_stop_is_due
    runtime.profiler.stop(state.step)  # what lies between stages belongs to no step
    if end == "complete":
        if stage.stop is not None and stopped_early and run.steps_done != run.steps:
            report_early_stop(run, stage.stop)
        end_stage(run)
        if stage.evaluate is not None and state.results.evaluated_step != state.step:
            with excluded_from_timing(run, b"evaluate"):
                evaluate_in_stage(run, at_end=True)
    else:
        if end == "stopped":  # a failed run takes none: its weights are broken
            take_checkpoint(
                session, at_end=True
            )  # before `transfers_when_interrupted`: with the exchanges in flight
        # Nothing may be in flight when the process groups go.
        run.synchronizer.apply_and_start_transfers(run.sequence.transfers_when_interrupted())
    state.synchronizer = None
    runtime.turns.set_trainable(None)
    runtime.frozen.set_trained_names(runtime.turns.trained)
    state.cursor.count_time(in_stage=True)
    entry = {
        "steps": run.steps_done,
        "seconds": state.cursor.seconds,
        "sync": run.settings.sync.to_plain_data(),
        "hooks": list(runtime.stacks.all_ranks[stage.index].names),
        "loss": state.results.loss,
        "interrupted": end != "complete",
    }
    return entry | ({} if stage.evaluate is None else summarize_evaluations(run, stopped_early))


def run_steps(run: StageRun, step_function: StepFunction) -> StageEnd:
    state, reporter = run.session.state, run.session.reporter
    recorder, watchdog = run.session.runtime.recorder, run.session.runtime.ranks.watchdog
    steps_left = run.batches()
    if run.evaluation_is_due:
        with excluded_from_timing(run, b"evaluate"):
            if not evaluate_in_stage(run):  # after a resume: it was due when the checkpoint was taken
                return "stopped"
    while not run.early_stop_is_due:
        handle_time_slice_and_profiler(run)
        step, stage_step = state.current_step, run.steps_done + 1
        reporter.location = f"{run.stage.path}, step {step}"
        watchdog.set_phase(b"data", step)
        recorder.begin_step(step, run.stage.index)
        run.session.runtime.set_timing_detail(detailed=recorder.records_step)
        batches = next(steps_left, None)
        if batches is None:
            recorder.cancel_step()
            reporter.location = f"{run.stage.path}, step {state.step}"
            break
        step_function(run, batches, stage_step)
        watchdog.set_phase(b"sync")
        exchanged = sync_after_step(run, stage_step)
        state.step = step  # from here on `current_step` is the next one
        agreed_steps = end_step_and_read_messages(run, exchanged)
        end = act_on_messages(run, agreed_steps, exchanged)
        if end != "continue":
            return end
    return agree_on_stage_end(run)


# One step.


class MicroBatchResult(NamedTuple):
    """What a turn's passes gave on a micro-batch."""

    micro: MicroBatch
    loss: Tensor  # shape ()
    values: Mapping[str, Tensor]  # the numbers beside it


class OptimizerStepResult(NamedTuple):
    """An optimizer's step: whether it was taken, and the norms that `clip_gradients` gives."""

    applied: bool
    norm: Tensor | None
    group_norms: Mapping[int, Tensor]


def train_step(run: StageRun, batches: StepBatches, stage_step: int) -> None:
    """One update of the weights on all micro-batches; in a round one on each."""
    runtime, applied = run.session.runtime, False
    turns, micro_batches = run.due_turns(stage_step), move_to_device(run, batches)
    with warmup_lr(runtime.optimizer, run.warmup_steps_done(stage_step), run.settings.warmup_steps):
        if run.settings.plan.round is None:
            applied = train_turns(run, turns, micro_batches, batches)
        else:
            own_weight, ranks = 0.0, runtime.ranks.size
            for micro, content in micro_batches:
                alone = StepBatches([micro], 1, total_weight=micro.effective_weight * ranks)
                applied |= train_turns(run, turns, [(micro, content)], alone)
                own_weight += micro.effective_weight
                runtime.recorder.lap("optimizer_us")
                runtime.ranks.watchdog.set_phase(b"data")
            total = batches.total_weight
            run.synchronizer.weight = own_weight * ranks / total if total else 1.0
    runtime.turns.set_trainable(runtime.turns.of_stage[run.stage.index])
    step_schedule_and_ema(run, applied=applied)
    runtime.recorder.lap("optimizer_us")


def train_turns(
    run: StageRun,
    turns: Sequence[Turn],
    micro_batches: Iterable[tuple[MicroBatch, Any]],
    batches: StepBatches,
) -> bool:
    """The turns, one after the other on the same micro-batches; a stage without `turns` has one. Whether any
    has updated the weights.
    """
    session, runtime = run.session, run.session.runtime
    updates: list[OptimizerStepResult] = []
    results: list[list[MicroBatchResult]] = []
    if len(turns) > 1:
        micro_batches = list(micro_batches)
    for turn in turns:
        if updates:
            runtime.recorder.lap("optimizer_us")
        runtime.turns.set_trainable(turn.params)
        with nullcontext() if turn.name is None else only_groups_of(turn, runtime.optimizer):
            of_turn, update = train_turn(run, turn, micro_batches, batches)
        results.append(of_turn)
        updates.append(update)
    record_lr_and_norms(run, updates)
    for of_turns in zip(*results, strict=True):
        micro, loss = of_turns[0].micro, reduce(torch.add, [one.loss for one in of_turns])
        values = mean_values_over_calls(session, [one.values for one in of_turns])
        runtime.recorder.note_loss(loss, micro.samples, micro.effective_weight, values)
    return any(update.applied for update in updates)


def move_to_device(run: StageRun, batches: StepBatches) -> Iterator[tuple[MicroBatch, Any]]:
    """Each micro-batch, and its content on the device as calls get it."""
    runtime = run.session.runtime
    for micro in batches.micro_batches:
        content = runtime.precision.to_device(micro.content)
        runtime.recorder.lap("data_us")
        yield micro, content


def train_turn(
    run: StageRun, turn: Turn, micro_batches: Iterable[tuple[MicroBatch, Any]], batches: StepBatches
) -> tuple[list[MicroBatchResult], OptimizerStepResult]:
    """Forward and backward passes, and the optimizer's step; enters DDP only if gradients are exchanged. An
    optimizer that takes a closure may call for more passes (`closure.py`).
    """
    runtime = run.session.runtime
    results: list[MicroBatchResult] = []
    recorder, precision, watchdog = runtime.recorder, runtime.precision, runtime.ranks.watchdog
    gradients, timings = run.settings.plan.gradients, runtime.loaded.pipeline.timings
    replica = turn.replica if gradients else None
    model = runtime.model if replica is None else replica.ddp
    scale = precision.loss_scale()
    fidelity_is_due = is_due(timings.fidelity_every, run.session.state.current_step)
    measure_fidelity = fidelity_is_due and gradients == "all"
    closure = None
    if run.takes_closure and replica is not None:
        closure = StepClosure(run, replica, partial(clip_gradients, run))
    if replica is not None:
        undoable = closure is not None or not batches.total_weight
        replica.dispatcher.begin_step(scale, fidelity=measure_fidelity, undoable=undoable)
    for index, (micro, content) in enumerate(micro_batches, start=1):
        last = index == batches.micro_batch_count
        if index == 1 and runtime.buffers.sync_before_forward():
            recorder.lap("sync_us")
        watchdog.set_phase(b"forward")
        if closure is not None:
            closure.begin_pass()
        with nullcontext() if replica is None else replica.accumulating(not last):
            result = runtime.objective(model, content, turn.name)
            loss = result.loss
            results.append(MicroBatchResult(micro, loss.detach(), result.values))
            del result  # its output need not outlive the pass
            weight = loss_weight(run.session, micro, batches.total_weight)
            weighted = loss if weight == 1.0 else loss * weight
            if scale is not None:
                weighted = weighted * scale
            recorder.lap("forward_us")
            with nullcontext() if weight else zero_gradients_in_backward(runtime.model):
                backward(run, replica, weighted, last=last)
        if closure is not None:
            closure.add_pass(content, weight, weighted)
    if replica is None:
        precision.unscale(runtime.model.parameters())  # under DDP the dispatcher has unscaled each bucket
    elif measure_fidelity:
        replica.dispatcher.measure_fidelity(runtime.exchange.exact_sum)
        recorder.lap("sync_us")
    watchdog.set_phase(b"optimizer")
    if batches.total_weight:
        update = optimizer_step(run, closure=closure)
    else:  # nothing counts, and momentum or weight decay alone would move the weights
        update = OptimizerStepResult(applied=False, norm=None, group_norms={})
        clear_gradients(runtime.optimizer)
    if replica is not None:
        replica.dispatcher.end_step(applied=update.applied)
    return results, update


def backward(run: StageRun, replica: DdpReplica | None, loss: Tensor, *, last: bool) -> None:
    """A micro-batch's backward pass and its marks; in the last one a `replica` exchanges gradients."""
    runtime = run.session.runtime
    recorder, watchdog = runtime.recorder, runtime.ranks.watchdog
    watchdog.set_phase(b"backward")
    if replica is None:
        loss.backward()  # type: ignore[no-untyped-call]
    elif missing := replica.backward(loss, recorder.traces, exchange=last):
        where = f"the loss of rank {runtime.ranks.rank} in step {run.session.state.current_step}"
        raise runtime.objective.unused_parameters_error(missing, where)
    if not last:
        watchdog.set_phase(b"data")
    elif runtime.gradient_times is not None:
        recorder.note_gradient_times(runtime.gradient_times.take())
    if last and replica is not None:
        recorder.end_backward()  # marks, too, until when it waited for buckets
    else:
        recorder.lap("backward_us")


def forward_step(update: UpdateFunction | None, run: StageRun, batches: StepBatches, stage_step: int) -> None:
    """A forward stage's step: forward passes on one batch, and the stage's `update`, which calls for them."""
    session, runtime = run.session, run.session.runtime
    recorder, model = runtime.recorder, runtime.model
    (micro,) = batches.micro_batches
    content = runtime.precision.to_device(micro.content)
    recorder.lap("data_us")
    if runtime.buffers.sync_before_forward():
        recorder.lap("sync_us")
    runtime.ranks.watchdog.set_phase(b"forward")
    fixed_rng: Callable[[], AbstractContextManager[None]] = nullcontext
    if update is not None:
        fixed_rng = seeding.RepeatableRng(runtime.device)
    weight = loss_weight(session, micro, batches.total_weight)
    losses: list[Tensor] = []
    values: list[Mapping[str, Tensor]] = []

    def closure() -> Tensor:
        """The loss of the weights as they are, on this step's batch; all calls draw the same numbers."""
        with torch.no_grad(), fixed_rng():
            result = runtime.objective(model, content)
        losses.append(result.loss)
        values.append(result.values)
        # The mean over no targets is NaN; it counts as 0.
        return losses[-1] * weight if micro.effective_weight else torch.zeros_like(losses[-1])

    if update is None:
        closure()
    elif micro.effective_weight:  # without samples there is no loss to update by
        update(model, closure)
    if losses:
        mean, means = torch.stack(losses).mean(), mean_values_over_calls(session, values)
        recorder.note_loss(mean, micro.samples, micro.effective_weight, means)
    recorder.lap("forward_us")
    if update is None:
        return
    applied = True
    # An update changes the weights itself, or leaves gradients for the optimizer.
    if any(param.grad is not None for param in model.parameters()):
        with warmup_lr(runtime.optimizer, run.warmup_steps_done(stage_step), run.settings.warmup_steps):
            update_of_weights = optimizer_step(run, from_backward=False)
            record_lr_and_norms(run, [update_of_weights])
            applied = update_of_weights.applied
    step_schedule_and_ema(run, applied=applied)
    recorder.lap("optimizer_us")


def optimizer_step(
    run: StageRun, *, closure: StepClosure | None = None, from_backward: bool = True
) -> OptimizerStepResult:
    """Clip, and step. The loss scaler knows gradients `from_backward`."""
    runtime = run.session.runtime
    precision, optimizer, model = runtime.precision, runtime.optimizer, runtime.model
    if from_backward:
        precision.note_nonfinite_gradients(optimizer)
    norm, group_norms = clip_gradients(run)
    if closure is not None:
        closure.begin_optimizer_step()
        optimizer.step(cast(Any, closure))
        applied = True
    elif from_backward:
        applied = precision.step(optimizer)
    else:  # never scaled: look for what the loss scaler would have found
        gradients = _gradients(model.parameters())
        applied = precision.scaler is None or all(bool(one.isfinite().all()) for one in gradients)
        if applied:
            optimizer.step()
    if not applied:
        reason, step = "a gradient is not finite", run.session.state.current_step
        events = run.session.reporter.events
        events.warning("step_skipped", step=step, reason=reason, rank=runtime.ranks.rank)
    clear_gradients(optimizer)
    return OptimizerStepResult(applied, norm, group_norms)


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """What `zero_grad` does, without the profiler's range around it, which takes most of its time."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)  # one of its own, which may do more
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def record_lr_and_norms(run: StageRun, updates: Sequence[OptimizerStepResult]) -> None:
    """Record rates, and the norms of all turns of a step together; None for a group whose turn is not due."""
    groups, recorder = run.session.runtime.optimizer.param_groups, run.session.runtime.recorder
    norms = [one.norm for one in updates if one.norm is not None]
    total = of_groups = None
    if len(norms) == len(updates):
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if all(one.group_norms for one in updates):
            measured = {key: norm for one in updates for key, norm in one.group_norms.items()}
            of_groups = [measured.get(id(group)) for group in groups]
    recorder.note_update(groups, total, of_groups)


def step_schedule_and_ema(run: StageRun, *, applied: bool) -> None:
    """What follows an update of the weights: the schedule's next step, and the weights' average (`ema`). One
    that was skipped counts where each rank has updates of its own: schedules and averages go together.
    """
    if not applied and run.settings.averages_gradients:
        return
    ema, schedule = run.session.runtime.ema, run.session.state.schedule
    run.session.state.cursor.updates += 1
    if schedule is not None and run.settings.schedule_metric is None:
        schedule.step() if applied else replay_schedule(schedule, 1)
    if ema is not None and run.settings.plan.round is None:  # after a round, it comes after the exchange
        ema.update()
    run.sequence.note_weights_updated()


def loss_weight(session: Session, micro: MicroBatch, total: float) -> float:
    """The factor on a micro-batch's mean loss, so that the average over the ranks that average gradients is
    the mean over all their samples (with `weight_by`, over what that counts).

    1 where these ranks hold equally much and there is one micro-batch.
    """
    return micro.effective_weight * session.runtime.ranks.size / total if micro.effective_weight else 0.0


def mean_values_over_calls(session: Session, of_calls: Sequence[Mapping[str, Tensor]]) -> list[Tensor | None]:
    """The means over the calls of the model that have them, of the recorder's numbers."""
    found: list[Tensor | None] = []
    for name in session.runtime.recorder.value_names:
        known = [one[name] for one in of_calls if name in one]
        found.append(torch.stack(known).mean() if len(known) > 1 else next(iter(known), None))
    return found


def clip_gradients(run: StageRun) -> tuple[Tensor | None, Mapping[int, Tensor]]:
    """Clip the gradients; gives (total 2-norm, 2-norm of each parameter group by the group's id) from before,
    shape () each.

    None, or none, where not measured. Norms read all gradients once more, so they are measured in every n-th
    step (`timings.grad_norm_every`). In the others there is only what `clip_norm` computes anyway, unless
    `clip_value` has changed the gradients before it.
    """
    settings, runtime = run.settings, run.session.runtime
    model, groups = runtime.model, runtime.optimizer.param_groups
    norm = None
    group_norms: dict[int, Tensor] = {}
    by_norm_alone = settings.clip_norm is not None and settings.clip_value is None
    clipping_measures_all = by_norm_alone and len(groups) == 1
    every = runtime.loaded.pipeline.timings.grad_norm_every
    if is_due(every, run.session.state.current_step) and not clipping_measures_all:
        group_norms = _group_gradient_norms(groups)
        if group_norms:
            norm = torch.linalg.vector_norm(torch.stack([*group_norms.values()]))
    if settings.clip_value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), settings.clip_value)
    if settings.clip_norm is not None:
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        if by_norm_alone:
            norm, group_norms = total, {id(groups[0]): total} if clipping_measures_all else group_norms
    return norm, group_norms


def _group_gradient_norms(groups: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
    """The 2-norm of each parameter group's gradients; none if one is sparse, which has no norm in torch."""
    gradients = {id(group): _gradients(group["params"]) for group in groups}
    every = [one for of_group in gradients.values() for one in of_group]
    if not every or any(one.is_sparse for one in every):
        return {}
    none, norm = torch.zeros((), device=every[0].device), torch.nn.utils.get_total_norm
    return {key: norm(of_group).float() if of_group else none for key, of_group in gradients.items()}


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


@contextmanager
def warmup_lr(optimizer: torch.optim.Optimizer, steps_done: int, warmup_steps: int) -> Iterator[None]:
    """Inside, while the warm-up lasts, rates are (steps_done + 1) / warmup_steps of the schedule's."""
    if steps_done >= warmup_steps:
        yield
        return
    scheduled = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr * (steps_done + 1) / warmup_steps
    yield
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr


# After a step.


def sync_after_step(run: StageRun, stage_step: int) -> bool:
    """Exchange what policy, buffers and audit want after this step; whether all ranks exchanged anything."""
    step = run.session.state.current_step
    for action in run.sequence.actions_after_step(stage_step):
        execute_action(run, action, step)
    if run.settings.plan.round is not None and (ema := run.session.runtime.ema) is not None:
        ema.update()
    run.session.runtime.recorder.lap("sync_us")
    return run.sequence.exchanges_in_step(stage_step)


def end_step_and_read_messages(run: StageRun, exchanged: bool) -> list[AgreedSteps]:
    """Stop the step's timer, post its control message, and return what messages of earlier steps have settled
    for all ranks. It waits for this step's message only where something before the next step needs it.
    """
    session, runtime = run.session, run.session.runtime
    agreed_steps = runtime.recorder.end_step(
        stop=runtime.signals.stop_requested,
        # Without an exchange there is no message, and the request waits.
        checkpoint=exchanged and runtime.signals.pop_checkpoint_request(),
        exchanged=exchanged,
    )
    step = session.state.step
    pauses = runtime.profiler.toggles_before(step + 1) or runtime.time_slices.ends_after(step)
    pauses = pauses or session.checkpoint_is_due(runtime.checkpoints)
    pauses = pauses or session.checkpoint_is_due(runtime.memory_checkpoints)
    needs_this_step = pauses or run.evaluation_is_due
    needs_this_step = needs_this_step or run.settings.plan.round is not None  # the next one may be long
    if needs_this_step or any(one.checkpoint or one.compare_clocks for one in agreed_steps):
        agreed_steps += runtime.recorder.wait_for_messages()
    return agreed_steps


def act_on_messages(
    run: StageRun, agreed_steps: Sequence[AgreedSteps], exchanged: bool
) -> Literal["continue", "stopped", "failed"]:
    """Act on what the messages of all ranks said, alike on all of them. Gives whether to go on, or how the
    stage ends.
    """
    session, runtime, step = run.session, run.session.runtime, run.session.state.step
    runtime.signals.reinstall_handlers(every_s=1.0)
    requested = any(one.checkpoint for one in agreed_steps)
    compare_clocks = any(one.compare_clocks for one in agreed_steps)
    if agreed_steps:
        session.record_agreed_steps(agreed_steps)
        if runtime.finite_check.check_after_steps(agreed_steps, run.settings.on_nan, step):
            return "failed"
        if any(one.stop for one in agreed_steps):
            # All of it: the checkpoint at the end holds the totals of all steps.
            session.record_agreed_steps(runtime.recorder.wait_for_messages())
            return "stopped"
    elif not exchanged:  # otherwise progress comes with the message
        session.reporter.show_step(run.steps_done, step)
    if run.balance.adjust_shares_after(step) and run.steps_done != run.steps:
        run.apply_sample_shares()  # before a checkpoint, which holds them
    if run.evaluation_is_due:
        with excluded_from_timing(run, b"evaluate"):
            if not evaluate_in_stage(run):  # first: a checkpoint holds its outcome
                return "stopped"
    if requested or session.checkpoint_is_due(runtime.checkpoints):
        take_checkpoint(session, requested=requested)
    if session.checkpoint_is_due(runtime.memory_checkpoints):
        take_checkpoint(session, in_memory=True)
    report_checkpoint_outcomes(session)
    session.reporter.report_hook_choices(step, run.choosing_hooks)
    if runtime.compiler is not None:
        session.reporter.report_recompiles(runtime.compiler, step)
    if compare_clocks:
        log_event(session.reporter.events, runtime.recorder.compare_clocks())
    return "continue"


def agree_on_stage_end(run: StageRun) -> StageEnd:
    """Read all messages that are left, and have all ranks agree on how the steps ended. Only here are weights
    found that are not finite though every loss was.
    """
    session, runtime, on_nan = run.session, run.session.runtime, run.settings.on_nan
    agreed_steps = runtime.recorder.end_stage()
    session.record_agreed_steps(agreed_steps)
    failed = runtime.finite_check.check_after_steps(agreed_steps, on_nan, session.state.step)
    if any(one.checkpoint for one in agreed_steps) and not failed:
        take_checkpoint(session, requested=True)
    if runtime.finite_check.check_parameters(on_nan, session.state.step):
        return "failed"
    mine = [float(runtime.signals.stop_requested)]
    stopped = runtime.exchange.control.all_gather(mine, "the stage's end").any()
    return "stopped" if stopped else "complete"


# What belongs to no step's time.


@contextmanager
def excluded_from_timing(run: StageRun, phase: bytes) -> Iterator[None]:
    """Exclude what is inside from the time of steps and stage; waits for messages and the device first."""
    session, runtime, started = run.session, run.session.runtime, time.monotonic()
    session.record_agreed_steps(runtime.recorder.wait_for_messages())
    runtime.recorder.pause_timing()
    runtime.clock.synchronize()
    runtime.ranks.watchdog.set_phase(phase)
    yield
    seconds = time.monotonic() - started
    session.state.cursor.seconds -= seconds
    session.reporter.exclude_time(seconds)


def handle_time_slice_and_profiler(run: StageRun) -> None:
    """Let the other runs of a comparison have their time slices, and turn torch's profiler on or off."""
    runtime, state = run.session.runtime, run.session.state
    if runtime.time_slices.ends_after(state.step):
        with excluded_from_timing(run, b"waiting for its time slice"):
            runtime.time_slices.wait_for_next_slice(state.step)
    stage_is_over = run.steps_done == run.steps
    if runtime.profiler.toggles_before(state.current_step) and not stage_is_over:
        with excluded_from_timing(run, b"the profiler"):
            runtime.profiler.toggle(state.current_step)
