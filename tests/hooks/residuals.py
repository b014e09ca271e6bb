"""What built-in hooks with error feedback have not sent, out of their merged states."""

from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.testing import NUMEL, PARAMS


def residual_total(merged: dict[str, Any]) -> Tensor:
    """The sum over ranks, and over the hooks of a stack, of their residuals, as `PARAMS` lie: shape (NUMEL,).

    `merged` is `Stack.merge` of all ranks' states.
    """
    total = torch.zeros(NUMEL, dtype=torch.float64)
    by_name = {param.name: param for param in PARAMS}
    for name, value in residual_totals(merged):
        by_name[name].of(total)[: value.numel()] += value.double()
    return total


def residual_totals(node: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Parameter and sum of residuals, wherever they lie in a merged state."""
    found: list[tuple[str, Tensor]] = []
    for key, value in node.items():
        if isinstance(value, dict):
            name = key.partition("/")[2]
            found += [(name, value["total"])] if "total" in value else residual_totals(value)
    return found
