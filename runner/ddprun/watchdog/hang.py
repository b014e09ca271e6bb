"""What a rank does about a hang: find out from all status pages who is missing, report it, end.

The training thread is stuck in a collective and cannot be woken. All of this happens on the watchdog's
thread, and nothing in it waits for another rank, for a store that another rank may hold, or for a disk,
without an end.
"""

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from ddprun import screen
from ddprun.run_files import open_file, replacing
from ddprun.watchdog.rank_watchdog import HANG, Overdue, PendingCollective, RankWatchdog
from ddprun.watchdog.status_page import Seen, ask_all, claim, read, read_all

_AT_MOST_S = 4.8
"""From the alarm to the end of the process, whatever stalls."""

_OTHERS_REPORT_S = 2.0
_OTHERS_ASK_S = 1.0
_PARAMS_SHOWN = 12
_ALSO_SHOWN = 3

Why = Literal["late", "silent", "circle", "network"]
"""`late`: they have not come to the collective. `silent`: nobody can see whether they have. `circle`: they
wait for each other. `network`: all have entered it, all are alive, and it does not complete."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where another rank is, as it said when it joined."""

    host: str
    page: str
    """Path of its status page, on its host."""

    server: str
    """Of its launcher; empty if it has none."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank has found out."""

    message: str
    """For the screen."""

    details: str
    """For the log, after the message."""

    headline: str
    facts: dict[str, Any] = field(default_factory=dict)
    """For the event and the summary."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the alarm needs of the run; each call comes back within about a second."""

    rank: int
    size: int
    host: str
    peers: Callable[[], Mapping[int, Peer]]
    """Ranks that have joined."""

    holds_store: Callable[[], bool]
    """Whether what `first` asks ends with this process."""

    first: Callable[[], bool]
    """Claim to be the one that prints the report, among all hosts; True if nobody can be asked."""

    log: Callable[[], Path | None]
    """This rank's log; None if there is no run folder yet."""

    speak: Callable[[Report], None]
    """Print the report, and keep it with the run."""

    leave: Callable[[], None] = lambda: None
    """The last thing to do before this rank ends."""


def handle_hang(context: RunContext, watchdog: RankWatchdog, waits: list[Overdue]) -> None:
    """Report what this rank waits for, oldest first, and end the process with exit code 1."""
    last = threading.Timer(_AT_MOST_S, os._exit, [1])
    last.daemon = True
    last.start()
    try:
        _report(context, watchdog, waits)
    except Exception as error:  # the process must end, and not without a message
        screen.print_stderr(f"ddprun: rank {context.rank} hangs, and the cause could not be found: {error!r}")
    with suppress(Exception):
        context.leave()
    screen.flush()
    os._exit(1)


def _report(context: RunContext, watchdog: RankWatchdog, waits: list[Overdue]) -> None:
    watchdog.note(waits)
    speaks = claim(watchdog.folder, HANG)  # and so the others know
    peers = context.peers()
    seen = _read_pages(context, watchdog, peers)
    if waits:
        report = find_out(context, watchdog.timeout_s, waits, seen, peers)
    else:  # others have waited too long
        state = f": it {doing(seen[context.rank])}" if context.rank in seen else ""
        text = f"ddprun: other ranks have waited too long, and rank {context.rank} waits for none{state}"
        report = Report(text, "", text)
    if (log := context.log()) is not None:
        write_log(log, report)
        dump_flight_recorders(log.parent, context.rank)
    if speaks and waits and context.first():
        context.speak(report)
    watchdog.page.reported()
    # Once a rank has ended, its launcher ends the others: let them report first.
    until = time.monotonic() + _OTHERS_REPORT_S
    while watchdog.folder is not None and time.monotonic() < until:
        if all(page.reported or page.lifeless for page in read_all(watchdog.folder).values()):
            break
        time.sleep(0.05)
    if context.holds_store():
        time.sleep(_OTHERS_ASK_S)


