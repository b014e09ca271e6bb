"""Local SGD: ranks train by themselves and average what they have learned every so many steps."""

from ddprun.sync.plan import (
    OptimizerStateMode,
    Period,
    StageFacts,
    SyncPlan,
    SyncPolicy,
    Transfer,
    period_steps_and_round,
)


class LocalSgd(SyncPolicy):
    """Every rank trains by itself; every n-th step the ranks' changes are averaged (Stich 2018,
    arXiv:1805.09767).
    """

    every: Period
    """Steps from one synchronisation to the next, or a round: `{samples: N}` of all ranks or
    `{seconds: S}`, in which each rank takes as many local updates as its speed allows. A round is one
    step."""

    optimizer_state: OptimizerStateMode = "local"
    """`average`: the optimizer's state is averaged too, which doubles or triples the bytes."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        every, one_round = period_steps_and_round(self.every)
        change, state = Transfer("change", every), Transfer("optimizer", every)
        averages_state = self.optimizer_state == "average"
        return SyncPlan(transfers=(change, state) if averages_state else (change,), round=one_round)
