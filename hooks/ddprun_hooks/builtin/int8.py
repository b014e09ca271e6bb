"""8-bit codes with a scale for each block of values, reduced in two phases."""

import torch
from torch import Tensor

from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.payload import Payload

_LARGEST = 127


class Int8(ErrorFeedback):
    """Quantise, exchange shards, sum them in fp32, quantise the sum, gather.

    Each block of values has one fp32 scale, its largest magnitude / 127 (block-wise quantisation as in
    Dettmers et al. 2022, arXiv:2110.02861). Codes of 8 bits cannot be summed in 8 bits, so the reduction is
    an all-to-all of shards and an all-gather of their sums; both quantisations feed their error back. A block
    with a value that is not finite comes out not finite as a whole.

    Args:
        block: values per scale.
    """

    role = "reducer"
    rounds = 2

    def __init__(self, block: int = 256) -> None:
        super().__init__()
        self.block = block

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        numel, block = payload.tensor.numel(), self.block
        residual = self.residual(payload, comm.size)
        per_rank = -(-numel // (comm.size * block)) * block  # whole blocks, the last ones padded
        x = residual.new_zeros(comm.size, per_rank)
        flat = x.view(-1)[:numel]
        torch.add(payload.tensor, residual, out=flat)

        codes, scales = quantise(x, block)
        arrived = await comm.all_to_all(pack(codes, scales).view(-1))
        x -= dequantise(codes, scales, x.dtype)
        drop_not_finite(x, scales)

        total = None
        for part in arrived.view(comm.size, -1):
            share = dequantise(*unpack(part, per_rank), x.dtype)
            total = share if total is None else total.add_(share)
        assert total is not None
        codes, scales = quantise(total, block)
        gathered = await comm.all_gather(pack(codes, scales))
        total -= dequantise(codes, scales, x.dtype)
        drop_not_finite(total, scales)
        x[comm.rank] += total  # one rank keeps what the second quantisation lost
        residual.copy_(flat)

        for rank, part in enumerate(gathered.view(comm.size, -1)):
            x[rank] = dequantise(*unpack(part, per_rank), x.dtype)
        return payload.tensor.copy_(flat)


def quantise(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of values x, shape (..., k * block), fp32 or fp64.

    Codes are int8, of x's shape, in [-127, 127] where finite; scales are fp32, shape (..., k).
    """
    blocks = x.view(*x.shape[:-1], -1, block)
    largest = blocks.abs().amax(-1)
    # By a tensor: CUDA takes the reciprocal of a plain number and multiplies, which rounds otherwise.
    scales = (largest / largest.new_full((), _LARGEST)).float()
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).to(x.dtype)
    codes = (blocks / divisors.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.int8).flatten(-2), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of codes: shape and order of `codes`, not finite wherever the scale is not."""
    blocks = codes.view(*scales.shape, -1).to(dtype)
    return blocks.mul_(scales.to(dtype).unsqueeze(-1)).view(codes.shape)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes and scales in one message, uint8: shape (..., codes + 4 * scales)."""
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def unpack(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Codes, shape (count,), and scales of a message."""
    return message[:count].view(torch.int8), message[count:].view(torch.float32)


def drop_not_finite(residual: Tensor, scales: Tensor) -> None:
    """Keep nothing, in place, of blocks that are passed on as not finite."""
    lost = ~torch.isfinite(scales)
    if residual.is_cuda or bool(lost.any()):
        residual.view(*scales.shape, -1).masked_fill_(lost.unsqueeze(-1), 0.0)
