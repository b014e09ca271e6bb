"""A kernel that finds the values of largest magnitude in each chunk of a bucket, for `topk`.

A program has a chunk in its registers. Magnitudes are compared as the whole numbers that their bits are,
and the k-th largest one is found bit by bit. Exactly k are taken: all above it, and of those equal to it the
first ones. The indices are torch's, with one exception: torch does not say which of equal magnitudes it
takes, where not all of them fit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddprun_hooks.kernels.casts import load_fp32


@triton.jit(do_not_specialize=["numel", "length", "k"])
def add_and_select(
    payload,  # (numel,)
    residual,  # fp32, (numel,): gets the sum
    indices,  # int32, (chunks, k)
    numel,
    length,  # of a chunk
    k,
    TILE: tl.constexpr,  # the power of two above `length`
):
    """Add the payload to the residual, and write where in its chunk the k largest are."""
    chunk, at = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    mask = (at < length) & (chunk * length + at < numel)
    payload += chunk * length
    residual += chunk * length
    x = load_fp32(payload + at, mask) + load_fp32(residual + at, mask)
    tl.store(residual + at, x, mask)
    # All NaN are the same, and the largest. Beyond the last chunk's values are zeros; nothing beyond a chunk.
    size = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)
    size = tl.where(at < length, tl.where(mask, size, 0), -1)
    threshold = 0
    for bit in range(31):  # of a magnitude
        larger = threshold | 1 << (30 - bit)
        threshold = tl.where(tl.sum((size >= larger).to(tl.int32), 0) >= k, larger, threshold)
    above = (size > threshold).to(tl.int32)
    same = (size == threshold).to(tl.int32)
    taken = above | same & (tl.cumsum(same, 0) <= k - tl.sum(above, 0)).to(tl.int32)
    tl.store(indices + chunk * k + tl.cumsum(taken, 0) - 1, at, taken > 0)


def launch_options(length: int) -> dict[str, int | bool]:
    """How the kernel is compiled for chunks: 16 values for each thread, nothing fused."""
    tile = triton.next_power_of_2(length)
    return {"TILE": tile, "num_warps": max(1, tile // 512), "enable_fp_fusion": False}


def add_and_find_largest(payload: Tensor, residual: Tensor, chunks: int, length: int, k: int) -> Tensor:
    """Add `payload` to `residual`, both (numel,), and find the k largest values of each chunk of `length`, of
    which the last one may be shorter: their indices, int32, in rising order, shape (chunks, k).
    """
    indices = torch.empty(chunks, k, dtype=torch.int32, device=payload.device)
    options = launch_options(length)
    add_and_select[(chunks,)](payload, residual, indices, payload.numel(), length, k, **options)
    return indices
