"""Averaging the optimizer's state (momentum and the like) along with the parameters."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddprun.sync.carrier import Carrier
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.team import Team

_COUNTERS = ("step",)
"""What torch's optimizers count in floating point."""


def floating_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's floating-point state with a value for each weight, by place and name.

    Counters are left out: every rank counts alike.
    """
    found: dict[str, Tensor] = {}
    place = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name, value in sorted(optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor) and value.is_floating_point() and name not in _COUNTERS:
                    found[f"{place}.{name}"] = value
            place += 1
    return found


def average_state(optimizer: Optimizer, carrier: Carrier, team: Team | None = None) -> None:
    """Overwrite the optimizer's state by its mean over ranks.

    Args:
        optimizer: of this rank.
        carrier: sends it, as it is.
        team: the ranks, of the plain lane; None: all of them.

    Raises:
        DisagreementError: the ranks' optimizers keep different state.
    """
    named = floating_state(optimizer)
    described = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named.items())
    carrier.exchange.control.agree("the optimizer's state", described)
    with torch.no_grad():
        carrier.average(ParameterBuckets(named, carrier.cap_bytes), "optimizer", team)
