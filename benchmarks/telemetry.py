"""What ddprun's telemetry costs a step, and whether a step waits for a disk: on two ranks of this machine.

    python -m benchmarks.telemetry [--blocks 600] [--model quickstart]
    python -m benchmarks.telemetry --stalled-disk    (as root: mounts a file system and freezes it)

A run switches, every few steps, between all of its telemetry (marks, control message, looking for stragglers,
records to disk, progress) and none of it, behind the same dispatcher and hooks. What is left to do when it is
switched off waits until it is switched on again. So its whole cost falls to its own steps. Blocks are short,
and those beside each other see the same of whatever else the machine does. Three sides are compared, in an
order drawn anew for each three blocks: full, none, and none once more. Printed are ratios of step time with
their 95% intervals: of full to the mean of both nones, and, as the control, of none once more to none. Exits
1 if telemetry costs more than 3%.

For the disk, the run's folder is on a file system of its own, which is frozen (fsfreeze) for one of three
stretches of time, in an order drawn anew for each three: whoever writes there then hangs in the kernel. The
other two are not, and not once more.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import page

from ddprun.compare.runs import bootstrap_ratio
from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun.telemetry.step_timing import StepMarks

BLOCK = 32
"""Steps. What one leaves to the next, as a file that is still being written, is little beside a block."""

SIDES = ("full", "none", "none, repeated")
MOST = 0.03
WARM = 15
"""Blocks that do not count."""

FOLDER, STARTS = "DDPRUN_BENCHMARK", "starts.json"

MODELS = {
    "tiny": "mlp: {inputs: 64, hidden: [64], outputs: 10}",
    "quickstart": "mlp: {inputs: 64, hidden: [256, 256], outputs: 10}",
    "medium": "mlp: {inputs: 64, hidden: [512, 512], outputs: 10}",
    "buckets": "mlp: {inputs: 64, hidden: [512, 512, 512, 512, 512], outputs: 10}",
    "cnn": "cnn: {channels: [32, 64, 64]}",
}
PIPELINE = """
model: {{{model}}}
data: digits
loader: {{batch_size: 32, drop_last: true}}
optimizer: {{sgd: {{lr: 0.01}}}}
ddp: {{bucket_cap_mb: 1}}
checkpoint: {{keep: 0}}
stages:
  - train: {{steps: {steps}}}
"""


def side_of(step: int) -> str:
    """Whose turn step `step`, which counts from 1, is; the same on all ranks."""
    three, place = divmod((step - 1) // BLOCK, len(SIDES))
    return random.Random(three).sample(SIDES, len(SIDES))[place]


class SwitchedRecorder(StepRecorder):
    """A recorder that does nothing at all in the blocks that are none's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._full = True
        self._starts: list[tuple[float, float]] = []
        self._rank = settings["control"].rank
        self._mark, self.mark = self.mark, lambda: self._mark() if self._full else 0

    def do_some_deferred(self) -> None:
        if self._full:
            super().do_some_deferred()

    def begin_step(self, number: int, stage: int) -> None:
        self._starts.append((time.perf_counter(), time.process_time()))
        self._full = side_of(number) == "full"
        if self._full:
            super().begin_step(number, stage)
        else:
            self._last_end = None
            self._step = StepMarks(number, stage)

    def note_loss(self, mean: Any, samples: int, *about: Any) -> None:
        if self._full:
            super().note_loss(mean, samples, *about)

    def lap(self, part: str) -> None:
        if self._full:
            super().lap(part)

    def end_backward(self) -> None:
        if self._full:
            super().end_backward()

    def end_step(self, **settings: Any) -> list[AgreedSteps]:
        if self._full:
            return super().end_step(**settings)
        self.cancel_step()
        return []

    def end_stage(self) -> list[AgreedSteps]:
        if self._rank == 0:
            (Path(os.environ[FOLDER]) / STARTS).write_text(json.dumps(self._starts))
        return super().end_stage()


def work(file: str) -> int:
    """One rank of such a run."""
    from ddprun.cli import main as ddprun
    from ddprun.engine import setup

    vars(setup)["StepRecorder"] = SwitchedRecorder
    sys.argv = ["ddprun", file]
    return int(ddprun() or 0)


