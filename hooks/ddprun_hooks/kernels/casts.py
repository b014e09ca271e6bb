"""Kernels for casts to 16 bits: with error feedback, with sums in fp32, and with the finding of an overflow.

Arithmetic is that of `ddprun_hooks.builtin.cast`, operation by operation. The bits are the same, with one
exception: a NaN is a NaN, but may be another one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LAUNCH = {"TILE": 2048, "num_warps": 4, "enable_fp_fusion": False}  # 16 values for each thread


@triton.jit(do_not_specialize=["numel", "padded"])
def narrow(
    given,  # the payload, (numel,)
    residual,  # fp32, (numel,): is added, and gets what is rounded off; or None
    message,  # 16 bits, (padded,)
    flags,  # the first is set if `given` is not finite
    numel,
    padded,
    TILE: tl.constexpr,
):
    """Cast a payload. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _narrow(given, residual, message, flags, numel, padded, first, TILE, True)
    else:
        _narrow(given, residual, message, flags, numel, padded, first, TILE, False)


@triton.jit
def _narrow(given, residual, message, flags, numel, padded, first, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    there = None if WHOLE else at < numel - first
    own = read(given + first + at, there)
    x = own if residual is None else own + read(residual + first + at, there)
    sent = x.to(message.dtype.element_ty)
    tl.store(message + first + at, sent, None if WHOLE else at < padded - first)
    if residual is not None:
        tl.store(residual + first + at, _left(x, sent), there)
    if _any_lost(own):
        tl.store(flags, 1)


@triton.jit(do_not_specialize=["ranks", "numel"])
def add(
    arrived,  # 16 bits: a share from each rank, (ranks, count)
    kept,  # fp32: this rank's share of the residual; what the sum's rounding lacks is added to it
    message,  # 16 bits, (count,)
    ranks,
    numel,  # of `kept`
    count,
    TILE: tl.constexpr,
):
    """Cast the sum over ranks, in rank order, of a share. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _add(arrived, kept, message, ranks, numel, count, first, TILE, True)
    else:
        _add(arrived, kept, message, ranks, numel, count, first, TILE, False)


@triton.jit
def _add(arrived, kept, message, ranks, numel, count, first, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    there = None if WHOLE else at < numel - first
    travels = None if WHOLE else at < count - first
    arrived += first
    total = read(arrived + at, travels)
    for _ in range(1, ranks):
        arrived += count
        total += read(arrived + at, travels)
    sent = total.to(message.dtype.element_ty)
    tl.store(message + first + at, sent, travels)
    kept += first + at
    tl.store(kept, read(kept, there) + _left(total, sent), there)


@triton.jit(do_not_specialize=["numel"])
def widen(
    total,  # 16 bits
    values,  # the payload, (numel,)
    flags,  # the second gets the finding's code
    numel,
    TILE: tl.constexpr,
):
    """Cast back. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _widen(total, values, flags, numel, first, TILE, True)
    else:
        _widen(total, values, flags, numel, first, TILE, False)


@triton.jit
def _widen(total, values, flags, numel, first, TILE: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, TILE)
    there = None if WHOLE else at < numel - first
    wide = read(total + first + at, there)
    tl.store(values + first + at, wide.to(values.dtype.element_ty), there)
    if _any_lost(wide):
        tl.store(flags + 1, 1 + tl.load(flags))


@triton.jit
def _left(x, sent):
    """What a cast lacks; zero where it is not finite."""
    left = x - sent.to(tl.float32)
    return tl.where(finite(left), left, 0.0)


@triton.jit
def _any_lost(x):
    """Whether a value is not finite."""
    return tl.max((~finite(x)).to(tl.int32), 0) > 0


@triton.jit
def finite(x):
    """Which values are neither infinite nor NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF < 0x7F800000


@triton.jit
def read(pointers, there):
    """Values in fp32; zeros where there are none. `there` is None if there are all."""
    values = tl.load(pointers) if there is None else tl.load(pointers, there, 0.0)
    return values.to(tl.float32)


def narrowed(
    given: Tensor, residual: Tensor | None, dtype: torch.dtype, padded: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launch `narrow`.

    Args:
        given: the payload, shape (numel,), fp32 or 16 bits.
        residual: fp32, shape (numel,). Is added to the payload, and gets what is rounded off. None: nothing
            is added or kept.
        dtype: fp16 or bf16.
        padded: length of the message, which zeros fill up; None: numel.

    Returns:
        The message, shape (padded,), and flags for `widened`.
    """
    padded = given.numel() if padded is None else padded
    message = torch.empty(padded, dtype=dtype, device=given.device)
    flags = torch.zeros(2, dtype=torch.int32, device=given.device)
    narrow[_grid(padded)](given, residual, message, flags, given.numel(), padded, **_LAUNCH)
    return message, flags


def added(arrived: Tensor, kept: Tensor, ranks: int) -> Tensor:
    """Launch `add`.

    Args:
        arrived: a share of each rank's message, shape (ranks * count,), 16 bits.
        kept: this rank's share of the residual, fp32; of the last ranks it is shorter, or empty.
        ranks: how many.

    Returns:
        The sum, shape (count,), in 16 bits.
    """
    count = arrived.numel() // ranks
    message = torch.empty(count, dtype=arrived.dtype, device=arrived.device)
    add[_grid(count)](arrived, kept, message, ranks, kept.numel(), count, **_LAUNCH)
    return message


def widened(total: Tensor, out: Tensor, flags: Tensor) -> Tensor:
    """Launch `widen` of what has at least the values of `out`; gives the finding's code, int32, shape ()."""
    widen[_grid(out.numel())](total, out, flags, out.numel(), **_LAUNCH)
    return flags[1]


def _grid(count: int) -> tuple[int]:
    return (max(1, triton.cdiv(count, _LAUNCH["TILE"])),)
