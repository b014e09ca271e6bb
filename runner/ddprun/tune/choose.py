"""Which candidates are run for real, which of them are out, and which one wins: pure functions of figures."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddprun.compare.compare import Ratio
from ddprun.predict.model import Predicted
from ddprun.tune.candidates import KINDS, Candidate

_GAIN = 0.02  # of a step's time: candidates that are not predicted to gain more are not run
_ERROR = (
    0.1  # of a step's time: a prediction may miss by so much, so what gains less is no winner by it alone
)
_SPREAD = 4  # of two periods that are tried at once, the shorter is at most one of so many of the longer
LATE = 0.75  # of the steps: the loss that the file then has is what candidates are to come to
_LOSS = re.compile(r"\+?(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Floors:
    """What a candidate must not fall below."""

    cosine: float | None = None
    """Of the mean gradient with hooks and the exact mean."""

    loss: float | None = None
    """By which share the training loss, over equal samples, may be above that of the file as it is."""


def parse_floors(texts: Sequence[str]) -> Floors:
    """Floors as a command line says them: `cosine=0.99`, `loss=+1%`.

    Raises:
        ValueError: neither, with what is allowed.
    """
    cosine = loss = None
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name == "cosine" and cosine is None:
            cosine = _share(value)
        elif name == "loss" and loss is None and (found := _LOSS.fullmatch(value)) is not None:
            loss = float(found[1]) / 100
        else:
            raise ValueError(f'"{text}" is not a floor; write cosine=0.99 or loss=+1%, each at most once')
    return Floors(cosine, loss)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError(f'"cosine={text}": a cosine floor is above 0 and at most 1, as in cosine=0.99')
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate and what is predicted of it."""

    candidate: Candidate
    predicted: Predicted

    @property
    def us_per_sample(self) -> float:
        """Of training time, predicted: candidates may take other numbers of samples in a step."""
        return self.predicted.step_us / self.candidate.samples


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out of a candidate's real run, beside one of the file as it is."""

    entry: Entry
    run_dir: Path
    code: int | None
    verdict: str  # on speed, in `compare`'s words
    ratio: Ratio | None  # of speeds per sample: how many times as fast as the file as it is
    step_s: float | None
    spread_s: float | None  # half the distance between the quartiles of turns
    cosine: float | None  # None: not measured
    loss: float | None
    loss_of_file: float | None  # over the same samples
    to_loss: float | None = None
    """How many times as fast, per time and not per sample, it comes to the loss that the file has after
    `LATE` of its samples; 0: it does not in its run. None: not known."""

    finite: bool = True

    @property
    def speed(self) -> float:
        """How many times as fast as the file as it is."""
        return self.ratio.mean if self.ratio is not None else 0.0

    def gain(self, floors: Floors) -> float:
        """How many times as fast it trains. What changes training counts by how soon it comes to a loss,
        unless there is a floor for that.
        """
        if self.entry.candidate.kind == "exact" or floors.loss is not None:
            return self.speed
        return min(self.speed, self.to_loss or 0.0)

    @property
    def loss_above(self) -> float | None:
        """By which share its loss is above the file's; None: not known."""
        if self.loss is None or self.loss_of_file is None:
            return None
        size = abs(self.loss_of_file)
        difference = self.loss - self.loss_of_file
        return difference / size if size else math.copysign(math.inf, difference) if difference else 0.0


def why_out(trial: Trial, floors: Floors) -> str | None:
    """Why a candidate cannot win, with the figure; None: it holds all floors."""
    if trial.verdict == "failed":
        return f"its run failed with exit code {trial.code}"
    if not trial.finite:
        return "its loss is not finite"
    if floors.cosine is not None:
        if trial.entry.candidate.kind == "rare exchange":
            return f"gradients are not averaged at every step: no cosine to hold against {floors.cosine:g}"
        if trial.cosine is None:
            return "its cosine was not measured"
        if trial.cosine < floors.cosine:
            return f"its cosine is {trial.cosine:.4f}, the floor {floors.cosine:g}"
    if floors.loss is not None:
        above = trial.loss_above
        if above is None:
            return "its loss is not known"
        if not above <= floors.loss:
            return f"its loss is {above:+.1%}, the floor {floors.loss:+.1%}"
    elif trial.gain(floors) < 1 <= trial.speed:
        if not trial.to_loss:
            return f"it does not come to the file's loss at {LATE:.0%} of the steps"
        return f"it takes {1 / trial.to_loss:.2f} times as long as the file to the same loss"
    return None


