"""The end of a run: what it came to is written and told, as far as the disk takes it."""

import json
from typing import Literal

from ddprun import screen
from ddprun.engine.checkpoints import FOLDER as CHECKPOINTS
from ddprun.engine.nonfinite import failure
from ddprun.engine.session import Session
from ddprun.engine.summary import summarise, write_summary
from ddprun.run_files import resume_command

Status = Literal["done", "interrupted", "failed"]
_ENDED: dict[Status, str] = {
    "done": "has come to its end",
    "interrupted": "has stopped",
    "failed": "has failed",
}


class LostError(Exception):
    """What a run was to leave behind cannot be written, and the disk is why."""


def close_run(session: Session, *, status: Status, seconds: float) -> list[str]:
    """Write the summary, end the records and the trackers, and show the closing table; called by all ranks.

    Records that could not be written are told. They are not what the run is for.

    Returns:
        What is lost of that for which it is, the same on all ranks: the last checkpoint, the summary.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, records = runtime.ranks, runtime.records
    records.writer.flush()
    _tell_records(session, ranks.gather("records", records.writer.failure or ""))
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
        reporter.note(f"{', '.join(late)}: does not come to its end, and the run does not wait for it")
    records.close()
    if ranks.rank == 0:
        reporter.screen.closing(summary)
        if status == "failed":
            reporter.note(f"ddprun: the run failed ({reporter.where}): {summary['error']['message']}")
        if lost:
            screen.say(
                f"ddprun: the run {_ENDED[status]}, and not all of it could be written: {'; '.join(lost)}"
            )
        elif status == "interrupted" and runtime.loaded.pipeline.checkpoint.keep:
            reporter.note(f"go on: {resume_command(runtime.run_dir)}")
        screen.show(str(runtime.run_dir))
    everywhere: list[str] = json.loads(ranks.tell_all("lost", lambda: json.dumps(lost)))
    return everywhere


def _tell_records(session: Session, failures: list[str]) -> None:
    """On rank 0: say which ranks' records are not whole."""
    failed = {rank: why for rank, why in enumerate(failures) if why}
    if failed:
        first, why = next(iter(failed.items()))
        more = f", nor are those of {len(failed) - 1} more" if len(failed) > 1 else ""
        session.reporter.note(f"the records of rank {first} are not whole{more}: {why}")
