"""What the records of a stage explain: its step simulated once more, over the link that fits the run best.

What training threads did, when buckets were ready and what hooks took are as recorded, in the median. The
link between hosts, or inside the host if there is one, carries what was sent, as in a prediction. Its rate is
not recorded, so it is fitted. Then the step is simulated without the lateness of ranks: what a late rank
costs is found as a difference.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from ddprun.predict.costs import WARM_UP, hook_times_us
from ddprun.predict.links import Link, LinkLevel, Links
from ddprun.predict.timeline import (
    MAX_SIMULATED_ROUNDS,
    Await,
    BucketTransfer,
    Collective,
    Instruction,
    LastRankWait,
    Machine,
    Send,
    SimulatedStep,
    StepSimulator,
    Work,
    round_count,
)
from ddprun.report.digest import RunDigest
from ddprun.telemetry.reader import between

StepPart = Literal["own", "hooks", "late", "wire", "step"]
"""What a training thread spends a step on: its own work, hooks, waiting for the last rank, and for the wire.
The last is all of it.
"""

_RATE_SEARCH_FACTOR = 1.5**24  # how many times as fast as the slowest link the fastest one is that is tried
_TRIALS = 24
_RATE_TOLERANCE = 1e-5  # of a rate
_GOLDEN = (math.sqrt(5) - 1) / 2
_MIN_LINK_SHARE = 0.02  # of a step: a link that takes less of it leaves its rate unknown
_MIN_LAST_RANK_SHARE = 0.75  # of the steps: in so many a rank must be the last to be named


class BucketTimes(NamedTuple):
    """When a bucket was ready and when it was done, in microseconds since its step began."""

    ready_us: float
    done_us: float


class _BucketSample(NamedTuple):
    """One bucket in one step of one rank, in microseconds since the step began. `…_without_waits_us` do not
    count the time in which the training thread waited.
    """

    rank: int
    step: int
    ready_us: float
    done_us: float
    wait_for_last_us: float | None  # until the last rank has it ready; None: not known
    ready_without_waits_us: float
    await_without_waits_us: float  # when the training thread begins to wait for it
    hook_times_us: Sequence[float]  # hooks before the first collective, between two, and after the last
    legs: Sequence[Mapping[str, Any]]
    between_hosts_bytes: float
    spans_steps: bool  # whether it is under way in more than one step


@dataclass(slots=True)
class MeasuredStage:
    """The steps of a stage that count, of those that the digest read."""

    step_records: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)  # by rank and number
    buckets: dict[str, list[_BucketSample]] = field(default_factory=lambda: defaultdict(list))

    def parts(self, steps: Iterable[tuple[int, int]], cycle: int = 1) -> dict[StepPart, float]:
        """What a step is made of, in microseconds: medians over ranks and over cycles, each of so many steps.

        Empty if no rank has a whole cycle.
        """
        by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for rank, step in sorted(steps):
            by_rank[rank].append(self.step_records[rank, step])
        rows = []
        for lines in by_rank.values():
            for start in range(0, len(lines) - cycle + 1, cycle):
                some = lines[start : start + cycle]
                names = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us", "step_us")
                hooks, late, wire, step_us = (fmean(line[name] for line in some) for name in names)
                rows.append((step_us - hooks - late - wire, hooks, late, wire, step_us))
        parts: tuple[StepPart, ...] = ("own", "hooks", "late", "wire", "step")
        return dict(zip(parts, map(median, zip(*rows, strict=True)), strict=True)) if rows else {}

    def median_times(self, name: str) -> BucketTimes | None:
        """Medians over steps and ranks; None without such a bucket."""
        seen = self.buckets.get(name)
        if not seen:
            return None
        return BucketTimes(median(one.ready_us for one in seen), median(one.done_us for one in seen))

    def wait_for_last_rank(self, name: str) -> tuple[float, int | None]:
        """How many microseconds ranks wait until the last of them has a bucket ready; and which rank is the
        last in most steps, or None.

        The time is the median over the other ranks; over all ranks if the last one is not always the same.
        """
        by_step: dict[int, dict[int, float]] = defaultdict(dict)
        for one in self.buckets.get(name, ()):
            if one.wait_for_last_us is not None:
                by_step[one.step][one.rank] = one.wait_for_last_us
        if not by_step:
            return 0.0, None
        last, times = Counter(min(late, key=late.__getitem__) for late in by_step.values()).most_common(1)[0]
        named = last if times >= _MIN_LAST_RANK_SHARE * len(by_step) else None
        waited = [us for late in by_step.values() for rank, us in late.items() if rank != named]
        return median(waited or [0.0]), named

    @property
    def cpu_share(self) -> float:
        """The share of the time in which ranks did not wait that their processes had a core; 1 if it is not
        known.
        """
        shares: list[float] = []
        for line in self.step_records.values():
            working_us = line["step_us"] - line["exposed_wait_us"] - line["exposed_wire_us"]
            cpu_us = line.get("cpu_us")
            if isinstance(cpu_us, int | float) and cpu_us > 0 < working_us:
                shares.append(cpu_us / working_us)
        return median(shares or [1.0])


def read_measured_stages(digest: RunDigest) -> dict[int, MeasuredStage]:
    """What is measured of each stage, by its index."""
    counted = {
        step
        for stage in digest.stages
        for step in between(digest.recorded_steps, stage.first_step, stage.last_step + 1)[WARM_UP:]
        if step in digest.sampled_steps
    }
    found: dict[int, MeasuredStage] = defaultdict(MeasuredStage)
    for rank in digest.run.ranks:
        lines = [line for line in digest.run.step_records(rank, counted.__contains__) if line["step_us"] > 0]
        lines.sort(key=lambda line: line["start_us"])
        starts = [line["start_us"] for line in lines]
        for line in lines:
            found[line["stage"]].step_records[rank, line["step"]] = line
        occurrences = Counter[tuple[int, str]]()
        for bucket in digest.run.bucket_records(rank, counted.__contains__):
            at = bisect_right(starts, bucket["ready_us"]) - 1
            if at < 0 or bucket["ready_us"] > starts[at] + lines[at]["step_us"]:
                continue  # it was ready in a step that is not read
            name = f"{bucket['kind']} {bucket['bucket']}"
            occurrences[bucket["step"], name] += 1
            name = numbered_name(name, occurrences[bucket["step"], name])
            found[lines[at]["stage"]].buckets[name].append(_bucket_sample(rank, bucket, lines[at]))
    for stage in found.values():
        for name, seen in stage.buckets.items():
            if name.startswith("gradient"):
                stage.buckets[name] = _waits_from_ready_times(seen)
    return dict(found)


def numbered_name(name: str, occurrence: int) -> str:
    """A bucket's name, with the number of its occurrence if it is sent several times in a step. With
    accumulation, buffers are.
    """
    return name if occurrence == 1 else f"{name} ({occurrence})"


def _bucket_sample(rank: int, bucket: Mapping[str, Any], step: Mapping[str, Any]) -> _BucketSample:
    start, ready, done = step["start_us"], bucket["ready_us"], bucket["done_us"]
    end, waits, all_ready = start + step["step_us"], step.get("waits") or (), bucket.get("all_ready_us")

    def without_waits(at: float) -> float:
        return float(at - start - sum(min(until, at) - since for since, until in waits if since < at))

    return _BucketSample(
        rank=rank,
        step=step["step"],
        ready_us=ready - start,
        done_us=done - start,
        wait_for_last_us=None if all_ready is None else max(0.0, all_ready - ready),
        ready_without_waits_us=without_waits(ready),
        await_without_waits_us=without_waits(
            min((since for since, _ in waits if since >= ready), default=end)
        ),
        hook_times_us=hook_times_us(bucket),
        legs=bucket["legs"],
        between_hosts_bytes=bucket["between_hosts_bytes"],
        spans_steps=step["step"] != bucket["step"] or done > end,
    )


def _waits_from_ready_times(seen: Sequence[_BucketSample]) -> list[_BucketSample]:
    """Replace the waits of a gradient bucket by those that follow from how long after its own step began each
    rank had it ready.

    A collective ends at a different time on each rank, and so does the next step begin. If ranks have a
    bucket ready at different times for this reason alone, that costs nothing.
    """
    last: dict[int, float] = defaultdict(float)
    for one in seen:
        last[one.step] = max(last[one.step], one.ready_us)
    return [one._replace(wait_for_last_us=last[one.step] - one.ready_us) for one in seen]


@dataclass(frozen=True, slots=True)
class RunTopology:
    """Hosts and ranks of a run, and whether it trains on CPUs."""

    hosts: int
    ranks: int
    on_cpu: bool

    def collective(self, leg: Mapping[str, Any], level: LinkLevel, nbytes: float) -> Collective:
        """A collective in which the ranks of a host send so many bytes, with the messages of Gloo's rings."""
        group, ranks = leg["group"], self.ranks
        if "across" in group:
            ranks = self.hosts
        elif "within" in group:
            ranks //= self.hosts
        rounds = max(1, round_count(leg["op"], ranks)) if self.on_cpu else 1
        return Collective(0.0, {level: nbytes}, min(rounds, MAX_SIMULATED_ROUNDS), queue=group)


