"""Several pipelines, or one with several settings, on the same machine at the same time of day.

All runs start together and take turns of so many steps, in an order that is drawn anew each round: whatever
disturbs the machine disturbs all of them alike. What is compared is the time of the same turn. The first run
is there twice. How far its twin is from it is noise, and so is every difference that is not larger.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ddprun import COMPARED
from ddprun.compare.time_slices import TimeSliceScheduler
from ddprun.launch.environment import handed_on
from ddprun.report.digest import Digest, digest
from ddprun.report.runs import NoRunError, Run

_LIKELY = 0.95
_DRAWS = 2000
_LEAST_TURNS = 6
_LAST_SHARE = 0.1
_ENDS_S = 15.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of a comparison."""

    name: str
    pipeline: Path
    overrides: tuple[str, ...] = ()
    twin: bool = False
    """The first one once more: what differs is noise."""


@dataclass(slots=True)
class Side:
    """What came out of one variant."""

    variant: Variant
    folder: Path
    code: int | None = None
    """Of its process."""

    digest: Digest | None = None
    turns_s: dict[int, float] = field(default_factory=dict)
    """The mean time of a step in each turn, by the turn's number."""

    @property
    def done(self) -> bool:
        """It has come to its end."""
        return self.code == 0 and self.digest is not None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as many steps a second as the first variant, from turn to turn."""

    mean: float
    low: float
    high: float
    turns: int


def variants(
    pipelines: Sequence[Path],
    overrides: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    *,
    noop: bool,
    twin: bool,
) -> list[Variant]:
    """What is to be compared.

    Args:
        pipelines: the files.
        overrides: for all of them.
        vary: keys, each with its values as YAML; all combinations are compared.
        noop: and the first one with nothing sent.
        twin: and the first one once more.
    """
    found = []
    settings = list(product(*([f"{key}={value}" for value in values] for key, values in vary)))
    for pipeline, chosen in product(pipelines, settings):
        name = ", ".join([pipeline.stem] * (len(pipelines) > 1 or not chosen) + list(chosen))
        found.append(Variant(name, pipeline, (*overrides, *chosen)))
    first = found[0]
    if noop:
        found.append(Variant("nothing sent (noop)", first.pipeline, (*first.overrides, "hooks=[noop]")))
    if twin:
        found.insert(1, Variant(f"{first.name} once more", first.pipeline, first.overrides, twin=True))
    return found


def run_all(
    chosen: Sequence[Variant], folder: Path, every: int, arguments: Sequence[str], tell: Callable[[str], None]
) -> list[Side]:
    """Run the variants in turns; gives what came out, in their order.

    Args:
        chosen: what to compare.
        folder: for what they leave behind.
        every: steps of a turn.
        arguments: of `ddprun run`, for all.
        tell: is told how it goes.
    """
    sides = [Side(variant, folder / f"{place}") for place, variant in enumerate(chosen)]
    order = random.Random(0)
    with _started(sides, every, arguments) as (scheduler, processes):
        tell(f"starting {len(sides)} runs")
        scheduler.wait_for_all()
        turns = 0
        while scheduler.any_alive():
            left = list(scheduler.left())
            order.shuffle(left)
            for run in left:
                scheduler.give(run)
            if not left:  # a run's ranks are starting again, or it comes to its end
                scheduler.wait_for_all()
                continue
            turns += 1
            tell(f"{turns} {'turn' if turns == 1 else 'turns'} of {every} steps")
        for side, process in zip(sides, processes, strict=True):
            side.code = process.wait()
    for side in sides:
        _read(side, every)
    return sides


@contextmanager
def _started(
    sides: Sequence[Side], every: int, arguments: Sequence[str]
) -> Iterator[tuple[TimeSliceScheduler, list["subprocess.Popen[bytes]"]]]:
    """All processes, and what gives them their turns; both are gone afterwards."""
    scheduler = TimeSliceScheduler(every)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place, side in enumerate(sides):
            command = [sys.executable, "-P", "-m", "ddprun", "run", str(side.variant.pipeline)]
            command += ["--run-dir", str(side.folder), *arguments]
            with handed_on((*side.variant.overrides, "timings.every=1")):
                environment = {**os.environ, COMPARED: scheduler.variable(place)}
                side.folder.parent.mkdir(parents=True, exist_ok=True)
                with side.folder.with_suffix(".log").open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the comparison, which ends them
                    )
            processes.append(process)
            scheduler.expect(place, partial(_is_alive, process))
        yield scheduler, processes
    finally:
        scheduler.close()  # those that wait for their turn fail then
        _end(processes)


def _is_alive(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is None


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End those that still run: all at once, and by force after a while."""
    until = time.monotonic() + _ENDS_S
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.5 if left else 0.0)
    for process in left:
        process.send_signal(signal.SIGTERM)  # the second one: at once
    for process in left:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(side: Side, every: int) -> None:
    """Take what the run left: its steps by turns. The first turn warms up, and does not count; nor does each
    turn's first step, whose data was loaded while others had their turn.
    """
    try:
        run = Run(side.folder)
    except NoRunError:
        return
    side.digest = digest(run)
    sums: dict[int, list[float]] = {}
    for rank in run.ranks:
        measured = {line["step"] for line in run.buckets(rank, holding=b'"fidelity"')}
        for line in run.steps(rank):
            turn = (line["step"] - 1) // every
            if (
                turn and line["step"] not in measured
            ):  # comparing with the exact gradient takes time of its own
                sums.setdefault(turn, []).append(line["step_us"] / 1e6)
    whole = every * max(1, len(run.ranks)) * 0.5
    side.turns_s = {turn: statistics.fmean(times) for turn, times in sums.items() if len(times) >= whole}


