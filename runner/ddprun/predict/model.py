"""The cost model: a stage's steps simulated, from its plan, the costs that a run has measured, and links.

It is fitted to a run with a stage in which nothing is sent, and stages with the stacks of hooks in question.
What the ranks' processes computed beyond a step without exchange is the work of hooks and collectives; what
of a step's time is left then, is what threads need to notice that a message has come.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddprun.config import StepStageSettings
from ddprun.explain.explain import Explanation, PlannedExchange, StageExplanation
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.traffic import Bucket, Leg
from ddprun.predict.costs import PARTS_WITHOUT_EXCHANGE, Costs, LinearCost, StageCosts
from ddprun.predict.links import LINK_LEVELS, LinkLevel, Links
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
    WaitCause,
    Work,
    round_count,
)

Bottleneck = Literal[
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

_MICRO_STEP_PARTS = ("data_us", "forward_us", "backward_us")
_ROUND_WORK_US = 20.0  # of a core, for each round of a collective on one rank, before fitting
_BYTE_US = 1e-3  # of a core, for each byte that a rank sends and receives, before fitting
_COPY_US = 2.5e-4  # for each byte through shared memory
_ONE_WAY_SHARE = 0.4  # of an all-to-all between two hosts, if all ranks of one are later: as measured
_CHANGE_US = 3e-3  # of a core, for each byte of parameters whose change is exchanged: to take and apply it
_MAX_HOOK_SHARE = 0.8  # of what a process computes for an exchange: their times hold waiting for a core, too
_HALVINGS = 24
_NEGLIGIBLE_EXPOSED_SHARE = 0.1  # of a step: what is exposed does not limit it
_CONTROL_BYTES = 256.0  # of a rank's control message


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A predicted step of a stage: means over a cycle of its policy, in microseconds."""

    step_us: float
    parts_us: Mapping[str, float]  # of the training thread, without waiting
    waits_us: Mapping[WaitCause, float]  # of the training thread, by what it waits for
    links_busy_us: Mapping[LinkLevel, float]  # how long links carry anything
    host_sends_bytes: float  # what a host sends to others
    without_exchange_us: float  # a step without any exchange, on the same cores
    limit: Bottleneck
    last_exchange_step: SimulatedStep  # the last step in which anything is sent
    hooks_measured: bool  # whether the run had steps with these hooks; if not, their work counts as nothing

    @property
    def exposed_us(self) -> float:
        """How long the training thread waits."""
        return sum(self.waits_us.values())

    @property
    def efficiency(self) -> float:
        """The share of a step's time that it would take without exchange."""
        return self.without_exchange_us / self.step_us if self.step_us else 1.0

    def to_json_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "step_us": round(self.step_us),
            "exposed_us": round(self.exposed_us),
            "limit": self.limit,
            "efficiency": round(self.efficiency, 4),
            "alone_us": round(self.without_exchange_us),
            "parts_us": {name: round(us) for name, us in self.parts_us.items()},
            "waits_us": {name: round(us) for name, us in self.waits_us.items()},
            "links_busy_us": {level: round(us) for level, us in self.links_busy_us.items()},
            "host_sends_bytes": round(self.host_sends_bytes),
            "hooks_measured": self.hooks_measured,
            "buckets": [
                {"bucket": one.name, "ready_us": round(one.ready_us), "done_us": round(one.done_us)}
                for one in self.last_exchange_step.transfers
                if one.name != "control"
            ],
        }


@dataclass(slots=True)
class _StackCosts:
    """What a stack of hooks costs on one rank."""

    hook_costs: list[LinearCost] = field(default_factory=list)  # hooks before, between and after collectives
    collective_factor: float = 1.0  # work of collectives, to what it is before fitting
    wake_us: float = 0.0  # from a message's arrival until a thread works on it


