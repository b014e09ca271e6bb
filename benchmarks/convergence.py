"""Does training with a lossy stack, or with ranks that meet seldom, end as well as with plain all-reduce?

    python -m benchmarks.convergence [--task text|digits|policies] [--seeds N] [--only NAME]

text: a byte transformer on Python's own library; holds if the held-out loss is at most 2% above plain's.
digits: an mlp on handwritten digits; holds if the held-out accuracy is at most 1 point below plain's.
policies: the same mlp for 24 epochs on four ranks, with each sync policy instead of hooks.

Means over the same seeds are compared; after a difference in points stand the lowest and the highest of one
seed. All runs of a task are the same pipeline but for hooks, policy and steps: topk and powersgd get half as
many again, over which the schedule is stretched. Each step takes the same samples: a batch on each of two
ranks, or half of one on each of four. Prints a Markdown table for each task; ends with 3 if a row does not
hold.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.page import DOES_NOT_HOLD, argument_parser, print_head, print_row
from benchmarks.two_hosts import refusal

from ddprun.units import format_count

PLAIN, EVERY_STEP = "[]", "every_step"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Variant:
    """A stack or a policy, and what its runs have of their own."""

    hooks: str = PLAIN
    """As in a pipeline file."""

    sync: str = EVERY_STEP
    """As in a pipeline file."""

    steps: float = 1.0
    """In units of plain's steps."""

    ranks: int = 2

    def name(self, varied: str) -> str:
        """What stands in the file after the key by which runs differ."""
        return self.hooks if varied == "hooks" else self.sync.removeprefix("{").removesuffix("}")


STACKS = [
    Variant(PLAIN),
    Variant("[fp16]"),
    Variant("[bf16]"),
    Variant("[{bf16: {accumulate: fp32}}]"),
    Variant("[int8]"),
    Variant("[fp8]"),
    Variant("[int4]"),
    Variant("[{topk: {density: 0.05}}]", steps=1.5),
    Variant("[{powersgd: {rank: 4}}]", steps=1.5),
    Variant("[{hierarchical: {hosts: 2, across: [int8]}}]", ranks=4),
]

# An outer momentum of 0.9 wants more rounds than the 69 of such a run.
_OUTER = "outer_lr: 0.7, outer_momentum: 0.5"
POLICIES = [
    Variant(sync=sync, ranks=4)
    for sync in (
        EVERY_STEP,
        "{local_sgd: {every: 8}}",
        "{local_sgd: {every: 8, optimizer_state: average}}",
        "{hierarchical_sgd: {within: 1, across: 8, hosts: 2}}",
        "{average: {every: 8}}",
        f"{{diloco: {{every: 8, {_OUTER}}}}}",
        f"{{diloco: {{every: 8, {_OUTER}, fragments: 2, overlap_steps: 3}}}}",
    )
]


@dataclass(frozen=True)
class Task:
    """What is trained, with what, and how it is judged."""

    varied: str
    """The key by which the runs differ."""

    variants: list[Variant]
    """The first is plain."""

    pipeline: str
    steps: int
    samples: int
    """Of all ranks in each step."""

    seeds: int
    metric: str
    compared: str

    def compare(self, ours: Sequence[float], plain: Sequence[float]) -> tuple[str, bool]:
        """How a variant's metric, of each seed, stands to plain's, and whether that holds."""
        if self.metric == "loss":
            ratio = fmean(ours) / fmean(plain)
            return f"{ratio:.4f}", ratio <= 1.02
        points = [100 * (mine - theirs) for mine, theirs in zip(ours, plain, strict=True)]
        told = f"{fmean(points):+.2f}"
        if min(points) < max(points):
            told += f" ({min(points):+.2f} to {max(points):+.2f})"
        return told.replace("-", MINUS), fmean(points) >= -1


DIGITS = """
model:
  mlp: {inputs: 64, hidden: [256, 256], outputs: 10}   # 0.085 million parameters
data: digits
optimizer:
  sgd: {lr: 0.1, momentum: 0.9}
schedule: CosineAnnealingLR
warmup_steps: 20
stages:
  - train: {steps: 1}
  - evaluate: {metrics: [accuracy]}
"""

