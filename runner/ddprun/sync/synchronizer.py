"""Carries out a sync policy's plan on one rank.

A change of parameters is counted from the weights that ranks last had in common and divided by the number of
ranks, so that lossy hooks lose little and their residuals are in units of the mean's contribution.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddprun.sync.exchanger import ParameterExchanger, PendingExchange, average_state
from ddprun.sync.frozen import FrozenParameters
from ddprun.sync.plan import Effect, OuterOptimizer, PlanProgress, SyncPlan, Transfer
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements, RankGroup, combine, within_hosts
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Stack

_ADDS = OuterOptimizer(lr=1.0, momentum=0.0)  # SGD that adds the mean change


@dataclass(eq=False)
class Synchronizer:
    """Exchanges after each step what the plan says. Raises ValueError for more fragments than parameters."""

    plan: SyncPlan
    frozen: FrozenParameters  # and the trained ones, which travel
    optimizer: Optimizer
    exchanger: ParameterExchanger
    stack: Stack  # the stage's hooks, among all ranks
    host_stack: Stack  # the stage's hooks among the ranks of one host
    momentum: dict[str, Tensor]  # of outer optimizers, from stage to stage: by parameter name, (numel,)

    def __post_init__(self) -> None:
        self._progress = PlanProgress(self.plan)
        self._buckets = buckets_of(self.plan, self.frozen.trained, self.exchanger.cap_bytes)
        equalizing = (index for index, one in enumerate(self.plan.transfers) if one.equalizes)
        self._compares_frozen = next(equalizing, None)  # the transfer with which frozen ones are compared
        self._deltas = {
            index: self._delta(one) for index, one in enumerate(self.plan.transfers) if one.what == "change"
        }

    def _delta(self, transfer: Transfer) -> "DeltaExchange":
        stack, group = self.stack, self.exchanger.exchange.deltas.world
        if transfer.among == "host":
            stack, group = self.host_stack, group.splits[self.plan.hosts][0]
        buckets, outer = self._buckets[transfer.fragment], transfer.outer or _ADDS
        delta = DeltaExchange(buckets, self.exchanger, stack, group, outer)
        delta.take_over(self.momentum)
        return delta

    def begin(self) -> None:
        """The stage begins, and all ranks have the same parameters: changes are counted from these."""
        for delta in self._deltas.values():
            delta.begin()

    def after_step(self, step: int) -> Effect:
        """The optimizer has taken its step, which counts from 1 in the stage."""
        landing, setting_out, effect = self._progress.after_step(step)
        if landing or setting_out:
            self._carry_out(landing, setting_out)
        return effect

    def finish(self, *, reconcile: bool) -> Effect:
        """The stage is over: land what is under way, and make the ranks equal, unless what comes next wants
        them as they are.
        """
        unmoved = {index for index, steps in enumerate(self._progress.since) if not steps}
        landing, setting_out, effect = self._progress.finish(reconcile=reconcile)
        self._carry_out(landing, setting_out, unmoved=unmoved, at_end=True)
        for delta in self._deltas.values():
            delta.hand_over(self.momentum)
        return effect

    def describe(self) -> str:
        """What must be the same on all ranks."""
        return repr((self.plan, [buckets.layouts for buckets in self._buckets.values()]))

    def state_dict(self) -> dict[str, Any]:
        """What decides later steps, mid-stage; of this rank. Waits for what is under way."""
        state: dict[str, Any] = {"frozen_differ": self.frozen.unequal()}
        for index, steps in enumerate(self._progress.since):
            delta = self._deltas.get(index)
            state[str(index)] = {"since": steps} | (delta.state_dict() if delta else {})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; comes after `begin`."""
        self.frozen.load_unequal(state["frozen_differ"])
        for index in range(len(self.plan.transfers)):
            own = state[str(index)]
            self._progress.since[index] = own["since"]
            if delta := self._deltas.get(index):
                delta.load_state_dict(own)
                if delta.under_way:
                    self._progress.under_way.add(index)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a round that begins, of the states of all ranks of another world, whose weights have
        become equal: the outer momentum, which is the same on all ranks.
        """
        first = states[0] if states else {}
        if not first:
            return {}
        state: dict[str, Any] = {"frozen_differ": False}
        for index in map(str, range(len(self.plan.transfers))):
            own = first[index]
            state[index] = {"since": 0} | ({"momentum": own["momentum"]} if "momentum" in own else {})
        return state

    def _carry_out(
        self,
        landing: Sequence[int],
        setting_out: Sequence[int],
        *,
        unmoved: Container[int] = (),
        at_end: bool = False,
    ) -> None:
        """Land transfers, and send others; all by their index in the plan.

        `unmoved`: of those that land, where this rank's weights have not changed since it set out. `at_end`:
        training is over, so nothing overlaps with it, and all changes travel at once.
        """
        transfers = self.plan.transfers
        for index in landing:
            self._deltas[index].land(moved=index not in unmoved)
        changes = [index for index in setting_out if index in self._deltas]
        for index in changes:
            overlap = transfers[index].delay > 0 and not at_end
            self._deltas[index].send(overlap=overlap)
            if not overlap and not at_end:
                self._deltas[index].land()
        if at_end:
            for index in changes:
                self._deltas[index].land()
        for index in setting_out:
            if index not in self._deltas:
                self._send_as_is(transfers[index])
        self._equalize_frozen(landing, setting_out, at_end=at_end)
        if any(transfers[index].equalizes for index in setting_out):
            for index, delta in self._deltas.items():
                if transfers[index].among == "host":
                    delta.begin()  # changes inside a host are counted from what all ranks have now

    def _equalize_frozen(self, landing: Sequence[int], setting_out: Sequence[int], *, at_end: bool) -> None:
        """Compare the frozen parameters when all ranks' trained ones set out, and make them equal when these
        land.
        """
        index = self._compares_frozen
        if index is None:
            return
        source = self.plan.transfers[index].source
        if index in landing:
            self.frozen.make_equal(source)
        if index in setting_out:
            self.frozen.post()
            if at_end or not self.plan.transfers[index].delay:
                self.frozen.make_equal(source)

    def _send_as_is(self, transfer: Transfer) -> None:
        """Exchange the optimizer's state, or parameters, past all hooks."""
        exchanger, world = self.exchanger, self.exchanger.exchange.plain.world
        group: RankGroup | None = None
        if transfer.among == "host":
            group = world.splits[self.plan.hosts][0]
        elif transfer.among != "all":
            group = world.parts[transfer.among.parts(world.size)]
        if transfer.what == "optimizer":
            average_state(self.optimizer, exchanger, group)
            return
        buckets = self._buckets[transfer.fragment]
        with torch.no_grad():
            if transfer.source is not None:
                exchanger.broadcast(buckets, "parameters", transfer.source)
            else:
                exchanger.average(buckets, "parameters", group)


