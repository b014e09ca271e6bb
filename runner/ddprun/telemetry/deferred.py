"""Chores: bookkeeping that can wait until the training thread has nothing better to do."""

from collections import deque
from collections.abc import Iterator

from ddprun_hooks.comm.trace import now_us

_A_WHILE_US = 2000
"""About what some of them take. While Python does them, no thread of this rank can go on with a payload that
has arrived. But whenever they are taken up again, they wait for memory, and so does the model's code when it
is its turn: in steps of 3 ms that was 0.2 ms each time.
"""


class DeferredWork:
    """Things to do, in the order in which they are added, by the training thread alone.

    Deferred work is an iterator, each step of which is a small part of the work.
    """

    def __init__(self) -> None:
        self._row: deque[Iterator[None]] = deque()

    def add(self, chore: Iterator[None]) -> None:
        """To be done some time, at the latest in `do_all`."""
        self._row.append(chore)

    def do_some(self) -> None:
        """For when there is a while to wait anyway, as for gradients that travel."""
        row = self._row
        if not row:
            return
        until = now_us() + _A_WHILE_US
        while row:
            for _ in row[0]:
                if now_us() >= until:
                    return
            row.popleft()

    def do_all(self) -> None:
        """For when their results are wanted."""
        row = self._row
        while row:
            for _ in row[0]:
                pass
            row.popleft()
