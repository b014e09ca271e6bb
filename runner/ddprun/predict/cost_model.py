"""The cost model: a stage's steps simulated, from its plan, the costs that a run has measured, and links.

What a collective asks of a rank and of the links follows Gloo's habits; a GPU's may be trees.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ddprun.config import StepStageSettings
from ddprun.engine.stage_actions import ActionPhase
from ddprun.explain.explain import Explanation, PlannedExchange, StageExplanation
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.traffic import Bucket, Leg
from ddprun.predict.costs import PARTS_WITHOUT_EXCHANGE, LastRankLateness, LinearCost, RunCosts, StageCosts
from ddprun.predict.links import LinkLevel, Links
from ddprun.predict.step_simulator import (
    MAX_SIMULATED_ROUNDS,
    AwaitTransfers,
    BucketTransfer,
    Compute,
    HostResources,
    Instruction,
    LastRankWait,
    SimulatedCollective,
    SimulatedStep,
    StepSimulator,
    WaitCause,
    round_count,
)

LIMITS = {
    "computation": "computation",
    "data": "loading data",
    "cores": "the cores of a host, which its ranks share",
    "hooks": "the hooks' own work",
    "collectives": "the work of collectives",
    "late ranks": "waiting for the last rank",
    "latency": "the latency of the link",
    "link within": "the link inside a host",
    "link across": "the link between hosts",
}
"""What a step would gain most from having more, or less, of: in a prediction, and in words."""

_MICRO_STEP_PARTS = ("data_us", "forward_us", "backward_us")
"""Parts of a step that come once in each of its micro-steps."""

_ROUND_WORK_US = 20.0  # of a core, for each round of a collective on one rank, before fitting
_BYTE_US = 1e-3  # of a core, for each byte that a rank sends and receives, before fitting
_COPY_US = 2.5e-4  # for each byte through shared memory
_ONE_WAY_SHARE = 0.4  # of an all-to-all between two hosts, if all ranks of one are later: as measured
_CHANGE_US = 3e-3  # of a core, for each byte of parameters whose change is exchanged: to take and apply it
_NEGLIGIBLE_EXPOSED_SHARE = 0.1  # of a step: what is exposed does not limit it
_MAX_HOOK_SHARE = 0.8  # of what a process computes for an exchange: their times hold waiting for a core, too
_HALVINGS = 24

_KeyT = TypeVar("_KeyT")
_StagesWithCosts = Sequence[tuple[StageExplanation, StageCosts]]


@dataclass(slots=True)
class StackCosts:
    """What a stack of hooks costs on one rank."""

    hook_costs: list[LinearCost] = field(default_factory=list)  # hooks before, between and after collectives
    collective_factor: float = 1.0  # work of collectives, to what it is before fitting
    wake_us: float = 0.0  # from a message's arrival until a thread works on it


def _simulated_collective(
    leg: Leg, hosts: int, stack: StackCosts, queue: str = "", *, on_cpu: bool, drifted: bool = False
) -> SimulatedCollective:
    """The collective of a leg; `drifted`: all ranks of a host may be later than those of another."""
    rounds = round_count(leg.op, leg.ranks, use_trees=not on_cpu)
    sent = leg.sent.per_rank
    bytes_us = _BYTE_US * sent if sent else _COPY_US * leg.bytes
    work_us = stack.collective_factor * (_ROUND_WORK_US * rounds + bytes_us) if on_cpu else 0.0
    level: LinkLevel = "across" if hosts > 1 and leg.among != "host" else "within"
    nbytes = _bytes_by_level(leg, hosts)
    messages = max(1, leg.ranks - 1 if leg.op == "all_to_all" else rounds)
    found = SimulatedCollective(work_us, nbytes, messages=messages, wake_us=stack.wake_us, queue=queue)
    if not sent or not on_cpu:
        return replace(found, latency_counts={level: rounds if sent else 0})
    one_way_bytes = 0.0
    if leg.op == "all_to_all":
        # Gloo's all-to-all sends first: between two ranks, the later one says that it is ready behind its
        # own message, and the other's comes when that is through. Ranks that begin within a latency do
        # not yet know that they may send, and say it first. So it is between two hosts if all ranks of
        # one are later. But pairs of ranks end one after the other, and part of what goes back overlaps.
        one_way_bytes = sent if leg.ranks == 2 else 0.0
        if drifted and hosts == 2:
            one_way_bytes = max(one_way_bytes, _ONE_WAY_SHARE * nbytes["across"])
    return replace(
        found,
        rounds=max(1, min(rounds, MAX_SIMULATED_ROUNDS)),
        # Gloo's receivers tell its senders when they are ready: two latencies for each message. A ring
        # has two on their way, and the receiver is ready for the second when the first has come.
        latency_counts={level: 2.0 * rounds},
        double_buffered=leg.op == "all_reduce",
        one_way_bytes=one_way_bytes,
        # Where a host has several ranks, a ring enters it at one and leaves it at another. If the first
        # is late, it says that it is ready behind the two pieces that the other has sent meanwhile. It
        # is then late in the next step, too, so this always counts.
        queued_ahead_bytes=leg.bytes / leg.ranks if leg.op == "all_reduce" and leg.ranks > hosts else 0.0,
    )


def _bytes_by_level(leg: Leg, hosts: int) -> dict[LinkLevel, float]:
    """What each host sends to others, and what its ranks send to each other, in bytes."""
    across = leg.sent.between_hosts
    return {"within": (leg.sent.all_ranks - across) / hosts, "across": across / hosts}


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A predicted step of a stage: means over a cycle of its policy, in microseconds."""

    step_us: float
    parts_us: Mapping[str, float]  # of the training thread, without waiting
    waits_us: Mapping[WaitCause, float]  # of the training thread, by what it waits for
    links_busy_us: Mapping[LinkLevel, float]  # how long links carry anything
    host_sends_bytes: float  # what a host sends to others
    without_exchange_us: float  # a step without any exchange, on the same cores
    cores_contended: bool  # a host has fewer cores than ranks that compute
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

    @property
    def limit(self) -> str:
        """What limits the step: one of `LIMITS`."""
        if self.exposed_us < _NEGLIGIBLE_EXPOSED_SHARE * self.step_us:
            if self.cores_contended:
                return "cores"
            return "data" if self.parts_us.get("data_us", 0.0) > self.step_us / 2 else "computation"
        match max(self.waits_us, key=self.waits_us.__getitem__):
            case "wire":
                busy_us = self.links_busy_us
                return "link across" if busy_us["across"] >= busy_us["within"] else "link within"
            case "latency":
                return "latency"
            case "late":
                return "late ranks"
            case "hooks" | "collectives" as work:
                return "cores" if self.cores_contended else work

    def to_json_data(self) -> dict[str, Any]:
        return {
            "step_us": round(self.step_us),
            "exposed_us": round(self.exposed_us),
            "limit": self.limit,
            "efficiency": round(self.efficiency, 4),
            "without_exchange_us": round(self.without_exchange_us),
            "parts_us": {name: round(us) for name, us in self.parts_us.items()},
            "waits_us": {name: round(us) for name, us in self.waits_us.items()},
            "links_busy_us": {level: round(us) for level, us in self.links_busy_us.items()},
            "host_sends_bytes": round(self.host_sends_bytes),
            "hooks_measured": self.hooks_measured,
            "buckets": [
                {"bucket": one.name, "ready_us": round(one.ready_us), "done_us": round(one.done_us)}
                for one in self.last_exchange_step.transfers
            ],
        }


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts steps from what a run has measured (`fit_cost_model`)."""

    on_cpu: bool
    micro_step_us_by_ddp: Mapping[bool, Mapping[str, float]]
    """Of each part of a micro-step, on a core that it has to itself: with DDP around the model, and without,
    as in a stage that sends no gradients."""

    gradient_ready_shares: Mapping[str, float]  # by parameter, as in `StageCosts`
    lateness: LastRankLateness
    cores: float  # of a host; infinite where each rank computes on a device of its own
    overlap_slowdown: float = 1.0  # of computation beside an exchange, on such a device
    stacks: Mapping[str, StackCosts] = field(default_factory=dict)  # by `_hook_stack_id`
    default_stack: StackCosts = field(default_factory=StackCosts)
    """What goes past all hooks, or through hooks that the run did not have."""

    def predict(
        self, stage: StageExplanation, world: WorldShape, links: Links, stack: StackCosts | None = None
    ) -> StepPrediction:
        """What a step of a stage, explained for these ranks, takes over these links: means over a cycle of
        its policy. `stack`: costs in place of those known for its hooks.
        """
        if stack is None:
            known = self.stacks.get(_hook_stack_id(stage), self.default_stack)
            stack = known if _sends_anything(stage) else StackCosts()
        machine = self.host_resources(world, links)
        instructions = _InstructionGenerator(self, stage, world, stack, machine)
        simulator, delay = StepSimulator(machine), step_settings(stage).plan.overlap_steps
        by_step = {step: pattern for pattern in stage.patterns for step in pattern.steps}
        silent: dict[int, SimulatedStep] = {}  # by pattern: before and after it nothing is under way
        cycle: list[SimulatedStep] = []
        last_exchange_step: SimulatedStep | None = None
        steps_since_exchange = 0
        # The first cycle leaves behind what every later one finds. Behind the second one come the steps in
        # which its last exchange ends.
        first, last = stage.cycle + 1, 2 * stage.cycle
        for number in range(1, last + delay + 1):
            pattern = by_step[(number - 1) % stage.cycle + 1]
            steps_since_exchange += 1
            idle, has_exchange = simulator.has_no_active_transfers, bool(pattern.exchanges)
            step = silent.get(id(pattern)) if idle and not has_exchange else None
            if step is None:
                step = simulator.simulate_step(
                    instructions.step_instructions(pattern.exchanges, steps_since_exchange)
                )
                if idle and simulator.has_no_active_transfers:
                    silent[id(pattern)] = step
            if has_exchange:
                steps_since_exchange = 0
                last_exchange_step = step if number <= last else last_exchange_step
            if first <= number <= last:
                cycle.append(step)
        alone = StepSimulator(machine).simulate_step(instructions.step_instructions((), 1))
        return StepPrediction(
            step_us=sum(step.step_us for step in cycle) / len(cycle),
            parts_us=_means_by_key([step.parts_us for step in cycle]),
            waits_us=_means_by_key([step.waits_us for step in cycle]),
            links_busy_us=_means_by_key([step.links_busy_us for step in cycle]),
            host_sends_bytes=_host_bytes_per_step(stage, world.hosts),
            without_exchange_us=alone.step_us,
            cores_contended=machine.core_share() < 1,
            last_exchange_step=last_exchange_step or cycle[-1],
            hooks_measured=self.has_measured_hooks(stage),
        )

    def has_measured_hooks(self, stage: StageExplanation) -> bool:
        """Whether the run had steps with the stage's hooks."""
        return not _sends_anything(stage) or _hook_stack_id(stage) in self.stacks

    def host_resources(self, world: WorldShape, links: Links) -> HostResources:
        """What the ranks of a world share."""
        workers = 2 if self.on_cpu else 1
        return HostResources(self.cores, world.ranks_per_host, links, workers, self.overlap_slowdown)


