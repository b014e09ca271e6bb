"""What the launcher does about ranks that hang: answer for them, and end those that cannot end themselves."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddprun.host.processes import state_of
from ddprun.screen import print_stderr
from ddprun.watchdog.hang import named
from ddprun.watchdog.rank_watchdog import HANG, FailedChecks
from ddprun.watchdog.status_page import Seen, StatusServer, read_all

STATUS_SERVER = "DDPRUN_STATUS_SERVER"
"""Environment variable of ranks: where other hosts' ranks can ask about them."""

_TICK_S = 0.25
_SURVIVORS_S = 6.0
"""Ranks that find a hang end themselves within this; what is left then cannot."""

_LAUNCHER_ENDS_S = 6.0
_TRIES = 3
_LOST_S = 1.0


class LauncherWatchdog:
    """Reads the status pages of this host's ranks in their launcher, which no signal to a rank stops.

    Args:
        folder: in which torchelastic makes a folder for each start of the ranks.
        timeout_s: of collectives.
        address: to answer other hosts on; None: there are none.
        give_up: ends the launcher, when its ranks have ended and it has not: torchelastic waits for minutes
            for a host that it cannot reach.
        reachable: whether the rendezvous answers, where the launcher may be starting the ranks again; else
            it is given up whenever ranks have ended in a hang.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        address: str | None,
        give_up: Callable[[], None] | None = None,
        reachable: Callable[[], bool] | None = None,
    ) -> None:
        self.ended: dict[int, str] = {}
        """Ranks that were stopped, and ended by this: what they were doing."""

        self._folder, self._timeout_s = folder, timeout_s
        self._give_up, self._reachable = give_up, reachable
        self._server: StatusServer | None = None
        if address is not None:
            with suppress(OSError):  # then other hosts' ranks say that nobody answers here
                self._server = StatusServer(address, self.read, self._hang_found)
        self._closed, self._failed_checks = threading.Event(), FailedChecks("the launcher's watchdog")
        self._without_ranks_s, self._unreachable = 0.0, 0
        # By folder: how long all its ranks have been stopped; when its hang was found.
        self._stopped_s: dict[Path, float] = {}
        self._hang_since: dict[Path, float] = {}

    def __enter__(self) -> "LauncherWatchdog":
        if self._server is not None:
            os.environ[STATUS_SERVER] = self._server.name
            self._server.open()
        self._thread = threading.Thread(target=self._watch, name="ddprun-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        os.environ.pop(STATUS_SERVER, None)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def linger(self, for_s: float) -> None:
        """The launcher is about to end, and other hosts may still ask about its ranks."""
        self._give_up = None
        time.sleep(for_s)

    def read(self) -> dict[int, Seen]:
        """The status pages of the ranks that are there, and of those that ended after reporting a hang.

        A hang is found on one host first. Until another host asks, the ranks of this one may have ended.
        """
        starts = self._starts()
        found = {rank: seen for rank, seen in read_all(starts[-1]).items() if seen.reported} if starts else {}
        for start in starts:
            found |= _living(start)
        return found

    def _starts(self) -> list[Path]:
        """One folder for each time that ranks were started."""
        return sorted(
            self._folder.glob("*/attempt_[0-9]*"), key=lambda start: int(start.name.rpartition("_")[2])
        )

    def _hang_found(self) -> None:
        for start in self._starts():
            if _living(start):
                _announce_hang(start)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            passed, before = now - before, now
            if passed > _LOST_S:  # this process was stopped, and its ranks with it: no time has passed
                continue
            living: dict[Path, dict[int, Seen]] = {}
            with self._failed_checks.reporting():
                living = {start: _living(start) for start in self._starts()}
            for check in (self._check_ranks, self._check_launcher):
                with self._failed_checks.reporting():
                    check(living, passed)

    def _check_launcher(self, living: Mapping[Path, Mapping[int, Seen]], passed_s: float) -> None:
        """Give up if all ranks are gone, for long, and torchelastic waits for what will not come."""
        if not living or self._give_up is None:
            return
        self._without_ranks_s = 0.0 if any(living.values()) else self._without_ranks_s + passed_s
        if self._without_ranks_s <= _LAUNCHER_ENDS_S:
            return
        if self._reachable is not None:
            self._unreachable = 0 if self._reachable() else self._unreachable + 1
        if self._unreachable >= _TRIES or (self._reachable is None and ([*living][-1] / HANG).exists()):
            self._give_up()

    def _check_ranks(self, living: Mapping[Path, Mapping[int, Seen]], passed_s: float) -> None:
        for start, ranks in living.items():
            if (start / HANG).exists():
                since = self._hang_since.setdefault(start, time.monotonic())
                stuck = [page for page in ranks.values() if page.lifeless]
                if len(stuck) == len(ranks) or time.monotonic() - since > _SURVIVORS_S:
                    self._end(stuck)
                continue
            # With all of a host's ranks stopped, none of them can report.
            stopped = [page for page in ranks.values() if page.stopped]
            all_stopped = bool(stopped) and len(stopped) == len(ranks)
            self._stopped_s[start] = self._stopped_s.get(start, 0.0) + passed_s if all_stopped else 0.0
            if self._stopped_s[start] > self._timeout_s:
                _announce_hang(start)
                who, have = named([page.rank for page in stopped]), "has" if len(stopped) == 1 else "have"
                self._end(stopped)
                print_stderr(
                    f"ddprun: the run hangs: {who}, the last on this host, {have} been stopped "
                    f"for {self._timeout_s:g} s by SIGSTOP or a debugger; ending them"
                )

    def _end(self, stuck: list[Seen]) -> None:
        for page in stuck:
            self.ended[page.rank] = f"{page.phase} of step {page.step}" if page.step else page.phase
            with suppress(ProcessLookupError):
                os.kill(page.pid, signal.SIGKILL)


def _living(start: Path) -> dict[int, Seen]:
    """The status pages of children of this process that have not ended."""
    return {
        rank: seen
        for rank, seen in read_all(start).items()
        if seen.state not in ("Z", "gone") and state_of(seen.pid)[1] == os.getpid()
    }


def _announce_hang(start: Path) -> None:
    with suppress(OSError):
        (start / HANG).open("a").close()
