"""Measure, and write the tables into the pages of docs/.

    python -m benchmarks [PART …] [--quick] [--list] [--minutes 3]

Without a name, all parts of docs/performance.md, one after the other (hours on two cores); `--list`
names the tables of other pages, too. Each part is a process of its own, which is ended if it takes too long.
What it prints replaces its old table, with the machine beside it. A part that cannot run here, or fails,
leaves its old table, and the reason is printed. `--quick` tries a part with the smallest settings, and prints
in place of writing. With `--minutes`, long parts stop after so many minutes; the same command continues.
"""

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks.page import DOES_NOT_HOLD, ROOT, UNFINISHED, machine, print_head, print_row, write_table

PERFORMANCE = "performance.md"


@dataclass(frozen=True)
class Part:
    """A benchmark that prints a table, and the page where that stands."""

    name: str
    what: str
    command: str
    """Module of benchmarks/ and its arguments."""

    quick: str
    """Arguments in place of these, or after them, for a short trial."""

    limit_s: float
    page: str = PERFORMANCE

    def words(self, quick: bool, minutes: float | None) -> list[str]:
        """The command line."""
        module, *arguments = self.command.split()
        words = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        words += self.quick.split() if quick else []
        return words + (["--minutes", str(minutes)] if module in _IN_PIECES and minutes is not None else [])


_IN_PIECES = ("growth", "language", "memory", "prediction", "slow_links")  # take `--minutes`
_WIDE, _SLOW = "slow_links --hidden [1024,1024]", "--mbit 37 --one-way-ms 8 --seeds 2"
_QUICK_LINK = "--hidden [64] --seeds 1 --accuracy 0.5 --only int8"
PARTS = [
    Part(
        "overhead",
        "steps of ddprun, a hand-written loop, Accelerate, Lightning",
        "overhead",
        "--model small --data own --seconds 9 --starts 1",
        5400,
    ),
    Part("hooks", "ddprun's hooks and torch's hooks", "torch_hooks", "--rounds 3 --steps 2", 900),
    Part(
        "language",
        "a language model over slow links",
        "language",
        "--seeds 1 --rounds 1 --steps 200 --only sparseloco",
        9000,
    ),
    Part("link-100", "100 Mbit/s", f"{_WIDE} --mbit 100", _QUICK_LINK, 3600),
    Part("link-37", "37 Mbit/s, 8 ms", f"{_WIDE} {_SLOW}", _QUICK_LINK, 7200),
    Part("link-100-quickstart", "the same, 85,000 parameters", "slow_links --mbit 100", _QUICK_LINK, 3600),
    Part("link-37-quickstart", "the same, 85,000 parameters", f"slow_links {_SLOW}", _QUICK_LINK, 3600),
    Part("memory", "memory of each hook", "memory", "--width 256 --only [int8]", 900),
    Part("ranks", "1 to 16 ranks", "growth --axis ranks", "--rows 0 --seconds 4", 1800),
    Part(
        "parameters", "1 to 200 million parameters", "growth --axis parameters", "--rows 0 --seconds 4", 1800
    ),
    Part("buckets", "1 to 500 buckets", "growth --axis buckets", "--rows 0 --seconds 4", 1800),
    Part("steps", "100,000 steps", "growth --axis steps", "--steps 2000", 1800),
    Part("start", "start of commands and runs", "startup", "--rounds 1 --without-runs", 900),
    Part("wire-bytes", "what each stack sends", "wire_bytes", "--only noop --steps 2 4", 3600, "hooks.md"),
    Part(
        "text", "loss with each stack", "convergence --task text", "--only fp16 --steps 60", 7200, "hooks.md"
    ),
    Part(
        "digits",
        "accuracy with each stack",
        "convergence --task digits",
        "--seeds 1 --only fp16 --steps 40",
        7200,
        "hooks.md",
    ),
    Part("mean-error", "how exact a mean is", "mean_error", "--ranks 2 --steps 2", 1800, "hooks.md"),
    Part("shared-memory", "shared memory and Gloo", "shared_memory", "--rounds 2", 900, "hooks.md"),
    Part(
        "policy-bytes",
        "what each policy sends",
        "wire_bytes --table policies",
        "--only broadcast --steps 8 16",
        3600,
        "sync.md",
    ),
    Part(
        "policies",
        "accuracy with each policy",
        "convergence --task policies",
        "--seeds 1 --only average --steps 40",
        7200,
        "sync.md",
    ),
    Part(
        "speeds",
        "ranks of different speed",
        "speeds",
        "--rounds 1 --seconds 4 --only same",
        2400,
        "speeds.md",
    ),
    Part(
        "prediction",
        "predicted and measured steps",
        "prediction",
        "--models cnn --links unlimited",
        5400,
        "explain.md",
    ),
    Part(
        "prediction-ranks",
        "predicted and measured steps of ranks that share cores",
        "prediction --ranks",
        "--models cnn",
        1200,
        "explain.md",
    ),
    Part(
        "recovery",
        "from a kill to the next step",
        "recovery",
        "--rounds 1 --only one",
        2400,
        "reliability.md",
    ),
    Part(
        "checkpoints",
        "what a checkpoint costs",
        "recovery --checkpoints",
        "--steps 120 --width 100",
        3600,
        "reliability.md",
    ),
    Part("overlap", "what overlap_steps hides", "overlap --rounds 3", "--rounds 1", 1800, "sync.md"),
]


