"""The search: measure what steps cost here, predict every candidate, run the best few, and keep the results.

1. A short run measures computation, hooks and collectives (`predict/measure.py`), or `--from` names a saved
   one.
2. All combinations of policies and stacks of hooks are predicted, then sizes of buckets for the best of them.
3. Rounds: the file as it is, its twin, and the best of each kind run in turns (`compare/`). What falls below
   a floor also rules out what loses more, and the next round goes on from there, until nothing is predicted
   to be better than the best, or time is out.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from ddprun.compare import learning
from ddprun.compare import runs as compare
from ddprun.compare.hosts import HostCoordinator, HostMessage
from ddprun.compare.runs import Variant, VariantRuns
from ddprun.config import LoadedPipeline, PipelineError
from ddprun.config.yaml_writer import flow_yaml
from ddprun.explain.explain import Explanation, explain
from ddprun.explain.model_probe import ModelProbe, WorldShape
from ddprun.predict.cost_model import CostModel
from ddprun.predict.costs import CostsUnknownError
from ddprun.predict.links import Links
from ddprun.predict.measure import (
    QUIET_OVERRIDES,
    cost_models_of_run,
    distinct_stacks_without_noop,
    run_measurement,
)
from ddprun.standard_streams import say
from ddprun.telemetry.reader import NoRunError, RecordedRun
from ddprun.tune import TuneError, selection
from ddprun.tune.candidates import (
    BUCKET_CAP_KEY,
    Candidate,
    TunedStage,
    find_tuned_stage,
    generate_candidates,
    values_to_try,
)
from ddprun.units import format_count

_MAX_ROUNDS = 5
_CANDIDATES_PER_ROUND = 5  # beside the file and its twin
_MEASURING_TIME_SHARE = 0.35  # of the time: the short run that measures costs is ended then
_ROUND_TIME_SHARE = 0.5  # of the time that is left: what a round may take
_DEFAULT_TURN_STEPS = 20  # if no candidate has a longer period
_MIN_TURNS, _MAX_TURNS = 8, 26  # of each run, the first of which does not count
_MIN_TURN_STEPS = 2
_CANDIDATES_WITH_OTHER_CAPS = 8  # the best ones: for these, sizes of buckets are tried


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What the user asked for."""

    loaded: LoadedPipeline
    hosts: int | None  # None: the file's
    ranks_per_host: int | None  # None: as in a run
    links: Links | None  # None: unlimited; on several hosts that are here, measured
    measured_run: Path | None  # a saved run in place of a short one
    vary: Mapping[str, Sequence[Any]]  # values of `candidates.TUNABLE_KEYS` in place of those that are tried
    floors: selection.QualityFloors
    minutes: float
    runs_folder: Path


