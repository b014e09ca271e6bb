"""Reading the folder of a run that may still go on, was killed, is very long, or was made by somebody else.

Nothing in the folder is believed. No link or pipe is followed, and a line that is not a record as
`docs/records.md` describes it is skipped: a torn last line, and any line with a missing or a wrong field.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model, model_validator

from ddprun.run_files import MAX_LINE_BYTES, JunkBudget, open_file, parse_json, read_json_object
from ddprun.telemetry.steps import PARTS
from ddprun.telemetry.writer import EVENTS_FILE, PROFILE_FOLDER, ranks_with_records, record_file

_STEP_NUMBER = re.compile(rb'"step": ?(\d{1,18})\b')
_T = TypeVar("_T")
_MAX_SUMMARY_BYTES = 256 << 20
_MAX_PIPELINE_BYTES = 64 << 10
_MAX_RANKS = 1_000
_MAX_PROFILED_STEPS = 100_000
_MAX_DRIFT = 1e-3  # clocks of computers drift by less than this
_EVENT_NAMES = {
    "checkpoint_skipped": "damaged checkpoint not used",
    "data_differs": "ranks read different data",
    "nonfinite": "not finite",
    "reconciled": "ranks made equal",
    "stage_started": "stage",
}


# What readers rely on in each kind of record. Other fields may be there.

_Number = Annotated[float, Field(strict=True, gt=-(2**63), lt=2**63)]
_PositiveNumber = Annotated[float, Field(strict=True, gt=0, lt=2**63)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_StepNumber = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
_OPTIONAL: Any = Field(default=None)  # may be left out, but must not be null


class _Machine(BaseModel):
    rss_bytes: _Number
    load: _Number
    device_bytes: _Number | None


class _Step(BaseModel):
    step: _StepNumber
    stage: _Count
    samples: _Number
    loss: _Number | None
    mean_loss: _Number | None
    start_us: _Number
    step_us: _Number
    lr: list[_Number | None] | None = None
    grad_norm: _Number | None = None
    group_grad_norms: list[_Number | None] | None = None
    laps: list[tuple[str, _Number]] = _OPTIONAL
    waits: list[tuple[_Number, _Number]] = _OPTIONAL
    machine: _Machine = _OPTIONAL


class _Leg(BaseModel):
    op: str
    group: str
    dtype: str
    bytes: _Number
    wire_bytes: _Number
    start_us: _Number
    done_us: _Number


class _Fidelity(BaseModel):
    cosine: _Number | None
    relative_l2: _Number | None


class _Bucket(BaseModel):
    step: _StepNumber
    stage: _Count
    kind: Literal["gradient", "delta", "parameters", "buffers", "optimizer"]
    bucket: _Count
    params: list[str]
    hooks: list[str]
    legs: list[_Leg]
    bytes: _Number
    wire_bytes: _Number
    between_hosts_bytes: _Number
    ready_us: _Number
    done_us: _Number
    encode_us: _Number
    decode_us: _Number
    all_ready_us: _Number | None = None
    params_ready_us: list[_Number | None] = _OPTIONAL
    completed_by: str | None = None
    numel: _Count = _OPTIONAL
    fidelity: _Fidelity = _OPTIONAL


class _ProfilerRecord(BaseModel):
    step: _StepNumber
    first_step: _StepNumber
    track: str
    ph: str
    name: str
    cat: str
    args: dict[str, Any]
    start_us: _Number
    us: _Number = _OPTIONAL
    id: _Count = _OPTIONAL

    @model_validator(mode="after")
    def _check_profiler_record(self) -> Self:
        has_length_or_id = bool({"us", "id"} & self.model_fields_set)
        if not has_length_or_id or not 0 <= self.step - self.first_step < _MAX_PROFILED_STEPS:
            raise ValueError
        return self


class _Episode(BaseModel):
    cause: str
    bucket: _Count | None
    params: list[str]
    late_us: _Number
    step_us: _PositiveNumber
    first_step: _Count
    last_step: _Count

    @model_validator(mode="after")
    def _check_step_order(self) -> Self:
        if self.first_step > self.last_step:
            raise ValueError
        return self


class _Event(BaseModel):
    event: str
    monotonic_us: _Number = _OPTIONAL


class _ClockOffsets(_Event):
    monotonic_us: _Number
    offset_us: list[_Number]
    error_us: list[_Number] = _OPTIONAL


class _Started(_Event):
    hosts: list[str] = _OPTIONAL
    world_size: _Count = _OPTIONAL
    groups: list[str] = _OPTIONAL
    time: str = _OPTIONAL


class _StageStarted(_Event):
    stage: _Count
    kind: str = _OPTIONAL
    hooks: list[str] = _OPTIONAL


class _Evaluated(_Event):
    stage: _Count
    step: _Count


class _Straggler(_Event, _Episode):
    straggler: _Count


class _CheckpointWritten(_Event):
    step: _Count
    seconds: _Number


class _SummaryEpisode(_Episode):
    rank: _Count


class _Summary(BaseModel):
    stragglers: list[_SummaryEpisode] = _OPTIONAL
    metrics: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    stages: list[dict[str, Any]] = _OPTIONAL
    steps: _Count = _OPTIONAL
    samples: _Count = _OPTIONAL
    wire_bytes: _Count = _OPTIONAL
    steps_per_s: _Number = _OPTIONAL
    seconds: _Number = _OPTIONAL
    exposed_communication_s: _Number = _OPTIONAL
    seconds_in_steps: _Number = _OPTIONAL


_NON_METRIC_FIELDS = ("event", "level", "time", "monotonic_us", "rank", "stage", "step", "samples")
_Check = Callable[[Any], bool]


def _check(model: type[BaseModel]) -> _Check:
    return model.__pydantic_validator__.isinstance_python


_parts: dict[str, Any] = dict.fromkeys(PARTS, (_Number, ...))
_is_step = _check(create_model("_StepWithParts", __base__=_Step, **_parts))
_is_bucket = _check(_Bucket)
_is_profiler_record = _check(_ProfilerRecord)
_is_any_event = _check(_Event)
_IS_EVENT = {
    "clock_offsets": _check(_ClockOffsets),
    "started": _check(_Started),
    "stage_started": _check(_StageStarted),
    "evaluated": _check(_Evaluated),
    "straggler": _check(_Straggler),
    "checkpoint_written": _check(_CheckpointWritten),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _is_event(value: Any) -> bool:
    return _is_any_event(value) and _IS_EVENT.get(value["event"], _is_any_event)(value)


def _without_invalid_fields(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary without those fields whose values are invalid."""
    try:
        _Summary.model_validate(summary)
        wrong = set()
    except ValidationError as error:
        wrong = {fault["loc"][0] for fault in error.errors()}
    return {name: value for name, value in summary.items() if name not in wrong}


