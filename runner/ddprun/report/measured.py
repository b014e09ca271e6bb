"""What was measured of a stage's steps and buckets, in the terms in which they are predicted.

These are means over ranks and steps, without a stage's first steps and outliers, as `predict.costs` has them.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean, median
from typing import Literal, NamedTuple

from ddprun.predict.costs import WARM_UP, own_work_us, without_outliers
from ddprun.report.digest import RunDigest
from ddprun.telemetry.reader import between
from ddprun.telemetry.records import StepRecord

StepPart = Literal["own", "hooks", "late", "wire", "step"]
"""What a training thread spends a step on: its own work, hooks, waiting for the last rank, and for the wire.
The last is all of it."""

_MIN_LAST_RANK_SHARE = 0.75  # of the steps: in so many a rank must be the last to be named


class BucketTimes(NamedTuple):
    """When a bucket was ready and when it was done, in microseconds since its step began."""

    ready_us: float
    done_us: float


class _BucketSample(NamedTuple):
    """One bucket in one step of one rank, in microseconds since the step began."""

    rank: int
    step: int
    ready_us: float
    done_us: float
    wait_for_last_us: float | None  # until the last rank has it ready; None: not known


@dataclass(slots=True)
class MeasuredStage:
    """The steps of a stage that count, of those that the digest read."""

    step_records: dict[int, list[StepRecord]] = field(default_factory=dict)  # by rank
    buckets: dict[str, list[_BucketSample]] = field(default_factory=lambda: defaultdict(list))

    def parts(self, cycle: int) -> dict[StepPart, float]:
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

    def wait_for_last_rank(self, name: str) -> tuple[float, int | None]:
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
    def cpu_share(self) -> float:
        """The share of the time without waiting in which ranks' processes had a core; 1 if not known."""
        shares: list[float] = []
        for line in (line for lines in self.step_records.values() for line in lines):
            working_us = line.step_us - line.exposed_wait_us - line.exposed_wire_us
            if line.cpu_us > 0 < working_us:
                shares.append(line.cpu_us / working_us)
        return median(shares or [1.0])


def read_measured_stages(digest: RunDigest) -> dict[int, MeasuredStage]:
    """What is measured of each stage, by its index."""
    wanted = {
        step
        for stage in digest.stages
        for step in between(digest.recorded_steps, stage.first_step, stage.last_step + 1)[WARM_UP:]
        if step in digest.sampled_steps
    }
    found: dict[int, MeasuredStage] = defaultdict(MeasuredStage)
    for rank in digest.run.ranks:
        lines = [line for line in digest.run.step_records(rank, wanted.__contains__) if line.step_us > 0]
        lines.sort(key=lambda line: line.start_us)
        starts = [line.start_us for line in lines]
        counted = set[int]()
        for stage, of_stage in groupby(lines, key=lambda line: line.stage):
            own: list[StepRecord] = list(of_stage)
            found[stage].step_records[rank] = own
            counted |= {line.step for line in without_outliers(own, own_work_us)}
        occurrences = Counter[tuple[int, str]]()
        for bucket in digest.run.bucket_records(rank, wanted.__contains__):
            at = bisect_right(starts, bucket.ready_us) - 1
            if at < 0 or bucket.ready_us > starts[at] + lines[at].step_us:
                continue  # it was ready in a step that is not read
            name = f"{bucket.kind} {bucket.bucket}"
            occurrences[bucket.step, name] += 1
            name = numbered_name(name, occurrences[bucket.step, name])
            if lines[at].step in counted:
                ready, start, all_ready = bucket.ready_us, lines[at].start_us, bucket.all_ready_us
                waited = None if all_ready is None else max(0.0, all_ready - ready)
                sample = _BucketSample(rank, lines[at].step, ready - start, bucket.done_us - start, waited)
                found[lines[at].stage].buckets[name].append(sample)
    return dict(found)


def numbered_name(name: str, occurrence: int) -> str:
    """A bucket's name, with a number if it is sent again in a step, as buffers are with accumulation."""
    return name if occurrence == 1 else f"{name} ({occurrence})"
