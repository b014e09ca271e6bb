"""What `ddprun explain --link` adds: what steps of each stage would take, which hooks pay, how it grows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ddprun.config import LoadedPipeline, StepStage, load
from ddprun.config.resolved import flow_yaml
from ddprun.explain.explain import Explanation, StageExplanation, explain
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.text import labelled, paragraph, table
from ddprun.predict.hook_verdicts import HookSpecs, HookVerdict, break_even_rate, leave_one_out
from ddprun.predict.links import Links, rate_text
from ddprun.predict.measure import hook_stacks_to_measure
from ddprun.predict.model import Bottleneck, CostModel, StepPrediction
from ddprun.units import format_bytes, format_duration

_WAIT_PHRASES = {
    "wire": "for the wire",
    "latency": "for messages under way",
    "collectives": "for the work of collectives",
    "hooks": "for hooks",
    "late": "for the last rank",
}
_BOTTLENECK_PHRASES: dict[Bottleneck, str] = {
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


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank holds from one step to the next, in bytes. Activations are not in it."""

    weights: int  # and buffers
    gradients: int
    optimizer: int | None  # its state; None: not known
    hooks: int | None  # what they have not sent yet
    ema: int  # the moving average of the weights

    @property
    def total(self) -> int:
        """All that is known."""
        return self.weights + self.gradients + (self.optimizer or 0) + (self.hooks or 0) + self.ema


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Predictions for a stage that takes steps."""

    predicted: StepPrediction
    hook_verdicts: Sequence[HookVerdict]
    memory: Memory
    sweep: list[tuple[WorldShape, StepPrediction]] = field(default_factory=list)  # on other numbers of hosts


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions for the stages that take steps, by index of the stage."""

    links: Links
    stages: Mapping[int, StageForecast]

    def to_json_data(self, stage: int) -> dict[str, Any] | None:
        """What `--format json` has of a stage; None if it takes no steps."""
        if (found := self.stages.get(stage)) is None:
            return None
        data = found.predicted.to_json_data() | {"memory_bytes": asdict(found.memory)}
        data["hooks"] = [one.to_json_data() for one in found.hook_verdicts]
        sweep = [{"nnodes": at.hosts, "ranks": at.ranks} | one.to_json_data() for at, one in found.sweep]
        return data | ({"sweep": sweep} if sweep else {})

    def lines(self, stage: int) -> Iterator[str]:
        """What a reader sees of a stage."""
        if (found := self.stages.get(stage)) is None:
            return
        yield from paragraph("Predicted", _summary(found.predicted, self.links))
        if not found.predicted.hooks_measured:
            nothing = "The measured run has no steps with these hooks, so their own work is not counted"
            yield from paragraph("", f"{nothing}, and it is not known whether they help.")
        for verdict in found.hook_verdicts:
            yield from paragraph(verdict.hook, _verdict_text(verdict))
        yield from paragraph("Memory", _memory_text(found.memory))
        if found.sweep:
            rows = [("hosts", "ranks", "a step", "waiting", "efficiency", "limit")]
            for at, one in found.sweep:
                step, waiting = (format_duration(1e-6 * us) for us in (one.step_us, one.exposed_us))
                efficiency = percent(one.efficiency)
                rows.append((f"{at.hosts:,}", f"{at.ranks:,}", step, waiting, efficiency, one.limit))
            yield from labelled("Sweep", table(rows, ">>>>><"))


def stacks_to_measure(explained: Explanation) -> list[HookSpecs]:
    """The stacks of hooks whose costs a forecast wants: those of all stages, and each without one hook."""
    wanted: list[HookSpecs] = [[]]
    for stage in explained.stages:
        if stage.settings is not None:
            stack = stage.settings.hook_specs
            wanted += [stack, *(left for _, left in leave_one_out(stack))]
    return hook_stacks_to_measure(wanted)


def forecast(explained: Explanation, model: CostModel, links: Links, hosts: Sequence[int] = ()) -> Forecast:
    """Predict each stage that takes steps: for the ranks it was explained for, and for other `hosts`."""
    world, stages = explained.world, dict[int, StageForecast]()
    state_bytes = optimizer_bytes(explained.probe.optimizer)
    for stage in filter(is_predictable, explained.stages):
        verdicts = list(_verdicts(explained, stage, model, links))
        memory = _memory(explained, stage, state_bytes)
        stages[stage.index] = StageForecast(model.predict(stage, world, links), verdicts, memory)
    for number in hosts:
        other = _again(explained, explained.loaded, hosts=number)
        for index, found in stages.items():
            if is_predictable(stage := other.stages[index]):
                found.sweep.append((other.world, model.predict(stage, other.world, links)))
    return Forecast(links, stages)


def is_predictable(stage: StageExplanation) -> bool:
    """Whether the stage takes steps, and everything that they send is known."""
    return bool(stage.patterns) and all(
        exchange.buckets is not None and all(bucket.legs is not None for bucket in exchange.buckets)
        for pattern in stage.patterns
        for exchange in pattern.exchanges
    )


def _again(explained: Explanation, loaded: LoadedPipeline, hosts: int | None = None) -> Explanation:
    """The same pipeline for other ranks, or with other hooks."""
    world = explained.world
    hosts = world.hosts if hosts is None else hosts
    return explain(loaded, hosts=hosts, ranks_per_host=world.ranks_per_host, probe=explained.probe)


