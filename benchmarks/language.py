"""How well does a language model learn with each method, and how fast over a slow link?

    python -m benchmarks.language [--seeds 3] [--steps 1000] [--only sparseloco …] [--minutes 3]

A byte-level transformer of 4.9 million parameters learns Python's standard library on two ranks, as the files
`pipelines/language*.yaml`, `sparseloco.yaml` and `muloco.yaml` say. All methods see the same samples.

Training runs without a link, since a link changes no bit: once for each method and seed, with a held-out loss
every 200 steps. Plain DDP trains for `--steps`, the other methods for 1.4 times as many. Over each link,
each method then trains a few periods on two hosts (network namespaces; Linux, root) with a core each. The
seconds to plain DDP's loss are the steps until that loss, times the mean step over the link. Evaluations and
the start do not count. Prints a Markdown table.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.page import ROOT, Pieces, print_head, print_row
from benchmarks.two_hosts import HOSTS, Link, run
from tests.ranks import ddprun

from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun.host.processes import cores
from ddprun.predict.links import Links, parse_links
from ddprun.predict.measure import cost_model_of_run

EVERY = 200  # steps from one held-out loss to the next
LONGER = 1.4  # times `--steps`, for methods that have not reached plain DDP's loss
LINKS = (Link(100), Link(37, 8))
_COMPUTED = ("data_us", "forward_us", "backward_us", "optimizer_us")
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95%, by the number of values
_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    file: str
    period: int = 1  # steps from one exchange to the next
    periods: int = 12  # that are timed over a link, after one that is not

    @property
    def timed_steps(self) -> int:
        """How many steps a run over a link has."""
        return self.period * (self.periods + 1)


METHODS = (
    Method("plain DDP", "language.yaml"),
    Method("fp16", "language-fp16.yaml"),
    Method("PowerSGD", "language-powersgd.yaml"),
    Method("DiLoCo", "language-diloco.yaml", 10, 6),
    Method("DiLoCo, int4", "language-diloco-int4.yaml", 10, 6),
    Method("SparseLoCo", "sparseloco.yaml", 5, 12),
    Method("MuLoCo", "muloco.yaml", 20, 3),
)
PLAIN = METHODS[0]


def _records(folder: Path) -> list[dict[str, Any]]:
    """Those of rank 0's steps."""
    with (folder / "steps" / "rank-00000.jsonl").open() as file:
        return [record for record in map(json.loads, file) if record["step"]]


def learn(method: Method, seed: int, steps: int) -> dict[str, Any]:
    """Train for so many steps on this machine: the held-out `losses` by step, and the `bytes` that rank 0
    sends in a mean step.
    """
    stage = f"train: {{steps: {steps}, evaluate: {{every: {EVERY}}}}}"
    with tempfile.TemporaryDirectory() as scratch:
        settings = [f"--set=seed={seed}", f"--set=stages=[{stage}]", "--set=checkpoint.keep=0"]
        command = [str(ROOT / "pipelines" / method.file), *settings, "--run-dir=run", "--nproc-per-node=2"]
        done = ddprun(*command, cwd=Path(scratch), timeout_s=_LIMIT_S, fresh=True)
        if done.code:
            raise RuntimeError(done.stderr)
        folder = Path(scratch, "run")
        events = [json.loads(line) for line in (folder / "events.jsonl").open()]
        with (folder / "buckets" / "rank-00000.jsonl").open() as file:
            # Of the method alone: without the mean weights that held-out losses are measured with.
            sent = sum(
                one["wire_bytes"] for one in map(json.loads, file) if one["kind"] in ("gradient", "delta")
            )
    losses = [[event["step"], event["loss"]] for event in events if event["event"] == "evaluated"]
    return {"losses": losses, "bytes": sent / steps}


def _timed_run(folder: Path, method: Method, link: Link | None) -> Path:
    """Train a few periods on two hosts; gives the run's folder."""
    file = str(ROOT / "pipelines" / method.file)
    settings = [f"--set=stages=[train: {{steps: {method.timed_steps}}}]", "--set=checkpoint.keep=0"]
    settings += ["--set=warmup_steps=0", "--set=timings.gradients=true"]
    run(folder, file, settings, local=1, run_dir="run", link=link, warm=True, own_cores=True)
    return folder / "run"


def over_link(method: Method, link: Link) -> dict[str, float]:
    """A mean step over a link: its `seconds`, and the part in which rank 0 computes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _timed_run(Path(scratch), method, link)
        timed = [record for record in _records(folder) if record["step"] > method.period]
    seconds = sum(record["step_us"] for record in timed)
    computed = sum(record[part] for record in timed for part in _COMPUTED)
    return {"seconds": seconds / 1e6 / len(timed), "computing": computed / seconds}


def predict(method: Method) -> list[float]:
    """Seconds of a mean step over each link, as predicted from a run without a limit on the link."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _timed_run(Path(scratch), method, None)
        model = cost_model_of_run(folder, Links(), cores=cores() / HOSTS)
        found = explain(load(folder / "pipeline.yaml"), hosts=HOSTS, ranks_per_host=1)
    stage = found.stages[0]
    return [model.predict(stage, found.world, parse_links(*link.words)).step_us / 1e6 for link in LINKS]


