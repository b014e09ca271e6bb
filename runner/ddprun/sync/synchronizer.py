"""Carries out a sync policy's plan on one rank.

A change of parameters is counted from the weights that ranks last had in common and divided by the number of
ranks, so that lossy hooks lose little and their residuals are in units of the mean's contribution.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddprun.sync.buffers import FrozenParameterSync
from ddprun.sync.exchanger import PendingExchange, TensorExchanger, average_optimizer_state, mean_of
from ddprun.sync.plan import DueTransfers, OuterOptimizer, PlanProgress, SyncPlan, Transfer
from ddprun_hooks.buckets import TensorBuckets
from ddprun_hooks.comm.groups import (
    GroupRequirement,
    GroupRequirements,
    RankGroup,
    merge_requirements,
    requirements_in_scope,
)
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Stack

_SECOND_BETA = 0.99  # of FedAdam
_PLAIN_AVERAGING = OuterOptimizer(lr=1.0, momentum=0.0)  # SGD that adds the mean change


@dataclass(eq=False)
class Synchronizer:
    """Exchanges after each step what the plan says."""

    progress: PlanProgress
    frozen: FrozenParameterSync  # and the trained ones, which travel
    optimizer: Optimizer
    exchanger: TensorExchanger
    stack: Stack  # the stage's hooks, among all ranks
    host_stack: Stack  # the stage's hooks among the ranks of one host
    outer_momentum: dict[str, dict[str, Tensor]]
    """Of outer optimizers, from stage to stage: by the ranks that exchange (`all`, or `host`: those of one
    host), then by the parameter's name, as `DeltaExchange.momentum`."""

    def __post_init__(self) -> None:
        self.plan = self.progress.plan
        self.weight = 1.0  # of this rank's changes in their mean: its part of a round's samples, times ranks
        self._buckets = buckets_by_fragment(self.plan, self.frozen.trainable, self.exchanger.cap_bytes)
        equalizing = (index for index, one in enumerate(self.plan.transfers) if one.equalizes)
        self._frozen_check_index = next(equalizing, None)  # the transfer with which frozen ones are compared
        self._deltas = {
            index: self._make_delta_exchange(one)
            for index, one in enumerate(self.plan.transfers)
            if one.what == "change"
        }

    def _make_delta_exchange(self, transfer: Transfer) -> "DeltaExchange":
        stack, group, among = self.stack, self.exchanger.exchange.delta_queue.world, "all"
        if transfer.among == "host":
            stack, group, among = self.host_stack, group.splits_by_host_count[self.plan.hosts][0], "host"
        buckets, outer = self._buckets[transfer.fragment], transfer.outer or _PLAIN_AVERAGING
        momentum = self.outer_momentum.setdefault(among, {})
        return DeltaExchange(buckets, self.exchanger, stack, group, outer, momentum)

    def set_delta_bases(self) -> None:
        """The stage begins, and all ranks have the same parameters: changes are counted from these."""
        for delta in self._deltas.values():
            delta.set_base_to_weights()

    def agreement_description(self) -> str:
        """What must be the same on all ranks."""
        return repr((self.plan, [buckets.layouts for buckets in self._buckets.values()]))

    def state_dict(self) -> dict[str, Any]:
        """What decides later steps, mid-stage; of this rank. Waits for what is in flight."""
        state: dict[str, Any] = {}
        for index, steps in enumerate(self.progress.steps_since_start):
            delta = self._deltas.get(index)
            state[str(index)] = {"since": steps} | (delta.state_dict() if delta else {})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; comes after `set_delta_bases`."""
        for number, own in state.items():  # of another number of ranks, only what is in flight
            index = int(number)
            self.progress.steps_since_start[index] = own["since"]
            if delta := self._deltas.get(index):
                delta.load_state_dict(own)
                if delta.in_flight:
                    self.progress.in_flight.add(index)

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is in flight, for another number of ranks, from the states of all: its tensors become means,
        as parameters do, so that it changes their mean as it would have changed each rank's own.
        """
        merged = {index: dict(own) for index, own in states[0].items() if own.get("means")}
        for index, own in merged.items():
            for name in ("base", "left", "means"):
                of_ranks = (state[index][name] for state in states)
                own[name] = [mean_of(tensors) for tensors in zip(*of_ranks, strict=True)]
        return merged

    def apply_and_start_transfers(self, chosen: DueTransfers) -> None:
        """Apply the transfers that are in flight, and start others."""
        transfers, at_end = self.plan.transfers, chosen.at_end
        for index in chosen.applied:
            own_part, changed = transfers[index].own_part, index not in chosen.without_steps_since
            self._deltas[index].wait_and_apply(own_part, weights_changed=changed)
        changes = [index for index in chosen.started if index in self._deltas]
        for index in changes:
            overlap = transfers[index].delay > 0 and not at_end
            self._deltas[index].send(self.weight, overlap=overlap)
            if not overlap and not at_end:
                self._deltas[index].wait_and_apply(transfers[index].own_part)
        if at_end:
            for index in changes:
                self._deltas[index].wait_and_apply()
            for index in chosen.reset_to_common:
                self._deltas[index].reset_weights_to_base()
        for index in chosen.started:
            if index not in self._deltas:
                self._exchange_without_hooks(transfers[index])
        check = self._frozen_check_index
        if check is not None:  # frozen ones, too, become equal where an exchange of all ranks is applied
            applied_at_once = check in chosen.started and (at_end or not transfers[check].delay)
            if applied_at_once or check in chosen.applied:
                self.frozen.equalize_differing(transfers[check].source)
        if any(transfers[index].equalizes for index in chosen.started):
            for index, delta in self._deltas.items():
                if transfers[index].among == "host":
                    # Changes inside a host are counted from what all ranks have now.
                    delta.set_base_to_weights()

    def _exchange_without_hooks(self, transfer: Transfer) -> None:
        """Exchange the optimizer's state, or parameters, past all hooks."""
        exchanger, world = self.exchanger, self.exchanger.exchange.plain_queue.world
        group: RankGroup | None = None
        if transfer.among == "host":
            group = world.splits_by_host_count[self.plan.hosts][0]
        elif transfer.among != "all":
            group = world.partition_groups[transfer.among.parts(world.size)]
        if transfer.what == "optimizer":
            average_optimizer_state(self.optimizer, exchanger, group)
        else:
            exchanger.equalize(self._buckets[transfer.fragment], "parameters", transfer.source, group)


