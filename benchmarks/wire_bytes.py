"""What crosses the link between two hosts in each step: the interface's count against each stack's formula.

    python -m benchmarks.wire_bytes [--steps 10 40] [--only NAME]

Needs Linux and root; run it in the repository's folder. The hosts are two network namespaces with two ranks
each, joined by a link that is not shaped. Each stack is run for two numbers of steps: the difference of the
bytes sent over the link, divided by the steps between, is what one step sends. It holds whatever crosses:
headers, acknowledgements and the small control word of each step, which row `[noop]` shows alone.

Prints the Markdown table of docs/hooks.md, in units of S, the gradients' bytes in fp32. Of the two directions
the one that is further from the formula is shown. Ends with 1 if one is off by more than 2 %.
"""

import argparse
import contextlib
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.engine.running import events, lines
from tests.namespaces import REASON, hosts
from tests.ranks import Finished, Running

from ddprun.zoo.models import mlp

HOSTS, LOCAL = 2, 2
RANKS = HOSTS * LOCAL
FP32, HALF, INDEX = 4, 2, 4  # bytes
BLOCK, DENSITY, RANK = 256, 0.05, 32
LARGEST_DIFFERENCE = 0.02
TIMEOUT_S = 300
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"

INPUTS, HIDDEN, OUTPUTS = 64, [500] * 25, 10
PIPELINE = f"""
model:
  mlp: {{inputs: {INPUTS}, hidden: {HIDDEN}, outputs: {OUTPUTS}}}   # 24 MB
data:
  synthetic: {{samples: 1024, shape: [{INPUTS}], classes: {OUTPUTS}, held_out: 0}}
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.001}}}}
ddp: {{bucket_cap_mb: 12}}
stages:
  - train: {{steps: 10}}
"""

Shape = tuple[int, ...]
Bucket = list[Shape]
"""Shapes of the parameters in one bucket, in their order."""


@dataclass(frozen=True)
class Row:
    """A stack, and what it sends from one host to the other in one step."""

    hooks: str
    """As in a pipeline file."""

    formula: str
    """For n ranks on H hosts with L each, and N = S/4 elements."""

    wire_bytes: Callable[[Sequence[Bucket]], float]


@dataclass(frozen=True)
class Counted:
    """One direction of the link in one step."""

    measured: float
    recorded: float
    """What ddprun's own records add up to."""


def elements(shapes: Sequence[Shape]) -> int:
    """Number of elements of some parameters."""
    return sum(math.prod(shape) for shape in shapes)


def all_reduce(ranks: int, numbers: float, size: int) -> float:
    """Bytes over one edge of a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * numbers * size


def ring(size: int) -> Callable[[Sequence[Bucket]], float]:
    """All-reduce over all ranks: one edge of the ring crosses in each direction."""
    return lambda buckets: sum(all_reduce(RANKS, elements(bucket), size) for bucket in buckets)


def two_levels(size: int) -> Callable[[Sequence[Bucket]], float]:
    """All-reduce between hosts, of a share of the bucket for each local rank."""
    return lambda buckets: sum(
        LOCAL * all_reduce(HOSTS, elements(bucket) / LOCAL, size) for bucket in buckets
    )


def int8(buckets: Sequence[Bucket]) -> float:
    """All-to-all of codes, of which each local rank sends a part to each rank of the other host; then a ring
    all-gather of codes of the sum.
    """
    code = 1 + FP32 / BLOCK
    per_element = LOCAL * (RANKS - LOCAL) / RANKS * code + (RANKS - 1) / RANKS * code
    return per_element * sum(map(elements, buckets))


def int8_across(buckets: Sequence[Bucket]) -> float:
    """The two phases between hosts, on each local rank's share."""
    code = 1 + FP32 / BLOCK
    per_element = 2 * (HOSTS - 1) / HOSTS * code
    return LOCAL * per_element * sum(map(elements, buckets)) / LOCAL


def topk(value: int) -> Callable[[Sequence[Bucket]], float]:
    """Ring all-gather of indices and values of `value` bytes."""
    return lambda buckets: sum(
        (RANKS - 1) * math.ceil(DENSITY * elements(bucket)) * (INDEX + value) for bucket in buckets
    )


