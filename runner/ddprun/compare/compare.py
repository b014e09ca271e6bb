"""Run variants side by side on one machine, and measure how they differ.

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
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddprun import COMPARED
from ddprun.compare import learning
from ddprun.compare.time_slices import TimeSliceScheduler
from ddprun.config import load
from ddprun.launch.launcher import export_overrides
from ddprun.report.digest import Digest, digest, merged
from ddprun.report.runs import NoRunError, Run
from ddprun.telemetry.writer import finite
from ddprun.units import count, size

_CONFIDENCE = 0.95
_DRAWS = 2000
_MIN_TURNS = 6
_END_S = 15.0
_NOOP = "hooks=[noop]"
_SPEED = {
    "variant": "",
    "steps_per_s": "steps/s",
    "times_first": "times the first",
    "exposed_share": "exposed",
    "wire_bytes_per_step": "sent per step",
    "cosine": "fidelity",
}
Row = Mapping[str, Any]  # as `rows` makes it


@dataclass(frozen=True, slots=True)
class Variant:
    """One pipeline with its overrides."""

    name: str
    pipeline: Path
    overrides: tuple[str, ...] = ()
    twin: bool = False  # the first variant once more: what differs between the two is noise


def variants(
    pipelines: Sequence[Path],
    overrides: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    *,
    noop: bool,
    twin: bool,
) -> list[Variant]:
    """All variants, in the order of the table: all combinations of the values, as YAML, that keys `vary` by.

    `noop` adds the first one with nothing sent, `twin` the first one once more. `overrides` are for all.
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
        found.append(Variant("nothing sent (noop)", first.pipeline, (*first.overrides, _NOOP)))
    if twin:
        found.insert(1, Variant(f"{first.name} once more", first.pipeline, first.overrides, twin=True))
    return found


def fitted(variant: Variant, steps: int | None) -> Variant:
    """The variant with `steps` in its one stage that takes any; a `noop` one also has it in every stage.

    Raises:
        PipelineError: faults of the pipeline, or several of its stages take steps.
    """
    noop = variant.overrides[-1:] == (_NOOP,)
    if steps is None and not noop:
        return variant
    loaded = load(variant.pipeline, variant.overrides)
    stages = loaded.pipeline.step_stages()
    more: list[str] = []
    if steps is not None:
        if len(stages) != 1:
            text = f"{len(stages)} stages take steps: --steps needs a pipeline with one"
            raise loaded.error("stages", text, "leave --steps out, or name one stage")
        more.append(_with_steps(stages[0], loaded.root.data().get("stages"), steps))
    if noop:
        own = [stage for stage in stages if "hooks" in stage.model_fields_set]
        more += [f"stages[{stage.index}].{stage.name}.hooks=[noop]" for stage in own]
    return replace(variant, overrides=(*variant.overrides, *more))


def _with_steps(stage: Any, written: Any, steps: int) -> str:
    """The override that gives a stage so many steps; `written`: `stages` as the file has it."""
    if written is None:
        return f"stages=[{{{stage.name}: {{steps: {steps}}}}}]"
    item = written[stage.index]
    options = dict((item.get(stage.name) or {}) if isinstance(item, dict) else {})
    options.pop("epochs", None)
    value = {stage.name: {**options, "steps": steps}}
    return f"stages[{stage.index}]={json.dumps(value, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class Place:
    """One of several hosts, on which the same runs take turns."""

    host: int  # its number, from 0
    rdzv_id: str  # each run's has its own number behind this


@dataclass(slots=True)
class Repetition:
    """A run of a variant under one seed."""

    folder: Path
    seed: int | None = None  # None: the pipeline's own
    code: int | None = None  # the exit code of its process
    digest: Digest | None = None
    turns_s: dict[int, float] = field(default_factory=dict)  # mean time of a step, by the turn's number

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return self.code == 0 and self.digest is not None

    @property
    def summary(self) -> Mapping[str, Any]:
        """The run's; empty if it did not run to its end."""
        return (self.digest.run.summary if self.digest and self.done else None) or {}