def measure(part: Part, quick: bool, minutes: float | None) -> str | None:
    """What a part prints; None if it has no table, after the reason was printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    words = part.words(quick, minutes)
    with subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            print(f"{part.name}: ended after {part.limit_s:.0f} s", file=sys.stderr)
            return None
        finally:
            if process.poll() is None:
                _end(process)
    if process.returncode == UNFINISHED:
        return None
    if not printed.strip() or process.returncode not in (0, DOES_NOT_HOLD):
        print(f"{part.name}: exit code {process.returncode}, no table", file=sys.stderr)
        return None
    if process.returncode:
        print(f"{part.name}: something in the table does not hold", file=sys.stderr)
    return overhead_table(printed) if part.name == "overhead" else printed


def _end(process: subprocess.Popen[str]) -> None:
    """End a part's whole session, politely first: some have namespaces or stopped processes to clear away."""
    for number, wait_s in ((signal.SIGINT, 20), (signal.SIGKILL, 5)):
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=wait_s)
            return
        except subprocess.TimeoutExpired:
            continue


_TARGETS = [(5.0, 0.95), (20.0, 0.98), (float("inf"), 0.99)]
"""For steps of up to so many milliseconds by hand, the least ratio of steps per second."""


def overhead_table(printed: str) -> str:
    """What `overhead.py` prints, as a table: a row for each model, with the target."""
    rows: list[list[str]] = []
    names: list[str] = []
    for line in printed.splitlines():
        if head := re.fullmatch(r"(\w[\w, ]*): ([\d.]+) ms per step of the hand-written loop", line):
            rows.append([head[1], head[2]])
        elif rows and (one := re.fullmatch(r"  (\D+?) ([\d.]+.*)", line)):
            names += [one[1]] * (one[1] not in names)
            rows[-1].append(one[2])
    if not rows or any(len(row) != 2 + len(names) for row in rows):
        return printed
    for row in rows:
        target = next(ratio for most_ms, ratio in _TARGETS if float(row[1]) <= most_ms)
        reached = float(row[2 + names.index("ddprun")].split()[0])
        row.append(f"{target}: {'reached' if reached >= target else 'missed'}")
    columns = ["model", "hand-written loop: ms per step", *names, "target"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        print_head(columns)
        for row in rows:
            print_row(row)
    return told.getvalue().strip()


def main() -> int:
    """Run what was asked for; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--quick", action="store_true", help="the smallest settings; print, write nothing")
    parser.add_argument("--minutes", type=float, help="a piece of each long part")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if asked.list:
        for part in PARTS:
            print(f"{part.name:14} docs/{part.page:15} {part.what}")
        return 0
    missing = []
    for part in PARTS:
        if part.name not in asked.parts and (asked.parts or part.page != PERFORMANCE):
            continue
        start = time.monotonic()
        print(f"{part.name}: {' '.join(part.words(asked.quick, asked.minutes)[1:])}", file=sys.stderr)
        table = measure(part, asked.quick, asked.minutes)
        if table is None:
            missing.append(part.name)
        elif asked.quick:
            print(f"{part.name}\n\n{table}")
        else:
            write_table(ROOT / "docs" / part.page, part.name, f"{table.strip()}\n\nMeasured on {machine()}.")
            print(f"{part.name}: docs/{part.page}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    if missing:
        print(f"no new table: {', '.join(missing)}", file=sys.stderr)
    return len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
