"""Run variants side by side, on one machine or on several, and measure how they differ.

All runs of a seed start together and take turns of a few steps, in an order that is drawn anew each round:
whatever disturbs the machine disturbs all of them alike. What is compared is the time of the same turn. The
first variant runs twice: how far its twin is from it is noise, and so is every difference that is not larger.
How well a variant learns is compared under equal seeds (`learning.py`).
"""

import asyncio
import csv
import io
import json
import os
import random
import signal
import statistics
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NamedTuple

import numpy as np

from ddprun import COMPARE_TURNS_VARIABLE
from ddprun.compare import learning
from ddprun.compare.hosts import HostCoordinator
from ddprun.compare.learning import ComparisonRow
from ddprun.compare.time_slices import TimeSliceScheduler
from ddprun.config import LoadedPipeline, load
from ddprun.host.processes import SAME_REQUEST_S
from ddprun.launch.launcher import overrides_variable
from ddprun.report.digest import RunDigest, StepTimes, digest_run
from ddprun.run_files import open_file
from ddprun.telemetry.reader import NoRunError, RecordedRun
from ddprun.telemetry.records import Summary
from ddprun.telemetry.writer import nonfinite_to_none
from ddprun.units import format_bytes, format_count, format_table

_DRAWS, _INTERVAL = 2000, (0.025, 0.975)  # of the bootstrap: 95% of the draws are inside
_MIN_TURNS = 6
_TERMINATION_TIMEOUT_S = 15.0
_TEXT_WIDTH = 110
_SPEED_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "variant": ("", str),
    "samples_per_s": ("samples/s", "{:,.1f}".format),
    "times_first": ("times the first", "{:.2f}".format),
    "exposed_share": ("exposed", "{:.0%}".format),
    "wire_bytes_per_step": ("sent per step", format_bytes),
    "cosine": ("fidelity", "{:.4f}".format),
}
"""By the key of a row: the column's head, and how its value reads."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One pipeline with its overrides."""

    name: str
    pipeline: Path
    overrides: tuple[str, ...] = ()
    twin: bool = False  # the first variant once more: what differs between the two is noise
    noop: bool = False  # the first variant with nothing sent


def make_variants(
    pipelines: Sequence[Path],
    overrides: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    *,
    noop: bool,
    twin: bool,
) -> list[Variant]:
    """All combinations of the values of the `vary` keys, which are YAML, in the order of the table; `noop`
    adds the first one with nothing sent, `twin` the first one once more. `overrides` are for all.
    """
    found = []
    settings = list(product(*([f"{key}={value}" for value in values] for key, values in vary)))
    stems = [pipeline.stem for pipeline in pipelines]
    for pipeline, chosen in product(pipelines, settings):
        of_file = pipeline.stem if stems.count(pipeline.stem) == 1 else str(pipeline)
        name = ", ".join([of_file] * (len(pipelines) > 1 or not chosen) + list(chosen))
        found.append(Variant(name, pipeline, (*overrides, *chosen)))
    first = found[0]
    if noop:
        found.append(Variant("nothing sent (noop)", first.pipeline, first.overrides, noop=True))
    if twin:
        found.insert(1, Variant(f"{first.name} (twin)", first.pipeline, first.overrides, twin=True))
    return found


def load_variant(variant: Variant, steps: int | None = None) -> tuple[Variant, LoadedPipeline]:
    """The variant with `steps` for its one stage that takes any, noop in each stage, and a name that shows no
    secret; and its pipeline. Raises PipelineError.
    """
    loaded = load(variant.pipeline, variant.overrides)
    stages = loaded.pipeline.stages_with_steps()
    more: list[str] = []
    if steps is not None:
        if len(stages) != 1:
            text = f"{len(stages)} stages take steps: --steps needs a pipeline with one such stage"
            raise loaded.error("stages", text, "leave --steps out, or name one stage")
        value = json.dumps(loaded.stage_with_steps(stages[0], steps), ensure_ascii=False)
        written = loaded.root.data().get("stages") is not None
        more.append(f"stages[{stages[0].index}]={value}" if written else f"stages=[{value}]")
    if variant.noop:
        keys = dict.fromkeys(stage.key_path("hooks") for stage in stages)
        more += [f"{key}=[noop]" for key in keys]
    overrides, name = (*variant.overrides, *more), loaded.secrets.redact(variant.name)
    loaded = load(variant.pipeline, overrides) if more else loaded
    return replace(variant, name=name, overrides=overrides), loaded


class TurnTimes(NamedTuple):
    """Mean times of a turn, in seconds: of a step, and of a sample of all ranks."""

    step_s: float
    sample_s: float