@dataclass(frozen=True, slots=True)
class Replay:
    """The most frequent set of buckets of a stage's steps, replayed over the link that fits best."""

    level: LinkLevel
    bytes_per_s: float  # of the link that fits best
    rate_known: bool  # whether the link takes long enough for its rate to be known
    simulated_step: SimulatedStep  # with no rank late
    steps: Collection[tuple[int, int]]  # those with that set of buckets: rank and number

    @property
    def link_location(self) -> str:
        """Where the link is."""
        return "between hosts" if self.level == "across" else "inside the host"


@dataclass(frozen=True, slots=True)
class _MedianBucket:
    """A bucket, with medians over steps and ranks."""

    name: str
    ready_without_waits_us: float
    await_without_waits_us: float
    done_us: float
    phases: Sequence[Work | LastRankWait | Collective]  # first hooks, then lateness


def replay_stage(measured: MeasuredStage, topology: RunTopology) -> Replay | None:
    """Simulate a stage's step once more; None: nothing took a link, or exchange overlaps with later steps."""
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for name, seen in measured.buckets.items():
        for one in seen:
            names[one.rank, one.step].add(name)
    if not names:
        return None
    usual = Counter(map(frozenset, names.values())).most_common(1)[0][0]
    steps = {key for key, found in names.items() if found == usual}
    rows = {
        name: [one for one in measured.buckets[name] if (one.rank, one.step) in steps]
        for name in measured.buckets
        if name in usual
    }
    samples = [one for seen in rows.values() for one in seen]
    level: LinkLevel = "across" if any(one.between_hosts_bytes for one in samples) else "within"
    buckets = [_median_bucket(name, seen, level, topology) for name, seen in rows.items()]
    collectives = [phase for one in buckets for phase in one.phases if isinstance(phase, Collective)]
    nbytes = sum(phase.bytes_by_level[level] for phase in collectives)
    if not nbytes or any(one.spans_steps for one in samples):
        return None
    lines = [measured.step_records[key] for key in steps]
    waited = [sum(until - since for since, until in line.get("waits") or ()) for line in lines]
    own_us: float = median(line["step_us"] - us for line, us in zip(lines, waited, strict=True))
    step_us: float = median(line["step_us"] for line in lines)
    done_us = {one.name: one.done_us for one in buckets}

    def simulate(bytes_per_s: float, *, late: bool) -> SimulatedStep:
        links = Links(**{level: Link(bytes_per_s)})
        machine = Machine(math.inf, 1, links, workers=2 if topology.on_cpu else 1)
        return StepSimulator(machine).simulate_step(_instructions(buckets, own_us, late=late))

    def misfit(log_rate: float) -> float:
        # Not squares: one bucket that took its own time must not count for all.
        step = simulate(math.exp(log_rate), late=True)
        misfits = [abs(one.done_us - done_us[one.name]) for one in step.transfers]
        return abs(step.step_us - step_us) + sum(misfits)

    span_us = max(done_us.values()) - min(one.ready_without_waits_us for one in buckets)
    slowest = 1e6 * nbytes / max(span_us, 1.0) / 2
    bytes_per_s = math.exp(_minimize(misfit, math.log(slowest), math.log(_RATE_SEARCH_FACTOR * slowest)))
    rate_known = 1e6 * nbytes / bytes_per_s > _MIN_LINK_SHARE * step_us
    return Replay(level, bytes_per_s, rate_known, simulate(bytes_per_s, late=False), steps)


