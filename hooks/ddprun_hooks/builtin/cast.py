"""Casts: the payload travels in 16 bits and is summed in 16 bits."""

import torch
from torch import Tensor

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


def fp16() -> Cast:
    """IEEE half precision: 11 bits of significand, largest value 65,504."""
    return Cast("fp16")


def bf16() -> Cast:
    """Brain floating point: 8 bits of significand, the range of fp32."""
    return Cast("bf16")


def note_overflow(name: str, payload: Payload, total: Tensor) -> None:
    """Leave a finding of the cast `name` if `total`, the sum over ranks in 16 bits, is not finite; the
    payload's tensor is still this rank's own.
    """
    lost = ~torch.isfinite(total.sum(dtype=torch.float32))  # a sum of 16-bit values does not overflow fp32
    if lost.is_cuda or bool(lost):  # on a GPU to look would be to wait for it
        own = ~torch.isfinite(payload.tensor.sum(dtype=torch.float64))
        code = lost.int() * (1 + own.int())
        payload.findings.append(Finding(name, "overflow", to_host(code) if code.is_cuda else code))
