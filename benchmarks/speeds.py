"""What shares by speed gain where ranks are not equally fast, against equal shares and the ideal.

    python -m benchmarks.speeds [--seconds 20] [--rounds 3] [--only "two ranks"] [--picture FILE.svg]

Real runs on this machine, with equal shares and by speed in turns: a rank sleeps for longer in each sample,
has a cgroup's CPU quota, or shares its core with a busy process. The ideal is the sum of the ranks' speeds,
as each works in the run with equal shares. Prints samples per second, medians over rounds, from the second
half of each run. A quota needs root privileges and the cgroup controller `cpu` (version 1); without them its
row is left out. `--picture` draws one more run, whose rank 1 is slow for a while.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from benchmarks import page
from benchmarks.page import argument_parser, print_head, print_row
from torch import Tensor
from torch.utils.data import Dataset

from ddprun.telemetry.reader import RecordedRun

_CGROUPS = Path("/sys/fs/cgroup/cpu")
_SLICE_US = 10_000  # of a quota
_SPIN = "import os; rank = os.getppid()\nwhile os.getppid() == rank: pass"
_WAITS = ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us")


class Samples(Dataset[tuple[Tensor, int]]):
    """Random vectors in ten classes, each of which takes a rank a while: of sleep, or of work on its core.

    Args:
        ms: to sleep for a sample, of each rank; empty: work.
        slow_between: seconds of the run in which rank 1 sleeps for twice as long; empty: never.
        core: each rank on a core of its own.
        busy: rank 1 has a child that keeps its core busy.
        cgroup: which rank 1 joins.
    """

    def __init__(
        self,
        ms: list[float],
        slow_between: list[float],
        core: bool = False,
        busy: bool = False,
        cgroup: str = "",
    ) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self.inputs = torch.randn(100_000, 64, generator=torch.Generator().manual_seed(0))
        self.labels = self.inputs[:, :10].argmax(1).tolist()
        self.sleep_s = ms[rank] / 1e3 if ms else None
        self.slow_between = slow_between if rank == 1 else []
        self.work, self.began = bytes(400_000), 0.0
        if core:
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        if busy and rank == 1:
            subprocess.Popen([sys.executable, "-c", _SPIN])
        if cgroup and rank == 1:
            (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.sleep_s is None:
            hashlib.sha256(self.work).digest()
        else:
            self.began = self.began or time.monotonic()
            begin, end = self.slow_between or (0.0, 0.0)
            is_slow = begin <= time.monotonic() - self.began < end
            time.sleep(self.sleep_s * (1 + is_slow))
        return self.inputs[index], self.labels[index]


@dataclass(frozen=True)
class Case:
    """Ranks of different speed, and how they train."""

    name: str
    ranks: int
    sync: tuple[str, str]  # with equal shares, and by speed
    batch: int
    ms: tuple[float, ...] = ()
    core: bool = False
    quota: float | None = None  # of rank 1: the share of a core
    busy: bool = False  # rank 1 shares its core with a busy process


_EVERY_STEP = ("every_step", "every_step")


def _rounds(ranks: int, batches: int) -> tuple[str, str]:
    """Of so many batches of 32 samples on each rank, and of as many samples on all ranks together."""
    samples = ranks * batches * 32
    return f"{{local_sgd: {{every: {batches}}}}}", f"{{local_sgd: {{every: {{samples: {samples}}}}}}}"


CASES = [
    Case("two ranks, one sleeps twice as long", 2, _EVERY_STEP, 32, (1, 2)),
    Case("the same", 2, _EVERY_STEP, 128, (1, 2)),
    Case("the same", 2, _rounds(2, 8), 32, (1, 2)),
    Case("the same", 2, _rounds(2, 32), 32, (1, 2)),
    Case("one with a quota of half a core", 2, _EVERY_STEP, 512, core=True, quota=0.5),
    Case("one with a busy process on its core", 2, _EVERY_STEP, 512, core=True, busy=True),
    Case("four ranks, speeds 1, 1, 0.5, 0.25", 4, _EVERY_STEP, 256, (0.5, 0.5, 1, 2)),
    Case("the same", 4, _rounds(4, 32), 32, (0.5, 0.5, 1, 2)),
    Case("equal ranks", 2, _EVERY_STEP, 32, (1, 1)),
]

PIPELINE = """
model: {{mlp: {{inputs: 64, hidden: [64], outputs: 10}}}}
data: {{train: {{benchmarks.speeds.Samples: {data}}}}}
loader: {{batch_size: {batch}, balance: {balance}, max_share: 4}}
optimizer: {{sgd: {{lr: 0.05}}}}
sync: {sync}
checkpoint: {{keep: 0}}
stages: [{{train: {{steps: 1000000}}}}]
launch: {{nproc_per_node: {ranks}}}
"""


def run(case: Case, by_speed: bool, seconds: float, slow_between: tuple[float, ...] = ()) -> RecordedRun:
    """Train for so long; gives the run."""
    folder, cgroup = Path(tempfile.mkdtemp()), None
    if case.quota is not None:
        cgroup = Path(tempfile.mkdtemp(prefix="ddprun-speeds-", dir=_CGROUPS))
        (cgroup / "cpu.cfs_period_us").write_text(str(_SLICE_US))
        (cgroup / "cpu.cfs_quota_us").write_text(str(round(case.quota * _SLICE_US)))
    options = {"ms": case.ms, "slow_between": slow_between, "core": case.core, "busy": case.busy}
    text = PIPELINE.format(
        data=json.dumps({**options, "cgroup": str(cgroup or "")}),
        batch=case.batch,
        balance="speed" if by_speed and case.sync[1] == "every_step" else "null",
        sync=case.sync[by_speed],
        ranks=case.ranks,
    )
    (folder / "p.yaml").write_text(text)
    environment = {**page.environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddprun", "p.yaml", "--run-dir", "run"]
    try:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        steps = folder / "run" / "steps" / "rank-00000.jsonl"
        until = time.monotonic() + 90
        while not steps.exists():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                sys.exit(f"{case.name} does not train:\n{(folder / 'log').read_text()}")
            time.sleep(0.1)
        time.sleep(seconds)
        process.terminate()
        process.wait(timeout=60)
    finally:
        if cgroup is not None:
            cgroup.rmdir()
    return RecordedRun(folder / "run")


def measured(found: RecordedRun) -> tuple[float, float]:
    """Samples per second of the second half of a run, of all ranks, and the sum of the ranks' speeds."""
    samples_per_s, speeds = list[float](), list[float]()
    for rank in found.ranks:
        steps = list(found.step_records(rank))
        late = steps[len(steps) // 2 :]
        samples, step_us = sum(one.samples for one in late), sum(one.step_us for one in late)
        waits = sum(getattr(one, part) for one in late for part in _WAITS)
        samples_per_s.append(1e6 * samples / step_us)
        speeds.append(1e6 * samples / (step_us - waits))
    return sum(samples_per_s), sum(speeds)


def measure(case: Case, seconds: float, rounds: int) -> None:
    """Print a case's row."""
    equal, shared, ideal = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        of_equal, speeds = measured(run(case, False, seconds))
        equal.append(of_equal)
        ideal.append(speeds)
        shared.append(measured(run(case, True, seconds))[0])
    of_ideal = median(one / best for one, best in zip(shared, ideal, strict=True))
    gain = median(one / base for one, base in zip(shared, equal, strict=True))
    name = "local_sgd" if "local" in case.sync[0] else "every_step"
    rates = (f"{median(column):,.0f}" for column in (equal, shared, ideal))
    print_row([case.name, name, case.batch, *rates, f"{gain:.2f}", f"{of_ideal:.2f}"])


def draw(file: Path) -> None:
    """Samples per second over a run whose rank 1 is slow for a while, with equal shares and by speed."""
    lines = dict[str, list[tuple[float, float]]]()
    for name, by_speed in (("equal shares", False), ("balance: speed", True)):
        found = run(CASES[0], by_speed, 40, (10, 25))
        of_second = defaultdict[int, float](float)
        for rank in found.ranks:
            records = list(found.step_records(rank))
            for one in records:
                of_second[int((one.start_us - records[0].start_us) / 1e6)] += one.samples
        lines[name] = [(second, of_second[second]) for second in sorted(of_second)[:-1] if second <= 38]
    file.write_text(picture(lines), encoding="utf-8")


def picture(lines: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of curves over seconds, readable on a light and on a dark page."""
    width, height, left, bottom, most = 720, 260, 60, 40, 2200
    colors = {"equal shares": "#b45309", "balance: speed": "#2563eb"}

    def at(second: float, value: float) -> str:
        x = left + second / 39 * (width - left - 150)
        return f"{x:.1f},{height - bottom - value / most * (height - bottom - 20):.1f}"

    grey = 'fill="#6b7280" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">']
    parts.append("<title>Samples per second while rank 1 becomes slow and fast again</title>")
    first, last = (at(second, 0).split(",")[0] for second in (10, 25))
    parts.append(
        f'<rect x="{first}" y="20" width="{float(last) - float(first):.1f}" height="{height - bottom - 20}" '
        'fill="#9ca3af" fill-opacity="0.2"/>'
    )
    parts.append(f'<text x="{float(first) + 6}" y="34" {grey}>rank 1 half as fast</text>')
    for value in range(0, most, 500):
        x, y = at(0, value).split(",")
        parts.append(f'<text x="{float(x) - 8}" y="{float(y) + 4}" text-anchor="end" {grey}>{value:,}</text>')
        end = at(39, value)
        parts.append(f'<polyline points="{x},{y} {end}" stroke="#9ca3af" stroke-opacity="0.4" fill="none"/>')
    for second in range(0, 40, 10):
        x, y = at(second, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle" {grey}>{second} s</text>')
    parts.append(f'<text x="8" y="12" {grey}>samples per second, all ranks</text>')
    for name, points in lines.items():
        path = " ".join(at(second + 0.5, value) for second, value in points)
        parts.append(f'<polyline points="{path}" stroke="{colors[name]}" stroke-width="2" fill="none"/>')
        label = f'<text x="{width - 140}" y="{60 + 20 * list(lines).index(name)}" font-family="sans-serif" '
        parts.append(f'{label}font-size="13" fill="{colors[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--picture", type=Path, help="draw one more run, in place of measuring")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # where all runs are
        if asked.picture is not None:
            draw(asked.picture)
            return
        heads = ["ranks", "policy", "batch_size", "equal shares: samples/s", "by speed", "ideal"]
        print_head([*heads, "by speed / equal", "by speed / ideal"])
        for case in CASES:
            can = case.quota is None or os.access(_CGROUPS / "cpu.cfs_quota_us", os.F_OK)
            if asked.only in case.name and can and (case.quota is None or os.geteuid() == 0):
                measure(case, asked.seconds, asked.rounds)


if __name__ == "__main__":
    main()
