"""Carries out a sync policy's plan on one rank."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddprun.sync.delta import DeltaExchange, OuterSgd
from ddprun.sync.exchanger import ParameterExchanger
from ddprun.sync.optimizer_state import average_state
from ddprun.sync.plan import Effect, PlanProgress, SyncPlan, Transfer
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.stack import Stack


def averaged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that have a mean, by name; whole numbers (quantised weights) have none, and do not train."""
    return {
        name: param
        for name, param in model.named_parameters()
        if param.is_floating_point() or param.is_complex()
    }


@dataclass(frozen=True, slots=True)
class SyncContext:
    """What a plan is carried out with."""

    model: nn.Module
    optimizer: Optimizer
    exchanger: ParameterExchanger
    stack: Stack
    """The stage's hooks, among all ranks."""

    host_stack: Stack
    """The stage's hooks among the ranks of one host."""


class Synchronizer:
    """Exchanges after each step what the plan says.

    Args:
        plan: of the stage.
        context: what it works with.
        momentum: of earlier stages' outer optimizer, by parameter name; taken on, and updated at the end.

    Raises:
        ValueError: more fragments than parameters.
    """

    def __init__(self, plan: SyncPlan, context: SyncContext, momentum: dict[str, Tensor]) -> None:
        self.plan = plan
        self._context, self._momentum = context, momentum
        self._progress = PlanProgress(plan)
        self._buckets = buckets_of(plan, context.model, context.exchanger.cap_bytes)
        self._parts = {p: self._part(one) for p, one in enumerate(plan.transfers) if one.what == "change"}
        for part in self._parts.values():
            if part.outer is not None:
                part.outer.take_on(part.buckets, momentum)

    def begin(self) -> None:
        """The stage begins, and all ranks have the same parameters: changes are counted from these."""
        for part in self._parts.values():
            part.begin()

    def after_step(self, step: int) -> Effect:
        """The optimizer has taken its step, which counts from 1 in the stage."""
        landing, setting_out, effect = self._progress.after_step(step)
        self._carry_out(landing, setting_out)
        return effect

    def finish(self, *, reconcile: bool) -> Effect:
        """The stage is over: bring in what is under way, and make the ranks equal.

        Args:
            reconcile: False: what comes next wants the ranks as they are.
        """
        unmoved = {place for place, steps in enumerate(self._progress.since) if not steps}
        landing, setting_out, effect = self._progress.finish(reconcile=reconcile)
        self._carry_out(landing, setting_out, unmoved=unmoved, at_once=True)
        for part in self._parts.values():
            if part.outer is not None:
                part.outer.leave(part.buckets, self._momentum)
        return effect

    def describe(self) -> str:
        """What all ranks must have alike."""
        return repr((self.plan, [buckets.layouts for buckets in self._buckets.values()]))

    def state_dict(self) -> dict[str, Any]:
        """What decides later steps, mid-stage; of this rank. Waits for what is under way."""
        state: dict[str, Any] = {}
        for place, steps in enumerate(self._progress.since):
            state[str(place)] = {"since": steps}
            if part := self._parts.get(place):
                state[str(place)] |= part.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; comes after `begin`."""
        for place in range(len(self.plan.transfers)):
            own = state[str(place)]
            self._progress.since[place] = own["since"]
            if part := self._parts.get(place):
                part.load_state_dict(own)
                if part.under_way:
                    self._progress.under_way.add(place)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a round that begins goes on from, of the states of all ranks of another world, whose weights
        have become equal: the outer momentum, which all ranks have alike.
        """
        first = states[0] if states else {}
        return {
            place: {"since": 0} | ({"momentum": own["momentum"]} if "momentum" in own else {})
            for place, own in first.items()
        }

    def _part(self, transfer: Transfer) -> DeltaExchange:
        context, world = self._context, self._context.exchanger.exchange.deltas.world
        stack, group = context.stack, world
        if transfer.among == "host":
            stack, group = context.host_stack, world.splits[self.plan.hosts][0]
        outer = None if transfer.outer is None else OuterSgd(transfer.outer.lr, transfer.outer.momentum)
        return DeltaExchange(self._buckets[transfer.fragment], context.exchanger, stack, group, outer)

    def _carry_out(
        self,
        landing: Sequence[int],
        setting_out: Sequence[int],
        *,
        unmoved: Container[int] = (),
        at_once: bool = False,
    ) -> None:
        """Land transfers, and send others.

        Args:
            landing: their places in the plan.
            setting_out: theirs.
            unmoved: of those that land: this rank's weights have not changed since it set out.
            at_once: nothing goes on beside training any more.
        """
        transfers = self.plan.transfers
        for place in landing:
            self._parts[place].land(moved=place not in unmoved)
        changes = [place for place in setting_out if place in self._parts]
        for place in changes:
            overlap = transfers[place].delay > 0 and not at_once
            self._parts[place].send(overlap=overlap)
            if not overlap and not at_once:
                self._parts[place].land()
        if at_once:
            for place in changes:
                self._parts[place].land()
        for place in setting_out:
            if place not in self._parts:
                self._send(transfers[place])
        if any(transfers[place].equalizes for place in setting_out):
            for place, part in self._parts.items():
                if transfers[place].among == "host":
                    part.begin()  # changes inside a host are counted from what all ranks have now

    def _send(self, transfer: Transfer) -> None:
        """Exchange values as they are."""
        exchanger = self._context.exchanger
        group = self._group(transfer)
        if transfer.what == "optimizer":
            average_state(self._context.optimizer, exchanger, group)
            return
        buckets = self._buckets[transfer.fragment]
        with torch.no_grad():
            if transfer.source is not None:
                exchanger.broadcast(buckets, "parameters", transfer.source)
            else:
                exchanger.average(buckets, "parameters", group)

    def _group(self, transfer: Transfer) -> RankGroup | None:
        """The ranks, of the plain queue; None: all of them."""
        world = self._context.exchanger.exchange.plain.world
        match transfer.among:
            case "all":
                return None
            case "host":
                return world.splits[self.plan.hosts][0]
            case partition:
                return world.parts[partition.parts(world.size)]


def buckets_of(plan: SyncPlan, model: nn.Module, cap_bytes: float) -> dict[tuple[int, int], ParameterBuckets]:
    """The parameters of each fragment that a plan sends, in flat buckets.

    Args:
        plan: of a stage.
        model: whose parameters.
        cap_bytes: largest size of a bucket.

    Raises:
        ValueError: more fragments than parameters.
    """
    found: dict[tuple[int, int], ParameterBuckets] = {}
    for count in sorted({one.fragment[1] for one in plan.transfers if one.what != "optimizer"}):
        first = 0
        for index, named in enumerate(split_evenly(averaged_parameters(model), count)):
            found[index, count] = ParameterBuckets(named, cap_bytes, first)
            first += len(found[index, count].layouts)
    return found


def split_evenly(named: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Neighbouring parameters in `parts` groups of about equally many elements, none of them empty.

    Raises:
        ValueError: fewer parameters than parts.
    """
    if parts > max(1, len(named)):
        raise ValueError(f"{parts} fragments of {len(named)} parameters: each needs at least one")
    items = list(named.items())
    total, done = sum(tensor.numel() for tensor in named.values()), 0
    groups: list[dict[str, Tensor]] = [{}]
    for place, (name, tensor) in enumerate(items):
        left, wanted = len(items) - place, parts - len(groups)
        middle = done + tensor.numel() / 2
        if groups[-1] and (left <= wanted or (wanted and middle >= total * len(groups) / parts)):
            groups.append({})
        groups[-1][name] = tensor
        done += tensor.numel()
    return groups
