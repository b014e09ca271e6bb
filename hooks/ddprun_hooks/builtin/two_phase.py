"""Reduction in two phases: encode, exchange shares, sum them in fp32, encode the sum, gather.

What travels in a format that cannot be summed (codes), or not without loss (16 bits), is summed here by the
rank that owns the share. Both times it is encoded, what was lost is fed back.
"""

import torch
from torch import Tensor

from ddprun_hooks import kernels
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator, by_rank
from ddprun_hooks.payload import Finding, Payload


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

    def reduction(self, given: Tensor, residual: Tensor, rank: int, ranks: int) -> "Reduction":
        """What computes the reduction of a payload: torch, by the methods above, or kernels."""
        return Reduction(self, given, residual, rank, ranks)


class Reduction:
    """What a rank computes of one payload before, between and after two collectives: the reference, in torch.

    Args:
        wire: how values travel.
        given: this rank's payload, shape (numel,); gets the sum over ranks.
        residual: shape (numel,), at least fp32: is added to the payload, and gets what was not sent.
        rank: this rank.
        ranks: how many. Each owns an equal share, in whole blocks; the last ones are padded with zeros.
    """

    overflow: Finding | None = None
    """What was found in the messages of all sums, once they are decoded."""

    def __init__(self, wire: WireFormat, given: Tensor, residual: Tensor, rank: int, ranks: int) -> None:
        self.wire, self.given, self.residual, self.rank, self.ranks = wire, given, residual, rank, ranks
        self.blocks = -(-given.numel() // (ranks * wire.block))  # of a share

    def encode(self) -> Tensor:
        """The message of this rank's payload, a share for each rank."""
        self._x = self.residual.new_zeros(self.ranks, self.blocks * self.wire.block)
        self._flat = self._x.view(-1)[: self.given.numel()]
        torch.add(self.given, self.residual, out=self._flat)
        self._sent = self.wire.encode(self._x)
        return self._sent.view(-1)

    def add(self, arrived: Tensor) -> Tensor:
        """The message of the sum, in rank order, of the shares that have arrived from all ranks."""
        self.wire.subtract(self._x, self._sent)
        total = None
        for part in by_rank(arrived, self.ranks):
            share = self.wire.decode(part, self._x.dtype)
            total = share if total is None else total.add_(share)
        assert total is not None
        self._total, self._sent = total, self.wire.encode(total)
        return self._sent

    def decode(self, gathered: Tensor) -> Tensor:
        """The sum, of the messages of all ranks' shares: the payload's tensor."""
        self.wire.subtract(self._total, self._sent)
        self._x[self.rank] += self._total  # one rank keeps what the second encoding lost
        self.residual.copy_(self._flat)
        mean = self.wire.decode(gathered.view(self.ranks, -1), self._x.dtype)
        return self.given.copy_(mean.view(-1)[: self.given.numel()])

    def own_share(self) -> Tensor:
        """Of the residual: a view, shorter or empty where the last shares are padded."""
        length = self.blocks * self.wire.block
        return self.residual[self.rank * length : (self.rank + 1) * length]


class TwoPhase(ErrorFeedback):
    """All-to-all of encoded shares, sums in fp32 in rank order, all-gather of the encoded sums."""

    role = "reducer"
    rounds = 2

    def __init__(self, wire: WireFormat) -> None:
        super().__init__()
        self.wire = wire

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        if not payload.tensor.numel():
            return payload.tensor
        residual = self.residual(payload, comm.size)
        reduction = self.wire.reduction(payload.tensor, residual, comm.rank, comm.size)
        arrived = await comm.all_to_all(reduction.encode())
        mean = reduction.decode(await comm.all_gather(reduction.add(arrived)))
        if reduction.overflow is not None:
            payload.findings.append(reduction.overflow)
        return mean


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

    name: str
    """By which kernels know the codes."""

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

    def reduction(self, given: Tensor, residual: Tensor, rank: int, ranks: int) -> Reduction:
        fused = self.block <= kernels.LARGEST_BLOCK and kernels.usable(given, residual)
        return (FusedBlocks if fused else Reduction)(self, given, residual, rank, ranks)

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


class FusedBlocks(Reduction):
    """By kernels, each of which reads and writes memory once."""

    wire: BlockScaled

    def encode(self) -> Tensor:
        from ddprun_hooks.kernels import blocks

        return blocks.encoded(self.given, self.residual, *self._layout()).view(-1)

    def add(self, arrived: Tensor) -> Tensor:
        from ddprun_hooks.kernels import blocks

        return blocks.added(arrived, self.own_share(), *self._layout())

    def decode(self, gathered: Tensor) -> Tensor:
        from ddprun_hooks.kernels import blocks

        return blocks.decoded(gathered, self.given, *self._layout())

    def _layout(self) -> tuple[str, int, int, int]:
        return self.wire.name, self.wire.block, self.ranks, self.blocks


class Int8(BlockScaled):
    """The nearest multiples of a 127th of the block's largest."""

    name, largest, bits = "int8", 127, 8

    def to_codes(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.int8).to(dtype)


class Int4(BlockScaled):
    """The nearest multiples of a 7th of the block's largest.

    Two codes that follow each other share a byte: the first one has the low bits.
    """

    name, largest, bits = "int4", 7, 4

    def to_codes(self, scaled: Tensor) -> Tensor:
        pairs = scaled.round_().to(torch.int8).view(torch.int16)  # the first one in the low byte
        return (pairs & 15 | pairs >> 4 & 240).to(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        both = codes.to(torch.int16)
        pairs = (both << 8 | both << 4).view(torch.int8)  # each in the high bits of a byte
        return (pairs >> 4).to(dtype)  # a shift that keeps the sign


class Fp8(BlockScaled):
    """The nearest numbers of e4m3 (arXiv:2209.05433), in units of a 448th of the block's largest.

    They have 4 bits of exponent and 3 of significand, from 2^-9 to 448, and no infinity.
    """

    name, largest, bits = "fp8", 448, 8

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
