"""How well does a language model learn with each method, and how fast over a slow link?

    python -m benchmarks.language [--seeds 3] [--steps 1000] [--rounds 3] [--only sparseloco …] [--minutes 3]

A byte-level transformer of 4.9 million parameters learns Python's standard library on two ranks, as the files
`pipelines/language*.yaml`, `sparseloco.yaml` and `muloco.yaml` say. All methods see the same samples.

In each of `--rounds` rounds, `ddprun doctor` measures each link between two hosts (network namespaces; Linux,
root). Each method then trains a few periods on them, with a core each: without a limit on the link, and over
each link. Steps over a link are predicted from the former and from what doctor has found. Medians over rounds
count.

Training runs without a link, since a link changes no bit: once for each method and seed, with a held-out loss
every 200 steps. Plain DDP trains for `--steps`, the other methods for 1.4 times as many. The seconds to plain
DDP's loss are the steps until that loss, times the mean step over the link. Evaluations and the start do not
count. Prints a Markdown table.
"""

import math
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.page import ROOT, Pieces, argument_parser, print_head, print_row
from benchmarks.two_hosts import HOSTS, Link, doctor_report, finish, started
from tests.engine.running import events, lines
from tests.ranks import ddprun

from ddprun.compare.learning import confidence_half_width
from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun.host.processes import cores
from ddprun.predict.links import Links, parse_links
from ddprun.predict.measure import cost_models_of_run
from ddprun.units import format_count

EVERY = 200  # steps from one held-out loss to the next
LONGER = 1.4  # times `--steps`: how long all methods but plain DDP train
LINKS = (Link(100), Link(37, 8))
_COMPUTED = ("data_us", "forward_us", "backward_us", "optimizer_us")
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
        evaluated = [event for event in events(folder) if event["event"] == "evaluated"]
        buckets = [record for record in lines(folder, "buckets") if record["rank"] == 0]
    losses = [[event["step"], event["loss"]] for event in evaluated]
    # Of the method alone: without the mean weights that held-out losses are measured with.
    sent = sum(record["wire_bytes"] for record in buckets if record["kind"] in ("gradient", "delta"))
    return {"losses": losses, "bytes": sent / steps}


def _timed_run(folder: Path, method: Method, link: Link | None) -> Path:
    """Train a few periods on two hosts; gives the run's folder."""
    file = str(ROOT / "pipelines" / method.file)
    settings = [f"--set=stages=[train: {{steps: {method.timed_steps}}}]", "--set=checkpoint.keep=0"]
    settings += ["--set=warmup_steps=0", "--set=timings.gradients=true"]
    finish(started(folder, file, settings, local=1, link=link, warm=True, own_cores=True))
    return folder / "run"


def examine(link: Link) -> str:
    """What `ddprun doctor` says of a link: its report as JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        return doctor_report(Path(scratch), link).read_text()


def time_steps(method: Method, reports: Sequence[str]) -> dict[str, list[float]]:
    """A mean step over each link: its `seconds`, what is `predicted` from a run without a limit on the link
    and from doctor's report of it, and the part in which rank 0 is `computing`.
    """
    found: dict[str, list[float]] = {"seconds": [], "computing": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = _timed_run(Path(scratch), method, None)
        model = next(cost_models_of_run(folder, Links(), cores=cores() / HOSTS))
        explained = explain(load(folder / "pipeline.yaml"), hosts=HOSTS, ranks_per_host=1)
        links = []
        for report in reports:
            (folder / "link.json").write_text(report)
            links.append(parse_links(str(folder / "link.json")))
    steps = [model.predict(explained.stages[0], explained.world, link) for link in links]
    found["predicted"] = [step.step_us / 1e6 for step in steps]
    for link in LINKS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = _timed_run(Path(scratch), method, link)
            of_rank_0 = [record for record in lines(folder, "steps") if record["rank"] == 0]
        timed = [record for record in of_rank_0 if record["step"] > method.period]
        seconds = sum(record["step_us"] for record in timed) / 1e6
        computed = sum(record[part] for record in timed for part in _COMPUTED) / 1e6
        found["seconds"].append(seconds / len(timed))
        found["computing"].append(computed / seconds)
    return found


def medians(rounds: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Over rounds, of what `time_steps` gives."""
    return {
        name: [median(values) for values in zip(*(one[name] for one in rounds), strict=True)]
        for name in rounds[0]
    }


def steps_to(losses: list[list[float]], wanted: float) -> float | None:
    """After how many steps a loss is reached, between two measurements as the line between them says; never
    before the first measurement.
    """
    (before, high), *rest = losses
    if high <= wanted:
        return before
    for step, low in rest:
        if low <= wanted:
            return step - (step - before) * (wanted - low) / (high - low)
        before, high = step, low
    return None


def interval(values: list[float]) -> str:
    """The mean and its 95% interval (Student's t)."""
    half = confidence_half_width(values)
    return f"{mean(values):.4f}" + ("" if half is None else f" ± {half:.4f}")


