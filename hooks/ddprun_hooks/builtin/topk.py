"""The largest values only, with their indices."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddprun_hooks.builtin import elias_fano
from ddprun_hooks.builtin.cast import CastFormat
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.builtin.two_phase import Int2, Int8, WireFormat
from ddprun_hooks.comm.communicator import Communicator, view_per_rank
from ddprun_hooks.payload import Payload

ValueFormat = Literal["fp32", "bf16", "int8", "int2"]


class TopK(ErrorFeedback):
    """Each rank sends the values of largest magnitude in each chunk of a bucket, and keeps the rest for the
    next step. The ranks' values are added in rank order.

    Sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599). With chunks, values in 2 bits and decay
    it is the compression of SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706).
    """

    role = "reducer"

    def __init__(
        self, density: float = 0.01, chunk: int = 4096, values: ValueFormat | None = None, decay: float = 1.0
    ) -> None:
        super().__init__()
        self.density = density  # share of a chunk's values that each rank sends, in (0, 1]; at least one
        self.chunk = chunk  # the most values of a chunk; those of a bucket are equally long
        self.values = values  # how values travel; None: in the payload's own type
        self.decay = decay  # part of the residual that a step keeps, in [0, 1]

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        residual = self.residual(payload, comm.size)
        if self.decay != 1.0:
            residual *= self.decay
        layout = ChunkLayout.for_payload(payload.tensor, self.chunk, self.density, self.values)
        gathered = await comm.all_gather(layout.encode_largest(payload.tensor, residual))
        total = residual.new_zeros(layout.count, layout.length)
        for part in view_per_rank(gathered, comm.size):
            layout.add(part.clone(), total)  # a clone is aligned
        return payload.tensor.copy_(total.view(-1)[: payload.tensor.numel()])


@dataclass(frozen=True)
class ChunkLayout:
    """How a bucket is cut: into equally long chunks, of which the last one is padded with zeros."""

    count: int
    length: int  # values of a chunk
    k: int  # of which so many are sent
    format: WireFormat  # of k values, together

    @classmethod
    def for_payload(
        cls, payload: Tensor, most: int, density: float, values: ValueFormat | None
    ) -> "ChunkLayout":
        count = -(-payload.numel() // most)
        length = -(-payload.numel() // count)
        k = math.ceil(density * length)
        return cls(count, length, k, _value_format(values, payload.dtype, k))

    def encode_largest(self, payload: Tensor, residual: Tensor) -> Tensor:
        """Add `payload` to `residual`, both (numel,), and take the largest values of each chunk out of it.
        Gives the message: values, then indices, as bytes.
        """
        residual += payload
        sizes = pad(residual.abs(), (0, self.count * self.length - len(residual)))
        indices = sizes.view(self.count, -1).topk(self.k, sorted=False).indices.sort().values
        starts = torch.arange(self.count, device=indices.device).unsqueeze(1) * self.length
        places = (starts + indices).view(-1)
        inside, places = places < len(residual), places.clamp(max=len(residual) - 1)
        values = torch.where(inside, residual[places], 0.0)
        encoded = self.format.encode(values)
        sent = torch.where(inside, self.format.decode(encoded, residual.dtype), 0.0)
        residual.index_add_(0, places, sent, alpha=-1)  # beyond the end zeros go to the last value
        # NaN and infinity count as the largest: one was sent. On a GPU to look would be to wait for it.
        if not residual.is_cpu or not bool(torch.isfinite(values).all()):
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return torch.cat([encoded.view(torch.uint8), elias_fano.encode(indices, self.length)])

    def add(self, message: Tensor, total: Tensor) -> None:
        """Add the values of a message to `total`, shape (count, length)."""
        values_end = len(message) - elias_fano.encoded_bytes(self.count, self.k, self.length)
        values = self.format.decode(message[:values_end].view(self.format.dtype), total.dtype)
        indices = elias_fano.decode(message[values_end:], self.count, self.k, self.length)
        total.scatter_add_(1, indices, values.view(self.count, self.k))


def _value_format(values: ValueFormat | None, own: torch.dtype, k: int) -> WireFormat:
    if values == "int8":
        return Int8(k)
    if values == "int2":
        return Int2(k)
    return CastFormat({"bf16": torch.bfloat16, "fp32": torch.float32, None: own}[values])
