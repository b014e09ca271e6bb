"""Matrices as two thin factors."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.payload import ParamSlice, Payload


class PowerSgd(ErrorFeedback):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727), with warm start and error feedback.

    A matrix M (rows, columns) travels as P = M Q (rows, rank) and, with P made orthonormal, as Qᵀ = Pᵀ M:
    one step of subspace iteration from the last step's Q. Both are linear in M, so ranks may sum them by
    whatever follows in the stack. Tensors of more dimensions are matrices with their first dimension as rows;
    those whose factors would not be smaller, and vectors, travel as they are, beside P.

    A rank's residual is its own M - P Qᵀ with its own Q: it has the same sum over ranks as the paper's, which
    takes the mean Q, but it does not pile up the differences between ranks.

    All ranks have to compute the same P from the same sum. They do on equal machines with equal libraries.
    """

    role = "codec"
    rounds = 2

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.rank = rank  # columns of each factor
        self._last_qs: dict[str, Tensor] = {}  # by kind of payload and parameter: `kind/name`

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        numel = payload.tensor.numel()
        params = payload.params or (ParamSlice("", (numel,), 0, numel),)
        matrices = [param for param in params if self._is_compressible(param)]
        rest = [param for param in params if not self._is_compressible(param)]
        residual = self.residual(payload, comm.size)
        residual += payload.tensor
        dtype, result = payload.tensor.dtype, payload.tensor

        bases = [orthonormal_basis(self._last_q(payload.kind, param, residual)) for param in matrices]
        left_products = [
            _view_as_matrix(residual, param) @ base for param, base in zip(matrices, bases, strict=True)
        ]
        parts = [*left_products, *(param.of(residual) for param in rest)]
        message = torch.cat([part.reshape(-1) for part in parts]).to(dtype)
        compression_error = torch.zeros_like(message, dtype=residual.dtype)
        total = (await comm.reduce(message, (), compression_error)).to(residual.dtype)
        sizes = [part.numel() for part in parts]
        sums, errors = torch.split(total, sizes), torch.split(compression_error, sizes)
        for param, reduced, missing in zip(
            rest, sums[len(left_products) :], errors[len(left_products) :], strict=True
        ):
            param.of(result).copy_(reduced)
            param.of(residual).copy_(missing)
        if not left_products:
            return result

        left_bases = [
            orthonormal_basis(reduced.view_as(matrix))
            for reduced, matrix in zip(sums, left_products, strict=False)
        ]
        right_products = [
            _view_as_matrix(residual, param).T @ p for param, p in zip(matrices, left_bases, strict=True)
        ]
        message = torch.cat([matrix.reshape(-1) for matrix in right_products]).to(dtype)
        sent = message.to(residual.dtype, copy=True)
        compression_error = torch.zeros_like(sent)
        total = (await comm.reduce(message, (), compression_error)).to(residual.dtype)
        sent -= compression_error
        sizes = [matrix.numel() for matrix in right_products]
        shares, sums = torch.split(sent, sizes), torch.split(total, sizes)
        for param, p, mine, reduced, right in zip(
            matrices, left_bases, shares, sums, right_products, strict=True
        ):
            q = reduced.view_as(right)
            _view_as_matrix(result, param).copy_(p @ q.T)
            _view_as_matrix(residual, param).addmm_(p, mine.view_as(right).T, alpha=-1)
            self._store_q(payload.kind, param, q, residual)
        return result

    def _is_compressible(self, param: ParamSlice) -> bool:
        """Whether the factors of a parameter are smaller than it is."""
        if len(param.shape) < 2 or not param.numel:
            return False
        rows, columns = _rows_columns(param)
        return self.rank * (rows + columns) < rows * columns

    def _last_q(self, kind: str, param: ParamSlice, like: Tensor) -> Tensor:
        """The last step's Q of a matrix, (columns, rank); a random one, the same on all ranks, at first."""
        shape = (_rows_columns(param)[1], self.rank)
        known = self._last_qs.get(f"{kind}/{param.name}")
        # That of other rows will do, and another rank's: whatever Q each begins with, all use the same P.
        if known is not None and known.shape == shape:
            return known.to(like)
        seed = int.from_bytes(hashlib.sha256(f"{kind} {param.name}".encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

    def _store_q(self, kind: str, param: ParamSlice, q: Tensor, residual: Tensor) -> None:
        """Keep Q for the next step. One that is not finite comes of a matrix that is not, on all ranks: then
        the last Q stays, and the residual becomes zero.
        """
        lost = ~torch.isfinite(q).all()
        if not q.is_cpu or bool(lost):
            param.of(residual).masked_fill_(lost, 0.0)
            q = torch.where(lost, self._last_q(kind, param, q), q)
        self._last_qs[f"{kind}/{param.name}"] = q.clone()

    def state_dict(self) -> dict[str, Any]:
        """`residuals`, and as `factors` each matrix's last Q."""
        state = {"residuals": super().state_dict(), "factors": dict(self._last_qs)}
        return {key: value for key, value in state.items() if value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state.get("residuals", {}))
        self._last_qs = dict(state.get("factors", {}))

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The sum over ranks of their residuals; of each matrix the Q of the first rank that has one."""
        factors: dict[str, Tensor] = {}
        for state in reversed(states):
            factors |= state.get("factors", {})
        residuals = super().merge([state["residuals"] for state in states if "residuals" in state])
        merged = {"residuals": residuals, "factors": factors}
        return {key: value for key, value in merged.items() if value}


def orthonormal_basis(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of `matrix` (rows, rank), rows >= rank; of zeros, some basis."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _rows_columns(param: ParamSlice) -> tuple[int, int]:
    return param.shape[0], math.prod(param.shape[1:])


def _view_as_matrix(flat: Tensor, param: ParamSlice) -> Tensor:
    return param.of(flat).view(_rows_columns(param))
