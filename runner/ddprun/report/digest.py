"""What a report needs of a run's records, stage by stage, in one pass over them and in bounded memory; and
what stands out in a stage, in three sentences: where the time went, who was late, and what to try.

Long runs are thinned: a curve shows means over as many equal intervals of steps as a chart has room for, and
bucket records are read of steps that are drawn at random from the whole run.
"""

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from ddprun.report.runs import Run
from ddprun.telemetry.steps import PARTS
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import count, size

_POINTS = 400  # of a curve, at most
_BUCKET_LINES = 200_000
_TIMELINES = 10
_TIMELINE_RANKS = 64
_RANK_LOSSES = 16
_MARKED_GRADIENTS = 16
_GROUPS = 8  # of parameters, whose learning rates and gradient norms are curves
_SIZES = 5  # of buckets, whose fidelity is a curve
_NAMED_STAGES = 4  # in sentences
_MUCH_OF_THE_RUN = 0.1  # a stage that took less of the time of all steps has no sentences
_NAMED_PARAMS = 8
_MUCH = 0.15  # a share of a step's time that is worth a change
_MUCH_OF_THE_WAITING = 0.25  # a late rank that causes less of all waiting is not what to begin with
_WINDOW = 20  # synchronising steps that stragglers are looked for in, by default
_LITTLE = 0.02  # of a step's time: not worth a sentence
PART_NAMES = {
    "data_us": "loading data",
    "forward_us": "forward",
    "backward_us": "backward",
    "exposed_hook_us": "hooks, exposed",
    "exposed_wait_us": "waiting for the last rank",
    "exposed_wire_us": "wire, exposed",
    "optimizer_us": "optimizer",
    "sync_us": "between steps",
    "other_us": "other",
}
_PLACES = {
    "data_us": "loading data",
    "forward_us": "in forward",
    "backward_us": "in backward",
    "exposed_hook_us": "in hooks",
    "exposed_wait_us": "waiting for the last rank",
    "exposed_wire_us": "on the wire",
    "optimizer_us": "in the optimizer",
    "sync_us": "between steps",
    "other_us": "elsewhere",
}
_SHARES = {
    "compute": ("forward_us", "backward_us", "optimizer_us"),
    "data": ("data_us",),
    "hook": ("exposed_hook_us",),
    "wait": ("exposed_wait_us",),
    "wire": ("exposed_wire_us",),
    "sync": ("sync_us", "other_us"),
}
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
    """Means over intervals of steps; no interval has steps of two stages."""

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


@dataclass
class Times:
    """Where the time of some steps went, on each rank."""

    us: list[Counter[str]]  # for each rank the sum over its steps of each part, and of `step_us`
    steps: list[int]  # how many these are, for each rank

    def __add__(self, other: "Times") -> "Times":
        """Of the steps of both."""
        us = zip(self.us, other.us, strict=True)
        return Times([one + more for one, more in us], list(map(int.__add__, self.steps, other.steps)))

    @cached_property
    def parts_us(self) -> list[dict[str, float]]:
        """For each rank the mean of each part of a step, and of `step_us`; empty for a rank without steps."""
        ranks = zip(self.us, self.steps, strict=True)
        return [
            {part: us[part] / steps for part in (*PARTS, "step_us")} if steps else {} for us, steps in ranks
        ]

    @cached_property
    def mean_parts_us(self) -> dict[str, float]:
        """The means over ranks."""
        known = [one for one in self.parts_us if one]
        return {part: sum(one[part] for one in known) / max(1, len(known)) for part in (*PARTS, "step_us")}

    @cached_property
    def shares(self) -> dict[str, float]:
        """Of a step's time, means over ranks."""
        us = self.mean_parts_us
        return {
            name: sum(us[part] for part in some) / (us["step_us"] or 1.0) for name, some in _SHARES.items()
        }

    @property
    def exposed(self) -> float:
        """The share of communication that does not overlap with computation."""
        return self.shares["hook"] + self.shares["wait"] + self.shares["wire"]


