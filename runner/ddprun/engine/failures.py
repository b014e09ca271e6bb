"""How a run fails: what is reported, by which rank, and what is left in its folder."""

import faulthandler
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from msgspec.structs import replace

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_REPEATED_FAILURE, standard_streams
from ddprun.checkpoint import folder
from ddprun.config import PipelineError
from ddprun.config.secrets import Secrets
from ddprun.engine.reporter import Reporter
from ddprun.engine.run_folder import RunFolderError
from ddprun.host import rank_files
from ddprun.host.network import NetworkError
from ddprun.host.processes import file_limit_hint
from ddprun.parallel.ranks import RankEnvironment, Ranks
from ddprun.run_files import open_file
from ddprun.telemetry.reader import log_file
from ddprun.telemetry.records import Summary
from ddprun.telemetry.writer import RecordWriter, make_event_logger, write_summary
from ddprun.watchdog.hang_report import (
    HangReport,
    PeerAddress,
    build_report,
    describe_activity,
    dump_flight_recorders,
)
from ddprun.watchdog.rank_watchdog import GROUP_TIMEOUT_MARGIN_S, HANG_FILE, RankWatchdog, WatchedCollective
from ddprun.watchdog.status_page import RankStatus, announce_hang_to_all, claim_once, read_page, read_pages
from ddprun_hooks.errors import DisagreementError

_HANG_DEADLINE_S = 4.8  # from the alarm to the end of the process, whatever stalls
_WAIT_FOR_REPORTS_S = 2.0
_HANG_STORE_LINGER_S = 1.0
_TRACKERS_END_S = 2.0  # how long trackers may take to close after a hang
_LEAVE_DEADLINE_S = 10.0  # how long a rank may take to close what it has open after another one's failure


class OutputWriteError(Exception):
    """Something that a run leaves behind could not be written."""


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
    """What of the run exists so far, for reports of a failure."""

    run_dir: Path | None = None
    reporter: Reporter | None = None
    step: Callable[[], int] = int  # how many steps of the run are done
    summary: Callable[[], Summary] | None = None  # once the run goes on, what this rank knows of it
    may_write_summary: bool = True  # False: a run is to be resumed, and until then its summary stays


def report_failure(error: BaseException, ranks: Ranks, context: FailureContext, secrets: Secrets) -> int:
    """Report what went wrong, unless another rank failed first; gives the exit code."""
    rank_files.unregister_pid()
    reporter = context.reporter
    bad_input = isinstance(error, PipelineError | RunFolderError | NetworkError)
    if not bad_input:
        wait_for_first_failure(error, ranks)
    headline = _format_error_with_cause(error, secrets)
    step, run_dir = context.step(), context.run_dir
    checkpoints = [] if run_dir is None else folder.steps_in(run_dir / folder.CHECKPOINTS_FOLDER)
    how: list[str | int | None] = [headline, step, next(iter(checkpoints), None)]
    code = EXIT_BAD_INPUT if bad_input else EXIT_FAILURE
    if rank_files.previous_attempt_error() == how and not _is_lost_peer(error):
        code = EXIT_REPEATED_FAILURE  # all ranks end with the code of the first: all launchers decide alike
    claimed = ranks.claim_first_failure(code)
    if claimed.rank != ranks.rank:
        close_after_peer_failure(context, ranks, claimed.rank, headline)
        return claimed.exit_code
    rank_files.report_error_for_restart(how)
    if reporter is not None:
        reporter.screen.end_stage()
        reporter.trackers.close_as_failed_from_main_thread()  # the failure is reported first
    if isinstance(error, PipelineError):
        message = str(error)
    elif bad_input or isinstance(error, OutputWriteError):
        message = secrets.redact(f"ddprun: {error}")
    else:
        where = reporter.location if reporter is not None else "before the first stage"
        head = f"ddprun: rank {ranks.rank} failed ({where}): {headline}"
        if isinstance(error, DisagreementError):
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
    if reporter is not None:
        reporter.salvage_records()
    write_failure_summary(context, {"rank": ranks.rank, "message": headline})
    if reporter is not None:
        reporter.trackers.close_as_failed()
    if ranks.holds_store:
        time.sleep(_STORE_LINGER_S)  # so that the others can still read whose failure was first
    return claimed.exit_code


