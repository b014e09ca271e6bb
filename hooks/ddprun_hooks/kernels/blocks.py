"""Kernels for codes with a scale for each block of values: int8, int4.

Each value is read once and written once: a program has a tile of whole blocks in its registers, and finds
there the largest value of each block, the codes, and what they lack.

Arithmetic is that of `ddprun_hooks.builtin.two_phase.BlockScaledFormat`, operation by operation, in fp32:
divisions are rounded to the nearest, no product is fused with a sum, and denormal numbers are kept. The bits
are the same, with one exception: the codes of a block that is not finite may be others. It comes out as not
finite either way. Arguments in upper case are fixed when a kernel is compiled.
"""

import triton
import triton.language as tl

from ddprun_hooks.kernels import MAX_BLOCK_SIZE

# 1.5 * 2^23: a sum with it has no fraction, and the whole number in its low bits.
_ROUNDING_CONSTANT = tl.constexpr(12582912.0)
_TILE_SIZE = 2048


@triton.jit(do_not_specialize=["numel", "blocks_per_share"])
def encode(
    payload,  # (numel,)
    residual,  # fp32, (numel,): gets what is not sent
    message,  # bytes: for each share its codes, then its scales
    numel,
    blocks_per_share,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,  # values
    COLS: tl.constexpr,  # the power of two above
    ROWS: tl.constexpr,  # blocks of a program
):
    """Encode payload and residual. One program for `ROWS` blocks of a share."""
    first, share = tl.program_id(0) * ROWS, tl.program_id(1)
    end = (share.to(tl.int64) * blocks_per_share + first + ROWS) * BLOCK
    if (BLOCK == COLS) & (first + ROWS <= blocks_per_share) & (end <= numel):
        _encode_tile(payload, residual, message, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, True)
    else:
        _encode_tile(payload, residual, message, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, False)


@triton.jit
def _encode_tile(payload, residual, message, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE):
    first, share = tl.program_id(0) * ROWS, tl.program_id(1)
    start = (share.to(tl.int64) * blocks_per_share + first) * BLOCK
    at = _tile_offsets(ROWS, BLOCK, COLS)
    mask = None if WHOLE else _tile_mask(first, blocks_per_share, ROWS, BLOCK, COLS) & (at < numel - start)
    residual += start + at
    x = _load_fp32(payload + start + at, mask) + _load_fp32(residual, mask)
    codes, scales, left = _quantise(x, FORMAT)
    tl.store(residual, left, mask)
    _store_codes(message, codes, scales, first, share, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE)


@triton.jit(do_not_specialize=["ranks", "numel", "blocks_per_share"])
def sum_and_encode(
    arrived,  # bytes: a share from each rank
    residual_share,  # fp32: this rank's share of the residual; what the sum's encoding lacks is added to it
    message,
    ranks,
    numel,  # of `residual_share`
    blocks_per_share,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Encode the sum over ranks, in rank order, of a share. One program for `ROWS` blocks."""
    first = tl.program_id(0) * ROWS
    end = (first + ROWS).to(tl.int64) * BLOCK
    if (BLOCK == COLS) & (first + ROWS <= blocks_per_share) & (end <= numel):
        _sum_and_encode_tile(
            arrived, residual_share, message, ranks, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, True
        )
    else:
        _sum_and_encode_tile(
            arrived, residual_share, message, ranks, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, False
        )


@triton.jit
def _sum_and_encode_tile(
    arrived, residual_share, message, ranks, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE
):
    first = tl.program_id(0) * ROWS
    total = _load_decoded(arrived, first, 0, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE)
    for rank in range(1, ranks):
        total += _load_decoded(arrived, first, rank, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE)
    codes, scales, left = _quantise(total, FORMAT)
    _store_codes(message, codes, scales, first, 0, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE)
    start = first.to(tl.int64) * BLOCK
    at = _tile_offsets(ROWS, BLOCK, COLS)
    mask = None if WHOLE else _tile_mask(first, blocks_per_share, ROWS, BLOCK, COLS) & (at < numel - start)
    residual_share += start + at
    tl.store(residual_share, _load_fp32(residual_share, mask) + left, mask)


@triton.jit(do_not_specialize=["numel", "blocks_per_share"])
def decode(
    message,
    values,  # the payload, (numel,)
    numel,
    blocks_per_share,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decode a message. One program for `ROWS` blocks of a share."""
    first, share = tl.program_id(0) * ROWS, tl.program_id(1)
    end = (share.to(tl.int64) * blocks_per_share + first + ROWS) * BLOCK
    if (BLOCK == COLS) & (first + ROWS <= blocks_per_share) & (end <= numel):
        _decode_tile(message, values, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, True)
    else:
        _decode_tile(message, values, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, False)


@triton.jit
def _decode_tile(message, values, numel, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE):
    first, share = tl.program_id(0) * ROWS, tl.program_id(1)
    decoded = _load_decoded(message, first, share, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE)
    start = (share.to(tl.int64) * blocks_per_share + first) * BLOCK
    at = _tile_offsets(ROWS, BLOCK, COLS)
    mask = None if WHOLE else _tile_mask(first, blocks_per_share, ROWS, BLOCK, COLS) & (at < numel - start)
    tl.store(values + start + at, decoded.to(values.dtype.element_ty), mask)


@triton.jit
def _load_fp32(pointers, mask):
    """Values in fp32; zeros where there are none. `mask` is None if there are all."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask, 0.0)
    return values.to(tl.float32)


@triton.jit
def _is_finite(x):
    """Which values are neither infinite nor NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF < 0x7F800000


@triton.jit
def _tile_offsets(ROWS, BLOCK, COLS):
    """Indices of values in a tile, (ROWS, COLS), from its first one on."""
    return tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, COLS)[None, :]


