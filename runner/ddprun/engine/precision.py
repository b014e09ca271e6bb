"""`precision`: what is computed in half precision, and how fp16 gradients are kept from vanishing."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Scaler(torch.amp.GradScaler):
    """A GradScaler for gradients that are unscaled already.

    Torch's own divides by the loss scale after the reduction. Here the dispatcher has done it before the
    first hook saw the gradient, so that what travels and what error feedback keeps are true gradients; what
    is left to do is to look for non-finite values, skip the step, and move the scale. The reduction spreads a
    non-finite value to every rank, so all of them skip the same step.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, True)


class Precision:
    """One of the five kinds of `precision`.

    `fp32`; `bf16` and `fp16`: autocast, weights stay fp32; `pure_bf16` and `pure_fp16`: weights, gradients
    and optimizer state are half themselves. Both kinds of fp16 scale the loss.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.pure = name.startswith("pure_")
        # A half-precision loss passes its own scale on as a gradient, and fp16 ends below torch's 2^16.
        first_scale = 2.0**15 if self.pure else 2.0**16
        self.scaler = Scaler(device.type, first_scale) if name in ("fp16", "pure_fp16") else None
        self._half = _HALF.get(name.removeprefix("pure_"))

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """What the model's floating-point parameters become; None leaves them as they are."""
        return self._half if self.pure else None

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and loss."""
        if self._half is None or self.pure:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._half)

    def admit(self, content: Any) -> Any:
        """Move a batch (tensors in tuples, lists and mappings) to the device, floats in the model's type."""
        if isinstance(content, Tensor):
            moved = content.to(self.device, non_blocking=True)
            return moved.to(self._half) if self.pure and moved.is_floating_point() else moved
        if isinstance(content, dict):
            return {key: self.admit(value) for key, value in content.items()}
        if isinstance(content, tuple | list):
            return [self.admit(value) for value in content]
        return content

    def loss_scale(self) -> Tensor | None:
        """The factor on the loss of this step, shape (); None where nothing is scaled."""
        if self.scaler is None:
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=self.device))
        return scale

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide gradients that no hook has seen by the loss scale."""
        scale = self.loss_scale()
        if scale is not None:
            for param in parameters:
                if param.grad is not None:
                    param.grad.div_(scale)

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Look for non-finite gradients before anything (clipping) would hide them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step; False if it was skipped because a gradient is not finite."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
