"""How long training stops when a rank is killed, and when a checkpoint is taken.

    python -m benchmarks.recovery [--rounds 10] [--only one]
    python -m benchmarks.recovery --checkpoints [--steps 220] [--width 3500]

Each round kills a rank of a run with SIGKILL, once for each row, in a new random order. Prints medians in
seconds: until the launcher notices (detect), from there until all ranks are connected and built (start), from
there until the checkpoint is read (load), and from the kill to the first new step. The number of steps done
twice is estimated from the time between the checkpoint and the kill, because a resumed run keeps no record of
these steps. Checkpoints on disk are taken every 20 steps. Two hosts are network namespaces of this machine
(Linux, root).

`--checkpoints` trains models of different sizes on two ranks, and takes a checkpoint every hundred steps.
Prints how long training stops for a checkpoint (stall), how long the write in the background takes, and the
median step without and during a write. The shares are those of the stall, and of the stall plus the extra
time of the steps during a write, in the time of a hundred steps.
"""

import contextlib
import json
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO

from benchmarks.page import argument_parser, print_head, print_row
from benchmarks.two_hosts import started
from tests.engine.running import events, lines
from tests.namespaces import REASON
from tests.ranks import Running, ddprun

from ddprun import __version__
from ddprun.units import format_bytes

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [768, 768, 768], outputs: 10}}
data: digits
loader: {batch_size: 256}
optimizer: {sgd: {lr: 0.01, momentum: 0.9}}
hooks: [fp16]
checkpoint: {every: 20}
stages: [{train: {steps: 10000000}}]
launch: {nproc_per_node: 2, max_restarts: 3}
"""
_TRAINS_S = 1.5
_LIMIT_S = 60.0
_SIGNS = ("starting the ranks again", f"ddprun {__version__}: ", "resuming after step ")


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    hosts: int
    setting: str = ""


CASES = [
    Case("one host", 1),
    Case("one host, `memory_every: 5`", 1, "checkpoint.memory_every=5"),
    Case("one host, ranks started afresh", 1, "launch.preload=null"),
    Case("two hosts", 2),
    Case("two hosts, `memory_every: 5`", 2, "checkpoint.memory_every=5"),
    Case("two hosts, ranks started afresh", 2, "launch.preload=null"),
]


class _Lines:
    """What processes print, with the time of each line."""

    def __init__(self, running: list[Running]) -> None:
        self.found: list[tuple[float, str]] = []
        for one in running:
            assert one.process.stderr is not None
            threading.Thread(target=self._read, args=(one.process.stderr,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):  # closed at the end
            for line in stream:
                self.found.append((time.monotonic(), line))

    def wait_for(self, sign: str, after: float) -> tuple[float, str]:
        """The first line with such a sign after a moment; raises TimeoutError."""
        until = time.monotonic() + _LIMIT_S
        while time.monotonic() < until:
            for at, line in [*self.found]:
                if at > after and sign in line:
                    return at, line
            time.sleep(0.005)
        raise TimeoutError(f"no {sign!r} in\n{''.join(line for _, line in self.found)}")


@contextlib.contextmanager
def _run(folder: Path, case: Case) -> Iterator[list[Running]]:
    (folder / "p.yaml").write_text(PIPELINE)
    settings = [f"--set={case.setting}"] if case.setting else []
    if case.hosts == 1:
        with Running("p.yaml", *settings, "--run-dir", "run", cwd=folder, fresh=True) as running:
            yield [running]
    else:
        with started(folder, "p.yaml", settings, local=1) as (_, both):
            yield both


def _steps(run: Path) -> list[tuple[float, int]]:
    """When rank 0 began each step, as far as it is written, and the step's number."""
    with (run / "steps" / "rank-00000.jsonl").open("rb") as file:
        whole = [line for line in file if line.endswith(b"\n")]
    return [(step["start_us"] / 1e6, step["step"]) for step in map(json.loads, whole) if step.get("step")]


def measure(case: Case, draw: random.Random) -> dict[str, float]:
    """Kill a rank of a new run, and time what follows; raises TimeoutError."""
    with tempfile.TemporaryDirectory() as scratch, _run(Path(scratch), case) as running:
        printed, run = _Lines(running), Path(scratch, "run")
        until = time.monotonic() + _LIMIT_S
        while not list(run.glob("checkpoints/step-*0/manifest.json")):
            if time.monotonic() > until:
                raise TimeoutError("no checkpoint")
            time.sleep(0.05)
        time.sleep(_TRAINS_S + draw.random())
        ranks = [pid for one in running for pid in one.ranks()]
        killed = time.monotonic()
        os.kill(draw.choice(ranks), signal.SIGKILL)
        noticed, up, resumed = (printed.wait_for(sign, killed) for sign in _SIGNS)
        last_kept = int(resumed[1].split("resuming after step ")[1].split()[0])
        time.sleep(1.0)
        for one in running:
            one.process.send_signal(signal.SIGTERM)
        for one in running:
            one.process.wait(_LIMIT_S)
        steps = _steps(run)
    new = [start for start, step in steps if step > last_kept and start > noticed[0]]
    kept = [start for start, step in steps if step <= last_kept]
    return {
        "detect": noticed[0] - killed,
        "start": up[0] - noticed[0],
        "load": resumed[0] - up[0],
        "whole": new[0] - killed,
        "twice": math.floor((killed - kept[-1]) / median(b - a for a, b in pairwise(kept)) - 1),
    }


