"""Turns: runs that are compared take turns on one machine, so that whatever disturbs it disturbs all alike.

`ddprun compare` starts its runs together. Each stops after every so many steps, until it is its turn again;
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
    """Steps of a turn."""

    _connection: socket.socket
    _taken_at: int = -1

    @classmethod
    def of(cls, rank: int, ranks: int) -> "TimeSliceClient | None":
        """What the environment says; None if this run is not one of several.

        Raises:
            OSError: nobody gives turns any more.
        """
        text = os.environ.get(COMPARED)
        if text is None:
            return None
        told = json.loads(text)
        connection = socket.create_connection(("127.0.0.1", told["port"]), timeout=60)
        connection.settimeout(None)
        hello = {"secret": told["secret"], "run": told["run"], "rank": rank, "ranks": ranks}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return cls(told["every"], connection)

    def due(self, step: int) -> bool:
        """Whether a turn ends after so many steps of the run."""
        return step % self.every == 0 and step != self._taken_at

    def wait(self, step: int) -> float:
        """End this turn, and wait for the next one; gives the seconds that took.

        Raises:
            ConnectionError: nobody gives turns any more.
        """
        started = time.monotonic()
        self._taken_at = step
        self._connection.sendall(b"p")
        if self._connection.recv(1) != b"g":
            raise ConnectionError("the comparison that this run belongs to has ended")
        return time.monotonic() - started