@dataclass
class Stage:
    """The steps of a stage in numbers."""

    index: int  # in the pipeline's `stages`, from 0
    kind: str
    sync: Any  # the policy as the pipeline has it
    hooks: tuple[str, ...]  # the names in its stack
    first: int  # recorded step
    last: int
    times: Times
    synced_steps: int  # recorded steps in which ranks exchanged their losses
    sent: list[Sent] = field(default_factory=list)
    bucket_steps: int = 0  # steps whose bucket records were read

    @property
    def name(self) -> str:
        """As a reader knows it."""
        return f"stage {self.index}, {self.described}"

    @property
    def step_ms(self) -> float:
        """The mean time of a step."""
        return self.times.mean_parts_us["step_us"] / 1000

    @property
    def period(self) -> tuple[str, Mapping[str, Any]] | None:
        """The sync policy with its options, if it has any: it then synchronises now and then."""
        if isinstance(self.sync, Mapping) and self.sync:
            name, options = next(iter(self.sync.items()))
            if isinstance(options, Mapping) and options:
                return name, options
        return None

    @property
    def described(self) -> str:
        """What it does: how it synchronises, and through which hooks."""
        policy = next(iter(self.sync), None) if isinstance(self.sync, Mapping) else self.sync
        about = [str(policy)] if policy not in (None, "every_step") else []
        about += self.hooks
        return self.kind + (f" ({', '.join(about)})" if about else "")


@dataclass
class Digest:
    """A run in numbers."""

    run: Run
    recorded: list[int]  # the steps that have records
    stages: list[Stage]  # that have steps, in their order
    loss: Curve
    rank_losses: list[Curve]  # of the first ranks
    parts_ms: dict[str, Curve]  # each part of a step, mean over ranks
    groups: dict[str, list[Curve]]  # learning rate and gradient norm of the first groups of parameters
    grad_norm: Curve  # of all gradients together
    held_out: dict[str, Curve]  # each metric of the evaluations
    fidelity: dict[str, dict[str, Curve]] = field(default_factory=dict)  # each measure, by size of buckets
    gathered: dict[int, Gathered] = field(default_factory=dict)  # by gradient bucket, if measured
    timelines: list[dict[str, Any]] = field(default_factory=list)  # of some steps: what every rank did when
    read_steps: frozenset[int] = frozenset()  # whose bucket records were read

    @property
    def ranks(self) -> int:
        """How many ranks have records."""
        return len(self.run.ranks)

    @cached_property
    def times(self) -> Times:
        """Of all steps."""
        none = Times([Counter() for _ in self.run.ranks], [0] * self.ranks)
        return sum((stage.times for stage in self.stages), none)

    @property
    def steps_per_s(self) -> float | None:
        """The one speed of a run: from the mean time of its steps."""
        step_us = self.times.mean_parts_us["step_us"]
        return 1e6 / step_us if step_us else None

    @property
    def cosine(self) -> float | None:
        """The mean fidelity of all sizes of buckets."""
        curves = self.fidelity.get("cosine", {}).values()
        known = [value for curve in curves for value in curve.means if value is not None]
        return sum(known) / len(known) if known else None


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

    def curve(self, stages: Sequence[Stage], scale: float = 1.0) -> Curve:
        length = max(1, math.ceil((self._steps[-1] if self._steps else 0) / _POINTS))
        starts = [stage.first for stage in stages]

        def interval(index: int) -> tuple[int, int]:
            stage = max(0, bisect_right(starts, self._steps[index]) - 1)
            return stage, (self._steps[index] - starts[stage]) // length

        found = Curve([], [], [], [])
        for _, group in groupby(range(len(self._steps)), interval):
            known = [(index, value * scale) for index in group if (value := self.mean(index)) is not None]
            if known:
                values = [value for _, value in known]
                found.steps.append((self._steps[known[0][0]] + self._steps[known[-1][0]]) / 2)
                found.means.append(sum(values) / len(values))
                found.lowest.append(min(values))
                found.highest.append(max(values))
        return found


def _index(steps: Sequence[int], step: int) -> int | None:
    index = bisect_left(steps, step)
    return index if index < len(steps) and steps[index] == step else None


