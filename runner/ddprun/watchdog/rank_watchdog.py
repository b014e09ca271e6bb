"""The watchdog of one rank: keeps its status page, and finds collectives that have been pending too long."""

import itertools
import os
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import ddprun
import ddprun_hooks
from ddprun.watchdog.status_page import CONNECTION_SETUP_OPS, StatusPage, UnfinishedCollective
from ddprun_hooks.comm.collective_observer import CollectiveHandle, CollectiveObserver, CollectiveSequence
from ddprun_hooks.comm.trace import now_us
from ddprun_hooks.payload import ParamSlice, Payload, PayloadKind

GROUP_TIMEOUT_MARGIN_S = 5.0  # after the watchdog, which knows more and so speaks first

HANG_FILE = "hang"  # among status pages, made by the first rank to find a hang, or by its launcher
_TICK_S = 0.5  # each tick evicts the training thread's data from the caches
_SUSPENSION_S = 1.0  # a tick that comes so late was not late: the process was stopped, and time did not count

# A device is asked about a collective of that age; younger ones are nearly always over soon. To ask holds
# Python's lock, and breaks the capture of a CUDA graph.
_DEVICE_POLL_AGE_S = 1.0
_CHECK_FAILURES_S = 1.0

_WAITS_NOTED = 4
_HANDLER_TIMEOUT_S = 10.0  # how long the handler may take

_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_DDPRUN = (
    os.path.join(os.path.dirname(ddprun.__file__), ""),
    os.path.join(os.path.dirname(ddprun_hooks.__file__), ""),
)


@dataclass(slots=True, eq=False)
class WatchedCollective(CollectiveHandle):
    sequence: "WatchedSequence"
    number: int
    op: str
    kind: PayloadKind | None
    bucket: int
    params: tuple[ParamSlice, ...]
    what: str
    peers: Sequence[int] | None
    since_us: int
    has_ended: Callable[[], bool] | None = None
    failed_us: int | None = None  # when it failed

    def mark_done(self) -> None:
        self.sequence.outstanding.pop(self.number, None)

    def mark_failed(self) -> None:
        self.failed_us, self.has_ended = self.sequence.watchdog.clock_us(), None
        self.sequence.outstanding[self.number] = self  # one that failed may already have been taken for over

    def set_completion_check(self, has_ended: Callable[[], bool]) -> None:
        self.has_ended = has_ended

    @property
    def is_connecting(self) -> bool:
        """Whether the rank waits in it for others to which there is no connection yet."""
        return self.op in CONNECTION_SETUP_OPS and self.failed_us is None

    def age_s(self, now_us: int) -> float:
        """For how long it has been under way by now, or was when it failed."""
        until = now_us if self.failed_us is None else self.failed_us
        return (until - self.since_us) / 1e6

    @property
    def description(self) -> str:
        """What it carries."""
        return self.what if self.kind is None else f"{self.kind} bucket {self.bucket}"

    @property
    def status_entry(self) -> UnfinishedCollective:
        return UnfinishedCollective(
            index=self.sequence.index,
            name=self.sequence.name,
            number=self.number,
            ranks=self.sequence.ranks,
            peers=None if self.peers is None else tuple(self.peers),
            op=self.op,
            what=self.description,
        )