def _read_pages(context: RunContext, watchdog: RankWatchdog, peers: Mapping[int, Peer]) -> dict[int, Seen]:
    """The status pages that can be read, of this host and of the others."""
    servers = {peer.server for peer in peers.values() if peer.server and peer.host != context.host}
    here = {rank: read(peer.page) for rank, peer in peers.items() if peer.host == context.host}
    if watchdog.folder is not None:
        here |= read_all(watchdog.folder)
    here[context.rank] = read(watchdog.page.path) or here.get(context.rank)
    return {
        **ask_all(sorted(servers)),
        **{rank: page for rank, page in here.items() if page is not None},
    }


class Diagnosis(NamedTuple):
    """Whose fault it is."""

    why: Why
    ranks: tuple[int, ...]


def diagnose(me: int, seen: Mapping[int, Seen]) -> Diagnosis:
    """Follow who waits for whom, from a rank whose page was seen, to those that wait for nobody."""
    late, silent, visited = [], [], [me]
    for rank in visited:  # grows as it goes
        page = seen.get(rank)
        if page is None:
            silent.append(rank)
        elif rank != me and (page.lost or not page.waits):
            late.append(rank)
        else:
            visited += [other for other in _awaited(page, seen) if other not in visited]
    if late:
        return Diagnosis("late", tuple(sorted(late)))
    if silent:
        return Diagnosis("silent", tuple(sorted(silent)))
    if len(visited) > 1:
        return Diagnosis("circle", tuple(sorted(visited)))
    return Diagnosis("network", tuple(sorted(seen[me].waits[0].ranks)))


def _awaited(page: Seen, seen: Mapping[int, Seen]) -> list[int]:
    """The ranks that a rank waits for."""
    wait = page.waits[0]
    if wait.peers is not None:
        return list(wait.peers)
    others = [rank for rank in wait.ranks if rank != page.rank]
    late = [rank for rank in others if rank in seen and seen[rank].has_issued(wait.index) < wait.number]
    unseen = [rank for rank in others if rank not in seen]
    return late or unseen or [rank for rank in others if seen[rank].lost]


def find_out(
    context: RunContext,
    timeout_s: float,
    waits: Sequence[Overdue],
    seen: Mapping[int, Seen],
    peers: Mapping[int, Peer],
) -> Report:
    """Say who is missing; `waits`: what this rank waits for, oldest first; `seen` has its own page."""
    diagnosis = diagnose(context.rank, seen)
    shown, own = _most_telling(waits, diagnosis), seen[context.rank]
    pending, others = shown.pending, [overdue for overdue in waits if overdue is not shown]
    waiting = [rank for rank, page in seen.items() if page.waits and rank not in diagnosis.ranks]
    where = ", ".join(part for part in (own.stage, f"step {own.step}" if own.step else "") if part)
    head = headline(diagnosis, timeout_s)
    names = [param.name for param in pending.params]
    rows = [
        ("collective", f"{_numbered(pending)}, among {named(pending.sequence.ranks)}"),
        _carried(pending),
        *((f"rank {rank}", _state(rank, context, seen, peers)) for rank in diagnosis.ranks),
        ("waiting", named(waiting or [*seen])),
        *(
            ("also waits for", f"{_numbered(overdue.pending)}, {' '.join(_carried(overdue.pending))}")
            for overdue in others[:_ALSO_SHOWN]
        ),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"ddprun: the run hangs ({where or 'before the first stage'}): {head}"]
    lines += [f"  {name:{width}}  {text}" for name, text in rows]
    details = [f"parameters of the bucket: {', '.join(names)}"] if len(names) > _PARAMS_SHOWN else []
    details += [f"rank {rank} {_state(rank, context, seen, peers)}" for rank in range(context.size)]
    facts = {
        "why": diagnosis.why,
        "ranks": list(diagnosis.ranks),
        "stage": own.stage,
        "step": own.step,
        "collective": pending.op,
        "line": pending.sequence.name,
        "number": pending.number,
        "kind": pending.kind,
        "bucket": None if pending.kind is None else pending.bucket,
        "params": names,
        "carries": pending.described,
        "timeout_s": timeout_s,
    }
    return Report("\n".join(lines), "\n".join(details), f"the run hangs: {head}", facts)


def _most_telling(waits: Sequence[Overdue], diagnosis: Diagnosis) -> Overdue:
    """The oldest; or one of parameters, which says more than a control message, if it is about as old and
    among ranks whose fault it is.
    """
    for wait in waits:
        pending, as_old = wait.pending, 2 * wait.age_s >= waits[0].age_s
        if as_old and pending.kind is not None and {*diagnosis.ranks} & {*pending.sequence.ranks}:
            return wait
    return waits[0]


