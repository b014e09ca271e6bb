"""What the launcher does about ranks that hang: answer for them, and end those that cannot end themselves."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddprun.host.processes import send_signal, state_and_parent
from ddprun.standard_streams import say
from ddprun.watchdog.rank_watchdog import HANG_FILE
from ddprun.watchdog.status_page import HangStatusServer, RankStatus, read_pages

STATUS_SERVER_VARIABLE = "DDPRUN_STATUS_SERVER"  # where other hosts ask about this one's ranks
_TICK_S = 0.25
_SELF_EXIT_S = 6.0  # ranks that find a hang end themselves within this; what is left then cannot
_LAUNCHER_EXIT_S = 6.0
_MAX_UNANSWERED = 3
_SUSPENSION_S = 1.0


class LauncherWatchdog:
    """Reads the status pages of this host's ranks in their launcher, which no signal to a rank stops.

    Torchelastic makes a folder in `folder` for each start of the ranks. `address` is where to answer other
    hosts, if there are any. `give_up` ends the launcher when its ranks have ended and it has not, for
    torchelastic waits for minutes for a host that it cannot reach. `rendezvous_answers` says whether it can,
    where the launcher may be starting the ranks again; else it is given up whenever ranks have ended in a
    hang.
    """

    def __init__(
        self,
        folder: Path,
        address: str | None,
        give_up: Callable[[], None] | None = None,
        rendezvous_answers: Callable[[], bool] | None = None,
    ) -> None:
        self.killed_ranks: dict[int, str] = {}  # ranks that were stopped, and ended by this: what they did
        self._folder = folder
        self._give_up, self._rendezvous_answers = give_up, rendezvous_answers
        self._server: HangStatusServer | None = None
        if address is not None:
            try:
                self._server = HangStatusServer(
                    address, self.read_statuses, self._announce_hang_to_live_ranks
                )
            except OSError as error:
                say(
                    f"warning: no status server at {address}: {error}; if the run hangs, other hosts "
                    "cannot ask what the ranks of this one do"
                )
        self._closed = threading.Event()
        self._without_ranks_s, self._unreachable = 0.0, 0
        self._hang_since: dict[Path, float] = {}  # by folder: when its hang was found

    def __enter__(self) -> "LauncherWatchdog":
        if self._server is not None:
            os.environ[STATUS_SERVER_VARIABLE] = self._server.endpoint
            serve = self._server.serve_forever
            threading.Thread(target=serve, name="ddprun-status-server", daemon=True).start()
        self._thread = threading.Thread(target=self._watch, name="ddprun-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        os.environ.pop(STATUS_SERVER_VARIABLE, None)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def linger(self, for_s: float) -> None:
        """The launcher is about to end, and other hosts may still ask about its ranks."""
        self._give_up = None
        time.sleep(for_s)

    def read_statuses(self) -> dict[int, RankStatus]:
        """The status pages of the ranks that are there, and of those that ended after reporting a hang. A
        hang is found on one host first. Until another host asks, the ranks of this one may have ended.
        """
        folders = _attempt_folders(self._folder)
        newest = read_pages(folders[-1]) if folders else {}
        found = {rank: status for rank, status in newest.items() if status.hang_reported}
        for folder in folders:
            found |= _live_ranks(folder)
        return found

    def _announce_hang_to_live_ranks(self) -> None:
        for folder in _attempt_folders(self._folder):
            if _live_ranks(folder):
                with suppress(OSError):
                    (folder / HANG_FILE).open("a").close()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            passed, before = now - before, now
            if passed > _SUSPENSION_S:  # this process was stopped, and its ranks with it: no time has passed
                continue
            living: dict[Path, dict[int, RankStatus]] = {}
            with suppress(OSError):  # a folder is gone
                for folder in _attempt_folders(self._folder):
                    if self._give_up is not None or (folder / HANG_FILE).exists():  # else nobody asks
                        living[folder] = _live_ranks(folder)
            self._kill_stuck_ranks(living)
            self._give_up_without_ranks(living, passed)

    def _give_up_without_ranks(
        self, living: Mapping[Path, Mapping[int, RankStatus]], passed_s: float
    ) -> None:
        """Give up if all ranks are gone, for long, and torchelastic waits for what will not come."""
        if not living or self._give_up is None:
            return
        self._without_ranks_s = 0.0 if any(living.values()) else self._without_ranks_s + passed_s
        if self._without_ranks_s <= _LAUNCHER_EXIT_S:
            return
        if self._rendezvous_answers is not None:
            self._unreachable = 0 if self._rendezvous_answers() else self._unreachable + 1
            is_over = self._unreachable >= _MAX_UNANSWERED
        else:
            is_over = ([*living][-1] / HANG_FILE).exists()
        if is_over and (give_up := self._give_up) is not None:  # `linger` may have taken it away meanwhile
            give_up()

    def _kill_stuck_ranks(self, living: Mapping[Path, Mapping[int, RankStatus]]) -> None:
        """End ranks that cannot end themselves after a hang was found."""
        for folder, ranks in living.items():
            if not (folder / HANG_FILE).exists():
                continue
            since = self._hang_since.setdefault(folder, time.monotonic())
            stuck = [status for status in ranks.values() if status.is_lifeless]
            if len(stuck) < len(ranks) and time.monotonic() - since <= _SELF_EXIT_S:
                continue
            for status in stuck:
                where = f" of step {status.step}" if status.step else ""
                self.killed_ranks[status.rank] = f"{status.phase}{where}"
            send_signal((status.pid for status in stuck), signal.SIGKILL)


def connecting_ranks(folder: Path) -> list[int]:
    """Ranks of the launcher with this folder that wait to be connected (`RankStatus.is_connecting`)."""
    found = (_live_ranks(attempt) for attempt in _attempt_folders(folder)[-1:])
    return [rank for ranks in found for rank, status in ranks.items() if status.is_connecting]


def _attempt_folders(folder: Path) -> list[Path]:
    """One folder for each time that ranks were started, oldest first."""
    found = folder.glob("*/attempt_[0-9]*")
    return sorted(found, key=lambda attempt: int(attempt.name.rpartition("_")[2]))


def _live_ranks(folder: Path) -> dict[int, RankStatus]:
    """The status pages of children of this process that have not ended."""
    return {
        rank: status
        for rank, status in read_pages(folder).items()
        if status.state not in ("Z", "gone") and state_and_parent(status.pid)[1] == os.getpid()
    }