def winner(trials: Sequence[Trial], floors: Floors) -> Trial | None:
    """The one that gains most of those that are faster than the file as it is beyond noise, and hold the
    floors; None: none is.

    Of those that gain as much, as far as can be told, it is the one that loses least.
    """
    left = [one for one in trials if one.verdict == "faster" and why_out(one, floors) is None]
    if not left:
        return None
    best = max(left, key=lambda one: one.gain(floors))
    least = best.gain(floors) * (best.ratio.low / best.speed if best.ratio is not None else 1.0)
    alike = [one for one in left if one.gain(floors) >= least]
    return min(alike, key=lambda one: (*_loses(one.entry.candidate), -one.gain(floors)))


def predicted_winner(file: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The same by prediction alone, which may miss by a tenth: what gains less is no winner."""
    left = [one for one in entries if one.us_per_sample < (1 - _ERROR) * file.us_per_sample]
    if not left:
        return None
    least = min(one.us_per_sample for one in left)
    alike = [one for one in left if one.us_per_sample <= least / (1 - _ERROR)]
    return min(alike, key=lambda one: (*_loses(one.candidate), one.us_per_sample))


def _loses(candidate: Candidate) -> tuple[int, int, int]:
    """In this order: how rarely ranks meet, what hooks lose, and how much is changed."""
    rare = candidate.period if candidate.kind == "rare exchange" else 0
    return rare, candidate.loss_level, len(candidate.changes)


def next_round(
    file: Entry, entries: Sequence[Entry], trials: Sequence[Trial], floors: Floors, *, most: int, period: int
) -> list[Entry]:
    """The candidates to run next, at most so many; none if no other is predicted to be worth it.

    The best of each kind, for they lose different things: two of those that lose nothing, and of rare
    exchange also one that meets more often.
    What is not predicted to beat the best is left out, also in view of what came out of those that lose no
    more than it does. Ranks must meet every `period` steps or more often.
    """
    tried = {one.entry.candidate.name for one in trials}
    best = winner(trials, floors)
    least = (1 + _GAIN) * (best.gain(floors) if best is not None else 1.0)
    left = [
        one
        for one in sorted(entries, key=lambda one: one.us_per_sample)
        if one.candidate.name not in tried
        and one.candidate.period <= period
        and _hoped_for(one, file, trials, floors) > least
    ]
    chosen = list(_spread(left))
    chosen += [one for one in left if one not in chosen]
    return chosen[:most]


def _hoped_for(entry: Entry, file: Entry, trials: Sequence[Trial], floors: Floors) -> float:
    """What a candidate may gain at most: as predicted, and not more than others that lose no more than it,
    except by its speed. One of them that is out for what it loses leaves nothing to hope for.
    """
    hoped = file.us_per_sample / entry.us_per_sample
    for trial in trials:
        if trial.verdict == "failed" or not entry.candidate.loses_as_much_as(trial.entry.candidate):
            continue
        if why_out(trial, floors) is not None:
            return 0.0
        if trial.entry.candidate.kind != "exact":
            hoped = min(hoped, trial.gain(floors) * trial.entry.us_per_sample / entry.us_per_sample)
    return hoped


def _spread(left: Sequence[Entry]) -> Iterator[Entry]:
    for kind in KINDS:
        of_kind = [one for one in left if one.candidate.kind == kind]
        yield from of_kind[: 2 if kind == "exact" else 1]
        if kind == "rare exchange" and of_kind:
            longest = of_kind[0].candidate.period
            yield from [one for one in of_kind if one.candidate.period * _SPREAD <= longest][:1]
