"""What a sync policy is: its options, and a plan made of them. Nothing here imports torch."""

from typing import ClassVar, Literal

from ddprun.options import Options
from ddprun.sync.plan import StageFacts, SyncPlan

OptimizerState = Literal["local", "average"]


class SyncPolicy(Options):
    """Base of every sync policy. The fields of a subclass are its options in the file, checked before a run;
    its docstring is its line in `ddprun catalog`.
    """

    period_key: ClassVar[str] = "every"
    """The option that says after how many steps all ranks synchronise, for messages."""

    def plan(self, stage: StageFacts) -> SyncPlan:
        """What ranks exchange in a stage, and when."""
        raise NotImplementedError