@dataclass
class DeltaExchange:
    """One part of the parameters: what ranks last had in common, and how their mean change is applied."""

    buckets: ParameterBuckets
    exchanger: ParameterExchanger
    stack: Stack
    group: RankGroup  # of the exchanger's queue of deltas
    outer: OuterOptimizer  # what becomes of the mean change
    _base: list[Tensor] = field(default_factory=list)  # common weights, (numel,) of each bucket
    _left: list[Tensor] = field(default_factory=list)  # this rank's weights when the exchange under way began
    _pending: list[PendingExchange] = field(default_factory=list)
    _means: list[Tensor] = field(default_factory=list)  # of an exchange that has landed, not yet applied
    _momentum: dict[int, Tensor] = field(default_factory=dict)  # of each bucket, (numel,), at least fp32

    @property
    def under_way(self) -> bool:
        """An exchange has begun and is not applied yet."""
        return bool(self._pending or self._means)

    def begin(self) -> None:
        """The ranks have the same weights now."""
        self._base = [self.buckets.flatten(index) for index in range(len(self.buckets.layouts))]

    def send(self, *, overlap: bool = False) -> None:
        """Start an exchange of what has changed; `overlap`: training goes on meanwhile."""
        for index, layout in enumerate(self.buckets.layouts):
            flat = self.buckets.flatten(index)
            if overlap:
                self._left.append(flat.clone())
            change = flat.sub_(self._base[index]).mul_(1.0 / self.group.size)
            payload = Payload(change, layout.params, "delta", layout.index)
            queue = self.exchanger.exchange.deltas
            self._pending.append(self.exchanger.send(queue, payload, self.stack, self.group))

    def land(self, *, moved: bool = True) -> None:
        """Wait for the exchange under way and apply it; `moved`: this rank's weights have changed since it
        began.

        Weights become the new common ones. If training went on meanwhile, they move by what the exchange has
        changed, and what this rank has learned since stays, as a change to be sent in the next round (delayed
        averaging: Zhou et al. 2020, arXiv:2006.00441).
        """
        means: list[Tensor | None] = [*self._means] or [None] * len(self._pending)
        for index, mean in enumerate(means):
            mean = self.exchanger.land(self._pending[index]) if mean is None else mean
            common = self._outer_step(index, mean)
            if self._left and moved:
                self.buckets.add(index, common - self._left[index])
            else:
                self.buckets.put(index, common)
            self._base[index] = common
        self._pending, self._left, self._means = [], [], []

    def state_dict(self) -> dict[str, Any]:
        """Common weights, what an exchange under way has brought, and the outer optimizer's momentum, each by
        bucket: (numel,).
        """
        if self._pending and not self._means:
            self._means = [self.exchanger.land(pending).clone() for pending in self._pending]
        tensors = {"base": [*self._base], "left": [*self._left], "means": [*self._means]}
        return {**tensors, "momentum": dict(self._momentum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; without common weights in it, from those of `begin`."""
        device = self.buckets.device
        self._momentum = {index: one.to(device, copy=True) for index, one in state["momentum"].items()}
        if state.get("base"):
            self._base, self._left, self._means = (
                [one.clone().to(base) for one, base in zip(state[name], self._base, strict=True)]
                if state[name]
                else []
                for name in ("base", "left", "means")
            )
            self._pending = []

    def _outer_step(self, index: int, mean: Tensor) -> Tensor:
        """A bucket's new common weights: a step of SGD whose gradient is the ranks' mean change, negated.

        As torch.optim.SGD(lr, momentum, nesterov=True): with momentum = 0 and lr = 1 it adds the mean change.
        """
        step, momentum = mean, self.outer.momentum
        if momentum:
            wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
            known = self._momentum.get(index)
            buffer = wide.clone() if known is None else known.mul_(momentum).add_(wide)
            self._momentum[index] = buffer
            step = torch.add(wide, buffer, alpha=momentum).to(mean.dtype)
        return torch.add(self._base[index], step, alpha=self.outer.lr)

    def take_over(self, momentum: Mapping[str, Tensor]) -> None:
        """Start with the momentum that an earlier stage left, by parameter name."""
        for index, layout in enumerate(self.buckets.layouts):
            if self.outer.momentum and all(param.name in momentum for param in layout.params):
                joined = torch.cat([momentum[param.name] for param in layout.params])
                self._momentum[index] = joined.to(self.buckets.device)  # a checkpoint's is in host memory

    def hand_over(self, momentum: dict[str, Tensor]) -> None:
        """Hand the momentum to a later stage, by parameter name."""
        for index, buffer in self._momentum.items():
            for param in self.buckets.layouts[index].params:
                momentum[param.name] = buffer[param.offset : param.offset + param.numel].clone()


def buckets_of(
    plan: SyncPlan, trained: Mapping[str, Tensor], cap_bytes: float
) -> dict[tuple[int, int], ParameterBuckets]:
    """The trained parameters of each fragment that a plan sends, in flat buckets of at most `cap_bytes`;
    raises ValueError for more fragments than parameters.
    """
    found: dict[tuple[int, int], ParameterBuckets] = {}
    for count in sorted({one.fragment[1] for one in plan.transfers if one.what != "optimizer"}):
        first = 0
        for index, named in enumerate(split_evenly(trained, count)):
            found[index, count] = ParameterBuckets(named, cap_bytes, first)
            first += len(found[index, count].layouts)
    return found


def split_evenly(named: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Neighbouring parameters in `parts` groups of about equally many elements, none of them empty; raises
    ValueError for fewer parameters than parts.
    """
    if parts > max(1, len(named)):
        raise ValueError(f"{parts} fragments of {len(named)} parameters: each needs at least one")
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


class QueueRequirements(NamedTuple):
    """Among which ranks each queue exchanges, as `ddprun_hooks.comm.exchange.Exchange` has them."""

    gradients: GroupRequirements
    deltas: GroupRequirements
    plain: GroupRequirements

    @classmethod
    def of_stages(cls, stages: Iterable["QueueRequirements"]) -> "QueueRequirements":
        """What serves each of several stages, one at a time."""
        always = cls({}, {}, {GroupRequirement("world"): 1})
        return cls(*map(combine, zip(*[always, *stages], strict=True)))


def requirements(plan: SyncPlan, stack: Stack, host_stack: Stack, ranks: int) -> QueueRequirements:
    """What a stage with this plan needs, with its hooks among all ranks and among those of one host."""
    in_hosts = within_hosts(host_stack.requirements, plan.hosts)
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
    return QueueRequirements(gradients, combine(deltas), combine(plain))
