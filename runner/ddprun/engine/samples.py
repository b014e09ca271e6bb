"""Samples: which are whose, how they become a batch, and whether ranks read the same."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

_T = TypeVar("_T")

_MOST_ITEMS_SHOWN = 8  # of a tuple or list


@dataclass(frozen=True, slots=True)
class SampleShard:
    """A rank's samples: every `ranks`-th from its number on, or its share of each global micro-batch; of data
    that shards itself, all it reads.
    """

    rank: int
    ranks: int
    sharded: bool = False
    shares: tuple[int, ...] = ()
    """Samples of each rank in a full micro-batch of all ranks; none: as many each."""

    local_batch: int | None = None
    """A micro-batch is a round: each rank's share of it are whole batches of so many samples."""

    def own_samples(self, read: Sequence[_T]) -> Sequence[_T]:
        """This rank's samples of those read, which begin with those of rank 0 if ranks read the same. With
        `shares` they are those of one global micro-batch, or of the first part of one.
        """
        if self.shares and not self.sharded:
            return [read[at] for at in positions_by_rank(self.shares)[self.rank] if at < len(read)]
        return read if self.sharded else read[self.rank :: self.ranks]

    def own_batches(self, read: Sequence[_T]) -> list[Sequence[_T]]:
        """This rank's batches of a micro-batch that was read, or of the first part of one: one, or in a round
        as many as it has; the last one of an epoch may be smaller.
        """
        size = self.local_batch
        if size is None:
            return [self.own_samples(read)]
        own = positions_by_rank(tuple(share // size for share in self.shares))[self.rank]
        return [read[at * size : (at + 1) * size] for at in own if at * size < len(read)]


@lru_cache(maxsize=8)
def positions_by_rank(shares: tuple[int, ...]) -> list[list[int]]:
    """The positions in a global micro-batch of each rank's samples, of which there are `shares`. Every first
    part of the micro-batch is shared in proportion, too; equal shares are dealt round robin.
    """
    order = sorted(((k + 0.5) / share, rank) for rank, share in enumerate(shares) for k in range(share))
    positions: list[list[int]] = [[] for _ in shares]
    for position, (_, rank) in enumerate(order):
        positions[rank].append(position)
    return positions


@dataclass(frozen=True, slots=True)
class BatchFault:
    """Samples that cannot become one batch: which and what they are, and what can be done."""

    problem: str
    allowed: str


CollateFunction = Callable[[list[Any]], Any]  # makes a batch of samples, of which there is one at least


def collate(
    samples: Sequence[Any], numbers: Sequence[int], custom_collate: CollateFunction | None = None
) -> Any:
    """A batch of one sample or more, by torch's `default_collate` or the pipeline's own function.

    `numbers` are the samples' indices, or positions in an iterable dataset. A `BatchFault` is returned: what
    a loading process raises reaches the training process as text.
    """
    if custom_collate is not None:
        return custom_collate(list(samples))
    try:
        return default_collate(list(samples))
    except Exception as error:  # what it raises depends on the samples' types, and so does its text
        return _make_batch_fault(samples, numbers, error)


def _make_batch_fault(samples: Sequence[Any], numbers: Sequence[int], error: Exception) -> BatchFault:
    shown = [describe_sample(sample) for sample in samples]
    other = next((index for index, shape in enumerate(shown) if shape != shown[0]), None)
    first = f"sample {numbers[0]} is {shown[0]}"
    if other is not None:
        return BatchFault(
            f"samples do not fit into one batch: {first}, sample {numbers[other]} is {shown[other]}",
            "give all samples the same keys, types and shapes: resize, crop or pad them in the data set; or, "
            "if shapes alone differ, write loader: {batch_size: 1}",
        )
    why, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return BatchFault(
        f"samples do not fit into one batch: {first}; {why}",
        "a sample is made of tensors, NumPy arrays, numbers and text, and of tuples, lists and mappings of "
        "these: convert it in the data set",
    )


def batch_or_raise(content: Any, make_error: Callable[[str, str | None], Exception]) -> Any:
    """What `collate` gives; raises the error that `make_error` makes of a BatchFault."""
    if isinstance(content, BatchFault):
        raise make_error(content.problem, content.allowed)
    return content


def describe_tensor(tensor: Tensor) -> str:
    """Type and shape: `float32 (8, 4)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def describe_sample(sample: Any) -> str:
    """What a sample or a batch is made of, with the types and shapes of its tensors."""
    if isinstance(sample, Tensor):
        return describe_tensor(sample)
    if isinstance(sample, np.ndarray):
        return f"an array {sample.shape}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {describe_sample(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        if len(sample) > _MOST_ITEMS_SHOWN:
            return f"a {type(sample).__name__} of {len(sample)}"
        shown = ", ".join(map(describe_sample, sample))
        return f"[{shown}]" if isinstance(sample, list) else f"({shown})"
    return torch.typename(type(sample))


def digest_samples(samples: Iterable[Any]) -> bytes:
    """A digest of samples by their values, of 32 bytes. Objects of unknown types count by their bytes, which
    images give, or by their type alone.
    """
    found = hashlib.sha256()
    for sample in samples:
        _update_digest(found, sample)
    return found.digest()


def _update_digest(found: Any, sample: Any) -> None:
    found.update(type(sample).__name__.encode() + b"\0")
    if isinstance(sample, Tensor):
        if sample.layout == torch.strided and not sample.is_meta:
            values = sample.detach().cpu().contiguous().flatten()
            found.update(repr((tuple(sample.shape), sample.dtype)).encode())
            found.update(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    elif isinstance(sample, np.ndarray | np.generic):
        found.update(repr((sample.shape, sample.dtype)).encode())
        found.update(sample.tobytes() if sample.dtype.kind != "O" else b"")
    elif isinstance(sample, Mapping | tuple | list):
        for value in chain(*sample.items()) if isinstance(sample, Mapping) else sample:
            _update_digest(found, value)
    elif is_dataclass(sample) and not isinstance(sample, type):
        for field in fields(sample):
            _update_digest(found, getattr(sample, field.name, None))  # one may never be set
    elif isinstance(sample, bool | int | float | complex | str | bytes) or sample is None:
        found.update(repr(sample).encode())
    else:
        with suppress(Exception):  # most objects have no bytes
            found.update(sample.tobytes())
    found.update(b"\1")