@triton.jit
def _tile_mask(first, blocks_per_share, ROWS, BLOCK, COLS):
    """Which of a tile's values, or codes, a share has."""
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLS)
    return (rows < blocks_per_share)[:, None] & (columns < BLOCK)[None, :]


@triton.jit
def _quantise(x, FORMAT):
    """Codes (int32) and scales of blocks (rows of x), and what they lack; zeros where a block is lost."""
    largest: tl.constexpr = 127.0 if FORMAT == "int8" else 7.0
    # As whole numbers magnitudes have the same order, and NaN is the largest.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scales = tl.math.div_rn(most, tl.full(most.shape, largest, tl.float32))
    divisors = tl.where(scales > 0.0, scales, 1.0)
    scaled = tl.math.div_rn(x, divisors[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
    rounded = scaled + _ROUNDING_CONSTANT
    codes = rounded.to(tl.int32, bitcast=True)
    decoded = rounded - _ROUNDING_CONSTANT
    finite = _is_finite(scales * largest)
    return codes, scales, tl.where(finite[:, None], x - decoded * scales[:, None], 0.0)


@triton.jit
def _store_codes(message, codes, scales, first, share, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE):
    """Write codes and scales of a tile into a share of a message."""
    packed: tl.constexpr = 2 if FORMAT == "int4" else 1  # in a byte
    if packed == 2:
        low, high = tl.split(tl.reshape(codes, [ROWS, COLS // 2, 2]))
        codes = low & 15 | high << 4
    to_codes, to_scales = _message_pointers(message, first, share, blocks_per_share, BLOCK // packed)
    at = _tile_offsets(ROWS, BLOCK // packed, COLS // packed)
    mask = None if WHOLE else _tile_mask(first, blocks_per_share, ROWS, BLOCK // packed, COLS // packed)
    rows = tl.arange(0, ROWS)
    tl.store(to_codes + at, codes.to(tl.uint8), mask)
    tl.store(to_scales + rows, scales, None if WHOLE else first + rows < blocks_per_share)


@triton.jit
def _load_decoded(message, first, share, blocks_per_share, FORMAT, BLOCK, COLS, ROWS, WHOLE):
    """The values of a tile from a share of a message."""
    packed: tl.constexpr = 2 if FORMAT == "int4" else 1
    to_codes, to_scales = _message_pointers(message, first, share, blocks_per_share, BLOCK // packed)
    at = _tile_offsets(ROWS, BLOCK // packed, COLS // packed)
    mask = None if WHOLE else _tile_mask(first, blocks_per_share, ROWS, BLOCK // packed, COLS // packed)
    rows = tl.arange(0, ROWS)
    codes = tl.load(to_codes + at, mask).to(tl.int32)
    scales = tl.load(to_scales + rows, None if WHOLE else first + rows < blocks_per_share)
    if FORMAT == "int4":
        codes = tl.reshape(tl.join(codes << 4, codes), [ROWS, COLS])
        codes = (codes << 24) >> 28
    else:
        codes = (codes << 24) >> 24
    return codes.to(tl.float32) * scales[:, None]


@triton.jit
def _message_pointers(message, first, share, blocks_per_share, BYTES):
    """Where in a message the codes of a tile lie, and where its scales; `BYTES` of codes make a block."""
    words: tl.constexpr = BYTES // 4  # places are counted in words, so that four bytes go at a time
    start = share * blocks_per_share.to(tl.int64) * (words + 1)
    to_scales = message.to(tl.pointer_type(tl.float32)) + (start + blocks_per_share * words + first)
    return message + (start + first * words) * 4, to_scales


def grid_and_options(
    block: int, blocks_per_share: int, shares: int
) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """The grid, and how a kernel is compiled: 8 values for each thread, nothing fused."""
    assert block <= MAX_BLOCK_SIZE
    columns = triton.next_power_of_2(block)
    rows = max(1, _TILE_SIZE // columns)
    options = {"COLS": columns, "ROWS": rows, "num_warps": rows * columns // 256, "enable_fp_fusion": False}
    return (triton.cdiv(blocks_per_share, rows), shares), options
