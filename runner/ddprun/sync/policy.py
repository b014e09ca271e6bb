"""What a sync policy is, and what it works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ddprun.sync.exchanger import ParameterExchanger
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.stack import Stack

Effect = Literal["nothing", "common", "host", "hosts_apart", "apart"]
"""What a step did to the ranks' parameters. `nothing`: equal ones stay equal. `common`: all ranks have the
same now. `host`: the ranks of each host have. `hosts_apart`: ranks of one host stay equal if they were, hosts
do not. `apart`: each rank went its own way."""

Together = Literal["common", "host", "apart"]
"""Which ranks hold the same parameters: all, those of each host, or none."""


def after(together: Together, effect: Effect) -> Together:
    """Which ranks hold the same parameters after a step."""
    match effect:
        case "nothing":
            return together
        case "hosts_apart":
            return "apart" if together == "apart" else "host"
        case _:
            return effect


@dataclass(slots=True)
class ReplicaConsistency:
    """Which ranks hold the same parameters, and the same optimizer state."""

    parameters: Together = "common"
    optimizer: Together = "common"
    optimizer_hosts: int | None = None
    """Into how many hosts the ranks were split where those of each host hold the same state."""

    mutated_at: int = -1
    """After how many steps of the run weights were mutated last."""

    hosts: int | None = None
    """Into how many hosts the running stage splits the ranks; None: as they were launched."""

    def note(
        self,
        effect: Effect,
        *,
        gradients: Literal["all", "host"] | None,
        hosts: int | None,
        averages_state: bool,
        noop: bool,
    ) -> None:
        """A step is over, or a stage.

        Args:
            effect: on the ranks' parameters, as the policy says.
            gradients: among which ranks backward averages gradients; None: none.
            hosts: into how many hosts the policy splits the ranks.
            averages_state: the policy averages the optimizer's state where it makes parameters equal.
            noop: the policy's exchanges go through the hook `noop`: each rank gets its own values back.
        """
        self.parameters = after(self.parameters, effect)
        if noop and effect != "nothing":
            self.parameters = "apart"
        if noop and gradients:
            self.parameters = self.optimizer = "apart"
        elif effect == "common" and averages_state and not noop:
            self.optimizer = "common"
        elif gradients and self.parameters == "apart":
            self.optimizer = "apart"  # weight decay makes momentum of weights
        elif gradients == "host":
            self.optimizer = after(self.optimizer, "hosts_apart")
            self.optimizer_hosts = hosts
        elif gradients is None:
            self.optimizer = "apart"

    def needs_equal_state(self, gradients: Literal["all", "host"] | None, hosts: int | None) -> bool:
        """Whether the optimizer's state must be averaged before ranks exchange gradients.

        Args:
            gradients: among which ranks; None: none.
            hosts: into how many hosts the stage splits the ranks.
        """
        if gradients is None or self.optimizer == "common":
            return False
        return not (gradients == "host" and self.optimizer == "host" and self.optimizer_hosts == hosts)

    def state_list(self) -> list[Any]:
        """As a checkpoint holds it."""
        return [self.parameters, self.optimizer, self.optimizer_hosts, self.mutated_at]

    def load_state_list(self, state: Sequence[Any]) -> None:
        """Bring it back."""
        self.parameters, self.optimizer, self.optimizer_hosts, self.mutated_at = state


def averaged_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that have a mean, by name; whole numbers (quantised weights) have none, and do not train."""
    return {
        name: param
        for name, param in model.named_parameters()
        if param.is_floating_point() or param.is_complex()
    }


@dataclass(frozen=True, slots=True)
class SyncContext:
    """What a policy of one stage works with."""

    model: nn.Module
    optimizer: Optimizer
    exchanger: ParameterExchanger
    stack: Stack
    """The stage's hooks, among all ranks."""

    host_stack: Stack
    """The stage's hooks among the ranks of one host."""

    def parameters(self) -> dict[str, Tensor]:
        """What is synchronised: every parameter, whether or not it has a gradient."""
        return averaged_parameters(self.model)

    def buckets(self) -> ParameterBuckets:
        """All parameters in flat buckets."""
        return ParameterBuckets(self.parameters(), self.exchanger.cap_bytes)


class Policy:
    """When the ranks of one stage synchronise beside the gradients of backward.

    Steps count from 1 in the stage. A subclass says what happens after a step; this one, `every_step`, has
    nothing to do there: gradients are averaged as they come.
    """

    gradients_everywhere = True
    """Backward averages gradients over all ranks: each step is a synchronisation."""

    uses_hooks = True
    """What ranks exchange goes through the stage's hooks."""

    averages_state = False
    """Where it makes all ranks' parameters equal it does the same with the optimizer's state."""

    control_delay_steps = 1
    """Steps for which what else ranks tell each other may be on its way, beside an exchange."""

    never = False
    """Ranks do not synchronise before the stage's end."""

    def begin(self) -> None:
        """The stage begins, and all ranks have the same parameters."""

    def after_step(self, step: int) -> Effect:
        """The optimizer has taken its step."""
        return "nothing"

    def synchronises(self, step: int) -> bool:
        """Whether ranks exchange something in this step; the same on all ranks."""
        return True

    def finish(self, *, reconcile: bool) -> Effect:
        """The stage is over: bring in what is under way, and make the ranks equal.

        Args:
            reconcile: False: what comes next wants the ranks as they are.
        """
        return "nothing"

    def describe(self) -> str:
        """What all ranks must have alike."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What decides later steps, mid-stage; of this rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; comes after `begin`."""

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a round that begins goes on from, of the states of all ranks of another world, whose weights
        have become equal.
        """
        return {}
