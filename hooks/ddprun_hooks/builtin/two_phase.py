"""Reduction in two phases: encode, exchange shares, sum them in fp32, encode the sum, gather.

What travels in a format that cannot be summed (codes), or not without loss (16 bits), is summed here by the
rank that owns the share. Both times it is encoded, what was lost is fed back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddprun_hooks import kernels
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator, view_per_rank
from ddprun_hooks.payload import Finding, Payload


class WireFormat:
    """How values travel. Messages have the shape of the values but for the last dimension."""

    block: int  # Values that are encoded together. Only whole blocks are encoded.
    dtype = torch.uint8  # of a message

    def encode(self, x: Tensor) -> Tensor:
        """The message of values x, shape (..., k * block), fp32 or fp64."""
        raise NotImplementedError

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a message."""
        raise NotImplementedError

    def subtract(self, x: Tensor, message: Tensor) -> None:
        """Take from x, in place, what `message` carries of it; what travels as not finite leaves zeros."""
        x -= self.decode(message, x.dtype)
        if not x.is_cpu or not bool(torch.isfinite(x.sum())):  # on a GPU to look would be to wait for it
            x.nan_to_num_(0.0, 0.0, 0.0)

    def findings(self, payload: Tensor, gathered: Tensor) -> Sequence[Finding]:
        """What the messages of all sums say of a rank's payload."""
        return ()

    def make_reduction(self, payload: Tensor, residual: Tensor, comm: Communicator) -> "TwoPhaseReduction":
        """What computes the reduction of a payload: torch, by the methods above, or kernels."""
        return TwoPhaseReduction(self, payload, residual, comm.rank, comm.size)


class TwoPhaseReduction:
    """What a rank computes of one payload before, between and after two collectives: the reference, in torch.

    `payload`, shape (numel,), gets the sum over ranks. `residual`, shape (numel,), at least fp32, is added to
    it, and gets what was not sent. Each of the `group_size` ranks owns an equal share, in whole blocks; the
    last ones are padded with zeros.
    """

    def __init__(
        self, wire_format: WireFormat, payload: Tensor, residual: Tensor, rank: int, group_size: int
    ) -> None:
        self.wire_format, self.payload, self.residual = wire_format, payload, residual
        self.rank, self.group_size = rank, group_size
        self.blocks_per_share = -(-payload.numel() // (group_size * wire_format.block))
        self.share_length = self.blocks_per_share * wire_format.block  # values

    def encode(self) -> Tensor:
        """The message of this rank's payload, a share for each rank."""
        self._padded_sum = self.residual.new_zeros(self.group_size, self.share_length)
        self._unpadded_sum = self._padded_sum.view(-1)[: self.payload.numel()]
        torch.add(self.payload, self.residual, out=self._unpadded_sum)
        self._message = self.wire_format.encode(self._padded_sum)
        return self._message.view(-1)

    def sum_and_encode(self, arrived: Tensor) -> Tensor:
        """The message of the sum, in rank order, of the shares that have arrived from all ranks."""
        self.wire_format.subtract(self._padded_sum, self._message)
        total = None
        for part in view_per_rank(arrived, self.group_size):
            share = self.wire_format.decode(part, self._padded_sum.dtype)
            total = share if total is None else total.add_(share)
        assert total is not None
        self._share_sum, self._message = total, self.wire_format.encode(total)
        return self._message

    def decode(self, gathered: Tensor) -> Tensor:
        """The sum, of the messages of all ranks' shares: the payload's tensor."""
        self.wire_format.subtract(self._share_sum, self._message)
        self._padded_sum[self.rank] += self._share_sum  # one rank keeps what the second encoding lost
        self.residual.copy_(self._unpadded_sum)
        total = self.wire_format.decode(gathered.view(self.group_size, -1), self._padded_sum.dtype)
        return self.payload.copy_(total.view(-1)[: self.payload.numel()])


class TwoPhaseAllReduce(ErrorFeedback):
    """All-to-all of encoded shares, sums in fp32 in rank order, all-gather of the encoded sums."""

    role = "reducer"
    rounds = 2

    def __init__(self, wire_format: WireFormat) -> None:
        super().__init__()
        self.wire_format = wire_format

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        residual = self.residual(payload, comm.size)
        reduction = self.wire_format.make_reduction(payload.tensor, residual, comm)
        arrived = await comm.all_to_all(reduction.encode())
        gathered = await comm.all_gather(reduction.sum_and_encode(arrived))
        payload.findings.extend(self.wire_format.findings(payload.tensor, gathered))
        return reduction.decode(gathered)


class BlockQuantizedFormat(WireFormat):
    """Codes of a few bits, and fp32 scales for each block of values. A message is the codes, then the scales,
    as bytes. A block with a value that is not finite comes out not finite as a whole.
    """

    bits: int  # bits of a code
    scales_per_block = 1  # of a block

    def __init__(self, block: int) -> None:
        self.block = block

    @classmethod
    def hook(cls, block: int) -> TwoPhaseAllReduce:
        """The hook that sends these codes, with scales for each `block` values."""
        return TwoPhaseAllReduce(cls(block))

    def _split_message(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8, and scales, shape (..., blocks * scales), of a message."""
        blocks = 8 * message.shape[-1] // (self.bits * self.block + 32 * self.scales_per_block)
        codes_end = -(-blocks * self.block * self.bits // 8)
        scales = message[..., codes_end:].clone(memory_format=torch.contiguous_format)  # aligned
        return message[..., :codes_end], scales.view(torch.float32)


class BlockScaledFormat(BlockQuantizedFormat):
    """A scale for each block of values: its largest magnitude / `largest_code`.

    Block-wise quantisation as in Dettmers et al. 2022 (arXiv:2110.02861).
    """

    largest_code: float  # the largest code
    kernel_format = ""  # name of the format in the kernels: `int8` or `int4`; none if torch computes it

    def to_codes(self, scaled: Tensor) -> Tensor:
        """Codes, uint8, of values in [-largest, largest], which may be overwritten. NaN may become any."""
        raise NotImplementedError

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes."""
        raise NotImplementedError

    def make_reduction(self, payload: Tensor, residual: Tensor, comm: Communicator) -> TwoPhaseReduction:
        has_kernel = self.kernel_format and self.block <= kernels.MAX_BLOCK_SIZE
        if not (has_kernel and kernels.can_handle_tensors(payload, residual)):
            return super().make_reduction(payload, residual, comm)
        from ddprun_hooks.builtin.fused import FusedBlockReduction

        return FusedBlockReduction(self, payload, residual, comm.rank, comm.size)

    def encode(self, x: Tensor) -> Tensor:
        blocks = x.view(*x.shape[:-1], -1, self.block)
        most = blocks.abs().amax(-1)
        # By a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds otherwise.
        scales = (most / most.new_full((), self.largest_code)).float()
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).to(x.dtype)
        scaled = (blocks / divisors.unsqueeze(-1)).flatten(-2).clamp_(-self.largest_code, self.largest_code)
        return torch.cat([self.to_codes(scaled), scales.view(torch.uint8)], -1)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = self._split_message(message)
        blocks = self.from_codes(codes, dtype).view(*scales.shape, self.block)
        return blocks.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)

    def subtract(self, x: Tensor, message: Tensor) -> None:
        x -= self.decode(message, x.dtype)
        scales = self._split_message(message)[1].to(x.dtype)
        lost = ~torch.isfinite(scales * self.largest_code)
        if not x.is_cpu or bool(lost.any()):  # on a GPU to look would be to wait for it
            x.view(*scales.shape, self.block).masked_fill_(lost.unsqueeze(-1), 0.0)


