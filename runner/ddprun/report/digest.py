"""What a report needs of a run's records, in one pass over them and in bounded memory.

Records of very many steps are thinned: curves are means over as many equal stretches as a chart has room for,
and bucket records are read of every n-th step, never of the first so many only.
"""

import math
import random
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ddprun.report.runs import Run
from ddprun.telemetry.records import PARTS

POINTS = 400
"""Of a curve, at most."""

_BUCKET_LINES = 200_000
_TIMELINES = 10
_GRADIENTS = 16


@dataclass(frozen=True, slots=True)
class Curve:
    """Means over stretches of steps."""

    steps: list[float]
    """The middle of each stretch."""

    means: list[float | None]
    lowest: list[float | None]
    highest: list[float | None]


@dataclass(slots=True)
class Sent:
    """What went through one stack of hooks, of all ranks."""

    kind: str
    hooks: tuple[str, ...]
    steps: int = 0
    """In how many steps of those that were read."""

    bytes: int = 0
    wire_bytes: int = 0
    between_hosts_bytes: int = 0
    us: int = 0
    """From ready to done, of all payloads."""

    encode_us: int = 0
    decode_us: int = 0
    payloads: int = 0


@dataclass(slots=True)
class Gathered:
    """How a gradient bucket came to be complete, in the steps and on the ranks that were read."""

    params: tuple[str, ...]
    completed_by: Counter[str] = field(default_factory=Counter)
    """How often each parameter's gradient was the last."""

    us: int = 0
    """From its first gradient to its last, of all steps and ranks."""

    def add(self, line: Mapping[str, Any]) -> None:
        """One more record of it."""
        ready = [at for at in line["params_ready_us"] if at is not None]
        if ready:
            self.completed_by[line["completed_by"]] += 1
            self.us += max(ready) - min(ready)


@dataclass(slots=True)
class Digest:
    """A run in numbers."""

    run: Run
    recorded: list[int]
    """Steps of which there are records."""

    parts_us: list[dict[str, float]]
    """By rank: the mean time of each part in a step."""

    step_us: float
    """A step's mean time, over ranks."""

    met: int
    """Recorded steps in which ranks told each other their losses."""

    other_share: float
    loss: Curve
    rank_losses: list[Curve]
    parts: dict[str, Curve]
    """Mean over ranks of each part of a step."""

    step: Curve
    sent: list[Sent]
    bucket_steps: int
    """Steps whose bucket records were read."""

    fidelity: dict[str, Curve]
    gathered: dict[int, Gathered]
    """By gradient bucket; empty if it was not recorded when gradients were complete."""

    timelines: list[dict[str, Any]] = field(default_factory=list)
    """Of some steps: what every rank did when."""

    @property
    def ranks(self) -> int:
        """How many there are records of."""
        return len(self.parts_us)


class _Column:
    """A number for each recorded step; room is taken for these alone, whatever number a step has.

    Args:
        steps: in order.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.sums = array("d", bytes(8 * len(steps)))
        self.counts = array("l", bytes(array("l").itemsize * len(steps)))

    def add(self, place: int | None, value: float | None) -> None:
        # A run that goes on has records of later steps than those that were counted.
        if value is not None and value == value and place is not None:
            self.sums[place] += value
            self.counts[place] += 1

    def mean(self, place: int | None) -> float | None:
        return self.sums[place] / self.counts[place] if place is not None and self.counts[place] else None

    def of(self, step: int) -> float:
        """The mean of a step; 0 if nothing is known of it."""
        return self.mean(_place(self._steps, step)) or 0.0

    def curve(self, points: int = POINTS) -> Curve:
        """Means over as many equal stretches of steps as there are points."""
        last = self._steps[-1] if self._steps else 0
        stretch = max(1, math.ceil(last / points))
        found = Curve([], [], [], [])
        for number, group in groupby(range(len(self._steps)), lambda at: (self._steps[at] - 1) // stretch):
            known = [value for place in group if (value := self.mean(place)) is not None]
            if known:
                start = number * stretch
                found.steps.append(start + (min(last, start + stretch) - start + 1) / 2)
                found.means.append(sum(known) / len(known))
                found.lowest.append(min(known))
                found.highest.append(max(known))
        return found


def _place(steps: Sequence[int], step: int) -> int | None:
    place = bisect_left(steps, step)
    return place if place < len(steps) and steps[place] == step else None


def digest(run: Run) -> Digest:
    """Read a run's records."""
    steps = run.recorded
    loss, step = _Column(steps), _Column(steps)
    rank_losses = [_Column(steps) for _ in run.ranks]
    parts = {part: _Column(steps) for part in PARTS}
    waited = _Column(steps)
    means = []
    for place, rank in enumerate(run.ranks):
        totals, count = dict.fromkeys((*PARTS, "step_us"), 0), 0
        for line in run.steps(rank):
            at = _place(steps, line["step"])
            loss.add(at, line["mean_loss"])
            rank_losses[place].add(at, line["loss"])
            step.add(at, line["step_us"])
            waited.add(at, line["exposed_wait_us"])
            for part, column in parts.items():
                column.add(at, line[part])
                totals[part] += line[part]
            totals["step_us"] += line["step_us"]
            count += 1
        means.append({part: total / count for part, total in totals.items()} if count else {})
    recorded = [number for number, count in zip(steps, step.counts, strict=True) if count]
    step_us = sum(one.get("step_us", 0.0) for one in means) / max(1, len(means))
    other = sum(one.get("other_us", 0.0) for one in means) / max(1, len(means))
    sent, fidelity, gathered, bucket_steps = _sent(run, recorded)
    found = Digest(
        run=run,
        recorded=recorded,
        parts_us=means,
        step_us=step_us,
        met=sum(1 for count in loss.counts if count),
        other_share=other / step_us if step_us else 0.0,
        loss=loss.curve(),
        rank_losses=[column.curve() for column in rank_losses[:16]],
        parts={part: column.curve() for part, column in parts.items()},
        step=step.curve(),
        sent=sent,
        bucket_steps=bucket_steps,
        fidelity=fidelity,
        gathered=gathered,
    )
    found.timelines = list(_timelines(run, _worth_a_look(recorded, step, waited)))
    return found


