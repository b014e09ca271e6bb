"""Error feedback: what a lossy hook did not send is kept and added to the next payload.

Kept values are in units of a rank's share of the mean (g/n), as payloads are: then the sum over ranks of what
was sent and of what is kept is the sum of what came in, whatever the number of ranks
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
class _Shelf:
    """The residual of one bucket."""

    params: tuple[ParamSlice, ...]
    kept: Tensor
    """Shape (numel,)."""

    before: Tensor | None = None
    """Its values before the step that is under way, if that may be taken back."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A loaded residual that no payload has claimed yet."""

    values: Tensor
    """Shape (numel,)."""

    start: int
    """First element's index in the flattened parameter."""

    total: bool
    """A sum over all ranks of another world, to be divided among the ranks; else this rank's own."""


class Residuals:
    """What one hook keeps on this rank, by kind of payload and parameter name."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[Kind, int], _Shelf] = {}
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._guarded = False

    def slot(self, payload: Payload, ranks: int) -> Tensor:
        """Where the residual of `payload` is and where the new one is to be written: shape (numel,), at
        least fp32.

        Args:
            payload: its `unsent` is the slot if somebody up the stack keeps the residual.
            ranks: how many ranks hold the same elements.

        Raises:
            ExchangeError: the payload's elements belong to no parameters, so nothing can be kept of them.
        """
        if payload.unsent is not None:
            return payload.unsent
        if not payload.params and payload.tensor.numel():
            raise ExchangeError(
                f"what is not sent of bucket {payload.bucket} is kept by parameter, but a codec before hands "
                "on elements of no parameter: let it give hand_on(…, unsent=…) and keep that itself"
            )
        key = payload.kind, payload.bucket
        shelf = self._shelves.get(key)
        if shelf is None or (shelf.params is not payload.params and shelf.params != payload.params):
            shelf = self._shelves[key] = self._new_shelf(payload, ranks)
        if self._guarded and shelf.before is None:
            shelf.before = shelf.kept.clone()
        return shelf.kept

    def guard(self) -> None:
        """Remember values from before the coming step."""
        self._guarded = True

    def settle(self, *, applied: bool) -> None:
        """The step is over; take it back if it was not applied."""
        for shelf in self._shelves.values():
            if shelf.before is not None:
                if not applied:
                    shelf.kept.copy_(shelf.before)
                shelf.before = None
        self._guarded = False

    def square(self, kind: str, names: Sequence[str]) -> float:
        """Squared 2-norm of what is kept of the parameters named."""
        wanted = set(names)
        return sum(
            float(_of(shelf.kept, param).double().square().sum())
            for (of, _), shelf in self._shelves.items()
            if of == kind
            for param in shelf.params
            if param.name in wanted
        )

    def state_dict(self) -> dict[str, Any]:
        """`{kind: {parameter: {"start": first element, "kept": (numel,)}}}`."""
        state: dict[str, dict[str, Any]] = {}
        for (kind, name), waiting in self._waiting.items():
            values = "total" if waiting.total else "kept"
            state.setdefault(kind, {})[name] = {"start": waiting.start, values: waiting.values.clone()}
        for (kind, _), shelf in self._shelves.items():
            for param in shelf.params:
                piece = {"start": param.start, "kept": _of(shelf.kept, param).clone()}
                state.setdefault(kind, {})[param.name] = piece
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what `state_dict` gave on this rank, or a `merge` of what it gave on all ranks."""
        self._shelves.clear()
        self._waiting = {
            (kind, name): _Waiting(
                piece["total"] if "total" in piece else piece["kept"], piece["start"], "total" in piece
            )
            for kind, pieces in state.items()
            for name, piece in pieces.items()
        }

    def _new_shelf(self, payload: Payload, ranks: int) -> _Shelf:
        names = {param.name for param in payload.params}
        for key, shelf in list(self._shelves.items()):
            if key[0] == payload.kind and any(param.name in names for param in shelf.params):
                self._dismantle(key)
        dtype = torch.promote_types(payload.tensor.dtype, torch.float32)
        kept = torch.zeros(payload.tensor.numel(), dtype=dtype, device=payload.tensor.device)
        for param in payload.params:
            waiting = self._waiting.pop((payload.kind, param.name), None)
            if waiting is not None:
                _claim(_of(kept, param), param, waiting, ranks)
        return _Shelf(payload.params, kept)

    def _dismantle(self, key: tuple[Kind, int]) -> None:
        """Take a bucket of an older layout apart."""
        shelf = self._shelves.pop(key)
        for param in shelf.params:
            self._waiting[key[0], param.name] = _Waiting(
                _of(shelf.kept, param).clone(), param.start, total=False
            )


class ErrorFeedback(Hook):
    """Base of hooks that keep what they do not send, and nothing else."""

    def __init__(self) -> None:
        self.residuals = Residuals()

    def state_dict(self) -> dict[str, Any]:
        """What is kept, by kind and parameter."""
        return self.residuals.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what was kept."""
        self.residuals.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The sum over ranks of what they kept."""
        return merged(states)

    def guard(self) -> None:
        """Be ready to take the coming step back."""
        self.residuals.guard()

    def settle(self, *, applied: bool) -> None:
        """The step is over; take it back if it was not applied."""
        self.residuals.settle(applied=applied)

    def kept_square(self, kind: str, names: Sequence[str]) -> float:
        """Squared 2-norm of what is kept."""
        return self.residuals.square(kind, names)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum over ranks of what all ranks kept, for ranks of another world or with other buckets to divide.

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
        claimed = [piece for piece in pieces if "kept" in piece]
        # A total that was loaded and that nobody has claimed is the same on every rank: it counts once.
        whole.setdefault(kind, {})[name] = {"start": 0, "total": _sum(claimed)} if claimed else pieces[0]
    return whole


def _sum(pieces: Sequence[dict[str, Any]]) -> Tensor:
    length = max(piece["start"] + piece["kept"].numel() for piece in pieces)
    total: Tensor = pieces[0]["kept"].new_zeros(length)
    for piece in pieces:
        total[piece["start"] : piece["start"] + piece["kept"].numel()] += piece["kept"].to(total.device)
    return total


def _claim(target: Tensor, param: ParamSlice, waiting: _Waiting, ranks: int) -> None:
    """Copy into a slice what it shares with a loaded or older piece of the same parameter."""
    low = max(param.start, waiting.start)
    high = min(param.start + param.numel, waiting.start + waiting.values.numel())
    if low < high:
        values = waiting.values[low - waiting.start : high - waiting.start].to(target)
        target[low - param.start : high - param.start] = values / ranks if waiting.total else values


def _of(flat: Tensor, param: ParamSlice) -> Tensor:
    return flat[param.offset : param.offset + param.numel]