@dataclass(frozen=True, slots=True)
class _InstructionGenerator:
    """What a rank's training thread does in the steps of a stage."""

    model: CostModel
    stage: StageExplanation
    world: WorldShape
    stack: StackCosts  # of the stage's hooks
    machine: HostResources

    def step_instructions(
        self, exchanges: Sequence[PlannedExchange], steps_since_exchange: int
    ) -> Iterator[Instruction]:
        settings, trains = step_settings(self.stage), self.stage.stage.name == "train"
        delay = settings.plan.overlap_steps
        work = self.model.micro_step_us_by_ddp[settings.plan.gradients is not None]
        moments: tuple[ActionPhase, ...] = ("before_forward", "backward", "after_step")
        before, backward, after = ([one for one in exchanges if one.moment == at] for at in moments)
        for micro in range(settings.accumulate):
            yield Compute(work["data_us"], "data_us")
            if before and micro == 0:
                yield from self._send_instructions(before, "buffers", 0.0)
                yield AwaitTransfers("buffers")
            yield Compute(work["forward_us"], "forward_us")
            if trains and micro < settings.accumulate - 1:
                yield Compute(work["backward_us"], "backward_us")
        if trains:
            yield from self._backward_instructions(backward, work["backward_us"])
        yield Compute(work["optimizer_us"], "optimizer_us")
        if delay:
            yield AwaitTransfers("sync", delay)
        if after:
            nbytes = sum(bucket.bytes for exchange in after for bucket in exchange.buckets)
            yield Compute(_CHANGE_US * nbytes, "sync_us")
            late_us = self._last_rank_wait_us(steps_since_exchange)
            yield from self._send_instructions(after, "sync", late_us)
        if after and not delay:
            yield AwaitTransfers("sync")
        yield Compute(work["sync_us"] + work["other_us"], "sync_us")

    def _send_instructions(
        self, exchanges: Sequence[PlannedExchange], queue: str, late_us: float
    ) -> Iterator[Instruction]:
        for exchange in exchanges:
            for bucket in exchange.buckets:
                yield self._bucket_transfer(exchange, bucket, queue, late_us)

    def _backward_instructions(
        self, exchanges: Sequence[PlannedExchange], whole_us: float
    ) -> Iterator[Instruction]:
        late_us, done = self._last_rank_wait_us(1), 0.0
        shares = self.model.gradient_ready_shares
        for exchange in exchanges:
            for bucket in exchange.buckets:
                ready = max([shares.get(name, 1.0) for name in bucket.params] or [1.0])
                if ready > done:
                    yield Compute(whole_us * (ready - done), "backward_us")
                    done = ready
                yield self._bucket_transfer(exchange, bucket, "gradient", late_us)
        yield Compute(whole_us * (1 - done), "backward_us")
        yield AwaitTransfers("gradient")

    def _last_rank_wait_us(self, steps_since_exchange: int) -> float:
        """How long a rank waits for the last one: less if they share cores, which it then has."""
        late_us = self.model.lateness.expected_us(steps_since_exchange, self.world.ranks)
        return late_us * self.machine.core_share()

    def _bucket_transfer(
        self, exchange: PlannedExchange, bucket: Bucket, queue: str, late_us: float
    ) -> BucketTransfer:
        """The transfer of a bucket, through the stage's hooks or past them."""
        stack = self.stack if exchange.route.uses_hooks else self.model.default_stack
        phases: list[Compute | LastRankWait | SimulatedCollective] = []
        legs, on_cpu = bucket.legs, self.model.on_cpu
        for index in range(len(legs) + 1):
            if index < len(stack.hook_costs):
                phases.append(Compute(stack.hook_costs[index].at(bucket.bytes)))
            if index == 0 and legs:
                phases.append(LastRankWait(late_us))
            if index < len(legs):
                name, drifted = f"{queue} {index}", queue == "sync"
                leg, hosts = legs[index], self.world.hosts
                collective = _simulated_collective(leg, hosts, stack, name, on_cpu=on_cpu, drifted=drifted)
                phases.append(replace(collective, start_spread_us=late_us))
        return BucketTransfer(f"{exchange.route.kind} {bucket.bucket}", tuple(phases), queue, on_cpu)


