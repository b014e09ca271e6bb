"""Reading the folder of a run that may still go on, was killed, is very long, or was made by somebody else.

Nothing in the folder is believed. No link or pipe is followed, and a line that is not a record as
`docs/records.md` describes it is skipped: a torn last line, and any line with a missing or a wrong field.
"""

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ddprun import InputError
from ddprun.run_files import MAX_LINE_BYTES, InvalidBytes, open_file, parse_json, read_json_object
from ddprun.telemetry.records import (
    BucketRecord,
    ClockOffsets,
    Event,
    Failure,
    ProfilerRecord,
    Resumed,
    SharesSet,
    Started,
    StepRecord,
    StragglerEpisode,
    Summary,
)
from ddprun.telemetry.writer import EVENTS_FILE, PROFILE_FOLDER, ranks_with_records, record_file

_STEP_NUMBER = re.compile(rb'"step": ?(\d{1,18})\b')
_T = TypeVar("_T")
_EventT = TypeVar("_EventT", bound=Event)
_MAX_PIPELINE_BYTES = 64 << 10
_MAX_RANKS = 1_000
_MAX_DRIFT_RATE = 1e-3  # clocks of computers drift by less than this
_NON_METRIC_FIELDS = ("event", "level", "time", "monotonic_us", "rank", "stage", "step")


def log_file(rank: int) -> str:
    """Where a rank's log is, in the run's folder."""
    return f"logs/rank-{rank:05}.log"


class NoRunError(InputError):
    """The folder is not a run's: bad input."""


