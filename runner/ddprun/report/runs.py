"""Reading what a run left: its folder may be of a run that goes on, was killed, or is very long."""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ddprun.report import fields
from ddprun.run_files import open_file, parse, read_object
from ddprun.telemetry.events import FILE as EVENTS
from ddprun.telemetry.profile import FOLDER as PROFILE
from ddprun.telemetry.records import file_of, ranks_in

_STEP = re.compile(rb'"step": ?(\d{1,18})\b')
_TAIL_BYTES = 1 << 20
_LINE_BYTES = 64 << 20
"""A line that is longer is none of a run's."""

_SUMMARY_BYTES = 256 << 20
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
        try:
            open_file(self.folder, EVENTS).close()
        except FileNotFoundError:
            what = "has no events.jsonl" if self.folder.is_dir() else "does not exist"
            raise NoRunError(f"{self.folder} is no run's folder: it {what}") from None
        except OSError as error:
            raise NoRunError(f"{self.folder} cannot be read: {error.strerror}") from None

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, in the order in which they came."""
        return list(self._lines(EVENTS, fields.event))

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
            found = read_object(self.folder, "summary.json", _SUMMARY_BYTES, finite=False)
        except (OSError, ValueError):
            return None
        return fields.of_summary(found)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks of which there are step records."""
        try:
            return ranks_in(self.folder, "steps")
        except OSError as error:
            raise NoRunError(f"{self.folder} cannot be read: {error.strerror}") from None

    @cached_property
    def last_step(self) -> int:
        """Of which there are records; 0 if there are none."""
        return max((self._last_step(rank) for rank in self.ranks), default=0)

    @cached_property
    def recorded(self) -> Sequence[int]:
        """The steps of which any rank has a record, in order."""
        found: set[int] = set()
        for rank in self.ranks:
            with self._opened(file_of("steps", rank)) as file:
                while line := file.readline(_LINE_BYTES):
                    if step := _STEP.search(line):
                        found.add(int(step[1]))
        return array("q", sorted(found))

    def steps(self, rank: int, wanted: Callable[[int], bool] | None = None) -> Iterator[dict[str, Any]]:
        """A rank's step records.

        Args:
            rank: whose.
            wanted: of these steps only.
        """
        return self._lines(file_of("steps", rank), fields.STEP, wanted)

    def buckets(
        self, rank: int, wanted: Callable[[int], bool] | None = None, *, holding: bytes = b""
    ) -> Iterator[dict[str, Any]]:
        """A rank's bucket records, of all kinds.

        Args:
            rank: whose.
            wanted: of these steps only.
            holding: only those whose line has this in it.
        """
        return self._lines(file_of("buckets", rank), fields.BUCKET, wanted, holding)

    def profile(self, rank: int) -> Iterator[dict[str, Any]]:
        """What torch's profiler saw of a rank; nothing if it was not asked to look."""
        return self._lines(file_of(PROFILE, rank), fields.profiled)

    @cached_property
    def profiled(self) -> set[int]:
        """The steps that torch's profiler looked at."""
        stretches = {
            (line["first_step"], line["step"]) for rank in self.ranks[:1] for line in self.profile(rank)
        }
        ends = {step for stretch in stretches for step in stretch}
        return ends.union(*(between(self.recorded, first, last + 1) for first, last in stretches))

    @cached_property
    def clocks(self) -> "Clocks":
        """How to compare times of different ranks."""
        return Clocks.of(self.all("clock_offsets"))

    def _lines(
        self,
        name: str,
        fits: fields.Shape,
        wanted: Callable[[int], bool] | None = None,
        holding: bytes = b"",
    ) -> Iterator[dict[str, Any]]:
        """The records of a file; a last line that is torn, and what is no record, are passed over."""
        with self._opened(name) as file:
            while line := file.readline(_LINE_BYTES):
                if holding not in line:
                    continue
                if wanted is not None:
                    step = _STEP.search(line)
                    if step is None or not wanted(int(step[1])):
                        continue
                try:
                    found = parse(line, finite=False)
                except ValueError:
                    continue
                if fits(found):
                    yield found

    def _last_step(self, rank: int) -> int:
        with self._opened(file_of("steps", rank)) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            found = _STEP.findall(file.read())
        return int(found[-1]) if found else 0

    def _opened(self, name: str) -> IO[bytes]:
        """A file; an empty one if it is not there."""
        try:
            return open_file(self.folder, name)
        except FileNotFoundError:
            return BytesIO()
        except OSError as error:
            raise NoRunError(f"{self.folder} cannot be read: {error.strerror}") from None


def between(steps: Sequence[int], low: int, high: int) -> Sequence[int]:
    """Those from `low` up to, and without, `high`."""
    return steps[bisect_left(steps, low) : bisect_left(steps, high)]


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
