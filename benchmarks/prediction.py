"""How well does `ddprun explain --link` predict what steps then take?

    python -m benchmarks.prediction [--models cnn] [--links 100] [--minutes 3]
    python -m benchmarks.prediction --ranks

The first needs Linux and root; run it in the repository's folder. Two network namespaces with two ranks each
are joined by links of five kinds. For each model, runs without a limit on the link measure what steps cost:
without exchange, and with each stack of hooks. From that alone each case is predicted: model, stack, policy,
link. Then each case is run, in turns, and costs are measured before and after each run. Each host has half of
the cores of this machine. Prints Markdown tables: the errors, and whether the fastest by prediction is the
fastest in fact.

A machine is not always equally fast. So a control stands between all stages, whose steps send nothing. Of the
times that a case was run, the half counts whose controls before and after it are fastest, and of that half
the median. So it is with the stages that measure costs. Nothing but the controls chooses.

With `--ranks`, two ranks on this machine are measured, and steps of up to 16 are predicted and run, which
share its cores.
"""

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.page import DOES_NOT_HOLD, Pieces, argument_parser, print_head, print_row
from benchmarks.two_hosts import HOSTS, TIMEOUT_S, Link, finish, started
from tests.engine.running import lines
from tests.ranks import ddprun

from ddprun.config import load
from ddprun.explain.explain import explain
from ddprun.host.processes import cores
from ddprun.predict.links import Links, parse_links
from ddprun.predict.measure import cost_models_of_run

LOCAL = 2  # ranks on a host
ON_ONE_HOST = ["[]", "[fp16]", "[shared_memory]"]
RANKS = (2, 4, 8, 16)
CYCLE = 8  # steps of a policy from one exchange to the next
CONTROL = (12, None, "independent")  # the stage between all others: steps, hooks, sync
WARM_UP = 4  # steps of a stage that do not count, or one cycle
MEDIAN_ERROR, WORST_ERROR, CLOSE = 0.07, 0.15, 0.05

MODELS = {
    "cnn": """
model: {cnn: {channels: [64, 128, 256], inputs: [1, 8, 8]}}
data: digits
loader: {batch_size: 8}
""",
    "transformer": """
model: {transformer: {vocabulary: 256, width: 128, layers: 2, heads: 4, context: 64}}
data: {text: {files: "{stdlib}/a*.py", context: 64}}
loader: {batch_size: 4}
""",
}
REST = """
loss: cross_entropy
optimizer: {sgd: {lr: 0.05, momentum: 0.9}}
ddp: {bucket_cap_mb: 1}
checkpoint: {keep: 0}
timings: {gradients: true}
stages:
"""
WITHIN = "within: [shared_memory]"
STACKS = [
    "[]",
    "[fp16]",
    "[int8]",
    f"[{{hierarchical: {{{WITHIN}}}}}]",
    f"[{{hierarchical: {{{WITHIN}, across: [int8]}}}}]",
]
POLICIES = [
    "every_step",
    f"{{local_sgd: {{every: {CYCLE}}}}}",
    f"{{diloco: {{every: {CYCLE}, outer_lr: 0.7, outer_momentum: 0.5}}}}",
]

Measured = list[tuple[float, list[float]]]  # a case, each time it was run: the control, and seconds of a step


@dataclass(frozen=True)
class Speed:
    """A link, and how many steps, and cycles of a policy, are run over it."""

    link: Link | None
    steps: int
    cycles: int
    turns: int = 1  # of all cases, in each run
    runs: int = 2

    @property
    def links(self) -> Links:
        """The link as a prediction takes it."""
        return Links() if self.link is None else parse_links(*self.link.words)


SPEEDS = {
    "unlimited": Speed(None, 24, 3, turns=4),
    "1000": Speed(Link(1000), 24, 3, turns=4),
    "100": Speed(Link(100), 16, 4, turns=2),
    "37, 8 ms": Speed(Link(37, 8.0), 16, 4, turns=2),
    "10": Speed(Link(10), 8, 4),
}