class CostModel:
    """Predicts steps, after it was fitted to a run.

    Args:
        explained: the run's pipeline, for the ranks that it ran on.
        costs: what the run's records say.
        links: those that the run had.
    """

    def __init__(self, explained: Explanation, costs: Costs, links: Links) -> None:
        self._world, self._costs = explained.world, costs
        self._on_cpu = costs.device == "cpu"
        self._overlap_slowdown = 1.0
        self._machine = self._make_machine(explained.world, links)
        pairs = [
            (stage, found)
            for stage, found in zip(explained.stages, costs.stages, strict=True)
            if stage.settings is not None and found.steps
        ]
        silent = [pair for pair in pairs if not sends(pair[0])] or pairs
        with_ddp = [pair for pair in silent if _settings(pair[0]).gradient_averaging is not None]
        without_ddp = [pair for pair in silent if _settings(pair[0]).gradient_averaging is None]
        # A stage that sends no gradients calls the model itself, without DDP around it.
        self._own_work_us = {
            True: self._own_work(with_ddp or without_ddp),
            False: self._own_work(without_ddp or with_ddp),
        }
        times = [
            (found.cpu_us, sum(found.parts[part] for part in PARTS_WITHOUT_EXCHANGE))
            for _, found in with_ddp or without_ddp
        ]
        busy_threads = [cpu_us / own_us for cpu_us, own_us in times if own_us > 0]
        self._threads = max([1.0, *busy_threads])  # that a rank keeps busy in a step without exchange
        self._gradient_ready_shares = {
            name: share
            for _, found in with_ddp or pairs
            for name, share in found.gradient_ready_shares.items()
        }
        contended = self._on_cpu and self._machine.core_share() < 1
        # Where ranks wait for cores, how long they take says little about how much they have to do.
        us_by_rank = [found.cpu_us_by_rank if contended else found.own_us_by_rank for _, found in silent]
        self._lateness = Lateness([rank for ranks in us_by_rank for rank in ranks])
        self._stacks: dict[str, _StackCosts] = {}
        self._default_stack_costs = _StackCosts()
        self._fit(pairs)

    def predict(self, stage: StageExplanation, world: WorldShape, links: Links) -> StepPrediction:
        """What a step of a stage, explained for these ranks, takes over these links."""
        return self._simulate(stage, world, self._make_machine(world, links))

    def has_measured_hooks(self, stage: StageExplanation) -> bool:
        """Whether the run had steps with the stage's hooks."""
        return not sends(stage) or hooks_key(stage) in self._stacks

    def _make_machine(self, world: WorldShape, links: Links) -> Machine:
        cores, workers = (self._costs.cores, 2) if self._on_cpu else (math.inf, 1)
        return Machine(cores, world.ranks_per_host, links, workers, self._overlap_slowdown)

    # Fitting.

    def _own_work(self, pairs: Sequence[tuple[StageExplanation, StageCosts]]) -> dict[str, float]:
        """The time of each part of a micro-step, in microseconds on a core that it has to itself."""
        work, steps = dict.fromkeys(PARTS_WITHOUT_EXCHANGE, 0.0), sum(found.steps for _, found in pairs)
        for stage, found in pairs:
            own_us = sum(found.parts[part] for part in PARTS_WITHOUT_EXCHANGE)
            share = self._machine.core_share() if self._on_cpu else 1.0
            if self._on_cpu and found.cpu_us and own_us > 0 and not sends(stage):
                share = min(1.0, found.cpu_us / own_us)  # with threads of its own, a rank computes for longer
            for part in PARTS_WITHOUT_EXCHANGE:
                times = _settings(stage).accumulate if part in _MICRO_STEP_PARTS else 1
                work[part] += share * found.parts[part] * found.steps / times / steps
        return work

    def _fit(self, pairs: Sequence[tuple[StageExplanation, StageCosts]]) -> None:
        """Find what hooks and collectives of each stack of the run cost."""
        by_key: dict[str, list[tuple[StageExplanation, StageCosts]]] = {}
        for stage, found in pairs:
            if sends(stage) and stage.cycle == 1 and _settings(stage).gradient_averaging == "all":
                by_key.setdefault(hooks_key(stage), []).append((stage, found))
        if not self._on_cpu and by_key:
            longer = [found.parts["backward_us"] for alike in by_key.values() for _, found in alike]
            alone = self._own_work_us[True]["backward_us"]
            if alone:
                self._overlap_slowdown = max(1.0, sum(longer) / len(longer) / alone)
                self._machine = replace(self._machine, overlap_slowdown=self._overlap_slowdown)
        for key, alike in by_key.items():
            self._stacks[key] = self._fit_stack(alike[0][0], [found for _, found in alike])
        default = self._stacks.get("[]") or next(iter(self._stacks.values()), _StackCosts())
        hook_costs = default.hook_costs if "[]" in self._stacks else []
        self._default_stack_costs = replace(default, hook_costs=hook_costs)

    def _fit_stack(self, stage: StageExplanation, found: Sequence[StageCosts]) -> _StackCosts:
        steps = sum(one.steps for one in found)
        share = self._machine.core_share()
        stack = _StackCosts()
        points: list[list[tuple[float, float]]] = []
        for bucket in (bucket for one in found for bucket in one.buckets):
            points += [[] for _ in range(len(bucket.hook_times_us) - len(points))]
            for points_of_hook, us in zip(points, bucket.hook_times_us, strict=False):
                points_of_hook.append((bucket.nbytes, us * share))
        stack.hook_costs = [LinearCost.fit(points_of_hook) for points_of_hook in points]
        buckets = [
            bucket
            for pattern in stage.patterns
            for exchange in pattern.exchanges
            if exchange.route.uses_hooks
            for bucket in exchange.buckets or ()
        ]
        if self._on_cpu and all(one.cpu_us for one in found):
            times = {
                part: _settings(stage).accumulate if part in _MICRO_STEP_PARTS else 1
                for part in PARTS_WITHOUT_EXCHANGE
            }
            own = sum(us * times[part] for part, us in self._own_work_us[True].items()) * self._threads
            left = max(0.0, sum(one.cpu_us * one.steps for one in found) / steps - own)
            hooks = sum(cost.at(bucket.bytes) for bucket in buckets for cost in stack.hook_costs)
            if hooks > _MAX_HOOK_SHARE * left:
                stack.hook_costs = [cost * (_MAX_HOOK_SHARE * left / hooks) for cost in stack.hook_costs]
                hooks = _MAX_HOOK_SHARE * left
            collectives = sum(
                self._collective(leg, self._world.hosts, stack, "").work_us
                for bucket in buckets
                for leg in bucket.legs or ()
            )
            stack.collective_factor = (left - hooks) / collectives if collectives else 1.0
        measured = sum(one.step_us * one.steps for one in found) / steps
        low, high = 0.0, measured
        for _ in range(_HALVINGS):
            stack.wake_us = (low + high) / 2
            if self._simulate(stage, self._world, self._machine, stack).step_us > measured:
                high = stack.wake_us
            else:
                low = stack.wake_us
        return stack

    # Simulating.

    def _simulate(
        self, stage: StageExplanation, world: WorldShape, machine: Machine, stack: _StackCosts | None = None
    ) -> StepPrediction:
        """Simulate a cycle of the stage's policy; `stack`: costs in place of those known for its hooks."""
        if stack is None:
            stack = _StackCosts()
            if sends(stage):
                stack = self._stacks.get(hooks_key(stage), self._default_stack_costs)
        simulator, delay = StepSimulator(machine), _overlap_steps(stage)
        by_step = {step: pattern for pattern in stage.patterns for step in pattern.steps}
        known: dict[int, SimulatedStep] = {}  # by pattern: a step that begins and ends with nothing under way
        cycle: list[SimulatedStep] = []
        last_exchange_step: SimulatedStep | None = None
        steps_since_exchange = 0
        # The first cycle leaves behind what every later one finds. Behind the second one come the steps in
        # which its last exchange ends.
        first, last = stage.cycle + 1, 2 * stage.cycle
        for number in range(1, last + delay + 1):
            pattern = by_step[(number - 1) % stage.cycle + 1]
            steps_since_exchange += 1
            idle, has_exchange = simulator.idle, bool(pattern.exchanges)
            step = known.get(id(pattern)) if idle and not has_exchange else None
            if step is None:
                instructions = self._instructions(
                    stage, pattern.exchanges, world, stack, steps_since_exchange, delay
                )
                step = simulator.simulate_step(instructions)
                if idle and simulator.idle:
                    known[id(pattern)] = step
            if has_exchange:
                steps_since_exchange = 0
                last_exchange_step = step if number <= last else last_exchange_step
            if first <= number <= last:
                cycle.append(step)
        alone = StepSimulator(machine).simulate_step(self._instructions(stage, (), world, stack, 1, 0))
        parts, waits = dict[str, float](), dict[WaitCause, float]()
        for step in cycle:
            for name, us in step.parts_us.items():
                parts[name] = parts.get(name, 0.0) + us / len(cycle)
            for cause, us in step.waits_us.items():
                waits[cause] = waits.get(cause, 0.0) + us / len(cycle)
        busy_us: dict[LinkLevel, float] = {
            level: sum(step.links_busy_us[level] for step in cycle) / len(cycle) for level in LINK_LEVELS
        }
        step_us = sum(step.step_us for step in cycle) / len(cycle)
        return StepPrediction(
            step_us=step_us,
            parts_us=parts,
            waits_us=waits,
            links_busy_us=busy_us,
            host_sends_bytes=_host_bytes_per_step(stage, world.hosts),
            without_exchange_us=alone.step_us,
            limit=_bottleneck(step_us, parts, waits, busy_us, contended=machine.core_share() < 1),
            last_exchange_step=last_exchange_step or cycle[-1],
            hooks_measured=self.has_measured_hooks(stage),
        )

    def _instructions(
        self,
        stage: StageExplanation,
        exchanges: Sequence[PlannedExchange],
        world: WorldShape,
        stack: _StackCosts,
        steps_since_exchange: int,
        delay: int,
    ) -> Iterator[Instruction]:
        """The instructions of one step, so many steps after ranks last exchanged anything."""
        settings, trains = _settings(stage), stage.stage.name == "train"
        work = self._own_work_us[settings.gradient_averaging is not None]

        def send(moment: str, queue: str, late_us: float) -> Iterator[Instruction]:
            for exchange in exchanges:
                for bucket in (exchange.buckets or ()) if exchange.moment == moment else ():
                    yield Send(self._transfer(exchange, bucket, world.hosts, stack, queue, late_us))

        for micro in range(settings.accumulate):
            yield Work(work["data_us"], "data_us")
            if any(exchange.moment == "before_forward" for exchange in exchanges):
                yield from send("before_forward", "buffers", 0.0)
                yield Await("buffers")
            yield Work(work["forward_us"], "forward_us")
            if trains and micro < settings.accumulate - 1:
                yield Work(work["backward_us"], "backward_us")
        if trains:
            yield from self._backward_instructions(exchanges, world, stack, work["backward_us"])
        yield Work(work["optimizer_us"], "optimizer_us")
        if delay:
            yield Await("sync", delay)
        after = [exchange for exchange in exchanges if exchange.moment == "after_step"]
        if after:
            nbytes = sum(bucket.bytes for exchange in after for bucket in exchange.buckets or ())
            yield Work(_CHANGE_US * nbytes, "sync_us")
            late_us = self._last_rank_wait_us(steps_since_exchange, world)
            yield from send("after_step", "sync", late_us)
        if after and not delay:
            yield Await("sync")
        if settings.gradient_averaging != "all":
            yield from self._control_instructions(settings, world, bool(after))
        yield Work(work["sync_us"] + work["other_us"], "sync_us")

    def _control_instructions(
        self, settings: StepStageSettings, world: WorldShape, sent: bool
    ) -> Iterator[Instruction]:
        """The control message about a step in which ranks met; where each has one, nobody waits for it."""
        yield Await("control", settings.plan.control_delay_steps)
        if sent and world.ranks > 1:
            level: LinkLevel = "across" if world.hosts > 1 else "within"
            rounds = world.ranks - 1
            collective = Collective(
                work_us=0.0,
                bytes_by_level={level: _CONTROL_BYTES * rounds},
                rounds=min(rounds, MAX_SIMULATED_ROUNDS),
                latency_counts={level: 2 * rounds},
                queue="control",
            )
            yield Send(BucketTransfer("control", (collective,), "control"))

    def _last_rank_wait_us(self, steps: int, world: WorldShape) -> float:
        """How long a rank waits for the last one. Ranks that share cores leave theirs to it when they are
        done, so they wait less.
        """
        core_share = self._make_machine(world, Links()).core_share()
        return self._lateness.expected_us(steps, world.ranks) * core_share

    def _backward_instructions(
        self, exchanges: Sequence[PlannedExchange], world: WorldShape, stack: _StackCosts, whole_us: float
    ) -> Iterator[Instruction]:
        late_us, done = self._last_rank_wait_us(1, world), 0.0
        for exchange in exchanges:
            for bucket in (exchange.buckets or ()) if exchange.moment == "backward" else ():
                ready = max([self._gradient_ready_shares.get(name, 1.0) for name in bucket.params] or [1.0])
                if ready > done:
                    yield Work(whole_us * (ready - done), "backward_us")
                    done = ready
                yield Send(self._transfer(exchange, bucket, world.hosts, stack, "gradient", late_us))
        yield Work(whole_us * (1 - done), "backward_us")
        yield Await("gradient")

    def _transfer(
        self,
        exchange: PlannedExchange,
        bucket: Bucket,
        hosts: int,
        stack: _StackCosts,
        queue: str,
        late_us: float,
    ) -> BucketTransfer:
        """The transfer of a bucket, through the stage's hooks or past them."""
        if not exchange.route.uses_hooks:
            stack = self._default_stack_costs
        phases: list[Work | LastRankWait | Collective] = []
        legs = bucket.legs or ()
        for index in range(len(legs) + 1):
            if index < len(stack.hook_costs):
                phases.append(Work(stack.hook_costs[index].at(bucket.bytes)))
            if index == 0 and legs:
                phases.append(LastRankWait(late_us))
            if index < len(legs):
                collective = self._collective(
                    legs[index], hosts, stack, f"{queue} {index}", drifted=queue == "sync"
                )
                phases.append(replace(collective, apart_us=late_us))
        return BucketTransfer(f"{exchange.route.kind} {bucket.bucket}", tuple(phases), queue, self._on_cpu)

    def _collective(
        self, leg: Leg, hosts: int, stack: _StackCosts, queue: str, *, drifted: bool = False
    ) -> Collective:
        """The cost of a collective; `drifted`: all ranks of a host may be later than those of another."""
        rounds = round_count(leg.op, leg.ranks, use_trees=not self._on_cpu)
        sent = leg.sent.all_ranks / sum(leg.sent.ranks_represented)
        bytes_us = _BYTE_US * sent if sent else _COPY_US * leg.bytes
        work_us = stack.collective_factor * (_ROUND_WORK_US * rounds + bytes_us)
        level: LinkLevel = "across" if hosts > 1 and leg.among != "host" else "within"
        nbytes = _leg_bytes(leg, hosts)
        messages = max(1, leg.ranks - 1 if leg.op == "all_to_all" else rounds)
        if not sent or not self._on_cpu:
            return Collective(
                work_us if self._on_cpu else 0.0,
                nbytes,
                messages=messages,
                latency_counts={level: rounds if sent else 0},
                wake_us=stack.wake_us,
                queue=queue,
            )
        one_way_bytes = 0.0
        if leg.op == "all_to_all":
            # Gloo's all-to-all sends first: between two ranks, the later one says that it is ready behind its
            # own message, and the other's comes when that is through. Ranks that begin within a latency do
            # not yet know that they may send, and say it first. So it is between two hosts if all ranks of
            # one are later. But pairs of ranks end one after the other, and part of what goes back overlaps.
            one_way_bytes = sent if leg.ranks == 2 else 0.0
            if drifted and hosts == 2:
                one_way_bytes = max(one_way_bytes, _ONE_WAY_SHARE * nbytes["across"])
        return Collective(
            work_us,
            nbytes,
            rounds=max(1, min(rounds, MAX_SIMULATED_ROUNDS)),
            messages=messages,
            # Gloo's receivers tell its senders when they are ready: two latencies for each message. A ring
            # has two on their way, and the receiver is ready for the second when the first has come.
            latency_counts={level: 2.0 * rounds},
            double_buffered=leg.op == "all_reduce",
            one_way_bytes=one_way_bytes,
            # Where a host has several ranks, a ring enters it at one and leaves it at another. If the first
            # is late, it says that it is ready behind the two pieces that the other has sent meanwhile. It
            # is then late in the next step, too, so this always counts.
            blocking_bytes=leg.bytes / leg.ranks if leg.op == "all_reduce" and leg.ranks > hosts else 0.0,
            wake_us=stack.wake_us,
            queue=queue,
        )


