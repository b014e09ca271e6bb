"""Which values of a model or a checkpoint are not finite."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import EncodedState


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """What was the first of a run to be not finite."""

    step: int
    rank: int
    """Whose loss, or parameter, it was."""

    value: str | None
    """The loss: "nan", "inf" or "-inf"; None: every loss was finite."""

    parameter: str | None
    """The first that is not finite either, in the model's order; None: all were finite then."""

    def describe(self) -> str:
        """For the screen."""
        if self.value is None:
            return (
                f"step {self.step}: {self.parameter} is not finite on rank {self.rank}, though every loss was"
            )
        then = (
            "all parameters are still finite"
            if self.parameter is None
            else f"{self.parameter} is the first parameter that is not finite"
        )
        return f"step {self.step}: the loss of rank {self.rank} is {self.value}; {then}"


class FiniteCheck:
    """Looks for parameters that are trained and not finite; for those that were finite at first.

    Args:
        model: before its first step.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        at_first = set(_not_finite(named))
        self._params: Mapping[str, Tensor] = {
            name: param for name, param in named.items() if name not in at_first
        }
        self.infinite_at_first = frozenset(at_first)
        self.found: Nonfinite | None = None
        """The first loss or parameter of the run that was not finite."""

        self.lost_parameter: str | None = None
        """A parameter that was not finite when it was looked at last."""

        self.failed = False
        """The run ends here because weights are not finite any more."""

    def first(self) -> int:
        """The place of the first, from 1, which `name` names; 0: all are finite. Waits for the device."""
        found = set(_not_finite(self._params))
        return next((place for place, name in enumerate(self._params, 1) if name in found), 0)

    def name(self, place: int) -> str | None:
        """Of the parameter at a place."""
        return list(self._params)[place - 1] if place else None


def _not_finite(named: Mapping[str, Tensor]) -> list[str]:
    if not named:
        return []
    flags = torch.stack([torch.isfinite(param.detach()).all().cpu() for param in named.values()]).tolist()
    return [name for name, finite in zip(named, flags, strict=True) if not finite]


def in_state(state: EncodedState, infinite_at_first: frozenset[str] = frozenset()) -> str | None:
    """What of a checkpoint's part is not finite: a parameter, the optimizer's state, `loss`; None: nothing.

    Args:
        state: the part.
        infinite_at_first: parameters that are meant to be so.
    """
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in ("parameters", "optimizer") or rest in infinite_at_first:
            continue
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            return rest if kind == "parameters" else name
    # `loss` of what was told: a number that JSON lacks is kept as a mapping.
    told: Any = state.tree.get("told")
    return folder.LOSS if isinstance(told, dict) and isinstance(told.get("loss"), dict) else None
