"""How a run ends: the summary and the closing table, or the report of a failure."""

import json
import platform
import re
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_REPEATED, __version__, standard_streams
from ddprun.checkpoint import folder
from ddprun.config import BEST_FILE, PipelineError
from ddprun.config.secrets import Secrets
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.host import rank_files
from ddprun.host.network import NetworkError
from ddprun.host.processes import file_limit_hint
from ddprun.parallel.ranks import Ranks
from ddprun.run_files import replace_atomically, resume_command
from ddprun.sync.audit import DriftError
from ddprun.telemetry.records import Summary
from ddprun.telemetry.steps import Totals
from ddprun.telemetry.writer import nonfinite_to_none
from ddprun.watchdog.hang import open_log
from ddprun_hooks.errors import DisagreementError

Status = Literal["done", "interrupted", "failed"]


class OutputWriteError(Exception):
    """Something that a run leaves behind could not be written."""


def finish_run(session: Session, status: Status) -> list[str]:
    """Write the summary, end the records and the trackers, and show the closing table; called by all ranks.

    Returns descriptions of outputs that could not be written (last checkpoint, summary), the same on all
    ranks. Records that could not be written are reported, and no more.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    ranks, records = runtime.ranks, runtime.records
    records.writer.flush()
    written = ranks.gather("records", [records.writer.dropped, records.writer.failure or ""])
    incomplete = [(rank, why) for rank, (_, why) in enumerate(written) if why]
    if incomplete:
        (rank, why), *others = incomplete
        more = f" (and of {len(others)} more)" if others else ""
        reporter.note(f"the records of rank {rank}{more} are incomplete: {why}")
    raw_summary = summarize(session, status)
    raw_summary.records_dropped = sum(dropped for dropped, _ in written)
    raw_summary.records_failure = next((why for _, why in incomplete), None)
    if status == "failed":
        first = runtime.finite_check.first_nonfinite
        assert first is not None
        message = _nonfinite_message(session) if ranks.rank == 0 else ""
        raw_summary.error = {"rank": first.rank, "message": message}
    redacted = runtime.loaded.secrets.redact_all(msgspec.to_builtins(raw_summary))
    summary = msgspec.convert({**redacted, "run_dir": raw_summary.run_dir}, Summary)
    writer = runtime.checkpoints
    unwritten = [writer.final_problem] if writer is not None and writer.final_problem is not None else []
    if ranks.rank == 0:
        reporter.events.info("finished", status=status, step=state.step)
        try:
            write_summary(runtime.run_dir, summary)
        except OSError as error:
            unwritten.append(f"summary.json: {error.strerror or error}")
    if unflushed_trackers := reporter.trackers.close(msgspec.to_builtins(summary)):
        reporter.note(f"{', '.join(unflushed_trackers)}: still flushing; the run does not wait for it")
    records.close()
    if ranks.rank == 0:
        reporter.screen.show_summary(summary)
        if summary.error is not None:
            reporter.note(f"ddprun: the run failed ({reporter.location}): {summary.error['message']}")
        if unwritten:
            ended = {"done": "is done", "interrupted": "has stopped", "failed": "has failed"}[status]
            standard_streams.say(
                f"the run {ended}, but not all of it could be written: {'; '.join(unwritten)}"
            )
        elif status == "interrupted" and runtime.loaded.pipeline.checkpoint.keep:
            reporter.note(f"to resume: {resume_command(runtime.shown_dir)}")
        standard_streams.print_stdout(str(runtime.shown_dir))
    return list(ranks.from_rank_0("lost", lambda: unwritten))


def _nonfinite_message(session: Session) -> str:
    """Why the run has ended as its weights are not finite, and how to resume it; on rank 0."""
    runtime, finite_check = session.runtime, session.runtime.finite_check
    assert finite_check.first_nonfinite is not None
    first = finite_check.first_nonfinite
    step = folder.newest_finite_step(runtime.run_dir / folder.CHECKPOINTS_FOLDER)
    lines = [f"{finite_check.nonfinite_parameter} is no longer finite, and on_nan is stop"]
    if first.value is not None:
        lines.append(f"  first     the loss of rank {first.rank} was {first.value} at step {first.step}")
    again = "no finite checkpoint is left: start again"
    if step is not None:
        again = f"{resume_command(runtime.shown_dir)} --set …, from step {step},"
    lines += [
        f"  next      {again} with a lower learning rate,",
        "            with clip_norm or warmup_steps, or with bf16 in place of fp16; or, to continue",
        "            regardless, with on_nan: continue",
    ]
    return "\n".join(lines)


def summarize(session: Session, status: Status) -> Summary:
    """Add up all ranks; called by all of them. Times are means over ranks, in seconds."""
    runtime, state, audit = session.runtime, session.state, session.state.last_audit
    nonfinite = runtime.finite_check.first_nonfinite
    rows = runtime.exchange.control.all_gather(runtime.recorder.totals.numbers(), "totals for the summary")
    totals = [Totals.of(row) for row in rows.tolist()]

    def mean_s(*parts: str) -> float:
        return sum(total.parts_us[part] for total in totals for part in parts) / len(totals) / 1e6

    stages, kept = state.cursor.entries, state.evaluations.kept
    train_s = sum(stage["seconds"] for stage in stages if stage["kind"] in ("train", "forward"))
    return Summary(
        status=status,
        steps=state.step,
        samples=sum(total.samples for total in totals),
        loss=state.loss,
        values={**state.values} if state.values else None,
        metrics={**(state.metrics or {})},
        best=None if kept is None else {**kept.model_dump(), "file": BEST_FILE},
        nonfinite=None if nonfinite is None else asdict(nonfinite),
        seconds=state.cursor.run_seconds,
        seconds_in_steps=mean_s("step_us"),
        steps_per_s=state.step / train_s if train_s else 0.0,
        data_s=mean_s("data_us"),
        compute_s=mean_s("forward_us", "backward_us", "optimizer_us"),
        communication_s=sum(total.communication_us for total in totals) / len(totals) / 1e6,
        exposed_communication_s=mean_s("exposed_hook_us", "exposed_wait_us", "exposed_wire_us"),
        straggler_wait_s=[total.parts_us["exposed_wait_us"] / 1e6 for total in totals],
        trackers_dropped={name: n for name, n in session.reporter.trackers.dropped.items() if n},
        stragglers=[] if runtime.recorder.stragglers is None else runtime.recorder.stragglers.episodes,
        wire_bytes=sum(total.wire_bytes for total in totals),
        world_size=runtime.ranks.size,
        world_sizes=[(first, size) for first, size in state.cursor.world_sizes],
        backend=runtime.backend,
        device=runtime.device.type,
        versions={
            "ddprun": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        run_dir=str(runtime.shown_dir),
        audit=None
        if audit is None
        else {
            "equal": not audit.farthest,
            "largest_distance": audit.largest_distance,
            "largest_distance_ever": state.farthest_apart,
        },
        stages=list(stages),
    )


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write `summary.json`, whole or not at all; NaN and infinities become null."""
    with replace_atomically(run_dir, "summary.json") as file:
        data = nonfinite_to_none(msgspec.to_builtins(summary))
        file.write(json.dumps(data, indent=2, allow_nan=False).encode() + b"\n")