class Int8(BlockScaledFormat):
    """The nearest multiples of a 127th of the block's largest."""

    kernel_format, largest_code, bits = "int8", 127, 8

    def to_codes(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.int8).to(dtype)


class Int4(BlockScaledFormat):
    """The nearest multiples of a 7th of the block's largest. Two codes that follow each other share a byte:
    the first one has the low bits.
    """

    kernel_format, largest_code, bits = "int4", 7, 4

    def to_codes(self, scaled: Tensor) -> Tensor:
        pairs = scaled.round_().to(torch.int8).view(torch.int16)  # the first one in the low byte
        return (pairs & 15 | pairs >> 4 & 240).to(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        both = codes.to(torch.int16)
        pairs = (both << 8 | both << 4).view(torch.int8)  # each in the high bits of a byte
        return (pairs >> 4).to(dtype)  # a shift that keeps the sign


class Int2(BlockQuantizedFormat):
    """A sign and one of two magnitudes: the means of the block's magnitudes below and above their mean.

    This is one step of Lloyd's algorithm for two values (Lloyd 1982, "Least squares quantization in PCM").
    Four codes that follow each other share a byte: the first one has the lowest bits.
    """

    bits, scales_per_block = 2, 2

    def encode(self, x: Tensor) -> Tensor:
        blocks = x.view(*x.shape[:-1], -1, self.block)
        sizes = blocks.abs()
        above = sizes > sizes.mean(-1, keepdim=True)
        large, counts = sizes * above, above.sum(-1)
        high = large.sum(-1) / counts.clamp(min=1)
        low = (sizes - large).sum(-1) / (self.block - counts).clamp(min=1)
        codes = (above.to(torch.uint8) | blocks.signbit().to(torch.uint8) << 1).flatten(-2)
        fours = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4)).view(torch.int32)
        packed = (fours | fours >> 6 | fours >> 12 | fours >> 18).to(torch.uint8)  # of each, its lowest byte
        scales = torch.stack([low, high], -1).float().flatten(-2)
        return torch.cat([packed, scales.view(torch.uint8)], -1)

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scales = self._split_message(message)
        low, high = scales.to(dtype).view(-1, 2).T
        values = torch.stack([low, high, -low, -high], -1)  # by code
        codes = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], -1).flatten(-2)
        codes = codes[..., : scales.shape[-1] // 2 * self.block]
        found = values.gather(-1, codes.reshape(-1, self.block).long())
        return found.view(*message.shape[:-1], -1)


class Fp8(BlockScaledFormat):
    """The nearest numbers of e4m3 (arXiv:2209.05433), in units of a 448th of the block's largest. They have 4
    bits of exponent and 3 of significand, from 2^-9 to 448, and no infinity.
    """

    largest_code, bits = 448, 8

    def to_codes(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def from_codes(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(dtype)