def linked(name: str) -> str:
    """A link in a cell."""
    rate, _, latency = name.partition(", ")
    return f"{rate} Mbit/s{latency and f', {latency}'}" if SPEEDS[name].link else name


def stage(steps: int, hooks: str | None, sync: str) -> str:
    """A train stage."""
    named = "" if hooks is None else f", hooks: {hooks}"
    return f"  - train: {{steps: {steps}, sync: {sync}{named}}}\n"


def run(folder: Path, text: str, link: Link | None) -> Path:
    """Run a pipeline on two hosts; gives the run's folder."""
    (folder / "p.yaml").write_text(text)
    finish(started(folder, "p.yaml", [], local=LOCAL, link=link, warm=True, own_cores=True))
    return folder / "run"


def turns(count: int, stages: Sequence[str]) -> str:
    """The stages of a pipeline: these, one after the other, with a control before and after each."""
    control = stage(*CONTROL)
    return "".join(control + one for one in count * list(stages)) + control


def controls(times: Mapping[int, list[list[float]]]) -> list[float]:
    """Seconds of a step in the controls of `turns`: for each other stage, the mean of the two beside it."""
    numbers = range(0, len(times), 2)
    own = [median(chain.from_iterable(of[WARM_UP:] for of in times[number])) for number in numbers]
    return [(before + after) / 2 for before, after in pairwise(own)]


def quiet(found: Sequence[float]) -> list[int]:
    """Which are the half with the smallest controls; at least one."""
    return sorted(range(len(found)), key=found.__getitem__)[: math.ceil(len(found) / 2)]


def measure(model: str, speed: Speed) -> list[Measured]:
    """Run all policies with all stacks. Gives each case with each of its turns: the control, and seconds of a
    step, as means of each rank's cycles.
    """
    stages, lengths = list[str](), list[int]()
    for policy in POLICIES:
        steps, length = (speed.steps, 1) if policy == "every_step" else (CYCLE * speed.cycles, CYCLE)
        stages += [stage(steps, stack, policy) for stack in STACKS]
        lengths += [length] * len(STACKS)
    with tempfile.TemporaryDirectory() as scratch:
        text = MODELS[model] + REST + turns(speed.turns, stages)
        times = step_times(run(Path(scratch), text, speed.link))
    found: list[Measured] = [[] for _ in stages]
    for number, control in enumerate(controls(times)):
        case = number % len(stages)
        counted = [of[max(WARM_UP, lengths[case]) :] for of in times[2 * number + 1]]
        found[case].append((control, [mean for of in counted for mean in cycle_means(of, lengths[case])]))
    return found


def cycle_means(times: Sequence[float], length: int) -> list[float]:
    """The mean of each whole cycle."""
    return [fmean(times[end - length : end]) for end in range(length, len(times) + 1, length)]


def step_times(run_dir: Path) -> dict[int, list[list[float]]]:
    """Seconds of each step, of each rank, by the stage."""
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines(run_dir, "steps"):
        found[line["stage"]][line["rank"]].append(line["step_us"] / 1e6)
    return {number: list(of_ranks.values()) for number, of_ranks in found.items()}


def predict(model: str, speeds: Mapping[str, Speed]) -> tuple[float, dict[str, list[float]]]:
    """From a run without a limit on its link: control, and seconds of a step in each case, by the link."""
    stages = [stage(16, None, "independent")]
    stages += [stage(16, stack, "every_step") for stack in ("[noop]", *STACKS)]
    cases = "".join(stage(CYCLE, stack, policy) for policy in POLICIES for stack in STACKS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_dir = run(folder, MODELS[model] + REST + turns(4, stages), None)
        control = keep_quiet(run_dir, len(stages))
        cost_model = next(cost_models_of_run(run_dir, Links(), cores=cores() / HOSTS))
        (folder / "cases.yaml").write_text(MODELS[model] + REST + cases)
        found = explain(load(folder / "cases.yaml"), hosts=HOSTS, ranks_per_host=LOCAL)
        return control, {
            name: [cost_model.predict(one, found.world, speed.links).step_us / 1e6 for one in found.stages]
            for name, speed in speeds.items()
        }


def keep_quiet(run_dir: Path, length: int) -> float:
    """Keep the records of the stages that count, and of no others. Gives the mean of their controls."""
    beside = controls(step_times(run_dir))
    kept, counted = set[int](), list[float]()
    for case in range(length):
        for turn in quiet(beside[case::length]):
            number = turn * length + case
            kept.add(2 * number + 1)
            counted.append(beside[number])
    for file in (run_dir / "steps").iterdir():
        written = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in written if json.loads(line)["stage"] in kept))
    return fmean(counted)