_WIDTHS = (500, 2500, 3500, 8000)
"""Of hidden layers, three each: checkpoints of 4 MB to 1 GB."""

_CHECKPOINTS = """
model: {{mlp: {{inputs: 64, hidden: [{width}, {width}, {width}], outputs: 10}}}}
data: digits
loader: {{batch_size: 32}}
optimizer: {{sgd: {{lr: 0.001, momentum: 0.9}}}}
checkpoint: {{every: 100}}
stages: [{{train: {{steps: {steps}}}}}]
launch: {{nproc_per_node: 2}}
"""


def print_checkpoints(steps: int, widths: Sequence[int]) -> None:
    """Train models of each size, and print what their checkpoints cost."""
    heads = ["checkpoint", "stall (s)", "written in (s)", "step (ms)", "step while one is written (ms)"]
    print_head([*heads, "stall, share of 100 steps", "with slower steps"])
    for width in widths:
        with tempfile.TemporaryDirectory() as scratch:
            text = _CHECKPOINTS.format(width=width, steps=steps)
            Path(scratch, "p.yaml").write_text(text)
            done = ddprun("p.yaml", "--run-dir", "run", cwd=Path(scratch), timeout_s=1200, fresh=True)
            if done.code:
                raise RuntimeError(done.stderr)
            run = Path(scratch, "run")
            taken, written = (
                [event for event in events(run) if event["event"] == name and event["step"] < steps]
                for name in ("checkpoint_taken", "checkpoint_written")
            )
            records = [one for one in lines(run, "steps") if one["rank"] == 0 and one["step"] > 20]
        spans = [(one["monotonic_us"], end["monotonic_us"]) for one, end in zip(taken, written, strict=True)]
        beside, alone = list[float](), list[float]()
        for record in records:
            start, end = record["start_us"], record["start_us"] + record["step_us"]
            into = beside if any(start < last and first < end for first, last in spans) else alone
            into.append(record["step_us"] / 1e3)
        stall, step_ms = median(event["seconds"] for event in taken), median(alone)
        slower_ms = sum(beside) / len(spans) - len(beside) / len(spans) * step_ms if beside else 0.0
        seconds = median(event["seconds"] for event in written)
        cells = [format_bytes(written[0]["bytes"]), f"{stall:.3f}", f"{seconds:.2f}", f"{step_ms:.1f}"]
        cells += [
            f"{median(beside):.1f}" if beside else "",
            f"{stall * 1e3 / (100 * step_ms):.2%}",
            f"{(stall * 1e3 + slower_ms) / (100 * step_ms):.1%}",
        ]
        print_row(cells)


def main() -> None:
    """Measure and print a table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="kills per row (10)")
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--checkpoints", action="store_true", help="what checkpoints cost, in place of kills")
    parser.add_argument("--steps", type=int, default=220, help="of each run with checkpoints (220)")
    parser.add_argument("--width", type=int, action="append", help="of hidden layers, in place of all")
    asked = parser.parse_args()
    if asked.checkpoints:
        print_checkpoints(asked.steps, asked.width or _WIDTHS)
        return
    cases = [case for case in CASES if asked.only in case.name and (case.hosts == 1 or REASON is None)]
    found: dict[Case, list[dict[str, float]]] = defaultdict(list)
    for number in range(asked.rounds):
        draw = random.Random(number)
        for case in draw.sample(cases, len(cases)):
            found[case].append(measure(case, draw))
    heads = ["run", "detect (s)", "start (s)", "load (s)", "kill to next step (s)", "min to max (s)"]
    print_head([*heads, "steps done twice", "at most"])
    for case in cases:
        middle = {key: median(one[key] for one in found[case]) for key in found[case][0]}
        whole = [one["whole"] for one in found[case]]
        cells = [case.name, *(f"{middle[key]:.2f}" for key in ("detect", "start", "load", "whole"))]
        most = max(one["twice"] for one in found[case])
        print_row([*cells, f"{min(whole):.2f} to {max(whole):.2f}", f"{middle['twice']:.0f}", f"{most:.0f}"])


if __name__ == "__main__":
    main()
