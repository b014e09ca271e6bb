"""Kernels for casts to 16 bits: with error feedback, with sums in fp32, and with the finding of an overflow.

Arithmetic is that of `ddprun_hooks.builtin.cast`, operation by operation. The bits are the same, with one
exception: a NaN is a NaN, but may be another one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LAUNCH = {"TILE": 2048, "num_warps": 4, "enable_fp_fusion": False}  # 16 values for each thread


@triton.jit(do_not_specialize=["numel", "message_numel"])
def downcast(
    payload,  # (numel,)
    residual,  # fp32, (numel,): is added, and gets what is rounded off; or None
    message,  # 16 bits, (message_numel,)
    flags,  # int32, (2,): the first is 1 if `payload` is not finite
    numel,
    message_numel,
    TILE: tl.constexpr,
):
    """Cast a payload. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _downcast_tile(payload, residual, message, flags, numel, message_numel, first, TILE, True)
    else:
        _downcast_tile(payload, residual, message, flags, numel, message_numel, first, TILE, False)


@triton.jit
def _downcast_tile(payload, residual, message, flags, numel, message_numel, first, TILE, WHOLE):
    at = tl.arange(0, TILE)
    mask = None if WHOLE else at < numel - first
    own = load_fp32(payload + first + at, mask)
    x = own if residual is None else own + load_fp32(residual + first + at, mask)
    sent = x.to(message.dtype.element_ty)
    tl.store(message + first + at, sent, None if WHOLE else at < message_numel - first)
    if residual is not None:
        tl.store(residual + first + at, _rounding_error(x, sent), mask)
    if _any_not_finite(own):
        tl.store(flags, 1)


@triton.jit(do_not_specialize=["ranks", "numel"])
def sum_and_downcast(
    arrived,  # 16 bits: a share from each rank, (ranks, count)
    residual_share,  # fp32: this rank's share of the residual; what the sum's rounding lacks is added to it
    message,  # 16 bits, (count,)
    ranks,
    numel,  # of `residual_share`
    count,
    TILE: tl.constexpr,
):
    """Cast the sum over ranks, in rank order, of a share. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _sum_and_downcast_tile(arrived, residual_share, message, ranks, numel, count, first, TILE, True)
    else:
        _sum_and_downcast_tile(arrived, residual_share, message, ranks, numel, count, first, TILE, False)


@triton.jit
def _sum_and_downcast_tile(arrived, residual_share, message, ranks, numel, count, first, TILE, WHOLE):
    at = tl.arange(0, TILE)
    mask = None if WHOLE else at < numel - first
    travels = None if WHOLE else at < count - first
    arrived += first
    total = load_fp32(arrived + at, travels)
    for _ in range(1, ranks):
        arrived += count
        total += load_fp32(arrived + at, travels)
    sent = total.to(message.dtype.element_ty)
    tl.store(message + first + at, sent, travels)
    residual_share += first + at
    tl.store(residual_share, load_fp32(residual_share, mask) + _rounding_error(total, sent), mask)


@triton.jit(do_not_specialize=["numel"])
def upcast(
    total,  # 16 bits
    values,  # the payload, (numel,)
    flags,  # of `downcast`; the second is 0 if `total` is finite, 1 if it alone is not, 2 if neither is
    numel,
    TILE: tl.constexpr,
):
    """Cast the sum to the payload's dtype, and look for an overflow. One program for `TILE` values."""
    first = tl.program_id(0).to(tl.int64) * TILE
    if first + TILE <= numel:
        _upcast_tile(total, values, flags, numel, first, TILE, True)
    else:
        _upcast_tile(total, values, flags, numel, first, TILE, False)


@triton.jit
def _upcast_tile(total, values, flags, numel, first, TILE, WHOLE):
    at = tl.arange(0, TILE)
    mask = None if WHOLE else at < numel - first
    wide = load_fp32(total + first + at, mask)
    tl.store(values + first + at, wide.to(values.dtype.element_ty), mask)
    if _any_not_finite(wide):
        tl.store(flags + 1, 1 + tl.load(flags))


@triton.jit
def _rounding_error(x, sent):
    """What a cast lacks; zero where it is not finite."""
    left = x - sent.to(tl.float32)
    return tl.where(is_finite(left), left, 0.0)


@triton.jit
def _any_not_finite(x):
    return tl.max((~is_finite(x)).to(tl.int32), 0) > 0


@triton.jit
def is_finite(x):
    """Which values are neither infinite nor NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF < 0x7F800000


@triton.jit
def load_fp32(pointers, mask):
    """Values in fp32; zeros where there are none. `mask` is None if there are all."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask, 0.0)
    return values.to(tl.float32)


def launch_downcast(
    payload: Tensor, residual: Tensor | None, dtype: torch.dtype, message_numel: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launch `downcast` of a payload, shape (numel,), fp32 or 16 bits, to fp16 or bf16.

    `residual`, fp32, is added, and gets what is rounded off. Gives the message, shape (message_numel,), which
    zeros fill up (None: numel), and flags for `launch_upcast_and_check`.
    """
    message_numel = payload.numel() if message_numel is None else message_numel
    message = torch.empty(message_numel, dtype=dtype, device=payload.device)
    flags = torch.zeros(2, dtype=torch.int32, device=payload.device)
    downcast[_grid(message_numel)](
        payload, residual, message, flags, payload.numel(), message_numel, **_LAUNCH
    )
    return message, flags


def launch_sum_and_downcast(arrived: Tensor, residual_share: Tensor, ranks: int) -> Tensor:
    """Launch `sum_and_downcast` of a share of each rank's message, shape (ranks * count,), 16 bits. This
    rank's share of the residual is fp32, of the last ranks shorter or empty. Gives the sum, shape (count,).
    """
    count = arrived.numel() // ranks
    message = torch.empty(count, dtype=arrived.dtype, device=arrived.device)
    sum_and_downcast[_grid(count)](
        arrived, residual_share, message, ranks, residual_share.numel(), count, **_LAUNCH
    )
    return message


def launch_upcast_and_check(total: Tensor, out: Tensor, flags: Tensor) -> Tensor:
    """Launch `upcast` of what has at least the values of `out`; gives the finding's code, int32, shape ()."""
    upcast[_grid(out.numel())](total, out, flags, out.numel(), **_LAUNCH)
    return flags[1]


def _grid(count: int) -> tuple[int]:
    return (max(1, triton.cdiv(count, _LAUNCH["TILE"])),)
