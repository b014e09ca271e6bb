"""One rank's parameters for all, every so many steps."""

from ddprun.options import NonNegativeInt, PositiveInt
from ddprun.sync.plan import StageFacts, SyncPlan, SyncPolicy, Transfer


class Broadcast(SyncPolicy):
    """Every n-th step all ranks take the parameters of one rank, without hooks."""

    every: PositiveInt
    """Steps from one broadcast to the next."""

    source: NonNegativeInt = 0
    """The rank whose parameters all ranks take."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        return SyncPlan(transfers=(Transfer("parameters", self.every, source=self.source),))
