"""Time slices: runs that are compared take turns on one machine, so what disturbs it disturbs all alike.

`ddprun compare` starts its runs at once. Each stops after every so many steps, until it is its turn again;
only one works at a time. Nothing of a run changes by that but when it happens.
"""

import json
import os
import socket
import time
from dataclasses import dataclass

from ddprun import COMPARED


@dataclass(slots=True)
class TimeSliceClient:
    """This rank's side."""

    every: int
    """Steps of a time slice."""

    _connection: socket.socket
    _taken_at: int = -1

    @classmethod
    def of(cls, rank: int, ranks: int) -> "TimeSliceClient | None":
        """As the environment says; None if this run is not one of several.

        Raises:
            OSError: the comparison has ended.
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
        """End this time slice, and wait for the next one; gives the seconds that took.

        Raises:
            ConnectionError: the comparison has ended.
        """
        started = time.monotonic()
        self._taken_at = step
        self._connection.sendall(b"p")
        if self._connection.recv(1) != b"g":
            raise ConnectionError("the comparison that this run belongs to has ended")
        return time.monotonic() - started
