"""What a rank's watchdog needs of the run to report a hang, and where it is reported."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddprun.engine.finish import write_summary
from ddprun.host.rank_files import attempt_folder
from ddprun.parallel.ranks import Environment, Ranks
from ddprun.screen import say
from ddprun.telemetry.writer import Writer, event_log
from ddprun.watchdog.hang import Report, RunContext, handle_hang, open_log
from ddprun.watchdog.rank_watchdog import RankWatchdog

if TYPE_CHECKING:
    from ddprun.engine.session import Session

_FAILED = 1
_TRACKERS_END_S = 2.0

_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
}
"""What torch's own watchdog has to do so that ranks' watchdogs speak first (`docs/reliability.md`)."""


class Known(Protocol):
    """What there is to tell about, as far as the run has come."""

    run_dir: Path | None
    session: "Session | None"


def prepare_nccl() -> None:
    """Set torch's variables, where the user has not; before any process group is made."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in os.environ:  # the older name of the recorder's size
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"])
    # Torchelastic sets 1 where nothing is set: an error then waits for NCCL to clean up, which may hang, too.
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)


def open_watchdog(
    environment: Environment, timeout_s: float, known: Known, ranks: Callable[[], Ranks]
) -> RankWatchdog:
    """The watchdog of this rank; not started yet.

    Args:
        environment: from the launcher.
        timeout_s: how long a collective may be under way.
        known: what the run has come to, when it is asked.
        ranks: this rank among the others; not called before it is started.
    """

    def speak(report: Report) -> None:
        session = known.session
        if session is not None:
            session.reporter.screen.end()
        say(report.message)
        _keep(report, known, environment.rank)

    def leave() -> None:
        if known.session is not None:
            known.session.reporter.trackers.fail(_TRACKERS_END_S)

    context = RunContext(
        rank=environment.rank,
        size=environment.world_size,
        host=os.uname().nodename,
        peers=lambda: ranks().peers(),
        holds_store=lambda: ranks().holds_store,
        first=lambda: ranks().first_to_fail(_FAILED)[0],
        log=lambda: log_of(known.run_dir, environment.rank),
        speak=speak,
        leave=leave,
    )
    return RankWatchdog(environment.rank, timeout_s, attempt_folder(), partial(handle_hang, context))


def log_of(run_dir: Path | None, rank: int) -> Path | None:
    """A rank's log, made only when there is something to say; None where no run folder is known."""
    return None if run_dir is None else run_dir / "logs" / f"rank-{rank:05}.log"


def note_failure(run_dir: Path | None, rank: int, text: str) -> None:
    """Append to a rank's log, if there can be one."""
    log = log_of(run_dir, rank)
    if log is not None:
        with suppress(OSError), open_log(log) as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))


def _keep(report: Report, known: Known, rank: int) -> None:
    """Keep with the run what hangs."""
    run_dir, session = known.run_dir, known.session
    if run_dir is None or not run_dir.is_dir():
        return
    step = session.state.step if session is not None else 0
    failure = {"rank": rank, "message": report.headline, "hang": report.facts}
    with suppress(OSError):
        write_summary(run_dir, {"status": "failed", "steps": step, "error": failure})
    # Rank 0's own writer may be what hangs.
    writer = Writer(run_dir)
    redact = session.runtime.loaded.secrets.redact_all if session is not None else dict
    event_log(writer, redact, rank=rank).error("hang", **report.facts)
    writer.close()
    if session is not None:
        session.runtime.records.writer.flush()
