"""The control message: the numbers that each rank tells all others about a step in which ranks synchronise.

Words travel as rows of one array. In each, the numbers in `SUMS` are added up since the word before; then
come wishes, what hooks have found, and moments, in microseconds of rank 0's clock; 0 stands for none.
"""

import math

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


class ControlMessages:
    """Every rank's words about several steps.

    Args:
        numbers: of shape (words, ranks, numbers of a word).
    """

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
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
    def samples(self) -> list[int]:
        """Of all ranks; of each word."""
        samples: list[int] = self._totals[:, SAMPLES_AT].astype(int).tolist()
        return samples

    @property
    def usual_step_us(self) -> float:
        """How long a step took, in the mean over ranks and over the steps that the words are about."""
        steps, us = self.numbers[..., STEPS_AT : US_AT + 1].sum((0, 1)).tolist()
        return float(us / max(1.0, steps))

    @property
    def wishes(self) -> int:
        """Of any rank in any word, but `COMPARE_CLOCKS` of rank 0 alone."""
        wishes = self.numbers[..., WISHES_AT]
        if not wishes.any():
            return 0
        of_ranks: list[int] = np.bitwise_or.reduce(wishes.astype(int), axis=0).tolist()
        found = of_ranks[0] & COMPARE_CLOCKS
        for of_rank in of_ranks:
            found |= of_rank & (STOP | CHECKPOINT)
        return found

    @property
    def codes(self) -> dict[int, list[int]]:
        """What each rank's hooks have found first, by word; of words in which some have found anything."""
        codes = self.numbers[..., CODE_AT]
        if not codes.any():
            return {}
        found: list[list[int]] = codes.astype(int).tolist()
        return {place: of_ranks for place, of_ranks in enumerate(found) if any(of_ranks)}

    @property
    def nonfinite(self) -> bool:
        """Whether some rank's loss was not finite in any of the steps."""
        return not np.isfinite(self.numbers[..., LOSS_AT]).all()

    def rank_losses(self, word: int) -> list[float]:
        """Each rank's own mean in one word."""
        with np.errstate(invalid="ignore", divide="ignore"):
            losses: list[float] = (
                self.numbers[word, :, LOSS_AT] / self.numbers[word, :, SAMPLES_AT]
            ).tolist()
        return losses

    @property
    def met(self) -> list[bool]:
        """Whether some payload was exchanged in the step; of each word."""
        met: list[bool] = np.any(self._latest, axis=1).tolist()
        return met

    @property
    def apart_us(self) -> list[float]:
        """From the first rank's having its last payload ready to the last one's: in backward, and beside it;
        of each word.
        """
        meetings = self.numbers[..., sorted({SYNC_READY_AT, self.numbers.shape[2] - 1})]
        apart: list[float] = (meetings.max(1) - meetings.min(1)).sum(1).tolist()
        return apart

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


def blank(messages: int, buckets: int) -> Numbers:
    """Words that say nothing, with room for the ready times of so many buckets."""
    return np.zeros((messages, READY_AT + buckets))


def told_buckets(buckets: int) -> list[int]:
    """The gradient buckets whose ready times a word has."""
    if buckets <= MOST_READY:
        return list(range(buckets))
    return [math.ceil((place + 1) * buckets / MOST_READY) - 1 for place in range(MOST_READY)]


def place_of(buckets: int) -> NDArray[np.int64]:
    """For each gradient bucket, which of the ready times in a word is its own, or the next one's."""
    return np.searchsorted(told_buckets(buckets), np.arange(buckets))
