"""What the records of a run say about the costs of its steps: computation, hooks, and how late ranks are."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np

from ddprun import InputError
from ddprun.config import LoadedPipeline
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import BucketRecord, StepRecord
from ddprun.units import format_world_sizes

PARTS_WITHOUT_EXCHANGE = ("data_us", "forward_us", "backward_us", "optimizer_us", "sync_us", "other_us")
"""Parts of a step in which the training thread works for itself."""

_StepT = TypeVar("_StepT")

WARM_UP_STEPS = 3  # first steps of a stage that do not count
_OUTLIER = 4.0  # times the median of its stage: something else happened in that step


class CostsUnknownError(InputError):
    """What a step costs is not known: a run's records do not tell, or no stage of the pipeline trains."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A cost that grows with bytes: `base + slope * bytes`, both at least 0."""

    base: float = 0.0
    slope: float = 0.0

    def at(self, nbytes: float) -> float:
        return self.base + self.slope * nbytes

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> "LinearCost":
        """The least-squares fit to (bytes, cost) points. Points of one size give a slope without a base."""
        x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
        if np.ptp(x) > 0:
            slope, base = map(float, np.polyfit(x, y, 1))
            if slope >= 0 and base >= 0:
                return cls(base, slope)
            if slope < 0:
                return cls(float(y.mean()))
        squares = float((x * x).sum())
        return cls(0.0, float((x * y).sum()) / squares) if squares else cls(float(y.mean()))


class LastRankLateness:
    """How much later the last of n ranks is than the mean of them, from the spread of each rank's steps.

    With n draws from a distribution, the expected largest is an order statistic, not a mean: of m sorted
    values, the i-th has a share of (i/m)^n - ((i-1)/m)^n in it. Over several steps without an exchange, what
    a rank is always late by adds up, and chance grows with the square root of the steps. `own_us`: of each
    rank, how long it took for each of some steps, in microseconds.
    """

    def __init__(self, own_us: Iterable[Sequence[float]]) -> None:
        ranks = [np.array(values) for values in own_us if values]
        middle = np.mean([values.mean() for values in ranks]) if ranks else 0.0
        self._spread = [(values.mean() - middle, values - values.mean()) for values in ranks]
        self._known: dict[tuple[int, int], float] = {}

    def expected_us(self, steps: int, ranks: int) -> float:
        """The expected lateness after so many steps without an exchange, in microseconds."""
        if (steps, ranks) not in self._known:
            late = [steps * always + math.sqrt(steps) * chance for always, chance in self._spread]
            values = np.sort(np.concatenate([[], *late]))
            shares = np.diff(np.linspace(0, 1, len(values) + 1) ** ranks)
            self._known[steps, ranks] = float(values @ shares)
        return self._known[steps, ranks]


