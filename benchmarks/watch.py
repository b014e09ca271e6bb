"""What the watchdog for hangs costs a step, on two ranks of this machine.

    python -m benchmarks.watch [--rounds 5]

First what one step tells the watchdog (a step, five phases, two collectives issued and ended), by itself.
Then whole runs with the watchdog and without, interleaved, the ones without twice in each round as their own
control. Prints medians.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import page

from ddprun.watchdog.rank_watchdog import RankWatchdog, WatchedCollective
from ddprun_hooks.comm.collective_observer import CollectiveSequence

STEPS = {"[64]": 3000, "[512, 512]": 600}

PIPELINE = """
model:
  mlp: {{inputs: 64, hidden: {hidden}, outputs: 10}}
data: digits
loader: {{batch_size: 32, drop_last: true}}
optimizer: {{sgd: {{lr: 0.01}}}}
stages:
  - train: {{steps: {steps}}}
"""

WRAPPER = """
import sys
from benchmarks.watch import Unwatched
from ddprun.engine import failures

if sys.argv.pop(1) == "without":
    failures.RankWatchdog = Unwatched
from ddprun.cli import main
sys.exit(main())
"""


class Unwatched(RankWatchdog):
    """A watchdog that does nothing."""

    def start(self) -> None:
        """There is nothing to watch."""

    def new_sequence(self, name: str, ranks: Sequence[int]) -> CollectiveSequence:  # type: ignore[override]
        return CollectiveSequence()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_phase = lambda *_: None


def alone(watchdog: RankWatchdog, steps: int) -> float:
    """Microseconds for what one step tells."""
    sequences = [watchdog.new_sequence("world.0", [0, 1]), watchdog.new_sequence("control", [0, 1])]
    began = time.perf_counter()
    for step in range(1, steps + 1):
        watchdog.set_phase(b"data", step)
        for phase in (b"forward", b"backward", b"optimizer", b"sync"):
            watchdog.set_phase(phase)
        for sequence in sequences:
            sequence.record_issued("all_reduce", what="word").mark_done()
    return (time.perf_counter() - began) / steps * 1e6


def whole(folder: Path, hidden: str, how: str) -> float:
    """Steps per second, without the first three."""
    (folder / "p.yaml").write_text(PIPELINE.format(hidden=hidden, steps=STEPS[hidden]))
    (folder / "wrapper.py").write_text(WRAPPER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "wrapper.py", how, "p.yaml"]
    environment = page.environment()
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    file = folder / done.stdout.strip() / "steps" / "rank-00000.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    return 1e6 * (len(steps) - 3) / float(steps[-1]["start_us"] + steps[-1]["step_us"] - steps[3]["start_us"])


def main() -> None:
    """Run the comparison and print it."""
    parser = page.argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watchdog, unwatched = RankWatchdog(0, 600, folder, _no_alarm), Unwatched(1, 600, folder, _no_alarm)
        watchdog.start()
        told = [
            (alone(watchdog, 20_000), alone(unwatched, 20_000), alone(unwatched, 20_000))
            for _ in range(rounds)
        ]
        watchdog.close()
        with_it, without, again = (statistics.median(column) for column in zip(*told, strict=True))
        print(f"calls per step: {with_it:.1f} us with it, {without:.1f} us without, {again:.1f} us repeated")
        print(f"{'hidden':12} {'without':>11} {'without, repeated':>20} {'with':>20}")
        for hidden in STEPS:
            rates: dict[str, list[float]] = {"without": [], "with": [], "again": []}
            for _ in range(rounds):
                rates["without"].append(whole(folder, hidden, "without"))
                rates["with"].append(whole(folder, hidden, "with"))
                rates["again"].append(whole(folder, hidden, "without"))
            base, own, control = (statistics.median(rates[key]) for key in ("without", "with", "again"))
            ratios = f"{control:10.1f}/s ({control / base:.2f}) {own:10.1f}/s ({own / base:.2f})"
            print(f"{hidden:12} {base:9.1f}/s {ratios}")


def _no_alarm(_: RankWatchdog, waits: Sequence[WatchedCollective]) -> None:
    assert threading.current_thread().name == "ddprun-watchdog", waits


if __name__ == "__main__":
    main()
