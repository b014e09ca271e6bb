"""A round of a search: the file as it is, its twin, and candidates, run in turns (`compare/runs.py`)."""

from collections.abc import Sequence

from ddprun.compare import learning
from ddprun.compare import runs as compare
from ddprun.compare.runs import Variant, VariantRuns
from ddprun.config.resolved import flow_yaml
from ddprun.predict.measure import QUIET
from ddprun.tune import TuneError
from ddprun.tune.candidates import Candidate, TunedStage
from ddprun.tune.choose import TARGET_LOSS_SHARE, PredictedCandidate, Trial

_DEFAULT_TURN_STEPS = 20  # if no candidate has a longer period
_MIN_TURNS, _MAX_TURNS = 8, 26  # of each run, the first of which does not count
_MIN_TURN_STEPS = 2


def make_round_variants(
    tuned: TunedStage, chosen: Sequence[Candidate], turn: int, steps: int, overrides: Sequence[str]
) -> list[Variant]:
    """What runs in a round: the file, its twin, and the candidates; `overrides` are for all."""
    file = tuned.unchanged
    quiet = (*QUIET, f"timings.fidelity_every={turn}", *overrides)
    variants = []
    for index, candidate in enumerate((file, file, *chosen)):
        own = (*candidate.loaded.overrides, *short_run_overrides(candidate, tuned, steps))
        variants.append(Variant(candidate.name, candidate.loaded.path, (*own, *quiet), twin=index == 1))
    return variants


def judge_round(
    baseline: PredictedCandidate, chosen: Sequence[PredictedCandidate], sides: Sequence[VariantRuns]
) -> tuple[list[Trial], float | None]:
    """The trials of a round, first that of `baseline`, the file as it is, and how much, as a factor, its twin
    differed. Raises TuneError if the file failed.
    """
    first = sides[0]
    if not first.completed:
        log = compare.log_path(first.runs[0])
        raise TuneError(f"the file as it is failed with exit code {first.runs[0].code}; see {log}")
    entries = [baseline, baseline, *chosen]
    step_times = [_step_time_and_spread(side) for side in sides]
    for side, entry in zip(sides, entries, strict=True):  # so that candidates with other batches compare
        share = baseline.candidate.samples_per_step / entry.candidate.samples_per_step
        run = side.runs[0]
        run.step_s_by_turn = {turn: seconds * share for turn, seconds in run.step_s_by_turn.items()}
    rows = compare.comparison_rows(sides)
    samples = int(rows[0]["loss_after_samples"])
    target_loss = learning.loss_after(first.digests[0].run, int(TARGET_LOSS_SHARE * samples))
    trials = [
        Trial(
            entry=entry,
            run_dir=side.runs[0].folder,
            code=side.runs[0].code,
            verdict=row["verdict"],
            speed_ratio=compare.speed_ratio(first, side),
            step_s=step_s,
            spread_s=spread_s,
            cosine=row["cosine"],
            loss=row["loss"],
            baseline_loss=rows[0]["loss"],
            speedup_to_loss=_speedup_to_loss(first, side, target_loss, samples),
            loss_is_finite=row["learning"] != learning.NOT_FINITE,
        )
        for entry, side, row, (step_s, spread_s) in zip(entries, sides, rows, step_times, strict=True)
    ]
    return [trials[0], *trials[2:]], compare.noise_factor(sides)


def steps_per_turn_and_run(
    step_s: float, budget_s: float, longest_period: int | None, stage_steps: int | None
) -> tuple[int, int] | None:
    """Steps of a turn, and of each run of a round; None: there is no time for enough turns.

    `step_s` is of one step of each of the runs, together, `budget_s` for all of it. A turn should cover the
    `longest_period` of their policies (None: take the longest turn there is time for), and no run exceed the
    `stage_steps` of the stage, where they are known.
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
    times = sorted(side.step_s_by_seed_and_turn.values())
    if not times:
        return None, None
    return sum(times) / len(times), (compare.quantile(times, 0.75) - compare.quantile(times, 0.25)) / 2
