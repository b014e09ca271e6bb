"""What a report needs of a run's records, stage by stage, in one pass over them and in bounded memory.

Long runs are thinned: a curve shows means over as many equal intervals of steps as a chart has room for, and
bucket records are read of steps that are drawn at random from the whole run.
"""

import math
import random
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import groupby, zip_longest
from statistics import median
from typing import Any, NamedTuple

from ddprun.telemetry.reader import RecordedRun, steps_between
from ddprun.telemetry.records import PARTS, BucketRecord, MachineRecord, SharesSet, StageStarted, StepRecord

_MAX_CURVE_POINTS = 200
_MAX_BUCKET_RECORDS = 200_000  # that are read, about
_TIMELINE_RANKS = 32
_TIMELINE_ROWS = 128  # of all ranks together; of more buckets those that are under way for longest
_MAX_RANK_CURVES = 8  # the first ranks have curves of their own
_MAX_PARAM_GROUPS = 8  # whose learning rates and gradient norms are curves
_MAX_SLOW_STEPS = 30
_SLOW_STEP = 2.0  # times the median of its like
_AMONG_ALL_RANKS = re.compile(r"(world|deltas)\.\d+")
_STEP_AND_PARTS = (*PARTS, "step_us")

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "longest": 1.0}  # of how long a stage's steps take

_TrafficKey = tuple[int, str, tuple[str, ...]]  # stage, kind, hooks
_StepKind = tuple[bool, tuple[str, ...]]
"""Whether ranks exchanged something in a step, and the numbers beside its loss: of the turns that ran."""


class StepPart(NamedTuple):
    """A part of a step as a report names, groups and draws it. Colours are such that colour-blind readers
    tell them apart (Okabe and Ito, https://jfly.uni-koeln.de/color/), and patterns, so that nothing depends
    on colour alone.
    """

    name: str  # in tables and charts
    category: str
    colour: str
    pattern: str = ""

    @property
    def marker(self) -> dict[str, Any]:
        """The colour and pattern as the `marker` of a plotly bar trace."""
        pattern = {"shape": self.pattern, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,0.45)", "size": 6}
        return {"color": self.colour, "pattern": pattern}