@dataclass(frozen=True)
class RecordedRun:
    """The folder of one run; raises NoRunError if it is not a run's, or cannot be read."""

    folder: Path

    def __post_init__(self) -> None:
        try:
            open_file(self.folder, EVENTS_FILE).close()
        except FileNotFoundError:
            what = "has no events.jsonl" if self.folder.is_dir() else "does not exist"
            raise NoRunError(f"{self.folder} is not the folder of a run: it {what}") from None
        except OSError as error:
            raise self._unreadable_error(error) from None

    def _unreadable_error(self, error: OSError) -> NoRunError:
        return NoRunError(f"{self.folder} cannot be read: {error.strerror}")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, in order of time."""

        def parse(line: bytes) -> dict[str, Any]:
            found = parse_json(line)
            if not isinstance(found.get("event"), str) or not _is_number(found.get("monotonic_us", 0)):
                raise ValueError("no event")
            return dict(found)

        return list(self._parse_lines(EVENTS_FILE, parse))

    def events_of(self, kind: type[_EventT]) -> list[_EventT]:
        """All events of a kind."""
        name = kind.__struct_config__.tag
        return _convert_valid((event for event in self.events if event["event"] == name), kind)

    @cached_property
    def started(self) -> Started:
        """How the run started the first time."""
        return next(iter(self.events_of(Started)), Started())

    @cached_property
    def shares(self) -> list[SharesSet]:
        """The ranks' shares of samples, each from its step on. An attempt begins with its shares, and
        whatever came after that step has been undone.
        """
        found: list[SharesSet] = []
        for one in self.events_of(SharesSet):
            found = [*(earlier for earlier in found if earlier.step < one.step), one]
        return found

    @cached_property
    def world_sizes(self) -> list[tuple[int, int]]:
        """How many ranks took the steps: the first step of so many, and the number."""
        found = newest = [(1, self.started.world_size or len(self.ranks))]
        for event in self.events:
            if event["event"] == "started":  # maybe to resume, which may be refused
                newest = [(1, one.world_size) for one in _convert_valid([event], Started)] or found
            elif event["event"] == "resumed":
                found = newest = next(iter(_convert_valid([event], Resumed)), Resumed()).world_sizes or found
            elif event["event"] == "stage_started":
                found = newest
        return found

    @cached_property
    def summary(self) -> Summary | None:
        """`summary.json`; None if the run has not ended, or was killed."""
        try:
            return msgspec.convert(read_json_object(self.folder, "summary.json"), Summary)
        except (OSError, ValueError):
            return None

    @cached_property
    def is_observed(self) -> bool:
        """Whether `ddprun.observe` recorded a script: there was no pipeline to have a digest."""
        return not self.started.digest

    @cached_property
    def failure(self) -> Failure | None:
        """What ended the run; None if nothing did, or nobody could say."""
        error = None if self.summary is None else self.summary.error
        return next(iter(_convert_valid([error], Failure)), None) if error else None

    def has_log(self, rank: int) -> bool:
        """Whether a rank has left something in its log."""
        log = self.folder / log_file(rank)
        return log.is_file() and log.stat().st_size > 0

    @cached_property
    def stragglers(self) -> Sequence[StragglerEpisode]:
        """Each episode in which a rank was late."""
        if self.summary is not None and self.summary.stragglers is not None:
            return self.summary.stragglers
        found = (event for event in self.events if event["event"] == "straggler")
        return _convert_valid(
            ({**event, "rank": event.get("straggler")} for event in found), StragglerEpisode
        )

    @cached_property
    def pipeline_text(self) -> str:
        """`pipeline.yaml` as far as it may reach; "" if it cannot be read."""
        try:
            with open_file(self.folder, "pipeline.yaml") as file:
                return file.read(_MAX_PIPELINE_BYTES).decode(errors="replace")
        except OSError:
            return ""

    @cached_property
    def evaluations(self) -> dict[tuple[int, int], dict[str, float]]:
        """The metrics of each evaluation, by the number of steps before it and by its stage; a resumed run
        repeats some.
        """
        found = {}
        for event in self.events:
            step, stage = event.get("step"), event.get("stage")
            if event["event"] == "evaluated" and isinstance(step, int) and isinstance(stage, int):
                metrics = {name: value for name, value in event.items() if name not in _NON_METRIC_FIELDS}
                found[step, stage] = {name: value for name, value in metrics.items() if _is_number(value)}
        return dict(sorted(found.items()))

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have step records."""
        try:
            found = ranks_with_records(self.folder, "steps")
        except OSError as error:
            raise self._unreadable_error(error) from None
        if len(found) > _MAX_RANKS:
            records = f"{self.folder} has records of {len(found):,} ranks"
            raise NoRunError(f"{records}; at most {_MAX_RANKS:,} are read")
        return found

    @property
    def most_ranks(self) -> int:
        """How many ranks took steps, at most; of those on other hosts there may be no records yet."""
        return max([len(self.ranks), *(ranks for _, ranks in self.world_sizes)])

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none."""
        return self.recorded_steps[-1] if self.recorded_steps else 0

    @cached_property
    def recorded_steps(self) -> Sequence[int]:
        """The steps that any rank has a record of, in order."""
        found: set[int] = set()
        for rank in self.ranks:
            found.update(self._parse_lines(record_file("steps", rank), _step_of))
        return array("q", sorted(found))

    @cached_property
    def stride(self) -> int:
        """One in so many steps has a record (`timings.every`); 0 if none has."""
        return reduce(math.gcd, self.recorded_steps, 0)

    def step_records(self, rank: int, wanted: Callable[[int], bool] | None = None) -> Iterator[StepRecord]:
        """A rank's step records; only those of `wanted` steps, if given."""
        return self._records(record_file("steps", rank), StepRecord, wanted)

    def bucket_records(
        self, rank: int, wanted: Callable[[int], bool] | None = None, *, holding: bytes = b""
    ) -> Iterator[BucketRecord]:
        """A rank's bucket records; only those of `wanted` steps, and only lines that contain `holding`."""
        return self._records(record_file("buckets", rank), BucketRecord, wanted, holding)

    def profiler_records(self, rank: int) -> Iterator[ProfilerRecord]:
        """What torch's profiler recorded on a rank; nothing if it did not run."""
        return self._records(record_file(PROFILE_FOLDER, rank), ProfilerRecord)

    @cached_property
    def profiled_steps(self) -> set[int]:
        """The steps that torch's profiler recorded."""
        records = chain.from_iterable(map(self.profiler_records, self.ranks[:1]))
        intervals = {(record.first_step, record.step) for record in records}
        ends = {step for interval in intervals for step in interval}
        return ends.union(*(steps_between(self.recorded_steps, first, last + 1) for first, last in intervals))

    @cached_property
    def clocks(self) -> "MeasuredClockOffsets":
        """How to compare times of different ranks."""
        found = self.events_of(ClockOffsets)
        return MeasuredClockOffsets([one.monotonic_us for one in found], [one.offset_us for one in found])

    def _records(
        self, name: str, kind: type[_T], wanted: Callable[[int], bool] | None = None, holding: bytes = b""
    ) -> Iterator[_T]:
        decoder = msgspec.json.Decoder(kind)

        def parse(line: bytes) -> _T | None:
            if holding not in line or not (wanted is None or wanted(_step_of(line))):
                return None
            return decoder.decode(line)

        return self._parse_lines(name, parse)

    def _parse_lines(self, name: str, parse: Callable[[bytes], _T | None]) -> Iterator[_T]:
        """What `parse` makes of each line of a file, if there is one: no None, nothing where it fails."""
        junk = InvalidBytes(name)
        try:
            with open_file(self.folder, name) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    try:
                        if not line.startswith(b"{") or b"\0" in line:
                            raise ValueError("no record")
                        found = parse(line)
                    except (ValueError, RecursionError):
                        junk.count_invalid_bytes(len(line))
                        continue
                    if found is not None:
                        yield found
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable_error(error) from None


