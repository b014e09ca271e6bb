"""Predicted against measured: the steps of a stage and their buckets, and a difference that is not explained.

What was predicted is a file that `ddprun explain --format json` printed. Both are means over steps. Nothing
that the pipeline names is imported.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from ddprun.config.resolved import flow_yaml
from ddprun.predict.costs import WARM_UP, own_work_us, without_outliers
from ddprun.report.digest import RunDigest, StageDigest, straggler_episodes
from ddprun.run_files import describe_invalid, parse_json
from ddprun.telemetry.reader import steps_between
from ddprun.telemetry.records import StepRecord
from ddprun.units import format_count, format_duration, format_world_sizes

StepPart = Literal["own", "hooks", "late", "wire", "step"]
"""What a training thread spends a step on: its own work, hooks, waiting for the last rank, and for the wire.
The last is all of it."""

MAX_PREDICTION_BYTES = 64 << 20  # largest size of a prediction file
_MIN_LAST_RANK_SHARE = 0.75  # of the steps: in so many a rank must be the last to be named
_NOTABLE_DIFFERENCE = 0.1  # a share of what was predicted: a larger difference wants a reason
_MIN_EXPLAINED_SHARE = 0.5  # of a difference: what accounts for so much of it is its reason
_NEAR_LARGEST_SHARE = 0.8  # of the largest difference of a bucket: the first that is as far off is named
_STARVED_CPU_SHARE = 0.8
"""If ranks had a core for less than this share of the time in which they did not wait, that is the reason why
a step takes longer, unless a rank is late."""


class PredictionFileError(Exception):
    """A file is not what `ddprun explain` prints."""


class BucketTimes(NamedTuple):
    """When a bucket was ready and when it was done, in microseconds since its step began."""

    ready_us: float
    done_us: float


@dataclass(frozen=True, slots=True)
class StageComparison:
    """Predicted and measured times of one stage, in microseconds."""

    stage: str
    sentences: Sequence[str]
    step_parts_us: Mapping[StepPart, tuple[float, float]] = field(default_factory=dict)
    buckets: Mapping[str, tuple[BucketTimes | None, BucketTimes | None]] = field(default_factory=dict)
    sweep: Sequence[tuple[int, float, float]] = ()
    """Predicted for other numbers of ranks: how many, a step, and how long it waits."""


# A prediction in a file.


_Us = Annotated[float, Field(strict=True, ge=0, lt=2**63)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _PredictedBucket(BaseModel):
    bucket: Annotated[str, Field(strict=True, max_length=100)]
    ready_us: _Us
    done_us: _Us


class _PredictedSweepRow(BaseModel):
    ranks: Annotated[int, Field(strict=True, gt=0, lt=2**31)]
    step_us: Annotated[float, Field(strict=True, gt=0, lt=2**63)]
    exposed_us: _Us


class _PredictedTimes(BaseModel):
    step_us: Annotated[float, Field(strict=True, gt=0, lt=2**63)]
    parts_us: dict[str, _Us]
    waits_us: dict[str, _Us]
    buckets: list[_PredictedBucket]
    sweep: Annotated[list[_PredictedSweepRow], Field(max_length=100)] = []

    @property
    def step_parts(self) -> dict[StepPart, float]:
        """A step, divided as records divide it."""
        late, hooks_us = self.waits_us.get("late", 0.0), self.waits_us.get("hooks", 0.0)
        wire = sum(self.waits_us.values()) - late - hooks_us
        hooks = self.parts_us.get("hooks", 0.0) + hooks_us
        own = self.step_us - hooks - late - wire
        return {"own": own, "hooks": hooks, "late": late, "wire": wire, "step": self.step_us}

    @property
    def bucket_times(self) -> dict[str, BucketTimes]:
        """The times of each bucket, under the name that records have for it."""
        occurrences = Counter[str]()
        found = {}
        for one in self.buckets:
            occurrences[one.bucket] += 1
            name = _numbered_name(one.bucket, occurrences[one.bucket])
            found[name] = BucketTimes(one.ready_us, one.done_us)
        return found


class _PredictedStage(BaseModel):
    stage: _Count
    kind: str
    sync: Any = None
    hooks: list[str | dict[str, Any]] = []
    cycle: _Count = 1
    predicted: _PredictedTimes | None = None


class PredictionFile(BaseModel):
    """What `ddprun explain --link … --format json` printed, as far as it is needed."""

    v: Literal[1]
    measured_run: dict[str, Any] = {}  # to whose records it is fitted: when it `started`
    ranks: _Count
    hosts: _Count
    stages: list[_PredictedStage]

    @classmethod
    def read(cls, data: bytes) -> "PredictionFile":
        """Parse a prediction file, which anybody may have written; raises PredictionFileError."""
        if len(data) > MAX_PREDICTION_BYTES:
            raise PredictionFileError(f"longer than {MAX_PREDICTION_BYTES:,} bytes")
        try:
            found = cls.model_validate(parse_json(data))
        except ValueError as error:
            raise PredictionFileError(describe_invalid(error)) from None
        if all(stage.predicted is None for stage in found.stages):
            raise PredictionFileError("no stage has `predicted`; `--link` adds it")
        return found


# What was measured: means over ranks and steps, without a stage's first ones and outliers, as in
# `predict.costs`.


class _BucketSample(NamedTuple):
    """One bucket in one step of one rank, in microseconds since the step began."""

    rank: int
    step: int
    ready_us: float
    done_us: float
    wait_for_last_us: float | None  # until the last rank has it ready; None: not known


@dataclass(slots=True)
class MeasuredStage:
    """A stage of a run: its steps that count, of those that the digest read."""

    digest: RunDigest
    stage: StageDigest
    step_records: dict[int, list[StepRecord]] = field(default_factory=dict)  # by rank
    buckets: dict[str, list[_BucketSample]] = field(default_factory=lambda: defaultdict(list))

    def mean_step_parts_us(self, cycle: int) -> dict[StepPart, float]:
        """What a step is made of, in microseconds: means over ranks and whole cycles; empty without one."""
        rows = list[tuple[float, ...]]()
        for lines in self.step_records.values():
            for start in range(0, len(lines) - cycle + 1, cycle):
                some = lines[start : start + cycle]
                names = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us", "step_us")
                hooks, late, wire, step_us = (fmean(getattr(line, name) for line in some) for name in names)
                rows.append((step_us - hooks - late - wire, hooks, late, wire, step_us))
        parts: tuple[StepPart, ...] = ("own", "hooks", "late", "wire", "step")
        counted = without_outliers(rows, lambda row: row[0])
        return dict(zip(parts, map(fmean, zip(*counted, strict=True)), strict=True)) if counted else {}

    def mean_times(self, name: str) -> BucketTimes | None:
        """Means over steps and ranks; None without such a bucket."""
        seen = self.buckets.get(name)
        if not seen:
            return None
        return BucketTimes(fmean(one.ready_us for one in seen), fmean(one.done_us for one in seen))

    def mean_wait_and_last_rank(self, name: str) -> tuple[float, int | None]:
        """How many microseconds ranks wait until the last of them has a bucket ready; and which rank is the
        last in most steps, or None.

        The time is the mean over the other ranks; over all ranks if the last one is not always the same.
        """
        by_step: dict[int, dict[int, float]] = defaultdict(dict)
        last_ready_us: dict[int, float] = defaultdict(float)
        seen = self.buckets.get(name, ())
        for one in seen:
            last_ready_us[one.step] = max(last_ready_us[one.step], one.ready_us)
        for one in seen:
            # A collective ends at a different time on each rank, and so does the next step begin. If ranks
            # have a gradient bucket ready at different times for this reason alone, that costs nothing.
            since_own_start = last_ready_us[one.step] - one.ready_us
            waited_us = since_own_start if name.startswith("gradient") else one.wait_for_last_us
            if waited_us is not None:
                by_step[one.step][one.rank] = waited_us
        if not by_step:
            return 0.0, None
        last, times = Counter(min(late, key=late.__getitem__) for late in by_step.values()).most_common(1)[0]
        named = last if times >= _MIN_LAST_RANK_SHARE * len(by_step) else None
        waited = [us for late in by_step.values() for rank, us in late.items() if rank != named]
        return fmean(waited or [0.0]), named

    @property
    def cpu_share_while_working(self) -> float:
        """The share of the time without waiting in which ranks' processes had a core; 1 if not known."""
        shares: list[float] = []
        for line in (line for lines in self.step_records.values() for line in lines):
            working_us = line.step_us - line.exposed_wait_us - line.exposed_wire_us
            if line.cpu_us > 0 < working_us:
                shares.append(line.cpu_us / working_us)
        return median(shares or [1.0])

    def compare_with(self, prediction: PredictionFile) -> StageComparison:
        """Compare the stage with a prediction, if that is of the same stage."""
        started = self.digest.run.started
        one = next((stage for stage in prediction.stages if stage.stage == self.stage.index), None)
        if one is None or one.predicted is None:
            return StageComparison(self.stage.name, ["There is no prediction for this stage."])
        hooks = [next(iter(hook), "") if isinstance(hook, dict) else hook for hook in one.hooks]
        facts = {
            "kind": (one.kind, self.stage.kind),
            "ranks": (f"{prediction.ranks:,}", format_world_sizes(self.digest.run.world_sizes)),
            "hosts": (prediction.hosts, len(set(started.hosts or [""]))),
            "sync": (flow_yaml(one.sync), flow_yaml(self.stage.sync)),
            "hooks": (flow_yaml(hooks), flow_yaml(list(self.stage.hooks))),
        }
        differ = [
            f"{name} {predicted} (in the run {actual})"
            for name, (predicted, actual) in facts.items()
            if predicted != actual
        ]
        if differ:
            text = f"The prediction is not compared, because it is for something else: {', '.join(differ)}."
            return StageComparison(self.stage.name, [text])
        measured = self.mean_step_parts_us(max(1, one.cycle))
        if not measured:
            text = f"Too few steps are recorded: {one.cycle:,} are needed after the first {WARM_UP}."
            return StageComparison(self.stage.name, [text])
        predicted_us, measured_us = one.predicted.step_us, measured["step"]
        text = f"A step was predicted to take {format_duration(1e-6 * predicted_us)}, and took "
        text += f"{format_duration(1e-6 * measured_us)} ({_percent_change(predicted_us, measured_us)})."
        if prediction.measured_run.get("started") == started.time:
            text += " The prediction was fitted to this very run, so it was bound to come close."
        predicted = one.predicted.bucket_times
        names = dict.fromkeys((*predicted, *self.buckets))
        found = StageComparison(
            self.stage.name,
            [text],
            {part: (us, measured[part]) for part, us in one.predicted.step_parts.items()},
            {name: (predicted.get(name), self.mean_times(name)) for name in names},
            [(row.ranks, row.step_us, row.exposed_us) for row in one.predicted.sweep],
        )
        return replace(found, sentences=[text, self._difference_sentence(found)])

    def _difference_sentence(self, found: StageComparison) -> str:
        """A sentence on the first bucket, or else the step, that differs much, with the likely reason."""
        done_us = {
            name: (predicted.done_us, measured.done_us)
            for name, (predicted, measured) in found.buckets.items()
            if predicted and measured
        }
        late_us = {
            name: after - before
            for name, (before, after) in done_us.items()
            if abs(after - before) > _NOTABLE_DIFFERENCE * before
        }
        predicted_us, measured_us = found.step_parts_us["step"]
        us, bucket = measured_us - predicted_us, None
        if late_us:
            # What holds up one bucket holds up those behind it: the first of them is named.
            least_us = _NEAR_LARGEST_SHARE * max(map(abs, late_us.values()))
            bucket, us = next((name, us) for name, us in late_us.items() if abs(us) >= least_us)
            text = f"{bucket[:1].upper()}{bucket[1:]} was done {_difference_text(us, 'later', 'earlier')} "
            text += f"than predicted ({_percent_change(*done_us[bucket])})"
            if len(late_us) > 1:
                others = format_count(len(late_us) - 1, "other bucket")
                text += f", and {others} by more than {_NOTABLE_DIFFERENCE:.0%}"
        elif abs(us) > _NOTABLE_DIFFERENCE * predicted_us:
            text = f"The step took {_difference_text(us, 'longer', 'less')} than predicted"
        else:
            text = "Neither the step nor a bucket differs from the prediction by more than"
            return f"{text} {_NOTABLE_DIFFERENCE:.0%}."
        least_us, sign = _MIN_EXPLAINED_SHARE * abs(us), math.copysign(1.0, us)
        causes = self._candidate_causes(found, bucket)
        reasons = (why for amount_us, why in causes if amount_us * sign >= least_us)
        return f"{text}: {next(reasons, 'the records show no reason')}."

    def _candidate_causes(self, found: StageComparison, bucket: str | None) -> Iterator[tuple[float, str]]:
        """Causes that the records show: by how much later each makes the bucket, or the step, and a text."""
        more_us = {part: measured - predicted for part, (predicted, measured) in found.step_parts_us.items()}
        done_us = {name: measured.done_us for name, (_, measured) in found.buckets.items() if measured}
        predicted_times, measured_times = found.buckets[bucket] if bucket else (None, None)
        last_bucket = max(done_us, key=done_us.__getitem__, default="")
        late_us, last = self.mean_wait_and_last_rank(bucket or last_bucket)
        waited = format_duration(1e-6 * late_us)
        text = f"ranks waited {waited} for the last one, which was not always the same rank"
        if last is not None:
            episodes = straggler_episodes(self.digest, self.stage)
            causes = [f", late in {one.cause}" for one in episodes if one.rank == last]
            text = f"rank {last} had it ready {waited} after the others{''.join(causes[:1])}"
        yield (late_us - found.step_parts_us["late"][0] if bucket else more_us["late"]), text
        if (share := self.cpu_share_while_working) < _STARVED_CPU_SHARE:
            text = "ranks share too few cores: each had a core for"
            yield math.inf, f"{text} {share:.0%} of the time in which it did not wait"
        if predicted_times and measured_times:
            us = measured_times.ready_us - predicted_times.ready_us
            yield us, f"it was ready {_difference_text(us, 'later', 'earlier')}"
        else:
            us = more_us["own"]
            yield us, f"ranks' own work took {_difference_text(us, 'longer', 'less')}"
        for us, name in ((more_us["hooks"], "hooks"), (more_us["wire"], "the wire")):
            yield us, f"{name} took {_difference_text(us, 'longer', 'less')}"