def _median_bucket(
    name: str, seen: Sequence[_BucketSample], level: LinkLevel, topology: RunTopology
) -> _MedianBucket:
    usual = Counter(len(one.legs) for one in seen).most_common(1)[0][0]
    seen = [one for one in seen if len(one.legs) == usual]
    hooks_us = [median(times) for times in zip(*(one.hook_times_us for one in seen), strict=True)]
    phases: list[Work | LastRankWait | Collective] = [
        Work(hooks_us[0]),
        LastRankWait(median(one.wait_for_last_us or 0.0 for one in seen)),
    ]
    for index in range(usual):
        nbytes = topology.ranks / topology.hosts * fmean(_leg_bytes(one, index, level) for one in seen)
        if nbytes:
            phases.append(topology.collective(seen[0].legs[index], level, nbytes))
        else:  # over another link: as long as it takes on the rank that waits for nobody
            us: dict[int, list[float]] = defaultdict(list)
            for one in seen:
                us[one.rank].append(one.legs[index]["done_us"] - one.legs[index]["start_us"])
            phases.append(LastRankWait(min(map(median, us.values()))))
        phases.append(Work(hooks_us[index + 1]))
    ready_us: float = median(one.ready_without_waits_us for one in seen)
    await_us: float = median(one.await_without_waits_us for one in seen)
    done_us: float = median(one.done_us for one in seen)
    return _MedianBucket(name, ready_us, max(ready_us, await_us), done_us, phases)


