"""What a report needs of a run's records, in one pass over them and in bounded memory; and what stands out in
it, in three sentences: where the time went, who was late, and what to try.

Long runs are thinned: a curve shows means over as many equal intervals of steps as a chart has room for, and
bucket records are read of steps that are drawn at random from the whole run.
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
from ddprun.telemetry.steps import PARTS
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import count

_POINTS = 400  # of a curve, at most
_BUCKET_LINES = 200_000
_TIMELINES = 10
_TIMELINE_RANKS = 64
_RANK_LOSSES = 16
_MARKED_GRADIENTS = 16
_NAMED_PARAMS = 8
_MUCH = 0.15  # a share of a step's time that is worth a change
_MUCH_OF_THE_WAITING = 0.25  # a late rank that causes less of all waiting is not what to begin with
_WINDOW = 20  # synchronising steps that stragglers are looked for in, by default
_ADVICE = {
    "data": "Try more `loader.workers`, or look at that rank's disk.",
    "forward": "Look at what else runs on that rank's cores or GPU, and at inputs that cost more.",
    "backward": "Look at the layers of that bucket, and at what else runs on that rank's cores or GPU.",
    "optimizer": "Look at what else runs on that rank's cores or GPU.",
    "sync": "Look at what that rank does between steps.",
    "communication": "Look at that rank's link, and at hooks that work on its training thread.",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Means over intervals of steps."""

    steps: list[float]  # the middle of each interval
    means: list[float | None]
    lowest: list[float | None]
    highest: list[float | None]


@dataclass(slots=True)
class Sent:
    """What went through one stack of hooks: sums over the payloads of all ranks."""

    kind: str
    hooks: tuple[str, ...]
    steps: int = 0  # how many of the steps that were read had such a payload
    bytes: int = 0
    wire_bytes: int = 0
    between_hosts_bytes: int = 0
    us: int = 0  # from ready to done
    encode_us: int = 0
    decode_us: int = 0
    payloads: int = 0


@dataclass(slots=True)
class Gathered:
    """How the gradients of a bucket became complete, over the steps and ranks that were read."""

    params: tuple[str, ...]
    completed_by: Counter[str] = field(default_factory=Counter)  # how often each gradient was the last
    us: int = 0  # from the first gradient to the last, summed over steps and ranks


@dataclass(slots=True)
class Digest:
    """A run in numbers."""

    run: Run
    recorded: list[int]  # the steps that have records
    parts_us: list[dict[str, float]]  # for each rank the mean time of each part of a step, and `step_us`
    synced_steps: int  # recorded steps in which ranks exchanged their losses
    loss: Curve
    rank_losses: list[Curve]  # of the first ranks
    parts_ms: dict[str, Curve]  # each part of a step, mean over ranks
    sent: list[Sent] = field(default_factory=list)
    bucket_steps: int = 0  # steps whose bucket records were read
    fidelity: dict[str, Curve] = field(default_factory=dict)
    gathered: dict[int, Gathered] = field(default_factory=dict)  # by gradient bucket, if measured
    timelines: list[dict[str, Any]] = field(default_factory=list)  # of some steps: what every rank did when

    @property
    def ranks(self) -> int:
        """How many ranks have records."""
        return len(self.parts_us)

    @property
    def mean_parts_us(self) -> dict[str, float]:
        """The mean time of each part of a step, and `step_us`, over ranks."""
        known = max(1, self.ranks)
        return {
            part: sum(one.get(part, 0.0) for one in self.parts_us) / known for part in (*PARTS, "step_us")
        }


