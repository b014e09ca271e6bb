"""Parameter averaging, for stages without a backward pass and elsewhere."""

from ddprun.options import PositiveInt
from ddprun.sync.plan import StageFacts, SyncPlan, SyncPolicy, Transfer


class Average(SyncPolicy):
    """Every n-th step the parameters of all ranks become their mean; the optimizer's state stays local."""

    every: PositiveInt
    """Steps from one average to the next."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        return SyncPlan(transfers=(Transfer("change", self.every),))
