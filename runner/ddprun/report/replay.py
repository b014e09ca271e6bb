"""What the records of a stage explain: its step played again, over the link that fits the run best.

What training threads did, when buckets were ready and what hooks took are as recorded, in the median. The
link between hosts, or inside the host if there is one, carries what was sent, as in a prediction. Its rate is
not recorded, so it is fitted. Then the step is played without the lateness of ranks: what a late rank costs
is found as a difference.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from ddprun.predict.links import Level, Link, Links
from ddprun.predict.timeline import (
    MOST_ROUNDS,
    Await,
    Carry,
    Flight,
    Instruction,
    Late,
    Machine,
    Played,
    Send,
    Timeline,
    Work,
    rounds_of,
)
from ddprun.report.digest import Digest
from ddprun.report.runs import between

WARM_UP = 3
"""First steps of a stage that do not count."""

Part = Literal["own", "hooks", "late", "wire", "step"]
"""What a training thread spends a step on: its own work, hooks, waiting for the last rank, and for the wire.
The last is all of it.
"""

_FASTER = 1.5**24  # than the slowest link that is tried
_TRIALS = 24
_EXACT = 1e-5  # of a rate
_GOLDEN = (math.sqrt(5) - 1) / 2
_LITTLE = 0.02  # of a step
_MOSTLY = 0.75  # in so many of the steps a rank is the last, if it is to be named


class Moments(NamedTuple):
    """Of a bucket, in microseconds since its step began."""

    ready_us: float
    done_us: float


class _Seen(NamedTuple):
    """A bucket in a step of a rank: microseconds since the step began; the training thread's own are without
    its waiting.
    """

    rank: int
    step: int
    ready_us: float
    done_us: float
    late_us: float | None  # until the last rank has it ready; None: not known
    own_ready_us: float
    own_await_us: float  # when the training thread begins to wait for it
    gaps_us: Sequence[float]  # hooks before the first collective, between two, and after the last
    legs: Sequence[Mapping[str, Any]]
    between_hosts_bytes: float
    overlaps: bool  # it is under way in more than one step


@dataclass(slots=True)
class Measured:
    """The steps of a stage that count, of those that the digest read."""

    steps: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)  # by rank and number
    buckets: dict[str, list[_Seen]] = field(default_factory=lambda: defaultdict(list))

    def parts(self, steps: Iterable[tuple[int, int]], cycle: int = 1) -> dict[Part, float]:
        """What a step is made of, in microseconds: medians over ranks and over cycles, each of so many steps.

        Empty if no rank has a whole cycle.
        """
        by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for rank, step in sorted(steps):
            by_rank[rank].append(self.steps[rank, step])
        rows = []
        for lines in by_rank.values():
            for start in range(0, len(lines) - cycle + 1, cycle):
                some = lines[start : start + cycle]
                names = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us", "step_us")
                hooks, late, wire, step_us = (fmean(line[name] for line in some) for name in names)
                rows.append((step_us - hooks - late - wire, hooks, late, wire, step_us))
        parts: tuple[Part, ...] = ("own", "hooks", "late", "wire", "step")
        return dict(zip(parts, map(median, zip(*rows, strict=True)), strict=True)) if rows else {}

    def moments(self, name: str) -> Moments | None:
        """Medians over steps and ranks; None without such a bucket."""
        seen = self.buckets.get(name)
        if not seen:
            return None
        return Moments(median(one.ready_us for one in seen), median(one.done_us for one in seen))

    def late(self, name: str) -> tuple[float, int | None]:
        """How long ranks wait until the last of them has a bucket ready, and which that is in most steps.

        In microseconds: the median over the others, or over all ranks if it is not always the same.
        """
        by_step: dict[int, dict[int, float]] = defaultdict(dict)
        for one in self.buckets.get(name, ()):
            if one.late_us is not None:
                by_step[one.step][one.rank] = one.late_us
        if not by_step:
            return 0.0, None
        last, times = Counter(min(late, key=late.__getitem__) for late in by_step.values()).most_common(1)[0]
        named = last if times >= _MOSTLY * len(by_step) else None
        waited = [us for late in by_step.values() for rank, us in late.items() if rank != named]
        return median(waited or [0.0]), named

    @property
    def busy(self) -> float:
        """For what share of the time in which a rank did not wait its process had a core; 1 if not known."""
        shares: list[float] = []
        for line in self.steps.values():
            alone, cpu_us = (
                line["step_us"] - line["exposed_wait_us"] - line["exposed_wire_us"],
                line.get("cpu_us"),
            )
            if isinstance(cpu_us, int | float) and cpu_us > 0 < alone:
                shares.append(cpu_us / alone)
        return median(shares or [1.0])


def read(digest: Digest) -> dict[int, Measured]:
    """What is measured of each stage, by its index."""
    counted = {
        step
        for stage in digest.stages
        for step in between(digest.recorded, stage.first, stage.last + 1)[WARM_UP:]
        if step in digest.read_steps
    }
    found: dict[int, Measured] = defaultdict(Measured)
    for rank in digest.run.ranks:
        lines = [line for line in digest.run.steps(rank, counted.__contains__) if line["step_us"] > 0]
        lines.sort(key=lambda line: line["start_us"])
        starts = [line["start_us"] for line in lines]
        for line in lines:
            found[line["stage"]].steps[rank, line["step"]] = line
        times = Counter[tuple[int, str]]()
        for bucket in digest.run.buckets(rank, counted.__contains__):
            at = bisect_right(starts, bucket["ready_us"]) - 1
            if at < 0 or bucket["ready_us"] > starts[at] + lines[at]["step_us"]:
                continue  # it was ready in a step that is not read
            name = f"{bucket['kind']} {bucket['bucket']}"
            times[bucket["step"], name] += 1
            name = numbered(name, times[bucket["step"], name])
            found[lines[at]["stage"]].buckets[name].append(_seen(rank, bucket, lines[at]))
    for stage in found.values():
        for name, seen in stage.buckets.items():
            if name.startswith("gradient"):
                stage.buckets[name] = _late_by_work(seen)
    return dict(found)


def numbered(name: str, time: int) -> str:
    """A bucket that is sent several times in a step, as buffers are with accumulation."""
    return name if time == 1 else f"{name} ({time})"


def _seen(rank: int, bucket: Mapping[str, Any], step: Mapping[str, Any]) -> _Seen:
    start, ready, done = step["start_us"], bucket["ready_us"], bucket["done_us"]
    end, waits, all_ready = start + step["step_us"], step.get("waits") or (), bucket.get("all_ready_us")

    def own(at: float) -> float:
        return float(at - start - sum(min(until, at) - since for since, until in waits if since < at))

    moments = [ready, *(leg[name] for leg in bucket["legs"] for name in ("start_us", "done_us")), done]
    return _Seen(
        rank=rank,
        step=step["step"],
        ready_us=ready - start,
        done_us=done - start,
        late_us=None if all_ready is None else max(0.0, all_ready - ready),
        own_ready_us=own(ready),
        own_await_us=own(min((since for since, _ in waits if since >= ready), default=end)),
        gaps_us=[max(0.0, after - before) for before, after in zip(moments[::2], moments[1::2], strict=True)],
        legs=bucket["legs"],
        between_hosts_bytes=bucket["between_hosts_bytes"],
        overlaps=step["step"] != bucket["step"] or done > end,
    )


def _late_by_work(seen: Sequence[_Seen]) -> list[_Seen]:
    """A bucket of gradients, late by what the last rank does longer since the step began.

    A collective ends at another time on each rank, and so the next step begins. That ranks have its buckets
    ready at different times, by as much, costs nothing.
    """
    last: dict[int, float] = defaultdict(float)
    for one in seen:
        last[one.step] = max(last[one.step], one.ready_us)
    return [one._replace(late_us=last[one.step] - one.ready_us) for one in seen]


@dataclass(frozen=True, slots=True)
class Network:
    """What a run's ranks are joined by."""

    hosts: int
    ranks: int
    on_cpu: bool

    def carry(self, leg: Mapping[str, Any], level: Level, nbytes: float) -> Carry:
        """A collective in which the ranks of a host send so many bytes, with the messages of Gloo's rings."""
        group = leg["group"]
        among = (
            self.hosts if "across" in group else self.ranks // self.hosts if "within" in group else self.ranks
        )
        rounds = max(1, rounds_of(leg["op"], among)) if self.on_cpu else 1
        return Carry(0.0, {level: nbytes}, min(rounds, MOST_ROUNDS), queue=group)


