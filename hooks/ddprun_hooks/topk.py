"""The largest values only, with their places."""

import math

import torch
from torch import Tensor

from ddprun_hooks.payload import Payload
from ddprun_hooks.residuals import ErrorFeedback
from ddprun_hooks.stack import Link


class TopK(ErrorFeedback):
    """Each rank sends its values of largest magnitude in a bucket, and keeps the rest for the next step.

    Sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599). Values travel in the payload's own type,
    each with its index in 32 bits; the ranks' values are added in rank order.

    Args:
        density: share of a bucket's values that each rank sends, in (0, 1]; at least one value.
    """

    role = "reducer"

    def __init__(self, density: float = 0.01) -> None:
        super().__init__()
        self.density = density

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        world, dtype = link.world, payload.tensor.dtype
        kept = self.residuals.slot(payload, world.size)
        kept += payload.tensor
        count = math.ceil(self.density * kept.numel())
        places = kept.abs().topk(count, sorted=False).indices
        values = kept[places].to(dtype)
        kept[places] -= values.to(kept.dtype)
        drop_not_finite(kept, values)

        message = torch.cat([places.int().view(torch.uint8), values.view(torch.uint8)])
        gathered = await world.all_gather(message)

        total = torch.zeros_like(kept)
        for part in gathered.view(world.size, -1):
            places, values = part[: 4 * count].clone(), part[4 * count :].clone()  # aligned
            total.index_add_(0, places.view(torch.int32).long(), values.view(dtype).to(kept.dtype))
        return payload.tensor.copy_(total)


def drop_not_finite(kept: Tensor, sent: Tensor) -> None:
    """Keep nothing, in place, of values that are not finite: as many as fit were passed on.

    NaN and infinity count as the largest, so if there are any, one is among those sent.
    """
    if kept.is_cuda or not bool(torch.isfinite(sent).all()):
        kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