class _Column:
    """For each recorded step, in order, the mean of a number over ranks, in bounded memory."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.sums = array("d", bytes(8 * len(steps)))
        self.counts = array("l", bytes(array("l").itemsize * len(steps)))

    def add(self, index: int | None, value: float | None) -> None:
        # While a run is going on, records of later steps than `steps` come.
        if value is not None and index is not None:
            self.sums[index] += value
            self.counts[index] += 1

    def mean(self, index: int | None) -> float | None:
        return self.sums[index] / self.counts[index] if index is not None and self.counts[index] else None

    def of(self, step: int) -> float:
        """The mean of a step; 0 if there is none."""
        return self.mean(_index(self._steps, step)) or 0.0

    def curve(self, scale: float = 1.0) -> Curve:
        last = self._steps[-1] if self._steps else 0
        length = max(1, math.ceil(last / _POINTS))
        found = Curve([], [], [], [])
        for number, group in groupby(range(len(self._steps)), lambda at: (self._steps[at] - 1) // length):
            known = [value * scale for index in group if (value := self.mean(index)) is not None]
            if known:
                start = number * length
                found.steps.append(start + (min(last, start + length) - start + 1) / 2)
                found.means.append(sum(known) / len(known))
                found.lowest.append(min(known))
                found.highest.append(max(known))
        return found


def _index(steps: Sequence[int], step: int) -> int | None:
    index = bisect_left(steps, step)
    return index if index < len(steps) and steps[index] == step else None


def digest(run: Run) -> Digest:
    """Read a run's records."""
    steps = run.recorded
    rank_losses = [_Column(steps) for _ in run.ranks]
    columns = {name: _Column(steps) for name in ("mean_loss", *PARTS, "step_us")}
    means = []
    for rank, own_loss in zip(run.ranks, rank_losses, strict=True):
        totals, lines = dict.fromkeys((*PARTS, "step_us"), 0), 0
        for line in run.steps(rank):
            at = _index(steps, line["step"])
            own_loss.add(at, line["loss"])
            for name, column in columns.items():
                column.add(at, line[name])
            for part in totals:
                totals[part] += line[part]
            lines += 1
        means.append({part: total / lines for part, total in totals.items()} if lines else {})
    found = Digest(
        run=run,
        recorded=[number for number, count in zip(steps, columns["step_us"].counts, strict=True) if count],
        parts_us=means,
        synced_steps=sum(1 for count in columns["mean_loss"].counts if count),
        loss=columns["mean_loss"].curve(),
        rank_losses=[column.curve() for column in rank_losses[:_RANK_LOSSES]],
        parts_ms={part: columns[part].curve(1e-3) for part in PARTS},
    )
    if found.recorded:
        _read_buckets(found)
        shown = _steps_to_show(found.recorded, columns["step_us"], columns["exposed_wait_us"])
        found.timelines = list(_timelines(run, shown))
    return found


