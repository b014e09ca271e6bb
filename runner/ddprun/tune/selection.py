"""Which candidates are run for real, which of them are out, and which one wins: pure functions of figures."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddprun.compare.runs import SpeedRatio
from ddprun.predict.cost_model import StepPrediction
from ddprun.tune.candidates import CANDIDATE_KINDS, Candidate

_MIN_PREDICTED_GAIN = 0.02  # of a step's time: candidates that are not predicted to gain more are not run
# Of a step's time: a prediction may miss by so much, so what gains less is no winner by it alone.
_PREDICTION_ERROR = 0.1
_MIN_PERIOD_RATIO = 4  # of the longer to the shorter of two periods that are tried at once
TARGET_LOSS_SHARE = 0.75  # of the steps: the loss that the file then has is the one to reach
_FLOORS = {"cosine": re.compile(r"(\d*\.?\d+)"), "loss": re.compile(r"\+?(\d+(?:\.\d+)?)\s*%")}


@dataclass(frozen=True, slots=True)
class QualityFloors:
    """What a candidate must not fall below."""

    cosine: float | None = None  # of the angle between the mean gradient with hooks and the exact mean
    loss: float | None = None  # how far the training loss, over equal samples, may be above the file's


def parse_quality_floors(texts: Sequence[str]) -> QualityFloors:
    """Floors as a command line says them, `cosine=0.99` and `loss=+1%`; raises ValueError for others."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        number = _FLOORS[name].fullmatch(value) if name in _FLOORS and name not in found else None
        if number is None or (name == "cosine" and not 0 < float(number[1]) <= 1):
            allowed = "write cosine=0.99 or loss=+1%, each at most once"
            raise ValueError(f'"{text}" is not a floor; {allowed}; a cosine floor is above 0 and at most 1')
        found[name] = float(number[1]) / (100 if name == "loss" else 1)
    return QualityFloors(**found)


@dataclass(frozen=True, slots=True)
class PredictedCandidate:
    """A candidate and what is predicted of it."""

    candidate: Candidate
    predicted: StepPrediction
    layouts: Sequence[Any] = ()  # of all that is sent: parameters by bucket

    @property
    def us_per_sample(self) -> float:
        """Predicted training time for one sample: candidates may take different numbers of them in a step."""
        return self.predicted.step_us / self.candidate.rank_samples_per_step


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out of a candidate's real run, beside one of the file as it is."""

    entry: PredictedCandidate
    run_dir: Path
    exit_code: int | None
    verdict: str  # on speed, in `compare`'s words
    speed_ratio: SpeedRatio | None  # of speeds per sample: how many times as fast as the file as it is
    step_s: float | None
    spread_s: float | None  # half the distance between the quartiles of turns
    cosine: float | None  # None: not measured
    loss: float | None
    baseline_loss: float | None  # over the same samples
    # How many times as fast, per time and not per sample, it comes to the loss that the file has after
    # `TARGET_LOSS_SHARE` of its samples; 0: it does not in its run. None: not known.
    speedup_to_loss: float | None = None
    loss_is_finite: bool = True

    @property
    def speedup(self) -> float:
        """How many times as many samples a second as the baseline; 0: not measured."""
        return self.speed_ratio.mean if self.speed_ratio is not None else 0.0

    def loss_adjusted_speedup(self, floors: QualityFloors) -> float:
        """How many times as fast it trains. A candidate that changes training counts by how soon it comes to
        the loss that the file has after `TARGET_LOSS_SHARE` of its samples, and by 0 if it does not come to
        it, unless there is a floor for the loss.
        """
        if self.entry.candidate.kind == "exact" or floors.loss is not None:
            return self.speedup
        return min(self.speedup, self.speedup_to_loss or 0.0)

    @property
    def relative_loss_increase(self) -> float | None:
        """By which share its loss is above the file's; None: not known, as where the file's is 0."""
        if self.loss is None or not self.baseline_loss:
            return None
        return (self.loss - self.baseline_loss) / abs(self.baseline_loss)


def rejection_reason(trial: Trial, floors: QualityFloors) -> str | None:
    """The reason why a candidate cannot win, with the figure; None: nothing is against it."""
    if trial.verdict == "failed":
        return f"its run failed with exit code {trial.exit_code}"
    if not trial.loss_is_finite:
        return "its loss is not finite"
    if floors.cosine is not None:
        if trial.entry.candidate.kind == "rare exchange":
            return f"gradients are not averaged at every step: no cosine for the floor {floors.cosine:g}"
        if trial.cosine is None:
            return "its cosine was not measured"
        if trial.cosine < floors.cosine:
            return f"its cosine is {trial.cosine:.4f}, the floor {floors.cosine:g}"
    if floors.loss is not None:
        above = trial.relative_loss_increase
        if above is None:
            return "how far its loss is above the file's is not known"
        if not above <= floors.loss:
            return f"its loss is {above:+.1%}, the floor {floors.loss:+.1%}"
    elif trial.loss_adjusted_speedup(floors) < 1 <= trial.speedup:
        if not trial.speedup_to_loss:
            return f"it never reaches the file's loss at {TARGET_LOSS_SHARE:.0%} of the steps"
        return f"it takes {1 / trial.speedup_to_loss:.2f} times as long as the file to reach the same loss"
    return None


