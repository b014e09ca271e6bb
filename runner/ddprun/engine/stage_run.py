"""What train and forward stages have in common: their steps, and what ranks exchange around them.

```
parameters as all ranks have them; mutate
for each step:
    the stage's own work                     (train.py, forward.py)
    the sync policy, buffers                 sync_us, exposed_*_us
    mutate, if ranks have just synchronised  sync_us
    audit                                    sync_us
    post the control message, read an older one sync_us of the next step
what is under way comes in; ranks become equal again
```
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from ddprun.config import (
    AverageStage,
    BroadcastStage,
    Stage,
    StepStage,
    TrainSettings,
)
from ddprun.engine import build, nonfinite
from ddprun.engine.data import StepBatches
from ddprun.engine.policies import build_policy, key_path
from ddprun.engine.replicas import look, make_equal
from ddprun.engine.reporter import ProgressReporter
from ddprun.engine.resume import agreed
from ddprun.engine.session import Session
from ddprun.engine.state import bring_back_stage
from ddprun.sync.optimizer_state import average_state
from ddprun.sync.policy import Effect, Policy, SyncContext, after


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage that runs."""

    session: Session
    stage: StepStage
    settings: TrainSettings
    policy: Policy
    mutate: Callable[[nn.Module], Any] | None
    steps: int | None
    """How many there will be; None where nobody can know."""


Compute = Callable[[StageRun, StepBatches, int], None]
"""A step's own work, up to the optimizer's step; the number counts from 1 in the stage."""


def run(session: Session, stage: StepStage, compute: Compute) -> dict[str, Any]:
    """Run a stage; gives its entry in the summary.

    If any rank was asked to stop, all stop after the same step and the entry's `interrupted` is true; so they
    do where weights are not finite any more, and then the session has `failed`. Ranks that never synchronise
    stop each for itself.
    """
    course = open_course(session, stage)
    session.screen.begin(stage.name, course.steps)
    session.model.train()
    cursor = session.cursor
    cursor.start_clock()
    try:
        interrupted = _run(course, compute)
    finally:
        session.screen.end()
    if session.profiler is not None:
        session.profiler.stop(session.step)  # what lies between stages is no step's
    if interrupted:
        if not session.failed:
            session.checkpoints.take(session, at_end=True)
        course.policy.finish(reconcile=False)  # nothing may be under way when the process groups go
    else:
        close_course(course)
    session.recorder.write_aside(stage.index, session.step)
    session.policy = None
    return {
        "steps": session.step - cursor.first_step,
        "seconds": cursor.elapsed_s(),
        "sync": course.settings.sync.plain(),
        "hooks": list(session.stacks.all_ranks[stage.index].names),
        "loss": session.loss,
        "interrupted": interrupted,
    }


def open_course(session: Session, stage: StepStage) -> StageRun:
    """Begin a stage, or go on in the middle of one: settings, hooks and policy, on which all ranks agree."""
    pipeline, cursor = session.loaded.pipeline, session.cursor
    settings = stage.effective(pipeline)
    state, session.mid_stage = session.mid_stage, None
    if state is None:
        if settings.epochs is not None:
            session.feed.start_epoch()
        cursor.begin(stage.index, session.step, session.feed.epoch)
    steps = settings.steps
    if settings.epochs is not None:
        left = session.feed.steps_left(settings.accumulate, _epochs_left(session, settings.epochs))
        steps = None if left is None else session.step - cursor.first_step + left
    as_long = cursor.steps == steps
    cursor.steps = steps
    restore_settings(session, stage)
    session.schedule = build.build_schedule(
        session.loaded, key_path(stage, "schedule"), settings.schedule, session.optimizer, steps
    )
    mutate = None
    if settings.mutate is not None:
        mutate = build.build_mutation(session.loaded, f"{stage.path}.mutate", settings.mutate)
    session.stacks.enter(stage.index)
    stack, host_stack = session.stacks.all_ranks[stage.index], session.stacks.within_hosts[stage.index]
    place = SyncContext(session.model, session.optimizer, session.exchanger, stack, host_stack)
    policy = session.policy = build_policy(settings, place, session.outer_momentum)
    session.buffers.setting = settings.buffers
    session.host_count = settings.sync.options.get("hosts")
    session.buffers.gradients_everywhere = policy.gradients_everywhere
    session.recorder.control_delay_steps = policy.control_delay_steps
    exchanged = session.dispatcher.layout if settings.gradients and session.dispatcher is not None else ()
    session.recorder.begin_stage([tuple(param.name for param in bucket.params) for bucket in exchanged])
    signature = f"{policy.describe()}; {stack.described}; {place.buckets().layouts!r}"
    if settings.gradients and session.dispatcher is not None:
        dispatcher, world = session.dispatcher, session.exchange.gradients.world
        dispatcher.stack, dispatcher.group = stack, world
        if settings.gradients == "host":
            hosts = settings.sync.options["hosts"]
            dispatcher.stack, dispatcher.group = host_stack, world.splits[hosts][0]
        signature += dispatcher.signature
    session.exchange.control.agree("the buckets, the hooks and the sync policy", signature)
    session.events.info(
        "stage_started",
        stage=stage.index,
        kind=stage.name,
        steps=steps,
        sync=settings.sync.plain(),
        hooks=list(stack.names),
        buffers=settings.buffers.plain(),
    )
    course = StageRun(session, stage, settings, policy, mutate, steps)
    if state is not None:
        policy.begin()
        with agreed(session, state["checkpoint"], "stage"):
            bring_back_stage(session, state, new_rates=state["new_rates"] or not as_long)
        return course
    _share_optimizer_state(session, stage, settings)
    policy.begin()
    _mutate(course, session.step)
    return course


