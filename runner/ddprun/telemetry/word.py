"""The control word: the numbers that each rank tells all others about a step in which ranks synchronise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MOST_READY = 64
"""Ready times in a word at most; of more buckets they are those of every n-th, and of the last."""

_CHECKPOINT = 2  # beside 1, the wish to stop


class Spent(NamedTuple):
    """Time of a training thread's own since the word before, in microseconds: without what it waited."""

    data_us: float = 0.0
    forward_us: float = 0.0
    backward_us: float = 0.0
    hook_us: float = 0.0
    """Hooks on the training thread; the other parts are without it."""

    optimizer_us: float = 0.0
    sync_us: float = 0.0
    other_us: float = 0.0

    def plus(self, other: "Spent") -> "Spent":
        """Both together."""
        return Spent(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING_SPENT = Spent()
_READY_AT = 6 + len(Spent._fields)


@dataclass(frozen=True, slots=True)
class Word:
    """What one rank tells. Moments are microseconds of rank 0's clock; 0 stands for none."""

    loss_sum: float
    """Over the samples since the word before."""

    samples: int
    stop: bool = False
    checkpoint: bool = False
    compare_clocks: bool = False
    code: int = 0
    """The first payload that did not come back finite (`telemetry.overflow`)."""

    sync_ready: float = 0.0
    """When the last payload beside backward was ready."""

    spent: Spent = NOTHING_SPENT
    ready: Sequence[float] = ()
    """When gradient buckets were ready: those that `told_buckets` names, or none at all."""

    def numbers(self, buckets: int) -> list[float]:
        """As they travel; equally many on all ranks.

        Args:
            buckets: gradient buckets of the stage.
        """
        wishes = self.stop + _CHECKPOINT * self.checkpoint
        ready = self.ready or [0.0] * len(told_buckets(buckets))
        return [
            self.loss_sum,
            self.samples,
            wishes,
            self.compare_clocks,
            self.code,
            self.sync_ready,
            *self.spent,
            *ready,
        ]


@dataclass(frozen=True, slots=True)
class Words:
    """Every rank's word about one step."""

    numbers: Tensor
    """Shape (ranks, numbers of a word), float64."""

    @property
    def mean_loss(self) -> float:
        """Over all samples of all ranks."""
        return float(self.numbers[:, 0].sum() / self.numbers[:, 1].sum())

    @property
    def rank_losses(self) -> tuple[float, ...]:
        """Each rank's own mean."""
        return tuple((self.numbers[:, 0] / self.numbers[:, 1]).tolist())

    @property
    def stop(self) -> bool:
        """Some rank wants to stop."""
        return bool((self.numbers[:, 2] % _CHECKPOINT).any())

    @property
    def checkpoint(self) -> bool:
        """Some rank was asked for a checkpoint."""
        return bool((self.numbers[:, 2] >= _CHECKPOINT).any())

    @property
    def compare_clocks(self) -> bool:
        """Rank 0 wants the clocks compared again."""
        return bool(self.numbers[0, 3])

    @property
    def codes(self) -> list[int]:
        """Each rank's `Word.code`."""
        return [int(code) for code in self.numbers[:, 4].tolist()]

    @property
    def sync_ready(self) -> Tensor:
        """Shape (ranks,)."""
        return self.numbers[:, 5]

    @property
    def spent(self) -> Tensor:
        """Shape (ranks, parts of `Spent`)."""
        return self.numbers[:, 6:_READY_AT]

    @property
    def ready(self) -> Tensor:
        """Shape (ranks, buckets told of)."""
        return self.numbers[:, _READY_AT:]

    def all_ready(self, buckets: int) -> list[float]:
        """When the last rank had each gradient bucket ready; empty if no rank had one.

        Backward fills buckets in order, so one that is not told of was ready when the next one was.
        """
        if not self.ready.any():
            return []
        latest = self.ready.amax(0).tolist()
        told = told_buckets(buckets)
        found, place = [], 0
        for bucket in range(buckets):
            place += bucket > told[place]
            found.append(latest[place])
        return found


def told_buckets(buckets: int) -> list[int]:
    """The gradient buckets whose ready times a word has."""
    if buckets <= MOST_READY:
        return list(range(buckets))
    return [math.ceil((place + 1) * buckets / MOST_READY) - 1 for place in range(MOST_READY)]