def topk_across(buckets: Sequence[Bucket]) -> float:
    """All-gather between hosts, on each local rank's share."""
    shares = [elements(part) for bucket in buckets for part in cut(bucket)]
    return sum((HOSTS - 1) * math.ceil(DENSITY * share) * (INDEX + FP32) for share in shares)


def powersgd(size: int) -> Callable[[Sequence[Bucket]], float]:
    """All-reduce of both factors, and of what is sent as it is."""
    return lambda buckets: sum(all_reduce(RANKS, factors(bucket), size) for bucket in buckets)


def powersgd_across(buckets: Sequence[Bucket]) -> float:
    """The same between hosts, on each local rank's share."""
    parts = [part for bucket in buckets for part in cut(bucket)]
    return sum(all_reduce(HOSTS, factors(part), FP32) for part in parts)


def factors(shapes: Sequence[Shape]) -> int:
    """Numbers that PowerSGD sends: two factors of each matrix, where these are fewer than its elements."""
    numbers = 0
    for shape in shapes:
        numel, rows = math.prod(shape), shape[0]
        thin = RANK * (rows + numel // rows)
        numbers += min(thin, numel) if len(shape) > 1 else numel
    return numbers


def cut(bucket: Bucket) -> list[Bucket]:
    """The local ranks' shares: cut where a row begins, nearest to even; a matrix cut in two becomes two."""
    ends = [elements(bucket) * part / LOCAL for part in range(1, LOCAL)]
    parts: list[Bucket] = [[]]
    offset = 0
    for shape in bucket:
        rows, columns = shape[0], math.prod(shape[1:])
        done = 0
        while ends and ends[0] < offset + rows * columns:
            row = max(done, round((ends.pop(0) - offset) / columns))
            if row > done:
                parts[-1].append((row - done, *shape[1:]))
            parts.append([])
            done = row
        if done < rows:
            parts[-1].append((rows - done, *shape[1:]))
        offset += rows * columns
    return parts


TOPK = f"{{topk: {{density: {DENSITY}}}}}"
POWERSGD = f"{{powersgd: {{rank: {RANK}}}}}"
ROWS = [
    Row("[noop]", "0", lambda _: 0.0),
    Row("[]", "2(n-1)/n · S", ring(FP32)),
    Row("[fp16]", "2(n-1)/n · S/2", ring(HALF)),
    Row("[bf16]", "2(n-1)/n · S/2", ring(HALF)),
    Row("[hierarchical]", "2(H-1)/H · S", two_levels(FP32)),
    Row("[fp16, hierarchical]", "2(H-1)/H · S/2", two_levels(HALF)),
    Row("[int8]", "(L(n-L) + n-1)/n · N(1 + 4/256)", int8),
    Row("[{hierarchical: {across: [int8]}}]", "2(H-1)/H · N(1 + 4/256)", int8_across),
    Row(f"[{TOPK}]", "(n-1) · 8k, k = density · N", topk(FP32)),
    Row(f"[fp16, {TOPK}]", "(n-1) · 6k", topk(HALF)),
    Row(f"[{{hierarchical: {{across: [{TOPK}]}}}}]", "(H-1) · 8k", topk_across),
    Row(f"[{POWERSGD}]", "2(n-1)/n · 4F, F = Σ rank · (rows + columns) + rest", powersgd(FP32)),
    Row(f"[{POWERSGD}, fp16]", "2(n-1)/n · 2F", powersgd(HALF)),
    Row(f"[{{hierarchical: {{across: [{POWERSGD}]}}}}]", "2(H-1)/H · 4F of L shares", powersgd_across),
]


def refusal(folder: Path, hooks: str) -> str | None:
    """Why `ddprun check` refuses a stack; None if it does not."""
    command = [sys.executable, "-m", "ddprun", "check", "wire.yaml", f"--set=hooks={hooks}"]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[0] if done.returncode else None


def run(folder: Path, hooks: str, steps: int) -> dict[str, int]:
    """Run a stack on two hosts, into `folder/<steps>`; gives what each host sent over the link, by its name.

    Raises:
        RuntimeError: a host's `ddprun` failed.
    """
    with hosts(HOSTS) as made, contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                Running(
                    "wire.yaml",
                    f"--set=hooks={hooks}",
                    f"--set=stages[0].train.steps={steps}",
                    f"--nnodes={HOSTS}",
                    f"--nproc-per-node={LOCAL}",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=node0:29400",
                    "--rdzv-id=wire",
                    f"--run-dir={steps}",
                    cwd=folder,
                    prefix=host.prefix(),
                )
            )
            for host in made
        ]
        finished: list[Finished] = [running.wait(TIMEOUT_S) for running in started]
        for one in finished:
            if one.code:
                raise RuntimeError(one.stderr.strip() or f"exit code {one.code}")
        return {host.name: host.tx_bytes("e0") for host in made}


