"""Flat buckets: where each tensor lies in the one flat tensor that is communicated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.payload import ParamSlice, dtype_name


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Which parameters' values lie where in one bucket."""

    index: int
    dtype: str
    numel: int
    params: tuple[ParamSlice, ...]

    @classmethod
    def from_tensors(
        cls, index: int, dtype: torch.dtype, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> "BucketLayout":
        """The layout of a bucket in which tensors of a dtype lie one after the other."""
        offset, params = 0, []
        for name, tensor in named_tensors:
            params.append(ParamSlice(name, tuple(tensor.shape), offset, tensor.numel()))
            offset += tensor.numel()
        return cls(index, dtype_name(dtype), offset, tuple(params))

    def to_plain_data(self) -> dict[str, Any]:
        """As events have it."""
        params = [param.name for param in self.params]
        return {"bucket": self.index, "dtype": self.dtype, "numel": self.numel, "params": params}


def view_as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, shape (..., 2), as it is sent; any other as it is."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


class TensorBuckets:
    """Named tensors in flat buckets of one dtype each, in the order in which they are given; empty ones are
    left out, complex ones are pairs of real numbers.

    The tensors are read and written in place, whatever their gradient is. A tensor larger than `cap_bytes`
    has a bucket of its own; `first_index` is the index of the first bucket.
    """

    def __init__(self, named_tensors: Mapping[str, Tensor], cap_bytes: float, first_index: int = 0) -> None:
        buckets = _assign_to_buckets(named_tensors, cap_bytes)
        self._tensors = [[tensor for _, tensor in bucket] for bucket in buckets]
        self.layouts = tuple(
            BucketLayout.from_tensors(index, bucket[0][1].dtype, bucket)
            for index, bucket in enumerate(buckets, start=first_index)
        )

    def flatten(self, index: int) -> Tensor:
        """The values of the bucket at `index` in `layouts`, copied: shape (numel,)."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors[index]])

    def copy_to_tensors(self, index: int, flat: Tensor) -> None:
        """Overwrite the tensors of a bucket with `flat`, shape (numel,)."""
        for tensor, param in zip(self._tensors[index], self.layouts[index].params, strict=True):
            tensor.detach().copy_(param.of(flat).view(param.shape))

    def add_to_tensors(self, index: int, flat: Tensor) -> None:
        """Add `flat`, shape (numel,), to the tensors of a bucket."""
        for tensor, param in zip(self._tensors[index], self.layouts[index].params, strict=True):
            tensor.detach().add_(param.of(flat).view(param.shape))


def _assign_to_buckets(
    named_tensors: Mapping[str, Tensor], cap_bytes: float
) -> list[list[tuple[str, Tensor]]]:
    """Names and tensors by bucket, buckets in the order of their first tensor."""
    buckets: list[list[tuple[str, Tensor]]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[str, Tensor]], int]] = {}
    for name, tensor in named_tensors.items():
        if not tensor.numel():
            continue
        real = view_as_real(tensor)
        key, size = (real.dtype, real.device), real.nbytes
        bucket, held = current.get(key, ([], 0))
        if not bucket or held + size > cap_bytes:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append((name, real))
        current[key] = bucket, held + size
    return buckets
