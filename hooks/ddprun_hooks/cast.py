"""Casts: the payload travels in 16 bits and is summed in 16 bits."""

import torch
from torch import Tensor

from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload
from ddprun_hooks.stack import Link


class Cast(Hook):
    """Send the payload in a narrower floating-point type.

    The payload comes divided by the world size, so the sum over ranks overflows only where the mean itself
    would. Rounding: once per rank in the cast and once per addition in the reduction.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        total = await link.hand_on(payload.tensor.to(self.dtype))
        return payload.tensor.copy_(total)


def fp16() -> Cast:
    """IEEE half precision: 11 bits of significand, largest value 65,504."""
    return Cast(torch.float16)


def bf16() -> Cast:
    """Brain floating point: 8 bits of significand, the range of fp32."""
    return Cast(torch.bfloat16)