TASKS = {
    "text": Task(
        varied="hooks",
        variants=STACKS,
        pipeline="""
model:
  transformer: {width: 96, layers: 2, heads: 4, context: 64}   # 0.28 million parameters
data:
  text: {files: "{stdlib}/*.py", context: 64}   # a tenth is held out
optimizer:
  adamw: {lr: 0.002}
schedule: CosineAnnealingLR
warmup_steps: 50
clip_norm: 1.0
stages:
  - train: {steps: 1}
  - evaluate
""",
        steps=1500,
        samples=32,
        seeds=1,
        metric="loss",
        compared="relative to plain",
    ),
    "digits": Task(
        varied="hooks",
        variants=STACKS,
        pipeline=DIGITS,
        steps=345,
        samples=64,
        seeds=5,
        metric="accuracy",
        compared="difference from plain (points)",
    ),
    "policies": Task(
        varied="sync",
        variants=POLICIES,
        pipeline=DIGITS,
        steps=552,
        samples=64,
        seeds=5,
        metric="accuracy",
        compared="difference from every_step (points)",
    ),
}


def steps_of(task: Task, variant: Variant) -> int:
    """Steps that a variant trains for."""
    return round(task.steps * variant.steps)


def settings(task: Task, variant: Variant, seed: int) -> list[str]:
    """What a run has of its own, as `ddprun` takes it."""
    values = {
        "seed": seed,
        "hooks": variant.hooks,
        "sync": variant.sync,
        "stages[0].train.steps": steps_of(task, variant),
        "loader.batch_size": task.samples // variant.ranks,
        "launch.nproc_per_node": variant.ranks,
    }
    return [f"--set={key}={value}" for key, value in values.items()]


def train(folder: Path, task: Task, variant: Variant, seed: int) -> float:
    """Train once; gives the held-out metric. Raises RuntimeError if `ddprun` fails."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "ddprun", "task.yaml", "--run-dir", scratch]
        command += settings(task, variant, seed)
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
        summary = json.loads((Path(scratch) / "summary.json").read_text())
        return float(summary["metrics"][task.metric])


def compare(task: Task, variants: list[Variant], seeds: int) -> bool:
    """Print the table of a task; whether every row holds. The first variant is plain: if that fails, raises
    RuntimeError.
    """
    of_seeds = f"held-out {task.metric}, {format_count(seeds, 'seed')}"
    print_head([task.varied, "ranks", "steps", of_seeds, task.compared, "holds"])
    held: list[bool] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "task.yaml").write_text(task.pipeline)
        for variant in variants:
            name = variant.name(task.varied)
            if refused := refusal(folder, "task.yaml", settings(task, variant, 0)):
                print(f"skipped {name}: {refused}", file=sys.stderr, flush=True)
                continue
            try:
                ours = [train(folder, task, variant, seed) for seed in range(seeds)]
            except RuntimeError as error:
                if not plain:
                    raise
                print(f"failed {name}: {error}", file=sys.stderr, flush=True)
                held.append(False)
                continue
            plain = plain or ours
            against, holds = task.compare(ours, plain)
            held.append(holds)
            cells = [f"`{name}`", str(variant.ranks), str(steps_of(task, variant)), f"{fmean(ours):.4f}"]
            print_row([*cells, against, "yes" if holds else "no"])
    return all(held)


def chosen(task: Task, name: str | None) -> list[Variant]:
    """The variants of a task that are `name` or hold one of that name, after plain; without a name all."""
    names = {variant: variant.name(task.varied) for variant in task.variants}
    found = [one for one, own in names.items() if name in (None, own, *re.findall(r"\w+", own))]
    plain = task.variants[0]
    return [plain, *(one for one in found if one != plain)] if found else []


def main() -> None:
    """Train and print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--task", choices=list(TASKS), help="one task (all)")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (1 for text, else 5)")
    parser.add_argument(
        "--only", metavar="NAME", help="a stack, a policy, or the name of one in them: compared with plain"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of plain's runs, for a trial")
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error("--seeds takes a number from 1")
    tasks = [TASKS[arguments.task]] if arguments.task else list(TASKS.values())
    if arguments.steps is not None:
        tasks = [replace(task, steps=arguments.steps) for task in tasks]
    chosen_for = [(task, found) for task in tasks if (found := chosen(task, arguments.only))]
    if not chosen_for:
        parser.error(f"--only: no stack or policy is or holds {arguments.only}")
    held = []
    for task, variants in chosen_for:
        held.append(compare(task, variants, arguments.seeds or task.seeds))
        print(flush=True)
    if not all(held):
        sys.exit(DOES_NOT_HOLD)


if __name__ == "__main__":
    main()