def _sent(run: Run, recorded: Sequence[int]) -> tuple[list[Sent], dict[str, Curve], dict[int, Gathered], int]:
    """Bucket records, of so many steps that reading them takes seconds at most; how many these are."""
    if not recorded:
        return [], {}, {}, 0
    sample = sum(1 for rank in run.ranks for _ in run.buckets(rank, {recorded[-1]}.__contains__)) or 1
    every = max(1, math.ceil(len(recorded) * sample / _BUCKET_LINES))
    # Drawn, not every n-th: what is sent every n-th step would be in all of them, or in none.
    wanted = frozenset(random.Random(0).sample(recorded, len(recorded) // every or 1))
    found: dict[tuple[str, tuple[str, ...]], Sent] = {}
    steps: dict[tuple[str, tuple[str, ...]], set[int]] = defaultdict(set)
    gathered: dict[int, Gathered] = {}
    columns = {name: _Column(recorded) for name in ("cosine", "relative_l2")}
    for rank in run.ranks:
        for line in run.buckets(rank, wanted.__contains__):
            key = line["kind"], tuple(line["hooks"])
            one = found.setdefault(key, Sent(*key))
            steps[key].add(line["step"])
            one.bytes += line["bytes"]
            one.wire_bytes += line["wire_bytes"]
            one.between_hosts_bytes += line["between_hosts_bytes"]
            one.us += line["done_us"] - line["ready_us"]
            one.encode_us += line["encode_us"]
            one.decode_us += line["decode_us"]
            one.payloads += 1
            if "params_ready_us" in line:
                gathered.setdefault(line["bucket"], Gathered(tuple(line["params"]))).add(line)
        for line in run.buckets(rank, holding=b'"fidelity"'):
            for name, column in columns.items():
                column.add(_place(recorded, line["step"]), line["fidelity"][name])
    for key, one in found.items():
        one.steps = len(steps[key])
    curves = {name: column.curve() for name, column in columns.items() if any(column.counts)}
    return list(found.values()), curves, dict(sorted(gathered.items())), len(wanted)


def _worth_a_look(recorded: Sequence[int], step: _Column, waited: _Column) -> dict[int, str]:
    """Steps whose timeline is shown, and why: some evenly over the run, the longest, the most waited in."""
    if not recorded:
        return {}
    count = min(len(recorded), _TIMELINES - 2)
    places = [round(place * (len(recorded) - 1) / max(1, count - 1)) for place in range(count)]
    chosen = {recorded[place]: "" for place in places}
    later = recorded[len(recorded) // 10 :]  # the first steps are slower than all others
    typical = sorted(later, key=lambda number: step.of(number))[len(later) // 2]
    most = max(later, key=lambda number: waited.of(number))
    longest = max(later, key=lambda number: step.of(number))
    for number, why in ((typical, "the median step"), (most, "most waited in"), (longest, "the longest")):
        chosen[number] = f"{chosen[number]}, {why}" if chosen.get(number) else why
    return dict(sorted(chosen.items()))


def _timelines(run: Run, chosen: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    lines: dict[int, list[dict[str, Any]]] = {number: [] for number in chosen}
    for rank in run.ranks[:64]:
        buckets: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for one in run.buckets(rank, chosen.__contains__):
            buckets[one["step"]].append(one)
        for line in run.steps(rank, chosen.__contains__):
            clock = run.clocks
            start, us = line["start_us"], 0
            laps = []
            for part, length in line.get("laps", ()):
                laps.append([part, us, length])
                us += length
            lines[line["step"]].append(
                {
                    "rank": rank,
                    "start_us": clock.aligned(rank, start),
                    "step_us": line["step_us"],
                    "laps": laps,
                    "waits": [[a - start, b - a] for a, b in line.get("waits", ())],
                    "buckets": [
                        {
                            "bucket": one["bucket"],
                            "kind": one["kind"],
                            "params": one["params"][:8] + (["…"] if len(one["params"]) > 8 else []),
                            "ready_us": one["ready_us"] - start,
                            "all_ready_us": None
                            if one.get("all_ready_us") is None
                            else one["all_ready_us"] - start,
                            "done_us": one["done_us"] - start,
                            "bytes": one["bytes"],
                            "wire_bytes": one["wire_bytes"],
                            "gradients": _last_gradients(one, start),
                        }
                        for one in buckets[line["step"]]
                    ],
                }
            )
    for number, why in chosen.items():
        first = min((one["start_us"] for one in lines[number]), default=0.0)
        for one in lines[number]:
            one["start_us"] = round(one["start_us"] - first)
        yield {"step": number, "why": why, "ranks": lines[number]}


def _last_gradients(bucket: Mapping[str, Any], start_us: float) -> list[tuple[str, float]]:
    """When the gradients that were complete last in a bucket were so, after `start_us`; the first of them
    left out if there are many.
    """
    known = zip(bucket["params"], bucket.get("params_ready_us", ()), strict=False)
    ready = sorted((at - start_us, name) for name, at in known if at is not None)
    return [(name, at) for at, name in ready[-_GRADIENTS:]]


def counted(events: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """How often each kind of event came."""
    return Counter(str(event["event"]) for event in events)
