"""What `ddprun explain --link` adds: what steps of each stage would take, which hooks pay, how it grows."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ddprun.config import StepStage, load
from ddprun.config.yaml_writer import flow_yaml
from ddprun.explain.explain import Explanation, StageExplanation, explain
from ddprun.explain.model_probe import WorldShape
from ddprun.explain.text import labelled_lines, paragraph
from ddprun.predict.cost_model import LIMITS, CostModel, StepPrediction
from ddprun.predict.links import Links, format_nominal_rate
from ddprun.predict.measure import HookSpecs, distinct_stacks_without_noop
from ddprun.sync.exchanger import initialize_optimizer_state, requires_closure
from ddprun.units import format_bytes, format_duration, format_table
from ddprun_hooks.config.options import parse_hook_spec

_RATES = np.geomspace(1e4, 1e12, 1 << 17)  # bytes a second, 0.014% apart: one is the break-even
_NEGLIGIBLE_SHARE = 0.02  # of a step's time: no difference to speak of
_MEMORY_PHRASES = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "hooks": "what hooks have not sent yet",
    "ema": "the average of the weights",
}  # what a rank holds from one step to the next; activations are not in it
_WAIT_PHRASES = {
    "wire": "for the wire",
    "latency": "for messages under way",
    "collectives": "for the work of collectives",
    "hooks": "for hooks",
    "late": "for the last rank",
}


@dataclass(frozen=True, slots=True)
class HookVerdict:
    """What a hook of a stack costs and saves in a step of a stage."""

    hook: str
    remaining_hooks: HookSpecs  # the stack that is left
    with_us: float
    without_us: float
    break_even_bytes_per_s: float | None
    """The rate of the link between hosts, in payload bytes a second, below which the hook pays. 0: never;
    infinite: always; None: there is one host."""

    @property
    def pays(self) -> bool | None:
        """Whether the step is faster with the hook; None: it makes no difference to speak of."""
        if abs(self.with_us - self.without_us) <= _NEGLIGIBLE_SHARE * self.without_us:
            return None
        return self.with_us < self.without_us

    def to_json_data(self) -> dict[str, Any]:
        limit = self.break_even_bytes_per_s
        return {
            "hook": self.hook,
            "without": list(self.remaining_hooks),
            "step_us": round(self.with_us),
            "without_us": round(self.without_us),
            "pays": self.pays,
            "break_even_bits_per_s": round(8 * limit) if limit is not None and math.isfinite(limit) else None,
        }


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Predictions for a stage that takes steps."""

    predicted: StepPrediction
    hosts: int
    repeated_us: Sequence[float]  # a step as each half of the measurement alone predicts it; may be empty
    links: Links
    hook_verdicts: Sequence[HookVerdict]
    memory: Mapping[str, int | None]  # bytes of each of `_MEMORY_PHRASES`; None: not known
    sweep: Sequence[tuple[WorldShape, StepPrediction]]  # on other numbers of hosts

    def to_json_data(self) -> dict[str, Any]:
        data = self.predicted.to_json_data() | {"repeated_us": [round(us) for us in self.repeated_us]}
        data["memory_bytes"] = dict(self.memory)
        data["hooks"] = [one.to_json_data() for one in self.hook_verdicts]
        sweep = [{"nnodes": at.hosts, "ranks": at.ranks} | one.to_json_data() for at, one in self.sweep]
        return data | ({"sweep": sweep} if sweep else {})

    def text_lines(self) -> Iterator[str]:
        yield from paragraph("Predicted", _prediction_text(self))
        if not self.predicted.hooks_measured:
            nothing = "The measured run has no steps with these hooks, so their own work is not counted"
            yield from paragraph("", f"{nothing}, and it is not known whether they help.")
        for verdict in self.hook_verdicts:
            yield from paragraph(verdict.hook, _verdict_text(verdict))
        yield from paragraph("Memory", _memory_text(self.memory))
        if self.sweep:
            rows = [("hosts", "ranks", "a step", "waiting", "efficiency", "limit")]
            for at, one in self.sweep:
                step, waiting = (format_duration(1e-6 * us) for us in (one.step_us, one.exposed_us))
                efficiency = format_percent(one.efficiency)
                rows.append((f"{at.hosts:,}", f"{at.ranks:,}", step, waiting, efficiency, one.limit))
            yield from labelled_lines("Sweep", format_table(rows, ">>>>><"))