@dataclass(frozen=True, slots=True)
class Replay:
    """The most frequent exchange of a stage."""

    level: Level
    bytes_per_s: float  # of the link that fits best
    known: bool  # the link takes long enough for its rate to be told
    played: Played  # with no rank late
    steps: Collection[tuple[int, int]]  # with that exchange: rank and number

    @property
    def where(self) -> str:
        """The link is."""
        return "between hosts" if self.level == "across" else "inside the host"


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket, by medians over steps and ranks."""

    name: str
    own_ready_us: float
    own_await_us: float
    done_us: float
    phases: Sequence[Work | Late | Carry]  # first hooks, then lateness


def replay(measured: Measured, network: Network) -> Replay | None:
    """Play a stage again; None: nothing took a link, or exchange overlaps with later steps."""
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
    every = [one for seen in rows.values() for one in seen]
    level: Level = "across" if any(one.between_hosts_bytes for one in every) else "within"
    sent = [_sent(name, seen, level, network) for name, seen in rows.items()]
    nbytes = sum(phase.nbytes[level] for one in sent for phase in one.phases if isinstance(phase, Carry))
    if not nbytes or any(one.overlaps for one in every):
        return None
    lines = [measured.steps[key] for key in steps]
    waited = [sum(until - since for since, until in line.get("waits") or ()) for line in lines]
    own_us: float = median(line["step_us"] - us for line, us in zip(lines, waited, strict=True))
    step_us: float = median(line["step_us"] for line in lines)
    ends_us = {one.name: one.done_us for one in sent}

    def play(bytes_per_s: float, *, late: bool) -> Played:
        links = Links(**{level: Link(bytes_per_s)})
        machine = Machine(math.inf, 1, links, workers=2 if network.on_cpu else 1)
        return Timeline(machine).play(_instructions(sent, own_us, late=late))

    def off(log_rate: float) -> float:
        # Not squares: one bucket that took its own time must not count for all.
        played = play(math.exp(log_rate), late=True)
        return abs(played.us - step_us) + sum(abs(one.done_us - ends_us[one.name]) for one in played.flights)

    span_us = max(ends_us.values()) - min(one.own_ready_us for one in sent)
    slowest = 1e6 * nbytes / max(span_us, 1.0) / 2
    bytes_per_s = math.exp(_least(off, math.log(slowest), math.log(_FASTER * slowest)))
    known = 1e6 * nbytes / bytes_per_s > _LITTLE * step_us
    return Replay(level, bytes_per_s, known, play(bytes_per_s, late=False), steps)


def _sent(name: str, seen: Sequence[_Seen], level: Level, network: Network) -> _Sent:
    usual = Counter(len(one.legs) for one in seen).most_common(1)[0][0]
    seen = [one for one in seen if len(one.legs) == usual]
    gaps_us = [median(gaps) for gaps in zip(*(one.gaps_us for one in seen), strict=True)]
    phases: list[Work | Late | Carry] = [Work(gaps_us[0]), Late(median(one.late_us or 0.0 for one in seen))]
    for index in range(usual):
        nbytes = network.ranks / network.hosts * fmean(_bytes(one, index, level) for one in seen)
        if nbytes:
            phases.append(network.carry(seen[0].legs[index], level, nbytes))
        else:  # over another link: as long as it takes on the rank that waits for nobody
            us: dict[int, list[float]] = defaultdict(list)
            for one in seen:
                us[one.rank].append(one.legs[index]["done_us"] - one.legs[index]["start_us"])
            phases.append(Late(min(map(median, us.values()))))
        phases.append(Work(gaps_us[index + 1]))
    ready_us, await_us, done_us = (
        median(getattr(one, name) for one in seen) for name in ("own_ready_us", "own_await_us", "done_us")
    )
    return _Sent(name, ready_us, max(ready_us, await_us), done_us, phases)


def _bytes(one: _Seen, index: int, level: Level) -> float:
    """What a rank sends over a link in one collective. Of what leaves the host, records have the sum over a
    bucket's collectives.
    """
    sizes = [0.0 if level == "across" and "within" in leg["group"] else leg["wire_bytes"] for leg in one.legs]
    whole = math.fsum(sizes)
    if level == "across" and whole:
        return max(0.0, one.between_hosts_bytes * sizes[index] / whole)
    return max(0.0, sizes[index])


def _instructions(sent: Sequence[_Sent], own_us: float, *, late: bool) -> Iterator[Instruction]:
    """A step: the training thread as recorded, and each bucket sent once it is ready."""
    moments: list[tuple[float, Instruction]] = []
    for one in sent:
        phases = one.phases if late else (one.phases[0], *one.phases[2:])
        flight = Flight(one.name, tuple(phases), one.name, on_training_thread=False)
        moments += [(one.own_ready_us, Send(flight)), (one.own_await_us, Await(one.name))]
    now = 0.0
    for at, instruction in sorted(moments, key=lambda moment: (moment[0], isinstance(moment[1], Await))):
        yield Work(at - now, "own")
        now = at
        yield instruction
    yield Work(own_us - now, "own")


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a cost is least: first of evenly spaced values, then around the best of them."""
    cost, width = cache(cost), (high - low) / _TRIALS
    best = min((low + index * width for index in range(_TRIALS + 1)), key=cost)
    low, high = best - width, best + width
    while high - low > _EXACT:
        near, far = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, far) if cost(near) <= cost(far) else (near, high)
    return (low + high) / 2
