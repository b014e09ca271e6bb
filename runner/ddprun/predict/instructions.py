"""From a stage's plan and the costs of its steps to what a rank's training thread does, step by step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddprun.config import StepStageSettings
from ddprun.engine.sequence import Moment
from ddprun.explain.explain import PlannedExchange, StageExplanation
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.traffic import Bucket
from ddprun.predict.collectives import StackCosts, collective_of, control_message
from ddprun.predict.costs import LastRankLateness
from ddprun.predict.timeline import (
    AwaitTransfers,
    BucketTransfer,
    Compute,
    Instruction,
    LastRankWait,
    Machine,
    SimulatedCollective,
)

MICRO_STEP_PARTS = ("data_us", "forward_us", "backward_us")
"""Parts of a step that come once in each of its micro-steps."""

_CHANGE_US = 3e-3  # of a core, for each byte of parameters whose change is exchanged: to take and apply it


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the steps of a run cost, apart from its stacks of hooks."""

    on_cpu: bool
    own_work_us: Mapping[bool, Mapping[str, float]]
    """Of each part of a micro-step, on a core that it has to itself: with DDP around the model, and without,
    as in a stage that sends no gradients."""

    gradient_ready_shares: Mapping[str, float]  # by parameter, as in `StageCosts`
    lateness: LastRankLateness
    default_stack: StackCosts = field(default_factory=StackCosts)
    """What goes past all hooks, or through hooks that the run did not have."""


@dataclass(frozen=True, slots=True)
class InstructionGenerator:
    """What a rank does in the steps of a stage."""

    costs: StepCosts
    stage: StageExplanation
    world: WorldShape
    stack: StackCosts  # of the stage's hooks
    machine: Machine

    def of_step(
        self, exchanges: Sequence[PlannedExchange], steps_since_exchange: int
    ) -> Iterator[Instruction]:
        """One step with these exchanges."""
        settings, trains = settings_of(self.stage), self.stage.stage.name == "train"
        delay = settings.plan.overlap_steps
        work = self.costs.own_work_us[settings.plan.gradients is not None]
        for micro in range(settings.accumulate):
            yield Compute(work["data_us"], "data_us")
            if any(exchange.moment == "before_forward" for exchange in exchanges):
                yield from self._send(exchanges, "before_forward", "buffers", 0.0)
                yield AwaitTransfers("buffers")
            yield Compute(work["forward_us"], "forward_us")
            if trains and micro < settings.accumulate - 1:
                yield Compute(work["backward_us"], "backward_us")
        if trains:
            yield from self._backward(exchanges, work["backward_us"])
        yield Compute(work["optimizer_us"], "optimizer_us")
        if delay:
            yield AwaitTransfers("sync", delay)
        after = [exchange for exchange in exchanges if exchange.moment == "after_step"]
        if after:
            nbytes = sum(bucket.bytes for exchange in after for bucket in exchange.buckets)
            yield Compute(_CHANGE_US * nbytes, "sync_us")
            late_us = self._last_rank_wait_us(steps_since_exchange)
            yield from self._send(exchanges, "after_step", "sync", late_us)
        if after and not delay:
            yield AwaitTransfers("sync")
        if settings.plan.gradients != "all":  # where each step has a control message, nobody waits for it
            yield AwaitTransfers("control", settings.plan.control_delay_steps)
            if after and self.world.ranks > 1:
                yield control_message(self.world)
        yield Compute(work["sync_us"] + work["other_us"], "sync_us")

    def _send(
        self, exchanges: Sequence[PlannedExchange], moment: Moment, queue: str, late_us: float
    ) -> Iterator[Instruction]:
        for exchange in exchanges:
            for bucket in exchange.buckets if exchange.moment == moment else ():
                yield self._transfer(exchange, bucket, queue, late_us)

    def _backward(self, exchanges: Sequence[PlannedExchange], whole_us: float) -> Iterator[Instruction]:
        late_us, done = self._last_rank_wait_us(1), 0.0
        shares = self.costs.gradient_ready_shares
        for exchange in exchanges:
            for bucket in exchange.buckets if exchange.moment == "backward" else ():
                ready = max([shares.get(name, 1.0) for name in bucket.params] or [1.0])
                if ready > done:
                    yield Compute(whole_us * (ready - done), "backward_us")
                    done = ready
                yield self._transfer(exchange, bucket, "gradient", late_us)
        yield Compute(whole_us * (1 - done), "backward_us")
        yield AwaitTransfers("gradient")

    def _last_rank_wait_us(self, steps: int) -> float:
        """How long a rank waits for the last one: less if they share cores, which it then has."""
        return self.costs.lateness.expected_us(steps, self.world.ranks) * self.machine.core_share()

    def _transfer(
        self, exchange: PlannedExchange, bucket: Bucket, queue: str, late_us: float
    ) -> BucketTransfer:
        """The transfer of a bucket, through the stage's hooks or past them."""
        stack = self.stack if exchange.route.uses_hooks else self.costs.default_stack
        phases: list[Compute | LastRankWait | SimulatedCollective] = []
        legs, on_cpu = bucket.legs, self.costs.on_cpu
        for index in range(len(legs) + 1):
            if index < len(stack.hook_costs):
                phases.append(Compute(stack.hook_costs[index].at(bucket.bytes)))
            if index == 0 and legs:
                phases.append(LastRankWait(late_us))
            if index < len(legs):
                name, drifted = f"{queue} {index}", queue == "sync"
                leg, hosts = legs[index], self.world.hosts
                collective = collective_of(leg, hosts, stack, name, on_cpu=on_cpu, drifted=drifted)
                phases.append(replace(collective, apart_us=late_us))
        return BucketTransfer(f"{exchange.route.kind} {bucket.bucket}", tuple(phases), queue, on_cpu)


def settings_of(stage: StageExplanation) -> StepStageSettings:
    """The settings of a stage that takes steps."""
    assert stage.settings is not None, "only stages with steps are simulated"
    return stage.settings
