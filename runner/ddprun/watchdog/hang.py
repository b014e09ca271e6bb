"""What a rank does about a hang: find out who is missing, tell it, end.

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
from typing import IO, Any

from ddprun import screen
from ddprun.run_files import open_file, replacing
from ddprun.watchdog.diagnosis import Diagnosis, diagnose, doing, headline, named
from ddprun.watchdog.rank_watchdog import HANG, Overdue, PendingCollective, RankWatchdog
from ddprun.watchdog.status_page import Seen, claim, read, read_all
from ddprun.watchdog.status_server import ask_all

_AT_MOST_S = 4.8
"""From the alarm to the end of the process, whatever stalls."""

_OTHERS_TELL_S = 2.0
_OTHERS_ASK_S = 1.0
_PARAMS_SHOWN = 12
_ALSO_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """Where another rank is, as it told when it joined."""

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
    """Claim to be the one that tells the screen, among all hosts; True if nobody can be asked."""

    log: Callable[[], Path | None]
    """This rank's log; None if there is no run folder yet."""

    speak: Callable[[Report], None]
    """Tell the screen, and keep it with the run."""

    leave: Callable[[], None] = lambda: None
    """The last thing to do before this rank ends."""


class HangHandler:
    """Ends this rank when the run hangs.

    Args:
        around: the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.watchdog: RankWatchdog | None = None
        """To be set before the watchdog is started."""

    def __call__(self, waits: list[Overdue]) -> None:
        """Tell, and end the process with exit code 1."""
        last = threading.Timer(_AT_MOST_S, os._exit, [1])
        last.daemon = True
        last.start()
        try:
            self._tell(waits)
        except Exception as error:  # the process must end, and not without a word
            screen.say(f"ddprun: rank {self._context.rank} hangs, and cannot tell why: {error!r}")
        with suppress(Exception):
            self._context.leave()
        screen.flush()
        os._exit(1)

    def _tell(self, waits: list[Overdue]) -> None:
        watchdog, context = self.watchdog, self._context
        assert watchdog is not None
        watchdog.note(waits)
        speaks = claim(watchdog.folder, HANG)  # and so the others know
        peers = context.peers()
        seen = self._look(watchdog, peers)
        if waits:
            report = find_out(context, watchdog.timeout_s, waits, seen, peers)
        else:
            report = _own(context.rank, seen.get(context.rank))
        log = context.log()
        if log is not None:
            write_log(log, report)
            dump_flight_recorder(log.parent / f"flight-recorder-{context.rank:05}.json")
        if speaks and waits and context.first():
            context.speak(report)
        watchdog.page.told()
        self._let_others_tell(watchdog.folder)
        if context.holds_store():
            time.sleep(_OTHERS_ASK_S)

    def _look(self, watchdog: RankWatchdog, peers: Mapping[int, Peer]) -> dict[int, Seen]:
        context = self._context
        servers = {peer.server for peer in peers.values() if peer.server and peer.host != context.host}
        seen = ask_all(sorted(servers), hang=True)
        for rank, peer in peers.items():
            if peer.host == context.host and (one := read(peer.page)) is not None:
                seen[rank] = one
        if watchdog.folder is not None:
            seen |= read_all(watchdog.folder)
        if (own := read(watchdog.page.path)) is not None:
            seen[context.rank] = own
        return seen

    def _let_others_tell(self, folder: Path | None) -> None:
        """Once a rank has ended, its launcher ends the others."""
        until = time.monotonic() + _OTHERS_TELL_S
        while folder is not None and time.monotonic() < until:
            if all(one.told or one.lifeless for one in read_all(folder).values()):
                return
            time.sleep(0.05)


def find_out(
    context: RunContext,
    timeout_s: float,
    waits: Sequence[Overdue],
    seen: Mapping[int, Seen],
    peers: Mapping[int, Peer],
) -> Report:
    """Say who is missing.

    Args:
        context: the run.
        timeout_s: how long a collective may be under way.
        waits: what this rank waits for, oldest first.
        seen: the status pages that could be read, this rank's among them.
        peers: the ranks that have joined.
    """
    diagnosis = diagnose(context.rank, seen)
    shown, own = _most_telling(waits, diagnosis), seen[context.rank]
    pending, others = shown.pending, [one for one in waits if one is not shown]
    where = ", ".join(part for part in (own.stage, f"step {own.step}" if own.step else "") if part)
    head = headline(diagnosis, timeout_s)
    names = [param.name for param in pending.params]
    rows = [
        (
            "collective",
            f"{pending.op} {pending.number} of {shown.sequence.name}, among {named(shown.sequence.ranks)}",
        ),
        _cargo(pending, names),
        *((_one(rank), _state(rank, context, seen, peers)) for rank in diagnosis.ranks),
        ("waiting", named(_waiting(diagnosis, seen))),
        *(("also waits for", _also(one)) for one in others[:_ALSO_SHOWN]),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"ddprun: the run hangs ({where or 'before the first stage'}): {head}"]
    lines += [f"  {name:{width}}  {text}" for name, text in rows]
    details = [f"parameters of the bucket: {', '.join(names)}"] if len(names) > _PARAMS_SHOWN else []
    details += [f"{_one(rank)} {_state(rank, context, seen, peers)}" for rank in range(context.size)]
    facts = {
        "why": diagnosis.why,
        "ranks": list(diagnosis.ranks),
        "stage": own.stage,
        "step": own.step,
        "collective": pending.op,
        "line": shown.sequence.name,
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
    for one in waits:
        overdue = 2 * one.age_s >= waits[0].age_s
        if overdue and one.pending.kind is not None and {*diagnosis.ranks} & {*one.sequence.ranks}:
            return one
    return waits[0]


def _own(rank: int, own: Seen | None) -> Report:
    """Of a rank that waits for nobody, when others have waited too long."""
    state = "" if own is None else f": it {doing(own)}"
    text = f"ddprun: other ranks have waited too long, and rank {rank} waits for none{state}"
    return Report(text, "", text)


def _waiting(diagnosis: Diagnosis, seen: Mapping[int, Seen]) -> list[int]:
    return [rank for rank, one in seen.items() if one.waits and (rank not in diagnosis.ranks)] or list(seen)


def _state(rank: int, context: RunContext, seen: Mapping[int, Seen], peers: Mapping[int, Peer]) -> str:
    one, peer = seen.get(rank), peers.get(rank)
    if one is not None:
        host = f" (on {peer.host})" if peer is not None and peer.host != context.host else ""
        return doing(one) + host
    if peer is None:
        return "has not joined, or nobody can say whether it has"
    if not peer.server and peer.host != context.host:
        return f"is on {peer.host}, whose ranks cannot be asked: another launcher than ddprun's started them"
    return f"is on {peer.host}, which does not answer: the host or the link to it is down"


def _also(one: Overdue) -> str:
    pending = one.pending
    name, what = _cargo(pending, [param.name for param in pending.params])
    return f"{pending.op} {pending.number} of {one.sequence.name}, {name} {what}"


def _cargo(pending: PendingCollective, names: Sequence[str]) -> tuple[str, str]:
    if pending.kind is None:
        return "for", pending.described
    return "bucket", f"{pending.described.removeprefix('bucket ')}: {_some(names)}"


def _one(rank: int) -> str:
    return f"rank {rank}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _PARAMS_SHOWN} more" if len(names) > _PARAMS_SHOWN else ""
    return ", ".join(names[:_PARAMS_SHOWN]) + more


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


def dump_flight_recorder(target: Path) -> None:
    """Keep what torch's flight recorder has of this rank, as JSON, if it has anything.

    It notes every collective of Gloo and of NCCL when it is issued; of Gloo's it does not note the end.
    """
    try:
        from torch._C import _distributed_c10d

        trace: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        if json.loads(trace).get("entries"):
            with replacing(target.parent, target.name) as file:
                file.write(trace)
    except (ImportError, AttributeError, OSError, ValueError, RuntimeError):
        return