def show(models: Sequence[str], speeds: Sequence[str], found: Mapping[tuple[str, str], Any]) -> bool:
    """Print the tables; gives whether all targets are reached."""
    print("Milliseconds per step, predicted / measured, and the relative error:\n")
    print_head(["model", "sync", "hooks", *map(linked, speeds)])
    errors: list[float] = []
    for model in models:
        for number, (policy, stack) in enumerate((p, s) for p in POLICIES for s in STACKS):
            cells = []
            for name in speeds:
                guess, fact = (found[model, name][which][number] for which in ("predicted", "measured"))
                errors.append(guess / fact - 1)
                cells.append(f"{1e3 * guess:.1f} / {1e3 * fact:.1f} ({errors[-1]:+.0%})")
            sync = policy.removeprefix("{").removesuffix("}").partition(":")[0]
            print_row([model, f"`{sync}`", f"`{stack}`", *cells])
    sizes = sorted(map(abs, errors))
    middle, worst = median(sizes), sizes[-1]
    ninth = sizes[math.ceil(0.9 * len(sizes)) - 1]
    print(
        f"\nOver {len(sizes)} cases, the median error is {middle:.1%}, the 90th percentile is {ninth:.1%}, "
        f"and the largest error is {worst:.1%}.\n"
    )
    print_head(["model", "link", "predicted fastest", "measured fastest", "time lost"])
    close = 0
    for model in models:
        for name in speeds:
            guesses, facts = (found[model, name][which][: len(STACKS)] for which in ("predicted", "measured"))
            chosen, best = (times.index(min(times)) for times in (guesses, facts))
            loss = facts[chosen] / facts[best] - 1
            close += loss <= CLOSE
            print_row([model, linked(name), f"`{STACKS[chosen]}`", f"`{STACKS[best]}`", f"{loss:.1%}"])
    cases = len(models) * len(speeds)
    print(
        "\nWith `every_step`, the stack that is predicted to be the fastest is the fastest, or at most "
        f"{CLOSE:.0%} slower, in {close} of {cases} cases."
    )
    return middle <= MEDIAN_ERROR and worst <= WORST_ERROR and close >= 0.9 * cases


def measure_ranks(model: str, ranks: int) -> list[float]:
    """Seconds of a step with each of `ON_ONE_HOST`, medians over the steps of all ranks of one host."""
    text = MODELS[model] + REST + "".join(stage(40, stack, "every_step") for stack in ON_ONE_HOST)
    with tempfile.TemporaryDirectory() as scratch:
        times = step_times(run_here(Path(scratch), text, ranks))
    return [median(chain.from_iterable(of[WARM_UP:] for of in times[number])) for number in sorted(times)]