class Lateness:
    """How much later the last of n ranks is than the mean of them, from the spread of each rank's steps.

    With n draws from a distribution, the expected largest is an order statistic, not a mean: of m sorted
    values, the i-th has a share of (i/m)^n - ((i-1)/m)^n in it. Over several steps without an exchange, what
    a rank is always late by adds up, and chance grows with the square root of the steps.

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

    def expected_us(self, steps: int, ranks: int) -> float:
        """The expected lateness after so many steps without an exchange, in microseconds."""
        if (steps, ranks) not in self._known:
            values = sorted(steps * always + math.sqrt(steps) * chance for always, chance in self._spread)
            count = len(values)
            self._known[steps, ranks] = sum(
                value * ((index / count) ** ranks - ((index - 1) / count) ** ranks)
                for index, value in enumerate(values, 1)
            )
        return self._known[steps, ranks]


def hooks_key(stage: StageExplanation) -> str:
    """What tells a stage's stack of hooks from another."""
    return repr(_settings(stage).hook_specs)


def sends(stage: StageExplanation) -> bool:
    """Whether any rank sends anything in the stage's steps."""
    return any(
        bucket.legs
        for pattern in stage.patterns
        for exchange in pattern.exchanges
        for bucket in exchange.buckets or ()
    )


def _settings(stage: StageExplanation) -> StepStageSettings:
    assert stage.settings is not None, "only stages with steps are simulated"
    return stage.settings


