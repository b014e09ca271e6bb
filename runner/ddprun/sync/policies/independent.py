"""No synchronisation at all."""

from ddprun.sync.plan import StageFacts, SyncPlan, SyncPolicy


class Independent(SyncPolicy):
    """Ranks never synchronise; hooks set at the top of the file are not used."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        """Nothing. The next stage says what becomes of the ranks; else their parameters are averaged."""
        return SyncPlan(keeps_apart=True)