@dataclass(slots=True)
class SearchOutcome:
    """What a search has found."""

    tuned: TunedStage
    world: WorldShape
    links: Links
    floors: selection.QualityFloors
    baseline: selection.PredictedCandidate  # the file as it is
    entries: Sequence[selection.PredictedCandidate]  # the candidates, by predicted time
    unmeasured_stacks: Sequence[str]  # stacks of hooks that were left out: nothing is known of their work
    not_run_reason: str  # why nothing was run for real; empty: the runs decide
    trials: list[selection.Trial] = field(default_factory=list)
    noise_factor: float | None = None  # at least 1: by which the file's twin differed
    baseline_trial: selection.Trial | None = None  # of the file, in the last round
    end_reason: str = ""  # why there were no more runs
    folder: Path = Path()

    def add_round(self, chosen: Sequence[selection.PredictedCandidate], sides: Sequence[VariantRuns]) -> None:
        """Take in what came out of a round: the runs of the file, of its twin and of these candidates. Raises
        TuneError if the file failed.
        """
        first = sides[0]
        if not first.completed:
            log = compare.log_path(first.runs[0])
            raise TuneError(f"the file as it is failed with exit code {first.runs[0].exit_code}; see {log}")
        entries = [self.baseline, self.baseline, *chosen]
        measured = [[turn.step_s for turn in side.times_by_seed_and_turn.values()] for side in sides]
        rows = compare.comparison_rows(sides)
        samples = int(rows[0]["loss_after_samples"])
        target_loss = learning.windowed_loss_at(
            first.digests[0].run, int(selection.TARGET_LOSS_SHARE * samples)
        )
        self.baseline_trial, _, *trials = (
            selection.Trial(
                entry=entry,
                run_dir=side.runs[0].folder,
                exit_code=side.runs[0].exit_code,
                verdict=row["verdict"],
                speed_ratio=compare.speed_ratio(first, side),
                step_s=fmean(step_s) if step_s else None,
                spread_s=compare.half_interquartile_range(step_s),
                cosine=row["cosine"],
                loss=row.get("loss"),  # not there if no variant has one
                baseline_loss=rows[0].get("loss"),
                speedup_to_loss=_speedup_to_loss(first, side, target_loss, samples),
                loss_is_finite=row["learning"] != learning.NOT_FINITE,
            )
            for entry, side, row, step_s in zip(entries, sides, rows, measured, strict=True)
        )
        self.trials += trials
        self.noise_factor = max(self.noise_factor or 1.0, compare.noise_factor(sides) or 1.0)

    @property
    def winning_trial(self) -> selection.Trial | None:
        """The winner's trial, if runs decide."""
        return None if self.not_run_reason else selection.pick_winner(self.trials, self.floors)

    @property
    def winner(self) -> selection.PredictedCandidate | None:
        """The winning candidate; None: change nothing."""
        if self.not_run_reason:
            return selection.pick_predicted_winner(self.baseline, self.entries)
        trial = self.winning_trial
        return trial.entry if trial is not None else None


