"""Kernels that find the k values of largest magnitude, for `topk`.

The k-th largest magnitude is the threshold. It is found exactly, by radix selection: magnitudes are compared
as the whole numbers that their bits are, and a histogram of 8 bits at a time says in which of its bins the
threshold lies (Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units"). Then each
program counts what it has above the threshold and at it. From the others' counts it knows where in the
message its own values go. So exactly k are taken: all above the threshold, and of those equal to it the first
ones. Nothing depends on which program is faster.

The bits are those of torch, with one exception: torch does not say which of equal magnitudes it takes, where
not all of them fit. In a message, indices are in another order, which changes no sum.

The first histogram is made while the payload is added to the residual; in all, values are read six times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddprun_hooks.kernels.casts import is_finite, load_fp32

_LAUNCH = {"TILE": 1024, "num_warps": 4, "enable_fp_fusion": False}  # 8 values for each thread
_PROGRAMS = 1024
_BINS = tl.constexpr(256)
_LEVELS = tl.constexpr(4)  # 8 bits at a time, of 31


@triton.jit(do_not_specialize=["numel", "tiles"])
def add_and_histogram(
    payload,  # (numel,)
    residual,  # fp32, (numel,): gets the sum
    bins,  # (levels, bins)
    numel,
    tiles,  # of a program
    TILE: tl.constexpr,
):
    """Add the payload to the residual, and count the uppermost bits of magnitudes."""
    counts = tl.zeros([_BINS], tl.int32)
    for tile in range(tiles):
        at = _tile_offsets(tile, tiles, TILE)
        mask = at < numel
        x = load_fp32(payload + at, mask) + load_fp32(residual + at, mask)
        tl.store(residual + at, x, mask)
        counts += tl.histogram(_magnitude_bits(x) >> 23, _BINS, mask)
    tl.atomic_add(bins + tl.arange(0, _BINS), counts)


@triton.jit(do_not_specialize=["numel", "tiles", "k"])
def histogram_next_bits(residual, bins, numel, tiles, k, LEVEL: tl.constexpr, TILE: tl.constexpr):
    """Count the next bits of those magnitudes whose upper bits are the threshold's."""
    shift: tl.constexpr = 31 - 8 * LEVEL
    upper, _ = _threshold_and_remaining_k(bins, k, LEVEL)
    counts = tl.zeros([_BINS], tl.int32)
    for tile in range(tiles):
        at = _tile_offsets(tile, tiles, TILE)
        mask = at < numel
        size = _magnitude_bits(load_fp32(residual + at, mask))
        bits = (size << 1 >> (shift - 7)) & 0xFF  # the last of the 32 bits is not a magnitude's: it is 0
        match = mask & (size >> shift == upper)
        if tl.max(match.to(tl.int32), 0) > 0:  # most tiles have none of the last bits
            counts += tl.histogram(bits, _BINS, match)
    tl.atomic_add(bins + LEVEL * _BINS + tl.arange(0, _BINS), counts)


