"""A round of a search: the file as it is, its twin, and candidates, run in turns (`compare/runs.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddprun.compare import learning
from ddprun.compare import runs as compare
from ddprun.compare.runs import SeedRun, Variant, VariantRuns
from ddprun.config import LoadedPipeline
from ddprun.config.resolved import flow_yaml
from ddprun.predict.measure import QUIET
from ddprun.tune import TuneError
from ddprun.tune.candidates import Candidate, TunedStage, make_candidate
from ddprun.tune.choose import TARGET_LOSS_SHARE, PredictedCandidate, Trial

_DEFAULT_TURN_STEPS = 20  # if no candidate has a longer period
_MIN_TURNS, _MAX_TURNS = 8, 26  # of each run, the first of which does not count
_MIN_TURN_STEPS = 2


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came out of a round."""

    trials: list[Trial]  # of the candidates
    noise_factor: float | None  # at least 1: by which the file's twin differed
    baseline_step_s: float | None  # of the file as it is
    baseline_loss: float | None


def sides_of_round(
    loaded: LoadedPipeline,
    tuned: TunedStage,
    chosen: Sequence[Candidate],
    folder: Path,
    turn: int,
    steps: int,
    overrides: Sequence[str],
) -> list[VariantRuns]:
    """The runs of a round: the file, its twin, and the candidates; `overrides` are for all."""
    file = make_candidate(loaded, tuned, loaded, {})
    wanted = [(file, False), (file, True), *((candidate, False) for candidate in chosen)]
    quiet = (*QUIET, f"timings.fidelity_every={turn}", *overrides)
    sides = []
    for index, (candidate, twin) in enumerate(wanted):
        short = short_run_overrides(candidate, tuned, steps)
        variant = Variant(
            candidate.name,
            candidate.loaded.path,
            (*candidate.loaded.overrides, *short, *quiet),
            twin=twin,
        )
        sides.append(VariantRuns(variant, [SeedRun(folder / f"{index}")]))
    return sides


def judge_round(
    baseline: PredictedCandidate, chosen: Sequence[PredictedCandidate], sides: Sequence[VariantRuns]
) -> RoundResult:
    """What came out of the runs of a round; `baseline`: the file as it is.

    Raises:
        TuneError: the file as it is failed.
    """
    first = sides[0]
    if not first.completed:
        log = compare.log_path(first.runs[0])
        raise TuneError(f"the file as it is failed with exit code {first.runs[0].code}; see {log}")
    step_times = [_step_time_and_spread(side) for side in sides]
    # Times are scaled to the file's samples per step, so that candidates with other batches compare.
    for side, one in zip(sides[2:], chosen, strict=True):
        share = baseline.candidate.samples_per_step / one.candidate.samples_per_step
        run = side.runs[0]
        run.step_s_by_turn = {turn: seconds * share for turn, seconds in run.step_s_by_turn.items()}
    noise = compare.noise_factor(sides)
    learned = learning.judge_learning([side.digests if side.completed else [] for side in sides])
    samples = int(learned[0]["loss_after_samples"])
    target_loss = learning.loss_after(first.digests[0].run, int(TARGET_LOSS_SHARE * samples))
    trials = []
    for one, (side, (step_s, spread_s), judged) in zip(
        chosen, list(zip(sides, step_times, learned, strict=True))[2:], strict=True
    ):
        digest = side.merged_digest()
        trials.append(
            Trial(
                entry=one,
                run_dir=side.runs[0].folder,
                code=side.runs[0].code,
                verdict=compare.speed_verdict(first, side, noise),
                speed_ratio=compare.speed_ratio(first, side),
                step_s=step_s,
                spread_s=spread_s,
                cosine=digest.cosine if digest is not None else None,
                loss=judged["loss"],
                baseline_loss=learned[0]["loss"],
                speedup_to_loss=_speedup_to_loss(first, side, target_loss, samples),
                loss_is_finite=judged["learning"] != learning.NOT_FINITE,
            )
        )
    return RoundResult(trials, noise, step_times[0][0], learned[0]["loss"])


def turn_and_run_steps(
    step_s: float, budget_s: float, longest_period: int | None, stage_steps: int | None
) -> tuple[int, int] | None:
    """Steps of a turn, and of each run of a round; None: there is no time for enough turns.

    Args:
        step_s: of one step of each of the runs, together.
        budget_s: how long all may take.
        longest_period: the longest period of their policies, which a turn should cover; None: take the
            longest turn there is time for.
        stage_steps: of the stage, which runs are not to exceed; None: not known.
    """
    most = int(max(0.0, budget_s) / step_s)
    if stage_steps is not None:
        most = min(most, max(stage_steps, _MIN_TURNS * _MIN_TURN_STEPS))
    turn = most // _MIN_TURNS
    if longest_period is not None:
        turn = min(max(longest_period, _DEFAULT_TURN_STEPS), turn)
    if turn < _MIN_TURN_STEPS:
        return None
    return turn, min(most // turn, _MAX_TURNS) * turn


def short_run_overrides(candidate: Candidate, tuned: TunedStage, steps: int) -> tuple[str, ...]:
    """Overrides that leave only the stage that is tuned, with so many steps."""
    loaded, options, more = candidate.loaded, dict[str, int](), tuple[str, ...]()
    if candidate.settings.warmup_steps >= steps:  # it would never reach its learning rate
        if "warmup_steps" in loaded.written_options(tuned.stage):
            options["warmup_steps"] = steps // 2
        else:
            more = (f"warmup_steps={steps // 2}",)
    stage = loaded.stage_with_steps(tuned.stage, steps, only_training=True, **options)
    return f"stages={flow_yaml([stage])}", *more


def _speedup_to_loss(
    first: VariantRuns, other: VariantRuns, loss: float | None, samples: int
) -> float | None:
    """How many times sooner the other reaches a loss that the first has; 0: not in its run; None: unknown."""
    speed = compare.speed_ratio(first, other)
    if loss is None or speed is None or not other.completed:
        return None
    samples_of_first, samples_of_other = (
        learning.samples_until_loss(side.digests[0].run, loss, samples) for side in (first, other)
    )
    if samples_of_first is None:
        return None
    return 0.0 if samples_of_other is None else speed.mean * samples_of_first / samples_of_other


def _step_time_and_spread(side: VariantRuns) -> tuple[float | None, float | None]:
    """The mean time of a step in all turns, and half the distance between the quartiles of turns."""
    times = sorted(side.step_s_by_turn.values())
    if not times:
        return None, None
    return sum(times) / len(times), (compare.quantile(times, 0.75) - compare.quantile(times, 0.25)) / 2
