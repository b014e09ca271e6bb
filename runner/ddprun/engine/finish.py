"""The end of a run: write `summary.json`, and show the closing table, even on a full disk."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from ddprun import __version__, screen
from ddprun.checkpoint import folder
from ddprun.engine.session import Session
from ddprun.run_files import replacing, resume_command
from ddprun.telemetry.steps import VERSION, Totals
from ddprun.telemetry.writer import finite

Status = Literal["done", "interrupted", "failed"]


class LostError(Exception):
    """Something that a run leaves behind could not be written."""


def finish_run(session: Session, *, status: Status, seconds: float) -> list[str]:
    """Write the summary, end the records and the trackers, and show the closing table; called by all ranks.

    Records that could not be written are reported, and no more: they are not the run's purpose.

    Returns:
        What is lost of its purpose, the same on all ranks: the last checkpoint, the summary.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, records, finite_check = runtime.ranks, runtime.records, runtime.finite
    records.writer.flush()
    failures = ranks.gather("records", records.writer.failure or "")
    if incomplete := [(rank, why) for rank, why in enumerate(failures) if why]:
        (rank, why), *others = incomplete
        more = f" (and of {len(others)} more)" if others else ""
        reporter.note(f"the records of rank {rank}{more} are incomplete: {why}")
    found = summarize(session, status=status, seconds=seconds, stages=state.cursor.entries)
    if status == "failed":
        assert finite_check.found is not None
        message = _failure(session) if ranks.rank == 0 else ""
        found["error"] = {"rank": finite_check.found.rank, "message": message}
    summary = {**runtime.loaded.secrets.redact_all(found), "run_dir": found["run_dir"]}
    lost = [runtime.checkpoints.lost] if runtime.checkpoints.lost is not None else []
    if ranks.rank == 0:
        reporter.events.info("finished", status=status, step=state.step)
        try:
            write_summary(runtime.run_dir, summary)
        except OSError as error:
            lost.append(f"summary.json: {error.strerror or error}")
    if late := reporter.trackers.close(summary):
        reporter.note(f"{', '.join(late)}: still flushing; the run does not wait for it")
    records.close()
    if ranks.rank == 0:
        reporter.screen.closing(summary)
        if status == "failed":
            reporter.note(f"ddprun: the run failed ({reporter.where}): {summary['error']['message']}")
        if lost:
            ended = {"done": "is done", "interrupted": "has stopped", "failed": "has failed"}[status]
            screen.say(f"ddprun: the run {ended}, but not all of it could be written: {'; '.join(lost)}")
        elif status == "interrupted" and runtime.loaded.pipeline.checkpoint.keep:
            reporter.note(f"to resume: {resume_command(runtime.run_dir)}")
        screen.show(str(runtime.run_dir))
    everywhere: list[str] = json.loads(ranks.tell_all("lost", lambda: json.dumps(lost)))
    return everywhere


def _failure(session: Session) -> str:
    """Why the run has ended as its weights are not finite, and how to resume it; on rank 0."""
    finite_check, run_dir = session.runtime.finite, session.runtime.run_dir
    assert finite_check.found is not None
    first, step = finite_check.found, folder.last_finite(run_dir / folder.FOLDER)
    lines = [f"{finite_check.lost_parameter} is not finite any more, and on_nan is stop"]
    if first.value is not None:
        lines.append(f"  first     the loss of rank {first.rank} was {first.value} at step {first.step}")
    if step is None:
        lines.append("  next      no finite checkpoint is left: start again with a smaller learning rate,")
    else:
        lines.append(
            f"  next      {resume_command(run_dir)} --set …, from step {step}, with a smaller learning rate,"
        )
    lines.append("            clip_norm or warmup_steps, or with bf16 in place of fp16; or, if it should")
    lines.append("            continue as it is, with on_nan: continue")
    return "\n".join(lines)


def summarize(
    session: Session, *, status: Status, seconds: float, stages: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Add up all ranks; called by all of them. Times are means over ranks, in seconds."""
    runtime, state, audit = session.runtime, session.state, session.state.last_audit
    rows = runtime.exchange.control.all_gather(runtime.recorder.totals.numbers(), "totals for the summary")
    totals = [Totals.of(row) for row in rows.tolist()]

    def mean_s(*parts: str) -> float:
        return sum(total.parts_us[part] for total in totals for part in parts) / len(totals) / 1e6

    seconds_in_steps = mean_s("step_us")
    train_s = sum(stage["seconds"] for stage in stages if stage["kind"] in ("train", "forward"))
    return {
        "v": VERSION,
        "status": status,
        "steps": state.step,
        "samples": sum(total.samples for total in totals),
        "loss": state.loss,
        "metrics": state.metrics or {},
        "nonfinite": None if runtime.finite.found is None else asdict(runtime.finite.found),
        "seconds": seconds,
        "seconds_in_steps": seconds_in_steps,
        "steps_per_s": state.step / train_s if train_s else 0.0,
        "data_s": mean_s("data_us"),
        "compute_s": mean_s("forward_us", "backward_us", "optimizer_us"),
        "communication_s": sum(total.communication_us for total in totals) / len(totals) / 1e6,
        "exposed_communication_s": mean_s("exposed_hook_us", "exposed_wait_us", "exposed_wire_us"),
        "straggler_wait_s": [total.parts_us["exposed_wait_us"] / 1e6 for total in totals],
        "trackers_dropped": {
            name: count for name, count in session.reporter.trackers.dropped.items() if count
        },
        "stragglers": [] if runtime.recorder.stragglers is None else runtime.recorder.stragglers.state_dict(),
        "wire_bytes": sum(total.wire_bytes for total in totals),
        "world_size": runtime.ranks.size,
        "backend": runtime.backend,
        "device": runtime.device.type,
        "versions": {
            "ddprun": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "records_dropped": runtime.records.writer.dropped,
        "records_failure": runtime.records.writer.failure,
        "run_dir": str(runtime.run_dir),
        "audit": None
        if audit is None
        else {
            "equal": not audit.farthest,
            "largest_distance": audit.largest_distance,
            "largest_distance_ever": state.farthest_apart,
        },
        "stages": list(stages),
    }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, whole or not at all; NaN and infinities become null."""
    with replacing(run_dir, "summary.json") as file:
        file.write(json.dumps(finite(summary), indent=2, allow_nan=False).encode() + b"\n")