def digest(run: Run, timed: Callable[[int], bool] = lambda _: True) -> Digest:
    """Read a run's records; the time of the steps that are not `timed` does not count."""
    steps = run.recorded
    rank_losses = [_Column(steps) for _ in run.ranks]
    columns = {name: _Column(steps) for name in ("mean_loss", "grad_norm", *PARTS, "step_us")}
    groups: dict[str, list[_Column]] = {"lr": [], "group_grad_norms": []}
    of_stages: dict[int, Stage] = {}
    begun = {event["stage"]: event for event in run.all("stage_started")}
    for position, (rank, own_loss) in enumerate(zip(run.ranks, rank_losses, strict=True)):
        for line in run.steps(rank):
            step = line["step"]
            at = _index(steps, step)
            own_loss.add(at, line["loss"])
            for name, column in columns.items():
                column.add(at, line.get(name))
            for name, known in groups.items():
                for group, value in enumerate((line.get(name) or ())[:_GROUPS]):
                    if group == len(known):
                        known.append(_Column(steps))
                    known[group].add(at, value)
            if (stage := of_stages.get(line["stage"])) is None:
                stage = of_stages[line["stage"]] = _stage(line["stage"], begun, step, len(run.ranks))
            stage.first, stage.last = min(stage.first, step), max(stage.last, step)
            stage.synced_steps += position == 0 and line["mean_loss"] is not None
            if timed(step):
                stage.times.steps[position] += 1
                for part in (*PARTS, "step_us"):
                    stage.times.us[position][part] += line[part]
    stages = sorted(of_stages.values(), key=lambda stage: stage.first)
    found = Digest(
        run=run,
        recorded=[number for number, count in zip(steps, columns["step_us"].counts, strict=True) if count],
        stages=stages,
        loss=columns["mean_loss"].curve(stages),
        rank_losses=[column.curve(stages) for column in rank_losses[:_RANK_LOSSES]],
        parts_ms={part: columns[part].curve(stages, 1e-3) for part in PARTS},
        groups={name: _curves(known, stages) for name, known in groups.items()},
        grad_norm=columns["grad_norm"].curve(stages),
        held_out=_held_out(run),
    )
    if found.recorded:
        _read_buckets(found)
        shown = _steps_to_show(found.recorded, columns["step_us"], columns["exposed_wait_us"])
        found.timelines = list(_timelines(run, shown))
    return found


