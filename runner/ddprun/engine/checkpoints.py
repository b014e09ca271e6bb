"""Takes checkpoints of a session, and reports what becomes of them."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from ddprun import __version__
from ddprun.checkpoint.checkpoints import Checkpoints
from ddprun.checkpoint.codec import UnstorableError, check
from ddprun.checkpoint.folder import FOLDER, Apart, rank_name
from ddprun.checkpoint.writer import CheckpointWriter, Outcome
from ddprun.config import Loaded, PipelineError
from ddprun.engine.finite import in_state
from ddprun.engine.session import Session
from ddprun.engine.state import shared_keys, state_of
from ddprun.host.rank_files import keep_checkpoint
from ddprun.parallel.ranks import Ranks
from ddprun.telemetry.writer import RecordFiles
from ddprun_hooks.comm.control import open_control
from ddprun_hooks.comm.groups import Placement


def open_checkpoints(
    loaded: Loaded,
    run_dir: Path,
    ranks: Ranks,
    records: RecordFiles,
    token: str,
    infinite_at_first: frozenset[str],
) -> Checkpoints:
    """The checkpoints of a run.

    Args:
        loaded: the pipeline.
        run_dir: the run's folder, as rank 0 sees it.
        ranks: this rank among the others.
        records: knows which ranks do not see the run's folder.
        token: of this attempt at the run, the same on all ranks.
        infinite_at_first: parameters that are meant to be infinite.
    """
    wanted, timeout_s = loaded.pipeline.checkpoint, loaded.pipeline.launch.timeout_s
    if not wanted.keep:
        return Checkpoints(None, 0)
    writer = CheckpointWriter(
        run_dir / FOLDER,
        ranks.store,
        token=token,
        rank=ranks.rank,
        ranks=ranks.size,
        keep=wanted.keep,
        away=records.away,
        control=open_control(timedelta(seconds=timeout_s)) if records.away else None,
        limit_s=timeout_s,
        before=records.writer.flush,
        after=keep_checkpoint,
        not_finite=partial(in_state, infinite_at_first=infinite_at_first),
    )
    return Checkpoints(writer, wanted.every)


def check_state(session: Session) -> None:
    """Make sure that a checkpoint can hold what the run starts with.

    Raises:
        PipelineError: it cannot hold state of that kind.
    """
    runtime = session.runtime
    if runtime.checkpoints.writer is not None:
        try:
            check(state_of(session))
        except UnstorableError as error:
            text, way_out = f"no checkpoint can be taken: {error}", "`checkpoint: {keep: 0}` takes none"
            raise PipelineError([runtime.loaded.fault("checkpoint", text, way_out)]) from None


def take_checkpoint(session: Session, *, at_end: bool = False, wished: bool = False) -> None:
    """Take a checkpoint of the state as it is now; called by all ranks after the same step.

    Args:
        session: of the run.
        at_end: nothing comes after it, so it is waited for.
        wished: somebody asked for it by a signal, and is answered on the screen.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    checkpoints, writer, step = runtime.checkpoints, runtime.checkpoints.writer, session.state.step
    if wished:
        answer = "no checkpoint is taken, because of checkpoint.keep: 0"
        reporter.note(f"SIGUSR1: {answer if writer is None else f'checkpoint of step {step}'}")
    if writer is None:
        return
    started = time.monotonic()
    if state.cursor.mid_stage:
        state.cursor.elapsed_s()
    state.cursor.run_elapsed_s()
    if at_end:  # ranks that never meet have stopped each after a step of its own
        known = runtime.exchange.control.all_gather([float(step), float(writer.count)])
        step = int(known[:, 0].max())
        writer.leave_out(int(known[:, 1].max()))
    whole, shared = state_of(session), shared_keys(session)
    own = {key: value for key, value in whole.items() if key not in shared}
    parts = {rank_name(runtime.ranks.rank): Apart.of(own)}
    if runtime.ranks.rank == 0:
        parts["shared"] = Apart.of({**{key: whole[key] for key in sorted(shared)}, **_about(session)})
    if runtime.records.away and (state.synchronizer is None or not state.synchronizer.plan.never):
        runtime.records.collect()
    reporter.events.info("checkpoint_taken", step=step, seconds=time.monotonic() - started)
    writer.put(step, parts, wait=at_end)
    report_checkpoints(session)
    if at_end and checkpoints.failed is not None:
        checkpoints.lost = f"the checkpoint of step {step}, the last one, is lost: {checkpoints.failed}"


def report_checkpoints(session: Session) -> None:
    """Say what has become of those that were taken."""
    writer = session.runtime.checkpoints.writer
    while writer is not None and not writer.outcomes.empty():
        _report(session, writer.outcomes.get())


def close_checkpoints(session: Session) -> None:
    """Finish writing."""
    if (writer := session.runtime.checkpoints.writer) is not None:
        writer.close()
        report_checkpoints(session)


def _report(session: Session, outcome: Outcome) -> None:
    checkpoints, reporter = session.runtime.checkpoints, session.reporter
    seconds = round(outcome.seconds, 3)
    if outcome.written is not None:
        reporter.events.info(
            "checkpoint_written",
            step=outcome.step,
            seconds=seconds,
            bytes=outcome.written.bytes,
            folder=str(outcome.written.path),
            nonfinite=outcome.written.nonfinite,
        )
        checkpoints.failed = None
        return
    reporter.events.warning("checkpoint_left_out", step=outcome.step, seconds=seconds, reason=outcome.problem)
    if checkpoints.failed is None:  # once, until one is written again
        reporter.note(
            f"the checkpoint of step {outcome.step} is left out, and older ones stay: {outcome.problem}"
        )
    checkpoints.failed = outcome.problem


def layout_of(session: Session) -> str:
    """By what the ranks' shares of what hooks keep are cut."""
    runtime = session.runtime
    cap_mb, hooks = runtime.loaded.pipeline.ddp.bucket_cap_mb, sorted(runtime.stacks.used)
    ranks = runtime.ranks
    hosts = Placement(ranks.rank, ranks.hosts, ranks.local_sizes).launched()
    return repr((cap_mb, hosts, hooks))


def _about(session: Session) -> dict[str, object]:
    """What a checkpoint says of its run."""
    runtime = session.runtime
    return {
        "pipeline": runtime.loaded.plain(),
        "world_size": runtime.ranks.size,
        "layout": layout_of(session),
        "ddprun": __version__,
    }
