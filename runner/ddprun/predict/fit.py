"""Fits the cost model to a run with a stage in which nothing is sent, and stages with the stacks of hooks in
question.

What the ranks' processes computed beyond a step without exchange is the work of hooks and collectives; what
of a step's time is left then, is what threads need to notice that a message has come.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import harmonic_mean

from ddprun.explain.explain import Explanation, StageExplanation
from ddprun.explain.model_probe import WorldShape
from ddprun.predict.collectives import StackCosts, collective_of
from ddprun.predict.costs import PARTS_WITHOUT_EXCHANGE, Costs, LastRankLateness, LinearCost, StageCosts
from ddprun.predict.links import Links
from ddprun.predict.model import MICRO_STEP_PARTS, CostModel, hook_stack_id, sends_anything, settings_of
from ddprun.predict.timeline import Machine

_MAX_HOOK_SHARE = 0.8  # of what a process computes for an exchange: their times hold waiting for a core, too
_HALVINGS = 24

_MeasuredStages = Sequence[tuple[StageExplanation, StageCosts]]


def fit_cost_model(explained: Explanation, costs: Costs, links: Links) -> CostModel:
    """The cost model of a run, explained for the ranks that it ran on; `links`: those that it had."""
    world, on_cpu = explained.world, costs.device == "cpu"
    all_stages = zip(explained.stages, costs.stages, strict=True)
    pairs = [(stage, found) for stage, found in all_stages if stage.settings is not None and found.steps]
    silent = [pair for pair in pairs if not sends_anything(pair[0])] or pairs
    with_ddp = [pair for pair in silent if settings_of(pair[0]).plan.gradients is not None]
    without_ddp = [pair for pair in silent if settings_of(pair[0]).plan.gradients is None]
    share = Machine(costs.cores, world.ranks_per_host, links).core_share() if on_cpu else 1.0
    own_work_us = {
        True: _micro_step_us_by_part(with_ddp or without_ddp, share, on_cpu=on_cpu),
        False: _micro_step_us_by_part(without_ddp or with_ddp, share, on_cpu=on_cpu),
    }
    times = [(found.cpu_us, sum(found.parts.values())) for _, found in with_ddp or without_ddp]
    # That a rank keeps busy in a step without exchange.
    threads = max([1.0, *(cpu_us / own_us for cpu_us, own_us in times if own_us > 0)])
    ready_shares = dict[str, float]()
    for _, found in with_ddp or pairs:
        ready_shares |= found.gradient_ready_shares
    # Where ranks wait for cores, how long they take says little about how much they have to do.
    us_by_rank = [found.cpu_us_by_rank if share < 1 else found.own_us_by_rank for _, found in silent]
    work_us = [found.sample_us_by_rank for _, found in silent if found.sample_us_by_rank]
    gain = None  # where ranks wait for cores, it is not known how fast they are
    if share == 1 and work_us and min(of_ranks := [*map(sum, zip(*work_us, strict=False))]) > 0:
        gain = 1 - harmonic_mean(of_ranks) / max(of_ranks)
    lateness = LastRankLateness([rank for ranks in us_by_rank for rank in ranks])
    by_key = defaultdict[str, list[tuple[StageExplanation, StageCosts]]](list)
    for stage, found in pairs:
        if sends_anything(stage) and stage.cycle == 1 and settings_of(stage).plan.gradients == "all":
            by_key[hook_stack_id(stage)].append((stage, found))
    slowdown = 1.0
    if not on_cpu and by_key and (alone := own_work_us[True]["backward_us"]):
        longer = [found.parts["backward_us"] for alike in by_key.values() for _, found in alike]
        slowdown = max(1.0, sum(longer) / len(longer) / alone)
    cores = costs.cores if on_cpu else math.inf
    model = CostModel(on_cpu, own_work_us, ready_shares, lateness, cores, slowdown, balance_gain=gain)
    stacks = {
        key: _fit_stack(model, world, links, alike[0][0], [found for _, found in alike], threads)
        for key, alike in by_key.items()
    }
    default = stacks.get("[]") or next(iter(stacks.values()), StackCosts())
    default = replace(default, hook_costs=default.hook_costs if "[]" in stacks else [])
    return replace(model, stacks=stacks, default_stack=default)


def _micro_step_us_by_part(pairs: _MeasuredStages, core_share: float, *, on_cpu: bool) -> dict[str, float]:
    """The time of each part of a micro-step, in microseconds on a core that it has to itself."""
    work, steps = dict.fromkeys(PARTS_WITHOUT_EXCHANGE, 0.0), sum(found.steps for _, found in pairs)
    for stage, found in pairs:
        share, own_us, times = core_share, sum(found.parts.values()), _part_counts(stage)
        if on_cpu and found.cpu_us and own_us > 0 and not sends_anything(stage):
            share = min(1.0, found.cpu_us / own_us)  # with threads of its own, a rank computes for longer
        for part in PARTS_WITHOUT_EXCHANGE:
            work[part] += share * found.parts[part] * found.steps / times[part] / steps
    return work


def _part_counts(stage: StageExplanation) -> dict[str, int]:
    """How often each part comes in a step."""
    accumulate = settings_of(stage).accumulate
    return {part: accumulate if part in MICRO_STEP_PARTS else 1 for part in PARTS_WITHOUT_EXCHANGE}


def _fit_stack(
    model: CostModel,
    world: WorldShape,
    links: Links,
    stage: StageExplanation,
    found: Sequence[StageCosts],
    threads: float,
) -> StackCosts:
    """What hooks and collectives of a stage's stack cost, from all stages of the run with it."""
    steps = sum(one.steps for one in found)
    share = model.machine(world, links).core_share()
    stack = StackCosts()
    points = defaultdict[int, list[tuple[float, float]]](list)  # by the hook's place
    for nbytes, hook_times_us in (bucket for one in found for bucket in one.buckets):
        for place, us in enumerate(hook_times_us):
            points[place].append((nbytes, us * share))
    stack.hook_costs = list(map(LinearCost.fit, points.values()))
    buckets = [bucket for _, exchange, bucket in stage.step_buckets() if exchange.route.uses_hooks]
    if model.on_cpu and all(one.cpu_us for one in found):
        own = sum(us * _part_counts(stage)[part] for part, us in model.own_work_us[True].items()) * threads
        left = max(0.0, sum(one.cpu_us * one.steps for one in found) / steps - own)
        hooks = sum(cost.at(bucket.bytes) for bucket in buckets for cost in stack.hook_costs)
        if hooks > _MAX_HOOK_SHARE * left:
            stack.hook_costs = [cost * (_MAX_HOOK_SHARE * left / hooks) for cost in stack.hook_costs]
            hooks = _MAX_HOOK_SHARE * left
        legs = [leg for bucket in buckets for leg in bucket.legs]
        collectives = sum(collective_of(leg, world.hosts, stack, on_cpu=True).work_us for leg in legs)
        stack.collective_factor = (left - hooks) / collectives if collectives else 1.0
    measured = sum(one.step_us * one.steps for one in found) / steps
    low, high = 0.0, measured
    for _ in range(_HALVINGS):
        stack.wake_us = (low + high) / 2
        longer = model.predict(stage, world, links, stack).step_us > measured
        low, high = (low, stack.wake_us) if longer else (stack.wake_us, high)
    return stack