STEP_PARTS = {  # in the order of `PARTS`
    "data_us": StepPart("loading data", "data", "#999999", "."),
    "forward_us": StepPart("forward", "compute", "#56B4E9"),
    "backward_us": StepPart("backward", "compute", "#0072B2"),
    "exposed_hook_us": StepPart("launch and hooks, exposed", "hook", "#CC79A7", "x"),
    "exposed_wait_us": StepPart("waiting for the last rank", "wait", "#D55E00", "/"),
    "exposed_wire_us": StepPart("wire, exposed", "wire", "#E69F00", "\\"),
    "optimizer_us": StepPart("optimizer", "compute", "#009E73"),
    "sync_us": StepPart("between steps", "sync", "#F0E442", "-"),
    "other_us": StepPart("other", "other", "#777777", "+"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Means over intervals of steps; no interval has steps of two stages."""

    steps: list[float]  # the middle of each interval
    means: list[float]
    lowest: list[float]
    highest: list[float]

    @classmethod
    def from_step_values(cls, values_by_step: Iterable[tuple[float, Sequence[float]]]) -> "Curve":
        """Of the values that each step has, at least one."""
        found = cls([], [], [], [])
        for step, values in values_by_step:
            found.steps.append(step)
            found.means.append(sum(values) / len(values))
            found.lowest.append(min(values))
            found.highest.append(max(values))
        return found


@dataclass(slots=True)
class TrafficTotals:
    """Totals over all ranks of what was sent through one stack of hooks: of all buckets, or of one."""

    kind: str
    hooks: tuple[str, ...]
    bucket: int = 0
    params: tuple[str, ...] = ()
    steps: set[int] = field(default_factory=set)  # those that were read and had such a payload
    bytes: int = 0
    wire_bytes: int = 0
    between_hosts_bytes: int = 0
    ready_to_done_us: int = 0
    encode_us: int = 0
    decode_us: int = 0
    wire_us: float = 0.0  # in which something was on the wire: a collective that all ranks had ready
    payloads: int = 0
    among_all_ranks: bool = True  # each collective was

    def add(self, record: BucketRecord) -> None:
        """Add a bucket's record, but for `wire_us`."""
        self.bytes += record.bytes
        self.wire_bytes += record.wire_bytes
        self.between_hosts_bytes += record.between_hosts_bytes
        self.ready_to_done_us += record.done_us - record.ready_us
        self.encode_us += record.encode_us
        self.decode_us += record.decode_us
        self.payloads += 1
        self.steps.add(record.step)
        self.among_all_ranks &= all(_AMONG_ALL_RANKS.fullmatch(leg.group) for leg in record.legs)

    @property
    def bits_per_s(self) -> float | None:
        """What a rank sent while something was on the wire, latency included; None: no time is known."""
        return 8e6 * self.wire_bytes / self.wire_us if self.wire_us > 0 else None


class SlowStep(NamedTuple):
    """A step that took much longer than its like."""

    step: int
    ms: float
    median_ms: float  # of the steps of its stage that are of its kind
    most_slowed_part: str  # of a step, which is longer than its median in these by most


class RankTimeline(NamedTuple):
    start_us: int  # when it began the step, since the first rank did
    step_record: StepRecord
    buckets: Sequence[BucketRecord]  # of very many those that were under way for longest


class Timeline(NamedTuple):
    step: int
    why: str  # it is shown
    ranks: Sequence[RankTimeline]


@dataclass(slots=True)
class GradientCompletion:
    """How the gradients of one bucket became complete, over the steps and ranks that were read."""

    params: tuple[str, ...]
    completed_by: Counter[str] = field(default_factory=Counter)  # how often each gradient was the last
    first_to_last_us: int = 0  # from the first complete gradient to the last, summed over steps and ranks


@dataclass
class StepTimes:
    """Where the time of some steps went, on each rank."""

    step_totals_by_rank: list[Counter[str]]
    """Sums over steps: of each part, of `step_us`, and of `samples`; and how many `steps` these are."""

    step_totals: Counter[str] = field(default_factory=Counter)
    """The same of the run: in each step the mean over the ranks that took it, and all of their samples."""

    def __add__(self, other: "StepTimes") -> "StepTimes":
        """The times of the steps of both, of which one may have records of more ranks."""
        totals = zip_longest(self.step_totals_by_rank, other.step_totals_by_rank, fillvalue=Counter[str]())
        return StepTimes([one + more for one, more in totals], self.step_totals + other.step_totals)

    @cached_property
    def mean_parts_us_by_rank(self) -> list[dict[str, float]]:
        """For each rank the mean of each part of a step, and of `step_us`; empty for a rank without steps."""
        return [
            {part: us[part] / us["steps"] for part in _STEP_AND_PARTS} if us["steps"] else {}
            for us in self.step_totals_by_rank
        ]

    @cached_property
    def mean_parts_us(self) -> dict[str, float]:
        """The mean of each part of a step, and of `step_us`, over ranks."""
        return {part: self.step_totals[part] / max(1, self.step_totals["steps"]) for part in _STEP_AND_PARTS}

    @cached_property
    def time_shares_by_category(self) -> dict[str, float]:
        """The share of a step's time that each category takes, mean over ranks."""
        us, totals = self.mean_parts_us, defaultdict[str, float](float)
        for name, part in STEP_PARTS.items():
            totals[part.category] += us[name]
        return {category: total / (us["step_us"] or 1.0) for category, total in totals.items()}

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second, from the mean time of a step; None: no time is known."""
        return 1e6 / step_us if (step_us := self.mean_parts_us["step_us"]) else None

    @property
    def exposed_share(self) -> float:
        """The share of a step's time that is communication not hidden behind computation."""
        return sum(self.time_shares_by_category[category] for category in ("hook", "wait", "wire"))


@dataclass
class StageDigest:
    """The steps of a stage in numbers."""

    index: int  # in the pipeline's `stages`, from 0
    kind: str
    sync: Any  # the policy as the pipeline has it
    hooks: tuple[str, ...]  # the names in its stack
    first_step: int  # that was recorded
    last_step: int
    times: StepTimes
    traffic: list[TrafficTotals] = field(default_factory=list)
    buckets: list[TrafficTotals] = field(default_factory=list)
    step_percentiles_ms: Mapping[str, float] = field(default_factory=dict)  # over steps; mean over ranks
    bucket_sample_step_count: int = 0  # steps whose bucket records were read
    turns: tuple[str, ...] = ()  # their names; empty: each step is a whole

    @property
    def name(self) -> str:
        return f"stage {self.index}, {self.description}"

    @property
    def sync_policy_and_options(self) -> tuple[str, Mapping[str, Any]]:
        """The sync policy's name, and its options; one with options synchronises in some steps only."""
        chosen = self.sync if isinstance(self.sync, Mapping) else {self.sync or "": None}
        name, options = next(iter(chosen.items()), ("", None))
        return str(name), options if isinstance(options, Mapping) else {}

    @property
    def description(self) -> str:
        """What it does: its turns, how it synchronises, and through which hooks."""
        policy, _ = self.sync_policy_and_options
        about = [*(f"turn {name}" for name in self.turns), *[policy] * (policy not in ("", "every_step"))]
        about += self.hooks
        return self.kind + (f" ({', '.join(about)})" if about else "")


@dataclass
class SampleSharesSpan:
    """The steps that ranks took with the same shares of samples (`loader.balance`, and rounds)."""

    shares: SharesSet
    total: Counter[str] = field(default_factory=Counter)
    """Over steps and ranks, `samples` and `step_us`; and how many `steps` there were."""

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together."""
        ranks = len(self.shares.samples)
        return 1e6 * ranks * self.total["samples"] / self.total["step_us"] if self.total["step_us"] else None


@dataclass
class RunDigest:
    """A run in numbers."""

    run: RecordedRun
    recorded_steps: list[int]  # the steps that have records
    stages: list[StageDigest]  # that have steps, in their order
    loss: Curve
    rank_losses: list[Curve]  # of the first ranks
    values: dict[str, Curve]  # of numbers beside the loss, means over ranks
    parts_ms: dict[str, Curve]  # each part of a step, mean over ranks
    param_group_curves: dict[str, list[Curve]]  # `lr` and `group_grad_norms` of the first groups
    grad_norm: Curve  # of all gradients together
    held_out: dict[str, Curve]  # each metric of the evaluations
    fidelity: dict[str, Curve] = field(default_factory=dict)  # each measure, mean over buckets
    bucket_completions: dict[int, GradientCompletion] = field(default_factory=dict)  # empty if not recorded
    timelines: list[Timeline] = field(default_factory=list)  # of some steps
    bucket_sample_steps: frozenset[int] = frozenset()  # whose bucket records were read
    slow_steps: list[SlowStep] = field(default_factory=list)  # the slowest of them, in order of steps
    slow_step_count: int = 0
    machine_curves: dict[str, dict[int, Curve]] = field(default_factory=dict)  # of `MachineRecord`, by rank
    sample_shares: list[SampleSharesSpan] = field(default_factory=list)

    @cached_property
    def times(self) -> StepTimes:
        return sum((stage.times for stage in self.stages), StepTimes([]))

    @property
    def steps_per_s(self) -> float | None:
        """The speed that all reports of a run give: of all steps, if the summary knows it. Those that have a
        record may all be steps with an exchange.
        """
        summary = self.run.summary
        if summary is not None and summary.steps > len(self.recorded_steps) and summary.steps_per_s:
            return summary.steps_per_s
        return self.times.steps_per_s

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks together, while steps are taken; None: a rank has no records."""
        total, steps_per_s = self.times.step_totals, self.steps_per_s
        if not (steps_per_s and total["steps"]) or len(self.run.ranks) < self.run.most_ranks:
            return None
        return steps_per_s * total["samples"] / total["steps"]


class _RankMeansByStep:
    """For each recorded step, in order, the mean of a number over ranks, in bounded memory."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.sums = array("d", bytes(8 * len(steps)))
        self.counts = array("i", bytes(array("i").itemsize * len(steps)))

    def add(self, index: int | None, value: float | None) -> None:
        # While a run is going on, records of later steps than `steps` come.
        if value is not None and index is not None:
            self.sums[index] += value
            self.counts[index] += 1

    def mean_at_step(self, step: int) -> float:
        """The mean of a step; 0 if no rank has a number."""
        at = _step_index(self._steps, step)
        return self.sums[at] / self.counts[at] if at is not None and self.counts[at] else 0.0

    def curve(self, stages: Sequence[StageDigest], scale: float = 1.0) -> Curve:
        length = max(1, math.ceil((self._steps[-1] if self._steps else 0) / _MAX_CURVE_POINTS))
        starts = [stage.first_step for stage in stages] or [0]

        def stage_and_interval(point: tuple[int, float]) -> tuple[int, int]:
            stage = max(0, bisect_right(starts, point[0]) - 1)
            return stage, (point[0] - starts[stage]) // length

        known = zip(self._steps, self.sums, self.counts, strict=True)
        means = ((step, total / count * scale) for step, total, count in known if count)
        intervals = (list(points) for _, points in groupby(means, stage_and_interval))
        return Curve.from_step_values(
            ((one[0][0] + one[-1][0]) / 2, [mean for _, mean in one]) for one in intervals
        )


def _step_index(steps: Sequence[int], step: int) -> int | None:
    index = bisect_left(steps, step)
    return index if index < len(steps) and steps[index] == step else None


def digest_run(run: RecordedRun, is_timed: Callable[[int], bool] = lambda _: True) -> RunDigest:
    """Read a run's records; the time of steps for which `is_timed` is false does not count."""
    steps = run.recorded_steps
    rank_losses = [_RankMeansByStep(steps) for _ in run.ranks[:_MAX_RANK_CURVES]]
    columns = {name: _RankMeansByStep(steps) for name in ("mean_loss", "grad_norm", *_STEP_AND_PARTS)}
    groups: dict[str, dict[int, _RankMeansByStep]] = {
        name: defaultdict(lambda: _RankMeansByStep(steps)) for name in ("lr", "group_grad_norms")
    }
    values: dict[str, _RankMeansByStep] = defaultdict(lambda: _RankMeansByStep(steps))
    kinds: list[_StepKind] = [(False, ())] * len(steps)
    known_kinds: dict[_StepKind, _StepKind] = {}  # each once in memory
    machine: dict[str, dict[int, _RankMeansByStep]] = defaultdict(
        lambda: defaultdict(lambda: _RankMeansByStep(steps))
    )
    stages_by_index: dict[int, StageDigest] = {}
    start_events = {one.stage: one for one in run.events_of(StageStarted)}
    shares = [SampleSharesSpan(one) for one in run.shares]
    for position, rank in enumerate(run.ranks):
        for line in run.step_records(rank):
            step, index = line.step, _step_index(steps, line.step)
            if position < _MAX_RANK_CURVES:
                rank_losses[position].add(index, line.loss)
                for name in MachineRecord.__struct_fields__:
                    if (value := getattr(line.machine, name, None)) is not None:
                        machine[name][rank].add(index, value)
            exchanged = line.mean_loss is not None or line.mean_values is not None
            if index is not None:
                measured = (name for name, value in (line.values or {}).items() if value is not None)
                kind = exchanged, tuple(measured)
                kinds[index] = known_kinds.setdefault(kind, kind)
            for name, column in columns.items():
                column.add(index, getattr(line, name))
            for name, value in (line.mean_values or {}).items():
                values[name].add(index, value)
            for name, known in groups.items():
                for group, value in enumerate((getattr(line, name) or ())[:_MAX_PARAM_GROUPS]):
                    known[group].add(index, value)
            if (stage := stages_by_index.get(line.stage)) is None:
                started = start_events.get(line.stage, StageStarted(stage=line.stage))
                about = line.stage, started.kind, started.sync, started.hooks
                times = StepTimes([Counter() for _ in run.ranks])
                stage = stages_by_index[line.stage] = StageDigest(
                    *about, step, step, times, turns=started.turns
                )
            stage.first_step, stage.last_step = min(stage.first_step, step), max(stage.last_step, step)
            if is_timed(step):
                us = {part: getattr(line, part) for part in _STEP_AND_PARTS}
                stage.times.step_totals_by_rank[position].update(us, steps=1, samples=line.samples)
                span = bisect_right(shares, step, key=lambda span: span.shares.step) - 1
                if span >= 0 and shares[span].shares.stage == line.stage:
                    total = shares[span].total
                    total.update(samples=line.samples, step_us=line.step_us, steps=position == 0)
    stages = sorted(stages_by_index.values(), key=lambda stage: stage.first_step)
    found = RunDigest(
        run=run,
        recorded_steps=[step for step, count in zip(steps, columns["step_us"].counts, strict=True) if count],
        stages=stages,
        loss=columns["mean_loss"].curve(stages),
        rank_losses=[column.curve(stages) for column in rank_losses],
        values={name: column.curve(stages) for name, column in values.items()},
        parts_ms={part: columns[part].curve(stages, 1e-3) for part in PARTS},
        param_group_curves={
            name: [column.curve(stages) for column in known.values() if any(column.counts)]
            for name, known in groups.items()
        },
        grad_norm=columns["grad_norm"].curve(stages),
        held_out=_held_out_curves(run),
        machine_curves={
            name: {rank: column.curve(stages) for rank, column in by_rank.items()}
            for name, by_rank in machine.items()
        },
        sample_shares=shares,
    )
    if found.recorded_steps:
        by_step = dict(zip(steps, kinds, strict=True))
        _add_stage_times_and_slow_steps(found, columns, by_step.__getitem__, is_timed)
        _read_bucket_sample(found)
        shown = _choose_timeline_steps(found.recorded_steps, columns["step_us"], columns["exposed_wait_us"])
        found.timelines = list(_read_timelines(run, shown))
    return found


def _held_out_curves(run: RecordedRun) -> dict[str, Curve]:
    """The curve of each metric. What another stage measures after the same step, maybe on other data, has a
    name of its own.
    """
    found, last_step = defaultdict[str, list[tuple[float, list[float]]]](list), -1
    for (step, stage), metrics in run.evaluations.items():
        of_stage, last_step = f" of stage {stage}" * (step == last_step), step
        for name, value in metrics.items():
            found[name + of_stage].append((step, [value]))
    return {name: Curve.from_step_values(values) for name, values in found.items()}


def _covered_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long the union of intervals is; one that ends before it starts covers nothing."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _add_stage_times_and_slow_steps(
    digest: RunDigest,
    columns: Mapping[str, _RankMeansByStep],
    kind_of: Callable[[int], _StepKind],
    is_timed: Callable[[int], bool],
) -> None:
    """How long steps take: the total and percentiles of each stage, and the slow steps."""
    slow = list[SlowStep]()
    for stage in digest.stages:
        of_stage = steps_between(digest.recorded_steps, stage.first_step, stage.last_step + 1)
        timed = list(filter(is_timed, of_stage))
        totals = {part: round(sum(map(columns[part].mean_at_step, timed))) for part in _STEP_AND_PARTS}
        samples = sum(us["samples"] for us in stage.times.step_totals_by_rank)
        stage.times.step_totals.update({"steps": len(timed), "samples": samples, **totals})
        ms_by_kind: dict[_StepKind, dict[int, float]] = defaultdict(dict)
        for step in timed:
            ms_by_kind[kind_of(step)][step] = columns["step_us"].mean_at_step(step) / 1000
        lengths = sorted(ms for by_step in ms_by_kind.values() for ms in by_step.values())
        if lengths:
            places = {name: math.ceil(share * len(lengths)) - 1 for name, share in PERCENTILES.items()}
            stage.step_percentiles_ms = {name: lengths[place] for name, place in places.items()}
        for by_step in ms_by_kind.values():
            median_ms = median(by_step.values())
            of_kind = [(step, ms) for step, ms in by_step.items() if ms > _SLOW_STEP * median_ms]
            medians = (
                {part: median(map(columns[part].mean_at_step, by_step)) for part in PARTS} if of_kind else {}
            )
            for step, ms in of_kind:
                more = {part: columns[part].mean_at_step(step) - us for part, us in medians.items()}
                slow.append(SlowStep(step, ms, median_ms, max(more, key=more.__getitem__)))
    digest.slow_step_count = len(slow)
    digest.slow_steps = sorted(sorted(slow, key=lambda one: one.ms)[-_MAX_SLOW_STEPS:])


def _read_bucket_sample(digest: RunDigest) -> None:
    """Read the bucket records of as many steps as can be read in a few seconds."""
    run, recorded, last = digest.run, digest.recorded_steps, digest.recorded_steps[-1:]
    per_step = sum(1 for rank in run.ranks for _ in run.bucket_records(rank, last.__contains__)) or 1
    stride = max(1, math.ceil(len(recorded) * per_step / _MAX_BUCKET_RECORDS))
    # Drawn, not every n-th: what is sent every n-th step would be in all of them, or in none.
    sampled = frozenset(random.Random(0).sample(recorded, len(recorded) // stride or 1))
    digest.bucket_sample_steps = sampled
    traffic: dict[_TrafficKey, TrafficTotals] = {}
    buckets: dict[tuple[_TrafficKey, int], TrafficTotals] = {}
    completions: dict[int, GradientCompletion] = {}
    for rank in run.ranks:
        on_wire: dict[_TrafficKey, list[tuple[float, float]]] = defaultdict(list)
        for line in run.bucket_records(rank, sampled.__contains__):
            key: _TrafficKey = line.stage, line.kind, line.hooks
            one = buckets.setdefault(
                (key, line.bucket), TrafficTotals(*key[1:], line.bucket, tuple(line.params))
            )
            one.add(line)
            traffic.setdefault(key, TrafficTotals(*key[1:])).add(line)
            all_ready = line.all_ready_us or line.ready_us
            wire = [(max(leg.start_us, all_ready), leg.done_us) for leg in line.legs]
            one.wire_us += _covered_us(wire)
            on_wire[key] += wire
            ready = [at for at in line.params_ready_us or () if at is not None]
            if ready and (last_gradient := line.completed_by) is not None:
                bucket = completions.setdefault(line.bucket, GradientCompletion(tuple(line.params)))
                bucket.completed_by[last_gradient] += 1
                bucket.first_to_last_us += max(ready) - min(ready)
        for sent, intervals in on_wire.items():
            traffic[sent].wire_us += _covered_us(intervals)
    for stage in digest.stages:
        stage.bucket_sample_step_count = sum(stage.first_step <= step <= stage.last_step for step in sampled)
        stage.traffic = [one for key, one in traffic.items() if key[0] == stage.index]
        stage.buckets = [buckets[place] for place in sorted(buckets) if place[0][0] == stage.index]
    digest.bucket_completions = dict(sorted(completions.items()))
    _read_fidelity(digest)


def _read_fidelity(digest: RunDigest) -> None:
    """Make a curve of each measure that the run has."""
    columns = {name: _RankMeansByStep(digest.recorded_steps) for name in ("cosine", "relative_l2")}
    for rank in digest.run.ranks:
        for line in digest.run.bucket_records(rank, holding=b'"fidelity"'):
            for name, column in columns.items():
                index = _step_index(digest.recorded_steps, line.step)
                column.add(index, (line.fidelity or {}).get(name))
    curves = {name: column.curve(digest.stages) for name, column in columns.items()}
    digest.fidelity = {name: curve for name, curve in curves.items() if curve.steps}


def _choose_timeline_steps(
    recorded: Sequence[int], step_us: _RankMeansByStep, wait_us: _RankMeansByStep
) -> dict[int, str]:
    """The steps whose timeline is shown, and why each: for the first reason, if there are several."""
    later = recorded[len(recorded) // 10 :]  # the first steps are slower than all others
    by_length = sorted(later, key=step_us.mean_at_step)
    longest_wait = max(later, key=wait_us.mean_at_step)
    chosen = {by_length[len(later) // 2]: "the median step"}
    chosen.setdefault(by_length[-1], "the longest")
    chosen.setdefault(longest_wait, "the longest wait")
    return chosen


def _read_timelines(run: RecordedRun, chosen: Mapping[int, str]) -> Iterator[Timeline]:
    by_step: dict[int, list[tuple[float, StepRecord, list[BucketRecord]]]] = {step: [] for step in chosen}
    shown_ranks = run.ranks[:_TIMELINE_RANKS]
    most = max(1, _TIMELINE_ROWS // len(shown_ranks) - 1)
    for rank in shown_ranks:
        buckets: dict[int, list[BucketRecord]] = defaultdict(list)
        for bucket in run.bucket_records(rank, chosen.__contains__):
            buckets[bucket.step].append(bucket)
        for line in run.step_records(rank, chosen.__contains__):
            longest = nlargest(most, buckets[line.step], key=lambda one: one.done_us - one.ready_us)
            shown = [one for one in buckets[line.step] if one in longest]
            by_step[line.step].append((run.clocks.on_rank0_clock(rank, line.start_us), line, shown))
    for step, why in chosen.items():
        first = min((start for start, _, _ in by_step[step]), default=0.0)
        ranks = [RankTimeline(round(start - first), line, shown) for start, line, shown in by_step[step]]
        yield Timeline(step, why, ranks)
