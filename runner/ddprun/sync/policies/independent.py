"""No synchronisation at all."""

from ddprun.sync.plan import StageFacts, SyncPlan, SyncPolicy


class Independent(SyncPolicy):
    """Ranks never synchronise; hooks that hold from above are unused."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        """Nothing. What becomes of the ranks is the next stage's to say; else parameters are averaged as they
        are when the stage ends.
        """
        return SyncPlan(keeps_apart=True)
