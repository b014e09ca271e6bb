"""Does ddprun cost more with more ranks, parameters, buckets or steps?

    python -m benchmarks.growth --axis ranks|parameters|buckets [--seconds 30] [--minutes 3]
    python -m benchmarks.growth --axis steps [--steps 100000]

Ranks, parameters and buckets: ddprun, and a DDP loop written by hand twice as its own control, take turns as
in `overhead.py`, in one group for each row. The last two columns compare ddprun with this loop. Steps: one
run of ddprun on two ranks, whose memory is read from outside twice a second. Each row is a tenth of the run,
with the change of memory since the first; the slope is that of a line through what was read after the first.
Every step and bucket is recorded. Prints a Markdown table.
"""

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from benchmarks import page
from benchmarks.loops import LR, Times, build, mlp
from benchmarks.overhead import AGAIN, BY_HAND, OURS, Loop
from benchmarks.page import ROOT, Pieces, argument_parser, faster, print_head, print_row, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 4
TENTHS = 10
_STARTS_WITHIN_S = 200.0
_STEPS_FIRST = 3

PIPELINE = """
model:
  mlp: {{inputs: 64, hidden: {hidden}, outputs: 10}}
data: {{synthetic: {{samples: 4096, shape: [64], classes: 10, held_out: 0}}}}
loader: {{batch_size: {batch}, drop_last: true}}
optimizer: {{sgd: {{lr: {lr}}}}}
ddp: {{bucket_cap_mb: {bucket_cap_mb}}}
checkpoint: {{keep: 0}}
stages:
  - train: {{steps: {steps}}}
"""


@dataclass(frozen=True)
class Row:
    """What a row of a table trains."""

    ranks: int = 2
    hidden: tuple[int, ...] = (256, 256)
    bucket_cap_mb: float = 25

    @property
    def parameters(self) -> int:
        """Their values."""
        return sum((one + 1) * two for one, two in zip((64, *self.hidden), (*self.hidden, 10), strict=True))

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.ranks} ranks, {self.parameters} parameters, buckets of {self.bucket_cap_mb} MiB"

    def pipeline(self, steps: int) -> str:
        """What ddprun trains for so many steps."""
        cap, hidden = self.bucket_cap_mb, list(self.hidden)
        return PIPELINE.format(hidden=hidden, batch=BATCH, lr=LR, bucket_cap_mb=cap, steps=steps)


_DEEP, _DEEPEST = (512,) * 65, (512,) * 501  # a layer is a MiB
AXES = {
    "ranks": [Row(ranks) for ranks in (1, 2, 4, 8, 16)],
    "parameters": [
        Row(hidden=hidden)
        for hidden in ((960, 960), (2210,) * 3, (4980,) * 3, (8160,) * 4)  # 1, 10, 50, 200 million
    ],
    "buckets": [
        *(Row(hidden=_DEEP, bucket_cap_mb=cap) for cap in (1000, 8, 1)),
        *(Row(hidden=_DEEPEST, bucket_cap_mb=cap) for cap in (1000, 1)),
    ],
}


