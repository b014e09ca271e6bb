"""The exponential moving average of the weights (`ema`): evaluated and saved in their place."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddprun.sync.exchanger import can_be_averaged


class WeightAverage:
    """The average of the parameters that are trained, as torch's `AveragedModel` makes it: it begins with the
    weights after the first update, and is `decay` times itself plus 1 - `decay` times the weights after each
    other. Half-precision weights have an average in fp32.

    Where ranks train apart each averages its own weights. The average of the ranks' mean is the mean of their
    averages, so these are exchanged only where they are read, or where a stage makes ranks equal.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.updates = 0
        self.tensors = initial_averages(model)
        self._params = {name: p for name, p in model.named_parameters() if name in self.tensors}

    def update(self) -> None:
        """The optimizer has taken a step."""
        averages = list(self.tensors.values())
        weights: Any = [
            param.detach().to(own.dtype) for param, own in zip(self._params.values(), averages, strict=True)
        ]
        with torch.no_grad():
            if self.updates:
                self._average(averages, weights, self.updates)
            else:
                torch._foreach_copy_(averages, weights)
        self.updates += 1

    def copy_to_model(self) -> None:
        with torch.no_grad():
            for name, own in self.tensors.items():
                self._params[name].copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """All of it; its tensors, not copies."""
        return {"tensors": dict(self.tensors), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore all but the tensors, which the caller copies; None: begin with the weights as they are."""
        if state is None:
            self.tensors = initial_averages(self._model)
            return
        self.updates = state["updates"]


def initial_averages(model: nn.Module, device: str | None = None) -> dict[str, Tensor]:
    """The average before any update: trained parameters by name, at least in fp32, on `device` if given."""
    return {
        name: param.detach().to(device, torch.promote_types(param.dtype, torch.float32), copy=True)
        for name, param in model.named_parameters()
        if param.requires_grad and can_be_averaged(param)
    }
