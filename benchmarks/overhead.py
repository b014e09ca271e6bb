"""What ddprun costs a step: against a DDP loop written by hand, Accelerate and Lightning, on two ranks.

    python -m benchmarks.overhead [--seconds 120] [--model small] [--data own]
    python -m benchmarks.overhead --against CHECKOUT    (another checkout of ddprun in place of the two)

All train the same model on the same digits without hooks and checkpoints (`loops.py`), ddprun with every
bucket and step recorded. The digits are in a `Dataset` class, as users write one, or in a `TensorDataset`,
from which ddprun takes whole batches. All are started; then one works at a time while the others are stopped
(SIGSTOP), for about a second each, in an order drawn anew for each round. So all of them meet whatever else
the machine does, and nobody's start counts. All of this is done several times, since steps differ by up to 5%
from one start of the same loop to the next. The loop by hand is there twice, as its own control, once more
with ddprun's buckets (left alone, DDP cuts the first one at 1 MiB), once with those and torch's
`allreduce_hook`, which is Python for each bucket, as every hook of ddprun's is, and once with
`ddprun.observe`. Accelerate and Lightning take part if they are installed. Prints the time of a step of the
loop by hand, and steps per second relative to it, with 95% confidence intervals: of the mean over starts
(Student's t), which differ more than the slices of one.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
from benchmarks.loops import BATCH, LR, MOST, mlp

from ddprun.compare.learning import confidence_half_width
from ddprun.compare.runs import bootstrap_ratio

MODELS = {
    "small": mlp(64),
    "narrow": mlp(256, 256),
    "medium": mlp(512, 512),
    "middle": mlp(800, 800),
    "wide": mlp(1280, 1280),
    "large": mlp(2048, 2048),
    "convolutional": {"cnn": {"channels": [32, 64, 64, 64, 64, 64], "inputs": [1, 8, 8], "outputs": 10}},
}
BY_HAND = "hand-written loop"
AGAIN, SAME_BUCKETS = f"{BY_HAND}, repeated", "with ddprun's bucket size"
WITH_HOOK = f"{SAME_BUCKETS} and allreduce_hook"
OBSERVED = f"{BY_HAND} with ddprun.observe"
OURS, AGAINST = "ddprun", "ddprun of the other checkout"
WITH_TENSORS = ("small", "middle")  # models that are measured with a `TensorDataset`, too
DATA = {"own": "benchmarks.loops.Digits", "tensors": "digits"}
HERE = Path(__file__).resolve().parents[1]
OTHERS = {"Accelerate": "accelerate", "Lightning": "lightning"}
_LOOPS = {
    BY_HAND: "hand",
    AGAIN: "hand",
    SAME_BUCKETS: "hand_with_our_buckets",
    WITH_HOOK: "hand_with_hook",
    OBSERVED: "hand_observed",
    **OTHERS,
}

PIPELINE = """
model: {model}
data: {data}
loader: {{batch_size: {batch}, drop_last: true}}
optimizer: {{sgd: {{lr: {lr}}}}}
checkpoint: {{keep: 0}}
stages:
  - train: {{steps: {steps}}}
