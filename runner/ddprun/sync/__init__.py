"""When ranks synchronise: one policy per file, and buffers, frozen parameters, the audit."""

from ddprun.sync.plan import OuterOptimizer, Partition, StageFacts, SyncPlan, SyncPolicy, Transfer

__all__ = ["OuterOptimizer", "Partition", "StageFacts", "SyncPlan", "SyncPolicy", "Transfer"]
