"""The search: measure what steps cost here, predict every candidate, run the best few, and keep the results.

1. A short run measures computation, hooks and collectives (`predict/measure.py`), or `--from` names a saved
   one.
2. All combinations of policies and stacks of hooks are predicted, then sizes of buckets for the best of them.
3. Rounds: the file as it is, its twin, and the best of each kind run in turns (`compare/`). What falls below
   a floor also rules out what loses more, and the next round goes on from there, until nothing is predicted
   to be better than the best, or time is out.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddprun import __version__
from ddprun.compare import compare, learning
from ddprun.compare.compare import Place, Repetition, Side, Variant
from ddprun.config import Loaded, PipelineError
from ddprun.config.resolved import flow
from ddprun.explain.explain import Explained, StageExplained, explain
from ddprun.explain.model_probe import ModelProbe, WorldShape
from ddprun.predict.costs import RecordsError
from ddprun.predict.forecast import playable
from ddprun.predict.links import Links
from ddprun.predict.measure import fitted, measure
from ddprun.predict.model import CostModel
from ddprun.report.runs import NoRunError, Run
from ddprun.tune import candidates as space
from ddprun.tune.candidates import CAP, Candidate, Target
from ddprun.tune.choose import LATE, Entry, Floors, Trial, next_round, predicted_winner, winner
from ddprun.tune.hosts import Hosts, HostsError, Told
from ddprun.tune.state import FILE, Round, State, numbered, opened
from ddprun.units import count

_ROUNDS = 5
_AT_ONCE = 5  # candidates of a round, beside the file and its twin
_MEASURING = 0.35  # of the time: the short run that measures costs is ended then
_OF_THE_REST = 0.5  # of the time that is left: what a round may take
_TOLD_EVERY = 25  # candidates
_TURN = 20  # steps, if no candidate has a longer period
_TURNS, _MOST_TURNS = 8, 26  # of each run, the first of which does not count
_LEAST_TURN = 2
_REFINED = 8  # the best candidates, for which sizes of buckets are tried
_QUIET = ("audit.every=0", "checkpoint={keep: 0}", "launch.max_restarts=0", "track=[]")
_DROPPED = ("steps", "epochs", "evaluate", "keep_best", "stop")

Say = Callable[[str], None]


class TuneError(Exception):
    """The search cannot go on; says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    loaded: Loaded
    hosts: int | None  # None: the file's
    ranks_per_host: int | None  # None: as in a run
    links: Links | None  # None: unlimited; on several hosts that are here, measured
    measured: Path | None  # a saved run in place of a short one
    vary: Mapping[str, Sequence[Any]]  # values of `candidates.KEYS` in place of those that are tried
    floors: Floors
    minutes: float
    runs: Path

    def inputs(self, world: WorldShape) -> str:
        """SHA-256 of all that decides what is measured."""
        said = {
            "ddprun": __version__,
            "pipeline": [str(self.loaded.path.resolve()), self.loaded.digest()],
            "ranks": [world.hosts, world.ranks_per_host],
            "links": repr(self.links),
            "from": str(self.measured.resolve()) if self.measured is not None else None,
            "vary": {key: flow(list(values)) for key, values in self.vary.items()},
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class Outcome:
    """What a search has found."""

    target: Target
    world: WorldShape
    links: Links
    floors: Floors
    file: Entry  # the file as it is
    entries: Sequence[Entry]  # the candidates, by predicted time
    unmeasured: Sequence[str]  # stacks of hooks that were left out: nothing is known of their work
    by_prediction: str  # why nothing was run for real; empty: the runs decide
    trials: list[Trial] = field(default_factory=list)
    noise: float | None = None  # the factor, at least 1, by which the file's twin differed
    file_step_s: float | None = None  # measured
    file_loss: float | None = None
    ended: str = ""  # why there were no more runs
    folder: Path = Path()

    @property
    def winning_trial(self) -> Trial | None:
        """The winner's, if runs decide."""
        return None if self.by_prediction else winner(self.trials, self.floors)

    @property
    def winner(self) -> Entry | None:
        """None: change nothing."""
        if self.by_prediction:
            return predicted_winner(self.file, self.entries)
        trial = self.winning_trial
        return trial.entry if trial is not None else None


class Search:
    """One search.

    Args:
        request: what is asked for.
        say: takes a line for the user.
        progress: takes what is going on now.
    """

    def __init__(self, request: Request, say: Say, progress: Say, hosts: Hosts | None = None) -> None:
        self._request, self._say, self._progress, self._hosts = request, say, progress, hosts
        self._began_s = time.monotonic()
        loaded = request.loaded
        self._explained = explain(loaded, hosts=request.hosts, ranks_per_host=request.ranks_per_host)
        self._probes = [self._explained.probe]
        self._world = self._explained.world
        steps = {stage.index: stage.steps for stage in self._explained.stages}
        self._target = space.target(loaded, steps)
        self._here = (
            () if request.ranks_per_host is None else (f"launch.nproc_per_node={request.ranks_per_host}",)
        )
        self._links = request.links or Links()
        if hosts is not None and request.links is None:
            self._links = hosts.measured(self._explained.probe.device) or Links()
        self.folder = request.runs  # and below it, once the search has begun
        self._model: CostModel
        self._state: State

    def follow(self) -> int:
        """Take part in the rounds that the first of several hosts runs; gives the exit code.

        Raises:
            HostsError: the first host is gone, or what it says makes no sense.
        """
        assert self._hosts is not None
        while (told := self._hosts.hear()).end is None:
            try:
                chosen = [space.told(self._request.loaded, self._target, one) for one in told.candidates]
            except ValueError as error:
                raise HostsError(f"what the first host says makes no sense: {error}") from None
            self._run_all(chosen, self._request.runs / told.folder, told.turn, told.steps)
        return told.end

    def run(self) -> Outcome:
        """Measure, predict, run. What is done is kept, also if this is interrupted.

        Raises:
            TuneError: the file as it is cannot be run or predicted.
            NothingToMeasureError, ShortRunError, RecordsError, NoRunError: the costs are not to be had.
            OSError: the folder of the search cannot be written.
        """
        self.folder, self._state = opened(
            self._request.runs,
            self._request.loaded.pipeline.name,
            self._request.inputs(self._world),
            self._say,
        )
        self._spent_s = self._state.spent_s
        if self._state.rounds or self._state.costs:
            done = count(len(self._state.rounds), "round")
            self._say(f"going on with what {self.folder} holds: {done} of real runs")
        try:
            outcome = self._predicted()
            if not outcome.by_prediction:
                self._run_rounds(outcome)
            return outcome
        finally:
            self._keep()

    def finish(self) -> None:
        """All is said and written: the same command begins anew."""
        self._keep(finished=True)

    def _keep(self, **changes: Any) -> None:
        spent_s = self._spent_s + time.monotonic() - self._began_s
        self._state = self._state.model_copy(update={"spent_s": spent_s, **changes})
        self._state.write(self.folder)

    @property
    def _left_s(self) -> float:
        return 60 * self._request.minutes - self._spent_s - (time.monotonic() - self._began_s)

    # By prediction.

    def _predicted(self) -> Outcome:
        loaded, tuned = self._request.loaded, self._target
        device = self._explained.probe.device
        tried = space.values(loaded, tuned, self._world, on_cpu=device.type == "cpu")
        tried |= {key: list(values) for key, values in self._request.vary.items()}
        found = list(space.combined(loaded, tuned, tried, ("sync", "hooks", "accumulate")))
        self._model = self._costs(found)
        file, *entries = self._forecasts(found)
        if not file.known:
            raise TuneError(
                f"the run of --from has no steps with the file's own hooks {flow(_stack(file.candidate))}"
            )
        unmeasured = sorted({flow(_stack(one.candidate)) for one in entries if not one.known})
        known = [one for one in entries if one.known]
        best = sorted(known, key=lambda one: one.entry.us_per_sample)[:_REFINED]
        known += self._with_other_caps([file, *best], tried[CAP])
        return Outcome(
            target=tuned,
            world=self._world,
            links=self._links,
            floors=self._request.floors,
            file=file.entry,
            entries=sorted((one.entry for one in known), key=lambda one: one.us_per_sample),
            unmeasured=unmeasured,
            by_prediction="" if self._hosts is not None else why_not_run(self._world.hosts, self._links),
            folder=self.folder,
        )

    def _costs(self, found: Sequence[Candidate]) -> CostModel:
        """The cost model of the run that `--from` names, or of a short one with all stacks of hooks."""
        request, loaded = self._request, self._request.loaded
        if request.measured is not None:
            return fitted(request.measured, Links())
        if self._state.costs is None:
            stacks: list[list[Any]] = []
            for stack in map(_stack, found):
                if stack not in stacks and "noop" not in stack:
                    stacks.append(stack)
            run_dir = numbered(self.folder, "costs")
            self._progress(f"a short run measures what steps cost here, in {run_dir}")
            began_us, limit_s = 1e6 * time.monotonic(), max(1.0, _MEASURING * self._left_s)
            measure(
                loaded,
                loaded.path,
                (*loaded.overrides, *self._here),
                stacks,
                run_dir,
                limit_s=limit_s,
            )
            try:
                model = fitted(run_dir, Links())
            except (RecordsError, NoRunError) as error:
                if time.monotonic() < began_us / 1e6 + limit_s:
                    raise
                text = (
                    f"the short run that measures costs had {limit_s:.0f} s, a third of --minutes, and that"
                )
                raise TuneError(f"{text} is too short: {error}") from None
            started_us = (Run(run_dir).first("started") or {}).get("monotonic_us", began_us)
            self._keep(costs=run_dir.name, started_s=max(0.0, started_us - began_us) / 1e6)
            return model
        return fitted(self.folder / self._state.costs, Links())

    def _explain(self, candidate: Candidate) -> Explained:
        """A candidate, explained for the ranks in question, with what is known of the model."""
        probe: ModelProbe | None = next((one for one in self._probes if one.fits(candidate.loaded)), None)
        explained = explain(
            candidate.loaded,
            hosts=self._world.hosts,
            ranks_per_host=self._world.ranks_per_host,
            probe=probe,
        )
        if probe is None:
            self._probes.append(explained.probe)
        return explained

    def _forecasts(self, found: Sequence[Candidate]) -> Iterator["_Forecast"]:
        """Predictions; what only a run can see to be impossible is left out."""
        for number, candidate in enumerate(found, 1):
            if len(found) > _TOLD_EVERY and number % _TOLD_EVERY == 1:
                self._progress(f"predicting {number} of {len(found)} candidates")
            try:
                stage = self._explain(candidate).stages[self._target.stage.index]
            except PipelineError:
                if not candidate.changes:
                    raise
                continue
            if playable(stage):
                predicted = self._model.predict(stage, self._world, self._links)
                yield _Forecast(Entry(candidate, predicted), self._model.knows(stage), _layouts(stage))
            elif not candidate.changes:
                raise TuneError("what the file's own stage sends is not known, so nothing can be predicted")

    def _with_other_caps(self, best: Sequence["_Forecast"], caps_mb: Sequence[Any]) -> Iterator["_Forecast"]:
        """The best candidates, and the file, with other sizes of buckets, where these make other buckets."""
        key = self._target.keys[CAP]
        for one in best:
            known = [one.layouts]
            found = [
                space.changed(self._request.loaded, self._target, {**one.candidate.changes, key: cap})
                for cap in caps_mb
            ]
            resized = [each for each in found if each is not None and key in each.changes]
            for other in self._forecasts(resized):
                if other.known and other.layouts not in known:
                    known.append(other.layouts)
                    yield other

    # By real runs.

    def _run_rounds(self, outcome: Outcome) -> None:
        for done in self._state.rounds:
            chosen = self._known_entries(outcome, done)
            sides = self._sides(
                [one.candidate for one in chosen], self.folder / done.folder, done.turn, done.steps
            )
            for side, code in zip(sides, done.codes, strict=True):
                side.runs[0].code = code
                compare.read(side.runs[0], done.turn)
            self._take(outcome, chosen, sides)
        while len(self._state.rounds) < _ROUNDS:
            if not self._run_round(outcome):
                return
        outcome.ended = f"{count(_ROUNDS, 'round')} were run"

    def _known_entries(self, outcome: Outcome, done: Round) -> list[Entry]:
        """The candidates of a round that was run before.

        Raises:
            TuneError: they are none of this search.
        """
        names = {one.candidate.name: one for one in outcome.entries}
        try:
            if len(done.codes) != len(done.candidates) + 2:
                raise ValueError("other runs than candidates")
            found = [space.told(self._request.loaded, self._target, changes) for changes in done.candidates]
            missing = [candidate for candidate in found if candidate.name not in names]
            names |= {one.candidate.name: one.entry for one in self._forecasts(missing)}
            return [names[candidate.name] for candidate in found]
        except (ValueError, KeyError) as error:
            raise TuneError(
                f"{self.folder} is not of this search: its {FILE} has {error}; remove it, or name another "
                "folder with --runs"
            ) from None

    def _run_round(self, outcome: Outcome) -> bool:
        """Run the next candidates; gives whether there were any, and time for them."""
        scale = 1.0
        if outcome.file_step_s is not None:
            scale = 1e6 * outcome.file_step_s / outcome.file.predicted.step_us
        file_s = scale * outcome.file.predicted.step_us / 1e6
        most = lengths((_AT_ONCE + 2) * file_s, self._budget_s(_AT_ONCE + 2), None, self._target.steps)
        chosen, longer = (
            next_round(
                outcome.file,
                outcome.entries,
                outcome.trials,
                outcome.floors,
                most=_AT_ONCE,
                period=period,
            )
            for period in (most[0] if most is not None else 1, sys.maxsize)
        )
        if not chosen:
            outcome.ended = "no other candidate is predicted to be better"
            if longer:
                name = longer[0].candidate.name
                outcome.ended = f"--minutes leaves no time to see enough meetings of ranks with {name}"
            return False
        step_s = 2 * file_s + sum(scale * one.predicted.step_us / 1e6 for one in chosen)
        longest = max(one.candidate.period for one in chosen)
        fits = lengths(step_s, self._budget_s(len(chosen) + 2), longest, self._target.steps)
        if fits is None:
            outcome.ended = "--minutes leaves no time for more runs"
            return False
        turn, steps = fits
        folder = numbered(self.folder, "round")
        self._say(f"round {len(self._state.rounds) + 1}: {count(steps, 'step')} of the file as it is and of")
        for one in chosen:
            self._say(f"  {one.candidate.name}")
        changes = tuple(dict(one.candidate.changes) for one in chosen)
        if self._hosts is not None:
            name = f"{self.folder.name}/{folder.name}"
            self._hosts.tell(Told(folder=name, candidates=changes, turn=turn, steps=steps))
        sides = self._run_all([one.candidate for one in chosen], folder, turn, steps)
        self._take(outcome, chosen, sides)
        codes = tuple(1 if (code := side.runs[0].code) is None else code for side in sides)
        done = Round(folder=folder.name, candidates=changes, codes=codes, turn=turn, steps=steps)
        self._keep(rounds=(*self._state.rounds, done))
        return True

    def _run_all(self, chosen: Sequence[Candidate], folder: Path, turn: int, steps: int) -> list[Side]:
        """Run the file as it is, its twin and candidates in turns, on this host or on its part of several."""
        sides, hosts = self._sides(chosen, folder, turn, steps), self._hosts
        place, arguments = None, ["--nnodes", "1"]
        if hosts is not None:
            place = Place(hosts.index, hosts.rdzv_id(f"{folder.parent.name}/{folder.name}"))
            arguments = hosts.arguments
        variants = [side.variant for side in sides]
        return compare.run_all(variants, [None], folder, turn, arguments, self._progress, place)

    def _budget_s(self, runs: int) -> float:
        """How long steps of a round may take, without the start of so many runs."""
        return _OF_THE_REST * self._left_s - runs * self._state.started_s

    def _sides(self, chosen: Sequence[Candidate], folder: Path, turn: int, steps: int) -> list[Side]:
        """The runs of a round: the file, its twin, and the candidates."""
        file = _first(self._request.loaded, self._target)
        wanted = [(file, False), (file, True), *((candidate, False) for candidate in chosen)]
        quiet = (*_QUIET, f"timings.fidelity_every={turn}", *self._here)
        return [
            Side(
                Variant(
                    candidate.name,
                    candidate.loaded.path,
                    (*candidate.loaded.overrides, *short(candidate, self._target, steps), *quiet),
                    twin=twin,
                ),
                [Repetition(folder / f"{index}")],
            )
            for index, (candidate, twin) in enumerate(wanted)
        ]

    def _take(self, outcome: Outcome, chosen: Sequence[Entry], sides: Sequence[Side]) -> None:
        """Take in what came out of a round.

        Raises:
            TuneError: the file as it is failed.
        """
        first = sides[0]
        if not first.done:
            log = compare.log_of(first.runs[0])
            raise TuneError(f"the file as it is failed with exit code {first.runs[0].code}; see {log}")
        for side, candidate in zip(sides[2:], chosen, strict=True):
            share = outcome.file.candidate.samples / candidate.candidate.samples
            run = side.runs[0]
            run.turns_s = {turn: seconds * share for turn, seconds in run.turns_s.items()}
        noise = compare.noise(sides)
        outcome.noise = max(outcome.noise or 1.0, noise or 1.0)
        learned = learning.judge([side.digests if side.done else [] for side in sides])
        samples = int(learned[0]["loss_after_samples"])
        wanted = learning.loss_after(first.digests[0].run, int(LATE * samples))
        outcome.file_step_s = _speed(first)[0]
        outcome.file_loss = learned[0]["loss"]
        for side, entry, said in zip(sides[2:], chosen, learned[2:], strict=True):
            step_s, spread_s = _speed(side)
            merged = side.merged()
            outcome.trials.append(
                Trial(
                    entry=entry,
                    run_dir=side.runs[0].folder,
                    code=side.runs[0].code,
                    verdict=compare.verdict(first, side, noise),
                    ratio=compare.ratio(first, side),
                    step_s=step_s,
                    spread_s=spread_s,
                    cosine=merged.cosine if merged is not None else None,
                    loss=said["loss"],
                    loss_of_file=learned[0]["loss"],
                    to_loss=_to_loss(first, side, wanted, samples),
                    finite=said["learning"] != learning.NOT_FINITE,
                )
            )


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A prediction, and what tells whether it is worth anything."""

    entry: Entry
    known: bool  # the measured run had steps with these hooks
    layouts: tuple[Any, ...]  # of all that is sent

    @property
    def candidate(self) -> Candidate:
        return self.entry.candidate


def why_not_run(hosts: int, links: Links) -> str:
    """Why nothing can be run for real; empty if it can."""
    if hosts > 1:
        return f"the {hosts} hosts are not here"
    return "the link inside a host is not that of this one" if links.within.limited else ""


def lengths(
    step_s: float, budget_s: float, longest: int | None, stage_steps: int | None
) -> tuple[int, int] | None:
    """Steps of a turn, and of each run of a round; None: there is no time for enough turns.

    Args:
        step_s: of one step of each of the runs, together.
        budget_s: how long all may take.
        longest: period of their policies, which a turn should hold; None: the longest turn there is time for.
        stage_steps: of the stage, which runs are not to exceed; None: not known.
    """
    most = int(max(0.0, budget_s) / step_s)
    if stage_steps is not None:
        most = min(most, max(stage_steps, _TURNS * _LEAST_TURN))
    turn = most // _TURNS if longest is None else min(max(longest, _TURN), most // _TURNS)
    if turn < _LEAST_TURN:
        return None
    return turn, min(most // turn, _MOST_TURNS) * turn


def short(candidate: Candidate, tuned: Target, steps: int) -> tuple[str, ...]:
    """Overrides that leave only the stage that is tuned, with so many steps."""
    written = candidate.loaded.root.data().get("stages")
    options = dict(written[tuned.stage.index]["train"]) if written is not None else {}
    kept = {key: value for key, value in options.items() if key not in _DROPPED}
    more: tuple[str, ...] = ()
    if candidate.settings.warmup_steps >= steps:  # it would never reach its learning rate
        if "warmup_steps" in kept:
            kept["warmup_steps"] = steps // 2
        else:
            more = (f"warmup_steps={steps // 2}",)
    return f"stages={flow([{'train': {**kept, 'steps': steps}}])}", *more


def _first(loaded: Loaded, tuned: Target) -> Candidate:
    return space.of(loaded, tuned, loaded, {})


def _stack(candidate: Candidate) -> list[Any]:
    return [hook.plain() for hook in candidate.settings.hooks]


def _layouts(stage: StageExplained) -> tuple[Any, ...]:
    return tuple(
        (exchange.moment, tuple(bucket.params for bucket in exchange.buckets or ()))
        for pattern in stage.patterns
        for exchange in pattern.exchanges
    )


def _to_loss(first: Side, other: Side, loss: float | None, samples: int) -> float | None:
    """How many times as fast, per time, the other comes to a loss that the first has; 0: not in its run."""
    speed = compare.ratio(first, other)
    if loss is None or speed is None or not other.done:
        return None
    wanted, took = (learning.samples_until(side.digests[0].run, loss, samples) for side in (first, other))
    if wanted is None:
        return None
    return 0.0 if took is None else speed.mean * wanted / took


def _speed(side: Side) -> tuple[float | None, float | None]:
    """The mean time of a step in all turns, and half the distance between the quartiles of turns."""
    times = sorted(side.turns_s.values())
    if not times:
        return None, None
    quartiles = [times[min(len(times) - 1, round(share * (len(times) - 1)))] for share in (0.25, 0.75)]
    return sum(times) / len(times), (quartiles[1] - quartiles[0]) / 2
