"""The training loop: every step of a train or forward stage, and everything that happens between two steps.

```
for each step:
    pause_before_step     time slice of a comparison, profiler          no step's time
    next batch                                                          data_us
    step_function         train_step, or forward_step:
                            buffers, if forward passes want them        sync_us
                            forward, loss                               forward_us
                            backward; hooks reduce buckets as they fill backward_us, exposed_*_us
                            fidelity, if this step measures it          sync_us
                            optimizer_step: clip, optimizer,
                              schedule, ema                             optimizer_us
    synchronize           sync policy, buffers, mutate, audit           sync_us, exposed_*_us
    exchange_control      loss, stop?, checkpoint?: to all ranks
    between_steps         what all ranks know now: progress, stop,
                          checkpoint, clocks                            sync_us of the next step
                          evaluate_in_stage, if the stage asks for it   no step's time
end_of_steps              wait for what is still under way; did any rank want to stop?
end_stage                 make ranks equal; evaluate_in_stage once more
```
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddprun.config import Forward, StepStage
from ddprun.engine import build, seeding
from ddprun.engine.data import MicroBatch, StepBatches
from ddprun.engine.evaluate import evaluate_in_stage, summary_of_evaluations
from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun, audit_parameters, begin_stage, end_stage
from ddprun.engine.state import report_checkpoints, take_checkpoint
from ddprun.telemetry.recorder import AgreedSteps

StepFunction = Callable[[StageRun, StepBatches, int], None]
"""A step's own work, up to the optimizer's step. `step` counts from 1 in the stage, here and below."""

Update = Callable[[nn.Module, Callable[[], Tensor]], Any]
"""What a forward stage does in a step: a function of the model and of a closure that gives its loss."""


def run_stage(session: Session, stage: StepStage) -> dict[str, Any]:
    """Run a train stage, or a forward stage with its `update`; gives its entry in the summary.

    If any rank was asked to stop, all stop after the same step, and the entry's `interrupted` is true. They
    also stop where weights are not finite any more; then the run has failed. Ranks that never synchronise
    stop each for itself.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    step_function: StepFunction = train_step
    if isinstance(stage, Forward):
        path, choice = f"{stage.path}.update", stage.update
        update = None if choice is None else build.build_function(runtime.loaded, path, choice)
        step_function = partial(forward_step, update)
    run = begin_stage(session, stage)
    reporter.begin_stage(stage.name, run.steps, first=state.cursor.first_step, step=state.step)
    runtime.model.train()
    state.cursor.tick(in_stage=False)
    try:
        interrupted = run_steps(run, step_function)
    finally:
        reporter.end_stage()
    if runtime.profiler is not None:
        runtime.profiler.stop(state.step)  # what lies between stages belongs to no step
    if interrupted:
        if not runtime.finite.failed:
            take_checkpoint(session, at_end=True)
        run.synchronizer.finish(reconcile=False)  # nothing may be under way when the process groups go
    else:
        end_stage(run)
        if stage.evaluate is not None and state.evaluations.step != state.step:
            with untimed(run, b"evaluate"):
                evaluate_in_stage(run, at_end=True)
    runtime.recorder.write_between_steps(stage.index, state.step)
    state.synchronizer = None
    state.cursor.tick(in_stage=True)
    entry = {
        "steps": state.step - state.cursor.first_step,
        "seconds": state.cursor.seconds,
        "sync": run.settings.sync.plain(),
        "hooks": list(runtime.stacks.all_ranks[stage.index].names),
        "loss": state.loss,
        "interrupted": interrupted,
    }
    return entry | ({} if stage.evaluate is None else summary_of_evaluations(run))


def run_steps(run: StageRun, step_function: StepFunction) -> bool:
    """Take the stage's steps; whether they were interrupted, on which all ranks agree."""
    state, reporter = run.session.state, run.session.reporter
    recorder, watchdog = run.session.runtime.recorder, run.session.runtime.ranks.watchdog
    batches_of_steps = run.batches()
    if run.evaluation_is_due:
        with untimed(run, b"evaluate"):
            evaluate_in_stage(run)  # a resumed run was interrupted before it
    while not run.stopped_early:
        pause_before_step(run)
        number = state.step + 1
        step = number - state.cursor.first_step
        reporter.where = f"{run.stage.path}, step {number}"
        watchdog.step(number)
        watchdog.set_phase(b"data")
        recorder.begin_step(number, run.stage.index)
        run.session.runtime.take_marks(detailed=recorder.records_step)
        batches = next(batches_of_steps, None)
        if batches is None:
            recorder.cancel_step()
            break
        step_function(run, batches, step)
        watchdog.set_phase(b"sync")
        exchanged = synchronize(run, step)
        state.step = number
        agreed_steps = exchange_control(run, exchanged)
        match between_steps(run, agreed_steps, step, exchanged):
            case "interrupted":
                return True
            case "stop alone":
                break
            case "continue":
                pass
    return end_of_steps(run)


