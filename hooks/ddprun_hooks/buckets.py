"""Flat buckets: which tensors lie where in one tensor that travels."""

from collections.abc import Mapping
from dataclasses import dataclass

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


class ParameterBuckets:
    """Named tensors in flat buckets of one dtype each, in the order in which they are given; empty ones are
    left out, complex ones are pairs of real numbers.

    Args:
        named: the tensors themselves; they are read and written in place, whatever their gradient is.
        cap_bytes: largest size of a bucket; a tensor larger than that has one of its own.
        first: index of the first bucket.
    """

    def __init__(self, named: Mapping[str, Tensor], cap_bytes: float, first: int = 0) -> None:
        named = {
            name: torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            for name, tensor in named.items()
        }
        self._tensors: list[list[Tensor]] = []
        layouts: list[BucketLayout] = []
        for names in _filled(named, cap_bytes):
            offset, params = 0, []
            for name in names:
                tensor = named[name]
                params.append(ParamSlice(name, tuple(tensor.shape), offset, tensor.numel()))
                offset += tensor.numel()
            self._tensors.append([named[name] for name in names])
            dtype = dtype_name(named[names[0]].dtype)
            layouts.append(BucketLayout(first + len(layouts), dtype, offset, tuple(params)))
        self.layouts: tuple[BucketLayout, ...] = tuple(layouts)

    def flat(self, place: int) -> Tensor:
        """The values of the bucket at `place` in `layouts`, copied: shape (numel,)."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors[place]])

    def put(self, place: int, flat: Tensor) -> None:
        """Overwrite the tensors of a bucket with `flat`, shape (numel,)."""
        for tensor, part in self._parts(place, flat):
            tensor.copy_(part)

    def add(self, place: int, flat: Tensor) -> None:
        """Add `flat`, shape (numel,), to the tensors of a bucket."""
        for tensor, part in self._parts(place, flat):
            tensor.add_(part)

    def _parts(self, place: int, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        tensors, params = self._tensors[place], self.layouts[place].params
        return [
            (tensor.detach(), flat[param.offset : param.offset + param.numel].view(param.shape))
            for tensor, param in zip(tensors, params, strict=True)
        ]


def _filled(named: Mapping[str, Tensor], cap_bytes: float) -> list[list[str]]:
    """Names by bucket, buckets in the order of their first tensor."""
    buckets: list[list[str]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, tensor in named.items():
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
