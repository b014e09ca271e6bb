"""Matrices as two thin factors."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.builtin.error_feedback import ErrorFeedback, merged
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.payload import ParamSlice, Payload

_Place = tuple[str, str, int]
"""Kind of payload, parameter, first element's index in it."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the parameters of one payload travel."""

    params: tuple[ParamSlice, ...]
    matrices: tuple[ParamSlice, ...]
    """As factors."""

    rest: tuple[ParamSlice, ...]
    """As they are: factors would not be smaller."""


class PowerSgd(ErrorFeedback):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727), with warm start and error feedback.

    A matrix M (rows, columns) travels as P = M Q (rows, rank) and, with P made orthonormal, as Qᵀ = Pᵀ M:
    one step of subspace iteration from the last step's Q. Both are linear in M, so ranks may sum them by
    whatever follows in the stack. Tensors of more dimensions are matrices with their first dimension as rows;
    those whose factors would not be smaller, and vectors, travel as they are, beside P.

    A rank's residual is its own M - P Qᵀ with its own Q: it has the same sum over ranks as the paper's, which
    takes the mean Q, but it does not pile up the differences between ranks.

    All ranks have to compute the same P from the same sum. They do on equal machines with equal libraries.

    Args:
        rank: columns of each factor.
    """

    role = "codec"
    rounds = 2

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.rank = rank
        self._factors: dict[_Place, Tensor] = {}
        self._before: dict[_Place, Tensor] | None = None
        self._plans: dict[tuple[str, int], _Plan] = {}

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        plan = self._plan(payload)
        residual = self.residuals.of(payload, comm.size)
        residual += payload.tensor
        dtype, result = payload.tensor.dtype, payload.tensor

        bases = [orthonormal(self._factor(payload.kind, param, residual)) for param in plan.matrices]
        left = [_matrix(residual, param) @ base for param, base in zip(plan.matrices, bases, strict=True)]
        message = _joined([*left, *(_of(residual, param) for param in plan.rest)], residual).to(dtype)
        compression_error = torch.zeros_like(message, dtype=residual.dtype)
        total = (await comm.reduce(message, (), compression_error)).to(residual.dtype)
        sizes = [matrix.numel() for matrix in left] + [param.numel for param in plan.rest]
        sums, lost = torch.split(total, sizes), torch.split(compression_error, sizes)
        for param, mean, missing in zip(plan.rest, sums[len(left) :], lost[len(left) :], strict=True):
            _of(result, param).copy_(mean)
            _of(residual, param).copy_(missing)
        if not left:
            return result

        lefts = [orthonormal(mean.view_as(matrix)) for mean, matrix in zip(sums, left, strict=False)]
        rights = [_matrix(residual, param).T @ p for param, p in zip(plan.matrices, lefts, strict=True)]
        message = _joined(rights, residual).to(dtype)
        sent = message.to(residual.dtype, copy=True)
        compression_error = torch.zeros_like(sent)
        total = (await comm.reduce(message, (), compression_error)).to(residual.dtype)
        sent -= compression_error
        sizes = [matrix.numel() for matrix in rights]
        for param, p, mine, mean, right in zip(
            plan.matrices, lefts, torch.split(sent, sizes), torch.split(total, sizes), rights, strict=True
        ):
            q = mean.view_as(right)
            _matrix(result, param).copy_(p @ q.T)
            _matrix(residual, param).addmm_(p, mine.view_as(right).T, alpha=-1)
            self._warm_start(payload.kind, param, q, residual)
        return result

    def _plan(self, payload: Payload) -> _Plan:
        key = payload.kind, payload.bucket
        plan = self._plans.get(key)
        if plan is None or (plan.params is not payload.params and plan.params != payload.params):
            params = payload.params or (ParamSlice("", (payload.tensor.numel(),), 0, payload.tensor.numel()),)
            small = [param for param in params if not self._pays(param)]
            plan = self._plans[key] = _Plan(
                payload.params, tuple(param for param in params if self._pays(param)), tuple(small)
            )
        return plan

    def _pays(self, param: ParamSlice) -> bool:
        if len(param.shape) < 2 or not param.numel:
            return False
        rows, columns = _rows_columns(param)
        return self.rank * (rows + columns) < rows * columns

    def _factor(self, kind: str, param: ParamSlice, like: Tensor) -> Tensor:
        """The last step's Q of a matrix, (columns, rank); a random one, the same on all ranks, at first."""
        shape = (_rows_columns(param)[1], self.rank)
        # State of another world has the factors of whole matrices; they serve parts of them, too.
        known = self._factors.get((kind, param.name, param.start), self._factors.get((kind, param.name, -1)))
        if known is not None and tuple(known.shape) == shape:
            return known.to(like)
        seed = int.from_bytes(hashlib.sha256(f"{kind} {param.name}".encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

    def _warm_start(self, kind: str, param: ParamSlice, q: Tensor, residual: Tensor) -> None:
        """Keep Q for the next step, unless it is not finite: then the matrix came out so, on all ranks."""
        place = kind, param.name, param.start
        lost = ~torch.isfinite(q).all()
        if not q.is_cuda and not bool(lost):
            self._factors[place] = q.clone()
            return
        _of(residual, param).masked_fill_(lost, 0.0)
        self._factors[place] = torch.where(lost, self._factor(kind, param, q), q)

    def state_dict(self) -> dict[str, Any]:
        """What is residual, and each matrix's last Q."""
        factors: dict[str, dict[str, Any]] = {}
        for (kind, name, start), q in self._factors.items():
            factors.setdefault(kind, {})[name] = {"start": start, "q": q.clone()}
        state = {"residuals": self.residuals.state_dict(), "factors": factors}
        return {key: value for key, value in state.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring it back."""
        self.residuals.load_state_dict(state.get("residuals", {}))
        self._factors = {
            (kind, name, piece["start"]): piece["q"].clone()
            for kind, pieces in state.get("factors", {}).items()
            for name, piece in pieces.items()
        }

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The sum over ranks of what they residual; of each matrix the Q of the part that starts first."""
        first: dict[tuple[str, str], dict[str, Any]] = {}
        for state in states:
            for kind, pieces in state.get("factors", {}).items():
                for name, piece in pieces.items():
                    best = first.get((kind, name))
                    if best is None or piece["start"] < best["start"]:
                        first[kind, name] = piece
        factors: dict[str, dict[str, Any]] = {}
        for (kind, name), piece in first.items():
            factors.setdefault(kind, {})[name] = {"start": -1, "q": piece["q"]}
        residuals = merged([state["residuals"] for state in states if "residuals" in state])
        return {key: value for key, value in (("residuals", residuals), ("factors", factors)) if value}

    def begin_step(self) -> None:
        """A step begins that `rollback` may undo."""
        super().begin_step()
        self._before = dict(self._factors)

    def commit(self) -> None:
        """The step was taken."""
        super().commit()
        self._before = None

    def rollback(self) -> None:
        """The step was skipped."""
        super().rollback()
        if self._before is not None:
            self._factors, self._before = self._before, None


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of `matrix` (rows, rank), rows >= rank; of zeros, some basis."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _rows_columns(param: ParamSlice) -> tuple[int, int]:
    return param.shape[0], math.prod(param.shape[1:])


def _of(flat: Tensor, param: ParamSlice) -> Tensor:
    return flat[param.offset : param.offset + param.numel]


def _matrix(flat: Tensor, param: ParamSlice) -> Tensor:
    return _of(flat, param).view(_rows_columns(param))


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)
