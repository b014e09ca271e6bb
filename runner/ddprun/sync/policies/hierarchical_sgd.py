"""Hierarchical SGD: one period for the ranks of a host, a longer one for all."""

from dataclasses import replace
from typing import ClassVar, Self

from pydantic import model_validator

from ddprun.options import PositiveInt, problem
from ddprun.sync.plan import OptimizerStateMode, StageFacts, SyncPlan, SyncPolicy, Transfer


class HierarchicalSgd(SyncPolicy):
    """One period for the ranks of a host, a longer one for all (hierarchical local SGD, Lin et al. 2018,
    arXiv:1808.07217).
    """

    period_key: ClassVar[str] = "across"

    within: PositiveInt = 1
    """Steps between synchronisations inside a host; 1 all-reduces gradients there at every step."""

    across: PositiveInt
    """Steps between synchronisations of all ranks; a multiple of `within`."""

    hosts: PositiveInt | None = None
    """Treat the ranks as this many equal hosts, for trials on one machine; null: as they were launched."""

    optimizer_state: OptimizerStateMode = "local"
    """`average`: the optimizer's state is averaged too, which doubles or triples the bytes."""

    @model_validator(mode="after")
    def _across_is_multiple_of_within(self) -> Self:
        if self.across % self.within:
            text = f"across {self.across} is not a multiple of within {self.within}"
            below = self.across // self.within * self.within
            nearest = f"{below} or {below + self.within}" if below else f"{self.within}"
            raise problem(text, f"write {nearest}", at="across")
        return self

    def plan(self, stage: StageFacts) -> SyncPlan:
        """Inside a host gradients or changes of parameters, between hosts changes of parameters."""
        gradients = stage.backward and self.within == 1
        transfers = [Transfer("change", self.across), Transfer("optimizer", self.across)]
        if not gradients:
            transfers += [
                replace(one, every=self.within, not_every=self.across, among="host") for one in transfers
            ]
        if self.optimizer_state == "local":
            transfers = [one for one in transfers if one.what != "optimizer"]
        return SyncPlan("host" if gradients else None, tuple(transfers), hosts=self.hosts)