def _means_by_key(times_us: Sequence[Mapping[_KeyT, float]]) -> dict[_KeyT, float]:
    """Of steps' times by key; what a step lacks counts as 0."""
    keys = dict.fromkeys(key for one in times_us for key in one)
    return {key: sum(one.get(key, 0.0) for one in times_us) / len(times_us) for key in keys}


def step_settings(stage: StageExplanation) -> StepStageSettings:
    assert stage.settings is not None, "only stages with steps are simulated"
    return stage.settings


def _hook_stack_id(stage: StageExplanation) -> str:
    """What tells a stage's stack of hooks from another."""
    return repr(step_settings(stage).hook_specs)


def _sends_anything(stage: StageExplanation) -> bool:
    """Whether any rank sends anything in the stage's steps."""
    return any(bucket.legs for _, _, bucket in stage.step_buckets())


def _host_bytes_per_step(stage: StageExplanation, hosts: int) -> float:
    """What each host sends to others in a mean step of the stage, in bytes."""
    return sum(
        len(pattern.steps) / stage.cycle * _bytes_by_level(leg, hosts)["across"]
        for pattern, _, bucket in stage.step_buckets()
        for leg in bucket.legs
    )


def fit_cost_model(explained: Explanation, costs: RunCosts, links: Links) -> CostModel:
    """The cost model of a run, explained for the ranks that it ran on; `links`: those that it had. The run
    has a stage in which nothing is sent, and stages with the stacks of hooks in question.

    What the ranks' processes computed beyond a step without exchange is the work of hooks and collectives;
    what of a step's time is left then, is what threads need to notice that a message has come.
    """
    world, on_cpu = explained.world, costs.device == "cpu"
    all_stages = zip(explained.stages, costs.stages, strict=True)
    pairs = [(stage, found) for stage, found in all_stages if stage.settings is not None and found.steps]
    silent = [pair for pair in pairs if not _sends_anything(pair[0])] or pairs
    with_ddp = [pair for pair in silent if step_settings(pair[0]).plan.gradients is not None]
    without_ddp = [pair for pair in silent if step_settings(pair[0]).plan.gradients is None]
    share = HostResources(costs.cores, world.ranks_per_host, links).core_share() if on_cpu else 1.0
    own_work_us = {
        True: _micro_step_us_by_part(with_ddp or without_ddp, share, on_cpu=on_cpu),
        False: _micro_step_us_by_part(without_ddp or with_ddp, share, on_cpu=on_cpu),
    }
    times = [(found.cpu_us, sum(found.parts_us.values())) for _, found in with_ddp or without_ddp]
    # That a rank keeps busy in a step without exchange.
    threads = max([1.0, *(cpu_us / own_us for cpu_us, own_us in times if own_us > 0)])
    ready_shares = dict[str, float]()
    for _, found in with_ddp or pairs:
        ready_shares |= found.gradient_ready_shares
    # Where ranks wait for cores, how long they take says little about how much they have to do.
    us_by_rank = [found.cpu_us_by_rank if share < 1 else found.own_us_by_rank for _, found in silent]
    lateness = LastRankLateness([rank for ranks in us_by_rank for rank in ranks])
    by_key = defaultdict[str, list[tuple[StageExplanation, StageCosts]]](list)
    for stage, found in pairs:
        if _sends_anything(stage) and stage.cycle == 1 and step_settings(stage).plan.gradients == "all":
            by_key[_hook_stack_id(stage)].append((stage, found))
    slowdown = 1.0
    if not on_cpu and by_key and (alone := own_work_us[True]["backward_us"]):
        longer = [found.parts_us["backward_us"] for alike in by_key.values() for _, found in alike]
        slowdown = max(1.0, sum(longer) / len(longer) / alone)
    cores = costs.cores if on_cpu else math.inf
    model = CostModel(on_cpu, own_work_us, ready_shares, lateness, cores, slowdown)
    stacks = {
        key: _fit_stack_costs(model, world, links, alike[0][0], [found for _, found in alike], threads)
        for key, alike in by_key.items()
    }
    default = stacks.get("[]") or next(iter(stacks.values()), StackCosts())
    default = replace(default, hook_costs=default.hook_costs if "[]" in stacks else [])
    return replace(model, stacks=stacks, default_stack=default)