def _convert_valid(events: Iterable[dict[str, Any]], kind: type[_T]) -> list[_T]:
    """As the kind of record that they should be; without those that are not."""
    found = []
    for event in events:
        with suppress(msgspec.ValidationError):
            found.append(msgspec.convert(event, kind))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _step_of(line: bytes) -> int:
    if (found := _STEP_NUMBER.search(line)) is None:
        raise ValueError("no step")
    return int(found[1])


def steps_between(steps: Sequence[int], low: int, high: int) -> Sequence[int]:
    """The steps from `low` up to, but not including, `high`; `steps` are in order."""
    return steps[bisect_left(steps, low) : bisect_left(steps, high)]


@dataclass(frozen=True)
class MeasuredClockOffsets:
    """How far each rank's clock was ahead of rank 0's, measured from time to time."""

    at_us: list[int]  # when it was measured, on rank 0's clock
    offset_us: list[list[float]]  # for each measurement the offset of every rank

    @cached_property
    def _offsets_by_rank(self) -> list[tuple[list[float], list[float]]]:
        """For each rank when its offset was measured, on its own clock, and the offsets."""
        found = []
        for rank in range(max(map(len, self.offset_us), default=0)):
            known = zip(self.at_us, self.offset_us, strict=True)
            rows = sorted((at + offsets[rank], offsets[rank]) for at, offsets in known if rank < len(offsets))
            found.append(([at for at, _ in rows], [offset for _, offset in rows]))
        return found

    def on_rank0_clock(self, rank: int, at_us: float) -> float:
        """Convert a time on a rank's clock to rank 0's, by linear interpolation between measurements."""
        if rank >= len(self._offsets_by_rank):
            return at_us
        times, offsets = self._offsets_by_rank[rank]
        index = bisect_right(times, at_us)  # on the rank's own clock, which may have started at another time
        if index in (0, len(times)):
            return at_us - offsets[max(0, index - 1)]
        before, length = offsets[index - 1], times[index] - times[index - 1]
        more = offsets[index] - before
        if abs(more) > _MAX_DRIFT_RATE * length:
            return at_us - before  # another clock, as after a restart on another host
        return at_us - before - (at_us - times[index - 1]) / length * more
