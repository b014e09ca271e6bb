"""The smallest code of each bucket whose mean is near enough to the exact one."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks.builtin.cast import CastFormat
from ddprun_hooks.builtin.error_feedback import ErrorFeedback
from ddprun_hooks.builtin.two_phase import Int2, Int4, Int8, TwoPhaseReduction, WireFormat
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.payload import Payload

FORMATS: dict[str, WireFormat] = {
    "int2": Int2(128),
    "int4": Int4(64),
    "int8": Int8(256),
    "bf16": CastFormat(torch.bfloat16),
}
_NAMES = list(FORMATS)
_STRIDE = 61  # of so many values one is measured; in a matrix, rarely of one column alone
_PATIENCE = 2  # measurements above the floor before a smaller code is tried


@dataclass
class _Choice:
    """The code of a bucket, and how measurements of it went."""

    code: str = "int8"
    exchanges: int = 0  # since the last measurement
    above: int = 0  # measurements above the floor since the last change
    patience: int = _PATIENCE
    tried: bool = False  # smaller than the code before it, and not measured yet

    def judge(self, cosine: float | None, floor: float) -> None:
        """Take the next larger code if the mean is too far off. Try the next smaller one after enough
        measurements that are near enough: twice as many each time that one has failed at once.
        """
        if cosine is None:
            return
        place, self.above = _NAMES.index(self.code), self.above + 1 if cosine >= floor else 0
        if not self.above:
            self.patience *= 2 if self.tried else 1
            self.code = _NAMES[min(place + 1, len(_NAMES) - 1)]
        self.tried = place > 0 and self.above >= self.patience
        if self.tried:
            self.above, self.code = 0, _NAMES[place - 1]


_Key = tuple[str, int, str]  # kind of payload, bucket, and the group of ranks: all of them choose alike


class AutoBits(ErrorFeedback):
    """Codes of 2, 4, 8 or 16 bits in two phases: for each bucket the smallest whose mean stays above a floor.

    Every so many exchanges, one of 61 values is sent exactly, too, to the rank that owns its share, and what
    that rank finds travels with the codes of its sums. So all ranks know the same cosine, and decide alike.
    Nothing depends on time: a run can be repeated.
    """

    role = "reducer"
    rounds = 2

    def __init__(self, floor: float = 0.99, every: int = 50) -> None:
        super().__init__()
        self.floor = floor  # of the cosine between the mean and the exact one, in (0, 1)
        self.every = every  # exchanges of a bucket, from one measurement to the next
        self._choices: dict[_Key, _Choice] = {}
        self._choices_before_step: dict[_Key, _Choice] | None = None

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        if not payload.tensor.numel():
            return payload.tensor
        residual = self.residual(payload, comm.size)
        choice = self._choices.setdefault((payload.kind, payload.bucket, comm.group.name), _Choice())
        wire_format = FORMATS[choice.code]
        make = wire_format.reduction_class(payload.tensor, residual)
        reduction = make(wire_format, payload.tensor, residual, comm.rank, comm.size)
        choice.exchanges = choice.exchanges % self.every + 1
        measures = choice.exchanges == self.every and not payload.tensor.is_meta
        if not measures:
            arrived = await comm.all_to_all(reduction.encode())
            return reduction.decode(await comm.all_gather(reduction.sum_and_encode(arrived)))
        sample = _sample(payload.tensor, reduction)
        both = await comm.all_to_all(_beside(reduction.encode(), sample))
        arrived, samples = _split(both, sample, comm.size)
        message = reduction.sum_and_encode(arrived.view(wire_format.dtype))
        products = _products(wire_format, message, samples)
        both = await comm.all_gather(_beside(message, products))
        gathered, products = _split(both, products, comm.size)
        choice.judge(_cosine(products), self.floor)
        return reduction.decode(gathered.view(wire_format.dtype))

    def choices(self) -> dict[tuple[str, int], str]:
        return {key[:2]: choice.code for key, choice in self._choices.items()}

    def state_dict(self) -> dict[str, Any]:
        """The residuals, and the choices."""
        choices = [{"key": list(key), **asdict(choice)} for key, choice in self._choices.items()]
        return {"residuals": super().state_dict(), "choices": choices} if choices else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state.get("residuals", {}))
        self._choices = {}
        for choice in state.get("choices", []):
            kind, bucket, group = choice["key"]
            settings = {name: value for name, value in choice.items() if name != "key"}
            self._choices[kind, bucket, group] = _Choice(**settings)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of choices, rank 0's: for other buckets and ranks a place to begin at, as good as any."""
        if not states:
            return {}
        return {**states[0], "residuals": super().merge([state["residuals"] for state in states])}

    def begin_step(self) -> None:
        super().begin_step()
        self._choices_before_step = copy.deepcopy(self._choices)

    def rollback(self) -> None:
        if self._choices_before_step is not None:
            self._choices = self._choices_before_step
        super().rollback()

    def commit(self) -> None:
        super().commit()
        self._choices_before_step = None


def _sample(payload: Tensor, reduction: TwoPhaseReduction) -> Tensor:
    """Every 61st value of each rank's share, fp32, shape (ranks, n); zeros beyond the payload's end."""
    length, device = reduction.blocks_per_share * reduction.wire_format.block, payload.device
    starts = torch.arange(reduction.group_size, device=device) * length
    places = starts.unsqueeze(1) + torch.arange(0, length, _STRIDE, device=device)
    return torch.where(places < len(payload), payload[places.clamp(max=len(payload) - 1)], 0).float()


def _products(wire_format: WireFormat, message: Tensor, samples: Tensor) -> Tensor:
    """The products <h, e>, <h, h> and <e, e> of a share's mean and the exact one, fp64, shape (1, 3)."""
    h = wire_format.decode(message.view(1, -1), torch.float32).view(-1)[::_STRIDE].double()
    e = samples.double().sum(0)
    return torch.stack([h @ e, h @ h, e @ e]).view(1, 3)


def _cosine(products: Tensor) -> float | None:
    """Of all shares' products, shape (ranks, 3). None: the exact mean is 0, or one of both is not finite."""
    both, of_mean, of_exact = (math.fsum(column) for column in products.T.tolist())
    if not math.isfinite(both + of_mean + of_exact) or of_exact == 0:
        return None
    return both / math.sqrt(of_mean * of_exact) if of_mean else 0.0


def _beside(message: Tensor, more: Tensor) -> Tensor:
    """A message with `more`, shape (rows, n), as bytes: a part of each in every row."""
    rows = message.view(torch.uint8).view(len(more), -1)
    return torch.cat([rows, more.view(torch.uint8)], 1).view(-1)


def _split(both: Tensor, more: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The messages and what lies beside them, as `more`, of each of so many ranks."""
    rows = both.view(size, -1)
    end = rows.shape[1] - more.shape[1] * more.element_size()
    messages, others = (
        part.clone(memory_format=torch.contiguous_format) for part in (rows[:, :end], rows[:, end:])
    )
    return messages.view(-1), others.view(more.dtype)
