"""The end of a run: `summary.json` is written, and the closing table shown, as far as the disk takes it."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from ddprun import __version__, screen
from ddprun.checkpoint.folder import FOLDER as CHECKPOINTS
from ddprun.engine.nonfinite import failure
from ddprun.engine.session import Session
from ddprun.run_files import replacing, resume_command
from ddprun.telemetry.steps import VERSION, Totals
from ddprun.telemetry.writer import finite

Status = Literal["done", "interrupted", "failed"]
_ENDED: dict[Status, str] = {
    "done": "is done",
    "interrupted": "has stopped",
    "failed": "has failed",
}


class LostError(Exception):
    """Something that a run leaves behind could not be written."""


def finish_run(session: Session, *, status: Status, seconds: float) -> list[str]:
    """Write the summary, end the records and the trackers, and show the closing table; called by all ranks.

    Records that could not be written are told. They are not what the run is for.

    Returns:
        What is lost of that for which it is, the same on all ranks: the last checkpoint, the summary.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, records = runtime.ranks, runtime.records
    records.writer.flush()
    _report_lost_records(session, ranks.gather("records", records.writer.failure or ""))
    found = summarise(session, status=status, seconds=seconds, stages=state.cursor.entries)
    if status == "failed":
        told = failure(session, runtime.run_dir / CHECKPOINTS) if ranks.rank == 0 else ""
        assert runtime.finite.found is not None
        found["error"] = {"rank": runtime.finite.found.rank, "message": told}
    summary = {**runtime.loaded.secrets.redact_all(found), "run_dir": found["run_dir"]}
    lost = [runtime.checkpoints.lost] if runtime.checkpoints.lost is not None else []
    if ranks.rank == 0:
        reporter.events.info("finished", status=status, step=state.step)
        try:
            write_summary(runtime.run_dir, summary)
        except OSError as error:
            lost.append(f"summary.json is lost: {error.strerror or error}")
    if late := reporter.trackers.close(summary):
        reporter.note(f"{', '.join(late)}: still flushing; the run does not wait for it")
    records.close()
    if ranks.rank == 0:
        reporter.screen.closing(summary)
        if status == "failed":
            reporter.note(f"ddprun: the run failed ({reporter.where}): {summary['error']['message']}")
        if lost:
            screen.say(
                f"ddprun: the run {_ENDED[status]}, but not all of it could be written: {'; '.join(lost)}"
            )
        elif status == "interrupted" and runtime.loaded.pipeline.checkpoint.keep:
            reporter.note(f"go on: {resume_command(runtime.run_dir)}")
        screen.show(str(runtime.run_dir))
    everywhere: list[str] = json.loads(ranks.tell_all("lost", lambda: json.dumps(lost)))
    return everywhere


def _report_lost_records(session: Session, failures: list[str]) -> None:
    """On rank 0: say which ranks' records are not whole."""
    failed = {rank: why for rank, why in enumerate(failures) if why}
    if failed:
        first, why = next(iter(failed.items()))
        more = f", nor are those of {len(failed) - 1} more" if len(failed) > 1 else ""
        session.reporter.note(f"the records of rank {first} are not whole{more}: {why}")


_EXPOSED = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us")


def summarise(
    session: Session, *, status: str, seconds: float, stages: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Add up all ranks; called by all of them. Times are means over ranks, in seconds."""
    runtime, state = session.runtime, session.state
    words = runtime.exchange.control.all_gather(runtime.recorder.totals.numbers(), "totals for the summary")
    totals = [Totals.of(word) for word in words.tolist()]

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
        "exposed_communication_s": mean_s(*_EXPOSED),
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
        "audit": _audit(session),
        "stages": list(stages),
    }


def _audit(session: Session) -> dict[str, Any] | None:
    """What the parameter audits came to; None without any."""
    state = session.state
    if state.last_audit is None:
        return None
    return {
        "equal": not state.last_audit.farthest,
        "largest_distance": state.last_audit.largest_distance,
        "largest_distance_ever": state.farthest_apart,
    }


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, whole or not at all; NaN and infinities become null."""
    with replacing(run_dir, "summary.json") as file:
        file.write(json.dumps(finite(summary), indent=2, allow_nan=False).encode() + b"\n")