class Grown(Loop):
    """One that trains what a row says."""

    row: Row

    def start(self) -> None:
        """Start it, and stop it once it trains."""
        self.folder.mkdir()
        ranks = ["--nproc-per-node", str(self.row.ranks)]
        if self.name == OURS:
            (self.folder / "p.yaml").write_text(self.row.pipeline(2_000_000))
            command = [sys.executable, "-m", "ddprun", "p.yaml", *ranks, "--run-dir", "run"]
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
            words = [json.dumps(self.row.hidden), str(self.row.bucket_cap_mb), str(self.folder / "times")]
            command = [*torchrun, "-m", "benchmarks.growth", "--by-hand", *words]
        environment = {**page.environment(), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("wb") as log:
            self.process = psutil.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        until = time.monotonic() + _STARTS_WITHIN_S
        while len(self.ends()) < _STEPS_FIRST:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not train:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def memory(self) -> float:
        """What a rank holds, bytes; mean over ranks. Pages that processes share count in part."""
        return fmean(one.memory_full_info().pss for one in ranks_of(self.process))


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    """The ranks that a launcher has started: a rank leads a session, what forks ranks does not."""
    alive = [one for one in launcher.children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if os.getsid(one.pid) == one.pid]


def by_hand(hidden: Sequence[int], bucket_cap_mb: float, times: Times) -> None:
    """A plain loop around DDP, which never ends by itself."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        build(mlp(*hidden)), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), LR)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    sampler: Any = torch.utils.data.DistributedSampler(data, drop_last=True)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    while True:
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            times.note()


def measure(row: Row, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step in each turn, and bytes of a rank, by loop."""
    with tempfile.TemporaryDirectory() as scratch:
        running: list[Grown] = []
        try:
            for name in (BY_HAND, AGAIN, OURS):
                folder = Path(scratch) / name.replace(" ", "-")
                loop = Grown(name, folder, mlp(*row.hidden), checkout=ROOT if name == OURS else None)
                loop.row = row
                running.append(loop)
                loop.start()
            first = running[0].ends()
            step_s = float(np.median(np.diff(first)))
            slice_s = max(1.0, 4 * step_s)
            for number in range(max(3, round(seconds / slice_s / len(running)))):
                for loop in random.Random(number).sample(running, len(running)):
                    loop.work(slice_s)
            memory = {loop.name: loop.memory() for loop in running}
            for loop in running:
                loop.signal(signal.SIGCONT)
            time.sleep(1.5)  # ddprun writes the records of its last steps
            times = {loop.name: [1000 * one for one in loop.step_times()] for loop in running}
            buckets = len(_started(running[-1].folder)["buckets"])
        finally:
            for loop in running:
                loop.end()
    return {"ms": times, "bytes": memory, "buckets": buckets}


def _started(folder: Path) -> dict[str, Any]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    found: dict[str, Any] = next(line for line in map(json.loads, lines) if line["event"] == "started")
    return found


def show_axis(axis: str, rows: Sequence[Row], seconds: float, minutes: float | None) -> None:
    """Measure and print the table of an axis."""
    pieces = Pieces(f"growth-{axis}", [seconds, BATCH], minutes)
    found = {row: pieces.take(row.name, partial(measure, row, seconds)) for row in rows}
    columns = ["ranks", "parameters (millions)", "buckets", f"{BY_HAND}: ms per step"]
    columns += [f"{name}: relative steps/s" for name in (AGAIN, OURS)]
    print_head([*columns, "additional ms per step", "additional MB per rank"])
    for row, one in found.items():
        base = one["ms"][BY_HAND]
        ratios = [shown(faster(one["ms"][name], base), 3) for name in (AGAIN, OURS)]
        # Both loops by hand are the base of the difference: it is small beside a step.
        both = [(mine + other) / 2 for mine, other in zip(base, one["ms"][AGAIN], strict=True)]
        more_ms = median(mine - other for mine, other in zip(one["ms"][OURS], both, strict=True))
        more_mb = (one["bytes"][OURS] - (one["bytes"][BY_HAND] + one["bytes"][AGAIN]) / 2) / 1e6
        millions = f"{float(f'{row.parameters / 1e6:.2g}'):g}"  # two digits; 200, not 2e+02
        cells = [row.ranks, millions, one["buckets"], f"{median(base):.2f}", *ratios]
        print_row([*cells, f"{more_ms:.2f}", f"{more_mb:.0f}"])
    pieces.end()


def show_steps(steps: int) -> None:
    """Run so many steps, and print what a rank held and how long a step took in each tenth."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "p.yaml").write_text(Row(hidden=(64,)).pipeline(steps))
        command = [sys.executable, "-m", "ddprun", "p.yaml", "--nproc-per-node", "2", "--run-dir", "run"]
        environment = page.environment()
        with (folder / "log").open("wb") as log:
            process = psutil.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        records = folder / "run" / "steps" / "rank-00000.jsonl"
        looks: list[tuple[float, float, float]] = []  # when, and bytes of a rank and of the launcher
        try:
            while process.poll() is None:
                time.sleep(0.5)
                if records.exists() and len(ranks := ranks_of(process)) == 2:
                    try:
                        held = fmean(one.memory_info().rss for one in ranks)
                        looks.append((time.monotonic(), held, process.memory_info().rss))
                    except psutil.NoSuchProcess:
                        break
        finally:
            for one in [process, *process.children(recursive=True)] if process.poll() is None else []:
                one.kill()
            code = process.wait()
        if code:
            sys.exit((folder / "log").read_text())
        taken = [json.loads(line) for line in records.read_text().splitlines()]
    starts = np.array([step["start_us"] / 1e6 for step in taken])
    step_ms = np.array([step["step_us"] / 1e3 for step in taken])
    when, rank_mb, launcher_mb = (np.array(column) for column in zip(*looks, strict=True))
    number = np.searchsorted(starts, when)  # the step in which each look fell
    rank_mb, launcher_mb = rank_mb / 1e6, launcher_mb / 1e6
    edges = np.linspace(0, len(taken), TENTHS + 1).astype(int)
    print_head(["steps", "median ms per step", "memory per rank (MB)", "launcher memory (MB)"])
    first: tuple[float, float] | None = None
    for begin, end in itertools.pairwise(edges):
        inside = (number > begin) & (number <= end)
        mb = (float(np.mean(rank_mb[inside])), float(np.mean(launcher_mb[inside])))
        first = first or mb
        cells = [f"{mine:.1f} ({mine - theirs:+.1f})" for mine, theirs in zip(mb, first, strict=True)]
        print_row([f"{begin + 1:,} to {end:,}", f"{np.median(step_ms[begin:end]):.3f}", *cells])
    after = number > edges[1]
    slope = float(np.polyfit(number[after] / 100_000, rank_mb[after], 1)[0])
    half = len(taken) // 2
    drift = float(np.median(step_ms[half:]) / np.median(step_ms[edges[1] : half]))
    print(
        f"\nWithout the first tenth of the run, a rank's memory changes by {slope:+.2f} MB per 100,000 "
        f"steps, and the median step takes {drift:.3f} times as long in the second half as in the first half."
    )


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--by-hand"]:
        hidden, cap, file = sys.argv[2:]
        by_hand(json.loads(hidden), float(cap), Times(file))
    parser = argument_parser(__doc__, in_pieces=True)
    parser.add_argument("--axis", choices=[*AXES, "steps"], required=True)
    parser.add_argument("--rows", type=int, nargs="+", help="of the axis, counted from 0 (all)")
    parser.add_argument("--seconds", type=float, default=30, help="for each row")
    parser.add_argument("--steps", type=int, default=100_000)
    asked = parser.parse_args()
    if asked.axis == "steps":
        show_steps(asked.steps)
        return
    rows = AXES[asked.axis]
    show_axis(
        asked.axis, [rows[index] for index in asked.rows or range(len(rows))], asked.seconds, asked.minutes
    )


if __name__ == "__main__":
    main()