def ratio(first: Side, other: Side) -> Ratio | None:
    """How much faster the other is; None if they have no turns in common."""
    common = sorted(first.turns_s.keys() & other.turns_s.keys())
    if not common:
        return None
    return ratio_of([(first.turns_s[turn], other.turns_s[turn]) for turn in common])


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio of the whole times of what was measured in pairs.

    A median over pairs would not see what happens in few of them, as a synchronisation every hundred steps
    does. The interval comes from drawing pairs anew (bootstrap).
    """
    draw = random.Random(0)
    found = sorted(_of_sums(draw.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    low, high = (_quantile(found, share) for share in ((1 - _LIKELY) / 2, (1 + _LIKELY) / 2))
    return Ratio(_of_sums(pairs), low, high, len(pairs))


def _of_sums(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def noise(sides: Sequence[Side]) -> float | None:
    """How far a run may be from its twin: a factor of at least 1; None without a twin."""
    for side in sides[1:]:
        found = ratio(sides[0], side) if side.variant.twin and side.done and sides[0].done else None
        if found is not None and found.turns >= _LEAST_TURNS:
            return max(found.high, 1 / found.low, 1.0)
    return None


def verdict(first: Side, other: Side, factor: float | None) -> str:
    """In words: whether the other is faster, by more than noise."""
    if other is first:
        return "the first" if first.done else "failed"
    if not other.done:
        return "failed"
    if not first.done:
        return "the first has failed"
    found = ratio(first, other)
    if found is None or found.turns < _LEAST_TURNS:
        return "too few turns to tell"
    if other.variant.twin:
        return f"noise: up to {max(found.high, 1 / found.low, 1.0) - 1:.1%}"
    least = factor or 1.0
    if found.low > 1 and found.mean > least:
        return "faster"
    if found.high < 1 and found.mean < 1 / least:
        return "slower"
    return "no difference beyond noise"


def rows(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """The comparison's table: numbers, for whoever wants to print or draw them."""
    first, factor = sides[0], noise(sides)
    least = min((_samples(side) for side in sides if side.done), default=0)
    return [_row(first, side, factor, least) for side in sides]


def _row(first: Side, side: Side, factor: float | None, samples: int) -> dict[str, Any]:
    rates = sorted(1 / seconds for seconds in side.turns_s.values())
    found = ratio(first, side)
    run = side.digest.run if side.digest is not None else None
    summary: Mapping[str, Any] = (run.summary if run is not None and side.done else None) or {}
    steps_s, exposed_s = summary.get("seconds_in_steps"), summary.get("exposed_communication_s")
    cosine = side.digest.fidelity.get("cosine") if side.digest is not None else None
    known = [value for value in cosine.means if value is not None] if cosine is not None else []
    return {
        "variant": side.variant.name,
        "steps_per_s": statistics.median(rates) if rates else None,
        "spread": (_quantile(rates, 0.75) - _quantile(rates, 0.25)) / 2 if rates else None,
        "times_first": found.mean if found is not None else None,
        "times_first_low": found.low if found is not None else None,
        "times_first_high": found.high if found is not None else None,
        "turns": len(rates),
        "exposed_share": exposed_s / steps_s if steps_s and exposed_s is not None else None,
        "wire_bytes_per_step": summary["wire_bytes"] / summary["steps"] if summary.get("steps") else None,
        "cosine": statistics.fmean(known) if known else None,
        "loss": _loss_after(side, samples) if side.done else None,
        "loss_after_samples": samples if side.done else None,
        "verdict": verdict(first, side, factor),
        "run_dir": str(side.folder),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def _samples(side: Side) -> int:
    summary = side.digest.run.summary if side.digest is not None else None
    return int(summary["samples"]) if summary else 0


def _loss_after(side: Side, samples: int) -> float | None:
    """The mean loss over the last tenth of so many samples of all ranks."""
    assert side.digest is not None
    run = side.digest.run
    seen: dict[int, int] = {}
    losses: dict[int, float] = {}
    for rank in run.ranks:
        for line in run.steps(rank):
            seen[line["step"]] = seen.get(line["step"], 0) + line["samples"]
            if line["mean_loss"] is not None:
                losses[line["step"]] = line["mean_loss"]
    # Over the same samples for all, however often ranks told each other their losses.
    total, sums, counts, since = 0, 0.0, 0, 0
    for step in sorted(seen):
        total += seen[step]
        since += seen[step]
        if total > samples:
            break
        if step in losses:
            if total > samples * (1 - _LAST_SHARE):
                sums, counts = sums + losses[step] * since, counts + since
            since = 0
    return sums / counts if counts else None
