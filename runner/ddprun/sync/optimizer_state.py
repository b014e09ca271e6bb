"""Averaging the optimizer's state (momentum and the like) along with the parameters."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddprun.sync.carrier import Carrier
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.team import Team

_COUNTERS = ("step", "mu_product")
"""What torch's optimizers count, or make of a count, for each parameter; some in floating point."""


def floating_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state that has a mean, by the parameter's place and the state's name."""
    return {
        f"{place}.{name}": value
        for place, name, value in _state(optimizer)
        if name not in _COUNTERS and (value.is_floating_point() or value.is_complex())
    }


def average_state(optimizer: Optimizer, carrier: Carrier, team: Team | None = None) -> None:
    """Overwrite the optimizer's state by its mean over ranks; counters by those of rank 0, since a rank whose
    gradients were not finite has counted less.

    Args:
        optimizer: of this rank.
        carrier: sends it, as it is.
        team: the ranks, of the plain lane; None: all of them. Fewer than all leave counters alone, and do
            not compare what they keep: they are not to wait for others.

    Raises:
        DisagreementError: the ranks' optimizers keep different state.
    """
    named = floating_state(optimizer)
    control = carrier.exchange.control
    if team is None:
        control.agree("the optimizer's state", str([(name, tuple(v.shape)) for name, v in named.items()]))
        counters = [value for _, name, value in _state(optimizer) if name in _COUNTERS]
        if counters:
            of_rank_0 = control.gather([float(value) for value in counters])[0].tolist()
            for value, number in zip(counters, of_rank_0, strict=True):
                value.fill_(number)
    with torch.no_grad():
        carrier.average(ParameterBuckets(named, carrier.cap_bytes), "optimizer", team)


def _state(optimizer: Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """Every tensor of the state: the parameter's place, the state's name, the tensor."""
    place = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name, value in sorted(optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor):
                    yield place, name, value
            place += 1
