"""How a run ends: the summary and the closing table."""

import time
from dataclasses import asdict
from typing import Any, Literal

import msgspec

from ddprun import standard_streams
from ddprun.checkpoint import folder
from ddprun.config import BEST_FILE
from ddprun.engine.session import Session
from ddprun.run_files import resume_command
from ddprun.telemetry.records import Summary
from ddprun.telemetry.step_timing import TOTALS, summary_fields
from ddprun.telemetry.writer import versions, write_summary

RunStatus = Literal["done", "interrupted", "failed"]


def finish_run(session: Session, status: RunStatus) -> list[str]:
    """Write the summary, end the records and the trackers, and show the closing table; called by all ranks.

    Returns descriptions of outputs that could not be written (last checkpoint, summary), the same on all
    ranks. Records that could not be written are reported, and no more.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, records = runtime.ranks, runtime.records
    records.writer.flush()
    written = ranks.gather("records", [records.writer.dropped, records.writer.failure or ""])
    raw_summary = summarize_run(session, status)
    raw_summary.records_dropped = sum(dropped for dropped, _ in written)
    failures = {rank: why for rank, (_, why) in enumerate(written)}
    raw_summary.records_failure = reporter.note_incomplete_records(failures)
    if status == "failed":
        first = runtime.finite_check.first_nonfinite
        assert first is not None
        message = _nonfinite_message(session) if ranks.rank == 0 else ""
        raw_summary.error = {"rank": first.rank, "message": message}
    summary = _redact_summary(session, raw_summary)
    writer = runtime.checkpoints
    unwritten = [writer.last_problem] if writer is not None and writer.last_problem else []
    if ranks.rank == 0:
        reporter.events.info("finished", status=status, step=state.step)
        try:
            write_summary(runtime.run_dir, summary)
        except OSError as error:
            unwritten.append(f"summary.json: {error.strerror or error}")
    reporter.close_trackers(summary)
    records.close()
    if ranks.rank == 0:
        reporter.screen.show_summary(summary)
        if summary.error is not None:
            reporter.note(f"ddprun: the run failed ({reporter.location}): {summary.error['message']}")
        if unwritten:
            standard_streams.say(f"not all of the run could be written: {'; '.join(unwritten)}")
        elif status == "interrupted" and runtime.loaded.pipeline.checkpoint.keep:
            reporter.note(f"to resume: {resume_command(runtime.shown_dir)}")
        standard_streams.print_stdout(str(runtime.shown_dir))
    return list(ranks.from_rank_0("lost", lambda: unwritten))


def _nonfinite_message(session: Session) -> str:
    """Why the run has ended as its weights are not finite, and how to resume it; on rank 0."""
    runtime = session.runtime
    step = folder.newest_finite_step(runtime.run_dir / folder.CHECKPOINTS_FOLDER)
    again = "no finite checkpoint is left: start again"
    if step is not None:
        again = f"{resume_command(runtime.shown_dir)} --set …, from step {step},"
    return (
        f"{runtime.finite_check.nonfinite_parameter} is no longer finite, and on_nan is stop\n"
        f"  next      {again} with a lower learning rate,\n"
        "            with clip_norm or warmup_steps, or with bf16 in place of fp16; or, to continue\n"
        "            regardless, with on_nan: continue"
    )


def summarize_run(session: Session, status: RunStatus) -> Summary:
    """Add up all ranks; called by all of them. Times are means over ranks, in seconds."""
    mine = [*session.runtime.recorder.totals.values()]
    rows = session.runtime.exchange.control.all_gather(mine, "totals for the summary").tolist()
    totals = [dict(zip(TOTALS, row, strict=True)) for row in rows]
    dropped = session.reporter.trackers.dropped
    return _build_summary(
        session, status, trackers_dropped=dropped, **summary_fields(totals, session.state.step)
    )


def summarize_failure(session: Session) -> Summary:
    """What one rank knows of a run that ends with an error: all but the totals of all ranks."""
    return _redact_summary(session, _build_summary(session, "failed"))


def _redact_summary(session: Session, summary: Summary) -> Summary:
    redacted = session.runtime.loaded.secrets.redact_all(msgspec.to_builtins(summary))
    return msgspec.convert({**redacted, "run_dir": summary.run_dir}, Summary)


def _build_summary(session: Session, status: RunStatus, **totals: Any) -> Summary:
    runtime, state, results = session.runtime, session.state, session.state.results
    nonfinite = runtime.finite_check.first_nonfinite
    stages, kept, audit = state.cursor.entries, results.kept, results.last_audit
    return Summary(
        status=status,
        steps=state.step,
        loss=results.loss,
        values={**results.values} if results.values else None,
        metrics={**(results.metrics or {})},
        best=None if kept is None else {**kept.model_dump(), "file": BEST_FILE},
        nonfinite=None if nonfinite is None else asdict(nonfinite),
        seconds=state.cursor.run_seconds + time.monotonic() - state.cursor.ticked_at,
        stragglers=runtime.recorder.stragglers.episodes,
        world_size=runtime.ranks.size,
        world_sizes=[(first, size) for first, size in state.cursor.world_sizes],
        backend=runtime.backend,
        device=runtime.device.type,
        versions=versions(),
        run_dir=str(runtime.shown_dir),
        audit=None
        if audit is None
        else {
            "equal": not audit.farthest,
            "largest_distance": audit.largest_distance,
            "largest_distance_ever": results.farthest_apart,
        },
        stages=list(stages),
        **totals,
    )