def _state(rank: int, context: RunContext, seen: Mapping[int, Seen], peers: Mapping[int, Peer]) -> str:
    page, peer = seen.get(rank), peers.get(rank)
    if page is not None:
        host = f" (on {peer.host})" if peer is not None and peer.host != context.host else ""
        return doing(page) + host
    if peer is None:
        return "has not joined, as far as can be seen from here"
    if not peer.server and peer.host != context.host:
        return f"is on {peer.host}, whose ranks cannot be asked: ddprun's launcher did not start them"
    return f"is on {peer.host}, which does not answer: the host or the link to it is down"


def _numbered(pending: PendingCollective) -> str:
    return f"{pending.op} {pending.number} of {pending.sequence.name}"


def _carried(pending: PendingCollective) -> tuple[str, str]:
    if pending.kind is None:
        return "for", pending.described
    names = [param.name for param in pending.params]
    more = f" and {len(names) - _PARAMS_SHOWN} more" if len(names) > _PARAMS_SHOWN else ""
    shown = ", ".join(names[:_PARAMS_SHOWN]) + more
    return "bucket", f"{pending.described.removeprefix('bucket ')}: {shown}"


def headline(diagnosis: Diagnosis, timeout_s: float) -> str:
    """In one line."""
    who = named(diagnosis.ranks)
    match diagnosis.why:
        case "late":
            return f"{who} did not arrive within {timeout_s:g} s"
        case "silent":
            return f"{who} did not arrive within {timeout_s:g} s, or cannot be reached"
        case "circle":
            return f"{who} have waited for each other for {timeout_s:g} s"
        case "network":
            return f"{who} have all entered a collective, which has not completed for {timeout_s:g} s"


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    listed = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {listed}"


def doing(page: Seen) -> str:
    """What a rank is doing."""
    where = f" of step {page.step}" if page.step else ""
    stage = f" ({page.stage})" if page.stage else ""
    if page.state in ("Z", "gone") and page.lost:
        return f"has ended; last seen in {page.phase}{where}{stage}"
    if page.stopped:
        state = f"its process ({page.pid}) is stopped, by SIGSTOP or a debugger; it was"
    elif page.lost:
        state = f"its process ({page.pid}) gives no sign of life (state {page.state}); it was"
    else:
        state = "is"
    text = f"{state} in {page.phase}{where}{stage}, for {page.phase_age_s:.1f} s"
    if page.waits and not page.lost:
        wait = page.waits[0]
        text += f", and waits in {wait.op} {wait.number} of {wait.name} ({wait.what})"
    return text + (f", at {page.at}" if page.at else "")


def open_log(log: Path) -> IO[bytes]:
    """Open a rank's log, `logs/rank-….log` in the folder of the run, to append to it.

    Raises:
        OSError: it cannot be opened.
    """
    return open_file(log.parent.parent, Path(log.parent.name) / log.name, "ab", make_folders=True)


def write_log(log: Path, report: Report) -> None:
    """Append to a rank's log what it has found, and where its threads are."""
    try:
        with open_log(log) as file:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = f"{now}\n{report.message}\n{report.details}\nthreads of this rank:\n"
            file.write(text.encode(errors="backslashreplace"))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return


_RECORDERS = {
    "flight-recorder": "_dump_fr_trace_json",
    "flight-recorder-nccl": "_dump_nccl_trace_json",  # only torch with CUDA has it
}


def dump_flight_recorders(folder: Path, rank: int) -> None:
    """Keep what torch's flight recorders have of this rank, as JSON, if they have anything.

    There are two: one of Gloo's collectives, whose end it does not note, and one of NCCL's.
    """
    from torch._C import _distributed_c10d

    for name, dump in _RECORDERS.items():
        with suppress(AttributeError, OSError, ValueError, RuntimeError):
            trace: bytes = getattr(_distributed_c10d, dump)()
            if json.loads(trace).get("entries"):
                with replacing(folder, f"{name}-{rank:05}.json") as file:
                    file.write(trace)