def _micro_step_us_by_part(pairs: _StagesWithCosts, core_share: float, *, on_cpu: bool) -> dict[str, float]:
    """The time of each part of a micro-step, in microseconds on a core that it has to itself."""
    work, steps = dict.fromkeys(PARTS_WITHOUT_EXCHANGE, 0.0), sum(found.steps for _, found in pairs)
    for stage, found in pairs:
        share, own_us, times = core_share, sum(found.parts_us.values()), _part_counts_per_step(stage)
        if on_cpu and found.cpu_us and own_us > 0 and not _sends_anything(stage):
            share = min(1.0, found.cpu_us / own_us)  # with threads of its own, a rank computes for longer
        for part in PARTS_WITHOUT_EXCHANGE:
            work[part] += share * found.parts_us[part] * found.steps / times[part] / steps
    return work


def _part_counts_per_step(stage: StageExplanation) -> dict[str, int]:
    """How often each part comes in a step."""
    accumulate = step_settings(stage).accumulate
    return {part: accumulate if part in _MICRO_STEP_PARTS else 1 for part in PARTS_WITHOUT_EXCHANGE}


def _fit_stack_costs(
    model: CostModel,
    world: WorldShape,
    links: Links,
    stage: StageExplanation,
    found: Sequence[StageCosts],
    threads: float,
) -> StackCosts:
    """What hooks and collectives of a stage's stack cost, from all stages of the run with it."""
    steps = sum(one.steps for one in found)
    share = model.host_resources(world, links).core_share()
    stack = StackCosts()
    points = defaultdict[int, list[tuple[float, float]]](list)  # by the hook's place
    for nbytes, hook_times_us in (bucket for one in found for bucket in one.bucket_bytes_and_hook_us):
        for place, us in enumerate(hook_times_us):
            points[place].append((nbytes, us * share))
    stack.hook_costs = list(map(LinearCost.fit, points.values()))
    buckets = [bucket for _, exchange, bucket in stage.step_buckets() if exchange.route.uses_hooks]
    if model.on_cpu and all(one.cpu_us for one in found):
        own = (
            sum(
                us * _part_counts_per_step(stage)[part]
                for part, us in model.micro_step_us_by_ddp[True].items()
            )
            * threads
        )
        left = max(0.0, sum(one.cpu_us * one.steps for one in found) / steps - own)
        hooks = sum(cost.at(bucket.bytes) for bucket in buckets for cost in stack.hook_costs)
        if hooks > _MAX_HOOK_SHARE * left:
            part = _MAX_HOOK_SHARE * left / hooks
            stack.hook_costs = [LinearCost(part * one.base, part * one.slope) for one in stack.hook_costs]
            hooks *= part
        legs = [leg for bucket in buckets for leg in bucket.legs]
        collectives = sum(_simulated_collective(leg, world.hosts, stack, on_cpu=True).work_us for leg in legs)
        stack.collective_factor = (left - hooks) / collectives if collectives else 1.0
    measured = sum(one.step_us * one.steps for one in found) / steps
    low, high = 0.0, measured
    for _ in range(_HALVINGS):
        stack.wake_us = (low + high) / 2
        longer = model.predict(stage, world, links, stack).step_us > measured
        low, high = (low, stack.wake_us) if longer else (stack.wake_us, high)
    return stack
