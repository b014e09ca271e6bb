"""Predicted against measured: the steps of a stage and their buckets, and a difference that is not explained.

What was predicted is a file that `ddprun explain --format json` printed. Both are means over steps. Nothing
that the pipeline names is imported.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ddprun.config.resolved import flow_yaml
from ddprun.predict.costs import WARM_UP
from ddprun.report.digest import RunDigest, StageDigest, straggler_episodes
from ddprun.report.measured import BucketTimes, MeasuredStage, StepPart, numbered_name, read_measured_stages
from ddprun.run_files import parse_json
from ddprun.units import format_count, format_duration

MAX_PREDICTION_BYTES = 64 << 20  # largest size of a prediction file
_NOTABLE_DIFFERENCE = 0.1  # a share of what was predicted: a larger difference wants a reason
_MIN_EXPLAINED_SHARE = 0.5  # of a difference: what accounts for so much of it is its reason
_NEAR_LARGEST_SHARE = 0.8  # of the largest difference of a bucket: the first that is as far off is named
_STARVED_CPU_SHARE = 0.8
"""If ranks had a core for less than this share of the time in which they did not wait, that is the reason why
a step takes longer, unless a rank is late."""


class PredictionFileError(Exception):
    """A file is not what `ddprun explain` prints."""


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


class _Predicted(BaseModel):
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
            name = numbered_name(one.bucket, occurrences[one.bucket])
            found[name] = BucketTimes(one.ready_us, one.done_us)
        return found


class _PredictedStage(BaseModel):
    stage: _Count
    kind: str
    sync: Any = None
    hooks: list[str | dict[str, Any]] = []
    cycle: _Count = 1
    predicted: _Predicted | None = None


class _MeasuredRun(BaseModel):
    started: Annotated[str, Field(strict=True, max_length=100)]


class Prediction(BaseModel):
    """What `ddprun explain --link … --format json` printed, as far as it is needed."""

    v: Literal[1]
    measured_run: _MeasuredRun | None = None  # to whose records it is fitted
    ranks: _Count
    hosts: _Count
    stages: list[_PredictedStage]

    @classmethod
    def read(cls, data: bytes) -> "Prediction":
        """Parse a prediction file, which anybody may have written; raises PredictionFileError."""
        if len(data) > MAX_PREDICTION_BYTES:
            raise PredictionFileError(f"longer than {MAX_PREDICTION_BYTES:,} bytes")
        try:
            found = cls.model_validate(parse_json(data))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise PredictionFileError(f"{place}{': ' * bool(place)}{fault['msg']}") from None
        except ValueError as error:
            raise PredictionFileError(str(error)) from None
        if all(stage.predicted is None for stage in found.stages):
            raise PredictionFileError("no stage has `predicted`; `--link` adds it")
        return found


# Both, side by side.


def compare_stages(digest: RunDigest, prediction: Prediction) -> list[StageComparison]:
    """Compare each stage of a run with a prediction."""
    measured = read_measured_stages(digest)
    return [
        _StageComparer(digest, stage, measured[stage.index]).compare_with(prediction)
        for stage in digest.stages
        if stage.index in measured
    ]


@dataclass(frozen=True, slots=True)
class _StageComparer:
    """A stage of a run, and what is known of it."""

    digest: RunDigest
    stage: StageDigest
    measured: MeasuredStage

    def compare_with(self, prediction: Prediction) -> StageComparison:
        """Compare the stage with a prediction, if that is of the same stage."""
        started = self.digest.run.started
        one = next((stage for stage in prediction.stages if stage.stage == self.stage.index), None)
        if one is None or one.predicted is None:
            return StageComparison(self.stage.name, ["There is no prediction for this stage."])
        hooks = [next(iter(hook), "") if isinstance(hook, dict) else hook for hook in one.hooks]
        facts = {
            "kind": (one.kind, self.stage.kind),
            "ranks": (prediction.ranks, started.world_size or self.digest.rank_count),
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
        measured = self.measured.parts(max(1, one.cycle))
        if not measured:
            text = f"Too few steps are recorded: {one.cycle:,} are needed after the first {WARM_UP}."
            return StageComparison(self.stage.name, [text])
        predicted_us, measured_us = one.predicted.step_us, measured["step"]
        text = f"A step was predicted to take {format_duration(1e-6 * predicted_us)}, and took "
        text += f"{format_duration(1e-6 * measured_us)} ({_percent_change(predicted_us, measured_us)})."
        if prediction.measured_run and prediction.measured_run.started == started.time:
            text += " The prediction was fitted to this very run, so it was bound to come close."
        predicted = one.predicted.bucket_times
        names = dict.fromkeys((*predicted, *self.measured.buckets))
        found = StageComparison(
            self.stage.name,
            [text],
            {part: (us, measured[part]) for part, us in one.predicted.step_parts.items()},
            {name: (predicted.get(name), self.measured.mean_times(name)) for name in names},
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
        if late_us:
            # What holds up one bucket holds up those behind it: the first of them is named.
            least_us = _NEAR_LARGEST_SHARE * max(map(abs, late_us.values()))
            bucket, us = next((name, us) for name, us in late_us.items() if abs(us) >= least_us)
            text = f"{bucket[:1].upper()}{bucket[1:]} was done {_difference_text(us, 'later', 'earlier')} "
            text += f"than predicted ({_percent_change(*done_us[bucket])})"
            if len(late_us) > 1:
                others = format_count(len(late_us) - 1, "other bucket")
                text += f", and {others} by more than {_NOTABLE_DIFFERENCE:.0%}"
            return f"{text}: {self._reason(us, found, bucket)}."
        if abs(us := measured_us - predicted_us) > _NOTABLE_DIFFERENCE * predicted_us:
            text = f"The step took {_difference_text(us, 'longer', 'less')} than predicted"
            return f"{text}: {self._reason(us, found, None)}."
        text = "Neither the step nor a bucket differs from the prediction by more than"
        return f"{text} {_NOTABLE_DIFFERENCE:.0%}."

    def _reason(self, us: float, found: StageComparison, bucket: str | None) -> str:
        for amount_us, reason in self._evidence(found, bucket):
            if amount_us * math.copysign(1.0, us) >= _MIN_EXPLAINED_SHARE * abs(us):
                return reason
        return "the records show no reason"

    def _evidence(self, found: StageComparison, bucket: str | None) -> Iterator[tuple[float, str]]:
        """Causes that the records show: by how much later each makes the bucket, or the step, and a text."""
        more_us = {part: measured - predicted for part, (predicted, measured) in found.step_parts_us.items()}
        done_us = {name: measured.done_us for name, (_, measured) in found.buckets.items() if measured}
        predicted_times, measured_times = found.buckets[bucket] if bucket else (None, None)
        last_bucket = max(done_us, key=done_us.__getitem__, default="")
        late_us, last = self.measured.wait_for_last_rank(bucket or last_bucket)
        waited = _unsigned_duration(late_us)
        text = f"ranks waited {waited} for the last one, which was not always the same rank"
        if last is not None:
            episodes = straggler_episodes(self.digest, self.stage)
            causes = [f", late in {one.cause}" for one in episodes if one.rank == last]
            text = f"rank {last} had it ready {waited} after the others{''.join(causes[:1])}"
        yield (late_us - found.step_parts_us["late"][0] if bucket else more_us["late"]), text
        if (share := self.measured.cpu_share) < _STARVED_CPU_SHARE:
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


def _unsigned_duration(us: float) -> str:
    return format_duration(1e-6 * abs(us))


def _difference_text(us: float, more: str, less: str) -> str:
    return f"{_unsigned_duration(us)} {more if us > 0 else less}"


def _percent_change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else "+∞"