def _overlap_steps(stage: StageExplanation) -> int:
    """After how many steps an exchange that overlaps with training is applied."""
    return max((one.delay for one in _settings(stage).plan.transfers), default=0)


def _leg_bytes(leg: Leg, hosts: int) -> dict[LinkLevel, float]:
    """What each host sends to others, and what its ranks send to each other, in bytes."""
    sizes = leg.sent.sizes()
    across = sizes["between_hosts"]
    return {"within": (sizes["all_ranks"] - across) / hosts, "across": across / hosts}


def _host_bytes_per_step(stage: StageExplanation, hosts: int) -> float:
    """What each host sends to others in a mean step of the stage, in bytes."""
    return sum(
        exchange.times_per_step * len(pattern.steps) / stage.cycle * _leg_bytes(leg, hosts)["across"]
        for pattern in stage.patterns
        for exchange in pattern.exchanges
        for bucket in exchange.buckets or ()
        for leg in bucket.legs or ()
    )


def _bottleneck(
    step_us: float,
    parts: Mapping[str, float],
    waits: Mapping[WaitCause, float],
    busy_us: Mapping[LinkLevel, float],
    *,
    contended: bool,
) -> Bottleneck:
    if sum(waits.values()) < _NEGLIGIBLE_EXPOSED_SHARE * step_us:
        if contended:
            return "cores"
        return "data" if parts.get("data_us", 0.0) > step_us / 2 else "computation"
    match max(waits, key=waits.__getitem__):
        case "wire":
            return "link across" if busy_us["across"] >= busy_us["within"] else "link within"
        case "latency":
            return "latency"
        case "late":
            return "late ranks"
        case "hooks":
            return "cores" if contended else "hooks"
        case "collectives":
            return "cores" if contended else "collectives"