def _leg_bytes(sample: _BucketSample, index: int, level: LinkLevel) -> float:
    """What a rank sends over the link in one collective, in bytes. Records have only the bucket's total of
    what leaves the host; it is divided among the collectives.
    """
    sizes = [
        0.0 if level == "across" and "within" in leg["group"] else leg["wire_bytes"] for leg in sample.legs
    ]
    total = math.fsum(sizes)
    if level == "across" and total:
        return max(0.0, sample.between_hosts_bytes * sizes[index] / total)
    return max(0.0, sizes[index])


def _instructions(buckets: Sequence[_MedianBucket], own_us: float, *, late: bool) -> Iterator[Instruction]:
    """A step: the training thread as recorded, and each bucket sent once it is ready."""
    moments: list[tuple[float, Instruction]] = []
    for one in buckets:
        phases = one.phases if late else (one.phases[0], *one.phases[2:])
        transfer = BucketTransfer(one.name, tuple(phases), one.name, on_training_thread=False)
        moments.append((one.ready_without_waits_us, Send(transfer)))
        moments.append((one.await_without_waits_us, Await(one.name)))
    now = 0.0
    for at, instruction in sorted(moments, key=lambda moment: (moment[0], isinstance(moment[1], Await))):
        yield Work(at - now, "own")
        now = at
        yield instruction
    yield Work(own_us - now, "own")


def _minimize(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a cost is least: first of evenly spaced values, then around the best of them."""
    cost, width = cache(cost), (high - low) / _TRIALS
    best = min((low + index * width for index in range(_TRIALS + 1)), key=cost)
    low, high = best - width, best + width
    while high - low > _RATE_TOLERANCE:
        near, far = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, far) if cost(near) <= cost(far) else (near, high)
    return (low + high) / 2
