"""What `explain` finds out, and how it looks as an object."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun.config import Loaded, TrainSettings
from ddprun.explain.model_probe import ModelProbe, World
from ddprun.explain.stage_plans import Moment
from ddprun.explain.traffic import Amount, Carried, Route, SentLeg, total
from ddprun.sync.buffers import BufferUse
from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.payload import nbytes

VERSION = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Buckets that set out together, in the same route."""

    number: int
    """Within its stage, from 0."""

    moment: Moment
    route: Route
    ranks: int
    """How many ranks are in each group that exchanges."""

    times: int
    """How often it happens in a step: before each of several forward passes."""

    buckets: tuple[BucketLayout, ...] | None
    """None: not known."""

    carried: tuple[Carried, ...] | None
    """What each bucket costs, once; None: not known."""

    unknown: str
    """Why something of it is not known; empty if all is."""

    def amount(self, ranks: int) -> Amount | None:
        """What ranks send for it in a step; None if it is not known."""
        if self.carried is None:
            return None
        known = total([one.amount for one in self.carried], ranks)
        return None if known is None else known * self.times


@dataclass(frozen=True, slots=True)
class Pattern:
    """Steps in which the same is sent."""

    steps: tuple[int, ...]
    """Which of the first `StageExplained.cycle` steps; the rest follows from them."""

    exchanges: tuple[Exchange, ...]
    amount: Amount | None
    """Of one such step; None if it is not known."""


@dataclass(frozen=True, slots=True)
class StageExplained:
    """What one stage sends."""

    index: int
    kind: str
    settings: TrainSettings | None
    """None for a stage without steps."""

    steps: int | None
    """None: not known, or the stage has none."""

    cycle: int
    """After so many steps it begins again; at most as many as the stage has."""

    patterns: tuple[Pattern, ...]
    """The rarest first."""

    control_words: tuple[int, ...]
    """The first steps in which ranks exchange a control message; they come again with the cycle."""

    begin: tuple[Exchange, ...]
    """What is sent before the first step."""

    end: tuple[Exchange, ...] | None
    """What is sent after the last step, or by a stage without steps. None: not known."""

    left_apart: bool
    """Ranks are not made equal at the end: the next stage wants them as they are."""

    ranks: int

    @property
    def exchanges(self) -> list[Exchange]:
        """All of them, by number."""
        found = {e.number: e for pattern in self.patterns for e in pattern.exchanges}
        found |= {e.number: e for e in (*self.begin, *(self.end or ()))}
        return [found[number] for number in sorted(found)]

    @property
    def cycle_amount(self) -> Amount | None:
        """Of `cycle` steps."""
        return self._of_steps(self.cycle)

    @property
    def whole_amount(self) -> Amount | None:
        """Of the whole stage; None if it is not known."""
        if self.end is None or (self.steps is None and self.patterns):
            return None
        amounts = [exchange.amount(self.ranks) for exchange in (*self.begin, *self.end)]
        if self.steps is not None:
            cycles, rest = divmod(self.steps, self.cycle)
            cycle = self._of_steps(self.cycle)
            amounts += [None if cycle is None else cycle * cycles, self._of_steps(rest)]
        return total(amounts, self.ranks)

    def _of_steps(self, count: int) -> Amount | None:
        amounts = []
        for pattern in self.patterns:
            steps = sum(step <= count for step in pattern.steps)
            if steps:
                amounts.append(None if pattern.amount is None else pattern.amount * steps)
        return total(amounts, self.ranks)


@dataclass(frozen=True, slots=True)
class Explained:
    """A pipeline, explained."""

    loaded: Loaded
    world: World
    probe: ModelProbe
    start: Amount | None
    """What is sent before the first step, so that all ranks have the same; None if it is not known."""

    stages: tuple[StageExplained, ...]

    @property
    def parameters(self) -> dict[str, Tensor] | None:
        """Shapes by name; None: not known."""
        return None if self.probe.shapes is None else dict(self.probe.shapes.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor] | None:
        """Buffers by name; None: not known."""
        return None if self.probe.shapes is None else dict(self.probe.shapes.named_buffers())

    def as_object(self) -> dict[str, Any]:
        """For `--format json` (`docs/explain.md`); bytes throughout."""
        return {
            "v": VERSION,
            "pipeline": self.loaded.pipeline.name,
            "ranks": self.world.ranks,
            "hosts": self.world.hosts,
            "model": _held(self.loaded.pipeline.model.name, self.parameters),
            "buffers": _verdict(self.probe.buffer_use, self.buffers),
            "unknown": [reason for reason in _reasons(self.probe) if reason],
            "start": sent(self.start),
            "stages": [_stage(stage) for stage in self.stages],
        }


