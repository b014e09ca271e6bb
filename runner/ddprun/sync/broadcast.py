"""One rank's parameters for all, every so many steps."""

from collections.abc import Mapping
from typing import Any

import torch

from ddprun.sync.policy import Effect, Policy, SyncContext


class Broadcast(Policy):
    """Overwrite every rank's parameters by those of rank `source` after every `every`-th step.

    Args:
        place: what to work with.
        every: steps between two broadcasts.
        source: the rank that is listened to.
    """

    gradients_everywhere = False
    uses_hooks = False

    def __init__(self, place: SyncContext, every: int, source: int) -> None:
        self._exchanger = place.exchanger
        self._every, self._source = every, source
        self._buckets = place.buckets()
        self._since = 0

    def synchronises(self, step: int) -> bool:
        """At whole periods."""
        return step % self._every == 0

    def after_step(self, step: int) -> Effect:
        """Broadcast, if it is time."""
        self._since += 1
        return self._broadcast() if self.synchronises(step) else "apart"

    def finish(self, *, reconcile: bool) -> Effect:
        """The last period is a short one."""
        return self._broadcast() if reconcile and self._since else "nothing"

    def describe(self) -> str:
        """Its period and source."""
        return f"broadcast every {self._every} from {self._source}"

    def state_dict(self) -> dict[str, Any]:
        """How far the period is."""
        return {"since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._since = state["since"]

    def _broadcast(self) -> Effect:
        self._since = 0
        with torch.no_grad():
            self._exchanger.broadcast(self._buckets, "parameters", self._source)
        return "common"