def _read_buckets(found: Digest) -> None:
    """Bucket records, of as many steps as can be read in seconds."""
    run, recorded = found.run, found.recorded
    sample = sum(1 for rank in run.ranks for _ in run.buckets(rank, {recorded[-1]}.__contains__)) or 1
    every = max(1, math.ceil(len(recorded) * sample / _BUCKET_LINES))
    # Drawn, not every n-th: what is sent every n-th step would be in all of them, or in none.
    wanted = frozenset(random.Random(0).sample(recorded, len(recorded) // every or 1))
    sent: dict[tuple[str, tuple[str, ...]], Sent] = {}
    steps: dict[tuple[str, tuple[str, ...]], set[int]] = defaultdict(set)
    gathered: dict[int, Gathered] = {}
    columns = {name: _Column(recorded) for name in ("cosine", "relative_l2")}
    for rank in run.ranks:
        for line in run.buckets(rank, wanted.__contains__):
            key = line["kind"], tuple(line["hooks"])
            one = sent.setdefault(key, Sent(*key))
            steps[key].add(line["step"])
            one.bytes += line["bytes"]
            one.wire_bytes += line["wire_bytes"]
            one.between_hosts_bytes += line["between_hosts_bytes"]
            one.us += line["done_us"] - line["ready_us"]
            one.encode_us += line["encode_us"]
            one.decode_us += line["decode_us"]
            one.payloads += 1
            ready = [at for at in line.get("params_ready_us", ()) if at is not None]
            if ready and (last := line.get("completed_by")) is not None:
                bucket = gathered.setdefault(line["bucket"], Gathered(tuple(line["params"])))
                bucket.completed_by[last] += 1
                bucket.us += max(ready) - min(ready)
        for line in run.buckets(rank, holding=b'"fidelity"'):
            for name, column in columns.items():
                column.add(_index(recorded, line["step"]), line["fidelity"][name])
    for key, one in sent.items():
        one.steps = len(steps[key])
    found.sent, found.bucket_steps = list(sent.values()), len(wanted)
    found.fidelity = {name: column.curve() for name, column in columns.items() if any(column.counts)}
    found.gathered = dict(sorted(gathered.items()))


def _steps_to_show(recorded: Sequence[int], step: _Column, waited: _Column) -> dict[int, str]:
    """Steps whose timeline is shown, and why: some evenly over the run, and the three that stand out."""
    shown = min(len(recorded), _TIMELINES - 2)
    positions = [round(index * (len(recorded) - 1) / max(1, shown - 1)) for index in range(shown)]
    chosen = {recorded[index]: "" for index in positions}
    later = recorded[len(recorded) // 10 :]  # the first steps are slower than all others
    by_length = sorted(later, key=step.of)
    special = {
        "the median step": by_length[len(later) // 2],
        "the longest wait": max(later, key=waited.of),
        "the longest": max(later, key=step.of),
    }
    for why, number in special.items():
        chosen[number] = f"{chosen[number]}, {why}" if chosen.get(number) else why
    return dict(sorted(chosen.items()))


def _timelines(run: Run, chosen: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    of_steps: dict[int, list[dict[str, Any]]] = {number: [] for number in chosen}
    for rank in run.ranks[:_TIMELINE_RANKS]:
        buckets: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for one in run.buckets(rank, chosen.__contains__):
            buckets[one["step"]].append(one)
        for line in run.steps(rank, chosen.__contains__):
            start = line["start_us"]
            of_steps[line["step"]].append(
                {
                    "rank": rank,
                    "start_us": run.clocks.aligned(rank, start),
                    "laps": line.get("laps", ()),
                    "waits": [[begin - start, end - begin] for begin, end in line.get("waits", ())],
                    "buckets": [_on_timeline(one, start) for one in buckets[line["step"]]],
                }
            )
    for number, ranks in of_steps.items():
        first = min((one["start_us"] for one in ranks), default=0.0)
        for one in ranks:
            one["start_us"] = round(one["start_us"] - first)
        yield {"step": number, "why": chosen[number], "ranks": ranks}


def _on_timeline(bucket: Mapping[str, Any], start_us: float) -> dict[str, Any]:
    """A bucket's times after `start_us`; of many gradients those that were complete last."""
    params, all_ready_us = bucket["params"], bucket.get("all_ready_us")
    times = zip(params, bucket.get("params_ready_us", ()), strict=False)
    gradients = sorted(
        ((name, at - start_us) for name, at in times if at is not None), key=lambda one: one[::-1]
    )
    return {
        "kind": bucket["kind"],
        "bucket": bucket["bucket"],
        "params": params[:_NAMED_PARAMS] + ["…"] * (len(params) > _NAMED_PARAMS),
        "ready_us": bucket["ready_us"] - start_us,
        "all_ready_us": None if all_ready_us is None else all_ready_us - start_us,
        "done_us": bucket["done_us"] - start_us,
        "wire_bytes": bucket["wire_bytes"],
        "gradients": gradients[-_MARKED_GRADIENTS:],
    }


# What stands out.


def sentences(digest: Digest) -> list[str]:
    """The sentences about one run; names of keys and commands in them are in backticks."""
    if not digest.recorded:
        return [
            "The run has no step records, so it is unknown where its time went.",
            "It may have ended before its first step.",
            "Its events, below, show how far it got.",
        ]
    shares = _shares(digest)
    sums = straggler_totals(stragglers(digest))
    return [_where(digest, shares), _who(digest, sums), _what(digest, shares, sums)]


def stragglers(digest: Digest) -> list[dict[str, Any]]:
    """Each episode in which a rank was late."""
    summary = digest.run.summary
    if summary is not None and "stragglers" in summary:
        found: list[dict[str, Any]] = summary["stragglers"]
        return found
    return [{**event, "rank": event["straggler"]} for event in digest.run.all("straggler")]


def _shares(digest: Digest) -> dict[str, float]:
    """Of a step's time, means over ranks."""
    us = digest.mean_parts_us
    parts = {
        "compute": ("forward_us", "backward_us", "optimizer_us"),
        "data": ("data_us",),
        "hook": ("exposed_hook_us",),
        "wait": ("exposed_wait_us",),
        "wire": ("exposed_wire_us",),
        "sync": ("sync_us", "other_us"),
    }
    return {name: sum(us[part] for part in some) / (us["step_us"] or 1.0) for name, some in parts.items()}


def _where(digest: Digest, shares: Mapping[str, float]) -> str:
    exposed = shares["hook"] + shares["wait"] + shares["wire"]
    found = [
        (shares["compute"], "forward, backward and optimizer"),
        (
            exposed,
            f"exposed communication ({shares['wire']:.0%} on the wire, {shares['wait']:.0%} waiting for the "
            f"last rank, {shares['hook']:.0%} in hooks)",
        ),
        (shares["data"], "loading data"),
        (shares["sync"], "between steps"),
    ]
    named = [f"{share:.0%} {what}" for share, what in sorted(found, reverse=True) if share >= 0.005]
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, and {named[-1]}"
    return f"A step took {digest.mean_parts_us['step_us'] / 1000:.1f} ms on average: {listed}."


def _who(digest: Digest, sums: Sequence[StragglerTotal]) -> str:
    if digest.ranks < 2:
        return "There was one rank, so no rank waited for another."
    if not sums and digest.synced_steps < _WINDOW:
        return "Ranks synchronised too rarely, or in too few steps, to tell whether one was late."
    if not sums:
        return "No rank was late for long."
    worst, *rest = sums
    params = ", ".join(worst.params[:3]) + (" …" if len(worst.params) > 3 else "")
    bucket = "" if worst.bucket is None else f", before bucket {worst.bucket} ({params})"
    more = sum(one.episodes for one in rest)
    others = f"; {count(more, 'more episode')} of late ranks below" if more else ""
    return (
        f"Rank {worst.rank} was {worst.late_us / 1000:.1f} ms late in {worst.cause}{bucket}, {worst.when()}, "
        f"and the others waited for it{others}."
    )


def _what(digest: Digest, shares: Mapping[str, float], sums: Sequence[StragglerTotal]) -> str:
    wait = shares["wait"]
    if wait > _MUCH and sums and _waiting_for(digest, sums[0]) > _MUCH_OF_THE_WAITING * wait:
        return _ADVICE.get(sums[0].cause, _ADVICE["optimizer"])
    if shares["data"] > _MUCH:
        return "Try more `loader.workers`: the training thread waits for its data."
    if shares["hook"] > _MUCH:
        return (
            "Try without the hooks, or with cheaper ones: they may cost more time than they save on the "
            "wire; `ddprun compare` measures it."
        )
    if shares["wire"] > _MUCH:
        return _against_the_wire(digest)
    if wait > _MUCH:
        return (
            f"Try {_less_often(digest)}: another rank is the last one each time, and every synchronisation "
            "waits for it."
        )
    if shares["sync"] > _MUCH:
        return (
            "Try to do less between steps: audits, fidelity, buffer exchanges and mutation are in `sync_us`."
        )
    if shares["compute"] > 0.8:
        return (
            "Communication is hidden or small; to go faster, try `precision: bf16`, a larger "
            "`loader.batch_size`, or more ranks."
        )
    return "Nothing stands out: no single change is likely to gain much."


def _against_the_wire(digest: Digest) -> str:
    if {one.hooks for one in digest.sent if one.kind in ("gradient", "delta")} != {()}:
        return f"Try {_less_often(digest)}."
    also = ", `[hierarchical]`" if any(one.between_hosts_bytes for one in digest.sent) else ""
    return (
        f"Try to send less (`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`{also}), or try "
        f"{_less_often(digest)}."
    )


def _less_often(digest: Digest) -> str:
    begun = digest.run.all("stage_started")
    sync = begun[-1].get("sync") if begun else None
    if isinstance(sync, Mapping) and sync:
        name, options = next(iter(sync.items()))
        if isinstance(options, Mapping) and options:
            now = ", ".join(f"{key}: {value}" for key, value in options.items())
            return f"a longer period of `{name}` (`{now}` now)"
    return "to synchronise less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`)"


def _waiting_for(digest: Digest, late: StragglerTotal) -> float:
    """The share of the run's time that ranks waited for a late one, mean over ranks."""
    steps = max(late.steps, digest.recorded[-1] - digest.recorded[0] + 1)
    return late.lost_steps / steps * (digest.ranks - 1) / digest.ranks
