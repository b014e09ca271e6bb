"""Local SGD: ranks train by themselves and average what they have learned every so many steps."""

from ddprun.options import PositiveInt
from ddprun.sync.plan import OptimizerStateMode, StageFacts, SyncPlan, SyncPolicy, Transfer


class LocalSgd(SyncPolicy):
    """Every rank trains by itself; every n-th step the ranks' changes are averaged (Stich 2018,
    arXiv:1805.09767).
    """

    every: PositiveInt
    """Steps from one synchronisation to the next."""

    optimizer_state: OptimizerStateMode = "local"
    """`average`: the optimizer's state is averaged too, which doubles or triples the bytes."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        """The change of parameters, and the optimizer's state where that is asked for."""
        change, state = Transfer("change", self.every), Transfer("optimizer", self.every)
        return SyncPlan(transfers=(change, state) if self.optimizer_state == "average" else (change,))