@dataclass(slots=True)
class SeedRun:
    folder: Path
    seed: int | None = None  # None: the pipeline's own
    exit_code: int | None = None  # the exit code of its process
    digest: RunDigest | None = None
    times_by_turn: dict[int, TurnTimes] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        return self.exit_code == 0 and self.digest is not None

    @property
    def summary(self) -> Summary | None:
        """The run's `summary.json`; None if it did not run to its end."""
        return self.digest.run.summary if self.digest and self.completed else None


@dataclass(slots=True)
class VariantRuns:
    """A variant, and what came out of it under each seed."""

    variant: Variant
    runs: list[SeedRun]

    @property
    def completed(self) -> bool:
        return all(run.completed for run in self.runs)

    @property
    def times_by_seed_and_turn(self) -> dict[tuple[int, int], TurnTimes]:
        """By the number of the seed and of the turn."""
        return {
            (number, turn): times
            for number, run in enumerate(self.runs)
            for turn, times in run.times_by_turn.items()
        }

    @property
    def digests(self) -> list[RunDigest]:
        """Of the runs that left records."""
        return [run.digest for run in self.runs if run.digest is not None]


@dataclass(frozen=True, slots=True)
class SpeedRatio:
    """How many times as many samples per second as the first variant, over the same turns."""

    mean: float
    low: float
    high: float
    turns: int

    @property
    def max_deviation(self) -> float:
        """The factor, at least 1, by which the interval reaches away from 1."""
        return max(self.high, 1 / self.low, 1.0)


def run_variants(
    chosen: Sequence[Variant],
    seeds: Sequence[int | None],
    folder: Path,
    turn_steps: int,
    arguments: Sequence[str],
    progress: Callable[[str], None],
    hosts: HostCoordinator | None = None,
) -> list[VariantRuns]:
    """Run the variants in turns of `turn_steps`, under one seed after the other, and read what they left.

    `progress` takes what is going on now. `arguments` of `ddprun run` are for all runs of this host alone. On
    several `hosts` the turns come in one order, and no host is a turn ahead, for ranks wait for each other.
    """
    sides = [VariantRuns(variant, []) for variant in chosen]
    for seed in seeds:
        for index, side in enumerate(sides):
            name = f"{index}" if len(seeds) == 1 else f"{index}-seed-{seed}"
            side.runs.append(SeedRun(folder / name, seed))
        with_seed = "" if len(seeds) == 1 else f" with seed {seed}"
        progress(f"starting {format_count(len(sides), 'run')}{with_seed}")
        asyncio.run(_run_in_turns(sides, turn_steps, arguments, progress, hosts))
        for side in sides:
            load_run_records(side.runs[-1], turn_steps)
    return sides


async def _run_in_turns(
    sides: Sequence[VariantRuns],
    turn_steps: int,
    arguments: Sequence[str],
    progress: Callable[[str], None],
    hosts: HostCoordinator | None,
) -> None:
    """Run the last run of each variant; no process is left afterwards."""
    draw, order, turns = random.Random(0), list(range(len(sides))), 0
    processes: list[Popen[bytes]] = []
    try:
        # Runs that wait for their turn fail when the scheduler ends.
        async with TimeSliceScheduler(turn_steps) as scheduler:
            for number, side in enumerate(sides):
                processes.append(_start_run(side, scheduler.environment_value(number), arguments, hosts))
                scheduler.add_run(number, processes[-1].poll)
            await scheduler.wait_until_all_idle()
            while scheduler.any_alive():
                left = frozenset(scheduler.waiting_runs())
                draw.shuffle(order)  # of all of them: hosts may not see at the same moment that one has ended
                for run in order:
                    if run in left:
                        await scheduler.run_one_turn(run)
                if not left:  # a run's ranks are starting again, or it is ending
                    await scheduler.wait_until_all_idle()
                    continue
                turns += 1
                progress(f"{format_count(turns, 'turn')} of {turn_steps} steps")
            for side, process in zip(sides, processes, strict=True):
                side.runs[-1].exit_code = process.wait()
    finally:
        _terminate_processes(processes)


def _start_run(
    side: VariantRuns, turns: str, arguments: Sequence[str], hosts: HostCoordinator | None
) -> Popen[bytes]:
    """Start the last run of a variant; `turns` tells it how to reach the scheduler."""
    run, overrides = side.runs[-1], [*side.variant.overrides, "timings.every=1"]
    if run.seed is not None:
        overrides.append(f"seed={run.seed}")
    command = [sys.executable, "-P", "-m", "ddprun", "run", str(side.variant.pipeline)]
    command += ["--run-dir", str(run.folder)]
    command += ["--nnodes", "1", *arguments] if hosts is None else hosts.run_arguments(run.folder)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log_file = log_path(run, 0 if hosts is None else hosts.index)
    environment = {**os.environ, COMPARE_TURNS_VARIABLE: turns, **overrides_variable(overrides)}
    with open_file(log_file.parent, log_file.name, "wb") as log:
        # In a session of its own: Ctrl-C is for the comparison, which ends them.
        return Popen(command, stdin=DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)


