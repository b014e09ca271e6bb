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
from ddprun_hooks.payload import Kind, ParamSlice, Payload


@dataclass(slots=True)
class _BucketResidual:
    """The residual of one bucket."""

    params: tuple[ParamSlice, ...]
    values: Tensor
    """Shape (numel,)."""

    before: Tensor | None = None
    """Its values before the step that is under way, if that may be rolled back."""


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    """A loaded residual that no payload has claimed yet."""

    values: Tensor
    """Shape (numel,)."""

    start: int
    """First element's index in the flattened parameter."""

    total: bool
    """A sum over all ranks of another world, to be divided among the ranks; else this rank's own."""


class Residuals:
    """The residuals of one hook on this rank, by kind of payload and parameter name."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Kind, int], _BucketResidual] = {}
        self._unclaimed: dict[tuple[str, str], _Unclaimed] = {}
        self._undoable = False

    def of(self, payload: Payload, ranks: int) -> Tensor:
        """Where the residual of `payload` is and where the new one is to be written: shape (numel,), at
        least fp32.

        Args:
            payload: its `compression_error` if a codec up the stack keeps the residual itself.
            ranks: how many ranks hold the same elements.

        Raises:
            ExchangeError: the payload's elements belong to no parameters, so there is no residual by
                parameter.
        """
        if payload.compression_error is not None:
            return payload.compression_error
        if not payload.params and payload.tensor.numel():
            raise ExchangeError(
                f"the residual of bucket {payload.bucket} is kept by parameter, but a codec before reduces "
                "elements of no parameter: let it call reduce(…, compression_error=…) and keep that itself"
            )
        key = payload.kind, payload.bucket
        bucket = self._buckets.get(key)
        if bucket is None or (bucket.params is not payload.params and bucket.params != payload.params):
            bucket = self._buckets[key] = self._new_bucket(payload, ranks)
        if self._undoable and bucket.before is None:
            bucket.before = bucket.values.clone()
        return bucket.values

    def begin_step(self) -> None:
        """Remember values from before the coming step."""
        self._undoable = True

    def commit(self) -> None:
        """The step was taken."""
        for bucket in self._buckets.values():
            bucket.before = None
        self._undoable = False

    def rollback(self) -> None:
        """The step was skipped."""
        for bucket in self._buckets.values():
            if bucket.before is not None:
                bucket.values.copy_(bucket.before)
        self.commit()

    def square(self, kind: str, names: Sequence[str]) -> float:
        """Squared 2-norm of the residuals of the parameters named."""
        wanted = set(names)
        return sum(
            float(_of(bucket.values, param).double().square().sum())
            for (of, _), bucket in self._buckets.items()
            if of == kind
            for param in bucket.params
            if param.name in wanted
        )

    def state_dict(self) -> dict[str, Any]:
        """`{kind: {parameter: {"start": first element, "residual": (numel,)}}}`."""
        state: dict[str, dict[str, Any]] = {}
        for (kind, name), unclaimed in self._unclaimed.items():
            key = "total" if unclaimed.total else "residual"
            state.setdefault(kind, {})[name] = {"start": unclaimed.start, key: unclaimed.values.clone()}
        for (kind, _), bucket in self._buckets.items():
            for param in bucket.params:
                piece = {"start": param.start, "residual": _of(bucket.values, param).clone()}
                state.setdefault(kind, {})[param.name] = piece
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what `state_dict` gave on this rank, or a `merge` of what it gave on all ranks."""
        self._buckets.clear()
        self._unclaimed = {
            (kind, name): _Unclaimed(
                piece["total"] if "total" in piece else piece["residual"], piece["start"], "total" in piece
            )
            for kind, pieces in state.items()
            for name, piece in pieces.items()
        }

    def _new_bucket(self, payload: Payload, ranks: int) -> _BucketResidual:
        names = {param.name for param in payload.params}
        for key, bucket in list(self._buckets.items()):
            if key[0] == payload.kind and any(param.name in names for param in bucket.params):
                self._dismantle(key)
        dtype = torch.promote_types(payload.tensor.dtype, torch.float32)
        values = torch.zeros(payload.tensor.numel(), dtype=dtype, device=payload.tensor.device)
        for param in payload.params:
            unclaimed = self._unclaimed.pop((payload.kind, param.name), None)
            if unclaimed is not None:
                _claim(_of(values, param), param, unclaimed, ranks)
        return _BucketResidual(payload.params, values)

    def _dismantle(self, key: tuple[Kind, int]) -> None:
        """Take a bucket of an older layout apart."""
        bucket = self._buckets.pop(key)
        for param in bucket.params:
            self._unclaimed[key[0], param.name] = _Unclaimed(
                _of(bucket.values, param).clone(), param.start, total=False
            )


class ErrorFeedback(Hook):
    """Base of hooks whose only state is their residuals."""

    def __init__(self) -> None:
        self.residuals = Residuals()

    def state_dict(self) -> dict[str, Any]:
        """The residuals, by kind and parameter."""
        return self.residuals.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring the residuals back."""
        self.residuals.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The sum of the ranks' residuals."""
        return merged(states)

    def begin_step(self) -> None:
        """A step begins that `rollback` may undo."""
        self.residuals.begin_step()

    def commit(self) -> None:
        """The step was taken."""
        self.residuals.commit()

    def rollback(self) -> None:
        """The step was skipped."""
        self.residuals.rollback()

    def residual_square(self, kind: str, names: Sequence[str]) -> float:
        """Squared 2-norm of the residuals."""
        return self.residuals.square(kind, names)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of all ranks' residuals, for ranks of another world or with other buckets to divide.

    Args:
        states: each rank's `Residuals.state_dict`.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for state in states:
        for kind, pieces in state.items():
            for name, piece in pieces.items():
                found.setdefault((kind, name), []).append(piece)
    whole: dict[str, Any] = {}
    for (kind, name), pieces in found.items():
        claimed = [piece for piece in pieces if "residual" in piece]
        # A total that was loaded and that nobody has claimed is the same on every rank: it counts once.
        whole.setdefault(kind, {})[name] = {"start": 0, "total": _sum(claimed)} if claimed else pieces[0]
    return whole


def _sum(pieces: Sequence[dict[str, Any]]) -> Tensor:
    length = max(piece["start"] + piece["residual"].numel() for piece in pieces)
    total: Tensor = pieces[0]["residual"].new_zeros(length)
    for piece in pieces:
        start, values = piece["start"], piece["residual"]
        total[start : start + values.numel()] += values.to(total.device)
    return total


def _claim(target: Tensor, param: ParamSlice, unclaimed: _Unclaimed, ranks: int) -> None:
    """Copy into a slice what it shares with a loaded or older piece of the same parameter."""
    low = max(param.start, unclaimed.start)
    high = min(param.start + param.numel, unclaimed.start + unclaimed.values.numel())
    if low < high:
        values = unclaimed.values[low - unclaimed.start : high - unclaimed.start].to(target)
        target[low - param.start : high - param.start] = values / ranks if unclaimed.total else values


def _of(flat: Tensor, param: ParamSlice) -> Tensor:
    return flat[param.offset : param.offset + param.numel]