@contextmanager
def running(folder: Path, model: str, steps: int, script: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Such a run; it has ended when this is left."""
    (folder / "telemetry.yaml").write_text(PIPELINE.format(model=MODELS[model], steps=steps))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, *script, str(folder / "telemetry.yaml")]
    environment = {**page.environment(), FOLDER: str(folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
            _, errors = process.communicate(timeout=max(1200, steps // 10))
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors}")


def cost(model: str, blocks: int) -> list[dict[str, list[float]]]:
    """Milliseconds of a step of every block, by side: on the clock, and of rank 0's processor."""
    steps = BLOCK * (WARM + len(SIDES) * blocks) + 1
    with tempfile.TemporaryDirectory() as scratch:
        with running(Path(scratch), model, steps, ["-m", "benchmarks.telemetry", "--work"]):
            pass
        starts = json.loads((Path(scratch) / STARTS).read_text())
    found: list[dict[str, list[float]]] = [{side: [] for side in SIDES} for _ in range(2)]
    for first in range(WARM * BLOCK, steps - BLOCK, BLOCK):
        begin, end = starts[first], starts[first + BLOCK]
        for kind, (before, after) in zip(found, zip(begin, end, strict=True), strict=True):
            kind[side_of(first + 1)].append(1000 * (after - before) / BLOCK)
    return found


def stalled(stretches: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of a step of every stretch of time, by what the disk did in it."""
    found: dict[str, list[float]] = {side: [] for side in ("frozen", "not frozen", "not frozen, repeated")}
    with tempfile.TemporaryDirectory() as scratch:
        image, disk = Path(scratch) / "image", Path(scratch) / "disk"
        disk.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        _do("mkfs.ext4", "-q", str(image))
        _do("mount", "-o", "loop", str(image), str(disk))
        try:
            _watch_disk(disk, stretches, seconds, found)
        finally:
            _do("umount", str(disk))
    return found


def _watch_disk(disk: Path, stretches: int, seconds: float, found: dict[str, list[float]]) -> None:
    """Freeze the disk in every third stretch, while a run whose folder is on it goes on."""
    steps = int(3 * (stretches + 2) * seconds * 1000)
    with running(disk, "medium", steps, ["-m", "ddprun"]) as process:
        while not list(disk.glob("runs/*/*/steps/rank-00000.jsonl")):
            if process.poll() is not None:
                return
            time.sleep(0.2)
        time.sleep(2 * seconds)
        sides: list[tuple[str, float, float]] = []
        for number in range(stretches):
            for side in random.Random(number).sample(list(found), len(found)):
                if side == "frozen":
                    _do("fsfreeze", "--freeze", str(disk))
                begin = time.monotonic()
                try:
                    time.sleep(seconds)
                finally:  # a frozen file system cannot be unmounted
                    sides.append((side, begin, time.monotonic()))
                    if side == "frozen":
                        _do("fsfreeze", "--unfreeze", str(disk))
                time.sleep(seconds / 2)  # what has gathered is written
        process.send_signal(2)
        process.wait(120)
        records = next(disk.glob("runs/*/*/steps/rank-00000.jsonl")).read_text().splitlines()
        times = [(line["start_us"] / 1e6, line["step_us"] / 1e3) for line in map(json.loads, records)]
        summary = json.loads(next(disk.glob("runs/*/*/summary.json")).read_text())
        print(f"{len(times)} steps; records dropped: {summary['records_dropped']}")
        for side, begin, end in sides:
            inside = [us for start, us in times if begin <= start < end]
            found[side].append(sum(inside) / len(inside))
        process.returncode = 0


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def print_ratios(found: dict[str, list[float]], base: str, again: str) -> dict[str, float]:
    """Print and return each side's ratio: the control's to the base, others' to the mean of these two."""
    factors = {}
    both = [(one + other) / 2 for one, other in zip(found[base], found[again], strict=True)]
    for side, times in found.items():
        one = bootstrap_ratio(list(zip(times, found[base] if side == again else both, strict=True)))
        factors[side] = one.mean
        interval = "" if side == base else f" x {one.mean:.4f} ({one.low:.4f} to {one.high:.4f})"
        print(f"  {side:20} {sum(times) / len(times):8.3f} ms per step{interval}", flush=True)
    return factors


def main() -> None:
    """Measure, print."""
    parser = page.argument_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=600, help="of each side")
    parser.add_argument("--model", choices=list(MODELS), help="one of them only")
    parser.add_argument("--stalled-disk", action="store_true")
    parser.add_argument("--work", metavar="PIPELINE", help=SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        sys.exit(work(asked.work))
    if asked.stalled_disk:
        print_ratios(stalled(max(2, asked.blocks // 60), 2.0), "not frozen", "not frozen, repeated")
        return
    too_much = False
    for model in [asked.model] if asked.model else MODELS:
        print(f"{model}: {MODELS[model]}")
        on_the_clock, of_processor = cost(model, asked.blocks)
        too_much = print_ratios(on_the_clock, "none", "none, repeated")["full"] > 1 + MOST or too_much
        print("  CPU time of rank 0, all its threads:")
        print_ratios(of_processor, "none", "none, repeated")
    sys.exit(too_much)


if __name__ == "__main__":
    main()
