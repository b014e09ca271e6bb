"""The process groups that a plan needs."""

from collections.abc import Iterable
from typing import NamedTuple

from ddprun.sync.plan import SyncPlan
from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements, combine, within_hosts
from ddprun_hooks.stack import Stack


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
    """What a stage needs.

    Args:
        plan: of the stage.
        stack: the stage's hooks, among all ranks.
        host_stack: those among the ranks of one host.
        ranks: how many there are.
    """
    gradients: GroupRequirements = {}
    if plan.gradients == "all":
        gradients = stack.requirements
    elif plan.gradients == "host":
        gradients = within_hosts(host_stack.requirements, plan.hosts)
    deltas: list[GroupRequirements] = []
    plain: list[GroupRequirements] = [{GroupRequirement("world"): 1}]
    for one in plan.transfers:
        if one.what == "change":
            among_hosts = one.among == "host"
            deltas.append(
                within_hosts(host_stack.requirements, plan.hosts) if among_hosts else stack.requirements
            )
        elif one.among == "host":
            plain.append({GroupRequirement("within", plan.hosts): 1})
        elif one.among != "all":
            plain.append({GroupRequirement("part", parts=one.among.parts(ranks)): 1})
    return QueueRequirements(gradients, combine(deltas), combine(plain))