def _verdicts(
    explained: Explanation, stage: StageExplanation, model: CostModel, links: Links
) -> Iterator[HookVerdict]:
    assert stage.settings is not None
    assert isinstance(stage.stage, StepStage)
    if stage.settings.uses_noop or not stage.settings.plan.uses_hooks:
        return
    key, before = stage.stage.key_path("hooks"), explained.loaded
    for hook, left in leave_one_out(stage.settings.hook_specs):
        loaded = load(before.path, (*before.overrides, f"{key}={flow_yaml(left)}"), before.folder)
        other = _again(explained, loaded).stages[stage.index]
        if not (model.has_measured_hooks(stage) and model.has_measured_hooks(other)):
            continue
        with_hook, without = (partial(model.predict, one, explained.world) for one in (stage, other))
        limit = break_even_rate(with_hook, without, links) if explained.world.hosts > 1 else None
        yield HookVerdict(hook, left, with_hook(links).step_us, without(links).step_us, limit)


def optimizer_bytes(optimizer: Optimizer | None) -> int | None:
    """The size of an optimizer's state after a step, found out without values; None: not known."""
    if optimizer is None:
        return None
    groups = []
    for group in optimizer.param_groups:
        params = [torch.empty_like(param, device="meta") for param in group["params"] if param.requires_grad]
        for param in params:
            param.grad = torch.empty_like(param)
        groups.append({**group, "params": params})
    try:
        on_meta = type(optimizer)(groups)  # type: ignore[call-arg]  # it has defaults for the rest
        on_meta.step()
    except Exception:  # of an optimizer that wants more, or looks at values
        return None
    return sum(one.nbytes for one in tree_leaves(list(on_meta.state.values())) if isinstance(one, Tensor))


def _memory(explained: Explanation, stage: StageExplanation, optimizer: int | None) -> Memory:
    parameters, buffers = explained.parameters or {}, explained.buffers or {}
    trained = sum(one.nbytes for one in parameters.values() if one.requires_grad)
    exchanges = {id(one): one for pattern in stage.patterns for one in pattern.exchanges}.values()
    states = [bucket.state for one in exchanges if one.route.uses_hooks for bucket in one.buckets or ()]
    return Memory(
        weights=sum(one.nbytes for one in [*parameters.values(), *buffers.values()]),
        gradients=trained if stage.stage.name == "train" else 0,
        optimizer=optimizer,
        hooks=None if None in states else sum(filter(None, states)),
        ema=explained.ema_bytes or 0,
    )


def _memory_text(one: Memory) -> str:
    parts = {
        "weights and buffers": one.weights,
        "gradients": one.gradients,
        "the optimizer's state": one.optimizer,
        "what hooks have not sent yet": one.hooks,
        "the average of the weights": one.ema,
    }
    sizes = [f"{format_bytes(held)} {name}" for name, held in parts.items() if held]
    text = f"A rank holds {format_bytes(one.total)} from one step to the next: {', '.join(sizes)}."
    unknown = [name for name, held in parts.items() if held is None]
    return f"{text} Not known: {', '.join(unknown)}." if unknown else f"{text} Activations are not counted."


def _summary(one: StepPrediction, links: Links) -> str:
    waits = sorted(one.waits_us.items(), key=lambda item: -item[1])
    notable = [(why, us) for why, us in waits if us >= 0.01 * one.step_us]
    said = [f"{format_duration(1e-6 * us)} {_WAIT_PHRASES[why]}" for why, us in notable]
    waiting = f", of which ranks wait {', '.join(said)}" if said else ""
    over = f"Over {links}" if one.host_sends_bytes else "On one host"
    text = f"{over}, a step takes {format_duration(1e-6 * one.step_us)}{waiting}. "
    text += f"Without exchange it would take {format_duration(1e-6 * one.without_exchange_us)}: "
    text += f"the efficiency is {percent(one.efficiency)}. "
    text += f"The limit is {_BOTTLENECK_PHRASES[one.limit]}."
    if one.host_sends_bytes:
        busy = one.links_busy_us["across"] / one.step_us
        text += f" A host sends {format_bytes(one.host_sends_bytes)} to others in a step"
        text += f", which keeps its link busy for {percent(busy)} of the time." if busy else "."
    return text


def percent(share: float) -> str:
    """A share for a reader: two significant digits."""
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _verdict_text(verdict: HookVerdict) -> str:
    left = flow_yaml(list(verdict.remaining_hooks))
    both = f"{format_duration(1e-6 * verdict.with_us)} a step with it, "
    both += f"{format_duration(1e-6 * verdict.without_us)} with {left}"
    match verdict.pays:
        case True:
            text = f"It helps: {both}."
        case False:
            text = f"Leave it off: {both}."
        case None:
            text = f"It makes no difference: {both}."
    limit = verdict.break_even_bytes_per_s
    if limit is None:
        return text
    if limit == 0:
        return f"{text} It helps over no link of this latency."
    if math.isinf(limit):
        return f"{text} It helps over every link of this latency."
    return f"{text} It helps below {rate_text(limit)}."