def steps_to(losses: list[list[float]], wanted: float) -> float | None:
    """After how many steps a loss is reached, between two measurements as the line between them says."""
    for (before, high), (step, low) in pairwise(losses):
        if low <= wanted:
            return (
                float(step - (step - before) * (wanted - low) / (high - low))
                if high > wanted
                else float(before)
            )
    return None


def interval(values: list[float]) -> str:
    """The mean and its 95% interval (Student's t)."""
    if len(values) not in _STUDENT:
        return f"{mean(values):.4f}"
    return f"{mean(values):.4f} ± {_STUDENT[len(values)] * stdev(values) / math.sqrt(len(values)):.4f}"


def show(
    found: dict[Method, list[dict[str, Any]]],
    times: dict[tuple[Method, Link], dict[str, float]],
    predicted: dict[Method, list[float]],
    steps: int,
) -> None:
    """Print the table, and the fastest method over the slowest link."""
    links = [f"{link.mbit:g} Mbit/s" for link in LINKS]
    heads = [
        "method",
        "file",
        "bytes per step and rank",
        f"held-out loss after {steps} steps",
        "against plain",
    ]
    heads += ["steps to plain DDP's loss", *(f"ms per step, {link}: predicted / measured" for link in links)]
    print_head(
        [*heads, *(f"computing, {link}" for link in links), *(f"s to the loss, {link}" for link in links)]
    )
    plain_losses = [dict(map(tuple, run["losses"]))[steps] for run in found[PLAIN]]
    seconds: dict[tuple[Method, Link], float] = {}
    errors: list[float] = []
    for method, runs in found.items():
        losses = [dict(map(tuple, run["losses"]))[steps] for run in runs]
        ratio = mean(one / other for one, other in zip(losses, plain_losses, strict=True))
        needed = [steps_to(run["losses"], wanted) for run, wanted in zip(runs, plain_losses, strict=True)]
        reached = [one for one in needed if one is not None]
        all_reached = len(reached) == len(needed)
        for link in LINKS if all_reached else ():
            seconds[method, link] = mean(reached) * times[method, link]["seconds"]
        cells = [
            method.name,
            f"`{method.file}`",
            f"{mean(run['bytes'] for run in runs):,.0f}",
            interval(losses),
        ]
        cells += [f"{ratio - 1:+.1%}", f"{mean(reached):.0f}" if all_reached else f"not in {len(runs)} runs"]
        for guess, link in zip(predicted[method], LINKS, strict=True):
            fact = times[method, link]["seconds"]
            errors.append(abs(guess / fact - 1))
            cells.append(f"{1000 * guess:.0f} / {1000 * fact:.0f} ({guess / fact - 1:+.0%})")
        cells += [f"{times[method, link]['computing']:.0%}" for link in LINKS]
        print_row([*cells, *(f"{seconds[method, link]:.0f}" if all_reached else "" for link in LINKS)])
    slowest = LINKS[-1]
    fastest = min(
        (method for method, link in seconds if link == slowest), key=lambda one: seconds[one, slowest]
    )
    speedup = seconds[PLAIN, slowest] / seconds[fastest, slowest]
    fewer = mean(run["bytes"] for run in found[PLAIN]) / mean(run["bytes"] for run in found[fastest])
    print(
        f"\nOver {slowest.mbit:g} Mbit/s with {slowest.one_way_ms:g} ms each way, {fastest.name} reaches "
        f"plain DDP's loss {speedup:.1f} times as fast. It sends {fewer:,.0f} times fewer bytes per step. "
        f"The median error of a predicted step is {median(errors):.1%}, and the largest is {max(errors):.1%}."
    )


def main() -> None:
    """Measure and print."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--only", nargs="+", default=[], help="files whose name has one of these, beside plain"
    )
    parser.add_argument("--minutes", type=float, help="a piece of it: then the same command continues")
    asked = parser.parse_args()
    for link in LINKS:
        if refused := link.refusal():
            sys.exit(refused)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [
        one
        for one in METHODS
        if one is PLAIN or not asked.only or any(word in one.file for word in asked.only)
    ]
    files = [(ROOT / "pipelines" / method.file).read_text() for method in METHODS]
    pieces = Pieces("language", [asked.steps, files], asked.minutes)
    times = {
        (method, link): pieces.take(f"{link} {method}", partial(over_link, method, link))
        for link in LINKS
        for method in chosen
    }
    longer = EVERY * math.ceil(LONGER * asked.steps / EVERY)
    predicted = {method: pieces.take(f"predicted {method}", partial(predict, method)) for method in chosen}
    found: dict[Method, list[dict[str, Any]]] = {method: [] for method in chosen}
    for seed in range(asked.seeds):
        for method in random.Random(seed).sample(chosen, len(chosen)):
            steps = asked.steps if method is PLAIN else longer
            found[method].append(pieces.take(f"{seed} {method}", partial(learn, method, seed, steps)))
    show(found, times, predicted, asked.steps)
    pieces.end()


if __name__ == "__main__":
    main()