# Failures.

_LOST_PEER = re.compile(  # Gloo raises plain RuntimeErrors, whatever has gone wrong
    "connection (closed by peer|reset by peer|refused)|broken pipe|socket closed|remote process exited|"
    "read error|left the exchange",
    re.IGNORECASE,
)
_NETWORK_ERRORS = (dist.DistBackendError, dist.DistNetworkError)
_EXCHANGE_MODULES = (
    "ddprun_hooks.",
    "ddprun.parallel.ranks.",
    "torch.distributed.",
    "torch.futures.",
    "torch.nn.parallel.distributed.",
    "torch.autograd.graph.",  # an exchange that breaks in backward's own code, which has no frames
)  # where collectives and the store are called from
_GLOO_CAUSE_PREFIX = ". This is typically caused by"
_LAUNCHER_REACTION_S, _STORE_LINGER_S, _TICK_S = 3.0, 3.0, 0.1


@dataclass(slots=True)
class FailureContext:
    """What of the run exists so far, for reports of a failure: its folder and its session."""

    run_dir: Path | None = None
    session: Session | None = None


def report_failure(error: BaseException, ranks: Ranks, context: FailureContext, secrets: Secrets) -> int:
    """Report what went wrong, unless another rank failed first; gives the exit code."""
    rank_files.unregister_pid()
    session = context.session
    bad_input = isinstance(error, PipelineError | RunFolderError | NetworkError)
    if not bad_input and _is_lost_peer(error):
        # The cause is another rank. If it was killed it cannot say so; its launcher can, and ends this rank.
        until = time.monotonic() + _LAUNCHER_REACTION_S
        while time.monotonic() < until and ranks.first_failure() is None:
            time.sleep(_TICK_S)
    headline = _headline(error, secrets)
    step, run_dir = 0 if session is None else session.state.step, context.run_dir
    checkpoints = [] if run_dir is None else folder.steps_in(run_dir / folder.CHECKPOINTS_FOLDER)
    how: list[str | int | None] = [headline, step, next(iter(checkpoints), None)]
    code = EXIT_BAD_INPUT if bad_input else EXIT_FAILURE
    if rank_files.previous_attempt_error() == how and not _is_lost_peer(error):
        code = EXIT_REPEATED  # all ranks end with the code of the first: all launchers decide alike
    claimed = ranks.claim_first_failure(code)
    if claimed.rank != ranks.rank:
        close_after_peer_failure(context, ranks, claimed.rank, headline)
        return claimed.exit_code
    rank_files.report_error(how)
    if session is not None:
        session.reporter.screen.end()
        session.reporter.trackers.delay_close_as_failed()  # the failure is reported first
    if isinstance(error, PipelineError):
        message = str(error)
    elif bad_input or isinstance(error, OutputWriteError):
        message = secrets.redact(f"ddprun: {error}")
    else:
        where = session.reporter.location if session is not None else "before the first stage"
        head = f"ddprun: rank {ranks.rank} failed ({where}): {headline}"
        if isinstance(error, DriftError | DisagreementError):
            detail = str(error)  # all ranks found it; where in the code says nothing
            head = f"ddprun: the run failed ({where}):"
        elif _is_lost_peer(error):
            head = head.partition(_GLOO_CAUSE_PREFIX)[0]
            detail = "another rank is gone; its own message, if it left one, is in its launcher's output"
        else:
            detail = "".join(traceback.format_exception(error)).rstrip()
        message = secrets.redact(f"{head}{file_limit_hint(error)}\n{detail}")
    standard_streams.print_stderr(message)
    if not bad_input:
        append_to_rank_log(context.run_dir, ranks.rank, message)
    if session is not None:
        with suppress(Exception):  # what has failed may have left a step that cannot be read
            session.runtime.recorder.salvage()
        session.runtime.records.writer.flush()
    write_failure_summary(context, {"rank": ranks.rank, "message": headline})
    if session is not None:
        session.reporter.trackers.close_as_failed()
    if ranks.hosts_store:
        time.sleep(_STORE_LINGER_S)  # so that the others can still read whose failure was first
    return claimed.exit_code


