"""Hierarchical SGD: one period for the ranks of a host, a longer one for all."""

from collections.abc import Mapping
from typing import Any

from ddprun.sync.optimizer_state import average_state
from ddprun.sync.policy import Effect, Policy, SyncContext
from ddprun.sync.rounds import Part


class HierarchicalSgd(Policy):
    """Average inside each host often, over all ranks seldom (post-local SGD, Lin et al. 2018,
    arXiv:1808.07217).

    With `within: 1` backward averages gradients inside the host at every step; a longer period averages
    parameters there.

    Args:
        place: what to work with.
        within: steps between two averages inside a host.
        across: steps between two averages over all ranks, a multiple of `within`.
        hosts: split the ranks into so many hosts; None: as they were launched.
        optimizer_state: `average` the optimizer's state as well, or keep it `local`.
        gradients: backward averages gradients inside a host, so parameters need not be.
    """

    gradients_everywhere = False

    def __init__(
        self,
        place: SyncContext,
        within: int,
        across: int,
        hosts: int | None,
        optimizer_state: str,
        *,
        gradients: bool,
    ) -> None:
        self._place = place
        self._within, self._across, self._hosts, self._state = within, across, hosts, optimizer_state
        queues = place.exchanger.exchange
        world = queues.deltas.world
        buckets = place.buckets()
        self._part = Part(buckets, place.exchanger, place.stack, world)
        self._host_part: Part | None = None
        if not gradients:
            # The two levels count from different weights: buckets of their own, so that residuals are, too.
            self._host_part = Part(buckets, place.exchanger, place.host_stack, world.splits[hosts][0])
        self._host_team = queues.plain.world.splits[hosts][0] if optimizer_state == "average" else None
        self.averages_state = optimizer_state == "average"
        self._since = 0

    def begin(self) -> None:
        """What the ranks have in common now is what changes are counted from."""
        self._part.begin()
        if self._host_part is not None:
            self._host_part.begin()

    def synchronises(self, step: int) -> bool:
        """At whole periods of all ranks: inside a host they are not to wait for other hosts."""
        return step % self._across == 0

    def after_step(self, step: int) -> Effect:
        """Average over all ranks or inside the host, if it is time."""
        self._since += 1
        if step % self._across == 0:
            return self._average()
        if self._host_part is None:
            return "hosts_apart"
        if step % self._within:
            return "apart"
        self._host_part.exchange()
        if self._host_team is not None:
            average_state(self._place.optimizer, self._place.exchanger, self._host_team)
        return "host"

    def finish(self, *, reconcile: bool) -> Effect:
        """The last round is a short one."""
        return self._average() if reconcile and self._since else "nothing"

    def describe(self) -> str:
        """Its periods."""
        return f"hierarchical_sgd {self._within}, {self._across} of {self._hosts}, state {self._state}"

    def state_dict(self) -> dict[str, Any]:
        """The common weights of both levels, and how far the round is."""
        state: dict[str, Any] = {"since": self._since, "part": self._part.state_dict()}
        if self._host_part is not None:
            state["host_part"] = self._host_part.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in mid-round."""
        self._since = state["since"]
        self._part.load_state_dict(state["part"])
        if self._host_part is not None:
            self._host_part.load_state_dict(state["host_part"])

    def _average(self) -> Effect:
        self._since = 0
        self._part.exchange()
        if self._state == "average":
            average_state(self._place.optimizer, self._place.exchanger)
        if self._host_part is not None:
            self._host_part.begin()
        return "common"
