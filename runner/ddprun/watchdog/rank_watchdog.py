"""The watchdog of one rank: keeps its status page, and finds collectives that have been pending too long."""

import itertools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ddprun.screen import say
from ddprun.watchdog.status_page import StatusPage, Wait, plain_waits
from ddprun_hooks.comm.observer import UNOBSERVED
from ddprun_hooks.comm.observer import CollectiveSequence as ObservedSequence
from ddprun_hooks.comm.trace import now_us
from ddprun_hooks.payload import Kind, Payload

GROUPS_LATER_S = 5.0
"""Process groups time out so much later than the watchdog, which knows more, and so speaks first."""

HANG = "hang"
"""File in the folder of status pages: made by the first rank of a host that finds a hang,
or by the launcher's watchdog.
"""

_TICK_S = 0.2
_LOST_S = 1.0
"""A tick that comes so late was not late: the process was stopped, and time did not count."""

_WAITS_TOLD = 4

_PYTHON, _PACKAGES = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))
_TORCH = os.path.join(_PACKAGES, "torch", "")


class Mishaps:
    """Says on the screen that a look has failed: once, whatever the later ones come to.

    Args:
        who: looks.
    """

    def __init__(self, who: str) -> None:
        self._who, self._said = who, False

    def tell(self, error: Exception) -> None:
        """One more."""
        if not self._said:
            self._said = True
            at = traceback.extract_tb(error.__traceback__)[-1]
            say(
                f"ddprun: {self._who}: a look has failed, and it goes on looking: "
                f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
            )


class Onlooker(Protocol):
    """What the engine tells of itself."""

    def sequence(self, name: str, ranks: Sequence[int]) -> ObservedSequence:
        """As `ddprun_hooks.comm.observer.Observer.sequence`."""

    def stage(self, name: str) -> None:
        """The stage that begins, as messages name it."""

    def step(self, number: int) -> None:
        """The step that begins, counted in the run from 1; 0: none."""

    def turn(self, phase: bytes) -> None:
        """What the training thread turns to, in at most 24 bytes."""


class _NoOnlooker:
    def sequence(self, name: str, ranks: Sequence[int]) -> ObservedSequence:
        return UNOBSERVED

    def stage(self, name: str) -> None: ...

    def step(self, number: int) -> None: ...

    def turn(self, phase: bytes) -> None: ...


UNWATCHED: Onlooker = _NoOnlooker()
"""For a session that nobody watches."""


class PendingCollective:
    """One collective of this rank; satisfies `ddprun_hooks.comm.observer.PendingCollective`."""

    __slots__ = (
        "_sequence",
        "broken",
        "bucket",
        "ended",
        "kind",
        "lost_us",
        "number",
        "op",
        "params",
        "peers",
        "since",
        "what",
    )

    def __init__(
        self,
        sequence: "CollectiveSequence",
        number: int,
        op: str,
        payload: Payload | None,
        what: str,
        peers: Sequence[int] | None,
        lost_us: int,
    ) -> None:
        self._sequence = sequence
        self.number = number
        self.op = op
        self.kind: Kind | None = None if payload is None else payload.kind
        self.bucket = -1 if payload is None else payload.bucket
        self.params = () if payload is None else payload.params
        self.what = what
        self.peers = peers
        self.since = now_us()
        self.lost_us = lost_us
        self.ended: Callable[[], bool] | None = None
        self.broken: int | None = None
        """When, in microseconds."""

    def done(self) -> None:
        self._sequence.outstanding.pop(self.number, None)

    def failed(self) -> None:
        self.broken, self.ended = now_us(), None
        self._sequence.outstanding[self.number] = self  # one that failed may already have been taken for over

    def done_when(self, ended: Callable[[], bool]) -> None:
        self.ended = ended

    @property
    def described(self) -> str:
        """What it carries."""
        if self.kind is None:
            return self.what
        return f"bucket {self.bucket} of {_PLURAL[self.kind]}"


_PLURAL: dict[Kind, str] = {
    "gradient": "gradients",
    "delta": "deltas",
    "parameters": "parameters",
    "buffers": "buffers",
    "optimizer": "optimizer state",
}


