"""The cost model: a stage's plan, the costs that a run has measured, and links, played against time.

It is fitted to a run with a stage in which nothing is sent, and stages with the stacks of hooks in question.
What the ranks' processes computed beyond a step without exchange is the work of hooks and collectives; what
of a step's time is left then, is what threads need to notice that a message has come.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddprun.config import TrainSettings
from ddprun.explain.explain import Explained, PlannedExchange, StageExplained
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.traffic import Bucket, Leg
from ddprun.predict.costs import OWN, Costs, Line, StageCosts
from ddprun.predict.links import LEVELS, Level, Links
from ddprun.predict.timeline import (
    MOST_ROUNDS,
    Await,
    Blame,
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

Limit = Literal[
    "computation",
    "data",
    "cores",
    "hooks",
    "collectives",
    "late ranks",
    "latency",
    "link within",
    "link across",
]
"""What a step would gain most from having more, or less, of."""

_MICRO = ("data_us", "forward_us", "backward_us")  # parts that each micro-step has
_MESSAGE_US = 20.0  # of a core, for each round of a collective on one rank, before fitting
_BYTE_US = 1e-3  # of a core, for each byte that a rank sends and receives, before fitting
_COPY_US = 2.5e-4  # for each byte through shared memory
_CHANGE_US = 3e-3  # of a core, for each byte of parameters whose change is exchanged: to take and apply it
_MOST_OF_HOOKS = 0.8  # of what a process computes for an exchange: their times hold waiting for a core, too
_HALVINGS = 24
_LITTLE = 0.1  # of a step: what is exposed does not limit it
_CONTROL_BYTES = 256.0  # of a rank's control message


@dataclass(frozen=True, slots=True)
class Predicted:
    """Steps of a stage: means over a cycle of its policy, in microseconds."""

    step_us: float
    parts: Mapping[str, float]  # of the training thread, without waiting
    waits: Mapping[Blame, float]  # of the training thread, by what it waits for
    busy: Mapping[Level, float]  # how long links carry anything
    across_bytes: float  # what a host sends to others
    alone_us: float  # a step without any exchange, on the same cores
    limit: Limit
    played: Played  # the last step in which anything is sent
    measured: bool  # the run had steps with these hooks; otherwise their own work counts as nothing

    @property
    def exposed_us(self) -> float:
        """How long the training thread waits."""
        return sum(self.waits.values())

    @property
    def efficiency(self) -> float:
        """Of a step's time, what it would take without exchange."""
        return self.alone_us / self.step_us if self.step_us else 1.0

    def as_object(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "step_us": round(self.step_us),
            "exposed_us": round(self.exposed_us),
            "limit": self.limit,
            "efficiency": round(self.efficiency, 4),
            "alone_us": round(self.alone_us),
            "parts_us": {name: round(us) for name, us in self.parts.items()},
            "waits_us": {name: round(us) for name, us in self.waits.items()},
            "links_busy_us": {level: round(us) for level, us in self.busy.items()},
            "host_sends_bytes": round(self.across_bytes),
            "hooks_measured": self.measured,
            "buckets": [
                {"bucket": one.name, "ready_us": round(one.ready_us), "done_us": round(one.done_us)}
                for one in self.played.flights
                if one.name != "control"
            ],
        }


@dataclass(slots=True)
class _Stack:
    """What a stack of hooks costs on one rank."""

    gaps: list[Line] = field(default_factory=list)  # hooks before, between and after collectives
    factor: float = 1.0  # work of collectives, to what it is before fitting
    wake_us: float = 0.0  # from a message's arrival until a thread works on it


