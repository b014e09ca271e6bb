"""How long does training take over a slow link, until a held-out accuracy is reached?

    python -m benchmarks.slow_links --mbit 100 [--one-way-ms 8] [--seeds 3] [--only NAME] [--minutes 3]

Needs Linux and root; run it in the repository's folder. Two network namespaces with two ranks each are joined
by a link of that rate and latency. Each seed runs every variant once, plain DDP twice as its own control. A
run ends with the first evaluation of at least 0.96. Its seconds are those of all steps until then, and of
that one evaluation, which is where ranks that train apart send their mean. Neither the start nor earlier
evaluations count. Prints a Markdown table of medians over the seeds.
"""

import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import Pieces, argument_parser, print_head, print_row
from benchmarks.two_hosts import Link, refusal, started

from ddprun.units import format_count

ACCURACY = 0.96
LOCAL = 2  # ranks on a host
MOST_S = 180
PLAIN, AGAIN = "plain", "plain, again"
TIMES = "\N{MULTIPLICATION SIGN}"

PIPELINE = """
seed: {seed}
model:
  mlp: {{inputs: 64, hidden: {hidden}, outputs: 10}}
data: digits
loader: {{batch_size: 32}}
optimizer: {{sgd: {{lr: 0.1, momentum: 0.9}}}}
checkpoint: {{keep: 0}}
stages:
  - train: {{steps: 2000, evaluate: {{every: {every}, metrics: [accuracy]}}}}
"""


@dataclass(frozen=True)
class Variant:
    """What ranks send, and when."""

    hooks: str = "[]"
    """As in a pipeline file."""

    sync: str = "every_step"
    """As in a pipeline file."""

    every: int = 4
    """Steps from one evaluation to the next; of policies a whole number of periods."""

    @property
    def settings(self) -> list[str]:
        """As `ddprun` takes them."""
        return [f"--set=hooks={self.hooks}", f"--set=sync={self.sync}"]


WITHIN = "within: [shared_memory]"
VARIANTS = {
    PLAIN: Variant(),
    AGAIN: Variant(),
    "fp16": Variant("[fp16]"),
    "hierarchical": Variant(f"[{{hierarchical: {{{WITHIN}}}}}]"),
    "int8": Variant(f"[{{hierarchical: {{{WITHIN}, across: [int8]}}}}]"),
    "int4": Variant(f"[{{hierarchical: {{{WITHIN}, across: [int4]}}}}]"),
    "topk": Variant(f"[{{hierarchical: {{{WITHIN}, across: [{{topk: {{density: 0.02}}}}]}}}}]"),
    "powersgd": Variant(f"[{{hierarchical: {{{WITHIN}, across: [{{powersgd: {{rank: 2}}}}]}}}}]"),
    "hierarchical_sgd": Variant(
        f"[{{hierarchical: {{{WITHIN}, across: [int4]}}}}]", "{hierarchical_sgd: {within: 1, across: 4}}"
    ),
    "local_sgd": Variant(f"[{{hierarchical: {{{WITHIN}, across: [int4]}}}}]", "{local_sgd: {every: 4}}"),
    "diloco": Variant(
        f"[{{hierarchical: {{{WITHIN}, across: [int4]}}}}]",
        "{diloco: {every: 8, outer_lr: 0.7, outer_momentum: 0.5, overlap_steps: 3}}",
        every=8,
    ),
}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is still being written."""
    text = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def reached(run_dir: Path, accuracy: float) -> tuple[float, int] | None:
    """Seconds and steps until a running or finished run had the accuracy; None if it has not."""
    events = [event for event in _lines(run_dir / "events.jsonl") if event["event"] == "evaluated"]
    event = next((event for event in events if event["accuracy"] >= accuracy), None)
    steps = _lines(run_dir / "steps" / "rank-00000.jsonl")
    if event is None or len(steps) < event["step"]:
        return None
    taken = steps[: event["step"]]
    evaluated_us = event["monotonic_us"] - taken[-1]["start_us"] - taken[-1]["step_us"]
    return (sum(step["step_us"] for step in taken) + evaluated_us) / 1e6, len(taken)


def measure(variant: Variant, seed: int, link: Link, hidden: list[int], accuracy: float) -> dict[str, Any]:
    """Train until the accuracy is reached: `seconds` and `steps`, null if it was not within three minutes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = PIPELINE.format(seed=seed, hidden=hidden, every=variant.every)
        (folder / "slow.yaml").write_text(text)
        if refused := refusal(folder, "slow.yaml", variant.settings):
            raise RuntimeError(refused)
        until = time.monotonic() + MOST_S
        two = started(folder, "slow.yaml", variant.settings, local=LOCAL, link=link, warm=True)
        with two as (_, running):
            while (found := reached(folder / "run", accuracy)) is None:
                ended = [one for one in running if one.process.poll() is not None]
                if time.monotonic() > until or (ended and not ended[0].process.poll()):
                    return {"seconds": None, "steps": None}
                if ended:
                    raise RuntimeError(ended[0].wait().stderr)
                time.sleep(0.2)
            return {"seconds": found[0], "steps": found[1]}


