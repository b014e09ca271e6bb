"""Plain DDP: gradients are averaged at every step."""

from ddprun.sync.plan import StageFacts, SyncPlan, SyncPolicy, Transfer


class EveryStep(SyncPolicy):
    """Gradients are averaged over all ranks at every step: plain DDP. Without a backward pass: parameters."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        if stage.backward:
            return SyncPlan(gradients="all")
        if stage.changes_weights:
            return SyncPlan(transfers=(Transfer("change", every=1),))
        return SyncPlan(changes_weights=False)