def stacks_to_measure(explained: Explanation) -> list[HookSpecs]:
    """The stacks of hooks whose costs a forecast wants: those of all stages, and each without one hook."""
    wanted: list[HookSpecs] = [[]]
    for stage in explained.stages:
        if stage.settings is not None:
            stack = stage.settings.hook_specs
            wanted += [stack, *(left for _, left in leave_one_out(stack))]
    return distinct_stacks_without_noop(wanted)


def forecast(
    explained: Explanation, models: Sequence[CostModel], links: Links, hosts: Sequence[int] = ()
) -> dict[int, StageForecast]:
    """Predict each stage that takes steps, for the ranks it was explained for, and for other `hosts`; gives
    the predictions by the stage's index. `models` are as `cost_models_of_run` gives them.
    """
    model, *halves = models
    world, trained = explained.world, [stage for stage in explained.stages if stage.patterns]
    again = partial(explain, ranks_per_host=world.ranks_per_host, probe=explained.probe)
    others = [again(explained.loaded, hosts=number) for number in hosts]
    verdicts = {stage.index: list(_hook_verdicts(explained, stage, model, links)) for stage in trained}
    # It makes the state, so nothing is explained by this probe after it.
    state_bytes = measure_optimizer_state_bytes(explained.probe.optimizer)
    stages = {}
    for stage in trained:
        predicted, *repeated = (one.predict(stage, world, links) for one in (model, *halves))
        stages[stage.index] = StageForecast(
            predicted=predicted,
            hosts=world.hosts,
            repeated_us=[one.step_us for one in repeated],
            links=links,
            hook_verdicts=verdicts[stage.index],
            memory=_memory_bytes_by_kind(explained, stage, state_bytes),
            sweep=[(at.world, model.predict(at.stages[stage.index], at.world, links)) for at in others],
        )
    return stages


def _hook_verdicts(
    explained: Explanation, stage: StageExplanation, model: CostModel, links: Links
) -> Iterator[HookVerdict]:
    assert stage.settings is not None
    assert isinstance(stage.stage, StepStage)
    if stage.settings.uses_noop or not stage.settings.plan.uses_hooks:
        return
    key, before, world = stage.stage.key_path("hooks"), explained.loaded, explained.world
    again = partial(explain, hosts=world.hosts, ranks_per_host=world.ranks_per_host, probe=explained.probe)
    for hook, left in leave_one_out(stage.settings.hook_specs):
        loaded = load(before.path, (*before.overrides, f"{key}={flow_yaml(left)}"), before.folder)
        other = again(loaded).stages[stage.index]
        if not (model.has_measured_hooks(stage) and model.has_measured_hooks(other)):
            continue
        with_hook, without = (partial(model.predict, one, world) for one in (stage, other))
        limit = break_even_rate(with_hook, without, links) if world.hosts > 1 else None
        yield HookVerdict(hook, left, with_hook(links).step_us, without(links).step_us, limit)


def leave_one_out(stack: HookSpecs) -> Iterator[tuple[str, list[Any]]]:
    """Each hook of a stack, those on the legs of `hierarchical` included, and the stack without it."""
    for index, hook in enumerate(stack):
        name, options = parse_hook_spec(hook)
        yield name, [*stack[:index], *stack[index + 1 :]]
        options = {key: value for key, value in options.items() if value is not None}
        legs = {"within": "inside a host", "across": "between hosts"} if name == "hierarchical" else {}
        for leg, where in legs.items():
            for inner, left in leave_one_out(options.get(leg) or ()):
                changed = {name: {**options, leg: left}}
                yield f"{inner} {where}", [*stack[:index], changed, *stack[index + 1 :]]


def break_even_rate(
    with_hook: Callable[[Links], StepPrediction], without: Callable[[Links], StepPrediction], links: Links
) -> float:
    """The `break_even_bytes_per_s` of a hook, from predictions with it and without it over such links."""

    def gains_nothing(rate: float) -> bool:
        at = replace(links, across=links.across.at_rate(rate))
        return with_hook(at).step_us >= (1 - _NEGLIGIBLE_SHARE) * without(at).step_us

    index = bisect_left(_RATES, True, key=gains_nothing)
    if index == 0:
        return 0.0
    return float(_RATES[index]) if index < len(_RATES) else math.inf


