"""What `ddprun explain --link` adds: what steps of each stage would take, which hooks pay, how it grows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddprun.config import Loaded, StepStage, load
from ddprun.config.resolved import flow
from ddprun.explain.explain import Explained, StageExplained, explain
from ddprun.explain.text import labelled, paragraph, table
from ddprun.predict.hooks import HookVerdict, break_even, without_each
from ddprun.predict.links import Links, rate_of
from ddprun.predict.model import CostModel, Limit, Predicted
from ddprun.units import duration, size

_WAITS = {
    "wire": "for the wire",
    "latency": "for messages under way",
    "collectives": "for the work of collectives",
    "hooks": "for hooks",
    "late": "for the last rank",
}
_LIMITS: dict[Limit, str] = {
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
class SweepRow:
    """A stage on other ranks."""

    stage: int
    hosts: int
    ranks: int
    predicted: Predicted

    def as_object(self) -> dict[str, Any]:
        """For `--format json`."""
        return {"nnodes": self.hosts, "ranks": self.ranks} | self.predicted.as_object()


@dataclass(frozen=True, slots=True)
class Forecast:
    """The stages of a pipeline that take steps, by index."""

    links: Links
    stages: Mapping[int, Predicted]
    hooks: Mapping[int, Sequence[HookVerdict]]
    sweep: Sequence[SweepRow] = field(default=())

    def as_object(self, stage: int) -> dict[str, Any] | None:
        """What `--format json` has of a stage; None if it takes no steps."""
        if stage not in self.stages:
            return None
        found = self.stages[stage].as_object()
        found["hooks"] = [one.as_object() for one in self.hooks.get(stage, ())]
        if rows := [row.as_object() for row in self.sweep if row.stage == stage]:
            found["sweep"] = rows
        return found

    def lines(self, stage: int) -> Iterator[str]:
        """What a reader sees of a stage."""
        if stage not in self.stages:
            return
        predicted = self.stages[stage]
        yield from paragraph("Predicted", _summary(predicted, self.links))
        if not predicted.measured:
            yield from paragraph(
                "", "The measured run has no steps with these hooks, so their own work counts as nothing."
            )
        for verdict in self.hooks.get(stage, ()):
            yield from paragraph(f"{verdict.hook}", _said(verdict, self.links))
        rows = [row for row in self.sweep if row.stage == stage]
        if rows:
            head = ("hosts", "ranks", "a step", "waiting", "efficiency", "limit")
            cells = [
                (
                    f"{row.hosts:,}",
                    f"{row.ranks:,}",
                    duration(1e-6 * row.predicted.step_us),
                    duration(1e-6 * row.predicted.exposed_us),
                    percent(row.predicted.efficiency),
                    row.predicted.limit,
                )
                for row in rows
            ]
            yield from labelled("Sweep", table([head, *cells], ">>>>><"))


def stacks_of(explained: Explained) -> list[list[Any]]:
    """The stacks of hooks whose costs a forecast wants: those of all stages, and each without one hook."""
    wanted: list[list[Any]] = [[]]
    for stage in explained.stages:
        if stage.settings is None:
            continue
        stack = [hook.plain() for hook in stage.settings.hooks]
        wanted += [stack, *(left for _, left in without_each(stack))]
    found: list[list[Any]] = []
    for stack in wanted:
        if stack not in found and "noop" not in stack:
            found.append(stack)
    return found


def forecast(
    explained: Explained,
    model: CostModel,
    links: Links,
    overrides: Sequence[str],
    hosts: Sequence[int] = (),
) -> Forecast:
    """Predict each stage that takes steps: for the ranks it was explained for, and for other `hosts`.

    `overrides` are those with which the pipeline was loaded.
    """
    world, stages, hooks = explained.world, dict[int, Predicted](), dict[int, list[HookVerdict]]()
    for stage in explained.stages:
        if not playable(stage):
            continue
        stages[stage.index] = model.predict(stage, world, links)
        hooks[stage.index] = list(_verdicts(explained, stage, model, links, overrides))
    sweep = []
    for count_ in hosts:
        other = _again(explained, explained.loaded, hosts=count_)
        sweep += [
            SweepRow(stage.index, count_, other.world.ranks, model.predict(stage, other.world, links))
            for stage in other.stages
            if playable(stage)
        ]
    return Forecast(links, stages, hooks, sweep)


def playable(stage: StageExplained) -> bool:
    """Whether it takes steps, and all that they send is known."""
    return bool(stage.patterns) and all(
        exchange.buckets is not None and all(bucket.legs is not None for bucket in exchange.buckets)
        for pattern in stage.patterns
        for exchange in pattern.exchanges
    )


def _again(explained: Explained, loaded: Loaded, hosts: int | None = None) -> Explained:
    """The same pipeline for other ranks, or with other hooks."""
    world = explained.world
    return explain(
        loaded,
        hosts=world.hosts if hosts is None else hosts,
        ranks_per_host=world.ranks_per_host,
        probe=explained.probe,
    )


def _verdicts(
    explained: Explained, stage: StageExplained, model: CostModel, links: Links, overrides: Sequence[str]
) -> Iterator[HookVerdict]:
    assert stage.settings is not None
    assert isinstance(stage.stage, StepStage)
    stack = [hook.plain() for hook in stage.settings.hooks]
    if "noop" in stack or not stage.settings.plan.uses_hooks:
        return
    key = stage.stage.key_path("hooks")
    for hook, left in without_each(stack):
        loaded = load(explained.loaded.path, (*overrides, f"{key}={flow(left)}"))
        other = _again(explained, loaded).stages[stage.index]
        with_us = model.predict(stage, explained.world, links).step_us
        without_us = model.predict(other, explained.world, links).step_us
        limit = None
        if explained.world.hosts > 1 and model.knows(stage) and model.knows(other):
            limit = break_even(
                partial(model.predict, stage, explained.world),
                partial(model.predict, other, explained.world),
                links,
            )
        yield HookVerdict(hook, left, with_us, without_us, limit)


def _summary(one: Predicted, links: Links) -> str:
    waits = sorted(one.waits.items(), key=lambda item: -item[1])
    said = [f"{duration(1e-6 * us)} {_WAITS[why]}" for why, us in waits if us >= 0.01 * one.step_us]
    waiting = f", of which ranks wait {', '.join(said)}" if said else ""
    over = f"Over {links}" if one.across_bytes else "On one host"
    text = f"{over}, a step takes {duration(1e-6 * one.step_us)}{waiting}. "
    text += f"Without exchange it would take {duration(1e-6 * one.alone_us)}: "
    text += f"the efficiency is {percent(one.efficiency)}. "
    text += f"The limit is {_LIMITS[one.limit]}."
    if one.across_bytes:
        busy = one.busy["across"] / one.step_us
        text += f" A host sends {size(one.across_bytes)} to others in a step"
        text += f", which keeps its link busy for {percent(busy)} of the time." if busy else "."
    return text


def percent(share: float) -> str:
    """A share for a reader: two significant digits."""
    return f"{share:.0%}" if share >= 0.095 else f"{100 * share:.2g}%"


def _said(verdict: HookVerdict, links: Links) -> str:
    left = flow(list(verdict.without))
    both = f"{duration(1e-6 * verdict.with_us)} a step with it, "
    both += f"{duration(1e-6 * verdict.without_us)} with {left}"
    match verdict.pays:
        case True:
            text = f"It pays: {both}."
        case False:
            text = f"Leave it off: {both}."
        case None:
            text = f"It makes no difference: {both}."
    limit = verdict.break_even
    if limit is None:
        return text
    if limit == 0:
        return f"{text} It pays over no link of this latency."
    if math.isinf(limit):
        return f"{text} It pays over every link of this latency."
    return f"{text} It pays below {rate_of(limit)}."