@dataclass(slots=True, eq=False)
class WatchedSequence(CollectiveSequence):
    watchdog: "RankWatchdog"
    index: int
    name: str
    ranks: tuple[int, ...]
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    outstanding: dict[int, WatchedCollective] = field(default_factory=dict)

    def record_issued(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> WatchedCollective:
        number = next(self.numbers)
        kind, bucket, params = (
            (None, -1, ()) if payload is None else (payload.kind, payload.bucket, payload.params)
        )
        pending = WatchedCollective(
            self, number, op, kind, bucket, params, what, peers, self.watchdog.clock_us()
        )
        self.outstanding[number] = pending
        self.watchdog.status_page.set_issued_count(self.index, number)
        return pending


@dataclass(slots=True)
class RankWatchdog(CollectiveObserver):
    """This rank's watchdog.

    A thread of its own checks twice a second. Training threads wait for collectives without Python's
    lock, so it can; a rank whose call keeps the lock is found by the other ranks' watchdogs.

    Args:
        timeout_s: how long a collective may be under way.
        folder: of the status pages of this host's ranks, made by their launcher; None: there is none.
        handler: called once, on the watchdog's thread, when a collective is overdue on this rank, or when
            another rank of this host has found that out; with what this rank waits for, oldest first.
        end_after_failure: called on the watchdog's thread, every second in which this rank waits for others
            before there are connections to them, with what it waits for. It ends the process if a rank has
            failed.
    """

    rank: int
    timeout_s: float
    folder: Path | None
    handler: "Callable[[RankWatchdog, list[WatchedCollective]], None]"
    end_after_failure: Callable[[str], None] = lambda _: None
    hang_found: bool = False
    peer_found_hang: bool = False
    suspended_us: int = 0  # time that did not count because this process was stopped
    device: torch.device | None = None  # the GPU of this rank, once it is chosen
    status_page: StatusPage = field(init=False)
    set_phase: Callable[..., None] = field(init=False)  # `StatusPage.set_phase`, called five times a step
    _sequences: list[WatchedSequence] = field(default_factory=list)
    _training_thread: int = field(default_factory=threading.get_ident)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        try:
            self.status_page = StatusPage(self.rank, self.folder)
        except OSError:  # the disk is full: the ranks find this status page once they have joined
            self.status_page = StatusPage(self.rank, None)
        self.set_phase = self.status_page.set_phase

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._watch, name="ddprun-watchdog", daemon=True)
        self._thread.start()

    def new_sequence(self, name: str, ranks: Sequence[int]) -> WatchedSequence:
        sequence = WatchedSequence(self, len(self._sequences), name, tuple(ranks))
        self._sequences.append(sequence)
        return sequence

    def report_peer_hang(self) -> None:
        """Another rank has found a hang: let the handler report it from here, too, and end the process."""
        self.peer_found_hang = True
        if self._thread is not None:
            self._thread.join(_HANDLER_TIMEOUT_S)

    def close(self) -> None:
        """End the watchdog. The status page stays as it is."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def clock_us(self) -> int:
        """A clock that stands still while the process is stopped."""
        return now_us() - self.suspended_us

    def find_overdue(self, after_s: float) -> list[WatchedCollective]:
        """Collectives under way for longer than that, oldest first. Of a sequence on a GPU only the oldest
        unfinished one is listed: the others wait for it.
        """
        now, found = self.clock_us(), list[WatchedCollective]()
        ask_after_s = max(after_s, min(_DEVICE_POLL_AGE_S, self.timeout_s / 4))
        for sequence in self._sequences:
            for pending in list(sequence.outstanding.values()):
                has_ended = pending.has_ended
                if pending.age_s(now) < (after_s if has_ended is None else ask_after_s):
                    continue
                if has_ended is not None and self._has_ended_on_device(has_ended):
                    pending.mark_done()
                    continue
                found.append(pending)
                if has_ended is not None:
                    break
        return sorted(found, key=lambda one: -one.age_s(now))

    def write_status(self, waits: Sequence[WatchedCollective]) -> None:
        """Write on the status page what this rank waits for, and where its training thread is."""
        self.status_page.write_heartbeat(
            [one.status_entry for one in waits[:_WAITS_NOTED]], user_code_location(self._training_thread)
        )

    def _watch(self) -> None:
        tick = min(_TICK_S, self.timeout_s / 10)
        before = asked = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if now - before > tick + _SUSPENSION_S:
                self.suspended_us += round((now - before - tick) * 1e6)
            before = now
            looked_us = self.clock_us()  # before a stop of this process that is not in `suspended_us` yet
            waits = self.find_overdue(tick)
            oldest = waits[0] if waits else None
            too_long = oldest is not None and oldest.age_s(looked_us) > self.timeout_s
            self.write_status(waits)
            if oldest is not None and oldest.is_connecting and now - asked > _CHECK_FAILURES_S:
                self.end_after_failure(oldest.description)
                asked = before = time.monotonic()
            # The file is taken for missing if nobody can say.
            on_this_host = self.folder is not None and os.path.exists(self.folder / HANG_FILE)
            if too_long or on_this_host or self.peer_found_hang:
                self.hang_found = True
                self.handler(self, waits)
                return

    def _has_ended_on_device(self, has_ended: Callable[[], bool]) -> bool:
        # A device that has failed raises RuntimeError, as it will in the training thread. Nobody can say
        # whether the collective is over then; the group's own timeout is left.
        with suppress(RuntimeError):
            if self.device is not None:  # else this thread would begin to use the first GPU
                torch.cuda.set_device(self.device)
            return has_ended()
        return True


def user_code_location(thread: int) -> str:
    """Where a thread is, outside of Python's own code, torch's and, if it can be, ddprun's: `file:line in
    name`.
    """
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return ""
    stack = list[types.FrameType]()
    # The thread may leave these frames meanwhile; in CPython 3.11, `f_back` has then been no frame.
    with suppress(AttributeError):
        stack.extend(frame for frame, _ in traceback.walk_stack(innermost))
    outside = [frame for frame in stack if not _is_library_file(frame.f_code.co_filename)]
    of_user = (frame for frame in outside if not frame.f_code.co_filename.startswith(_DDPRUN))
    frame = next(of_user, next(iter(outside), innermost))
    text = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return text.encode(errors="backslashreplace").decode()  # a path may not be UTF-8, and JSON is


def _is_library_file(file: str) -> bool:
    of_python = file.startswith(_PYTHON) and f"-packages{os.sep}" not in file  # packages may lie below it
    return of_python or file.startswith(("<", _TORCH))