class CostModel:
    """Predicts steps, after it was fitted to a run.

    Args:
        explained: the run's pipeline, for the ranks that it ran on.
        costs: what the run's records say.
        links: those that it had.
    """

    def __init__(self, explained: Explained, costs: Costs, links: Links) -> None:
        self._world, self._costs = explained.world, costs
        self._on_cpu = costs.device == "cpu"
        self._drag = 1.0
        self._machine = self._machine_of(explained.world, links)
        pairs = [
            (stage, found)
            for stage, found in zip(explained.stages, costs.stages, strict=True)
            if stage.settings is not None and found.steps
        ]
        quiet = [pair for pair in pairs if not sends(pair[0])] or pairs
        by_ddp = [(stage, found) for stage, found in quiet if _settings(stage).gradients is not None]
        bare = [(stage, found) for stage, found in quiet if _settings(stage).gradients is None]
        # A stage that sends no gradients calls the model itself, without DDP around it.
        self._work = {True: self._own_work(by_ddp or bare), False: self._own_work(bare or by_ddp)}
        alone = [(found.cpu_us, sum(found.parts[part] for part in OWN)) for _, found in by_ddp or bare]
        computed = [cpu_us / own_us for cpu_us, own_us in alone if own_us > 0]
        self._threads = max(
            [1.0, *computed]
        )  # of a rank, as many as it keeps busy in a step without exchange
        self._ready = {name: share for _, found in by_ddp or pairs for name, share in found.ready.items()}
        contended = self._on_cpu and self._machine.share() < 1
        # Where ranks wait for cores, how long they take says little about how much they have to do.
        spread = [found.cpus_us if contended else found.own_us for _, found in quiet]
        self._late = Lateness([rank for ranks in spread for rank in ranks])
        self._stacks: dict[str, _Stack] = {}
        self._plain = _Stack()
        self._fit(pairs)

    def predict(self, stage: StageExplained, world: WorldShape, links: Links) -> Predicted:
        """What a step of a stage, explained for these ranks, takes over these links."""
        return self._play(stage, world, self._machine_of(world, links))

    def knows(self, stage: StageExplained) -> bool:
        """Whether the run had steps with the stage's hooks."""
        return not sends(stage) or hooks_key(stage) in self._stacks

    def _machine_of(self, world: WorldShape, links: Links) -> Machine:
        cores, workers = (self._costs.cores, 2) if self._on_cpu else (math.inf, 1)
        return Machine(cores, world.ranks_per_host, links, workers, self._drag)

    # Fitting.

    def _own_work(self, pairs: Sequence[tuple[StageExplained, StageCosts]]) -> dict[str, float]:
        """Of each part of a micro-step, in microseconds of a core that nobody else uses."""
        work, steps = dict.fromkeys(OWN, 0.0), sum(found.steps for _, found in pairs)
        for stage, found in pairs:
            whole = sum(found.parts[part] for part in OWN)
            share = self._machine.share() if self._on_cpu else 1.0
            if self._on_cpu and found.cpu_us and whole > 0 and not sends(stage):
                share = min(1.0, found.cpu_us / whole)  # with threads of its own, a rank computes for longer
            for part in OWN:
                times = _settings(stage).accumulate if part in _MICRO else 1
                work[part] += share * found.parts[part] * found.steps / times / steps
        return work

    def _fit(self, pairs: Sequence[tuple[StageExplained, StageCosts]]) -> None:
        """Find what hooks and collectives of each stack of the run cost."""
        by_key: dict[str, list[tuple[StageExplained, StageCosts]]] = {}
        for stage, found in pairs:
            if sends(stage) and stage.cycle == 1 and _settings(stage).gradients == "all":
                by_key.setdefault(hooks_key(stage), []).append((stage, found))
        if not self._on_cpu and by_key:
            longer = [found.parts["backward_us"] for alike in by_key.values() for _, found in alike]
            alone = self._work[True]["backward_us"]
            if alone:
                self._drag = max(1.0, sum(longer) / len(longer) / alone)
                self._machine = replace(self._machine, drag=self._drag)
        for key, alike in by_key.items():
            self._stacks[key] = self._fitted(alike[0][0], [found for _, found in alike])
        plain = self._stacks.get("[]") or next(iter(self._stacks.values()), _Stack())
        self._plain = replace(plain, gaps=plain.gaps if "[]" in self._stacks else [])

    def _fitted(self, stage: StageExplained, found: Sequence[StageCosts]) -> _Stack:
        steps = sum(one.steps for one in found)
        share = self._machine.share()
        stack = _Stack()
        points: list[list[tuple[float, float]]] = []
        for bucket in (bucket for one in found for bucket in one.buckets.values()):
            points += [[] for _ in range(len(bucket.gaps_us) - len(points))]
            for of_gap, us in zip(points, bucket.gaps_us, strict=False):
                of_gap.append((bucket.nbytes, us * share))
        stack.gaps = [Line.through(some) for some in points]
        buckets = [
            bucket
            for pattern in stage.patterns
            for exchange in pattern.exchanges
            if exchange.route.hooked
            for bucket in exchange.buckets or ()
        ]
        if self._on_cpu and all(one.cpu_us for one in found):
            times = {part: _settings(stage).accumulate if part in _MICRO else 1 for part in OWN}
            own = sum(us * times[part] for part, us in self._work[True].items()) * self._threads
            left = max(0.0, sum(one.cpu_us * one.steps for one in found) / steps - own)
            hooks = sum(line.at(bucket.bytes) for bucket in buckets for line in stack.gaps)
            if hooks > _MOST_OF_HOOKS * left:
                stack.gaps = [line * (_MOST_OF_HOOKS * left / hooks) for line in stack.gaps]
                hooks = _MOST_OF_HOOKS * left
            carried = sum(
                self._carry(leg, self._world.hosts, stack, "").work_us
                for bucket in buckets
                for leg in bucket.legs or ()
            )
            stack.factor = (left - hooks) / carried if carried else 1.0
        measured = sum(one.step_us * one.steps for one in found) / steps
        low, high = 0.0, measured
        for _ in range(_HALVINGS):
            stack.wake_us = (low + high) / 2
            if self._play(stage, self._world, self._machine, stack).step_us > measured:
                high = stack.wake_us
            else:
                low = stack.wake_us
        return stack

    # Playing.

    def _play(
        self, stage: StageExplained, world: WorldShape, machine: Machine, stack: _Stack | None = None
    ) -> Predicted:
        """Play a cycle of a stage's policy, with a stack in place of what is known of its hooks."""
        if stack is None:
            stack = self._stacks.get(hooks_key(stage), self._plain) if sends(stage) else _Stack()
        timeline, delay = Timeline(machine), _delay(stage)
        by_step = {step: pattern for pattern in stage.patterns for step in pattern.steps}
        known: dict[int, Played] = {}  # by pattern: a step that begins and ends with nothing under way
        cycle: list[Played] = []
        told: Played | None = None
        since, first = 0, stage.cycle + 1  # the first cycle leaves behind what every later one finds
        for number in range(1, 2 * stage.cycle + 1):
            pattern = by_step[(number - 1) % stage.cycle + 1]
            since += 1
            idle, met = timeline.idle, bool(pattern.exchanges)
            played = known.get(id(pattern)) if idle and not met else None
            if played is None:
                steps = self._instructions(stage, pattern.exchanges, world, stack, since, delay)
                played = timeline.play(steps)
                if idle and timeline.idle:
                    known[id(pattern)] = played
            if met:
                since, told = 0, played
            if number >= first:
                cycle.append(played)
        alone = Timeline(machine).play(self._instructions(stage, (), world, stack, 1, 0))
        parts, waits = dict[str, float](), dict[Blame, float]()
        for played in cycle:
            for name, us in played.parts.items():
                parts[name] = parts.get(name, 0.0) + us / len(cycle)
            for why, us in played.exposed.items():
                waits[why] = waits.get(why, 0.0) + us / len(cycle)
        sent = _sent(stage, world.hosts)
        busy: dict[Level, float] = {
            level: 1e6 * machine.links.of(level).seconds(sent[level]) for level in LEVELS
        }
        step_us = sum(played.us for played in cycle) / len(cycle)
        return Predicted(
            step_us=step_us,
            parts=parts,
            waits=waits,
            busy=busy,
            across_bytes=sent["across"],
            alone_us=alone.us,
            limit=_limit(step_us, parts, waits, busy, contended=machine.share() < 1),
            played=told or cycle[-1],
            measured=self.knows(stage),
        )

    def _instructions(
        self,
        stage: StageExplained,
        exchanges: Sequence[PlannedExchange],
        world: WorldShape,
        stack: _Stack,
        since: int,
        delay: int,
    ) -> Iterator[Instruction]:
        """A step that comes so many steps (`since`) after ranks met."""
        settings, trains = _settings(stage), stage.stage.name == "train"
        work = self._work[settings.gradients is not None]

        def send(moment: str, queue: str, late: float) -> Iterator[Instruction]:
            for exchange in exchanges:
                for bucket in (exchange.buckets or ()) if exchange.moment == moment else ():
                    yield Send(self._flight(exchange, bucket, world.hosts, stack, queue, late))

        for micro in range(settings.accumulate):
            yield Work(work["data_us"], "data_us")
            if any(exchange.moment == "before_forward" for exchange in exchanges):
                yield from send("before_forward", "buffers", 0.0)
                yield Await("buffers")
            yield Work(work["forward_us"], "forward_us")
            if trains and micro < settings.accumulate - 1:
                yield Work(work["backward_us"], "backward_us")
        if trains:
            yield from self._backward(exchanges, world, stack, work["backward_us"])
        yield Work(work["optimizer_us"], "optimizer_us")
        if delay:
            yield Await("sync", delay)
        after = [exchange for exchange in exchanges if exchange.moment == "after_step"]
        if after:
            nbytes = sum(bucket.bytes for exchange in after for bucket in exchange.buckets or ())
            yield Work(_CHANGE_US * nbytes, "sync_us")
            yield from send("after_step", "sync", self._late_us(since, world))
        if after and not delay:
            yield Await("sync")
        if settings.gradients != "all":
            yield from self._control(settings, world, bool(after))
        yield Work(work["sync_us"] + work["other_us"], "sync_us")

    def _control(self, settings: TrainSettings, world: WorldShape, sent: bool) -> Iterator[Instruction]:
        """The control message about a step in which ranks met; where each has one, nobody waits for it."""
        yield Await("control", settings.plan.control_delay_steps)
        if sent and world.ranks > 1:
            level: Level = "across" if world.hosts > 1 else "within"
            rounds = world.ranks - 1
            nbytes = {level: _CONTROL_BYTES * rounds}
            carry = Carry(
                0.0, nbytes, min(rounds, MOST_ROUNDS), latencies={level: 2 * rounds}, queue="control"
            )
            yield Send(Flight("control", (carry,), "control"))

    def _late_us(self, steps: int, world: WorldShape) -> float:
        """How long a rank waits for the last one, which gets the cores of the others if they share them."""
        return self._late.us(steps, world.ranks) * self._machine_of(world, Links()).share()

    def _backward(
        self, exchanges: Sequence[PlannedExchange], world: WorldShape, stack: _Stack, whole_us: float
    ) -> Iterator[Instruction]:
        late, done = self._late_us(1, world), 0.0
        for exchange in exchanges:
            for bucket in (exchange.buckets or ()) if exchange.moment == "backward" else ():
                ready = max([self._ready.get(name, 1.0) for name in bucket.params] or [1.0])
                if ready > done:
                    yield Work(whole_us * (ready - done), "backward_us")
                    done = ready
                yield Send(self._flight(exchange, bucket, world.hosts, stack, "gradient", late))
        yield Work(whole_us * (1 - done), "backward_us")
        yield Await("gradient")

    def _flight(
        self, exchange: PlannedExchange, bucket: Bucket, hosts: int, stack: _Stack, queue: str, late: float
    ) -> Flight:
        """A bucket on its way through the stage's hooks, or past them."""
        if not exchange.route.hooked:
            stack = self._plain
        phases: list[Work | Late | Carry] = []
        legs = bucket.legs or ()
        for index in range(len(legs) + 1):
            if index < len(stack.gaps):
                phases.append(Work(stack.gaps[index].at(bucket.bytes)))
            if index == 0 and legs:
                phases.append(Late(late))
            if index < len(legs):
                phases.append(self._carry(legs[index], hosts, stack, f"{queue} {index}"))
        return Flight(f"{exchange.route.kind} {bucket.bucket}", tuple(phases), queue, self._on_cpu)

    def _carry(self, leg: Leg, hosts: int, stack: _Stack, queue: str) -> Carry:
        total = rounds_of(leg.op, leg.ranks, in_trees=not self._on_cpu)
        sent = leg.sent.all_ranks / sum(leg.sent.counts)
        work = stack.factor * (_MESSAGE_US * total + (_BYTE_US * sent if sent else _COPY_US * leg.bytes))
        level: Level = "across" if hosts > 1 and leg.among != "host" else "within"
        nbytes = _bytes(leg, hosts)
        if not sent or not self._on_cpu:
            latencies = {level: total if sent else 0}
            return Carry(
                work if self._on_cpu else 0.0, nbytes, latencies=latencies, wake_us=stack.wake_us, queue=queue
            )
        return Carry(
            work,
            nbytes,
            rounds=max(1, min(total, MOST_ROUNDS)),
            # Gloo's receivers tell its senders when they are ready: two latencies for each message. A ring
            # has two on their way, and the receiver is ready for the second when the first has come.
            latencies={level: (1.5 if leg.op == "all_reduce" else 2.0) * total},
            wake_us=stack.wake_us,
            queue=queue,
        )