@dataclass
class DeltaExchange:
    """One part of the parameters: the weights last held in common, and the exchange of their change."""

    buckets: TensorBuckets
    exchanger: TensorExchanger
    stack: Stack
    group: RankGroup  # of the exchanger's queue of deltas
    outer: OuterOptimizer  # what becomes of the mean change
    momentum: dict[str, Tensor]
    """The outer optimizer's, from stage to stage, by parameter name, at least fp32: of SGD (numel,), of Adam
    both moments, (2, numel)."""

    _base: list[Tensor] = field(default_factory=list)  # common weights, (numel,) of each bucket
    _weights_at_send: list[Tensor] = field(default_factory=list)  # this rank's, when what is in flight began
    _pending: list[PendingExchange] = field(default_factory=list)
    _means: list[Tensor] = field(default_factory=list)  # of an exchange that is complete, not yet applied
    _flat_momentum: list[Tensor] = field(default_factory=list)  # of each bucket; `momentum` has views of it

    def __post_init__(self) -> None:
        """Continue with an earlier stage's momentum of this kind; other parameters start anew."""
        adam = self.outer.kind == "adam"
        for index, layout in enumerate(self.buckets.layouts if adam or self.outer.momentum else ()):
            values = self.buckets.flatten(index)
            flat = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            if adam:
                flat = torch.stack([flat, torch.full_like(flat, self.outer.eps**2)])
            self._flat_momentum.append(flat)
            for param in layout.params:
                own = flat[..., param.offset : param.offset + param.numel]
                known = self.momentum.get(param.name)
                if known is not None and known.shape == own.shape:
                    own.copy_(known)
                self.momentum[param.name] = own

    @property
    def in_flight(self) -> bool:
        """An exchange has begun and is not applied yet."""
        return bool(self._pending or self._means)

    def set_base_to_weights(self) -> None:
        """The ranks have the same weights now."""
        self._base = [self.buckets.flatten(index) for index in range(len(self.buckets.layouts))]

    def reset_weights_to_base(self) -> None:
        """Take the weights that the ranks last had in common."""
        for index, base in enumerate(self._base):
            self.buckets.copy_to_tensors(index, base)

    def send(self, weight: float = 1.0, *, overlap: bool = False) -> None:
        """Start an exchange of what has changed, of this `weight` in the mean: 1 where all ranks count alike.
        `overlap`: training goes on meanwhile.
        """
        for index, layout in enumerate(self.buckets.layouts):
            flat = self.buckets.flatten(index)
            if overlap:
                self._weights_at_send.append(flat.clone())
            change = flat.sub_(self._base[index]).mul_(weight / self.group.size)
            payload = Payload(change, layout.params, "delta", layout.index)
            queue = self.exchanger.exchange.delta_queue
            self._pending.append(self.exchanger.send(queue, payload, self.stack, self.group))

    def wait_and_apply(self, own_part: float | None = None, *, weights_changed: bool = True) -> None:
        """Wait for the exchange and apply it; `weights_changed`: this rank's weights have changed since it
        began.

        Weights become the new common ones. If training went on meanwhile, they move by what the exchange has
        changed, and what this rank has learned since stays, as a change to be sent in the next round (delayed
        averaging: Zhou et al. 2020, arXiv:2006.00441). With `own_part`, the weights become so much of this
        rank's own and the rest of the common ones.
        """
        means: list[Tensor | None] = [*self._means] or [None] * len(self._pending)
        for index, mean in enumerate(means):
            mean = self.exchanger.wait(self._pending[index]) if mean is None else mean
            common = self._outer_step(index, mean)
            if own_part:
                self.buckets.copy_to_tensors(index, torch.lerp(common, self.buckets.flatten(index), own_part))
            elif own_part is None and self._weights_at_send and weights_changed:
                self.buckets.add_to_tensors(index, common - self._weights_at_send[index])
            else:
                self.buckets.copy_to_tensors(index, common)
            self._base[index] = common
        self._pending, self._weights_at_send, self._means = [], [], []

    def state_dict(self) -> dict[str, Any]:
        """Common weights, and what an exchange in flight brought, each by bucket: (numel,)."""
        if self._pending and not self._means:
            self._means = [self.exchanger.wait(pending).clone() for pending in self._pending]
        return {"base": [*self._base], "left": [*self._weights_at_send], "means": [*self._means]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; comes after `set_base_to_weights`."""
        self._base, self._weights_at_send, self._means = (
            [one.clone().to(base) for one, base in zip(state[name], self._base, strict=True)]
            if state[name]
            else []
            for name in ("base", "left", "means")
        )

    def _outer_step(self, index: int, mean: Tensor) -> Tensor:
        """New common weights of a bucket: a step of the outer optimizer on the negated mean change."""
        outer, step = self.outer, mean
        wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
        if outer.kind == "adam":
            first, second = self._flat_momentum[index]
            first.lerp_(wide, 1 - outer.momentum)
            second.lerp_(wide.square(), 1 - _SECOND_BETA)
            step = first / second.sqrt().add_(outer.eps)
        elif outer.momentum:
            step = self._flat_momentum[index].mul_(outer.momentum).add_(wide)
            if outer.kind == "nesterov":
                step = torch.add(wide, step, alpha=outer.momentum)
        return torch.add(self._base[index], step.to(mean.dtype), alpha=outer.lr)


def buckets_by_fragment(
    plan: SyncPlan, trainable: Mapping[str, Tensor], cap_bytes: float
) -> dict[tuple[int, int], TensorBuckets]:
    """A plan's fragments of the trained parameters, in flat buckets."""
    buckets: dict[tuple[int, int], TensorBuckets] = {}
    for count in sorted({one.fragment[1] for one in plan.transfers if one.what != "optimizer"}):
        first = 0
        for index, named in enumerate(split_into_fragments(trainable, count)):
            buckets[index, count] = TensorBuckets(named, cap_bytes, first)
            first += len(buckets[index, count].layouts)
    return buckets


def split_into_fragments(named: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Neighbouring parameters in `parts` groups of about equal size. Too many were refused before."""
    items = list(named.items())
    total, done = sum(tensor.numel() for tensor in named.values()), 0
    groups: list[dict[str, Tensor]] = [{}]
    for index, (name, tensor) in enumerate(items):
        left, wanted = len(items) - index, parts - len(groups)
        middle = done + tensor.numel() / 2
        if groups[-1] and (left <= wanted or (wanted and middle >= total * len(groups) / parts)):
            groups.append({})
        groups[-1][name] = tensor
        done += tensor.numel()
    return groups


class GroupsByQueue(NamedTuple):
    """Among which ranks each queue exchanges, as `ddprun_hooks.comm_context.CommContext` has them."""

    gradients: GroupRequirements
    deltas: GroupRequirements
    plain: GroupRequirements

    @classmethod
    def for_stages(cls, stages: Iterable["GroupsByQueue"]) -> "GroupsByQueue":
        """What serves each of several stages, one at a time."""
        always = cls({}, {}, {GroupRequirement("world"): 1})
        return cls(*map(merge_requirements, zip(*[always, *stages], strict=True)))


def queue_requirements(plan: SyncPlan, stack: Stack, host_stack: Stack, ranks: int) -> GroupsByQueue:
    """What a stage with this plan needs, with its hooks among all ranks and among those of one host."""
    in_hosts = requirements_in_scope("within", host_stack.requirements, plan.hosts)
    gradients = {"all": stack.requirements, "host": in_hosts, None: {}}[plan.gradients]
    deltas: list[GroupRequirements] = []
    plain: list[GroupRequirements] = [{GroupRequirement("world"): 1}]
    for one in plan.transfers:
        if one.what == "change":
            deltas.append(in_hosts if one.among == "host" else stack.requirements)
        elif one.among == "host":
            plain.append({GroupRequirement("within", plan.hosts): 1})
        elif one.among != "all":
            plain.append({GroupRequirement("part", parts=one.among.parts(ranks)): 1})
    return GroupsByQueue(gradients, merge_requirements(deltas), merge_requirements(plain))
