"""Takes checkpoints of a session, and reports what became of them."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddprun import __version__
from ddprun.checkpoint.codec import EncodedState, UnstorableError, encode
from ddprun.checkpoint.folder import FOLDER, LOSS, rank_name
from ddprun.checkpoint.writer import Checkpoints, CheckpointWriter
from ddprun.config import Loaded
from ddprun.engine.nonfinite import FiniteCheck
from ddprun.engine.session import Session
from ddprun.engine.state import shared_keys, state_of
from ddprun.host.rank_files import keep_checkpoint
from ddprun.parallel.ranks import Ranks
from ddprun.telemetry.writer import RecordFiles
from ddprun_hooks.comm.control import open_control
from ddprun_hooks.comm.groups import Placement


def open_checkpoints(
    loaded: Loaded, run_dir: Path, ranks: Ranks, records: RecordFiles, token: str, finite: FiniteCheck
) -> Checkpoints:
    """The checkpoints of a run; `token` is that of this attempt, the same on all ranks."""
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
        remote=records.away,
        control=open_control(timedelta(seconds=timeout_s)) if records.away else None,
        limit_s=timeout_s,
        before=records.writer.flush,
        after=keep_checkpoint,
        not_finite=partial(_not_finite, infinite_at_first=finite.infinite_at_first),
    )
    return Checkpoints(writer, wanted.every)


def _not_finite(state: EncodedState, infinite_at_first: frozenset[str]) -> str | None:
    """What of a checkpoint's part is not finite: a parameter, optimizer state, `loss`; None: all is."""
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in ("parameters", "optimizer") or rest in infinite_at_first:
            continue
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            return rest if kind == "parameters" else name
    # A number that JSON lacks is kept as a mapping.
    reported: Any = state.tree.get("reported")
    return LOSS if isinstance(reported, dict) and isinstance(reported.get("loss"), dict) else None


def check_state(session: Session) -> None:
    """Make sure that a checkpoint can hold what the run starts with.

    Raises:
        PipelineError: it cannot hold state of that kind.
    """
    runtime = session.runtime
    if runtime.checkpoints.writer is not None:
        try:
            encode(state_of(session), copy=False)
        except UnstorableError as error:
            text, way_out = f"no checkpoint can be taken: {error}", "`checkpoint: {keep: 0}` takes none"
            raise runtime.loaded.error("checkpoint", text, way_out) from None


def take_checkpoint(session: Session, *, at_end: bool = False, requested: bool = False) -> None:
    """Take a checkpoint of the state as it is now; called by all ranks after the same step.

    At the run's end it waits until it is written. One that a signal has requested is answered on the screen.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    checkpoints, writer, step = runtime.checkpoints, runtime.checkpoints.writer, session.state.step
    if requested:
        answer = "no checkpoint is taken, because of checkpoint.keep: 0"
        reporter.note(f"SIGUSR1: {answer if writer is None else f'checkpoint of step {step}'}")
    if writer is None:
        return
    started = time.monotonic()
    if state.cursor.mid_stage:
        state.cursor.stage_time.read()
    state.cursor.run_time.read()
    if at_end:  # ranks that exchange nothing have stopped each after a step of its own
        known = runtime.exchange.control.all_gather([float(step), float(writer.count)])
        step = int(known[:, 0].max())
        writer.skip_to(int(known[:, 1].max()))
    whole, shared = state_of(session), shared_keys(session)
    own = {key: value for key, value in whole.items() if key not in shared}
    parts = {rank_name(runtime.ranks.rank): encode(own)}
    if runtime.ranks.rank == 0:
        about = {
            "pipeline": runtime.loaded.plain(),
            "world_size": runtime.ranks.size,
            "layout": layout_of(session),
            "ddprun": __version__,
        }
        parts["shared"] = encode({**{key: whole[key] for key in sorted(shared)}, **about})
    if runtime.records.away and (state.synchronizer is None or not state.synchronizer.plan.never):
        runtime.records.collect()
    reporter.events.info("checkpoint_taken", step=step, seconds=time.monotonic() - started)
    writer.put(step, parts, wait=at_end)
    report_checkpoints(session)
    if at_end and checkpoints.failed is not None:
        checkpoints.lost = f"the checkpoint of step {step}, the last one: {checkpoints.failed}"


def report_checkpoints(session: Session) -> None:
    """Report what became of those that were taken."""
    checkpoints, reporter = session.runtime.checkpoints, session.reporter
    while checkpoints.writer is not None and not checkpoints.writer.outcomes.empty():
        outcome = checkpoints.writer.outcomes.get()
        step, seconds, written = outcome.step, round(outcome.seconds, 3), outcome.written
        if written is None:
            reporter.events.warning("checkpoint_left_out", step=step, seconds=seconds, reason=outcome.problem)
            if checkpoints.failed is None:  # once, until one is written again
                reporter.note(f"no checkpoint at step {step}: {outcome.problem} (older ones are kept)")
        else:
            reporter.events.info(
                "checkpoint_written",
                step=step,
                seconds=seconds,
                bytes=written.bytes,
                folder=str(written.path),
                nonfinite=written.nonfinite,
            )
        checkpoints.failed = outcome.problem


def close_checkpoints(session: Session) -> None:
    """Finish writing."""
    if (writer := session.runtime.checkpoints.writer) is not None:
        writer.close()
        report_checkpoints(session)


def layout_of(session: Session) -> str:
    """What decides which share of the hooks' state each rank has."""
    runtime, ranks = session.runtime, session.runtime.ranks
    cap_mb, hooks = runtime.loaded.pipeline.ddp.bucket_cap_mb, sorted(runtime.stacks.used)
    hosts = Placement(ranks.rank, ranks.hosts, ranks.local_sizes).launched()
    return repr((cap_mb, hosts, hooks))
