"""Where `ddprun submit` sends a pipeline: `Cluster` is the base, and a module of `backends` has one each.

Torch is not imported.
"""

from ddprun.cluster.cluster import Cluster, ClusterError, Flag, Outcome, Show, Submission, limits

__all__ = ["Cluster", "ClusterError", "Flag", "Outcome", "Show", "Submission", "limits"]