class Search:
    """One search; `progress` takes what is going on now."""

    def __init__(
        self, request: SearchRequest, progress: Callable[[str], None], hosts: HostCoordinator | None
    ) -> None:
        self._request, self._progress, self._hosts = request, progress, hosts
        self._start_time_s = time.monotonic()
        loaded = request.loaded
        self._explained = explain(loaded, hosts=request.hosts, ranks_per_host=request.ranks_per_host)
        self._world = self._explained.world
        self._tuned = find_tuned_stage(loaded, {one.index: one.steps for one in self._explained.stages})
        self._local_overrides = list[str]()
        if request.ranks_per_host is not None:
            self._local_overrides.append(f"launch.nproc_per_node={request.ranks_per_host}")
        self._links = request.links or Links()
        if hosts is not None and request.links is None:
            self._links = hosts.measure_link(self._explained.probe.device) or Links()
        self.folder = request.runs_folder / f"{loaded.pipeline.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._probes: list[ModelProbe] = [self._explained.probe]  # of the file, and of candidates
        self._cost_model: CostModel
        self.costs_run = request.measured_run  # the run that the costs are from; None: not measured yet
        self._run_start_s = 0.0  # how long one run takes to start here
        self._rounds = 0  # so many were run

    def run_part_of_round(self, message: HostMessage) -> None:
        """Run this host's part of a round that the first of several hosts runs."""
        chosen = list(map(self._tuned.candidate_from_other_host, message.candidates))
        folder = self._request.runs_folder / message.folder
        self._run_variants(chosen, folder, message.turn_steps, message.steps)

    def run(self) -> SearchOutcome:
        """Measure, predict, run. Raises TuneError if the file as it is cannot be run, what
        `cost_models_of_run` raises if costs are not to be had, and OSError.
        """
        self.folder.mkdir(parents=True)
        outcome = self._predict_candidates()
        while not outcome.not_run_reason and self._run_round(outcome):
            pass
        return outcome

    @property
    def _remaining_s(self) -> float:
        return 60 * self._request.minutes - (time.monotonic() - self._start_time_s)

    # By prediction.

    def _predict_candidates(self) -> SearchOutcome:
        tuned, on_cpu = self._tuned, self._explained.probe.device.type == "cpu"
        tried = values_to_try(self._world, on_cpu=on_cpu)
        tried |= {key: list(values) for key, values in self._request.vary.items()}
        found = list(generate_candidates(tuned, tried, ("sync", "hooks", "accumulate")))
        self._cost_model = self._load_or_fit_cost_model(found)
        file, *entries = self._predict_each(found)
        if not file.predicted.hooks_measured:
            hooks = flow_yaml(file.candidate.settings.hook_specs)
            text = f"the --from run has no steps with the file's hooks {hooks}: leave --from out"
            raise CostsUnknownError(text)
        known = [one for one in entries if one.predicted.hooks_measured]
        unmeasured = [one.candidate.settings for one in entries if not one.predicted.hooks_measured]
        best = sorted(known, key=lambda one: one.us_per_sample)[:_CANDIDATES_WITH_OTHER_CAPS]
        known += self._vary_bucket_caps([file, *best], tried[BUCKET_CAP_KEY])
        return SearchOutcome(
            tuned=tuned,
            world=self._world,
            links=self._links,
            floors=self._request.floors,
            baseline=file,
            entries=sorted(known, key=lambda one: one.us_per_sample),
            unmeasured_stacks=sorted({flow_yaml(settings.hook_specs) for settings in unmeasured}),
            not_run_reason=""
            if self._hosts is not None
            else find_not_run_reason(self._world.hosts, self._links),
            folder=self.folder,
        )

    def _load_or_fit_cost_model(self, found: Sequence[Candidate]) -> CostModel:
        """The cost model of the run that `--from` names, or of a short one with all stacks of hooks."""
        request, loaded = self._request, self._request.loaded
        if request.measured_run is not None:
            return next(cost_models_of_run(request.measured_run, Links(), loaded))
        stacks = distinct_stacks_without_noop(candidate.settings.hook_specs for candidate in found)
        run_dir = self.folder / "costs"
        began_us, limit_s = 1e6 * time.monotonic(), max(1.0, _MEASURING_TIME_SHARE * self._remaining_s)
        run_measurement(loaded, stacks, run_dir, overrides=self._local_overrides, limit_s=limit_s)
        try:
            model = next(cost_models_of_run(run_dir, Links()))
        except (CostsUnknownError, NoRunError) as error:
            if time.monotonic() < began_us / 1e6 + limit_s:
                raise
            text = f"the short run that measures costs had {limit_s:.0f} s, a third of --minutes"
            raise TuneError(f"{text}, which is too short: {error}; give more --minutes") from None
        started_us = RecordedRun(run_dir).started.monotonic_us or began_us
        self._run_start_s, self.costs_run = max(0.0, started_us - began_us) / 1e6, run_dir
        return model

    def _predict_each(self, found: Sequence[Candidate]) -> Iterator[selection.PredictedCandidate]:
        """Predict each candidate; those that only the attempt shows to be impossible are left out."""
        for number, candidate in enumerate(found, 1):
            self._progress(f"predicting {number} of {len(found)} candidates")
            try:
                stage = self._explain(candidate).stages[self._tuned.stage.index]
            except PipelineError:
                if not candidate.changes:
                    raise
                continue
            predicted = self._cost_model.predict(stage, self._world, self._links)
            exchanges = [one for pattern in stage.patterns for one in pattern.exchanges]
            layouts = [(one.moment, [bucket.params for bucket in one.buckets]) for one in exchanges]
            yield selection.PredictedCandidate(candidate, predicted, layouts)

    def _vary_bucket_caps(
        self, best: Sequence[selection.PredictedCandidate], caps_mb: Sequence[Any]
    ) -> Iterator[selection.PredictedCandidate]:
        """The best candidates, and the file, with other sizes of buckets, where these make other buckets."""
        key = self._tuned.paths_by_key[BUCKET_CAP_KEY]
        for one in best:
            known = [one.layouts]
            found = [self._tuned.with_changes({**one.candidate.changes, key: cap}) for cap in caps_mb]
            resized = [each for each in found if each is not None and key in each.changes]
            for other in self._predict_each(resized):
                if other.predicted.hooks_measured and other.layouts not in known:
                    known.append(other.layouts)
                    yield other

    def _explain(self, candidate: Candidate) -> Explanation:
        """A candidate, explained for the ranks in question, with what is known of the model."""
        probe = next((one for one in self._probes if one.suffices_for(candidate.loaded)), None)
        hosts, ranks_per_host = self._world.hosts, self._world.ranks_per_host
        explained = explain(candidate.loaded, hosts=hosts, ranks_per_host=ranks_per_host, probe=probe)
        if probe is None:
            self._probes.append(explained.probe)
        return explained

    # By real runs.

    def _run_round(self, outcome: SearchOutcome) -> bool:
        """Run the next candidates; gives whether there were any, and time for them."""
        if self._rounds == _MAX_ROUNDS:
            outcome.end_reason = f"{format_count(_MAX_ROUNDS, 'round')} were run"
            return False
        file_s, scale = outcome.baseline.predicted.step_us / 1e6, 1.0
        if outcome.baseline_trial is not None and outcome.baseline_trial.step_s is not None:
            scale = outcome.baseline_trial.step_s / file_s
            file_s = outcome.baseline_trial.step_s
        runs = _CANDIDATES_PER_ROUND + 2
        longest = steps_per_turn_and_run(runs * file_s, self._round_budget_s(runs), None, self._tuned.steps)
        known = outcome.baseline, outcome.entries, outcome.trials, outcome.floors
        best = partial(selection.next_candidates, *known, most=_CANDIDATES_PER_ROUND)
        chosen = best(max_period=longest[0] if longest is not None else 1)
        if not chosen:
            outcome.end_reason = "no other candidate is predicted to be better"
            if longer := best(max_period=sys.maxsize):
                text = f"ranks would synchronise too few times with {longer[0].candidate.name} to judge it"
                outcome.end_reason = f"within --minutes, {text}"
            return False
        step_s = 2 * file_s + sum(scale * one.predicted.step_us / 1e6 for one in chosen)
        period = max(one.candidate.exchange_period for one in chosen)
        lengths = steps_per_turn_and_run(
            step_s, self._round_budget_s(len(chosen) + 2), period, self._tuned.steps
        )
        if lengths is None:
            outcome.end_reason = "--minutes leaves no time for more runs"
            return False
        turn, steps = lengths
        self._rounds += 1
        folder = self.folder / f"round-{self._rounds}"
        say(f"round {self._rounds}: {format_count(steps, 'step')} of the file as it is and of")
        for one in chosen:
            say(f"  {one.candidate.name}")
        if self._hosts is not None:
            name = f"{self.folder.name}/{folder.name}"
            changes = tuple(dict(one.candidate.changes) for one in chosen)
            self._hosts.send_to_others(
                HostMessage(folder=name, candidates=changes, turn_steps=turn, steps=steps)
            )
        outcome.add_round(chosen, self._run_variants([one.candidate for one in chosen], folder, turn, steps))
        return True

    def _run_variants(
        self, chosen: Sequence[Candidate], folder: Path, turn: int, steps: int
    ) -> list[VariantRuns]:
        """Run the file as it is, its twin and candidates in turns, on this host or on its part of several."""
        quiet = (*QUIET_OVERRIDES, f"timings.fidelity_every={turn}", *self._local_overrides)
        file = self._tuned.unchanged_candidate
        variants = []
        for index, candidate in enumerate((file, file, *chosen)):
            own = (*candidate.loaded.overrides, *short_run_overrides(candidate, self._tuned, steps))
            variants.append(Variant(candidate.name, candidate.loaded.path, (*own, *quiet), twin=index == 1))
        return compare.run_variants(variants, [None], folder, turn, (), self._progress, self._hosts)

    def _round_budget_s(self, runs: int) -> float:
        """How long steps of a round may take, without the start of so many runs."""
        return _ROUND_TIME_SHARE * self._remaining_s - runs * self._run_start_s


def find_not_run_reason(hosts: int, links: Links) -> str:
    """Why nothing can be run for real; empty if it can."""
    if hosts > 1:
        return f"the {hosts} hosts do not take part (give --rdzv-endpoint on each)"
    return "the link inside a host is not this host's" if links.within.takes_time else ""


def steps_per_turn_and_run(
    step_s: float, budget_s: float, longest_period: int | None, stage_steps: int | None
) -> tuple[int, int] | None:
    """Steps of a turn, and of each run of a round; None: there is no time for enough turns.

    `step_s` is of one step of each of the runs, together, `budget_s` for all of it. A turn should cover the
    `longest_period` of their policies (None: take the longest turn there is time for), and no run exceed the
    `stage_steps` of the stage, where they are known and allow enough turns.
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