def read_measured_stages(digest: RunDigest) -> dict[int, MeasuredStage]:
    """What is measured of each stage, by its index."""
    wanted = {
        step
        for stage in digest.stages
        for step in steps_between(digest.recorded_steps, stage.first_step, stage.last_step + 1)[WARM_UP:]
        if step in digest.sampled_steps
    }
    found = {stage.index: MeasuredStage(digest, stage) for stage in digest.stages}
    for rank in digest.run.ranks:
        lines = [line for line in digest.run.step_records(rank, wanted.__contains__) if line.step_us > 0]
        lines.sort(key=lambda line: line.start_us)
        starts = [line.start_us for line in lines]
        counted = set[int]()
        for index, of_stage in groupby(lines, key=lambda line: line.stage):
            own: list[StepRecord] = list(of_stage)
            found[index].step_records[rank] = own
            counted |= {line.step for line in without_outliers(own, own_work_us)}
        occurrences = Counter[tuple[int, str]]()
        for bucket in digest.run.bucket_records(rank, wanted.__contains__):
            at = bisect_right(starts, bucket.ready_us) - 1
            if at < 0 or bucket.ready_us > starts[at] + lines[at].step_us:
                continue  # it was ready in a step that is not read
            name = f"{bucket.kind} {bucket.bucket}"
            occurrences[bucket.step, name] += 1
            name = _numbered_name(name, occurrences[bucket.step, name])
            if lines[at].step in counted:
                ready, start, all_ready = bucket.ready_us, lines[at].start_us, bucket.all_ready_us
                waited = None if all_ready is None else max(0.0, all_ready - ready)
                sample = _BucketSample(rank, lines[at].step, ready - start, bucket.done_us - start, waited)
                found[lines[at].stage].buckets[name].append(sample)
    return {index: one for index, one in found.items() if one.step_records}


def compare_stages(digest: RunDigest, prediction: PredictionFile) -> list[StageComparison]:
    return [one.compare_with(prediction) for one in read_measured_stages(digest).values()]


def _numbered_name(name: str, occurrence: int) -> str:
    """A bucket's name, with a number if it is sent again in a step, as buffers are with accumulation."""
    return name if occurrence == 1 else f"{name} ({occurrence})"


def _difference_text(us: float, more: str, less: str) -> str:
    return f"{format_duration(1e-6 * abs(us))} {more if us > 0 else less}"


def _percent_change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else "+∞"
