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


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, shape (..., 2), as it is sent; any other as it is."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


class TensorBuckets:
    """Named tensors in flat buckets of one dtype each, in the order in which they are given; empty ones are
    left out, complex ones are pairs of real numbers.

    The tensors are read and written in place, whatever their gradient is. A tensor larger than `cap_bytes`
    has a bucket of its own; `first_index` is the index of the first bucket.
    """

    def __init__(self, named_tensors: Mapping[str, Tensor], cap_bytes: float, first_index: int = 0) -> None:
        named_tensors = {name: as_real(tensor) for name, tensor in named_tensors.items()}
        names_by_bucket = _assign_to_buckets(named_tensors, cap_bytes)
        self._tensors = [[named_tensors[name] for name in names] for names in names_by_bucket]
        self.layouts = tuple(
            BucketLayout.from_tensors(
                index, named_tensors[names[0]].dtype, ((name, named_tensors[name]) for name in names)
            )
            for index, names in enumerate(names_by_bucket, start=first_index)
        )

    def flatten(self, index: int) -> Tensor:
        """The values of the bucket at `index` in `layouts`, copied: shape (numel,)."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors[index]])

    def copy_to_tensors(self, index: int, flat: Tensor) -> None:
        """Overwrite the tensors of a bucket with `flat`, shape (numel,)."""
        for tensor, part in self._tensors_with_slices(index, flat):
            tensor.copy_(part)

    def add_to_tensors(self, index: int, flat: Tensor) -> None:
        """Add `flat`, shape (numel,), to the tensors of a bucket."""
        for tensor, part in self._tensors_with_slices(index, flat):
            tensor.add_(part)

    def _tensors_with_slices(self, index: int, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        tensors, params = self._tensors[index], self.layouts[index].params
        return [
            (tensor.detach(), param.of(flat).view(param.shape))
            for tensor, param in zip(tensors, params, strict=True)
        ]


def _assign_to_buckets(named_tensors: Mapping[str, Tensor], cap_bytes: float) -> list[list[str]]:
    """Names by bucket, buckets in the order of their first tensor."""
    buckets: list[list[str]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, tensor in named_tensors.items():
        if not tensor.numel():
            continue
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        names, held = current.get(key, ([], 0))
        if not names or held + size > cap_bytes:
            names, held = [], 0
            buckets.append(names)
        names.append(name)
        current[key] = names, held + size
    return buckets