def wait_for_first_failure(error: BaseException, ranks: Ranks) -> None:
    """If the cause of an error is that another rank is gone, let that one, or its launcher, say so first.
    After a hang this rank's watchdog reports it and ends the process.
    """
    watchdog, first = ranks.watchdog, None
    is_lost_peer = _is_lost_peer(error)  # one that was killed cannot say so; its launcher can
    until = time.monotonic() + (_LAUNCHER_REACTION_S if is_lost_peer else 0.0)
    while not watchdog.hang_found and time.monotonic() < until:
        if (first := ranks.first_failure()) is not None:
            break
        time.sleep(_TICK_S)
    if watchdog.hang_found or (first is not None and first.is_hang):
        watchdog.report_peer_hang()


def close_after_peer_failure(context: FailureContext, ranks: Ranks, first: int | None, what: str) -> None:
    """Close what this rank has open after rank `first` has failed; `what` happened to this one is logged.
    Returns once this host's launcher has seen that rank's end, if it is its own, and nobody needs the store.
    """
    append_to_rank_log(context.run_dir, ranks.rank, f"after another rank had failed: {what}")
    if context.reporter is not None:
        context.reporter.screen.end_stage()
        context.reporter.trackers.close_as_failed()
    cause = None if first is None else ranks.peers().get(first)
    if ranks.holds_store or cause is None or cause.host == ranks.host:
        time.sleep(_LAUNCHER_REACTION_S)


def write_failure_summary(context: FailureContext, failure: dict[str, object]) -> bool:
    """Write a failure into the run's folder; gives whether this host sees that."""
    if context.run_dir is None or not context.run_dir.is_dir():
        return False
    if context.may_write_summary:
        with suppress(OSError):
            known = context.summary or partial(Summary, status="failed", steps=context.step())
            write_summary(context.run_dir, replace(known(), error=failure))
    return True


def append_to_rank_log(run_dir: Path | None, rank: int, text: str, *, with_threads: bool = False) -> None:
    """Append to a rank's log, if there can be one; `with_threads`: and where its threads are."""
    if run_dir is not None:
        with suppress(OSError), open_file(run_dir, log_file(rank), "ab", make_folders=True) as file:
            file.write(f"{text}\n".encode(errors="backslashreplace"))
            if with_threads:
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