class Lateness:
    """How much later the last of n ranks is than the mean of them, from the spread of each rank's steps.

    With n draws from a distribution, the expected largest is an order statistic, not a mean: of m sorted
    values, the i-th has a share of (i/m)^n - ((i-1)/m)^n in it. Over several steps without a meeting, what a
    rank is always late by adds up, and chance grows with the square root of the steps.

    Args:
        own_us: of each rank, how long it took for each of some steps, in microseconds.
    """

    def __init__(self, own_us: Iterable[Sequence[float]]) -> None:
        ranks = [values for values in own_us if values]
        means = [sum(values) / len(values) for values in ranks]
        middle = sum(means) / len(means) if means else 0.0
        self._spread = [
            (mean - middle, value - mean)
            for values, mean in zip(ranks, means, strict=True)
            for value in values
        ]
        self._known: dict[tuple[int, int], float] = {}

    def us(self, steps: int, ranks: int) -> float:
        """After so many steps without a meeting, in microseconds."""
        if (steps, ranks) not in self._known:
            values = sorted(steps * always + math.sqrt(steps) * chance for always, chance in self._spread)
            count = len(values)
            self._known[steps, ranks] = sum(
                value * ((index / count) ** ranks - ((index - 1) / count) ** ranks)
                for index, value in enumerate(values, 1)
            )
        return self._known[steps, ranks]


