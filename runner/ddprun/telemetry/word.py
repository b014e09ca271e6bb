"""The control word: the numbers that each rank tells all others about a step in which ranks synchronise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        return Spent(*map(add, self, other))


NOTHING_SPENT = Spent()
_CODE_AT, _SYNC_READY_AT, _STEPS_AT, _SPENT_AT = 4, 5, 6, 8
_READY_AT = _SPENT_AT + len(Spent._fields)

Numbers = NDArray[np.float64]


class Word(NamedTuple):
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

    steps: int = 1
    """Taken since the word before."""

    us: float = 0.0
    """How long these took, in microseconds."""

    spent: Spent = NOTHING_SPENT
    ready: Sequence[float] = ()
    """When gradient buckets were ready: those that `told_buckets` names, or none at all."""

    def numbers(self, places: int) -> list[float]:
        """As they travel; equally many on all ranks.

        Args:
            places: how many ready times there are, zeros if this rank has none.
        """
        wishes = self.stop + _CHECKPOINT * self.checkpoint
        ready = self.ready or [0.0] * places
        return [
            self.loss_sum,
            self.samples,
            wishes,
            self.compare_clocks,
            self.code,
            self.sync_ready,
            self.steps,
            self.us,
            *self.spent,
            *ready,
        ]


@dataclass(slots=True)
class Words:
    """Every rank's word about one step."""

    mean_loss: float
    """Over all samples of all ranks."""

    rank_losses: list[float]
    """Each rank's own mean."""

    samples: int
    """Of all ranks."""

    stop: bool
    """Some rank wants to stop."""

    checkpoint: bool
    """Some rank was asked for a checkpoint."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    codes: list[int]
    """Each rank's `Word.code`."""

    numbers: Numbers
    """Shape (ranks, numbers of a word)."""

    latest: list[float]
    """The largest of each of the numbers, over ranks."""

    @classmethod
    def of(cls, numbers: Numbers) -> "list[Words]":
        """The words of several steps.

        Args:
            numbers: of shape (steps, ranks, numbers of a word).
        """
        sums, samples, wishes, compare, codes = numbers[..., : _CODE_AT + 1].transpose(2, 0, 1)
        all_samples = samples.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):  # without samples there is no mean
            means, rank_means = sums.sum(1) / all_samples, sums / samples
        columns: tuple[Any, ...] = (
            means.tolist(),
            rank_means.tolist(),
            all_samples.astype(int).tolist(),
            (wishes % _CHECKPOINT > 0).any(1).tolist(),
            (wishes >= _CHECKPOINT).any(1).tolist(),
            (compare[:, 0] > 0).tolist(),
            codes.astype(int).tolist(),
            numbers,
            numbers.max(1).tolist(),
        )
        return [cls(*row) for row in zip(*columns, strict=True)]

    @property
    def met(self) -> bool:
        """Some payload was exchanged in the step."""
        return self.latest[_SYNC_READY_AT] != 0 or any(self.latest[_READY_AT:])

    @property
    def last_sync_ready(self) -> float:
        """When the last rank had the last payload beside backward ready; 0: there was none."""
        return self.latest[_SYNC_READY_AT]

    def all_ready(self, buckets: int) -> list[float]:
        """When the last rank had each gradient bucket ready; empty if no rank had one.

        Backward fills buckets in order, so one that is not told of was ready when the next one was.
        """
        latest = self.latest[_READY_AT:]
        if not any(latest):
            return []
        if buckets <= MOST_READY:
            return latest
        told = told_buckets(buckets)
        found, place = [], 0
        for bucket in range(buckets):
            place += bucket > told[place]
            found.append(latest[place])
        return found


def spent_of(numbers: Numbers) -> Numbers:
    """The parts of `Spent`: shape (…, parts), of words of shape (…, numbers of a word)."""
    return numbers[..., _SPENT_AT:_READY_AT]


def ready_of(numbers: Numbers) -> Numbers:
    """The ready times: shape (…, buckets told of), of words of shape (…, numbers of a word)."""
    return numbers[..., _READY_AT:]


def sync_ready_of(numbers: Numbers) -> Numbers:
    """The ready time of what was exchanged beside backward: shape (…, 1)."""
    return numbers[..., _SYNC_READY_AT : _SYNC_READY_AT + 1]


def usual_step_us(numbers: Numbers) -> float:
    """How long a step took, in the mean over ranks and over the steps that the words are about.

    Args:
        numbers: of shape (words, ranks, numbers of a word).
    """
    steps, us = numbers[..., _STEPS_AT:_SPENT_AT].sum((0, 1)).tolist()
    return float(us / max(1.0, steps))


def told_buckets(buckets: int) -> list[int]:
    """The gradient buckets whose ready times a word has."""
    if buckets <= MOST_READY:
        return list(range(buckets))
    return [math.ceil((place + 1) * buckets / MOST_READY) - 1 for place in range(MOST_READY)]
