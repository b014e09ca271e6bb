"""Sorted whole numbers in few bits: about 2 + log2(length / k) each, for k of them below `length`.

Each number's low bits are stored as they are. The others, which never decrease, are stored as the steps from
one number to the next, in unary: the j-th number sets bit `j + (number >> low bits)` of a row (Elias 1974,
"Efficient storage and retrieval by content and address of static files"). So the size is known beforehand.
"""

import torch
from torch import Tensor


def encoded_bits(k: int, length: int) -> tuple[int, int]:
    """For k numbers below `length`: how many low bits each has, and how many upper bits all have together."""
    low = min(range(length.bit_length()), key=lambda low: k * low + (length - 1 >> low))
    return low, k + (length - 1 >> low)


def encoded_bytes(rows: int, k: int, length: int) -> int:
    """The length of a message."""
    low, upper_bits = encoded_bits(k, length)
    return -(-rows * upper_bits // 8) + -(-rows * k * low // 8)


def encode(numbers: Tensor, length: int) -> Tensor:
    """The message, uint8, of rows (n, k) of different numbers below `length`, each row in rising order."""
    rows, k = numbers.shape
    low, upper_bits = encoded_bits(k, length)
    upper = torch.zeros(rows, upper_bits, dtype=torch.uint8, device=numbers.device)
    upper.scatter_(1, (numbers >> low) + torch.arange(k, device=numbers.device), 1)
    return torch.cat([pack_bits(upper.view(-1)), pack_bits(_bits_of(numbers, low))])


def decode(message: Tensor, rows: int, k: int, length: int) -> Tensor:
    """The numbers, int64, shape (rows, k), of a message of `encode`."""
    low, upper_bits = encoded_bits(k, length)
    upper = unpack_bits(message, rows * upper_bits).view(rows, upper_bits)
    low_bits = unpack_bits(message[-(-rows * upper_bits // 8) :], rows * k * low).view(rows, k, low)
    places = torch.arange(upper_bits, device=message.device).expand(rows, -1)
    # To the j-th set bit of a row belongs its j-th number; the other bits all go behind the last one.
    order = torch.where(upper > 0, upper.cumsum(1) - 1, k)
    numbers = places.new_zeros(rows, k + 1).scatter_(1, order, places)[:, :k]
    numbers = numbers - torch.arange(k, device=message.device) << low
    return numbers + (low_bits.long() << _shifts(numbers, low)).sum(-1)


def pack_bits(bits: Tensor) -> Tensor:
    """Bytes of bits, uint8, shape (n,): the first one is the lowest of the first byte."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (padded << _shifts(bits, 8)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits of bytes, uint8."""
    return _bits_of(packed, 8)[:count]


def _bits_of(numbers: Tensor, width: int) -> Tensor:
    """The lowest bits of whole numbers, uint8, flat: the lowest one of the first number first."""
    return (numbers.unsqueeze(-1) >> _shifts(numbers, width) & 1).to(torch.uint8).flatten()


def _shifts(numbers: Tensor, width: int) -> Tensor:
    return torch.arange(width, dtype=numbers.dtype, device=numbers.device)
