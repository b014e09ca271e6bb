"""Reading what a run left: its folder may be of a run that goes on, was killed, or is very long."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ddprun.telemetry.events import FILE as EVENTS
from ddprun.telemetry.profile import FOLDER as PROFILE

_STEP = re.compile(rb'"step": ?(\d+)')
_TAIL_BYTES = 1 << 20
_DRIFT = 1e-3
"""Clocks of computers drift by less than this."""


class NoRunError(Exception):
    """A folder that is no run's: bad input."""


@dataclass(frozen=True)
class Run:
    """One run's folder.

    Raises:
        NoRunError: it is none.
    """

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / EVENTS).is_file():
            what = "has no events.jsonl" if self.folder.is_dir() else "does not exist"
            raise NoRunError(f"{self.folder} is no run's folder: it {what}")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, in the order in which they came."""
        return list(_lines(self.folder / EVENTS))

    def first(self, event: str) -> dict[str, Any] | None:
        """The first event of a kind."""
        return next((one for one in self.events if one["event"] == event), None)

    def all(self, event: str) -> list[dict[str, Any]]:
        """All events of a kind."""
        return [one for one in self.events if one["event"] == event]

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """What the run came to; None if it has not ended, or was killed."""
        try:
            found = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks of which there are step records."""
        return sorted(
            int(path.stem.rpartition("-")[2]) for path in (self.folder / "steps").glob("rank-*.jsonl")
        )

    @cached_property
    def last_step(self) -> int:
        """Of which there are records; 0 if there are none."""
        return max((_last_step(self._file("steps", rank)) for rank in self.ranks), default=0)

    def steps(self, rank: int, wanted: Callable[[int], bool] | None = None) -> Iterator[dict[str, Any]]:
        """A rank's step records.

        Args:
            rank: whose.
            wanted: of these steps only.
        """
        return _lines(self._file("steps", rank), wanted)

    def buckets(
        self, rank: int, wanted: Callable[[int], bool] | None = None, *, holding: bytes = b""
    ) -> Iterator[dict[str, Any]]:
        """A rank's bucket records, of all kinds.

        Args:
            rank: whose.
            wanted: of these steps only.
            holding: only those whose line has this in it.
        """
        return _lines(self._file("buckets", rank), wanted, holding)

    def profile(self, rank: int) -> Iterator[dict[str, Any]]:
        """What torch's profiler saw of a rank; nothing if it was not asked to look."""
        return _lines(self._file(PROFILE, rank))

    @cached_property
    def profiled(self) -> frozenset[int]:
        """The steps that torch's profiler looked at."""
        stretches = {
            (line["first_step"], line["step"]) for rank in self.ranks[:1] for line in self.profile(rank)
        }
        return frozenset(step for first, last in stretches for step in range(first, last + 1))

    def _file(self, kind: str, rank: int) -> Path:
        return self.folder / kind / f"rank-{rank:05}.jsonl"

    @cached_property
    def clocks(self) -> "Clocks":
        """How to compare times of different ranks."""
        return Clocks.of(self.all("clock_offsets"))


@dataclass(frozen=True)
class Clocks:
    """How far each rank's clock was ahead of rank 0's, from time to time."""

    at_us: list[int]
    """When it was measured, on rank 0's clock."""

    offset_us: list[list[float]]
    """Then, by rank."""

    _known: dict[int, tuple[list[float], list[float]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> "Clocks":
        """From the events `clock_offsets`."""
        return cls([one["monotonic_us"] for one in events], [one["offset_us"] for one in events])

    def aligned(self, rank: int, at_us: float) -> float:
        """A time of a rank's clock on rank 0's: between two measurements clocks drift evenly."""
        times, offsets = self._of(rank)
        if not times:
            return at_us
        place = bisect_right(times, at_us)  # on the rank's own clock, which may have started at another time
        if place == 0:
            return at_us - offsets[0]
        before = offsets[place - 1]
        if place == len(times):
            return at_us - before
        length, after = times[place] - times[place - 1], offsets[place]
        if length <= 0 or abs(after - before) > _DRIFT * length:
            return at_us - before  # another clock, as after a restart on another host
        return at_us - before - (at_us - times[place - 1]) / length * (after - before)

    def _of(self, rank: int) -> tuple[list[float], list[float]]:
        """When a rank's offset was measured, on its own clock, and what it was."""
        if rank not in self._known:
            rows = [
                (at + offsets[rank], offsets[rank])
                for at, offsets in zip(self.at_us, self.offset_us, strict=True)
                if rank < len(offsets)
            ]
            rows.sort()
            self._known[rank] = [at for at, _ in rows], [offset for _, offset in rows]
        return self._known[rank]


def _lines(
    path: Path, wanted: Callable[[int], bool] | None = None, holding: bytes = b""
) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file; a last line that is torn, and what is none, are passed over."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if holding not in line:
                continue
            if wanted is not None:
                step = _STEP.search(line)
                if step is None or not wanted(int(step[1])):
                    continue
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def _last_step(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            found = _STEP.findall(file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0