def _epochs_left(session: Session, epochs: int) -> int:
    """Epochs of the stage that are not over, the current one included."""
    return epochs - (session.feed.epoch - session.cursor.first_epoch)


def _run(course: StageRun, compute: Compute) -> bool:
    """Run the steps; whether they were interrupted, on which all ranks agree."""
    session, settings, recorder = course.session, course.settings, course.session.recorder
    first = session.cursor.first_step
    epochs = None if settings.epochs is None else _epochs_left(session, settings.epochs)
    left = None if settings.steps is None else settings.steps - (session.step - first)
    row = islice(session.feed.steps(settings.accumulate, epochs=epochs), left)
    teller, alone = ProgressReporter(session, first), _alone(course)
    while True:
        _take_turns(session, teller)
        _turn_profiler(course, teller)
        step = session.step - first + 1
        session.where = f"{course.stage.path}, step {session.step + 1}"
        session.ranks.watchdog.step(session.step + 1)
        session.ranks.watchdog.turn(b"data")
        recorder.start(session.step + 1, course.stage.index)
        batches = next(row, None)
        if batches is None:
            recorder.cancel()
            break
        compute(course, batches, step)
        session.ranks.watchdog.turn(b"sync")
        synchronised = synchronise(course, step)
        session.step += 1
        agreed = recorder.end(
            stop=session.stop.wanted,
            checkpoint=synchronised and session.stop.take_checkpoint_wish(),
            compare_clocks=session.clocks_are_old,
            synchronised=synchronised,
        )
        if _pauses(session) or any(word.checkpoint or word.compare_clocks for word in agreed):
            agreed += recorder.drain()
        wished = any(word.checkpoint for word in agreed)
        due = session.checkpoints.due(session.step) or wished
        teller.tell(agreed)
        if nonfinite.stops(session, agreed, settings.on_nan):
            session.failed = True
            return True
        if not agreed and not synchronised:
            teller.between(step)
        if any(word.stop for word in agreed):
            teller.tell(recorder.drain())  # what has been added up since ranks met is part of the checkpoint
            return True
        if due:
            session.checkpoints.take(session, wished=wished)
        session.checkpoints.tell(session)
        if any(word.compare_clocks for word in agreed):
            session.compare_clocks()
        if alone and session.stop_is_known(stop_if_lost=settings.on_nan == "stop"):
            break
    agreed = recorder.flush()
    teller.tell(agreed)
    session.failed = nonfinite.stops(session, agreed, settings.on_nan)
    if any(word.checkpoint for word in agreed) and not session.failed:
        session.checkpoints.take(session, wished=True)
    mine = [float(session.stop.wanted), float(session.finite.first())]
    wanted, places = session.exchange.control.all_gather(mine, "the stage's end").T.tolist()
    if nonfinite.stops_at_end(session, [int(place) for place in places], settings.on_nan):
        session.failed = True
    return session.failed or any(wanted)


def _take_turns(session: Session, teller: ProgressReporter) -> None:
    """Let the other runs of a comparison work, if this one's turn is over."""
    if session.turns is not None and session.turns.due(session.step):
        teller.tell(session.recorder.pause())
        session.clock.synchronize()
        session.ranks.watchdog.turn(b"waiting for its turn")
        waited_s = session.turns.wait(session.step)
        session.cursor.skip(waited_s)
        teller.skip(waited_s)


def _pauses(session: Session) -> bool:
    """Whether something is done before the next step for which this one has to be settled."""
    profiled = session.profiler is not None and session.profiler.turns(session.step + 1)
    taken = session.turns is not None and session.turns.due(session.step)
    return profiled or taken or session.checkpoints.due(session.step)


def _turn_profiler(course: StageRun, teller: ProgressReporter) -> None:
    """Start or stop torch's profiler, if it is its time; that belongs to no step."""
    session = course.session
    profiler = session.profiler
    if profiler is None or not profiler.turns(session.step + 1):
        return
    if course.steps == session.step - session.cursor.first_step:
        return  # the stage ends here
    started = time.monotonic()
    teller.tell(session.recorder.pause())
    session.clock.synchronize()
    session.ranks.watchdog.turn(b"the profiler")
    profiler.turn(session.step + 1)
    waited_s = time.monotonic() - started
    session.cursor.skip(waited_s)
    teller.skip(waited_s)