def event_name(event: str) -> str:
    """A kind of event as a reader would call it."""
    return _EVENT_NAMES.get(event, event.replace("_", " "))


class NoRunError(Exception):
    """The folder is not a run's: bad input."""


@dataclass(frozen=True)
class Run:
    """The folder of one run.

    Raises:
        NoRunError: it is not a run's folder, or cannot be read.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            open_file(self.folder, EVENTS_FILE).close()
        except FileNotFoundError:
            what = "has no events.jsonl" if self.folder.is_dir() else "does not exist"
            raise NoRunError(f"{self.folder} is not the folder of a run: it {what}") from None
        except OSError as error:
            raise self._cannot_be_read(error) from None

    def _cannot_be_read(self, error: OSError) -> NoRunError:
        return NoRunError(f"{self.folder} cannot be read: {error.strerror}")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, in order of time."""
        return list(self._lines(EVENTS_FILE, _is_event))

    def first_event(self, event: str) -> dict[str, Any] | None:
        """The first event of a kind."""
        return next(iter(self.events_of_kind(event)), None)

    def events_of_kind(self, event: str) -> list[dict[str, Any]]:
        """All events of a kind."""
        return [one for one in self.events if one["event"] == event]

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """`summary.json`; None if the run has not ended, or was killed."""
        try:
            return _without_invalid_fields(
                read_json_object(self.folder, "summary.json", _MAX_SUMMARY_BYTES, finite=False)
            )
        except (OSError, ValueError):
            return None

    @cached_property
    def pipeline_text(self) -> str:
        """`pipeline.yaml` as far as it may reach; "" if it cannot be read."""
        try:
            with open_file(self.folder, "pipeline.yaml") as file:
                return file.read(_MAX_PIPELINE_BYTES).decode(errors="replace")
        except OSError:
            return ""

    @cached_property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """The metrics of each evaluation, by the number of steps before it; a resumed run repeats some."""
        found = {}
        for event in self.events_of_kind("evaluated"):
            metrics = {name: value for name, value in event.items() if name not in _NON_METRIC_FIELDS}
            found[event["step"]] = {name: value for name, value in metrics.items() if _is_number(value)}
        return dict(sorted(found.items()))

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have step records."""
        try:
            found = ranks_with_records(self.folder, "steps")
        except OSError as error:
            raise self._cannot_be_read(error) from None
        if len(found) > _MAX_RANKS:
            raise NoRunError(
                f"{self.folder} has records of {len(found):,} ranks; at most {_MAX_RANKS:,} are read"
            )
        return found

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none."""
        return self.recorded_steps[-1] if self.recorded_steps else 0

    @cached_property
    def recorded_steps(self) -> Sequence[int]:
        """The steps that any rank has a record of, in order."""
        found: set[int] = set()
        for rank in self.ranks:
            found.update(self._read(record_file("steps", rank), _step_of))
        return array("q", sorted(found))

    def step_records(
        self, rank: int, wanted: Callable[[int], bool] | None = None
    ) -> Iterator[dict[str, Any]]:
        """A rank's step records; only those of `wanted` steps, if given."""
        return self._lines(record_file("steps", rank), _is_step, wanted)

    def bucket_records(
        self, rank: int, wanted: Callable[[int], bool] | None = None, *, holding: bytes = b""
    ) -> Iterator[dict[str, Any]]:
        """A rank's bucket records; only those of `wanted` steps, and only lines that contain `holding`."""
        return self._lines(record_file("buckets", rank), _is_bucket, wanted, holding)

    def profiler_records(self, rank: int) -> Iterator[dict[str, Any]]:
        """What torch's profiler recorded on a rank; nothing if it did not run."""
        return self._lines(record_file(PROFILE_FOLDER, rank), _is_profiler_record)

    @cached_property
    def profiled_steps(self) -> set[int]:
        """The steps that torch's profiler recorded."""
        intervals = {
            (line["first_step"], line["step"])
            for rank in self.ranks[:1]
            for line in self.profiler_records(rank)
        }
        ends = {step for interval in intervals for step in interval}
        return ends.union(*(between(self.recorded_steps, first, last + 1) for first, last in intervals))

    @cached_property
    def clocks(self) -> "Clocks":
        """How to compare times of different ranks."""
        found = self.events_of_kind("clock_offsets")
        return Clocks([one["monotonic_us"] for one in found], [one["offset_us"] for one in found])

    def _lines(
        self, name: str, is_record: _Check, wanted: Callable[[int], bool] | None = None, holding: bytes = b""
    ) -> Iterator[dict[str, Any]]:
        def parse(line: bytes) -> Any:
            if holding not in line or not (wanted is None or wanted(_step_of(line))):
                return None
            found = parse_json(line, finite=False)
            if not is_record(found):
                raise ValueError("no record")
            return found

        return self._read(name, parse)

    def _read(self, name: str, parse: Callable[[bytes], _T | None]) -> Iterator[_T]:
        """What `parse` makes of the lines of a file, which may be missing; not None, and not those for which
        it raises a ValueError: they are no records.
        """
        junk = JunkBudget(name)
        try:
            with open_file(self.folder, name) as file:
                while line := file.readline(MAX_LINE_BYTES):
                    try:
                        if not line.startswith(b"{") or b"\0" in line:
                            raise ValueError("no record")
                        found = parse(line)
                    except ValueError:
                        junk.spend(len(line))
                        continue
                    if found is not None:
                        yield found
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._cannot_be_read(error) from None


def _step_of(line: bytes) -> int:
    if (found := _STEP_NUMBER.search(line)) is None:
        raise ValueError("no step")
    return int(found[1])


def between(steps: Sequence[int], low: int, high: int) -> Sequence[int]:
    """The steps from `low` up to, but not including, `high`; `steps` are in order."""
    return steps[bisect_left(steps, low) : bisect_left(steps, high)]


@dataclass(frozen=True)
class Clocks:
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
        """Convert a time on a rank's clock to rank 0's clock. Between two measurements, the drift is
        interpolated linearly.
        """
        if rank >= len(self._offsets_by_rank):
            return at_us
        times, offsets = self._offsets_by_rank[rank]
        index = bisect_right(times, at_us)  # on the rank's own clock, which may have started at another time
        if index == 0:
            return at_us - offsets[0]
        before = offsets[index - 1]
        if index == len(times):
            return at_us - before
        length, after = times[index] - times[index - 1], offsets[index]
        if length <= 0 or abs(after - before) > _MAX_DRIFT * length:
            return at_us - before  # another clock, as after a restart on another host
        return at_us - before - (at_us - times[index - 1]) / length * (after - before)
