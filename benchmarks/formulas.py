"""What a stack sends from one host to another in one step, by formula; for two hosts."""

import math
from collections.abc import Callable, Sequence

from benchmarks.two_hosts import HOSTS

LOCAL = 2  # ranks on a host, where nothing else is said
RANKS = HOSTS * LOCAL
FP32, HALF = 4, 2  # bytes
BLOCK, INT4_BLOCK, INT2_BLOCK, CHUNK, DENSITY, RANK = 256, 64, 128, 4096, 0.05, 32

Shape = tuple[int, ...]
Bucket = list[Shape]
"""Shapes of the parameters in one bucket, in their order."""

Formula = Callable[[Sequence[Bucket]], float]
"""Bytes in each direction of the comm."""


def elements(shapes: Sequence[Shape]) -> int:
    """Number of elements of some parameters."""
    return sum(math.prod(shape) for shape in shapes)


def all_reduce(ranks: int, numbers: float, size: int) -> float:
    """Bytes over one edge of a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * numbers * size


def ring(size: int, local: int = LOCAL) -> Formula:
    """All-reduce over all ranks: one edge of the ring crosses in each direction."""
    return lambda buckets: sum(all_reduce(HOSTS * local, elements(bucket), size) for bucket in buckets)


def whole(buckets: Sequence[Bucket]) -> float:
    """Every parameter once."""
    return FP32 * sum(map(elements, buckets))


def two_levels(size: int) -> Formula:
    """All-reduce between hosts, of a share of the bucket for each local rank."""
    return lambda buckets: sum(
        LOCAL * all_reduce(HOSTS, elements(bucket) / LOCAL, size) for bucket in buckets
    )


def two_phase(code: float, local: int = LOCAL) -> Formula:
    """All-to-all of codes of so many bytes, of which each local rank sends a part to each rank of the other
    host; then a ring all-gather of codes of the sum.
    """
    ranks = HOSTS * local
    per_element = local * (ranks - local) / ranks * code + (ranks - 1) / ranks * code
    return lambda buckets: per_element * sum(map(elements, buckets))


def int8(local: int = LOCAL) -> Formula:
    """Codes of 8 bits, with scales."""
    return two_phase(1 + FP32 / BLOCK, local)


def int4(local: int = LOCAL) -> Formula:
    """Codes of 4 bits, with scales."""
    return two_phase(1 / 2 + FP32 / INT4_BLOCK, local)


def int2(local: int = LOCAL) -> Formula:
    """Codes of 2 bits, with two magnitudes."""
    return two_phase(1 / 4 + 2 * FP32 / INT2_BLOCK, local)


def two_phase_across(code: float) -> Formula:
    """The two phases between hosts, on each local rank's share."""
    return lambda buckets: 2 * (HOSTS - 1) / HOSTS * code * sum(map(elements, buckets))


int8_across = two_phase_across(1 + FP32 / BLOCK)
int4_across = two_phase_across(1 / 2 + FP32 / INT4_BLOCK)


def largest(numel: int, density: float, value_bits: int, scale_bits: int) -> float:
    """A message of `topk`: of each chunk k values, their scales, and their indices by Elias and Fano."""
    chunks = math.ceil(numel / CHUNK)
    length = math.ceil(numel / chunks)
    k = math.ceil(density * length)
    index_bits = min(k * low + k + (length - 1 >> low) for low in range(20))
    return chunks * (k * value_bits + scale_bits + index_bits) / 8


def topk(value_bits: int, scale_bits: int = 0, density: float = DENSITY) -> Formula:
    """Ring all-gather of values and indices."""
    return lambda buckets: sum(
        (RANKS - 1) * largest(elements(bucket), density, value_bits, scale_bits) for bucket in buckets
    )


def topk_across(buckets: Sequence[Bucket]) -> float:
    """All-gather between hosts, on each local rank's share."""
    shares = [elements(part) for bucket in buckets for part in cut(bucket)]
    return sum((HOSTS - 1) * largest(share, DENSITY, 8 * FP32, 0) for share in shares)


def powersgd(size: int) -> Formula:
    """All-reduce of both factors, and of what is sent as it is."""
    return lambda buckets: sum(all_reduce(RANKS, factors(bucket), size) for bucket in buckets)


def powersgd_across(buckets: Sequence[Bucket]) -> float:
    """The same between hosts, on each local rank's share."""
    parts = [part for bucket in buckets for part in cut(bucket)]
    return sum(all_reduce(HOSTS, factors(part), FP32) for part in parts)


def factors(shapes: Sequence[Shape]) -> int:
    """Numbers that PowerSGD sends: two factors of each matrix, where these are fewer than its elements."""
    numbers = 0
    for shape in shapes:
        numel, rows = math.prod(shape), shape[0]
        thin = RANK * (rows + numel // rows)
        numbers += min(thin, numel) if len(shape) > 1 else numel
    return numbers


def cut(bucket: Bucket) -> list[Bucket]:
    """The local ranks' shares: cut where a row begins, nearest to even; a matrix cut in two becomes two."""
    ends = [elements(bucket) * part / LOCAL for part in range(1, LOCAL)]
    parts: list[Bucket] = [[]]
    offset = 0
    for shape in bucket:
        rows, columns = shape[0], math.prod(shape[1:])
        done = 0
        while ends and ends[0] < offset + rows * columns:
            row = max(done, round((ends.pop(0) - offset) / columns))
            if row > done:
                parts[-1].append((row - done, *shape[1:]))
            parts.append([])
            done = row
        if done < rows:
            parts[-1].append((rows - done, *shape[1:]))
        offset += rows * columns
    return parts
