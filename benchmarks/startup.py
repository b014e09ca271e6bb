"""How long ddprun's commands take to start, and how much memory they need; how long a run of one step takes.

    python -m benchmarks.startup [--rounds 15]

Each round runs every command once, in an order that is drawn anew, so that whatever else the machine does
meets all of them alike. `python -c pass` is there twice, as the control. The last rows are whole runs of one
step on two ranks: of ddprun, and of a DDP script written by hand under torchrun, which is there twice, too.
Prints a Markdown table of medians. Peak memory is that of the largest process: the command's own, or one
that it has started and waited for.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.page import ROOT, argument_parser, print_head, print_row

SOON_S = 1.0
"""What does not import torch is to start within this."""

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [256, 256], outputs: 10}
data: {synthetic: {samples: 64, shape: [64], classes: 10, held_out: 0}}
loader: {batch_size: 32}
optimizer: {sgd: {lr: 0.1}}
checkpoint: {keep: 0}
stages:
  - train: {steps: 1}
"""

BY_HAND = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
optimizer.step()
dist.destroy_process_group()
os._exit(0)  # as ddprun does: torch's threads may abort an interpreter that is being taken down
"""


class Measured(NamedTuple):
    """One run of a command."""

    wall_s: float
    cpu_s: float
    peak_mib: float


def commands(folder: Path) -> dict[str, list[str]]:
    """What is measured: a label and a command line each; files for the runs are written into `folder`."""
    (folder / "one.yaml").write_text(PIPELINE)
    (folder / "by_hand.py").write_text(BY_HAND)
    pipelines = [str(path) for path in sorted((ROOT / "pipelines").glob("*.yaml"))]
    nothing = [sys.executable, "-c", "pass"]
    ddprun = [sys.executable, "-m", "ddprun"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun.append(str(folder / "by_hand.py"))
    one_step = ["run", str(folder / "one.yaml"), "--nproc-per-node", "2", "--run-dir"]
    return {
        "`python -c pass`": nothing,
        "`python -c pass`, again": nothing,
        "`ddprun --help`": [*ddprun, "--help"],
        "`ddprun check pipelines/*.yaml`": [*ddprun, "check", *pipelines],
        "`ddprun catalog`": [*ddprun, "catalog"],
        "`ddprun schema`": [*ddprun, "schema"],
        "`python -c 'import torch'`": [sys.executable, "-c", "import torch"],
        "torchrun and a script: one step, 2 ranks": torchrun,
        "torchrun and a script, again": torchrun,
        "ddprun: one step, 2 ranks": [*ddprun, *one_step, str(folder / "run-{}")],
    }


def measure(command: list[str], number: int) -> Measured:
    """Run a command in a process of its own; `{}` in it becomes the number. Raises CalledProcessError."""
    words = [word.replace("{}", str(number)) for word in command]
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return Measured(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def main() -> None:
    """Measure and print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command (15)")
    parser.add_argument("--without-runs", action="store_true", help="only what starts no ranks")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        chosen = commands(Path(scratch))
        if asked.without_runs:
            chosen = {label: words for label, words in chosen.items() if "2" not in words}
        measured: dict[str, list[Measured]] = {label: [] for label in chosen}
        for number in range(asked.rounds):
            for label in random.Random(number).sample(list(chosen), len(chosen)):
                measured[label].append(measure(chosen[label], number))
    print_head(["command", "time (s)", "min to max (s)", "CPU time (s)", "peak memory (MiB)"])
    for label, runs in measured.items():
        walls = [run.wall_s for run in runs]
        wall_s, cpu_s, peak_mib = map(median, zip(*runs, strict=True))
        cells = [label, f"{wall_s:.3f}", f"{min(walls):.3f} to {max(walls):.3f}"]
        print_row([*cells, f"{cpu_s:.3f}", f"{peak_mib:.0f}"])
    slow = [
        label
        for label, runs in measured.items()
        if label.startswith("`ddprun") and median(run.wall_s for run in runs) > SOON_S
    ]
    told = f"These commands miss it: {', '.join(slow)}." if slow else "All of them reach it."
    rounds = f"The values are medians of {asked.rounds} rounds."
    print(f"\n{rounds} Target: commands that start no ranks take less than a second. {told}")


if __name__ == "__main__":
    main()