def show(found: dict[str, list[dict[str, Any]]], link: Link, hidden: list[int], accuracy: float) -> None:
    """Print the table, and the speedup of the fastest variant."""
    values = 64 * hidden[0] + sum(one * two for one, two in zip(hidden, [*hidden[1:], 10], strict=True))
    size = 4 * (values + sum(hidden) + 10) / 1e6
    latency = f" with {link.one_way_ms:g} ms each way" if link.one_way_ms else ""
    print(f"{link.mbit:g} Mbit/s{latency}, `hidden: {hidden}` ({size:.2f} MB of gradients):\n")
    times = [f"time to {accuracy:g} (s)", "min to max (s)"]
    print_head(["sync", "hooks", *times, "steps", "ms per step", "speedup"])
    best, base = PLAIN, None
    for name, runs in found.items():
        variant = VARIANTS[name]
        seconds = [run["seconds"] for run in runs if run["seconds"] is not None]
        sync = variant.sync.removeprefix("{").removesuffix("}")
        cells = [f"`{sync}`" + (", again" if name == AGAIN else ""), f"`{variant.hooks}`"]
        if len(seconds) < len(runs):
            print_row([*cells, f"not reached in {len(runs) - len(seconds)} of {len(runs)} runs", *[""] * 4])
            continue
        middle = median(seconds)
        base = base or middle
        if middle < median(run["seconds"] for run in found[best]):
            best = name
        step_ms = median(1000 * run["seconds"] / run["steps"] for run in runs)
        cells += [f"{middle:.1f}", f"{min(seconds):.1f} to {max(seconds):.1f}"]
        cells += [f"{median(run['steps'] for run in runs):.0f}", f"{step_ms:.0f}", f"{base / middle:.2f}x"]
        print_row(cells)
    seeds = len(found[PLAIN])
    pairs = [
        one["seconds"] / other["seconds"]
        for one, other in zip(found[PLAIN], found[best], strict=True)
        if one["seconds"] and other["seconds"]
    ]
    if base is not None and pairs:
        middle = median(run["seconds"] for run in found[best])
        print(
            f"\nThe fastest setting, {best}, takes {middle:.1f} s, and plain DDP takes {base:.1f} s. "
            f"The speedup is {base / middle:.1f} ({min(pairs):.1f} to {max(pairs):.1f} over seeds). "
            f"All values are medians of {format_count(seeds, 'seed')}."
        )


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__, in_pieces=True)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--one-way-ms", type=float, default=0)
    parser.add_argument("--hidden", type=json.loads, default=[256, 256], help="layers (those of quickstart)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--accuracy", type=float, default=ACCURACY)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="beside plain DDP")
    asked = parser.parse_args()
    link = Link(asked.mbit, asked.one_way_ms)
    if refused := link.refusal():
        sys.exit(refused)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [name for name in VARIANTS if name in (PLAIN, AGAIN) or asked.only is None or name in asked.only]
    settings = [asked.mbit, asked.one_way_ms, asked.hidden, asked.accuracy]
    pieces = Pieces("slow-links", settings, asked.minutes)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(asked.seeds):
        for name in random.Random(seed).sample(names, len(names)):
            key = f"{seed} {VARIANTS[name]}{' again' * (name == AGAIN)}"
            one_run = partial(measure, VARIANTS[name], seed, link, asked.hidden, asked.accuracy)
            found[name].append(pieces.take(key, one_run))
    show(found, link, asked.hidden, asked.accuracy)
    pieces.end()


if __name__ == "__main__":
    main()