def bucket_bytes(layout: BucketLayout) -> int:
    """Size of a bucket before any hook, in bytes."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return layout.numel * dtype.itemsize


def _stage(stage: StageExplained) -> dict[str, Any]:
    settings, cycle = stage.settings, stage.cycle_amount
    said: dict[str, Any] = {"stage": stage.index, "kind": stage.kind}
    if settings is not None:
        said |= {
            "steps": stage.steps,
            "sync": settings.sync.plain(),
            "hooks": [hook.plain() for hook in settings.hooks],
            "buffers": settings.buffers.plain(),
            "accumulate": settings.accumulate,
            "mutate": settings.mutate.plain() if settings.mutate is not None else None,
            "update": settings.update.plain() if settings.update is not None else None,
            "gradients": settings.gradients,
            "cycle": stage.cycle,
            "patterns": [
                {
                    "steps": list(pattern.steps),
                    "exchanges": [exchange.number for exchange in pattern.exchanges],
                    "sent": sent(pattern.amount),
                }
                for pattern in stage.patterns
            ],
            "control_words": list(stage.control_words),
            "mean_step": sent(cycle, stage.cycle),
            "thousand_steps": sent(cycle, stage.cycle, 1000),
        }
    return said | {
        "exchanges": [_exchange(exchange, stage.ranks) for exchange in stage.exchanges],
        "begin": [exchange.number for exchange in stage.begin],
        "end": None if stage.end is None else [exchange.number for exchange in stage.end],
        "left_apart": stage.left_apart,
        "whole": sent(stage.whole_amount),
    }


def _exchange(exchange: Exchange, ranks: int) -> dict[str, Any]:
    route, buckets = exchange.route, None
    if exchange.buckets is not None:
        carried = exchange.carried or [None] * len(exchange.buckets)
        buckets = [_bucket(*one) for one in zip(exchange.buckets, carried, strict=True)]
    return {
        "exchange": exchange.number,
        "when": exchange.moment,
        "times": exchange.times,
        "kind": route.kind,
        "through": route.through,
        "source": route.source if route.through == "broadcast" else None,
        "among": route.among,
        "ranks": exchange.ranks,
        "unknown": exchange.unknown or None,
        "sent": sent(exchange.amount(ranks)),
        "buckets": buckets,
    }


def _bucket(layout: BucketLayout, carried: Carried | None) -> dict[str, Any]:
    return {
        "bucket": layout.index,
        "dtype": layout.dtype,
        "numel": layout.numel,
        "bytes": bucket_bytes(layout),
        "params": [param.name for param in layout.params],
        "sent": sent(carried.amount) if carried is not None else None,
        "legs": [_leg(leg) for leg in carried.legs] if carried is not None else None,
    }


def _leg(leg: SentLeg) -> dict[str, Any]:
    return {
        "op": leg.op,
        "among": leg.among,
        "ranks": leg.ranks,
        "dtype": leg.dtype,
        "bytes": leg.bytes,
        "sent": sent(leg.amount),
    }


def _reasons(probe: ModelProbe) -> list[str]:
    return list(dict.fromkeys([probe.unknown.model, probe.unknown.batch, probe.unknown.optimizer]))


def _held(name: str, tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    if tensors is None:
        return {"name": name, "parameters": None, "numel": None, "bytes": None}
    return {
        "name": name,
        "parameters": len(tensors),
        "numel": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(map(nbytes, tensors.values())),
    }


def _verdict(verdict: BufferUse | None, buffers: dict[str, Tensor] | None) -> dict[str, Any] | None:
    if verdict is None or buffers is None:
        return None
    return {
        "count": len(buffers),
        "bytes": sum(map(nbytes, buffers.values())),
        "changing": list(verdict.changing),
        "changing_bytes": verdict.bytes,
        "constant": list(verdict.constant),
        "counters": list(verdict.counters),
        "read_in_training": verdict.read,
    }


def sent(amount: Amount | None, steps: int = 1, wanted: int = 1) -> dict[str, float] | None:
    """What `wanted` steps of an average kind send, in bytes, if `steps` of them send `amount`."""
    if amount is None:
        return None
    return {
        "per_rank": _number(amount.all_ranks * wanted / steps / len(amount.by_rank)),
        "all_ranks": _number(amount.all_ranks * wanted / steps),
        "between_hosts": _number(amount.leaves_hosts * wanted / steps),
    }


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value