def count(folder: Path, hooks: str, few: int, many: int) -> tuple[list[Bucket], list[Counted]]:
    """The buckets of a run with a stack, and each host's count."""
    first, second = (run(folder, hooks, steps) for steps in (few, many))
    (started,) = (event for event in events(folder / str(many)) if event["event"] == "started")
    shapes = {name: tuple(param.shape) for name, param in _model().named_parameters()}
    buckets = [[shapes[name] for name in bucket["params"]] for bucket in started["buckets"]]
    recorded = dict.fromkeys(first, 0)
    for line in lines(folder / str(many), "buckets"):
        recorded[started["hosts"][line["rank"]]] += line["between_hosts_bytes"]
    return buckets, [
        Counted((second[name] - first[name]) / (many - few), recorded[name] / many) for name in first
    ]


def _model() -> torch.nn.Module:
    with torch.device("meta"):
        return mlp(inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS, activation="relu")


def measure(row: Row, few: int, many: int) -> bool:
    """Print a row of the table; whether the formula holds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "wire.yaml").write_text(PIPELINE)
        if refused := refusal(folder, row.hooks):
            print(f"skipped {row.hooks}: {refused}", file=sys.stderr, flush=True)
            return True
        try:
            buckets, directions = count(folder, row.hooks, few, many)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"failed {row.hooks}: {error}", file=sys.stderr, flush=True)
            return False
    size = FP32 * sum(map(elements, buckets))
    predicted = row.wire_bytes(buckets)
    shown = max(directions, key=lambda direction: abs(direction.measured - predicted))
    difference = shown.measured / predicted - 1 if predicted else None
    cells = [
        f"`{row.hooks}`",
        row.formula.replace("-", MINUS),
        *(f"{number / size:.4f}" for number in (predicted, shown.recorded, shown.measured)),
        "" if difference is None else f"{100 * difference:+.2f} %",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    if difference is None:
        return shown.measured < LARGEST_DIFFERENCE * size
    return abs(difference) <= LARGEST_DIFFERENCE


def chosen(name: str) -> list[Row]:
    """The rows whose stack is `name`, or holds a hook of that name."""
    return [row for row in ROWS if name == row.hooks or name in re.findall(r"\w+", row.hooks)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(10, 40),
        metavar=("A", "B"),
        help="steps of the two runs (10 40)",
    )
    parser.add_argument("--only", metavar="NAME", help="a stack, or a hook whose stacks are measured")
    arguments = parser.parse_args()
    few, many = arguments.steps
    if not 0 < few < many:
        parser.error("--steps takes two numbers, the smaller one first")
    rows = chosen(arguments.only) if arguments.only else ROWS
    if not rows:
        parser.error(f"--only: no stack is or holds {arguments.only}")
    if REASON is not None:
        sys.exit(REASON)
    columns = [f"{column} ({TIMES} S)" for column in ("formula", "recorded", "measured")]
    print(f"| hooks | a host sends | {' | '.join(columns)} | difference |")
    print("|---|---|---|---|---|---|", flush=True)
    held = [measure(row, few, many) for row in rows]
    if not all(held):
        sys.exit(1)


if __name__ == "__main__":
    main()
