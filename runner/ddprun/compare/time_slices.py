"""The side of a comparison that gives its runs their turns."""

import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_HELLO_BYTES = 1024
_HELLO_S = 5.0
"""How long a connection may take to say which rank it is. Every user of this host can connect, so nobody is
waited for meanwhile."""


@dataclass(slots=True)
class _Unknown:
    """A connection that has not said who it is."""

    until: float
    said: bytes = b""


@dataclass(slots=True)
class Member:
    """One run."""

    alive: Callable[[], bool]
    """Whether its process still runs."""

    ranks: int | None = None
    """How many it has; None until one has come."""

    connections: list[socket.socket] = field(default_factory=list)
    paused: set[socket.socket] = field(default_factory=set)

    def ready(self) -> bool:
        """All its ranks wait for their turn."""
        return self.ranks is not None and len(self.paused) == len(self.connections) == self.ranks


class TimeSliceScheduler:
    """Lets one run work at a time.

    Args:
        every: steps of a turn.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._secret = secrets.token_hex(8)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self.members: dict[int, Member] = {}
        self._of: dict[socket.socket, Member] = {}
        self._unknown: dict[socket.socket, _Unknown] = {}

    def close(self) -> None:
        """End all turns: runs that wait for one fail."""
        for connection in (*self._of, *self._unknown):
            connection.close()
        self._listening.close()
        self._selector.close()

    def variable(self, run: int) -> str:
        """The value of the runs' environment variable."""
        port = self._listening.getsockname()[1]
        return json.dumps({"port": port, "secret": self._secret, "run": run, "every": self._every})

    def expect(self, run: int, alive: Callable[[], bool]) -> None:
        """A run has been started.

        Args:
            run: its number.
            alive: whether its process still runs.
        """
        self.members[run] = Member(alive)

    def wait_for_all(self) -> None:
        """Until every run has started and waits for its first turn, or has ended."""
        while any(member.alive() and not member.ready() for member in self.members.values()):
            self._turn_over(0.2)

    def give(self, run: int) -> None:
        """Let a run work for a turn, or to its end."""
        member = self.members[run]
        if not member.ready():
            return
        for connection in list(member.paused):
            with suppress(OSError):  # that rank has just died; `_hear` finds out
                connection.sendall(b"g")
        member.paused.clear()
        while member.alive() and not member.ready():
            self._turn_over(0.2)

    def any_alive(self) -> bool:
        """Whether any run has not ended."""
        return any(member.alive() for member in self.members.values())

    def left(self) -> Sequence[int]:
        """The runs that wait for a turn."""
        return [run for run, member in self.members.items() if member.ready() and member.alive()]

    def _turn_over(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listening:
                self._accept()
            elif connection in self._unknown:
                self._introduce(connection)
            else:
                self._hear(connection)
        now = time.monotonic()
        for connection in [one for one, unknown in self._unknown.items() if now > unknown.until]:
            self._send_away(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        self._unknown[connection] = _Unknown(time.monotonic() + _HELLO_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _introduce(self, connection: socket.socket) -> None:
        """Hear who a connection is."""
        unknown = self._unknown[connection]
        try:
            heard = connection.recv(_HELLO_BYTES - len(unknown.said))
        except OSError:
            heard = b""
        unknown.said += heard
        line, ended, more = unknown.said.partition(b"\n")
        if not ended and heard and len(unknown.said) < _HELLO_BYTES:
            return
        try:
            hello = json.loads(line)
            known = hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode())
            member = self.members[hello["run"]] if known else None
            ranks = int(hello["ranks"])
        except (ValueError, KeyError, TypeError, RecursionError):
            member, ranks = None, 0
        if member is None:
            self._send_away(connection)
            return
        del self._unknown[connection]
        connection.settimeout(_HELLO_S)
        member.ranks = ranks
        member.connections.append(connection)
        self._of[connection] = member
        if more == b"p":
            member.paused.add(connection)

    def _send_away(self, connection: socket.socket) -> None:
        del self._unknown[connection]
        self._selector.unregister(connection)
        connection.close()

    def _hear(self, connection: socket.socket) -> None:
        member = self._of[connection]
        try:
            heard = connection.recv(1)
        except OSError:
            heard = b""
        if heard == b"p":
            member.paused.add(connection)
        elif not heard:
            self._selector.unregister(connection)
            member.paused.discard(connection)
            member.connections.remove(connection)
            del self._of[connection]
            connection.close()