def pick_winner(trials: Sequence[Trial], floors: QualityFloors) -> Trial | None:
    """The trial that gains most of those faster than the file beyond noise that hold the floors, if any;
    among gains that cannot be told apart, the one that changes training least.
    """
    left = [one for one in trials if one.verdict == "faster" and rejection_reason(one, floors) is None]
    if not left:
        return None
    best = max(left, key=lambda one: one.loss_adjusted_speedup(floors))
    assert best.speed_ratio is not None, "what is faster has been measured"
    least = best.loss_adjusted_speedup(floors) * min(1.0, best.speed_ratio.low / best.speedup)
    alike = [one for one in left if one.loss_adjusted_speedup(floors) >= least]
    return min(
        alike,
        key=lambda one: (*_training_impact_sort_key(one.entry.candidate), -one.loss_adjusted_speedup(floors)),
    )


def pick_predicted_winner(
    baseline: PredictedCandidate, entries: Sequence[PredictedCandidate]
) -> PredictedCandidate | None:
    """The winner by prediction alone, which may miss by a tenth: what gains less does not win."""
    left = [one for one in entries if one.us_per_sample < (1 - _PREDICTION_ERROR) * baseline.us_per_sample]
    if not left:
        return None
    least = min(one.us_per_sample for one in left)
    alike = [one for one in left if one.us_per_sample <= least / (1 - _PREDICTION_ERROR)]
    return min(alike, key=lambda one: (*_training_impact_sort_key(one.candidate), one.us_per_sample))


def _training_impact_sort_key(candidate: Candidate) -> tuple[int, int, int]:
    """Sort key of how much a candidate changes training: rare synchronisation, lossy hooks, changed keys."""
    period = candidate.exchange_period if candidate.kind == "rare exchange" else 0
    return period, candidate.lossiness, len(candidate.changes)


def next_candidates(
    baseline: PredictedCandidate,
    entries: Sequence[PredictedCandidate],
    trials: Sequence[Trial],
    floors: QualityFloors,
    *,
    most: int,
    max_period: int,
) -> list[PredictedCandidate]:
    """The candidates to run next, at most `most`; none if no other is predicted to be worth it.

    The best of each kind, for they lose different things: two of those that lose nothing, and of rare
    exchange also one whose ranks synchronise more often, and all every `max_period` steps or more often. Left
    out is what cannot beat the best, by its prediction or by what less lossy trials reached.
    """
    tried = {one.entry.candidate.name for one in trials}
    best = pick_winner(trials, floors)
    least = (1 + _MIN_PREDICTED_GAIN) * (best.loss_adjusted_speedup(floors) if best is not None else 1.0)
    left = [
        one
        for one in sorted(entries, key=lambda one: one.us_per_sample)
        if one.candidate.name not in tried
        and one.candidate.exchange_period <= max_period
        and _best_possible_speedup(one, baseline, trials, floors) > least
    ]
    chosen = list(_best_of_each_kind(left))
    chosen += [one for one in left if one not in chosen]
    return chosen[:most]


def _best_possible_speedup(
    entry: PredictedCandidate, baseline: PredictedCandidate, trials: Sequence[Trial], floors: QualityFloors
) -> float:
    """The highest speedup it may reach: what is predicted, but at most what a trial that loses no more has
    reached, scaled by the predictions; 0 if such a trial was rejected.
    """
    speedup = baseline.us_per_sample / entry.us_per_sample
    for trial in trials:
        if trial.verdict == "failed" or not entry.candidate.at_least_as_lossy_as(trial.entry.candidate):
            continue
        if rejection_reason(trial, floors) is not None:
            return 0.0
        if trial.entry.candidate.kind != "exact":
            reached = trial.loss_adjusted_speedup(floors) * trial.entry.us_per_sample / entry.us_per_sample
            speedup = min(speedup, reached)
    return speedup


def _best_of_each_kind(left: Sequence[PredictedCandidate]) -> Iterator[PredictedCandidate]:
    for kind in CANDIDATE_KINDS:
        of_kind = [one for one in left if one.candidate.kind == kind]
        yield from of_kind[: 2 if kind == "exact" else 1]
        if kind == "rare exchange" and of_kind:
            most = of_kind[0].candidate.exchange_period / _MIN_PERIOD_RATIO
            yield from [one for one in of_kind if one.candidate.exchange_period <= most][:1]