def close_after_peer_failure(context: FailureContext, ranks: Ranks, first: int | None, what: str) -> None:
    """Close what this rank has open after rank `first` has failed; `what` happened to this one is logged.
    Returns once this host's launcher has seen that rank's end, if it is its own, and nobody needs the store.
    """
    session = context.session
    if session is not None:
        session.reporter.screen.end()
    append_to_rank_log(context.run_dir, ranks.rank, f"after another rank had failed: {what}")
    if session is not None:
        session.reporter.trackers.close_as_failed()
    if ranks.hosts_store or not ranks.is_on_another_host(first):
        time.sleep(_LAUNCHER_REACTION_S)


def write_failure_summary(context: FailureContext, failure: dict[str, object]) -> bool:
    """Write a failure into the run's folder, if this host sees it."""
    if context.run_dir is None or not context.run_dir.is_dir():
        return False
    step = context.session.state.step if context.session is not None else 0
    with suppress(OSError):
        write_summary(context.run_dir, Summary(status="failed", steps=step, error=failure))
    return True


def rank_log_path(run_dir: Path | None, rank: int) -> Path | None:
    """A rank's log, made only when something is written to it; None where no run folder is known."""
    return None if run_dir is None else run_dir / "logs" / f"rank-{rank:05}.log"


def append_to_rank_log(run_dir: Path | None, rank: int, text: str) -> None:
    """Append to a rank's log, if there can be one."""
    log = rank_log_path(run_dir, rank)
    if log is not None:
        with suppress(OSError), open_log(log) as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))


def _headline(error: BaseException, secrets: Secrets) -> str:
    """The error in a line, and what it was raised from in the first place."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    text = _in_a_line(error, secrets)
    return text if first is error else f"{text} (caused by {_in_a_line(first, secrets)})"


def _in_a_line(error: BaseException, secrets: Secrets) -> str:
    text = secrets.redact(str(error)).strip().splitlines()  # before a secret of several lines is cut
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange broke because another rank is gone.

    Any code may raise an error with such a text, a dataset that reads over the network for one: what counts
    first is the module of the traceback's innermost frame.
    """
    if not isinstance(error, RuntimeError | OSError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or not f"{frames[-1].f_globals.get('__name__', '')}.".startswith(_EXCHANGE_MODULES):
        return False
    return isinstance(error, _NETWORK_ERRORS) or _LOST_PEER.search(str(error)) is not None
