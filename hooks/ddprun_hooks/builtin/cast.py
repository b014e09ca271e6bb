"""Casts: the payload travels in 16 bits and is summed in 16 bits, or in fp32."""

from typing import Literal

import torch
from torch import Tensor

from ddprun_hooks.builtin.two_phase import TwoPhase, WireFormat
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.gpu import to_host
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Finding, Payload

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(Hook):
    """Send the payload in a narrower floating-point type.

    The payload comes divided by the world size, so the sum over ranks overflows only where the mean itself
    would. Rounding: once per rank in the cast and once per addition in the reduction.

    Args:
        name: `fp16` or `bf16`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = DTYPES[name]

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        total = await comm.reduce(payload.tensor.to(self.dtype))
        note_overflow(self.name, payload, total)
        return payload.tensor.copy_(total)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes nothing over of what a cast with `accumulate` has kept."""


class AccumulatingCast(TwoPhase):
    """Send the payload in a narrower floating-point type, and sum in fp32.

    Rounding: once per rank in the cast and once in the mean, whatever the number of ranks; error feedback
    makes up for both.

    Args:
        name: `fp16` or `bf16`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(Narrow(DTYPES[name]))
        self.name = name

    def note(self, payload: Payload, gathered: Tensor) -> None:
        note_overflow(self.name, payload, gathered)


class Narrow(WireFormat):
    """The nearest numbers of a narrower floating-point type."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return message.to(dtype)

    def subtract(self, x: Tensor, message: Tensor) -> None:
        x -= message
        if not x.is_cpu or not bool(torch.isfinite(x.sum())):
            x.nan_to_num_(0.0, 0.0, 0.0)


def fp16(accumulate: Literal["fp32"] | None = None) -> Hook:
    """IEEE half precision: 11 bits of significand, largest value 65,504."""
    return AccumulatingCast("fp16") if accumulate else Cast("fp16")


def bf16(accumulate: Literal["fp32"] | None = None) -> Hook:
    """Brain floating point: 8 bits of significand, the range of fp32."""
    return AccumulatingCast("bf16") if accumulate else Cast("bf16")


def note_overflow(name: str, payload: Payload, total: Tensor) -> None:
    """Leave a finding of the cast `name` if `total`, the sum over ranks in 16 bits, is not finite; the
    payload's tensor is still this rank's own.
    """
    lost = ~torch.isfinite(total.sum(dtype=torch.float32))  # a sum of 16-bit values does not overflow fp32
    if not lost.is_cpu or bool(lost):  # on a GPU to look would be to wait for it
        own = ~torch.isfinite(payload.tensor.sum(dtype=torch.float64))
        code = lost.int() * (1 + own.int())
        payload.findings.append(Finding(name, "overflow", to_host(code) if code.is_cuda else code))
