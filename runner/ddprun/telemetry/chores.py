"""Chores: bookkeeping that can wait until the training thread has nothing better to do."""

from collections import deque
from collections.abc import Callable

from ddprun_hooks.flight import now_us

_ENOUGH = 16
"""So many are done one after the other, since each takes half as long once its code is in the cache."""

_A_WHILE_US = 500
"""About what these take. While Python does them, no thread of this rank can go on with a payload that has
arrived.
"""


class Chores:
    """Things to do, in the order in which they are added, by the training thread alone."""

    def __init__(self) -> None:
        self._row: deque[Callable[[], None]] = deque()

    def add(self, chore: Callable[[], None]) -> None:
        """To be done some time, at the latest in `do_all`."""
        self._row.append(chore)

    def do_some(self) -> None:
        """For when there is a while to wait anyway, as for gradients that travel."""
        row = self._row
        if len(row) < _ENOUGH:
            return
        until = now_us() + _A_WHILE_US
        while row:
            row.popleft()()
            if now_us() >= until:
                return

    def do_all(self) -> None:
        """For when their results are wanted."""
        row = self._row
        while row:
            row.popleft()()
