"""Local SGD: ranks train apart and average what they have learned every so many steps."""

from collections.abc import Mapping
from typing import Any

from ddprun.sync.optimizer_state import average_state
from ddprun.sync.policy import Effect, Policy, SyncContext
from ddprun.sync.rounds import Part


class LocalSgd(Policy):
    """Average the parameters over all ranks after every `every`-th step (Stich 2018, arXiv:1805.09767).

    Args:
        place: what to work with.
        every: steps between two averages.
        optimizer_state: `average` the optimizer's state as well, or keep it `local`.
    """

    gradients_everywhere = False

    def __init__(self, place: SyncContext, every: int, optimizer_state: str = "local") -> None:
        self._place = place
        self._every = every
        self._state = optimizer_state
        queue = place.exchanger.exchange.deltas
        self._part = Part(place.buckets(), place.exchanger, place.stack, queue.world)
        self.averages_state = optimizer_state == "average"
        self._since = 0  # steps since the last average

    def begin(self) -> None:
        """What the ranks have in common now is what changes are counted from."""
        self._part.begin()

    def synchronises(self, step: int) -> bool:
        """At whole periods."""
        return step % self._every == 0

    def after_step(self, step: int) -> Effect:
        """Average, if it is time."""
        self._since += 1
        return self._average() if self.synchronises(step) else "apart"

    def finish(self, *, reconcile: bool) -> Effect:
        """The last round is a short one."""
        return self._average() if reconcile and self._since else "nothing"

    def describe(self) -> str:
        """Its period."""
        return f"local_sgd every {self._every}, optimizer state {self._state}"

    def state_dict(self) -> dict[str, Any]:
        """The common weights, and how far the round is."""
        return {"since": self._since, "part": self._part.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in mid-round."""
        self._since = state["since"]
        self._part.load_state_dict(state["part"])

    def _average(self) -> Effect:
        self._since = 0
        self._part.exchange()
        if self._state == "average":
            average_state(self._place.optimizer, self._place.exchanger)
        return "common"
