"""Error feedback: what a lossy hook did not send is its residual, which is added to the next payload.

Residuals are in units of a rank's share of the mean (g/n), as payloads are: then the sum over ranks of what
was sent and of the residuals is the sum of what came in, whatever the number of ranks
(Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, arXiv:1901.09847).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import ParamSlice, Payload, PayloadKind

# A parameter's residual in a state: `start`, its first element's index in the flattened parameter, and its
# values, shape (numel,): this rank's own as `residual`, where so many `ranks` hold the same elements (0: they
# are of an older layout), or the sum over another world's ranks as `total`.
ParamResidual = dict[str, Any]


@dataclass(slots=True)
class _BucketResidual:
    params: tuple[ParamSlice, ...]
    values: Tensor  # shape (numel,)
    group_size: int = 1  # how many ranks hold the same elements

    def by_param(self, kind: str) -> dict[str, ParamResidual]:
        """By kind of payload and parameter name: `kind/name`."""
        return {
            f"{kind}/{param.name}": {
                "start": param.start,
                "residual": param.of(self.values).clone(),
                "ranks": self.group_size,
            }
            for param in self.params
        }


class ErrorFeedback(Hook):
    """Base of hooks that keep residuals on each rank, by kind of payload and parameter name."""

    def __init__(self) -> None:
        self._bucket_residuals: dict[tuple[PayloadKind, int], _BucketResidual] = {}
        # Of a loaded state or an older bucket layout, as a state has them.
        self._unclaimed_pieces: dict[str, ParamResidual] = {}

    def residual(self, payload: Payload, group_size: int) -> Tensor:
        """The residual of `payload`, to be overwritten with the new one: shape (numel,), at least fp32.

        It is the payload's `compression_error` if a codec up the stack keeps residuals itself; else
        `group_size` ranks hold the same elements. Raises ExchangeError if these belong to no parameters.
        """
        if payload.compression_error is not None:
            return payload.compression_error
        if not payload.params:
            raise ExchangeError(
                f"the residual of bucket {payload.bucket} is kept by parameter, but a codec before reduces "
                "elements of no parameter: have it call reduce(…, compression_error=…) and keep that itself"
            )
        key = payload.kind, payload.bucket
        bucket = self._bucket_residuals.get(key)
        if bucket is None or bucket.params != payload.params:
            if bucket is not None:
                self._move_to_unclaimed(key)
            bucket = self._bucket_residuals[key] = self._carry_over_residual(payload, group_size)
        bucket.group_size = group_size
        return bucket.values

    def _carry_over_residual(self, payload: Payload, group_size: int) -> _BucketResidual:
        kind, names = payload.kind, {param.name for param in payload.params}
        for key, bucket in list(self._bucket_residuals.items()):  # of an older layout
            if key[0] == kind and any(param.name in names for param in bucket.params):
                self._move_to_unclaimed(key)
        dtype = torch.promote_types(payload.tensor.dtype, torch.float32)
        values = torch.zeros(payload.tensor.numel(), dtype=dtype, device=payload.tensor.device)
        for param in payload.params:
            if (piece := self._unclaimed_pieces.pop(f"{kind}/{param.name}", None)) is not None:
                _copy_overlap(param.of(values), param, piece, group_size)
        return _BucketResidual(payload.params, values)

    def _move_to_unclaimed(self, key: tuple[PayloadKind, int]) -> None:
        """Keep the residual of a bucket by its parameters, until they are sent again."""
        pieces = self._bucket_residuals.pop(key).by_param(key[0])
        self._unclaimed_pieces |= {name: piece | {"ranks": 0} for name, piece in pieces.items()}

    def state_dict(self) -> dict[str, Any]:
        """`{"kind/parameter": piece}`."""
        pieces = dict(self._unclaimed_pieces)
        for (kind, _), bucket in self._bucket_residuals.items():
            pieces |= bucket.by_param(kind)
        return pieces

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bucket_residuals.clear()
        self._unclaimed_pieces = dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The sum of all ranks' residuals, for ranks of another world or with other buckets to divide. Where
        hosts exchange among their own ranks, the mean over hosts: each host takes all of it.
        """
        found: dict[str, list[ParamResidual]] = {}
        for state in states:
            for key, piece in state.items():
                found.setdefault(key, []).append(piece)
        merged: dict[str, ParamResidual] = {}
        for key, of_ranks in found.items():
            own = [piece for piece in of_ranks if "residual" in piece]
            # A loaded total that nobody has claimed is the same on every rank: it counts once.
            merged[key] = {"start": 0, "total": _sum_over_ranks(own)} if own else of_ranks[0]
        return merged

    def take_back(self, kind: str, means: dict[str, Tensor]) -> None:
        """Each rank that holds an element keeps an equal part of it, and nothing of what is not finite."""
        for (bucket_kind, _), bucket in self._bucket_residuals.items():
            for param in bucket.params if bucket_kind == kind else ():
                if (mean := means.pop(param.name, None)) is not None:
                    part = mean[param.start : param.start + param.numel].to(bucket.values.dtype, copy=True)
                    part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                    param.of(bucket.values).add_(part, alpha=1.0 / bucket.group_size)

    def residual_square(self, kind: str, names: Sequence[str]) -> float:
        wanted = set(names)
        return sum(
            float(param.of(bucket.values).double().square().sum())
            for (bucket_kind, _), bucket in self._bucket_residuals.items()
            if bucket_kind == kind
            for param in bucket.params
            if param.name in wanted
        )


def _sum_over_ranks(pieces: Sequence[ParamResidual]) -> Tensor:
    length = max(piece["start"] + piece["residual"].numel() for piece in pieces)
    total: Tensor = pieces[0]["residual"].new_zeros(length)
    groups = torch.zeros_like(total)  # that hold an element
    for piece in pieces:
        start, values = piece["start"], piece["residual"]
        total[start : start + values.numel()] += values.to(total.device)
        if ranks := piece.get("ranks", len(pieces)):
            groups[start : start + values.numel()] += 1 / ranks
    return total / groups.round().clamp(min=1)


def _copy_overlap(target: Tensor, param: ParamSlice, piece: ParamResidual, group_size: int) -> None:
    """Copy into a slice what it shares with a loaded or older piece of the same parameter."""
    start, values = piece["start"], piece["total"] if "total" in piece else piece["residual"]
    low = max(param.start, start)
    high = min(param.start + param.numel, start + values.numel())
    if low < high:
        values = values[low - start : high - start]
        if "total" in piece:
            values = values / values.new_full((), group_size)  # a tensor: see `BlockScaledFormat.encode`
        target[low - param.start : high - param.start] = values.to(target)
