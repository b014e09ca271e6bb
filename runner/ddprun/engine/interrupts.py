"""What interrupts a run from outside: signals, and the time slices of a comparison."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from ddprun import COMPARED, LAUNCHED
from ddprun.host.processes import handle
from ddprun.parallel.ranks import Ranks

_STOP, _ASK_EVERY_S = "stop", 1.0


class StopRequest:
    """Notes SIGINT and SIGTERM, after which all ranks stop after the same step, and SIGUSR1, after which all
    take a checkpoint and continue.

    Under a launcher of ddprun's a request to stop comes as SIGINT; SIGTERM is how torchelastic ends a rank
    when another one has failed, and ends it at once; rank 0 closes its trackers first
    (`engine/reporter.py`).
    """

    def __init__(self) -> None:
        self.wanted = self._checkpoint_wanted = False
        self._asked_s = 0.0
        if LAUNCHED in os.environ:
            signal.signal(signal.SIGINT, self._note)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                handle(number, self._note)
        signal.signal(signal.SIGUSR1, self._note_checkpoint)

    def take_checkpoint_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def known_to_all(self, ranks: Ranks, failed: Callable[[], bool]) -> bool:
        """Whether this rank is to stop, by a signal or because it has `failed`, or another one is: for ranks
        that exchange nothing else. It asks their store once a second.
        """
        if not self.wanted:
            if time.monotonic() - self._asked_s < _ASK_EVERY_S:
                return False
            self._asked_s = time.monotonic()
            if not failed():
                with ranks.asking():
                    return bool(ranks.store.check([_STOP]))
        with ranks.asking():
            ranks.store.set(_STOP, "")
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint_wanted = True


@dataclass(slots=True)
class TimeSliceClient:
    """Runs that are compared take turns on one machine, so that what disturbs it disturbs all alike.

    `ddprun compare` starts its runs at once. Each stops after every so many steps until it is its turn again;
    only one works at a time. Nothing of a run changes by that but when it happens.
    """

    every: int  # steps of a time slice
    _connection: socket.socket
    _taken_at: int = -1

    @classmethod
    def of(cls, rank: int, ranks: int) -> "TimeSliceClient | None":
        """As the environment says, of a rank and how many are on its host; None if this run is not one of
        several. An OSError: the comparison has ended.
        """
        text = os.environ.get(COMPARED)
        if text is None:
            return None
        settings = json.loads(text)
        connection = socket.create_connection(("127.0.0.1", settings["port"]), timeout=60)
        connection.settimeout(None)
        hello = {"secret": settings["secret"], "run": settings["run"], "rank": rank, "ranks": ranks}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return cls(settings["every"], connection)

    def due(self, step: int) -> bool:
        """Whether a time slice ends after so many steps of the run."""
        return step % self.every == 0 and step != self._taken_at

    def wait(self, step: int) -> float:
        """End this time slice, and wait for the next one; gives the seconds that took. A ConnectionError: the
        comparison has ended.
        """
        started = time.monotonic()
        self._taken_at = step
        self._connection.sendall(b"p")
        if self._connection.recv(1) != b"g":
            raise ConnectionError("the comparison that this run belongs to has ended")
        return time.monotonic() - started