class CollectiveSequence:
    """One sequence of this rank; satisfies `ddprun_hooks.comm.observer.CollectiveSequence`."""

    __slots__ = ("_watch", "index", "name", "numbers", "outstanding", "ranks")

    def __init__(self, watchdog: "RankWatchdog", index: int, name: str, ranks: Sequence[int]) -> None:
        self._watch = watchdog
        self.index = index
        self.name = name
        self.ranks = tuple(ranks)
        self.numbers = itertools.count(1)
        self.outstanding: dict[int, PendingCollective] = {}

    def issue(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> PendingCollective:
        number = next(self.numbers)
        pending = PendingCollective(self, number, op, payload, what, peers, self._watch.lost_us)
        self.outstanding[number] = pending
        self._watch.page.issued(self.index, number)
        return pending


@dataclass(slots=True)
class Overdue:
    """A collective that is not over, and for how long it has not been."""

    sequence: CollectiveSequence
    pending: PendingCollective
    age_s: float

    def plain(self) -> Wait:
        """For the status page."""
        pending = self.pending
        peers = None if pending.peers is None else tuple(pending.peers)
        return Wait(
            self.sequence.index,
            self.sequence.name,
            pending.number,
            self.sequence.ranks,
            peers,
            pending.op,
            pending.described,
            self.age_s,
        )


@dataclass(slots=True)
class RankWatchdog:
    """This rank's watch; satisfies `Onlooker` and `ddprun_hooks.comm.observer.Observer`.

    A thread of its own looks some times a second. Training threads wait for collectives without Python's
    lock, so it can; a rank whose call keeps the lock is found by the other ranks' watchdogs.

    Args:
        rank: whose.
        timeout_s: how long a collective may be under way.
        folder: of the status pages of this host's ranks, made by their launcher; None: there is none.
        alarm: called once, on the watchdog's thread, when a collective is overdue on this rank, or when
            another rank of this host has found that out; with what this rank waits for, oldest first.
    """

    rank: int
    timeout_s: float
    folder: Path | None
    handler: Callable[[list[Overdue]], None]
    hang_found: bool = False
    lost_us: int = 0
    """Time that did not count because this process was stopped."""

    page: StatusPage = field(init=False)
    _sequences: list[CollectiveSequence] = field(default_factory=list)
    _training_thread: int = field(default_factory=threading.get_ident)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _mishaps: Mishaps = field(init=False)

    def __post_init__(self) -> None:
        self._mishaps = Mishaps(f"the watchdog of rank {self.rank}")
        try:
            self.page = StatusPage(self.rank, self.folder)
        except OSError:  # the disk is full: the ranks find this status page once they have joined
            self.page = StatusPage(self.rank, None)

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._look, name="ddprun-watch", daemon=True)
        self._thread.start()

    def sequence(self, name: str, ranks: Sequence[int]) -> CollectiveSequence:
        """As `ddprun_hooks.comm.observer.Observer.sequence`."""
        sequence = CollectiveSequence(self, len(self._sequences), name, ranks)
        self._sequences.append(sequence)
        return sequence

    def stage(self, name: str) -> None:
        """The stage that begins."""
        self.page.stage(name)

    def step(self, number: int) -> None:
        """The step that begins."""
        self.page.step(number)

    def turn(self, phase: bytes) -> None:
        """What the training thread turns to."""
        self.page.turn(phase)

    def close(self) -> None:
        """End the watchdog. The status page stays as it is."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def overdue(self, after_s: float) -> list[Overdue]:
        """Collectives under way for longer than that, oldest first."""
        now, found = now_us(), []
        for line in self._sequences:
            for pending in list(line.outstanding.values()):
                until = now if pending.broken is None else pending.broken
                age_s = (until - pending.since - (self.lost_us - pending.lost_us)) / 1e6
                if age_s < after_s and pending.ended is None:
                    continue
                if pending.ended is not None and self._is_over(pending.ended):
                    pending.done()
                elif age_s >= after_s:
                    found.append(Overdue(line, pending, age_s))
        return sorted(found, key=lambda one: -one.age_s)

    def _look(self) -> None:
        tick = min(_TICK_S, self.timeout_s / 10)
        before = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if now - before > tick + _LOST_S:
                self.lost_us += round((now - before - tick) * 1e6)
            before = now
            waits: list[Overdue] = []
            # Each by itself: what keeps a rank from writing its status page keeps it not from seeing a hang.
            try:
                waits = self.overdue(tick)
            except Exception as error:
                self._mishaps.tell(error)
            try:
                self.note(waits)
            except Exception as error:
                self._mishaps.tell(error)
            if (waits and waits[0].age_s > self.timeout_s) or self._called():
                self.hang_found = True
                self.handler(waits)
                return

    def _is_over(self, ended: Callable[[], bool]) -> bool:
        try:
            return ended()
        except RuntimeError:  # of a device that has failed; the training thread will hear of that, too
            return True
        except Exception as error:  # nobody can say; the group's own timeout is left
            self._mishaps.tell(error)
            return True

    def note(self, waits: Sequence[Overdue]) -> None:
        """Write on the status page what this rank waits for, and where it is."""
        told = plain_waits([one.plain() for one in waits[:_WAITS_TOLD]])
        self.page.beat({"waits": told, "at": place_of(self._training_thread)})

    def _called(self) -> bool:
        return self.folder is not None and os.path.exists(self.folder / HANG)  # False if nobody can tell


def place_of(thread: int) -> str:
    """Where a thread is, outside of Python's own code and torch's: `file:line in name`."""
    frame = sys._current_frames().get(thread)
    innermost = frame
    while frame is not None and _is_of_others(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of_others(file: str) -> bool:
    if file.startswith(_PACKAGES):
        return file.startswith(_TORCH)
    return file.startswith(("<", _PYTHON))