def show(
    found: Mapping[Method, list[dict[str, Any]]], times: Mapping[Method, dict[str, list[float]]], steps: int
) -> None:
    """Print three tables: what the methods send and learn, the losses on the way, and the time over links."""
    curves = {method: [dict(run["losses"]) for run in runs] for method, runs in found.items()}
    wanted = [curve[steps] for curve in curves[PLAIN]]
    sent = {method: mean(run["bytes"] for run in runs) for method, runs in found.items()}
    steps_needed: dict[Method, float] = {}
    heads = ["bytes per step and rank", f"held-out loss after {steps} steps", "relative to plain DDP"]
    print_head(["method", "file", *heads, "steps to plain DDP's loss"])
    for method, runs in found.items():
        losses = [curve[steps] for curve in curves[method]]
        ratio = mean(one / plain for one, plain in zip(losses, wanted, strict=True))
        needed = [steps_to(run["losses"], loss) for run, loss in zip(runs, wanted, strict=True)]
        reached = [one for one in needed if one is not None]
        if len(reached) == len(needed):
            steps_needed[method] = mean(reached)
        fewer = "" if method is PLAIN else f" (1/{sent[PLAIN] / sent[method]:,.0f})"
        cells = [method.name, f"`{method.file}`", f"{sent[method]:,.0f}{fewer}", interval(losses)]
        shown = (
            f"{mean(reached):,.0f}" if method in steps_needed else f"{len(reached)} of {len(needed)} reach it"
        )
        print_row([*cells, f"{ratio - 1:+.1%}", shown])
    print(f"\nThe held-out losses on the way, averaged over {format_count(len(wanted), 'seed')}:\n")
    measured = sorted({step for (curve, *_) in curves.values() for step in curve})
    print_head(["steps", *map(str, measured)])
    for method, of_seeds in curves.items():
        found_by = (
            mean(curve[step] for curve in of_seeds) if step in of_seeds[0] else None for step in measured
        )
        print_row([method.name, *("" if loss is None else f"{loss:.3f}" for loss in found_by)])
    errors: list[float] = []
    for number, link in enumerate(LINKS):
        latency = f" with {link.one_way_ms:g} ms each way" if link.one_way_ms else ""
        print(f"\nOver a link of {link.mbit:g} Mbit/s{latency}:\n")
        heads = ["ms per step", "predicted", "computing", "seconds to plain DDP's loss", "times as fast"]
        print_head(["method", *heads])
        step_s = {method: of_method["seconds"][number] for method, of_method in times.items()}
        for method, of_method in times.items():
            errors.append(of_method["predicted"][number] / step_s[method] - 1)
            guess = f"{1000 * of_method['predicted'][number]:,.0f} ({errors[-1]:+.0%})"
            cells = [
                method.name,
                f"{1000 * step_s[method]:,.0f}",
                guess,
                f"{of_method['computing'][number]:.0%}",
            ]
            if method not in steps_needed:
                print_row([*cells, "", ""])
                continue
            seconds = {one: steps_needed[one] * step_s[one] for one in (method, PLAIN)}
            print_row([*cells, f"{seconds[method]:,.0f}", f"{seconds[PLAIN] / seconds[method]:.1f}"])
    sizes = [*map(abs, errors)]
    print(f"\nThe error of a prediction is {median(sizes):.1%} in the median, and at most {max(sizes):.1%}.")


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__, in_pieces=True)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="in which steps over the links are timed")
    parser.add_argument(
        "--only", nargs="+", default=[], help="files whose name has one of these, beside plain"
    )
    asked = parser.parse_args()
    if asked.steps % EVERY:
        parser.error(f"--steps must be a multiple of {EVERY}")
    for link in LINKS:
        if refused := link.refusal():
            sys.exit(refused)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [
        one
        for one in METHODS
        if one is PLAIN or not asked.only or any(word in one.file for word in asked.only)
    ]
    files = {method.name: (ROOT / "pipelines" / method.file).read_text() for method in chosen}
    links = [link.words for link in LINKS]
    pieces = Pieces("language", [asked.steps, asked.seeds, asked.rounds, links, files], asked.minutes)
    rounds: dict[Method, list[dict[str, list[float]]]] = {method: [] for method in chosen}
    for number in range(asked.rounds):
        reports = [pieces.take(f"link {number} {link.mbit:g}", partial(examine, link)) for link in LINKS]
        for method in random.Random(number).sample(chosen, len(chosen)):
            rounds[method].append(
                pieces.take(f"times {number} {method}", partial(time_steps, method, reports))
            )
    longer = EVERY * math.ceil(LONGER * asked.steps / EVERY)
    found: dict[Method, list[dict[str, Any]]] = {method: [] for method in chosen}
    for seed in range(asked.seeds):
        for method in random.Random(seed).sample(chosen, len(chosen)):
            steps = asked.steps if method is PLAIN else longer
            found[method].append(pieces.take(f"{seed} {method}", partial(learn, method, seed, steps)))
    show(found, {method: medians(taken) for method, taken in rounds.items()}, asked.steps)
    pieces.end()


if __name__ == "__main__":
    main()