def _format_error_with_cause(error: BaseException, secrets: Secrets) -> str:
    """The error in a line, and what it was raised from in the first place."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    text = _format_error_in_one_line(error, secrets)
    return text if first is error else f"{text} (caused by {_format_error_in_one_line(first, secrets)})"


def _format_error_in_one_line(error: BaseException, secrets: Secrets) -> str:
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


def make_ranks_and_watchdog(environment: RankEnvironment, timeout_s: float, context: FailureContext) -> Ranks:
    """This rank among the others, with its watchdog, which is not started yet."""
    watchdog = RankWatchdog(
        environment.rank,
        timeout_s,
        rank_files.attempt_folder(),
        lambda _, waits: report_hang_and_exit(ranks, context, waits),
        lambda what: exit_if_peer_failed(ranks, context, what),
    )
    ranks = Ranks(environment, timedelta(seconds=timeout_s + GROUP_TIMEOUT_MARGIN_S), watchdog)
    return ranks


def report_hang_and_exit(ranks: Ranks, context: FailureContext, waits: list[WatchedCollective]) -> None:
    """Report what this rank waits for, oldest first, and end the process with exit code 1.

    The training thread is stuck in a collective and cannot be woken. All of this happens on the watchdog's
    thread, and nothing in it waits without an end for another rank, a store that it may hold, or a disk.
    """
    last = threading.Timer(_HANG_DEADLINE_S, os._exit, [EXIT_FAILURE])
    last.daemon = True
    last.start()
    try:
        _report_hang(ranks, context, waits)
    except Exception as error:  # the process must end, and not without a message
        standard_streams.say(f"rank {ranks.rank} hangs, and the cause could not be found: {error!r}")
    with suppress(Exception):
        if context.reporter is not None:
            context.reporter.salvage_records()  # the training thread, which is stuck, touches none
            context.reporter.trackers.close_as_failed(_TRACKERS_END_S)
    standard_streams.flush_standard_streams()
    os._exit(EXIT_FAILURE)


def _report_hang(ranks: Ranks, context: FailureContext, waits: list[WatchedCollective]) -> None:
    watchdog = ranks.watchdog
    watchdog.write_status(waits)
    first_here = claim_once(watchdog.folder, HANG_FILE)  # and so the others know
    peers = ranks.peers()
    statuses = _collect_statuses(ranks, peers)
    if waits:
        report = build_report(ranks.rank, ranks.size, ranks.host, watchdog.timeout_s, waits, statuses, peers)
    else:  # others have waited too long
        own_status = statuses.get(ranks.rank)
        activity = "" if own_status is None else f": it {describe_activity(own_status)}"
        text = f"ddprun: other ranks have waited too long, but rank {ranks.rank} is not waiting{activity}"
        report = HangReport(text, "", text)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = f"{now}\n{report.message}\n{report.details}\nthreads of this rank:"
    append_to_rank_log(context.run_dir, ranks.rank, text, with_threads=True)
    if context.run_dir is not None:
        dump_flight_recorders(context.run_dir / "logs", ranks.rank)
    if first_here and waits and ranks.claim_first_failure(EXIT_FAILURE, is_hang=True).rank == ranks.rank:
        _publish_hang_report(report, ranks.rank, context)
    watchdog.status_page.set_hang_reported()
    # Once a rank has ended, its launcher ends the others: let them report first.
    until = time.monotonic() + _WAIT_FOR_REPORTS_S
    while watchdog.folder is not None and time.monotonic() < until:
        if all(status.hang_reported or status.is_lifeless for status in read_pages(watchdog.folder).values()):
            break
        time.sleep(0.05)
    # Ranks of other hosts may still have to ask the store, which ends with this rank or its launcher.
    if ranks.holds_store or any(peer.host != ranks.host for peer in peers.values()):
        time.sleep(_HANG_STORE_LINGER_S)


def _collect_statuses(ranks: Ranks, peers: Mapping[int, PeerAddress]) -> dict[int, RankStatus]:
    """What the status pages say that can be read, of this host and of the others."""
    watchdog = ranks.watchdog
    here = {rank: peer for rank, peer in peers.items() if peer.host == ranks.host}
    servers = {peer.status_server for rank, peer in peers.items() if rank not in here and peer.status_server}
    local = {rank: read_page(peer.status_page_path) for rank, peer in here.items()}
    if watchdog.folder is not None:
        local |= read_pages(watchdog.folder)
    local[ranks.rank] = read_page(watchdog.status_page.path) or local.get(ranks.rank)
    found = {rank: status for rank, status in local.items() if status is not None}
    return {**announce_hang_to_all(sorted(servers)), **found}


def _publish_hang_report(report: HangReport, rank: int, context: FailureContext) -> None:
    """Print the report, and keep it with the run."""
    reporter, run_dir = context.reporter, context.run_dir
    if reporter is not None:
        reporter.screen.end_stage()
    standard_streams.print_stderr(report.message)
    failure = {"rank": rank, "message": report.headline, "hang": report.facts}
    if run_dir is None or not write_failure_summary(context, failure):
        return
    writer = RecordWriter(run_dir)  # rank 0's own may be what hangs
    redact = dict if reporter is None else reporter.redact_all
    make_event_logger(writer, redact, rank=rank).error("hang", **report.facts)
    writer.close()
    if reporter is not None:
        reporter.writer.flush()


def exit_if_peer_failed(ranks: Ranks, failure_context: FailureContext, what: str) -> None:
    """End this process if another rank has failed: `what` it waits for may never be there. After a hang its
    watchdog has a report of its own to make.
    """
    first = ranks.first_failure()
    if first is None or first.is_hang or first.rank == ranks.rank:
        return
    deadline = threading.Timer(_LEAVE_DEADLINE_S, os._exit, [first.exit_code])
    deadline.daemon = True
    deadline.start()
    rank_files.unregister_pid()
    if failure_context.reporter is not None:
        failure_context.reporter.salvage_records()  # the training thread, which waits, touches none
    close_after_peer_failure(failure_context, ranks, first.rank, f"waited for {what}")
    standard_streams.flush_standard_streams()
    os._exit(first.exit_code)
