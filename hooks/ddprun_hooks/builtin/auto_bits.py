"""The smallest code of each bucket whose mean is near enough to the exact one."""

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
_FORMAT_NAMES = list(FORMATS)
_STRIDE = 61  # of so many values one is measured; in a matrix, rarely of one column alone
_MIN_SAMPLE = 64  # values; of a bucket with fewer, all are measured
_PATIENCE = 2  # measurements above the floor before a smaller code is tried


@dataclass
class _FormatChoice:
    """The code of a bucket, and how measurements of it went."""

    code: str = "int8"
    exchanges: int = 0  # since the last measurement
    above: int = 0  # measurements above the floor since the last change
    patience: int = _PATIENCE
    tried: bool = False  # smaller than the code before it, and not measured yet

    def choose_next_format(self, cosine: float | None, floor: float) -> None:
        """Take the next larger code if the mean is too far off. Try the next smaller one after enough
        measurements that are near enough: twice as many each time that one has failed at once.
        """
        if cosine is None:
            return
        place, self.above = _FORMAT_NAMES.index(self.code), self.above + 1 if cosine >= floor else 0
        if not self.above:
            self.patience *= 2 if self.tried else 1
            self.code = _FORMAT_NAMES[min(place + 1, len(_FORMAT_NAMES) - 1)]
        self.tried = place > 0 and self.above >= self.patience
        if self.tried:
            self.above, self.code = 0, _FORMAT_NAMES[place - 1]


_ChoiceKey = tuple[str, int, int, str]
"""Kind of payload, bucket, number of values (of a codec's parts of a bucket), and the group of ranks, all of
which choose alike."""


class AutoBits(ErrorFeedback):
    """Codes of 2, 4, 8 or 16 bits in two phases: for each bucket the smallest whose mean stays above a floor.

    Every so many exchanges, one of 61 values is sent exactly, too, to the rank that owns its share, and what
    that rank finds travels with the codes of its sums. So all ranks know the same cosine before the bucket's
    next exchange, and decide alike. Nothing depends on time: a run can be repeated.
    """

    role = "reducer"
    rounds = 2

    def __init__(self, floor: float = 0.99, every: int = 50) -> None:
        super().__init__()
        self.floor = floor  # of the cosine between the mean and the exact one, in (0, 1)
        self.every = every  # exchanges of a bucket, from one measurement to the next
        self._choices: dict[_ChoiceKey, _FormatChoice] = {}
        self._measured: dict[_ChoiceKey, Tensor] = {}  # products of the last exchange, shape (ranks, 3)
        self._used: dict[_ChoiceKey, str] = {}  # the code of the last exchange

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        residual = self.residual(payload, comm.size)
        key = payload.kind, payload.bucket, payload.tensor.numel(), comm.group.name
        choice = self._choices.setdefault(key, _FormatChoice())
        self._apply_measurement(key)
        self._used[key] = choice.code
        wire_format = FORMATS[choice.code]
        reduction = wire_format.make_reduction(payload.tensor, residual, comm)
        choice.exchanges = choice.exchanges % self.every + 1
        if choice.exchanges < self.every or payload.tensor.is_meta:
            arrived = await comm.all_to_all(reduction.encode())
            gathered = await comm.all_gather(reduction.sum_and_encode(arrived))
        else:
            stride = _STRIDE if len(payload.tensor) >= _STRIDE * _MIN_SAMPLE else 1
            sample = _sample(payload.tensor, reduction, stride)
            both = await comm.all_to_all(_append_to_rows(reduction.encode(), sample))
            arrived, samples = _split_rows(both, sample, comm.size)
            message = reduction.sum_and_encode(arrived.view(wire_format.dtype))
            products = _products(wire_format, message, samples, stride)
            both = await comm.all_gather(_append_to_rows(message, products))
            gathered, self._measured[key] = _split_rows(both, products, comm.size)
            gathered = gathered.view(wire_format.dtype)
        payload.findings.extend(wire_format.findings(payload.tensor, gathered))
        return reduction.decode(gathered)

    def _apply_measurement(self, key: _ChoiceKey) -> None:
        """Judge what was measured in the bucket's last exchange: now a GPU surely has it."""
        if (products := self._measured.pop(key, None)) is not None:
            self._choices[key].choose_next_format(_cosine(products), self.floor)

    def choices(self) -> dict[tuple[str, int], str]:
        """The codes of each bucket's last exchange."""
        used: dict[tuple[str, int], str] = {}
        for (kind, bucket, _, _), code in [*self._used.items()]:  # another thread may add one
            used[kind, bucket] = f"{used[kind, bucket]}, {code}" if (kind, bucket) in used else code
        return used

    def state_dict(self) -> dict[str, Any]:
        """The residuals, and the choices."""
        for key in [*self._measured]:
            self._apply_measurement(key)
        choices = {"/".join(map(str, key)): asdict(choice) for key, choice in self._choices.items()}
        return {"residuals": super().state_dict(), "choices": choices} if choices else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state.get("residuals", {}))
        self._choices, self._measured, self._used = {}, {}, {}
        for key, choice in state.get("choices", {}).items():
            kind, bucket, numel, group = key.split("/", 3)
            self._choices[kind, int(bucket), int(numel), group] = _FormatChoice(**choice)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of choices, rank 0's: for other buckets and ranks a place to begin at, as good as any."""
        if not states:
            return {}
        return {**states[0], "residuals": super().merge([state["residuals"] for state in states])}


def _sample(payload: Tensor, reduction: TwoPhaseReduction, stride: int) -> Tensor:
    """Some values of each rank's share, fp32, shape (ranks, n); zeros beyond the payload's end."""
    length, device = reduction.share_length, payload.device
    starts = torch.arange(reduction.group_size, device=device) * length
    places = starts.unsqueeze(1) + torch.arange(0, length, stride, device=device)
    return torch.where(places < len(payload), payload[places.clamp(max=len(payload) - 1)], 0).float()


def _products(wire_format: WireFormat, message: Tensor, samples: Tensor, stride: int) -> Tensor:
    """The products <h, e>, <h, h> and <e, e> of a share's mean and the exact one, fp64, shape (1, 3)."""
    h = wire_format.decode(message.view(1, -1), torch.float32).view(-1)[::stride].double()
    e = samples.double().sum(0)
    return torch.stack([h @ e, h @ h, e @ e]).view(1, 3)


def _cosine(products: Tensor) -> float | None:
    """Of all shares' products, shape (ranks, 3). None: the exact mean is 0, or one of both is not finite."""
    both, of_mean, of_exact = (sum(column) for column in products.T.tolist())
    if not math.isfinite(both + of_mean + of_exact) or of_exact == 0:
        return None
    return both / math.sqrt(of_mean * of_exact) if of_mean else 0.0


def _append_to_rows(message: Tensor, more: Tensor) -> Tensor:
    """A message with `more`, shape (rows, n), as bytes: a part of each in every row."""
    rows = message.view(torch.uint8).view(len(more), -1)
    return torch.cat([rows, more.view(torch.uint8)], 1).view(-1)


def _split_rows(both: Tensor, more: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The messages and what lies beside them, as `more`, of each of so many ranks."""
    rows = both.view(size, -1)
    end = rows.shape[1] - more.shape[1] * more.element_size()
    messages, others = (
        part.clone(memory_format=torch.contiguous_format) for part in (rows[:, :end], rows[:, end:])
    )
    return messages.view(-1), others.view(more.dtype)