def predict_ranks(model: str) -> dict[str, list[tuple[float, str]]]:
    """The same, predicted from a run on two ranks, with what limits; by the number of ranks."""
    turn = stage(24, "[noop]", "every_step") + stage(24, None, "independent")
    turn += "".join(stage(24, stack, "every_step") for stack in ON_ONE_HOST)
    cases = "".join(stage(1, stack, "every_step") for stack in ON_ONE_HOST)
    found: dict[str, list[tuple[float, str]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cost_model = next(cost_models_of_run(run_here(folder, MODELS[model] + REST + 3 * turn, 2), Links()))
        (folder / "cases.yaml").write_text(MODELS[model] + REST + cases)
        for ranks in RANKS:
            explained = explain(load(folder / "cases.yaml"), hosts=1, ranks_per_host=ranks)
            steps = [cost_model.predict(one, explained.world, Links()) for one in explained.stages]
            found[str(ranks)] = [(one.step_us / 1e6, one.limit) for one in steps]
    return found


def run_here(folder: Path, text: str, ranks: int) -> Path:
    """Run a pipeline on ranks of this machine; gives the run's folder."""
    (folder / "p.yaml").write_text(text)
    done = ddprun("p.yaml", f"--nproc-per-node={ranks}", "--run-dir=run", cwd=folder, timeout_s=TIMEOUT_S)
    if done.code:
        raise RuntimeError(done.stderr)
    return folder / "run"


def show_ranks(models: Sequence[str], pieces: Pieces) -> None:
    """Print the table of ranks that share the cores of this machine."""
    print("Milliseconds per step, predicted from a run on two ranks / measured, and the relative error.")
    print(f"All ranks share {cores():g} cores:\n")
    print_head(["model", "hooks", *(f"{ranks} ranks" for ranks in RANKS), "limited by"])
    for model in models:
        predicted = pieces.take(f"{model} ranks", partial(predict_ranks, model))
        measured = {
            ranks: pieces.take(f"{model} {ranks} ranks", partial(measure_ranks, model, ranks))
            for ranks in RANKS
        }
        for number, stack in enumerate(ON_ONE_HOST):
            guesses = [predicted[str(ranks)][number] for ranks in RANKS]
            facts = [measured[ranks][number] for ranks in RANKS]
            cells = [
                f"{1e3 * guess:.1f} / {1e3 * fact:.1f} ({guess / fact - 1:+.0%})"
                for (guess, _), fact in zip(guesses, facts, strict=True)
            ]
            print_row([model, f"`{stack}`", *cells, ", ".join(dict.fromkeys(limit for _, limit in guesses))])


def compare(model: str, speeds: Mapping[str, Speed], pieces: Pieces) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step in each case, `predicted` and `measured`, by the link."""
    predictions = list[tuple[float, dict[str, list[float]]]]()

    def predict_again() -> None:
        key = f"{model} predicted {len(predictions)}"
        predictions.append(pieces.take(key, partial(predict, model, speeds)))

    predict_again()
    found = {}
    for name, speed in speeds.items():
        first, runs = len(predictions) - 1, list[list[Measured]]()
        for number in range(speed.runs):
            runs.append(pieces.take(f"{model} {name} {number}", partial(measure, model, speed)))
            predict_again()
        around = predictions[first:]
        guesses = [around[number][1][name] for number in quiet([control for control, _ in around])]
        facts = list[float]()
        for case in zip(*runs, strict=True):
            measured = list(chain.from_iterable(case))
            counted = [measured[number][1] for number in quiet([control for control, _ in measured])]
            facts.append(median(chain.from_iterable(counted)))
        found[name] = {
            "predicted": [median(values) for values in zip(*guesses, strict=True)],
            "measured": facts,
        }
    return found


def main() -> None:
    """Measure, predict and print."""
    parser = argument_parser(__doc__, in_pieces=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--links", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--ranks", action="store_true", help="the table of ranks on this machine")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if asked.ranks:
        pieces = Pieces("prediction-ranks", [asked.models], asked.minutes)
        show_ranks(asked.models, pieces)
        pieces.end()
        return
    speeds = {name: SPEEDS[name] for name in asked.links}
    if refused := next((why for one in speeds.values() if one.link and (why := one.link.refusal())), None):
        sys.exit(refused)
    pieces = Pieces("prediction", [asked.models, asked.links], asked.minutes)
    found = {
        (model, name): one for model in asked.models for name, one in compare(model, speeds, pieces).items()
    }
    holds = show(asked.models, asked.links, found)
    pieces.end()
    if not holds:
        sys.exit(DOES_NOT_HOLD)


if __name__ == "__main__":
    main()