@triton.jit(do_not_specialize=["numel", "tiles", "k"])
def count_per_program(
    residual,
    bins,
    counts,  # (2, programs): above the threshold, and at it
    numel,
    tiles,
    k,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count what a program has above the threshold and at it."""
    upper, _ = _threshold_and_remaining_k(bins, k, _LEVELS)
    threshold = upper >> 1 & 0x7FFFFFFF
    above = tl.zeros([TILE], tl.int32)
    equal = tl.zeros([TILE], tl.int32)
    for tile in range(tiles):
        at = _tile_offsets(tile, tiles, TILE)
        mask = at < numel
        size = _magnitude_bits(load_fp32(residual + at, mask))
        above += (mask & (size > threshold)).to(tl.int32)
        equal += (mask & (size == threshold)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(above, 0))
    tl.store(counts + PROGRAMS + tl.program_id(0), tl.sum(equal, 0))


@triton.jit(do_not_specialize=["numel", "tiles", "k"])
def write_largest(
    residual,  # gets what is not sent
    bins,
    counts,
    indices,  # int32, (k,)
    values,  # the payload's type, (k,)
    numel,
    tiles,
    k,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write what is sent, and leave what is not."""
    upper, of_equal = _threshold_and_remaining_k(bins, k, _LEVELS)
    threshold = upper >> 1 & 0x7FFFFFFF
    programs = tl.arange(0, PROGRAMS)
    before = programs < tl.program_id(0)
    above = tl.sum(tl.load(counts + programs, before, 0), 0)
    equal = tl.sum(tl.load(counts + PROGRAMS + programs, before, 0), 0)
    for tile in range(tiles):
        at = _tile_offsets(tile, tiles, TILE)
        mask = at < numel
        x = load_fp32(residual + at, mask)
        size = _magnitude_bits(x)
        larger = mask & (size > threshold)
        same = mask & (size == threshold)
        both = larger.to(tl.int32) | same.to(tl.int32) << 16
        upto = tl.cumsum(both, 0)  # with each value itself: larger ones in the low bits, equal ones above
        order = equal + (upto >> 16) - 1  # how many equal ones come before an equal one
        taken_same = same & (order < of_equal)
        taken = larger | taken_same
        place = tl.where(taken_same, k - of_equal + order, above + (upto & 0xFFFF) - 1)
        sent = x.to(values.dtype.element_ty)
        tl.store(indices + place, at, taken)
        tl.store(values + place, sent, taken)
        left = tl.where(taken, x - sent.to(tl.float32), x)
        sound = is_finite(left)
        tl.store(residual + at, tl.where(sound, left, 0.0), taken | mask & ~sound)
        total = tl.sum(both, 0)
        above += total & 0xFFFF
        equal += total >> 16


@triton.jit
def _tile_offsets(tile, tiles, TILE: tl.constexpr):
    """Indices of a tile's values; a program's tiles follow each other."""
    return (tl.program_id(0) * tiles + tile) * TILE + tl.arange(0, TILE)


@triton.jit
def _magnitude_bits(x):
    """A magnitude as a whole number of the same order; all NaN are the same, and the largest."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800001)


@triton.jit
def _threshold_and_remaining_k(bins, k, LEVELS: tl.constexpr):
    """The top 8 * LEVELS bits of the k-th largest magnitude, and how many of those with them are wanted."""
    every = tl.arange(0, _BINS)
    upper = 0
    for level in tl.static_range(LEVELS):
        counts = tl.load(bins + level * _BINS + every)
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((at_least >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(every > digit, counts, 0), 0)
        upper = upper << 8 | digit
    return upper, k


def encode_largest(payload: Tensor, residual: Tensor, k: int) -> Tensor:
    """Add `payload` to `residual`, both (numel,), take the k largest, and leave what they lack. Gives the
    message: k indices, int32, then k values of the payload's type, as bytes.
    """
    numel, device = payload.numel(), payload.device
    message = torch.empty(k * (4 + payload.element_size()), dtype=torch.uint8, device=device)
    bins = torch.zeros(_LEVELS.value, _BINS.value, dtype=torch.int32, device=device)
    counts = torch.empty(2, _PROGRAMS, dtype=torch.int32, device=device)
    tiles = triton.cdiv(numel, _LAUNCH["TILE"] * _PROGRAMS)  # of a program
    grid = (triton.cdiv(numel, _LAUNCH["TILE"] * tiles),)
    add_and_histogram[grid](payload, residual, bins, numel, tiles, **_LAUNCH)
    for level in range(1, _LEVELS.value):
        histogram_next_bits[grid](residual, bins, numel, tiles, k, LEVEL=level, **_LAUNCH)
    count_per_program[grid](residual, bins, counts, numel, tiles, k, PROGRAMS=_PROGRAMS, **_LAUNCH)
    indices, values = message[: 4 * k].view(torch.int32), message[4 * k :].view(payload.dtype)
    write_largest[grid](
        residual, bins, counts, indices, values, numel, tiles, k, PROGRAMS=_PROGRAMS, **_LAUNCH
    )
    return message