def measure_optimizer_state_bytes(optimizer: Optimizer) -> int | None:
    """The size of an optimizer's state after a step, which it then has; None: not known."""
    if requires_closure(optimizer):  # how much LBFGS keeps depends on its steps
        return None
    try:
        initialize_optimizer_state(optimizer)
    except Exception:  # of an optimizer that takes no dense gradients, or looks at values
        return None
    return sum(one.nbytes for one in tree_leaves(list(optimizer.state.values())) if isinstance(one, Tensor))


def _memory_bytes_by_kind(
    explained: Explanation, stage: StageExplanation, optimizer: int | None
) -> dict[str, int | None]:
    parameters, buffers = explained.parameters, explained.buffers
    trained = sum(one.nbytes for one in parameters.values() if one.requires_grad)
    exchanges = {id(one): one for pattern in stage.patterns for one in pattern.exchanges}.values()
    states = [bucket.state for one in exchanges if one.route.uses_hooks for bucket in one.buckets]
    return {
        "weights": sum(one.nbytes for one in [*parameters.values(), *buffers.values()]),
        "gradients": trained if stage.stage.name == "train" else 0,
        "optimizer": optimizer,
        "hooks": sum(states),
        "ema": explained.ema_bytes or 0,
    }


def _memory_text(memory: Mapping[str, int | None]) -> str:
    sizes = [f"{format_bytes(held)} {_MEMORY_PHRASES[name]}" for name, held in memory.items() if held]
    total = format_bytes(sum(filter(None, memory.values())))
    text = f"A rank holds {total} from one step to the next: {', '.join(sizes)}."
    unknown = [_MEMORY_PHRASES[name] for name, held in memory.items() if held is None]
    return f"{text} Not known: {', '.join(unknown)}." if unknown else f"{text} Activations are not counted."


def _prediction_text(stage: StageForecast) -> str:
    one = stage.predicted
    waits = sorted(one.waits_us.items(), key=lambda item: -item[1])
    notable = [(why, us) for why, us in waits if us >= 0.01 * one.step_us]
    said = [f"{format_duration(1e-6 * us)} {_WAIT_PHRASES[why]}" for why, us in notable]
    waiting = f", of which ranks wait {', '.join(said)}" if said else ""
    over = f"Over {stage.links}" if stage.hosts > 1 else "On one host"
    halves = " and ".join(format_duration(1e-6 * us) for us in stage.repeated_us)
    spread = f" ({halves} by each half of the measurement alone)" if halves else ""
    text = f"{over}, a step takes {format_duration(1e-6 * one.step_us)}{spread}{waiting}. "
    text += f"Without exchange it would take {format_duration(1e-6 * one.without_exchange_us)}: "
    text += f"the efficiency is {format_percent(one.efficiency)}. "
    text += f"The limit is {LIMITS[one.limit]}."
    if one.host_sends_bytes:
        busy = one.links_busy_us["across"] / one.step_us
        text += f" A host sends {format_bytes(one.host_sends_bytes)} to others in a step"
        text += f", which keeps its link busy for {format_percent(busy)} of the time." if busy else "."
    return text


def format_percent(share: float) -> str:
    """A share for a reader: two significant digits."""
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _verdict_text(verdict: HookVerdict) -> str:
    left = flow_yaml(list(verdict.remaining_hooks))
    both = f"{format_duration(1e-6 * verdict.with_us)} a step with it, "
    both += f"{format_duration(1e-6 * verdict.without_us)} with {left}"
    pays = {True: "It helps", False: "Leave it off", None: "It makes no difference"}[verdict.pays]
    text = f"{pays}: {both}."
    limit = verdict.break_even_bytes_per_s
    if limit is None:
        return text
    if limit == 0:
        return f"{text} It helps over no link of this latency."
    if math.isinf(limit):
        return f"{text} It helps over every link of this latency."
    return f"{text} It helps below {format_nominal_rate(limit)}."