# One step.


def train_step(run: StageRun, batches: StepBatches, step: int) -> None:
    """Forward and backward passes of all micro-batches, and the optimizer's step.

    A stage whose gradients stay on their rank never enters DDP: it calls the bare model.
    """
    runtime = run.session.runtime
    recorder, precision, watchdog = runtime.recorder, runtime.precision, runtime.ranks.watchdog
    replica = runtime.replica if run.settings.gradients else None
    model = runtime.model if replica is None else replica.ddp
    scale = precision.loss_scale()
    measure_fidelity = replica is not None and run.measures_fidelity(recorder.current.number)
    if replica is not None:
        replica.dispatcher.begin_step(scale, fidelity=measure_fidelity)
    for index, micro in enumerate(batches.micro_batches, start=1):
        last = index == batches.count
        content = precision.to_device(micro.content)
        recorder.lap("data_us")
        if runtime.buffers.before_forward():
            recorder.lap("sync_us")
        watchdog.set_phase(b"forward")
        with nullcontext() if last or replica is None else replica.ddp.no_sync():
            with precision.autocast():
                loss = runtime.objective(model, content).loss
            share = weight(run.session, micro, batches.total)
            weighted = loss if share == 1.0 else loss * share
            if scale is not None:
                weighted = weighted * scale
            recorder.lap("forward_us")
            watchdog.set_phase(b"backward")
            if replica is None:
                weighted.backward()  # type: ignore[no-untyped-call]
            elif missing := replica.backward(weighted, recorder.traces, exchange=last):
                where = f"the loss of rank {runtime.ranks.rank} in step {run.session.state.step + 1}"
                raise runtime.objective.unused(missing, where)
        if not last:
            watchdog.set_phase(b"data")
        if last and runtime.gradients is not None:
            recorder.current.gradients = runtime.gradients.take()
        if last and replica is not None:
            recorder.end_backward()
        else:
            recorder.lap("backward_us")
        recorder.note_loss(mean_loss(run.session, loss.detach(), micro.samples), micro.samples, micro.counts)
    if replica is None:
        precision.unscale(runtime.model.parameters())
    elif measure_fidelity:
        replica.dispatcher.measure_fidelity(runtime.exchange.exact_sum)
        recorder.lap("sync_us")
    watchdog.set_phase(b"optimizer")
    applied = optimizer_step(run, step)
    if replica is not None:
        replica.dispatcher.end_step(applied=applied)
    recorder.lap("optimizer_us")


def forward_step(update: Update | None, run: StageRun, batches: StepBatches, step: int) -> None:
    """A batch, forward passes on it, and what the update makes of their losses."""
    session, runtime = run.session, run.session.runtime
    recorder, precision, model = runtime.recorder, runtime.precision, runtime.model
    (micro,) = batches.micro_batches
    content = precision.to_device(micro.content)
    recorder.lap("data_us")
    if runtime.buffers.before_forward():
        recorder.lap("sync_us")
    runtime.ranks.watchdog.set_phase(b"forward")
    draws: Callable[[], AbstractContextManager[None]] = nullcontext
    if update is not None:
        draws = seeding.SameDraws(runtime.device)
    share = weight(session, micro, batches.total)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        """The loss of the weights as they are, on this step's batch; all calls in a step draw alike."""
        with torch.no_grad(), draws(), precision.autocast():
            losses.append(runtime.objective(model, content).loss)
        # Of no target at all the mean is not a number.
        return losses[-1] * share if micro.counts else torch.zeros_like(losses[-1])

    if update is None:
        closure()
    elif micro.counts:  # a rank without samples has nothing to go by
        update(model, closure)
    mean = torch.stack(losses).mean() if losses else torch.tensor(math.nan)
    counts = (micro.samples, micro.counts) if losses else (0, 0)
    recorder.note_loss(mean_loss(session, mean, micro.samples), *counts)
    recorder.lap("forward_us")
    if update is None:
        return
    if any(param.grad is not None for param in model.parameters()):
        optimizer_step(run, step, from_backward=False)
    else:
        after_update(run)
    recorder.lap("optimizer_us")