def merged(digests: Sequence[Digest]) -> Digest:
    """Runs of one pipeline under several seeds as one: the first, with all times and the mean losses."""
    first, *others = digests
    stages = [
        replace(stage, times=sum((one.stages[n].times for one in others if n < len(one.stages)), stage.times))
        for n, stage in enumerate(first.stages)
    ]
    held_out = {
        name: _mean_curve([one.held_out[name] for one in digests if name in one.held_out])
        for name in first.held_out
    }
    loss = _mean_curve([one.loss for one in digests])
    return replace(first, stages=stages, loss=loss, held_out=held_out)


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Means over curves at the steps that all have, and the lowest and the highest of their means."""
    if len(curves) == 1:
        return curves[0]
    at = [dict(zip(curve.steps, curve.means, strict=True)) for curve in curves]
    found = Curve([], [], [], [])
    for step in curves[0].steps:
        values = [value for known in at if (value := known.get(step)) is not None]
        if len(values) == len(curves):
            found.steps.append(step)
            found.means.append(sum(values) / len(values))
            found.lowest.append(min(values))
            found.highest.append(max(values))
    return found


def _stage(index: int, begun: Mapping[int, Mapping[str, Any]], step: int, ranks: int) -> Stage:
    event = begun.get(index, {})
    about = event.get("kind", "train"), event.get("sync"), tuple(event.get("hooks", ()))
    return Stage(index, *about, step, step, Times([Counter() for _ in range(ranks)], [0] * ranks), 0)


def _curves(columns: Iterable[_Column], stages: Sequence[Stage]) -> list[Curve]:
    """Of the columns that have any value."""
    return [column.curve(stages) for column in columns if any(column.counts)]


def _held_out(run: Run) -> dict[str, Curve]:
    names = dict.fromkeys(name for metrics in run.evaluations.values() for name in metrics)
    found = {}
    for name in names:
        points = {step: metrics[name] for step, metrics in run.evaluations.items() if name in metrics}
        values: list[float | None] = list(points.values())
        found[name] = Curve(list(points), values, values, values)
    return found


def _read_buckets(found: Digest) -> None:
    """Bucket records, of as many steps as can be read in seconds."""
    run, recorded = found.run, found.recorded
    sample = sum(1 for rank in run.ranks for _ in run.buckets(rank, {recorded[-1]}.__contains__)) or 1
    every = max(1, math.ceil(len(recorded) * sample / _BUCKET_LINES))
    # Drawn, not every n-th: what is sent every n-th step would be in all of them, or in none.
    wanted = found.read_steps = frozenset(random.Random(0).sample(recorded, len(recorded) // every or 1))
    sent: dict[tuple[int, str, tuple[str, ...]], Sent] = {}
    steps: dict[tuple[int, str, tuple[str, ...]], set[int]] = defaultdict(set)
    gathered: dict[int, Gathered] = {}
    sizes: set[int] = set()
    for rank in run.ranks:
        for line in run.buckets(rank, wanted.__contains__):
            key = line["stage"], line["kind"], tuple(line["hooks"])
            one = sent.setdefault(key, Sent(*key[1:]))
            steps[key].add(line["step"])
            one.bytes += line["bytes"]
            one.wire_bytes += line["wire_bytes"]
            one.between_hosts_bytes += line["between_hosts_bytes"]
            one.us += line["done_us"] - line["ready_us"]
            one.encode_us += line["encode_us"]
            one.decode_us += line["decode_us"]
            one.payloads += 1
            sizes.add(line["bytes"])
            ready = [at for at in line.get("params_ready_us", ()) if at is not None]
            if ready and (last := line.get("completed_by")) is not None:
                bucket = gathered.setdefault(line["bucket"], Gathered(tuple(line["params"])))
                bucket.completed_by[last] += 1
                bucket.us += max(ready) - min(ready)
    for stage in found.stages:
        stage.bucket_steps = sum(stage.first <= step <= stage.last for step in wanted)
        for key, one in sent.items():
            if key[0] == stage.index:
                one.steps = len(steps[key])
                stage.sent.append(one)
    found.gathered = dict(sorted(gathered.items()))
    _read_fidelity(found, sorted(sizes))


def _read_fidelity(found: Digest, sizes: Sequence[int]) -> None:
    """A curve for each size of buckets; of very many sizes, for each of a few ranges."""
    columns: dict[tuple[str, int], _Column] = {}
    read: dict[int, set[int]] = defaultdict(set)  # the sizes in each range
    for rank in found.run.ranks:
        for line in found.run.buckets(rank, holding=b'"fidelity"'):
            at = bisect_left(sizes, line["bytes"])
            group = at * _SIZES // len(sizes) if len(sizes) > _SIZES else at
            read[group].add(line["bytes"])
            for name in ("cosine", "relative_l2"):
                column = columns.setdefault((name, group), _Column(found.recorded))
                column.add(_index(found.recorded, line["step"]), line["fidelity"][name])
    for (name, group), column in sorted(columns.items()):
        if any(column.counts):
            named = " to ".join(dict.fromkeys(map(size, (min(read[group]), max(read[group])))))
            found.fidelity.setdefault(name, {})[f"buckets of {named}"] = column.curve(found.stages)


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
        "hooks": bucket["hooks"],
        "params": params[:_NAMED_PARAMS] + ["…"] * (len(params) > _NAMED_PARAMS),
        "ready_us": bucket["ready_us"] - start_us,
        "all_ready_us": None if all_ready_us is None else all_ready_us - start_us,
        "done_us": bucket["done_us"] - start_us,
        "wire_bytes": bucket["wire_bytes"],
        "gradients": gradients[-_MARKED_GRADIENTS:],
    }


# What stands out.


def sentences(digest: Digest) -> dict[str, list[str]]:
    """What stands out in a run, by the stage that it is about; names of keys and commands are in backticks.

    Of many stages, those that took most time; without a name if only one takes steps.
    """
    if not digest.recorded:
        return {
            "": [
                "The run has no step records, so it is unknown where its time went.",
                "It may have ended before its first step.",
                "Its events, below, show how far it got.",
            ]
        }
    return {
        stage.name if len(digest.stages) > 1 else "": [
            where(stage.times),
            _who(digest, stage, sums := straggler_totals(stragglers(digest, stage))),
            _what(digest, stage, sums),
        ]
        for stage in main_stages(digest)
    }


def main_stages(digest: Digest) -> list[Stage]:
    """The few stages in which a run spent most of its time, in their order."""
    us = {stage.index: sum(one["step_us"] for one in stage.times.us) for stage in digest.stages}
    longest = sorted(digest.stages, key=lambda stage: us[stage.index])[-_NAMED_STAGES:]
    least = max(1, _MUCH_OF_THE_RUN * sum(us.values()))
    return [stage for stage in digest.stages if stage in longest and us[stage.index] >= least]


def stragglers(digest: Digest, stage: Stage | None = None) -> list[dict[str, Any]]:
    """Each episode in which a rank was late; with `stage`, those that began in it."""
    summary = digest.run.summary
    if summary is not None and "stragglers" in summary:
        found: list[dict[str, Any]] = summary["stragglers"]
    else:
        found = [{**event, "rank": event["straggler"]} for event in digest.run.all("straggler")]
    return [one for one in found if stage is None or stage.first <= one["first_step"] <= stage.last]


def where(times: Times) -> str:
    """Where the time went."""
    shares = times.shares
    found = [
        (shares["compute"], "forward, backward and optimizer"),
        (
            times.exposed,
            f"exposed communication ({shares['wire']:.0%} on the wire, {shares['wait']:.0%} waiting for the "
            f"last rank, {shares['hook']:.0%} in hooks)",
        ),
        (shares["data"], "loading data"),
        (shares["sync"], "between steps"),
    ]
    named = [f"{share:.0%} {what}" for share, what in sorted(found, reverse=True) if share >= 0.005]
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, and {named[-1]}"
    return f"A step took {times.mean_parts_us['step_us'] / 1000:.1f} ms on average: {listed}."


def difference(first: str, before: Times, after: Times) -> str:
    """How much longer or shorter a step took than in the run called `first`, and which parts made it so."""
    ms = {name: (us - before.mean_parts_us[name]) / 1000 for name, us in after.mean_parts_us.items()}
    total = ms.pop("step_us")
    if abs(total) < _LITTLE * before.mean_parts_us["step_us"] / 1000:
        return f"A step took about as long as with {first}."

    most = sorted(ms, key=lambda part: ms[part] * math.copysign(1, total))[-2:][::-1]
    parts = " and ".join(f"{_PLACES[part]} ({ms[part]:+.1f})" for part in most if ms[part] * total > 0)
    longer = "longer" if total > 0 else "less"
    return f"A step took {abs(total):.1f} ms {longer} than with {first}, mostly {parts}."


def _who(digest: Digest, stage: Stage, sums: Sequence[StragglerTotal]) -> str:
    if digest.ranks < 2:
        return "There was one rank, so no rank waited for another."
    if not sums and stage.synced_steps < _WINDOW:
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


def _what(digest: Digest, stage: Stage, sums: Sequence[StragglerTotal]) -> str:
    shares = stage.times.shares
    wait = shares["wait"]
    if wait > _MUCH and sums and _waiting_for(digest, stage, sums[0]) > _MUCH_OF_THE_WAITING * wait:
        return _ADVICE.get(sums[0].cause, _ADVICE["optimizer"])
    if shares["data"] > _MUCH:
        return "Try more `loader.workers`: the training thread waits for its data."
    if shares["hook"] > _MUCH:
        plain = [one for one in _alike(digest, stage) if not one.hooks]
        if plain and (fastest := min(plain, key=lambda one: one.step_ms)).step_ms < stage.step_ms:
            there = f"a step took {fastest.step_ms:.1f} ms in stage {fastest.index}, which has none"
            return f"Try without the hooks: {there}."
        return (
            "Try without the hooks, or with cheaper ones: they may cost more time than they save on the "
            "wire; `ddprun compare` measures it."
        )
    if shares["wire"] > _MUCH:
        return _against_the_wire(digest, stage)
    if wait > _MUCH:
        return (
            f"Try {_less_often(digest, stage)}: another rank is the last one each time, and every "
            "synchronisation waits for it."
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


def _against_the_wire(digest: Digest, stage: Stage) -> str:
    if {one.hooks for one in stage.sent if one.kind in ("gradient", "delta")} != {()}:
        return f"Try {_less_often(digest, stage)}."
    if hooked := [one for one in _alike(digest, stage) if one.hooks]:
        fastest = min(hooked, key=lambda one: one.step_ms)
        there = f"with those of stage {fastest.index} a step took {fastest.step_ms:.1f} ms"
        if fastest.step_ms < stage.step_ms:
            return f"Try hooks in this stage, too: {there}."
        return f"Try {_less_often(digest, stage)}; hooks did not help: {there}."
    also = ", `[hierarchical]`" if any(one.between_hosts_bytes for one in stage.sent) else ""
    return (
        f"Try to send less (`ddprun compare` with `--vary 'hooks=[[], [fp16], [int8]]'`{also}), or try "
        f"{_less_often(digest, stage)}."
    )


def _alike(digest: Digest, stage: Stage) -> list[Stage]:
    """The stages of the same kind and sync policy: what differs between them may come from the hooks."""
    return [one for one in digest.stages if (one.kind, one.sync) == (stage.kind, stage.sync)]


def _less_often(digest: Digest, stage: Stage) -> str:
    if stage.period is not None:
        name, options = stage.period
        now = ", ".join(f"{key}: {value}" for key, value in options.items())
        return f"a longer period of `{name}` (`{now}` now)"
    if other := next((one for one in digest.stages if one.period is not None), None):
        return f"to synchronise less often, as stage {other.index} does"
    return "to synchronise less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`)"


def _waiting_for(digest: Digest, stage: Stage, late: StragglerTotal) -> float:
    """The share of the stage's time that ranks waited for a late one, mean over ranks."""
    steps = max(late.steps, stage.last - stage.first + 1)
    return late.lost_steps / steps * (digest.ranks - 1) / digest.ranks
