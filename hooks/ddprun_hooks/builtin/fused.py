"""Reductions in two phases by Triton's kernels, one for each method, which reads and writes memory once.

Those of `encode` and `sum_and_encode` also bring the residual up to date. To import this is to import Triton.
"""

from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.builtin.two_phase import BlockScaledFormat, TwoPhaseReduction
from ddprun_hooks.kernels import blocks


class FusedBlockReduction(TwoPhaseReduction):
    """Of block-scaled codes."""

    wire_format: BlockScaledFormat

    def encode(self) -> Tensor:
        message = self._empty_message(self.group_size)
        arguments = self.payload, self.residual, message, self.payload.numel()
        self._launch(blocks.encode, self.group_size, *arguments)
        return message

    def sum_and_encode(self, arrived: Tensor) -> Tensor:
        message, start = self._empty_message(1), self.rank * self.share_length
        residual_share = self.residual[start : start + self.share_length]  # shorter where shares are padded
        arguments = arrived, residual_share, message, self.group_size, residual_share.numel()
        self._launch(blocks.sum_and_encode, 1, *arguments)
        return message

    def decode(self, gathered: Tensor) -> Tensor:
        self._launch(blocks.decode, self.group_size, gathered, self.payload, self.payload.numel())
        return self.payload

    def _empty_message(self, shares: int) -> Tensor:
        block_bytes = self.wire_format.block * self.wire_format.bits // 8 + 4
        nbytes = shares * self.blocks_per_share * block_bytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self.payload.device)

    def _launch(self, kernel: Any, shares: int, *arguments: Tensor | int) -> None:
        kernel_format, block = self.wire_format.kernel_format, self.wire_format.block
        grid, options = blocks.grid_and_options(block, self.blocks_per_share, shares)
        kernel[grid](*arguments, self.blocks_per_share, kernel_format, block, **options)