def log_path(run: SeedRun, host: int = 0) -> Path:
    """The file with what the run writes on its screen; each host but the first has one of its own."""
    suffix = f".host-{host}" if host else ""
    return run.folder.with_name(f"{run.folder.name}{suffix}.log")


def _terminate_processes(processes: Sequence[Popen[bytes]]) -> None:
    """End the processes that still run: all at once, and by force after a while."""
    until = time.monotonic() + _TERMINATION_TIMEOUT_S
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.send_signal(signal.SIGTERM)
    second = time.monotonic() + SAME_REQUEST_S + 0.2
    while time.monotonic() < second and any(process.poll() is None for process in left):
        time.sleep(0.05)
    for process in left:
        process.send_signal(signal.SIGTERM)  # the second one: at once
    for process in left:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except TimeoutExpired:
            process.kill()
            process.wait()


def load_run_records(run: SeedRun, turn_steps: int) -> None:
    """Read what a run has recorded, its steps by turns of `turn_steps`.

    The first turn warms up and does not count; nor do steps that measure fidelity, which takes time of its
    own.
    """
    try:
        found = RecordedRun(run.folder)
    except NoRunError:
        return
    measured = {
        line.step for rank in found.ranks for line in found.bucket_records(rank, holding=b'"fidelity"')
    }

    def is_timed(step: int) -> bool:
        return step > turn_steps and step not in measured

    run.digest = digest_run(found, is_timed)
    steps_by_turn: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of all ranks: time, samples
    for rank in found.ranks:
        for line in found.step_records(rank, is_timed):
            steps_by_turn[(line.step - 1) // turn_steps].append((line.step_us, line.samples))
    for turn, steps in steps_by_turn.items():
        us, samples = map(sum, zip(*steps, strict=True))
        if len(steps) >= 0.5 * turn_steps * len(found.ranks) and samples:
            sample_us = us / samples / found.most_ranks
            run.times_by_turn[turn] = TurnTimes(us / len(steps) / 1e6, sample_us / 1e6)


def speed_ratio(first: VariantRuns, other: VariantRuns) -> SpeedRatio | None:
    """How many times as fast as the first the other is; None if they have no turns in common."""
    before, after = first.times_by_seed_and_turn, other.times_by_seed_and_turn
    pairs = [(before[turn].sample_s, after[turn].sample_s) for turn in sorted(before.keys() & after.keys())]
    return bootstrap_ratio(pairs) if pairs else None


def bootstrap_ratio(pairs: Sequence[tuple[float, float]]) -> SpeedRatio:
    """The ratio of the total times of what was measured in pairs, with its interval.

    A median over pairs would miss what happens in few of them, such as a synchronisation every hundred steps.
    The interval comes from drawing the pairs anew (bootstrap).
    """
    draw, times = np.random.default_rng(0), np.array(pairs)
    first, other = np.array([draw.choice(times, len(times)).sum(0) for _ in range(_DRAWS)]).T
    low, high = np.quantile(first / other, _INTERVAL)
    mean = times[:, 0].sum() / times[:, 1].sum()
    return SpeedRatio(float(mean), float(low), float(high), len(times))


def half_interquartile_range(values: Sequence[float]) -> float | None:
    """Half the distance between the quartiles; None if there are no values."""
    return float(np.ptp(np.quantile(values, (0.25, 0.75)))) / 2 if values else None


def noise_factor(sides: Sequence[VariantRuns]) -> float | None:
    """By which factor, at least 1, a run may differ from its twin; None if that is not known."""
    twin = next((side for side in sides if side.variant.twin), None)
    if twin is None or not (twin.completed and sides[0].completed):
        return None
    ratio = speed_ratio(sides[0], twin)
    return ratio.max_deviation if ratio is not None and ratio.turns >= _MIN_TURNS else None


def speed_verdict(first: VariantRuns, other: VariantRuns, noise: float | None) -> str:
    """In words, whether the other is faster by more than noise."""
    if other is first:
        return "the first" if first.completed else "failed"
    if not other.completed:
        return "failed"
    if not first.completed:
        return "the first has failed"
    ratio = speed_ratio(first, other)
    if ratio is None or ratio.turns < _MIN_TURNS:
        return "noise: not known yet" if other.variant.twin else learning.TOO_FEW_TURNS
    if other.variant.twin:
        return f"noise: up to {ratio.max_deviation - 1:.1%}"
    least = noise or 1.0
    if ratio.low > 1 and ratio.mean > least:
        return "faster"
    if ratio.high < 1 and ratio.mean < 1 / least:
        return "slower"
    return "no difference beyond noise"


def comparison_rows(sides: Sequence[VariantRuns]) -> list[dict[str, Any]]:
    """The comparison as numbers and words, a row for each variant."""
    factor = noise_factor(sides)
    learned = learning.judge_learning([side.digests if side.completed else [] for side in sides])
    found = []
    for side, outcome in zip(sides, learned, strict=True):
        ratio = speed_ratio(sides[0], side)
        found.append(
            {
                "variant": side.variant.name,
                **_speed_columns(side),
                "times_first": ratio.mean if ratio else None,
                "times_first_low": ratio.low if ratio else None,
                "times_first_high": ratio.high if ratio else None,
                "turns": len(side.times_by_seed_and_turn),
                "turns_needed": max(0, _MIN_TURNS - (ratio.turns if ratio else 0)),
                "verdict": speed_verdict(sides[0], side, factor),
                **outcome,
                "run_dir": str(side.runs[0].folder),
            }
        )
    chosen = learning.recommended_row(
        found, [not (side.variant.twin or _uses_noop_hook(side)) for side in sides]
    )
    return [{**row, "chosen": row is chosen} for row in found]


def _speed_columns(side: VariantRuns) -> dict[str, Any]:
    times = sum((digest.times for digest in side.digests), StepTimes([]))
    if times.steps_per_s is None:
        return dict.fromkeys(("samples_per_s", "spread", "exposed_share", "wire_bytes_per_step", "cosine"))
    sample_s = [turn.sample_s for turn in side.times_by_seed_and_turn.values()]
    summaries = [run.summary for run in side.runs if run.summary is not None]
    steps = sum(one.steps for one in summaries)
    curves = [digest.fidelity["cosine"] for digest in side.digests if "cosine" in digest.fidelity]
    cosines = [value for curve in curves for value in curve.means]
    return {
        "samples_per_s": 1 / statistics.fmean(sample_s) if sample_s else None,
        "spread": half_interquartile_range([1 / seconds for seconds in sample_s]),
        "exposed_share": times.exposed_share,
        "wire_bytes_per_step": sum(one.wire_bytes or 0 for one in summaries) / steps if steps else None,
        "cosine": sum(cosines) / len(cosines) if cosines else None,
    }


def _uses_noop_hook(side: VariantRuns) -> bool:
    """Whether a hook discards what ranks should exchange: an upper bound of speed, not one to train with."""
    stages = [stage for digest in side.digests for stage in digest.stages]
    return any("noop" in sent.hooks for stage in stages for sent in stage.traffic)


def speed_and_learning_tables(rows: Sequence[ComparisonRow]) -> list[tuple[list[str], list[list[str]], str]]:
    """What a reader wants of the rows, a table of speed and one of learning: heads, cells, and a caption."""
    speed = [
        [*(_speed_cell(key, row) for key in _SPEED_COLUMNS), learning.overall_verdict(row)] for row in rows
    ]
    turns = format_count(rows[0]["turns"], "turn")  # the others' further turns are compared with nothing
    caption = f"Speed: over {turns}, with 95% intervals."
    return [
        ([*(head for head, _ in _SPEED_COLUMNS.values()), ""], speed, caption),
        learning.learning_table(rows),
    ]


def render_rows(rows: Sequence[ComparisonRow], form: str) -> str:
    """At least one row as text, json, csv or markdown."""
    if form == "json":
        return json.dumps(nonfinite_to_none(list(rows)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    lines: list[str] = []
    for heads, cells, caption in speed_and_learning_tables(rows):
        lines += [caption, ""]
        if form == "markdown":
            for row in (heads, ["---"] * len(heads), *cells):
                escaped = " | ".join(cell.replace("|", "\\|") for cell in row)
                lines.append(f"| {escaped} |")
        else:
            alignment = "".join(">" if index and head else "<" for index, head in enumerate(heads))
            lines += [line.rstrip() for line in format_table([heads, *cells], alignment)]
        lines.append("")
    for sentence in learning.comparison_sentences(rows):
        text = textwrap.wrap(sentence.replace("`", ""), _TEXT_WIDTH, break_on_hyphens=False)
        lines += [f"- {sentence}"] if form == "markdown" else text
    return "\n".join(lines) + "\n"


def _speed_cell(key: str, row: ComparisonRow) -> str:
    if row[key] is None:
        return "-"
    text = _SPEED_COLUMNS[key][1](row[key])
    if key == "samples_per_s" and row["spread"] is not None:
        text += f" ± {row['spread']:,.1f}"
    elif key == "times_first":
        text += f" ({row['times_first_low']:.2f} to {row['times_first_high']:.2f})"
    return text
