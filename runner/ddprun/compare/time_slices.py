"""The scheduler of a comparison: one run at a time works for a turn, the others wait."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from ddprun.host.rank_files import SHORT_PATH_PARENT, temporary_launcher_folder

_POLL_S = 0.2


@dataclass(slots=True)
class _ScheduledRun:
    poll_exit_code: Callable[[], int | None]  # of its process; None while that runs
    ranks: int | None = None  # how many it has; None until one has connected
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    waiting_connections: set[asyncio.StreamWriter] = field(default_factory=set)

    def waits_for_turn(self) -> bool:
        """Whether all its ranks have connected, and wait for their turn."""
        return self.ranks is not None and len(self.waiting_connections) == len(self.connections) == self.ranks


class TimeSliceScheduler:
    """Lets one run work at a time, for a turn of `turn_steps`; an asynchronous context manager."""

    def __init__(self, turn_steps: int) -> None:
        self._turn_steps = turn_steps
        # Only this user can connect to what is in it. TMPDIR may be too long for the path of a socket.
        self._stack = ExitStack()
        folder = self._stack.enter_context(temporary_launcher_folder(SHORT_PATH_PARENT))
        self._address = f"{folder}/socket"
        self._runs: dict[int, _ScheduledRun] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve_rank, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections: runs that wait for a turn fail."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0)
        self._stack.close()

    def environment_value(self, run: int) -> str:
        """The value of the environment variable that tells a run how to reach this scheduler."""
        return json.dumps({"address": self._address, "run": run, "every": self._turn_steps})

    def add_run(self, run: int, exit_code: Callable[[], int | None]) -> None:
        """Add a run that has been started; `exit_code` gives that of its process, None while it runs."""
        self._runs[run] = _ScheduledRun(exit_code)

    async def wait_until_all_idle(self) -> None:
        """Wait until every run has connected and waits for a turn, or has ended."""
        for scheduled in self._runs.values():
            await self._wait_for_turn_end(scheduled)

    async def run_one_turn(self, run: int) -> None:
        """Let a run work for one turn, or to its end."""
        scheduled = self._runs[run]
        if scheduled.waits_for_turn():
            for writer in scheduled.waiting_connections:
                writer.write(b"g")
            scheduled.waiting_connections.clear()
            await self._wait_for_turn_end(scheduled)

    def any_alive(self) -> bool:
        return any(scheduled.poll_exit_code() is None for scheduled in self._runs.values())

    def waiting_runs(self) -> Sequence[int]:
        return [
            run for run, one in self._runs.items() if one.waits_for_turn() and one.poll_exit_code() is None
        ]

    async def _wait_for_turn_end(self, scheduled: _ScheduledRun) -> None:
        while scheduled.poll_exit_code() is None and not scheduled.waits_for_turn():
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_S)

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a rank: it says of which run it is, then `p` each time it waits for its turn."""
        self._writers.add(writer)
        try:
            if not (hello := await reader.readline()):
                return
            run, ranks = map(int, hello.split())
            scheduled = self._runs[run]
            scheduled.ranks = ranks
            scheduled.connections.add(writer)
            with suppress(OSError):
                while await reader.read(1) == b"p":
                    scheduled.waiting_connections.add(writer)
                    self._changed.set()
            scheduled.waiting_connections.discard(writer)
            scheduled.connections.discard(writer)
            self._changed.set()
        finally:
            self._writers.discard(writer)
            writer.close()
