"""Does training with a lossy stack end as well as with plain all-reduce?

    python benchmarks/convergence.py [--task text|digits] [--seeds N] [--only NAME]

text: a byte transformer on Python's own library; holds if the held-out loss is at most 2 % above plain's.
digits: an mlp on handwritten digits; holds if the held-out accuracy is at most 1 point below plain's.

Means over the same seeds are compared. All runs of a task are the same pipeline but for hooks and steps: topk
and powersgd get half as many again, over which the schedule is stretched. Each step takes the same samples:
a batch on each of two ranks, or half of one on each of four where the stack splits the ranks into hosts.
Prints a Markdown table for each task; ends with 1 if a row does not hold.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PLAIN = "[]"


@dataclass(frozen=True)
class Stack:
    """A stack, and what its runs have of their own."""

    hooks: str
    """As in a pipeline file."""

    steps: float = 1.0
    """In units of plain's steps."""

    ranks: int = 2


STACKS = [
    Stack(PLAIN),
    Stack("[fp16]"),
    Stack("[bf16]"),
    Stack("[int8]"),
    Stack("[{topk: {density: 0.05}}]", steps=1.5),
    Stack("[{powersgd: {rank: 4}}]", steps=1.5),
    Stack("[{hierarchical: {hosts: 2, across: [int8]}}]", ranks=4),
]


@dataclass(frozen=True)
class Task:
    """What is trained, and how it is judged."""

    pipeline: str
    steps: int
    samples: int
    """Of all ranks in each step."""

    seeds: int
    metric: str
    heading: str
    compared: str

    def compare(self, ours: float, plain: float) -> tuple[str, bool]:
        """How a stack's mean stands to plain's, and whether that holds; a NaN does not."""
        if self.metric == "loss":
            return f"{ours / plain:.4f}", ours <= 1.02 * plain
        return f"{100 * (ours - plain):+.2f}", ours >= plain - 0.01


TASKS = {
    "text": Task(
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
        heading="held-out loss",
        compared="ratio to plain",
    ),
    "digits": Task(
        pipeline="""
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
""",
        steps=345,
        samples=64,
        seeds=5,
        metric="accuracy",
        heading="held-out accuracy",
        compared="points against plain",
    ),
}


def steps_of(task: Task, stack: Stack) -> int:
    """Steps that a stack trains for."""
    return round(task.steps * stack.steps)


def settings(task: Task, stack: Stack, seed: int) -> list[str]:
    """What a run has of its own, as `ddprun` takes it."""
    values = {
        "seed": seed,
        "hooks": stack.hooks,
        "stages[0].train.steps": steps_of(task, stack),
        "loader.batch_size": task.samples // stack.ranks,
        "launch.nproc_per_node": stack.ranks,
    }
    return [f"--set={key}={value}" for key, value in values.items()]


def refusal(folder: Path, task: Task, stack: Stack) -> str | None:
    """Why `ddprun check` refuses a stack; None if it does not."""
    command = [sys.executable, "-m", "ddprun", "check", "task.yaml", *settings(task, stack, 0)]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[0] if done.returncode else None


def train(folder: Path, task: Task, stack: Stack, seed: int) -> float:
    """Train once; gives the held-out metric.

    Raises:
        RuntimeError: `ddprun` failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "ddprun", "task.yaml", "--run-dir", scratch]
        command += settings(task, stack, seed)
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
        summary = json.loads((Path(scratch) / "summary.json").read_text())
        return float(summary["metrics"][task.metric])


def mean(folder: Path, task: Task, stack: Stack, seeds: int) -> float:
    """Mean metric over the seeds; NaN, and the reason on stderr, if a run fails."""
    try:
        return statistics.fmean(train(folder, task, stack, seed) for seed in range(seeds))
    except RuntimeError as error:
        print(f"failed {stack.hooks}: {error}", file=sys.stderr, flush=True)
        return math.nan


def compare(task: Task, stacks: list[Stack], seeds: int) -> bool:
    """Print the table of a task; whether every row holds."""
    print(f"| hooks | ranks | steps | {task.heading}, {seeds} seed{'s' if seeds > 1 else ''} ", end="")
    print(f"| {task.compared} | holds |")
    print("|---|---|---|---|---|---|", flush=True)
    held, plain = [], math.nan
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "task.yaml").write_text(task.pipeline)
        for stack in stacks:
            if refused := refusal(folder, task, stack):
                print(f"skipped {stack.hooks}: {refused}", file=sys.stderr, flush=True)
                continue
            ours = mean(folder, task, stack, seeds)
            if stack.hooks == PLAIN:
                plain = ours
            against, holds = task.compare(ours, plain)
            held.append(holds)
            cells = [f"`{stack.hooks}`", str(stack.ranks), str(steps_of(task, stack)), f"{ours:.4f}"]
            print(f"| {' | '.join([*cells, against, 'yes' if holds else 'no'])} |", flush=True)
    return all(held)


def chosen(name: str) -> list[Stack]:
    """Plain, and the stacks that are `name` or hold a hook of that name."""
    return [
        stack for stack in STACKS if stack.hooks in (PLAIN, name) or name in re.findall(r"\w+", stack.hooks)
    ]


def main() -> None:
    """Train and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), help="one task (both)")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (1 for text, 5 for digits)")
    parser.add_argument(
        "--only", metavar="NAME", help="a stack, or a hook whose stacks are compared with plain"
    )
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error("--seeds takes a number from 1")
    stacks = chosen(arguments.only) if arguments.only else STACKS
    if len(stacks) == 1 and arguments.only != PLAIN:
        parser.error(f"--only: no stack is or holds {arguments.only}")
    held = []
    for name in [arguments.task] if arguments.task else list(TASKS):
        task = TASKS[name]
        held.append(compare(task, stacks, arguments.seeds or task.seeds))
        print(flush=True)
    if not all(held):
        sys.exit(1)


if __name__ == "__main__":
    main()
