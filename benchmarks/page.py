"""What benchmarks share: command lines, tables in docs/, the machine beside them, and measuring in pieces."""

import hashlib
import json
import os
import platform
import random
import re
import subprocess
import sys
import textwrap
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNFINISHED = 75
"""Exit code of a benchmark whose time was over before it had measured all: the same command continues."""

DOES_NOT_HOLD = 3
"""Exit code of a benchmark that has printed its table, and in which something does not hold."""


def argument_parser(description: str | None, *, in_pieces: bool = False) -> ArgumentParser:
    """A parser whose help is a docstring as it stands; `in_pieces` adds `--minutes`, for `Pieces`."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if in_pieces:
        parser.add_argument("--minutes", type=float, help="a piece of it: then the same command continues")
    return parser


def environment() -> dict[str, str]:
    """The variables of a process that is to import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def print_row(cells: Sequence[object]) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(columns: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    print_row(columns)
    print(f"|{'---|' * len(columns)}", flush=True)


def faster(own: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """How many times as fast one is as another: times of a step, of the same rounds. The median over rounds,
    which leaves out what disturbs a few of them, and its 95% interval (bootstrap).
    """
    ratios = [theirs / mine for mine, theirs in zip(own, base, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return median(ratios), medians[25], medians[974]


def shown(ratio: tuple[float, float, float], digits: int = 2) -> str:
    """Such a ratio in a cell."""
    middle, low, high = (f"{one:.{digits}f}" for one in ratio)
    return f"{middle} ({low} to {high})"


def machine() -> str:
    """Where something was measured, in words."""
    from importlib.metadata import version  # what measures start-up is to be small itself

    import psutil

    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = cpu[1].strip() if cpu else platform.machine()
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    kernel = f"Linux {platform.release().partition('-')[0]}"
    python = platform.python_version()
    return f"{cores} cores ({name}), {memory:.0f} GiB, {kernel}, Python {python}, torch {version('torch')}"


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- benchmark: {name} -->", f"<!-- end of {name} -->"


def has_table(page: Path, name: str) -> bool:
    """Whether a page has a place for a benchmark's table, once."""
    text = page.read_text(encoding="utf-8")
    return all(text.count(marker) == 1 for marker in _markers(name))


def write_table(page: Path, name: str, table: str) -> None:
    """Replace what stands between a benchmark's markers in a page; ValueError if these are not there once."""
    begin, end = _markers(name)
    if not has_table(page, name):
        raise ValueError(f"{page} needs the lines {begin} and {end}, once each")
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    lines = [
        line if line.startswith("|") else textwrap.fill(line, 100, break_on_hyphens=False)
        for line in table.strip().splitlines()
    ]
    written = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{written}\n\n{end}{after}", encoding="utf-8")


class Pieces:
    """A long measurement that may be taken in pieces: what was measured is kept in build/ until all is there.

    Args:
        name: of the benchmark.
        settings: what was asked for, which JSON can hold. With other settings, other code in runner/ or
            hooks/, or on another machine, all is measured anew.
        minutes: after so long no further measurement begins; None: until all is there.
    """

    def __init__(self, name: str, settings: object, minutes: float | None) -> None:
        trees = subprocess.run(
            ["git", "rev-parse", "HEAD:runner", "HEAD:hooks"], cwd=ROOT, capture_output=True, check=False
        )
        key = json.dumps([settings, machine(), trees.stdout.decode()], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        self._file = ROOT / "build" / "benchmarks" / f"{name}-{digest}.jsonl"
        self._until = None if minutes is None else time.monotonic() + 60 * minutes
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._found: dict[str, Any] = dict(map(json.loads, lines))

    def take(self, key: str, measure: Callable[[], Any]) -> Any:
        """What was measured under a key, now or in an earlier piece: `measure` gives what JSON can hold."""
        if key not in self._found:
            if self._until is not None and time.monotonic() > self._until:
                print(f"{len(self._found)} measured; the same command continues", file=sys.stderr)
                sys.exit(UNFINISHED)
            self._found[key] = measure()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
            print(f"{key}: {json.dumps(self._found[key])[:300]}", file=sys.stderr, flush=True)
        return self._found[key]

    def end(self) -> None:
        """The table is there: measure anew next time."""
        self._file.unlink(missing_ok=True)
