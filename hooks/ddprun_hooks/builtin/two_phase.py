"""Reduction in two phases: encode, exchange shares, sum them in fp32, encode the sum, gather.

What travels in a format that cannot be summed (codes), or not without loss (16 bits), is summed here by the
rank that owns the share. Both times it is encoded, what was lost is fed back.
"""

import torch
from torch import Tensor

from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator, by_rank
from ddprun_hooks.payload import Payload


class WireFormat:
    """How values travel. Messages have the shape of the values but for the last dimension."""

    block: int
    """Values that are encoded together. Only whole blocks are encoded."""

    def encode(self, x: Tensor) -> Tensor:
        """The message of values x, shape (..., k * block), fp32 or fp64."""
        raise NotImplementedError

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a message."""
        raise NotImplementedError

    def subtract(self, x: Tensor, message: Tensor) -> None:
        """Take from x, in place, what `message` carries of it; what travels as not finite leaves zeros."""
        raise NotImplementedError


class TwoPhase(ErrorFeedback):
    """All-to-all of encoded shares, sums in fp32 in rank order, all-gather of the encoded sums.

    Each rank owns an equal share of the payload, in whole blocks; the last ones are padded with zeros.
    """

    role = "reducer"
    rounds = 2

    def __init__(self, wire: WireFormat) -> None:
        super().__init__()
        self.wire = wire

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        numel, wire = payload.tensor.numel(), self.wire
        if not numel:
            return payload.tensor
        residual = self.residual(payload, comm.size)
        per_rank = -(-numel // (comm.size * wire.block)) * wire.block
        x = residual.new_zeros(comm.size, per_rank)
        flat = x.view(-1)[:numel]
        torch.add(payload.tensor, residual, out=flat)

        message = wire.encode(x)
        arrived = await comm.all_to_all(message.view(-1))
        wire.subtract(x, message)

        total = None
        for part in by_rank(arrived, comm.size):
            share = wire.decode(part, x.dtype)
            total = share if total is None else total.add_(share)
        assert total is not None
        message = wire.encode(total)
        gathered = await comm.all_gather(message)
        wire.subtract(total, message)
        x[comm.rank] += total  # one rank keeps what the second encoding lost
        residual.copy_(flat)

        self.note(payload, gathered)
        mean = wire.decode(gathered.view(comm.size, -1), x.dtype)
        return payload.tensor.copy_(mean.view(-1)[:numel])

    def note(self, payload: Payload, gathered: Tensor) -> None:
        """Leave findings about the messages of all sums; the payload's tensor is still this rank's own."""


class BlockScaled(WireFormat):
    """Codes of a few bits, and an fp32 scale for each block of values: its largest magnitude / `largest`.

    Block-wise quantisation as in Dettmers et al. 2022 (arXiv:2110.02861). A message is the codes, then the
    scales, as bytes. A block with a value that is not finite comes out not finite as a whole.

    Args:
        block: values per scale.
    """

    largest: float
    """The largest code."""

    bits: int
    """Of a code."""

    def __init__(self, block: int) -> None:
        codes = 4 * 8 // self.bits  # in 4 bytes: scales lie behind the codes, aligned
        if block % codes:
            raise ValueError(f"block: {block} is no multiple of {codes}")
        self.block = block

    def to_codes(self, scaled: Tensor) -> Tensor:
        """Codes, uint8, of values in [-largest, largest], which may be overwritten. NaN may become any."""
        raise NotImplementedError

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> Tensor:
        blocks = x.view(*x.shape[:-1], -1, self.block)
        most = blocks.abs().amax(-1)
        # By a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds otherwise.
        scales = (most / most.new_full((), self.largest)).float()
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).to(x.dtype)
        scaled = (blocks / divisors.unsqueeze(-1)).flatten(-2).clamp_(-self.largest, self.largest)
        return torch.cat([self.to_codes(scaled), scales.view(torch.uint8)], -1)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = self._parts(message)
        blocks = self.from_codes(codes, dtype).view(*scales.shape, self.block)
        return blocks.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)

    def subtract(self, x: Tensor, message: Tensor) -> None:
        x -= self.decode(message, x.dtype)
        scales = self._parts(message)[1].to(x.dtype)
        lost = ~torch.isfinite(scales * self.largest)
        if not x.is_cpu or bool(lost.any()):  # on a GPU to look would be to wait for it
            x.view(*scales.shape, self.block).masked_fill_(lost.unsqueeze(-1), 0.0)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8, and scales, shape (..., k), of a message."""
        code_bytes = self.block * self.bits // 8
        count = message.shape[-1] // (code_bytes + 4)
        codes, scales = torch.split(message, [count * code_bytes, count * 4], -1)
        return codes, scales.view(torch.float32)


class Int8(BlockScaled):
    """The nearest multiples of a 127th of the block's largest."""

    largest, bits = 127, 8

    def to_codes(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.int8).to(dtype)


class Int4(BlockScaled):
    """The nearest multiples of a 7th of the block's largest.

    Two codes share a byte: one of the first half of the values (low bits) and one of the second half.
    """

    largest, bits = 7, 4

    def to_codes(self, scaled: Tensor) -> Tensor:
        low, high = scaled.round_().to(torch.int8).chunk(2, -1)
        return (low & 15 | high << 4).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        both = codes.view(torch.int8)
        return torch.cat([both << 4 >> 4, both >> 4], -1).to(dtype)  # shifts that keep the sign


class Fp8(BlockScaled):
    """The nearest numbers of e4m3 (arXiv:2209.05433), in units of a 448th of the block's largest.

    They have 4 bits of exponent and 3 of significand, from 2^-9 to 448, and no infinity.
    """

    largest, bits = 448, 8

    def to_codes(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(dtype)


def int8(block: int = 256) -> TwoPhase:
    """8-bit whole numbers with a scale for each block."""
    return TwoPhase(Int8(block))


def int4(block: int = 64) -> TwoPhase:
    """4-bit whole numbers with a scale for each block."""
    return TwoPhase(Int4(block))


def fp8(block: int = 256) -> TwoPhase:
    """8-bit floating-point numbers with a scale for each block."""
    return TwoPhase(Fp8(block))
