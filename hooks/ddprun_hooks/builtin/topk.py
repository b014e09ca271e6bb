"""The largest values only, with their indices."""

import math

import torch
from torch import Tensor

from ddprun_hooks import kernels
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.comm.communicator import Communicator, view_per_rank
from ddprun_hooks.errors import ExchangeError
from ddprun_hooks.payload import Payload

_MIN_KERNEL_NUMEL = 1 << 20  # values; of fewer, starting six kernels should take longer than they save
_MAX_NUMEL = (1 << 31) - (1 << 20)  # values: indices have 32 bits, and a kernel's go as far beyond the last


class TopK(ErrorFeedback):
    """Each rank sends its values of largest magnitude in a bucket, and keeps the rest for the next step.

    Sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599). Values travel in the payload's own type,
    each with its index in 32 bits; the ranks' values are added in rank order.
    """

    role = "reducer"

    def __init__(self, density: float = 0.01) -> None:
        super().__init__()
        self.density = density  # share of a bucket's values that each rank sends, in (0, 1]; at least one

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        dtype, numel = payload.tensor.dtype, payload.tensor.numel()
        if numel > _MAX_NUMEL:
            raise ExchangeError(
                f"topk sends indices of 32 bits, so a bucket has at most {_MAX_NUMEL:,} values; bucket "
                f"{payload.bucket} has {numel:,}: set ddp.bucket_cap_mb lower, or use another hook"
            )
        residual = self.residual(payload, comm.size)
        count = math.ceil(self.density * numel)
        gathered = await comm.all_gather(encode_largest(payload.tensor, residual, count))

        total = torch.zeros_like(residual)
        for part in view_per_rank(gathered, comm.size):
            indices, values = part[: 4 * count].clone(), part[4 * count :].clone()  # aligned
            total.index_add_(0, indices.view(torch.int32).long(), values.view(dtype).to(residual.dtype))
        return payload.tensor.copy_(total)


def encode_largest(payload: Tensor, residual: Tensor, count: int) -> Tensor:
    """Add `payload` to `residual`, take the `count` largest, and leave in `residual` what was not sent. Gives
    the message: indices, int32, then values of the payload's type, as bytes.
    """
    if payload.numel() >= _MIN_KERNEL_NUMEL and kernels.can_handle_tensors(payload, residual):
        from ddprun_hooks.kernels import largest

        return largest.encode_largest(payload, residual, count)
    residual += payload
    indices = residual.abs().topk(count, sorted=False).indices
    values = residual[indices].to(payload.dtype)
    residual[indices] -= values.to(residual.dtype)
    drop_not_finite(residual, values)
    return torch.cat([indices.int().view(torch.uint8), values.view(torch.uint8)])


def drop_not_finite(residual: Tensor, sent: Tensor) -> None:
    """Keep nothing of values that are not finite: NaN and infinity count as the largest, so one was sent."""
    if not residual.is_cpu or not bool(torch.isfinite(sent).all()):
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