"""

_STARTS_WITHIN_S = 180.0
_STEPS_FIRST = 10
_NOT_COUNTED = 0.2  # of a slice, at its beginning: caches fill, and the clock of the processor settles


@dataclass
class Loop:
    """One that trains, in a folder of its own."""

    name: str
    folder: Path
    model: Mapping[str, Any]
    data: str = "own"
    checkout: Path | None = None  # whose ddprun it is; None: it is none
    slices: list[tuple[float, float]] = field(default_factory=list)  # when it worked, monotonic seconds

    def start(self) -> None:
        """Start it, and stop it once it trains."""
        self.folder.mkdir()
        ranks = ["--nproc-per-node", "2"]
        if self.checkout is not None:
            model = json.dumps(self.model)
            text = PIPELINE.format(model=model, data=DATA[self.data], batch=BATCH, lr=LR, steps=MOST)
            (self.folder / "p.yaml").write_text(text)
            command = [sys.executable, "-m", "ddprun", "p.yaml", *ranks, "--run-dir", "run"]
        else:
            arguments = [_LOOPS[self.name], self.data, json.dumps(self.model), str(self.folder / "times")]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks]
            command = [*torchrun, "-m", "benchmarks.loops", *arguments]
        root = self.checkout or HERE
        own = [str(root / part) for part in ("", "runner", "hooks")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*own, *sys.path]),
        }
        with (self.folder / "log").open("wb") as log:
            self.process = psutil.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)
        until = time.monotonic() + _STARTS_WITHIN_S
        while len(self.ends()) < _STEPS_FIRST:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not train:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.2)
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes: ranks first to stop, last to go on."""
        tree = [self.process, *self.process.children(recursive=True)]
        for one in reversed(tree) if number == signal.SIGSTOP else tree:
            one.send_signal(number)

    def work(self, seconds: float) -> None:
        """Let it train for so long."""
        self.signal(signal.SIGCONT)
        begin = time.monotonic()
        time.sleep(seconds)
        self.slices.append((begin, time.monotonic()))
        self.signal(signal.SIGSTOP)

    def end(self) -> None:
        """End it; ddprun writes the rest of its records."""
        if self.process.poll() is not None:
            return
        tree = [self.process, *self.process.children(recursive=True)]
        self.signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM if self.checkout is None else signal.SIGINT)
        _, alive = psutil.wait_procs(tree, timeout=30)
        for one in alive:
            one.kill()

    def ends(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """When its steps ended, monotonic seconds; rank 0's."""
        if self.checkout is None:
            file = self.folder / "times-0"
            times = np.fromfile(file) if file.exists() else np.zeros(0)
            return times[times > 0]
        file = self.folder / "run" / "steps" / "rank-00000.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        steps = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return np.array([(step["start_us"] + step["step_us"]) / 1e6 for step in steps])

    def step_times(self) -> list[float]:
        """Seconds of a step in each slice."""
        ends, found = self.ends(), []
        for begin, until in self.slices:
            begin += _NOT_COUNTED * (until - begin)
            inside = ends[(ends >= begin) & (ends <= until)]
            found.append(float(inside[-1] - inside[0]) / (len(inside) - 1))
        return found


@contextmanager
def started(model: Mapping[str, Any], data: str, against: Path | None) -> Iterator[list[Loop]]:
    """All that take part, stopped."""
    by_hand = [BY_HAND, AGAIN, SAME_BUCKETS, WITH_HOOK, OBSERVED]
    who: dict[str, Path | None] = dict.fromkeys(by_hand) | {OURS: HERE}
    if against is not None:
        who[AGAINST] = against.resolve()
    else:
        who |= {name: None for name, module in OTHERS.items() if importlib.util.find_spec(module)}
    with tempfile.TemporaryDirectory() as scratch:
        loops = [
            Loop(name, Path(scratch) / re.sub(r"\W+", "-", name), model, data, checkout)
            for name, checkout in who.items()
        ]
        running: list[Loop] = []
        try:
            for loop in loops:
                running.append(loop)
                loop.start()
            yield loops
        finally:
            for loop in running:
                loop.end()


def measure(model: str, data: str, seconds: float, starts: int, against: Path | None) -> None:
    """Print a model's row: the mean over starts of each loop's ratio, and its interval."""
    starts_of: dict[str, list[list[float]]] = {}  # of each loop: for each start the times of its slices
    for start in range(starts):
        with started(MODELS[model], data, against) as loops:
            first = loops[0].ends()
            step_s = float(first[-1] - first[0]) / (len(first) - 1)
            slice_s = max(1.0, 15 * step_s)
            for number in range(max(3, round(seconds / starts / slice_s / len(loops)))):
                for loop in random.Random(f"{start} {number}").sample(loops, len(loops)):
                    loop.work(slice_s)
            for loop in loops:
                loop.signal(signal.SIGCONT)
            time.sleep(1.0)  # ddprun writes the records of its last steps
            for loop in loops:
                starts_of.setdefault(loop.name, []).append(loop.step_times())
    base = starts_of.pop(BY_HAND)
    cells = []
    if against is not None:
        cells.append(f"{OURS} relative to {AGAINST} {ratio(starts_of[AGAINST], starts_of[OURS])}")
    cells += (f"{name} {ratio(base, own)}" for name, own in starts_of.items())
    step_ms = 1000 * float(np.median(np.concatenate(base)))
    row = model if data == "own" else f"{model}, TensorDataset"
    print(f"{row}: {step_ms:.2f} ms per step of the {BY_HAND}", *cells, sep="\n  ", flush=True)


def ratio(base: list[list[float]], own: list[list[float]]) -> str:
    """Another loop's speed relative to the base's, with its interval: over starts or, of one, over slices."""
    of_starts = [fsum(ours) for ours in base], [fsum(theirs) for theirs in own]
    ratios = [one / other for one, other in zip(*of_starts, strict=True)]
    half = confidence_half_width(ratios)
    if half is None:
        only = bootstrap_ratio(list(zip(base[0], own[0], strict=True)))
        return f"{only.mean:.3f} ({only.low:.3f} to {only.high:.3f})"
    return f"{fmean(ratios):.3f} ({fmean(ratios) - half:.3f} to {fmean(ratios) + half:.3f})"


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="for each model")
    parser.add_argument("--starts", type=int, default=4, help="how often each loop is started")
    parser.add_argument("--model", choices=list(MODELS), help="one of them only")
    parser.add_argument("--data", choices=list(DATA), help="one of them only")
    parser.add_argument("--against", type=Path, help="another checkout, whose ddprun takes part")
    asked = parser.parse_args()
    for data in [asked.data] if asked.data else DATA:
        for model in [asked.model] if asked.model else MODELS if data == "own" else WITH_TENSORS:
            measure(model, data, asked.seconds, asked.starts, asked.against)


if __name__ == "__main__":
    main()