def optimizer_step(run: StageRun, step: int, *, from_backward: bool = True) -> bool:
    """Clip, step, and what follows an update; whether the step was taken.

    Only gradients `from_backward` may have been scaled.
    """
    runtime, settings = run.session.runtime, run.settings
    precision, optimizer, model = runtime.precision, runtime.optimizer, runtime.model
    if from_backward:
        precision.check_gradients(optimizer)
    norm, group_norms = clip_gradients(run)
    warming: AbstractContextManager[None] = nullcontext()
    if settings.warmup_steps:
        warming = warmed_up(optimizer, run.warmed_up_for(step), settings.warmup_steps)
    with warming:
        runtime.recorder.note_update(optimizer, norm, group_norms)
        if from_backward:
            applied = precision.step(optimizer)
        else:  # in half precision such a loss overflows sooner than one that is scaled
            gradients = _gradients(model.parameters())
            applied = precision.scaler is None or all(bool(one.isfinite().all()) for one in gradients)
            if applied:
                optimizer.step()
    if applied:
        after_update(run)
    else:
        run.session.reporter.events.warning(
            "step_skipped",
            step=run.session.state.step + 1,
            reason="a gradient is not finite",
            rank=runtime.ranks.rank,
        )
    optimizer.zero_grad(set_to_none=True)
    return applied


def after_update(run: StageRun) -> None:
    """What follows an update of the weights: the schedule's next step, and the weights' average (`ema`)."""
    runtime, state = run.session.runtime, run.session.state
    if state.schedule is not None:
        state.schedule.step()
    if runtime.ema is not None:
        equal = run.settings.gradients == "all" and state.replicas.parameters == "common"
        runtime.ema.update(apart=not equal)


def weight(session: Session, micro: MicroBatch, total: float) -> float:
    """The weight of a micro-batch's mean loss that makes the mean over ranks that over all that counts:
    samples, or what `weight_by` says.

    1 where all ranks hold equally much and there is one micro-batch.
    """
    if session.runtime.objective.summed:
        return 1.0 if micro.samples else 0.0
    return micro.counts * session.runtime.ranks.size / total if micro.counts else 0.0


def mean_loss(session: Session, loss: Tensor, samples: int) -> Tensor:
    """The mean over samples of a loss, shape ()."""
    return loss / samples if session.runtime.objective.summed and samples else loss


def clip_gradients(run: StageRun) -> tuple[Tensor | None, list[Tensor] | None]:
    """Clip the gradients; gives their 2-norm before that and those of each parameter group, shape () each: in
    every n-th step (`timings.grad_norm_every`), since they read all gradients once more; what `clip_norm`
    needs anyway in each.
    """
    settings, runtime = run.settings, run.session.runtime
    model, groups = runtime.model, runtime.optimizer.param_groups
    norm = group_norms = None
    by_norm_alone = settings.clip_norm is not None and settings.clip_value is None
    measures = run.measures_norm(run.session.state.step + 1)
    if measures and not (by_norm_alone and len(groups) == 1):
        group_norms = _norms([_gradients(group["params"]) for group in groups])
        if group_norms is not None:
            norm = torch.linalg.vector_norm(torch.stack(group_norms))
    if settings.clip_value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), settings.clip_value)
    if settings.clip_norm is not None:
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        if by_norm_alone:
            norm, group_norms = total, [total] if len(groups) == 1 else group_norms
    return norm, group_norms


