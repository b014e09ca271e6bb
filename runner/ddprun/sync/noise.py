"""Mutation: changing each rank's own weights, so that ranks explore apart."""

import torch
from torch import nn

from ddprun.sync.synchronizer import averaged_parameters


def noise(model: nn.Module, *, std: float) -> None:
    """Add Gaussian noise to every parameter that has a mean, drawn from this rank's own generator.

    Args:
        model: of this rank.
        std: standard deviation of the noise, in units of the weights.
    """
    with torch.no_grad():
        for param in averaged_parameters(model).values():
            param.add_(torch.randn_like(param), alpha=std)