@dataclass(slots=True)
class Side:
    """A variant, and what came out of it under each seed."""

    variant: Variant
    runs: list[Repetition]

    @property
    def done(self) -> bool:
        """Whether all of its runs came to their ends."""
        return all(run.done for run in self.runs)

    @property
    def turns_s(self) -> dict[tuple[int, int], float]:
        """The mean time of a step, by the number of the seed and of the turn."""
        return {
            (n, turn): seconds for n, run in enumerate(self.runs) for turn, seconds in run.turns_s.items()
        }

    @property
    def digests(self) -> list[Digest]:
        """Of the runs that left records."""
        return [run.digest for run in self.runs if run.digest is not None]

    def merged(self) -> Digest | None:
        """Its runs as one; None if none of them left records."""
        return merged(self.digests) if self.digests else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as many steps per second as the first variant, over the same turns."""

    mean: float
    low: float
    high: float
    turns: int

    @property
    def noise(self) -> float:
        """The factor, at least 1, by which the interval reaches away from 1."""
        return max(self.high, 1 / self.low, 1.0)


def run_all(
    chosen: Sequence[Variant],
    seeds: Sequence[int | None],
    folder: Path,
    every: int,
    arguments: Sequence[str],
    progress: Callable[[str], None],
    place: Place | None = None,
) -> list[Side]:
    """Run the variants in turns of `every` steps, under one seed after the other, and read what they left.

    `arguments` of `ddprun run` are the same for all; `progress` is called with each piece of news. On several
    hosts, each does the same at its `place`: the turns come in one order on all, and no host is a turn ahead,
    for ranks wait for each other.
    """
    sides = [Side(variant, []) for variant in chosen]
    for seed in seeds:
        for index, side in enumerate(sides):
            name = f"{index}" if len(seeds) == 1 else f"{index}-seed-{seed}"
            side.runs.append(Repetition(folder / name, seed))
        progress(f"starting {count(len(sides), 'run')}" + ("" if len(seeds) == 1 else f" with seed {seed}"))
        asyncio.run(_take_turns(sides, every, arguments, progress, place))
        for side in sides:
            read(side.runs[-1], every)
    return sides


async def _take_turns(
    sides: Sequence[Side],
    every: int,
    arguments: Sequence[str],
    progress: Callable[[str], None],
    place: Place | None,
) -> None:
    """Run the last repetition of each side."""
    draw, order, turns = random.Random(0), list(range(len(sides))), 0
    async with _started(sides, every, arguments, place) as (scheduler, processes):
        await scheduler.wait_for_all()
        while scheduler.any_alive():
            left = frozenset(scheduler.left())
            draw.shuffle(order)  # of all of them: hosts may not see at the same moment that one has ended
            for run in order:
                if run in left:
                    await scheduler.give(run)
            if not left:  # a run's ranks are starting again, or it is ending
                await scheduler.wait_for_all()
                continue
            turns += 1
            progress(f"{count(turns, 'turn')} of {every} steps")
        for side, process in zip(sides, processes, strict=True):
            side.runs[-1].code = process.wait()


@asynccontextmanager
async def _started(
    sides: Sequence[Side], every: int, arguments: Sequence[str], place: Place | None
) -> AsyncIterator[tuple[TimeSliceScheduler, list[Popen[bytes]]]]:
    """All processes and their scheduler; both are gone afterwards."""
    processes: list[Popen[bytes]] = []
    try:
        async with TimeSliceScheduler(every) as scheduler:  # runs that wait for their turn fail when it ends
            for number, side in enumerate(sides):
                run, overrides = side.runs[-1], [*side.variant.overrides, "timings.every=1"]
                if run.seed is not None:
                    overrides.append(f"seed={run.seed}")
                command = [sys.executable, "-P", "-m", "ddprun", "run", str(side.variant.pipeline)]
                command += ["--run-dir", str(run.folder), *arguments]
                if place is not None:
                    command += ["--rdzv-id", f"{place.rdzv_id}-{number}"]
                run.folder.parent.mkdir(parents=True, exist_ok=True)
                with export_overrides(overrides), log_of(run, place).open("wb") as log:
                    process = Popen(
                        command,
                        stdin=DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, COMPARED: scheduler.variable(number)},
                        start_new_session=True,  # Ctrl-C is for the comparison, which ends them
                    )
                processes.append(process)
                scheduler.expect(number, partial(_is_alive, process))
            yield scheduler, processes
    finally:
        _end(processes)


def log_of(run: Repetition, place: Place | None = None) -> Path:
    """What the run writes on its screen; each host but the first has a file of its own."""
    host = f".host-{place.host}" if place is not None and place.host else ""
    return run.folder.with_name(f"{run.folder.name}{host}.log")


def _is_alive(process: Popen[bytes]) -> bool:
    return process.poll() is None


def _end(processes: Sequence[Popen[bytes]]) -> None:
    """End the processes that still run: all at once, and by force after a while."""
    until = time.monotonic() + _END_S
    left = list(filter(_is_alive, processes))
    for process in left:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.5 if left else 0.0)
    for process in left:
        process.send_signal(signal.SIGTERM)  # the second one: at once
    for process in left:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except TimeoutExpired:
            process.kill()
            process.wait()


def read(run: Repetition, every: int) -> None:
    """Read a run's steps by turns of `every`.

    The first turn warms up and does not count; nor do steps that measure fidelity, which takes time of its
    own.
    """
    try:
        found = Run(run.folder)
    except NoRunError:
        return
    measured = {line["step"] for rank in found.ranks for line in found.buckets(rank, holding=b'"fidelity"')}

    def timed(step: int) -> bool:
        return step > every and step not in measured

    run.digest = digest(found, timed)
    times: dict[int, list[float]] = {}
    for rank in found.ranks:
        for line in found.steps(rank, timed):
            times.setdefault((line["step"] - 1) // every, []).append(line["step_us"] / 1e6)
    half = every * max(1, len(found.ranks)) * 0.5
    run.turns_s = {turn: statistics.fmean(of) for turn, of in times.items() if len(of) >= half}


def ratio(first: Side, other: Side) -> Ratio | None:
    """How much faster the other is; None if they have no turns in common."""
    common = sorted(first.turns_s.keys() & other.turns_s.keys())
    return ratio_of([(first.turns_s[turn], other.turns_s[turn]) for turn in common]) if common else None


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio of the total times of what was measured in pairs.

    A median over pairs would miss what happens in few of them, such as a synchronisation every hundred steps.
    The interval comes from drawing the pairs anew (bootstrap).
    """
    draw = random.Random(0)
    found = sorted(_of_sums(draw.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    tail = (1 - _CONFIDENCE) / 2
    return Ratio(_of_sums(pairs), _quantile(found, tail), _quantile(found, 1 - tail), len(pairs))


def _of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def noise(sides: Sequence[Side]) -> float | None:
    """By which factor, at least 1, a run may differ from its twin; None if that is not known."""
    for side in sides[1:]:
        found = ratio(sides[0], side) if side.variant.twin and side.done and sides[0].done else None
        if found is not None and found.turns >= _MIN_TURNS:
            return found.noise
    return None


def verdict(first: Side, other: Side, noise: float | None) -> str:
    """In words, whether the other is faster by more than noise."""
    if other is first:
        return "the first" if first.done else "failed"
    if not other.done:
        return "failed"
    if not first.done:
        return "the first has failed"
    found = ratio(first, other)
    if found is None or found.turns < _MIN_TURNS:
        return "too few turns to tell"
    if other.variant.twin:
        return f"noise: up to {found.noise - 1:.1%}"
    least = noise or 1.0
    if found.low > 1 and found.mean > least:
        return "faster"
    if found.high < 1 and found.mean < 1 / least:
        return "slower"
    return "no difference beyond noise"


def rows(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """The comparison as numbers and words, a row for each variant."""
    factor = noise(sides)
    learned = learning.judge([side.digests if side.done else [] for side in sides])
    found = []
    for side, outcome in zip(sides, learned, strict=True):
        speed = ratio(sides[0], side)
        found.append(
            {
                "variant": side.variant.name,
                **_speed(side),
                "times_first": speed.mean if speed else None,
                "times_first_low": speed.low if speed else None,
                "times_first_high": speed.high if speed else None,
                "turns": len(side.turns_s),
                "verdict": verdict(sides[0], side, factor),
                **outcome,
                "run_dir": str(side.runs[0].folder),
            }
        )
    chosen = learning.choose(found, [not (side.variant.twin or _sends_nothing(side)) for side in sides])
    return [{**row, "chosen": row is chosen} for row in found]


def _speed(side: Side) -> dict[str, Any]:
    if (found := side.merged()) is None or found.steps_per_s is None:
        return dict.fromkeys(("steps_per_s", "spread", "exposed_share", "wire_bytes_per_step", "cosine"))
    rates = sorted(1 / seconds for seconds in side.turns_s.values())
    summaries = [run.summary for run in side.runs]
    steps = sum(summary.get("steps", 0) for summary in summaries)
    return {
        "steps_per_s": found.steps_per_s,
        "spread": (_quantile(rates, 0.75) - _quantile(rates, 0.25)) / 2 if rates else None,
        "exposed_share": found.times.exposed,
        "wire_bytes_per_step": sum(one.get("wire_bytes", 0) for one in summaries) / steps if steps else None,
        "cosine": found.cosine,
    }


def _sends_nothing(side: Side) -> bool:
    """Whether a hook discards what ranks should exchange: an upper bound, and nothing to train with."""
    stages = [stage for digest in side.digests for stage in digest.stages]
    return any("noop" in sent.hooks for stage in stages for sent in stage.sent)


def tables(rows: Sequence[Row]) -> list[tuple[list[str], list[list[str]], str]]:
    """What a reader wants of the rows, a table of speed and one of learning: heads, cells, and a caption."""
    speed = [[*(_cell(key, row) for key in _SPEED), learning.conclusion(row)] for row in rows]
    said = f"Speed: over {count(max(row['turns'] for row in rows), 'turn')}, with 95 % intervals."
    return [([*_SPEED.values(), ""], speed, said), learning.table(rows)]


def text(rows: Sequence[Row], form: str, width: int | None) -> str:
    """At least one row in one of `FORMATS`.

    `width`: columns of text; None: those of the terminal, on which it will be shown.
    """
    out = io.StringIO()
    if form == "json":
        return json.dumps(finite(list(rows)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if form == "csv":
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    said = learning.sentences(rows)
    if form == "markdown":
        for heads, cells, caption in tables(rows):
            lines = [
                heads,
                ["---"] * len(heads),
                *([cell.replace("|", "\\|") for cell in row] for row in cells),
            ]
            out.write(f"{caption}\n\n")
            out.writelines(f"| {' | '.join(line)} |\n" for line in lines)
            out.write("\n")
        out.write("\n".join(f"- {sentence}" for sentence in said) + "\n")
        return out.getvalue()
    console = Console(file=out, highlight=False, width=width, force_terminal=width is None or None)
    for heads, cells, caption in tables(rows):
        shown = Table(box=SIMPLE)
        for index, head in enumerate(heads):
            shown.add_column(head, justify="right" if index and head else "left")
        for row in cells:
            shown.add_row(*map(Text, row))
        console.print(Text(caption), shown, sep="\n")
    for sentence in said:
        console.print(Text(sentence.replace("`", "")))
    return out.getvalue()


def _cell(key: str, row: Row) -> str:
    value = row[key]
    if value is None:
        return "-"
    match key:
        case "steps_per_s":
            return f"{value:.1f}" + ("" if row["spread"] is None else f" ± {row['spread']:.1f}")
        case "times_first":
            return f"{value:.2f} ({row['times_first_low']:.2f} to {row['times_first_high']:.2f})"
        case "exposed_share":
            return f"{value:.0%}"
        case "wire_bytes_per_step":
            return size(value)
        case "cosine":
            return f"{value:.4f}"
    return str(value)