@dataclass(slots=True)
class StageCosts:
    """Costs of the steps of one stage: means over steps and ranks, in microseconds."""

    steps: int = 0
    step_us: float = 0.0
    cpu_us: float = 0.0  # processor time of a rank's process
    parts_us: Mapping[str, float] = field(default_factory=dict)  # each of `PARTS_WITHOUT_EXCHANGE`
    bucket_bytes_and_hook_us: Sequence[tuple[int, tuple[float, ...]]] = ()
    """Of gradients: the bytes of each, and hooks before its first collective, between two, and after the
    last."""

    sent_bytes: float = 0.0  # for gradients, by a rank
    gradient_ready_shares: Mapping[str, float] = field(default_factory=dict)
    """When backward has each parameter's gradient: a share of the backward pass, from 0 to 1."""

    own_us_by_rank: Sequence[Sequence[float]] = ()  # the training thread's own work in each step
    cpu_us_by_rank: Sequence[Sequence[float]] = ()  # processor time in each step


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Everything that a prediction needs of a measured run."""

    device: str
    cores: float  # of a host
    stages: Sequence[StageCosts]  # by the index in the run's pipeline


def check_predictable(loaded: LoadedPipeline) -> None:
    """Raise a PipelineError if the costs of steps differ: they train other parameters, are rounds, or have
    several backward passes.
    """
    only, optimizer = "only steps with one backward pass can be predicted", loaded.pipeline.optimizer
    if "closure" in optimizer.sibling_keys or optimizer.name == "LBFGS":
        raise loaded.error("optimizer", f"{only}, and this optimizer asks for as many as it wants")
    for stage, settings in loaded.pipeline.stages_and_settings():
        if settings.plan.round is not None:
            text = "has rounds, which cannot be predicted: their length is measured while they run"
            raise loaded.error(stage.key_path("sync"), text, "write a number of steps")
        if settings.turns:
            raise loaded.error(f"{stage.path}.turns", only)
    (first_path, first), *others = loaded.pipeline.frozen_patterns().items()
    for path, patterns in others:
        if patterns != first:
            text = "stages freeze different parameters, so one cannot be predicted from another"
            raise loaded.error(path if patterns else first_path, text, "take the stages one by one")


def costs_of_run(run: RecordedRun, stage_count: int) -> RunCosts:
    """Read a run whose pipeline has so many stages; raises CostsUnknownError, or as `RecordedRun` does."""
    started = run.started
    if len(run.world_sizes) > 1:
        ranks = format_world_sizes(run.world_sizes)
        raise CostsUnknownError(f"{run.folder}: the number of its ranks has changed ({ranks})")
    stages = [_StageCostsAccumulator() for _ in range(stage_count)]
    for rank in run.ranks:
        # The stage, and the beginning and length of the last backward pass.
        backward_by_step = dict[int, tuple[int, float, float]]()
        for stage, lines in groupby(run.step_records(rank), lambda line: line.stage):
            counted = [line for line in [*lines][WARM_UP_STEPS:] if line.step_us > 0]
            for line in without_outliers(counted, own_work_us) if stage < stage_count else ():
                backward_by_step[line.step] = stage, *_last_backward_start_and_duration(line)
                stages[stage].add_step(rank, line)
        for bucket in run.bucket_records(rank, backward_by_step.__contains__, holding=b'"gradient"'):
            stage, began, length = backward_by_step[bucket.step]
            stages[stage].add_bucket(bucket, began, length)
    if not any(one.steps for one in stages):
        raise CostsUnknownError(f"{run.folder} has no stage with records of more than {WARM_UP_STEPS} steps")
    return RunCosts(started.device or "cpu", started.cores or 1.0, [one.costs() for one in stages])


def own_work_us(line: StepRecord) -> float:
    """How long the training thread works for itself in a step."""
    return float(sum(getattr(line, part) for part in PARTS_WITHOUT_EXCHANGE))


def without_outliers(steps: Sequence[_StepT], own_us: Callable[[_StepT], float]) -> list[_StepT]:
    """The steps of a stage that count, judged by their own work: waiting may rightly take much longer."""
    most = _OUTLIER * statistics.median(map(own_us, steps)) if steps else 0.0
    return [one for one in steps if own_us(one) <= most]


def _last_backward_start_and_duration(line: StepRecord) -> tuple[float, float]:
    """When the last backward pass of a step began, on the rank's clock, and how long it worked."""
    at = began = float(line.start_us)
    passes = 0
    for part, us in line.laps:
        if part == "backward":
            began, passes = at, passes + 1
        at += us
    return began, line.backward_us / max(1, passes)


class _StageCostsAccumulator:
    """What the records of one stage say, step by step."""

    def __init__(self) -> None:
        self.steps = self._sent_bytes = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._own_us_by_rank: dict[int, list[float]] = defaultdict(list)
        self._cpu_us_by_rank: dict[int, list[float]] = defaultdict(list)
        self._gradient_ready_shares: dict[str, list[float]] = defaultdict(list)
        self._buckets: dict[int, list[tuple[int, list[float]]]] = defaultdict(list)

    def add_step(self, rank: int, line: StepRecord) -> None:
        self.steps += 1
        for name in (*PARTS_WITHOUT_EXCHANGE, "step_us", "cpu_us"):
            self._sums[name] += getattr(line, name)
        self._own_us_by_rank[rank].append(own_work_us(line))
        self._cpu_us_by_rank[rank].append(line.cpu_us)

    def add_bucket(self, line: BucketRecord, began: float, backward_us: float) -> None:
        if backward_us > 0:
            known = line.params_ready_us or [line.ready_us] * len(line.params)
            for name, at in zip(line.params, known, strict=False):
                if at is not None:
                    self._gradient_ready_shares[name].append(min(1.0, max(0.0, (at - began) / backward_us)))
        legs = [us for leg in line.legs for us in (leg.start_us, leg.done_us)]
        moments = [line.ready_us, *legs, line.done_us]  # hooks work before, between and after collectives
        hook_us = [max(0.0, end - start) for start, end in zip(moments[::2], moments[1::2], strict=True)]
        self._buckets[line.bucket].append((line.bytes, hook_us))
        self._sent_bytes += line.wire_bytes

    def costs(self) -> StageCosts:
        if not self.steps:
            return StageCosts()
        means = {name: total / self.steps for name, total in self._sums.items()}
        buckets = []
        for rows in self._buckets.values():
            most = max(len(hook_times) for _, hook_times in rows)
            sizes, hook_times = zip(*(row for row in rows if len(row[1]) == most), strict=True)
            means_us = tuple(map(statistics.fmean, zip(*hook_times, strict=True)))
            buckets.append((round(statistics.fmean(sizes)), means_us))
        return StageCosts(
            steps=self.steps,
            step_us=means.pop("step_us"),
            cpu_us=means.pop("cpu_us"),
            parts_us=means,
            bucket_bytes_and_hook_us=buckets,
            sent_bytes=self._sent_bytes / self.steps,
            gradient_ready_shares={
                name: statistics.fmean(shares) for name, shares in self._gradient_ready_shares.items()
            },
            own_us_by_rank=list(self._own_us_by_rank.values()),
            cpu_us_by_rank=list(self._cpu_us_by_rank.values()),
        )
