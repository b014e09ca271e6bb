"""The scheduler of a comparison: one run at a time works for a turn, the others wait."""

import asyncio
import hmac
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

_HELLO_BYTES = 1024
_HELLO_S = 5.0
"""How long a connection may take to say which rank it is. Every user of this host can connect, so nothing
waits for it meanwhile."""

_POLL_S = 0.2


@dataclass(slots=True)
class _Member:
    """One run."""

    alive: Callable[[], bool]  # whether its process still runs
    ranks: int | None = None  # how many it has; None until one has connected
    connected: set[asyncio.StreamWriter] = field(default_factory=set)
    paused: set[asyncio.StreamWriter] = field(default_factory=set)

    def ready(self) -> bool:
        """Whether all its ranks wait for their turn."""
        return self.ranks is not None and len(self.paused) == len(self.connected) == self.ranks


class TimeSliceScheduler:
    """Lets one run work at a time, for a turn of `every` steps; an asynchronous context manager."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._secret = secrets.token_hex(8)
        self._members: dict[int, _Member] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HELLO_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections: runs that wait for a turn fail."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0)

    def variable(self, run: int) -> str:
        """The value of the runs' environment variable."""
        port = self._server.sockets[0].getsockname()[1]
        return json.dumps({"port": port, "secret": self._secret, "run": run, "every": self._every})

    def expect(self, run: int, alive: Callable[[], bool]) -> None:
        """Take up a run that has been started; `alive` says whether its process still runs."""
        self._members[run] = _Member(alive)

    async def wait_for_all(self) -> None:
        """Wait until every run has connected and waits for a turn, or has ended."""
        for member in self._members.values():
            await self._ready(member)

    async def give(self, run: int) -> None:
        """Let a run work for one turn, or to its end."""
        member = self._members[run]
        if member.ready():
            for writer in member.paused:
                writer.write(b"g")
            member.paused.clear()
            await self._ready(member)

    def any_alive(self) -> bool:
        """Whether any run has not ended."""
        return any(member.alive() for member in self._members.values())

    def left(self) -> Sequence[int]:
        """The runs that wait for a turn and have not ended."""
        return [run for run, member in self._members.items() if member.ready() and member.alive()]

    async def _ready(self, member: _Member) -> None:
        """Wait until a run waits for its turn or has ended."""
        while member.alive() and not member.ready():
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a rank: it says who it is, then `p` each time it waits for its turn."""
        self._writers.add(writer)
        try:
            if (member := await self._identified(reader)) is None:
                return
            member.connected.add(writer)
            with suppress(OSError):
                while await reader.read(1) == b"p":
                    member.paused.add(writer)
                    self._changed.set()
            member.paused.discard(writer)
            member.connected.discard(writer)
            self._changed.set()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _identified(self, reader: asyncio.StreamReader) -> _Member | None:
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), _HELLO_S))
            known = hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode())
            member, ranks = self._members[hello["run"]], int(hello["ranks"])
            if not known:
                return None
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
            return None
        member.ranks = ranks
        return member
