"""Predicted against measured: the steps of a stage, their parts, and their buckets.

What was predicted is a file that `ddprun explain --format json` printed. Both are means over steps. Nothing
that the pipeline names is imported.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import IO, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from ddprun import InputError
from ddprun.config.yaml_writer import flow_yaml
from ddprun.predict.costs import WARM_UP_STEPS, own_work_us, without_outliers
from ddprun.report.digest import RunDigest, StageDigest
from ddprun.run_files import MAX_JSON_BYTES, describe_read_error, parse_json
from ddprun.telemetry.reader import steps_between
from ddprun.telemetry.records import StepRecord
from ddprun.units import format_duration, format_world_sizes

_COMPARED_PARTS = ("own work", "hooks", "waiting for the last rank", "waiting for the wire", "step")
"""What a training thread spends a step on; the last is all of it."""

_NOTABLE_DIFFERENCE = 0.1  # a share of what was predicted: of a larger one the part is named


class BucketTimes(NamedTuple):
    """When a bucket was ready and when it was done, in microseconds since its step began."""

    ready_us: float
    done_us: float

    @classmethod
    def mean(cls, times: Sequence["BucketTimes"]) -> "BucketTimes":
        """Of a bucket in all steps and ranks, and of all its exchanges in a step."""
        return cls(fmean(one.ready_us for one in times), fmean(one.done_us for one in times))


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """Predicted and measured times of one stage, in microseconds."""

    stage: str
    sentences: Sequence[str]
    step_parts_us: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # in `_COMPARED_PARTS`
    buckets: Mapping[str, tuple[BucketTimes | None, BucketTimes | None]] = field(default_factory=dict)


# A prediction in a file.


_Us = Annotated[float, Field(strict=True, ge=0, lt=2**63)]
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class _PredictedBucket(BaseModel):
    bucket: Annotated[str, Field(strict=True, max_length=100)]
    ready_us: _Us
    done_us: _Us


class _PredictedTimes(BaseModel):
    step_us: Annotated[float, Field(strict=True, gt=0, lt=2**63)]
    parts_us: dict[str, _Us]
    waits_us: dict[str, _Us]
    buckets: list[_PredictedBucket]

    @property
    def step_parts_us(self) -> dict[str, float]:
        """A step, divided as records divide it."""
        late, hooks_us = self.waits_us.get("late", 0.0), self.waits_us.get("hooks", 0.0)
        wire = sum(self.waits_us.values()) - late - hooks_us
        hooks = self.parts_us.get("hooks", 0.0) + hooks_us
        own = self.step_us - hooks - late - wire
        return dict(zip(_COMPARED_PARTS, (own, hooks, late, wire, self.step_us), strict=True))

    @property
    def bucket_times(self) -> dict[str, BucketTimes]:
        """The times of each bucket, under the name that records have for it."""
        found = defaultdict[str, list[BucketTimes]](list)
        for one in self.buckets:
            found[one.bucket].append(BucketTimes(one.ready_us, one.done_us))
        return {name: BucketTimes.mean(times) for name, times in found.items()}


class _PlannedBucket(BaseModel):
    bucket: _Count
    bytes: _Count


class _PlannedExchange(BaseModel):
    kind: Annotated[str, Field(strict=True, max_length=100)]
    buckets: list[_PlannedBucket]


class _PredictedStage(BaseModel):
    stage: _Count
    kind: str
    sync: Any = None
    hooks: list[str | dict[str, Any]] = []
    cycle: _Count = 1
    exchanges: list[_PlannedExchange] = []
    predicted: _PredictedTimes | None = None


class PredictionFile(BaseModel):
    """What `ddprun explain --link … --format json` printed, as far as it is needed."""

    v: Literal[1]
    measured_run: dict[str, Any] = {}  # to whose records it is fitted: when it `started`
    ranks: _Count
    hosts: _Count
    stages: list[_PredictedStage]

    @classmethod
    def read(cls, file: IO[bytes]) -> "PredictionFile":
        """Parse a prediction file, which anybody may have written; raises InputError."""
        problem = f"{file.name} is not what `ddprun explain --link … --format json` prints"
        try:
            found = cls.model_validate(parse_json(file.read(MAX_JSON_BYTES + 1)))
        except ValueError as error:
            raise InputError(f"{problem}: {describe_read_error(error)}") from None
        if all(stage.predicted is None for stage in found.stages):
            raise InputError(f"{problem}: no stage has `predicted`; `--link` adds it")
        return found


# What was measured: means over ranks and steps, without a stage's first ones and outliers, as in
# `predict.costs`.


@dataclass(slots=True)
class MeasuredStage:
    """A stage of a run: its steps that count, of those that the digest read."""

    digest: RunDigest
    stage: StageDigest
    step_records: dict[int, list[StepRecord]] = field(default_factory=dict)  # by rank
    buckets: dict[str, list[BucketTimes]] = field(default_factory=lambda: defaultdict(list))
    bucket_sizes: set[tuple[str, int]] = field(default_factory=set)  # names, as in `buckets`, and bytes

    def mean_step_parts_us(self, cycle: int) -> dict[str, float]:
        """What a step is made of, in microseconds: means over ranks and whole cycles; empty without one."""
        rows = list[tuple[float, ...]]()
        for lines in self.step_records.values():
            for start in range(0, len(lines) - cycle + 1, cycle):
                some = lines[start : start + cycle]
                names = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us", "step_us")
                hooks, late, wire, step_us = (fmean(getattr(line, name) for line in some) for name in names)
                rows.append(
                    (step_us - hooks - late - wire, hooks, late, wire, step_us)
                )  # as `_COMPARED_PARTS`
        counted = without_outliers(rows, lambda row: row[0])
        return (
            dict(zip(_COMPARED_PARTS, map(fmean, zip(*counted, strict=True)), strict=True)) if counted else {}
        )

    def compare_with_prediction(self, prediction: PredictionFile) -> PredictionComparison:
        """Compare the stage with a prediction, if that is of the same stage."""
        started = self.digest.run.started
        one = next((stage for stage in prediction.stages if stage.stage == self.stage.index), None)
        if one is None or one.predicted is None:
            return PredictionComparison(self.stage.name, ["There is no prediction for this stage."])
        hooks = [next(iter(hook), "") if isinstance(hook, dict) else hook for hook in one.hooks]
        facts = {
            "kind": (one.kind, self.stage.kind),
            "ranks": (f"{prediction.ranks:,}", format_world_sizes(self.digest.run.world_sizes)),
            "hosts": (prediction.hosts, len(set(started.hosts or [""]))),
            "sync": (flow_yaml(one.sync), flow_yaml(self.stage.sync)),
            "hooks": (flow_yaml(hooks), flow_yaml(list(self.stage.hooks))),
        }
        planned = {(f"{sent.kind} {at.bucket}", at.bytes) for sent in one.exchanges for at in sent.buckets}
        planned_sizes, same = dict(sorted(planned)), {name for name, _ in self.bucket_sizes & planned}
        unplanned = [at for at in self.bucket_sizes if at[0] in planned_sizes and at[0] not in same]
        for name, size in sorted(unplanned)[:1]:  # another model, or options of DDP; others differ then, too
            facts[name] = (f"of {planned_sizes[name]:,} bytes", f"of {size:,} bytes")
        differ = [
            f"{name} {predicted} (in the run {actual})"
            for name, (predicted, actual) in facts.items()
            if predicted != actual
        ]
        if differ:
            text = f"The prediction is not compared, because it is for something else: {', '.join(differ)}."
            return PredictionComparison(self.stage.name, [text])
        cycle, stride = max(1, one.cycle), self.digest.run.stride
        if math.gcd(cycle, stride) > 1:  # the same few steps of each cycle are recorded
            text = f"One in {stride:,} steps is recorded, which shows no mean step of a cycle of {cycle:,}: "
            text += f"`timings.every` must not share a factor with {cycle:,}."
            return PredictionComparison(self.stage.name, [text])
        measured = self.mean_step_parts_us(cycle)
        if not measured:
            text = f"Too few steps are recorded: {one.cycle:,} are needed after the first {WARM_UP_STEPS}."
            return PredictionComparison(self.stage.name, [text])
        predicted_us, measured_us = one.predicted.step_us, measured["step"]
        text = f"A step was predicted to take {format_duration(1e-6 * predicted_us)}, and took "
        text += f"{format_duration(1e-6 * measured_us)} ({measured_us / predicted_us - 1:+.0%})."
        if prediction.measured_run.get("started") == started.time:
            text += " The prediction was fitted to this very run, so it was bound to come close."
        predicted = one.predicted.bucket_times
        seen = {name: BucketTimes.mean(times) for name, times in self.buckets.items()}
        parts = {part: (us, measured[part]) for part, us in one.predicted.step_parts_us.items()}
        return PredictionComparison(
            self.stage.name,
            [text, _prediction_error_sentence(parts)],
            parts,
            {name: (predicted.get(name), seen.get(name)) for name in {**predicted, **seen}},
        )


def compare_with_predictions(digest: RunDigest, prediction: PredictionFile) -> list[PredictionComparison]:
    """Compare each stage that has step records with its prediction."""
    wanted = {
        step
        for stage in digest.stages
        for step in steps_between(digest.recorded_steps, stage.first_step, stage.last_step + 1)[
            WARM_UP_STEPS:
        ]
        if step in digest.bucket_sample_steps
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
        for bucket in digest.run.bucket_records(rank, wanted.__contains__):
            at = bisect_right(starts, bucket.ready_us) - 1
            if at < 0 or bucket.ready_us > starts[at] + lines[at].step_us:
                continue  # it was ready in a step that is not read
            if lines[at].step in counted:
                start = lines[at].start_us
                times = BucketTimes(bucket.ready_us - start, bucket.done_us - start)
                name = f"{bucket.kind} {bucket.bucket}"
                found[lines[at].stage].buckets[name].append(times)
                found[lines[at].stage].bucket_sizes.add((name, bucket.bytes))
    return [one.compare_with_prediction(prediction) for one in found.values() if one.step_records]


def _prediction_error_sentence(parts_us: Mapping[str, tuple[float, float]]) -> str:
    """Whether the step differs much from its prediction, and which of its parts does most."""
    more_us = {part: measured - predicted for part, (predicted, measured) in parts_us.items()}
    total_us = more_us.pop("step")
    if abs(total_us) <= _NOTABLE_DIFFERENCE * parts_us["step"][0]:
        return f"The step differs from the prediction by no more than {_NOTABLE_DIFFERENCE:.0%}."
    sign = math.copysign(1.0, total_us)
    most = max(more_us, key=lambda part: more_us[part] * sign)
    by = format_duration(1e-6 * abs(more_us[most]))
    return f"The part that {'grew' if total_us > 0 else 'shrank'} most is {most}, by {by}."