def _alone(course: StageRun) -> bool:
    """Whether ranks exchange nothing at all in this stage, so that each can stop by itself."""
    session = course.session
    audited = session.loaded.pipeline.audit.every > 0
    return course.policy.never and not audited and not session.buffers.goes_by_steps


def synchronise(course: StageRun, step: int) -> bool:
    """What ranks exchange after a step; whether all of them did."""
    session, policy = course.session, course.policy
    _note_effect(course, policy.after_step(step))
    met = policy.synchronises(step)
    session.buffers.after_step(step, synchronised=met)
    if _audits(course, step):
        look(session, f"after step {session.step + 1} of {course.stage.path}", session.step + 1)
    if met and not policy.never and step != course.steps:
        _mutate(course, session.step + 1)
    session.recorder.lap("sync_us")
    return meets(course, step)


def meets(course: StageRun, step: int) -> bool:
    """Whether all ranks exchange something in this step of the stage."""
    by_policy, by_buffers = course.policy.synchronises(step), course.session.buffers.synchronises(step)
    return by_policy or by_buffers or _audits(course, step)


def _audits(course: StageRun, step: int) -> bool:
    """Whether all ranks' parameters are compared after this step of the stage."""
    every = course.session.loaded.pipeline.audit.every
    return every > 0 and step % every == 0


def _share_optimizer_state(session: Session, stage: StepStage, settings: TrainSettings) -> None:
    """Equal gradients keep ranks equal only if their optimizers' state is: momentum that ranks have gathered
    apart is averaged before they exchange gradients again.
    """
    if settings.gradients is None or session.state_together == "common":
        return
    on_hosts = settings.gradients == "host" and session.state_together == "host"
    if on_hosts and session.state_hosts == settings.sync.options["hosts"]:
        return
    average_state(session.optimizer, session.exchanger)
    session.recorder.write_aside(stage.index, session.step)
    session.state_together = "common"
    session.events.info("optimizer_state_averaged", stage=stage.index, step=session.step)


def _note_effect(course: StageRun, effect: Effect) -> None:
    """Which ranks hold the same parameters, and the same optimizer state, after a step or at the end."""
    session, settings = course.session, course.settings
    session.together = after(session.together, effect)
    noop = course.policy.uses_hooks and "noop" in session.stacks.all_ranks[course.stage.index].names
    if noop and effect != "nothing":
        session.together = "apart"  # each rank got its own values back
    if noop and settings.gradients:
        session.together = session.state_together = "apart"
    elif effect == "common" and course.policy.averages_state and not noop:
        session.state_together = "common"
    elif settings.gradients and session.together == "apart":
        session.state_together = "apart"  # weight decay makes momentum of weights
    elif settings.gradients == "host":
        session.state_together = after(session.state_together, "hosts_apart")
        session.state_hosts = settings.sync.options["hosts"]
    elif settings.gradients is None:
        session.state_together = "apart"


def _mutate(course: StageRun, step: int) -> None:
    """Mutate after `step` steps of the run."""
    if course.mutate is not None:
        course.mutate(course.session.model)
        course.session.together, course.session.mutated_at = "apart", step


def close_course(course: StageRun) -> None:
    """Make the ranks equal again, unless the next stage wants them as they are."""
    session, stage = course.session, course.stage
    reconcile = not _wants_ranks_apart(session, stage)
    effect = course.policy.finish(reconcile=reconcile and session.together != "common")
    if effect != "nothing":
        _note_effect(course, effect)
    if course.mutate is not None and session.mutated_at == session.step:
        session.together = "apart"  # the stage's length was not known, and no step has come after
    if reconcile and session.together != "common":
        make_equal(session)
        session.events.info("reconciled", stage=stage.index, step=session.step, how="average")
        session.screen.note(f"{stage.name}: ranks trained apart; their parameters are averaged at its end")
        effect = "common"
    if effect == "common" and session.loaded.pipeline.audit.every:
        look(session, f"at the end of {stage.path}", session.step, at_end=True)


def _wants_ranks_apart(session: Session, stage: Stage) -> bool:
    """Whether the next stage makes ranks equal itself, or wants them apart."""
    stages = session.loaded.pipeline.stages
    following = stages[stage.index + 1] if stage.index + 1 < len(stages) else None
    if isinstance(following, StepStage):
        return following.effective(session.loaded.pipeline).sync.name == "independent"
    return isinstance(following, AverageStage | BroadcastStage)


def restore_settings(session: Session, stage: StepStage) -> None:
    """Set the optimizer's settings (learning rate, momentum …) to the stage's: a schedule of an earlier stage
    has changed them. Its state stays.
    """
    wanted = session.optimizer_settings[stage.index]
    for group, settings in zip(session.optimizer.param_groups, wanted, strict=True):
        group.pop("initial_lr", None)
        group.update(settings)
