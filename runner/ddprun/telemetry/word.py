"""The control word: the numbers that each rank tells all others about a step in which ranks synchronise.

Words travel as rows of one array. In each, the numbers in `SUMS` are added up since the word before; then
come wishes, what hooks have found, and moments, in microseconds of rank 0's clock; 0 stands for none.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_READY = 64
"""Ready times in a word at most; of more buckets they are those of every n-th, and of the last."""

STOP, CHECKPOINT, COMPARE_CLOCKS = 1, 2, 4
"""Wishes; their sum is told."""

SPENT = ("data_us", "forward_us", "backward_us", "hook_us", "optimizer_us", "sync_us", "other_us")
"""Time of the training thread's own: without what it waited, and all parts but `hook_us` without hooks."""

SUMS = ("loss_sum", "samples", "steps", "us", *SPENT)
"""`us`: how long the steps took."""

LOSS_AT, SAMPLES_AT, STEPS_AT, US_AT, SPENT_AT = range(5)
WISHES_AT = len(SUMS)
CODE_AT, SYNC_READY_AT, READY_AT = range(WISHES_AT + 1, WISHES_AT + 4)
"""Where in a word are: the first payload that did not come back finite (`telemetry.overflow`); when the last
payload beside backward was ready; when gradient buckets were ready, those that `told_buckets` names, zeros if
this rank exchanged none.
"""

Numbers = NDArray[np.float64]


class Heard(NamedTuple):
    """What ranks have told about one step."""

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
    """What each rank's hooks have found first; empty: nothing on any rank."""

    met: bool
    """Some payload was exchanged in the step."""

    apart_us: float
    """From the first rank's having its last payload ready to the last one's: in backward, and beside it."""

    numbers: Numbers
    """Shape (ranks, numbers of a word)."""


class Words:
    """Every rank's words about several steps.

    Args:
        numbers: of shape (words, ranks, numbers of a word).
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._latest: Numbers = numbers[..., SYNC_READY_AT:].max(1)
        # The order of additions must not depend on how many words there are: `sum` would choose one.
        self._totals: Numbers = np.add.accumulate(numbers[..., : SAMPLES_AT + 1], axis=1)[:, -1]
        with np.errstate(invalid="ignore", divide="ignore"):  # without samples there is no mean
            self._means = self._totals[:, LOSS_AT] / self._totals[:, SAMPLES_AT]

    @property
    def mean_losses(self) -> list[float]:
        """Over all samples of all ranks; of each word."""
        means: list[float] = self._means.tolist()
        return means

    @property
    def usual_step_us(self) -> float:
        """How long a step took, in the mean over ranks and over the steps that the words are about."""
        steps, us = self._numbers[..., STEPS_AT : US_AT + 1].sum((0, 1)).tolist()
        return float(us / max(1.0, steps))

    def heard(self) -> Iterator[Heard]:
        """Of each word, what it comes to."""
        numbers = self._numbers
        wishes, codes = numbers[..., WISHES_AT].astype(int), numbers[..., CODE_AT]
        met: NDArray[np.bool_] = np.any(self._latest, axis=1)
        meetings = numbers[..., sorted({SYNC_READY_AT, numbers.shape[2] - 1})]
        of_any: list[int] = np.bitwise_or.reduce(wishes, axis=1).tolist()
        with np.errstate(invalid="ignore", divide="ignore"):
            rank_losses = numbers[..., LOSS_AT] / numbers[..., SAMPLES_AT]
        return map(
            Heard,
            self.mean_losses,
            rank_losses.tolist(),
            self._totals[:, SAMPLES_AT].astype(int).tolist(),
            [wish & STOP > 0 for wish in of_any],
            [wish & CHECKPOINT > 0 for wish in of_any],
            [wish & COMPARE_CLOCKS > 0 for wish in wishes[:, 0].tolist()],
            codes.astype(int).tolist() if codes.any() else [[]] * len(numbers),
            met.tolist(),
            (meetings.max(1) - meetings.min(1)).sum(1).tolist(),
            list(numbers),
        )

    def all_ready(self, buckets: int) -> Numbers:
        """When the last rank had each gradient bucket ready; zeros where no rank had one.

        Backward fills buckets in order, so one that is not told of was ready when the next one was.

        Args:
            buckets: how many there are.

        Returns:
            Shape (words, buckets).
        """
        ready: Numbers = self._latest[:, READY_AT - SYNC_READY_AT :][:, place_of(buckets)]
        return ready

    def last_sync_ready(self) -> Numbers:
        """When the last rank had the last payload beside backward ready; 0: there was none.

        Returns:
            Shape (words,).
        """
        last: Numbers = self._latest[:, 0]
        return last


def spent_of(numbers: Numbers) -> Numbers:
    """The parts in `SPENT`: shape (…, parts), of words of shape (…, numbers of a word)."""
    return numbers[..., SPENT_AT:WISHES_AT]


def ready_of(numbers: Numbers) -> Numbers:
    """The ready times: shape (…, buckets told of), of words of shape (…, numbers of a word)."""
    return numbers[..., READY_AT:]


def sync_ready_of(numbers: Numbers) -> Numbers:
    """The ready time of what was exchanged beside backward: shape (…, 1)."""
    return numbers[..., SYNC_READY_AT : SYNC_READY_AT + 1]


def blank(words: int, buckets: int) -> Numbers:
    """Words that say nothing, with room for the ready times of so many buckets."""
    return np.zeros((words, READY_AT + buckets))


def told_buckets(buckets: int) -> list[int]:
    """The gradient buckets whose ready times a word has."""
    if buckets <= MOST_READY:
        return list(range(buckets))
    return [math.ceil((place + 1) * buckets / MOST_READY) - 1 for place in range(MOST_READY)]


def place_of(buckets: int) -> NDArray[np.int64]:
    """For each gradient bucket, which of the ready times in a word is its own, or the next one's."""
    return np.searchsorted(told_buckets(buckets), np.arange(buckets))
