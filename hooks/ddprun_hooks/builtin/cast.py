"""Casts: the payload travels in 16 bits and is summed in 16 bits, or in fp32."""

from typing import Literal

import torch
from torch import Tensor

from ddprun_hooks.builtin.two_phase import TwoPhaseAllReduce, WireFormat
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.gpu import copy_scalar_to_host
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Finding, Payload

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CAST_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Cast(Hook):
    """Send the payload in a narrower floating-point type, `fp16` or `bf16`.

    The payload comes divided by the world size, so the sum over ranks overflows only where the mean itself
    would. Rounding: once per rank in the cast and once per addition in the reduction.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = DTYPES[name]

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        own = payload.tensor
        total = await comm.reduce(own.to(self.dtype))
        payload.findings.extend(find_overflow(self.name, own, total))
        return own.copy_(total)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes nothing over of what a cast with `accumulate` has kept."""


class CastFormat(WireFormat):
    """The nearest numbers of another floating-point type. Of 16 bits, they are summed in fp32. Rounding: once
    per rank in the cast and once in the mean; error feedback makes up for both.
    """

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return message.to(dtype)

    def findings(self, payload: Tensor, gathered: Tensor) -> list[Finding]:
        return find_overflow(CAST_NAMES[self.dtype], payload, gathered)


def fp16(accumulate: Literal["fp32"] | None = None) -> Hook:
    """IEEE half precision: 11 bits of significand, largest value 65,504."""
    return TwoPhaseAllReduce(CastFormat(torch.float16)) if accumulate else Cast("fp16")


def bf16(accumulate: Literal["fp32"] | None = None) -> Hook:
    """Brain floating point: 8 bits of significand, the range of fp32."""
    return TwoPhaseAllReduce(CastFormat(torch.bfloat16)) if accumulate else Cast("bf16")


def find_overflow(name: str, own: Tensor, total: Tensor) -> list[Finding]:
    """The finding of the cast `name` if `total`, the sum in 16 bits over ranks, is not finite."""
    # On a GPU to look would be to wait for it.
    if total.is_cpu and not _any_not_finite(total):
        return []
    code = _any_not_finite(total).int() * (1 + _any_not_finite(own).int())
    return [Finding(name, copy_scalar_to_host(code) if code.is_cuda else code)]


def _any_not_finite(x: Tensor) -> Tensor:
    return ~torch.isfinite(torch.stack(torch.aminmax(x))).all()