def hooks_key(stage: StageExplained) -> str:
    """What tells a stage's stack of hooks from another."""
    return repr([hook.plain() for hook in _settings(stage).hooks])


def sends(stage: StageExplained) -> bool:
    """Whether any rank sends anything in the stage's steps."""
    return any(
        bucket.legs
        for pattern in stage.patterns
        for exchange in pattern.exchanges
        for bucket in exchange.buckets or ()
    )


def _settings(stage: StageExplained) -> TrainSettings:
    assert stage.settings is not None, "only stages with steps are played"
    return stage.settings


def _delay(stage: StageExplained) -> int:
    """After how many steps an exchange that overlaps with training is applied."""
    return max((one.delay for one in _settings(stage).plan.transfers), default=0)


def _bytes(leg: Leg, hosts: int) -> dict[Level, float]:
    """What each host sends to others, and what its ranks send to each other, in bytes."""
    sizes = leg.sent.sizes()
    across = sizes["between_hosts"]
    return {"within": (sizes["all_ranks"] - across) / hosts, "across": across / hosts}


def _sent(stage: StageExplained, hosts: int) -> dict[Level, float]:
    """The same for a mean step of a stage."""
    found: dict[Level, float] = dict.fromkeys(LEVELS, 0.0)
    for pattern in stage.patterns:
        for exchange in pattern.exchanges:
            times = exchange.times * len(pattern.steps) / stage.cycle
            for leg in (leg for bucket in exchange.buckets or () for leg in bucket.legs or ()):
                for level, nbytes in _bytes(leg, hosts).items():
                    found[level] += times * nbytes
    return found


def _limit(
    step_us: float,
    parts: Mapping[str, float],
    waits: Mapping[Blame, float],
    busy: Mapping[Level, float],
    *,
    contended: bool,
) -> Limit:
    if sum(waits.values()) < _LITTLE * step_us:
        if contended:
            return "cores"
        return "data" if parts.get("data_us", 0.0) > step_us / 2 else "computation"
    match max(waits, key=waits.__getitem__):
        case "wire":
            return "link across" if busy["across"] >= busy["within"] else "link within"
        case "latency":
            return "latency"
        case "late":
            return "late ranks"
        case "hooks":
            return "cores" if contended else "hooks"
        case "collectives":
            return "cores" if contended else "collectives"