def _norms(groups: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """The 2-norm of each group of gradients, shape (); None if one is sparse, which has no norm in torch."""
    every = [one for group in groups for one in group]
    if not every or any(one.is_sparse for one in every):
        return None
    none = torch.zeros((), device=every[0].device)
    return [torch.nn.utils.get_total_norm(group).float() if group else none for group in groups]


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


@contextmanager
def warmed_up(optimizer: torch.optim.Optimizer, index: int, warmup_steps: int) -> Iterator[None]:
    """Inside, learning rates are (index + 1) / warmup_steps of what the schedule says, for the first steps.

    The schedule runs from its first step on all the same, and never sees the lowered rates.
    """
    if index >= warmup_steps:
        yield
        return
    scheduled = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr * (index + 1) / warmup_steps
    yield
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr


# After a step.


def synchronize(run: StageRun, step: int) -> bool:
    """Exchange what the sync policy, the buffers and the audit want after this step; whether all ranks
    exchanged something in it.
    """
    session, number = run.session, run.session.state.step + 1
    run.note_effect(run.synchronizer.after_step(step))
    by_policy = run.settings.plan.synchronizes(step)
    session.runtime.buffers.after_step(step, synchronized=by_policy)
    if run.audits(step):
        audit_parameters(session, f"after step {number} of {run.stage.path}", number)
    if by_policy and step != run.steps:
        run.mutate_weights(number)
    session.runtime.recorder.lap("sync_us")
    return by_policy or run.synchronizes(step)


def exchange_control(run: StageRun, exchanged: bool) -> list[AgreedSteps]:
    """End the step's time and post this rank's control message about it; gives what all ranks have just
    learned of earlier steps. Waits for all messages where something before the next step needs them.
    """
    session, runtime = run.session, run.session.runtime
    agreed_steps = runtime.recorder.end_step(
        stop=runtime.stop.wanted,
        checkpoint=exchanged and runtime.stop.take_checkpoint_request(),
        compare_clocks=session.clocks_are_old,
        exchanged=exchanged,
    )
    pauses = _profiler_toggles(run) or _time_slice_is_over(run) or session.checkpoint_is_due
    pauses = pauses or run.evaluation_is_due
    if pauses or any(one.checkpoint or one.compare_clocks for one in agreed_steps):
        agreed_steps += runtime.recorder.wait_for_messages()
    return agreed_steps


def between_steps(
    run: StageRun, agreed_steps: Sequence[AgreedSteps], step: int, exchanged: bool
) -> Literal["continue", "interrupted", "stop alone"]:
    """Do what all ranks agree on by what they have just learned, at the same moment: the one place for it.

    Returns:
        `interrupted`: all ranks stop here. `stop alone`: they never exchange anything, and this one stops.
    """
    session, runtime, number = run.session, run.session.runtime, run.session.state.step
    requested = any(one.checkpoint for one in agreed_steps)
    if agreed_steps:
        session.record_agreed(agreed_steps)
        if runtime.finite.after_steps(agreed_steps, run.settings.on_nan, number):
            return "interrupted"
        if any(one.stop for one in agreed_steps):
            # The checkpoint at the end holds what has been added up to here.
            session.record_agreed(runtime.recorder.wait_for_messages())
            return "interrupted"
    elif not exchanged:
        session.reporter.progress_alone(step, number)
    if run.evaluation_is_due:
        with untimed(run, b"evaluate"):
            evaluate_in_stage(run)  # first: a checkpoint holds its outcome
    if requested or session.checkpoint_is_due:
        take_checkpoint(session, requested=requested)
    report_checkpoints(session)
    if runtime.compiler is not None:
        session.reporter.report_recompiles(runtime.compiler, number)
    if any(one.compare_clocks for one in agreed_steps):
        session.measure_clocks()
    if run.never_synchronizes and run.stops_alone():
        return "stop alone"
    return "continue"


def end_of_steps(run: StageRun) -> bool:
    """Learn what is still under way; whether some rank wanted to stop or its weights are not finite."""
    session, runtime, on_nan = run.session, run.session.runtime, run.settings.on_nan
    agreed_steps = runtime.recorder.end_stage()
    session.record_agreed(agreed_steps)
    failed = runtime.finite.after_steps(agreed_steps, on_nan, session.state.step)
    if any(one.checkpoint for one in agreed_steps) and not failed:
        take_checkpoint(session, requested=True)
    mine = [float(runtime.stop.wanted), float(runtime.finite.first_lost())]
    stops, lost = runtime.exchange.control.all_gather(mine, "the stage's end").T.tolist()
    return runtime.finite.at_end([int(one) for one in lost], on_nan, session.state.step) or any(stops)


# What belongs to no step's time.


@contextmanager
def untimed(run: StageRun, phase: bytes) -> Iterator[None]:
    """Around what counts as no step's time, and not as the stage's; all that is under way ends first."""
    started = time.monotonic()
    _finish_pending(run, phase)
    yield
    run.exclude_time(time.monotonic() - started)


def pause_before_step(run: StageRun) -> None:
    """Let the other runs of a comparison work, and turn torch's profiler on or off, if it is time."""
    runtime, state = run.session.runtime, run.session.state
    if _time_slice_is_over(run):
        assert runtime.time_slices is not None
        _finish_pending(run, b"waiting for its turn")
        run.exclude_time(runtime.time_slices.wait(state.step))
    if (
        _profiler_toggles(run) and run.steps != state.step - state.cursor.first_step
    ):  # else the stage ends here
        assert runtime.profiler is not None
        with untimed(run, b"the profiler"):
            runtime.profiler.toggle(state.step + 1)


def _finish_pending(run: StageRun, phase: bytes) -> None:
    """Read all marks and messages, and wait for the device."""
    session = run.session
    session.record_agreed(session.runtime.recorder.wait_for_messages())
    session.runtime.recorder.pause_timing()
    session.runtime.clock.synchronize()
    session.runtime.ranks.watchdog.set_phase(phase)


def _time_slice_is_over(run: StageRun) -> bool:
    slices = run.session.runtime.time_slices
    return slices is not None and slices.due(run.session.state.step)


def _profiler_toggles(run: StageRun) -> bool:
    """Whether torch's profiler starts or stops before the next step."""
    profiler = run.session.runtime.profiler
    return profiler is not None and profiler.toggles_before(run.session.state.step + 1)
