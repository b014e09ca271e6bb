"""How long `ddprun --help` and `ddprun check` take to start, and how much memory they need.

Each round runs every command once, with a bare `python -c pass` among them as the control, so that whatever
else the machine does meets all of them alike. The table shows medians over the rounds and the spread.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Measured:
    """One run of a command."""

    wall_s: float
    processor_s: float
    peak_mib: float


def commands() -> dict[str, list[str]]:
    """What is measured: a label and a command line each."""
    pipelines = [str(path) for path in sorted((ROOT / "pipelines").glob("*.yaml"))]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "ddprun --help": [sys.executable, "-m", "ddprun", "--help"],
        "ddprun check pipelines/*.yaml": [sys.executable, "-m", "ddprun", "check", *pipelines],
        "ddprun catalog": [sys.executable, "-m", "ddprun", "catalog"],
    }


def measure(command: list[str]) -> Measured:
    """Run a command in a process of its own.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Measured(wall_s, used.ru_utime + used.ru_stime, _mib(used))


def _mib(used: resource.struct_rusage) -> float:
    return used.ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each command (15)")
    rounds = parser.parse_args().rounds
    measured: dict[str, list[Measured]] = {label: [] for label in commands()}
    for _ in range(rounds):
        for label, command in commands().items():
            measured[label].append(measure(command))
    print(f"medians of {rounds} interleaved rounds, Python {sys.version.split()[0]}")
    print(f"{'command':<32} {'wall s':>8} {'min to max':>16} {'processor s':>12} {'peak MiB':>9}")
    for label, runs in measured.items():
        walls = sorted(run.wall_s for run in runs)
        spread = f"{walls[0]:.3f} to {walls[-1]:.3f}"
        processor_s = statistics.median(run.processor_s for run in runs)
        peak_mib = statistics.median(run.peak_mib for run in runs)
        print(
            f"{label:<32} {statistics.median(walls):>8.3f} {spread:>16} {processor_s:>12.3f} {peak_mib:>9.1f}"
        )


if __name__ == "__main__":
    main()
