"""What the launcher does about ranks that hang: answer for them, and end those that cannot end themselves."""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddprun.screen import say
from ddprun.watchdog.diagnosis import named
from ddprun.watchdog.rank_watchdog import HANG, Mishaps
from ddprun.watchdog.status_page import Seen, read_all
from ddprun.watchdog.status_server import StatusServer

STATUS_SERVER = "DDPRUN_STATUS_SERVER"
"""Environment variable of ranks: where other hosts' ranks can ask about them."""

_TICK_S = 0.25
_SURVIVORS_S = 6.0
"""Ranks that find a hang end themselves within this; what is left then cannot."""

_LAUNCHER_ENDS_S = 6.0
_TRIES = 3
_LOST_S = 1.0


class LauncherWatchdog:
    """Watches the status pages of this host's ranks from their launcher, which no signal to a rank stops.

    Args:
        folder: in which torchelastic makes the ranks' folders.
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
        """Ranks that were stopped, and ended by this: what they were at."""

        self._folder, self._timeout_s = folder, timeout_s
        self._give_up, self._reachable = give_up, reachable
        self._server: StatusServer | None = None
        if address is not None:
            with suppress(OSError):  # then other hosts' ranks say that nobody answers here
                self._server = StatusServer(address, secrets.token_hex(8), self.look, self._called)
        self._closed, self._mishaps = threading.Event(), Mishaps("the launcher's watch")
        self._alone_s, self._unreachable = 0.0, 0
        # By folder: how long all its ranks have been stopped; when its hang was found.
        self._stopped_s: dict[Path, float] = {}
        self._hang_since: dict[Path, float] = {}

    def __enter__(self) -> "LauncherWatchdog":
        if self._server is not None:
            os.environ[STATUS_SERVER] = self._server.name
            self._server.open()
        self._thread = threading.Thread(target=self._keep, name="ddprun-watchdog", daemon=True)
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
        """The launcher is at its end, and other hosts may still ask about its ranks."""
        self._give_up = None
        time.sleep(for_s)

    def look(self) -> dict[int, Seen]:
        """The status pages of the ranks that are there, and of those that have just told of a hang and ended.

        A hang is found on one host first. Until another host asks, the ranks of this one may have ended.
        """
        places = self._places()
        ended = {rank: seen for place in places[-1:] for rank, seen in read_all(place).items() if seen.told}
        return ended | {rank: seen for place in places for rank, seen in _living(place).items()}

    def _places(self) -> list[Path]:
        """One folder for each time that ranks were started."""
        return sorted(
            self._folder.glob("*/attempt_[0-9]*"), key=lambda place: int(place.name.rpartition("_")[2])
        )

    def _called(self) -> None:
        for place in self._places():
            if _living(place):
                _call(place)

    def _keep(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            passed, before = now - before, now
            if passed > _LOST_S:  # this process was stopped, and its ranks with it: no time has passed
                continue
            for look in (self._keep_all, self._keep_launcher):
                try:
                    look(passed)
                except Exception as error:
                    self._mishaps.tell(error)

    def _keep_all(self, passed_s: float) -> None:
        for place in self._places():
            self._keep_one(place, passed_s)

    def _keep_launcher(self, passed_s: float) -> None:
        places = self._places()
        if places and self._give_up is not None and self._is_to_be_given_up(places, passed_s):
            self._give_up()

    def _is_to_be_given_up(self, places: list[Path], passed_s: float) -> bool:
        """Whether all ranks are gone, for long, and torchelastic waits for what will not come."""
        self._alone_s = 0.0 if any(map(_living, places)) else self._alone_s + passed_s
        if self._alone_s <= _LAUNCHER_ENDS_S:
            return False
        if self._reachable is None:
            return (places[-1] / HANG).exists()
        self._unreachable = 0 if self._reachable() else self._unreachable + 1
        return self._unreachable >= _TRIES

    def _keep_one(self, place: Path, passed_s: float) -> None:
        living = _living(place)
        stopped = [one for one in living.values() if one.stopped]
        if (place / HANG).exists():
            since = self._hang_since.setdefault(place, time.monotonic())
            stuck = [one for one in living.values() if one.lifeless]
            others_are_gone = len(stuck) == len(living)
            if stuck and (others_are_gone or time.monotonic() - since > _SURVIVORS_S):
                self._end(stuck)
            return
        # With all of a host's ranks stopped, none of them can tell.
        all_stopped = bool(stopped) and len(stopped) == len(living)
        self._stopped_s[place] = self._stopped_s.get(place, 0.0) + passed_s if all_stopped else 0.0
        if self._stopped_s[place] > self._timeout_s:
            _call(place)
            who = named([one.rank for one in stopped])
            verb = "is" if len(stopped) == 1 else "are"
            self._end(stopped)
            say(
                f"ddprun: the run hangs: {who} {verb} all that is left on this host, and stopped for "
                f"{self._timeout_s:g} s, by SIGSTOP or a debugger; ending them"
            )

    def _end(self, stuck: list[Seen]) -> None:
        for one in stuck:
            self.ended[one.rank] = f"{one.phase} of step {one.step}" if one.step else one.phase
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def _living(place: Path) -> dict[int, Seen]:
    """The status pages of children of this process that have not ended."""
    return {
        rank: seen
        for rank, seen in read_all(place).items()
        if seen.state not in ("Z", "gone") and _parent(seen.pid) == os.getpid()
    }


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _call(place: Path) -> None:
    """Let the ranks know that the run hangs."""
    with suppress(OSError):
        (place / HANG).open("a").close()
