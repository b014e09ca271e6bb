"""The scheduler of a comparison: one run at a time works for a turn, the others wait."""

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
"""How long a connection may take to say which rank it is. Every user of this host can connect, so nothing
waits for it meanwhile."""

_POLL_S = 0.2


@dataclass(slots=True)
class _Unknown:
    """A connection that has not said yet which rank it is."""

    until: float
    said: bytes = b""


@dataclass(slots=True)
class _Member:
    """One run."""

    alive: Callable[[], bool]
    """Whether its process still runs."""

    ranks: int | None = None
    """How many it has; None until one has connected."""

    connections: list[socket.socket] = field(default_factory=list)
    paused: set[socket.socket] = field(default_factory=set)

    def ready(self) -> bool:
        """Whether all its ranks wait for their turn."""
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
        self._members: dict[int, _Member] = {}
        self._of: dict[socket.socket, _Member] = {}
        self._unknown: dict[socket.socket, _Unknown] = {}

    def close(self) -> None:
        """Close all connections: runs that wait for a turn fail."""
        for connection in (*self._of, *self._unknown):
            connection.close()
        self._listening.close()
        self._selector.close()

    def variable(self, run: int) -> str:
        """The value of the runs' environment variable."""
        port = self._listening.getsockname()[1]
        return json.dumps({"port": port, "secret": self._secret, "run": run, "every": self._every})

    def expect(self, run: int, alive: Callable[[], bool]) -> None:
        """Take up a run that has been started.

        Args:
            run: its number.
            alive: whether its process still runs.
        """
        self._members[run] = _Member(alive)

    def wait_for_all(self) -> None:
        """Wait until every run has connected and waits for a turn, or has ended."""
        while any(member.alive() and not member.ready() for member in self._members.values()):
            self._poll()

    def give(self, run: int) -> None:
        """Let a run work for one turn, or to its end."""
        member = self._members[run]
        if not member.ready():
            return
        for connection in list(member.paused):
            with suppress(OSError):  # that rank has just died; `_receive` notices
                connection.sendall(b"g")
        member.paused.clear()
        while member.alive() and not member.ready():
            self._poll()

    def any_alive(self) -> bool:
        """Whether any run has not ended."""
        return any(member.alive() for member in self._members.values())

    def left(self) -> Sequence[int]:
        """The runs that wait for a turn and have not ended."""
        return [run for run, member in self._members.items() if member.ready() and member.alive()]

    def _poll(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listening:
                self._accept()
            elif connection in self._unknown:
                self._identify(connection)
            else:
                self._receive(connection)
        now = time.monotonic()
        for connection in [one for one, unknown in self._unknown.items() if now > unknown.until]:
            self._reject(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has gone already
            return
        connection.setblocking(False)
        self._unknown[connection] = _Unknown(time.monotonic() + _HELLO_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _identify(self, connection: socket.socket) -> None:
        """Read which rank a connection is."""
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
            member = self._members[hello["run"]] if known else None
            ranks = int(hello["ranks"])
        except (ValueError, KeyError, TypeError, RecursionError):
            member, ranks = None, 0
        if member is None:
            self._reject(connection)
            return
        del self._unknown[connection]
        connection.settimeout(_HELLO_S)
        member.ranks = ranks
        member.connections.append(connection)
        self._of[connection] = member
        if more == b"p":
            member.paused.add(connection)

    def _reject(self, connection: socket.socket) -> None:
        del self._unknown[connection]
        self._selector.unregister(connection)
        connection.close()

    def _receive(self, connection: socket.socket) -> None:
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
