"""Averaging the optimizer's state (momentum and the like) along with the parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddprun.sync.carrier import Carrier
from ddprun_hooks.buckets import ParameterBuckets
from ddprun_hooks.team import Team

_COUNTERS = {"step": 0.0, "mu_product": 1.0}
"""What torch's optimizers count, or make of a count, for each parameter, and what it is before a step."""


def floating_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state that has a mean, by the parameter's place and the state's name."""
    return {
        f"{place}.{name}": value
        for place, name, value in _state(optimizer)
        if name not in _COUNTERS and (value.is_floating_point() or value.is_complex())
    }


def average_state(optimizer: Optimizer, carrier: Carrier, team: Team | None = None) -> None:
    """Overwrite the optimizer's state by its mean over ranks, and counters by those of the rank with most
    steps: one whose gradients were not finite has taken less, or none.

    Args:
        optimizer: of this rank.
        carrier: sends it, as it is.
        team: the ranks, of the plain lane; None: all of them. Fewer than all leave counters alone, and do
            not compare what they keep: they are not to wait for others.

    Raises:
        DisagreementError: the ranks' optimizers keep different state.
    """
    complete_state(optimizer)
    named = floating_state(optimizer)
    control = carrier.exchange.control
    if team is None:
        control.agree("the optimizer's state", str([(name, tuple(v.shape)) for name, v in named.items()]))
        counters = list(_counters(optimizer))
        if counters:
            words = control.gather(
                [float(kept[name]) for kept, name in counters], "optimizers' counters"
            )  # (ranks, counters)
            for (kept, name), of_ranks in zip(counters, words.unbind(1), strict=True):
                _set(kept, name, float(of_ranks.max() if name == "step" else of_ranks.min()))
    with torch.no_grad():
        carrier.average(ParameterBuckets(named, carrier.cap_bytes), "optimizer", team)


def complete_state(optimizer: Optimizer) -> None:
    """Make the state of parameters that have none yet, as it is before a first step.

    Ranks then keep the same state whatever steps they have skipped. Optimizers make their state when they
    first step; a step on gradients of zero makes it, and is taken back.
    """
    lacking = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad and not optimizer.state.get(param)
    ]
    if not lacking:
        return
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in everything]
    weights = [param.detach().clone() for param in lacking]
    decays = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    for param in everything:
        param.grad = None
    for param in lacking:
        param.grad = torch.zeros_like(param)
    for group, _ in decays:
        group["weight_decay"] = 0.0  # or the weights would enter the state
    optimizer.step()
    for group, decay in decays:
        group["weight_decay"] = decay
    with torch.no_grad():
        for param, value in zip(lacking, weights, strict=True):
            param.copy_(value)
            for name, start in _COUNTERS.items():
                if name in optimizer.state[param]:
                    _set(optimizer.state[param], name, start)
    for param, gradient in zip(everything, gradients, strict=True):
        param.grad = gradient


def _counters(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Where each counter is kept, and its name."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            kept = optimizer.state.get(param, {})
            yield from (
                (kept, name) for name in _COUNTERS if isinstance(kept.get(name), Tensor | int | float)
            )


def _set(kept: dict[str, Any], name: str, number: float) -> None:
    """Set a counter that is a tensor or a plain number."""
    if isinstance(kept[name], Tensor):
        kept[name].fill_(number)
    else:
        kept[name] = type(kept[name])(number)


def _state(optimizer: Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """Every tensor of the state: the parameter's place, the state's name, the tensor."""
    place = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name, value in sorted(optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor):
                    yield place, name, value
            place += 1
