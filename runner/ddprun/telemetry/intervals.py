"""Stretches of time that overlap: how much of the time some of them cover, on many lines at once."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Union:
    """The union of stretches of time on each of several lines.

    All lines are laid one behind the other, so that one sort and one running maximum serve all of them.

    Args:
        stretches: line (counted from 0), start and end of each, microseconds; shape (3, stretches). One that
            ends before it starts covers nothing.
        low: what lies before is cut off.
        high: what lies behind is cut off.
    """

    def __init__(self, stretches: Ints, low: int, high: int) -> None:
        self._low, self._high = low, high
        begin, until = self._places(stretches)
        order = begin.argsort(kind="stable")
        self._begin = begin[order]
        self._until = np.zeros(len(begin) + 1, dtype=np.int64)
        np.maximum.accumulate(until[order], out=self._until[1:])
        more = self._until[1:] - np.maximum(self._begin, self._until[:-1])
        self._covered = np.zeros(len(begin) + 1, dtype=np.int64)
        np.add.accumulate(np.maximum(more, 0), out=self._covered[1:])

    def within(self, windows: Ints) -> Ints:
        """How much of each window is covered: shape (windows,).

        Args:
            windows: line, start and end of each; shape (3, windows).
        """
        places = self._places(windows)
        begun = self._begin.searchsorted(places, "right")
        # Of all that has begun before a place, only what ends last can reach beyond it.
        before = self._covered[begun] - np.maximum(self._until[begun] - places, 0)
        within: Ints = before[1] - before[0]
        return within

    def _places(self, stretches: Ints) -> Ints:
        """Where starts and ends lie when all lines lie one behind the other: shape (2, stretches)."""
        moments = np.minimum(np.maximum(stretches[1:], self._low), self._high)
        places: Ints = stretches[0] * (self._high - self._low + 1) + (moments - self._low)
        return places
