"""What crosses the link between two hosts in each step: the interface's count against the formula.

    python -m benchmarks.wire_bytes [--table hooks|policies] [--steps A B] [--only NAME]

Needs Linux and root; run it in the repository's folder. The hosts are two network namespaces, joined by a
link that is not shaped. Each row is run for two numbers of steps: the difference of the bytes sent over the
link, divided by the steps between, is what one step sends. Packets' headers, acknowledgements and what had
to be sent again are left out; the small control message of steps in which ranks meet is not, and row `[noop]`
shows it alone.

Prints a Markdown table, in units of S, the parameters' bytes in fp32: `hooks` is that of docs/hooks.md, on
two ranks per host; `policies` that of docs/sync.md. Of the two directions the one that is further from the
formula is shown. Ends with 3 if one is off by more than 2%; of a policy also, if its ratio to `every_step`
on as many ranks is.
"""

import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.formulas import (
    DENSITY,
    FP32,
    HALF,
    LOCAL,
    RANK,
    Formula,
    elements,
    int2,
    int4,
    int4_across,
    int8,
    int8_across,
    powersgd,
    powersgd_across,
    ring,
    topk,
    topk_across,
    two_levels,
    two_phase,
    two_phase_across,
    whole,
)
from benchmarks.page import DOES_NOT_HOLD, argument_parser, print_head, print_row
from benchmarks.two_hosts import HOSTS, finish, refusal, started
from tests.engine.running import events, lines
from tests.namespaces import REASON

from ddprun.zoo.models import mlp

EVERY_STEP, PERIOD = "every_step", 8
LARGEST_DIFFERENCE = 0.02
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


@dataclass(frozen=True)
class Row:
    """A stack and a policy, and what they send from one host to the other in one step."""

    hooks: str
    """As in a pipeline file."""

    formula: str
    """For n ranks on H hosts with L each, and N = S/4 elements."""

    wire_bytes: Formula

    sync: str = EVERY_STEP
    """As in a pipeline file."""

    local: int = LOCAL
    """Ranks on each host."""

    one_way: bool = False
    """Only the host of rank 0 sends."""

    @property
    def policy(self) -> str:
        """`sync` as a line of a file has it."""
        return self.sync.removeprefix("{").removesuffix("}")

    @property
    def name(self) -> str:
        """For a message."""
        return f"{self.policy} {self.hooks}"

    def settings(self) -> list[str]:
        """As `ddprun` takes them."""
        return [f"--set=hooks={self.hooks}", f"--set=sync={self.sync}"]


@dataclass(frozen=True)
class Counted:
    """One direction of the link in one step."""

    predicted: float
    measured: float
    recorded: float
    """What ddprun's own records add up to."""


TOPK = f"{{topk: {{density: {DENSITY}}}}}"
SPARSE = "{topk: {density: 0.015625, values: int2}}"
POWERSGD = f"{{powersgd: {{rank: {RANK}}}}}"
ROWS = [
    Row("[noop]", "0", lambda _: 0.0),
    Row("[]", "2(n-1)/n · S", ring(FP32)),
    Row("[fp16]", "2(n-1)/n · S/2", ring(HALF)),
    Row("[bf16]", "2(n-1)/n · S/2", ring(HALF)),
    Row("[hierarchical]", "2(H-1)/H · S", two_levels(FP32)),
    Row("[fp16, hierarchical]", "2(H-1)/H · S/2", two_levels(HALF)),
    Row("[int8]", "(L(n-L) + n-1)/n · N(1 + 4/256)", int8()),
    Row("[fp8]", "(L(n-L) + n-1)/n · N(1 + 4/256)", int8()),
    Row("[int4]", "(L(n-L) + n-1)/n · N(1/2 + 4/64)", int4()),
    Row("[int2]", "(L(n-L) + n-1)/n · N(1/4 + 8/128)", int2()),
    Row("[{bf16: {accumulate: fp32}}]", "(L(n-L) + n-1)/n · 2N", two_phase(HALF)),
    Row("[{hierarchical: {across: [int8]}}]", "2(H-1)/H · N(1 + 4/256)", int8_across),
    Row("[{hierarchical: {across: [int4]}}]", "2(H-1)/H · N(1/2 + 4/64)", int4_across),
    Row("[{hierarchical: {across: [{bf16: {accumulate: fp32}}]}}]", "2(H-1)/H · S/2", two_phase_across(HALF)),
    Row(f"[{TOPK}]", "(n-1) · (32 + i)/8 · k, k = density · N, i = 6.3 (index)", topk(8 * FP32)),
    Row(f"[fp16, {TOPK}]", "(n-1) · (16 + i)/8 · k", topk(8 * HALF)),
    Row(f"[{SPARSE}]", "(n-1) · (2 + 1 + 8)/8 · k (value, scales, index)", topk(2, 64, 1 / 64)),
    Row(f"[{{hierarchical: {{across: [{TOPK}]}}}}]", "(H-1) · (32 + i)/8 · k", topk_across),
    Row(f"[{POWERSGD}]", "2(n-1)/n · 4F, F = Σ rank · (rows + columns) + rest", powersgd(FP32)),
    Row(f"[{POWERSGD}, fp16]", "2(n-1)/n · 2F", powersgd(HALF)),
    Row(f"[{{hierarchical: {{across: [{POWERSGD}]}}}}]", "2(H-1)/H · 4F of L shares", powersgd_across),
]


def seldom(sync: str, hooks: str, formula: str, wire_bytes: Formula) -> Row:
    """A policy that sends once in a period, on one rank per host."""
    return Row(hooks, f"{formula}/{PERIOD}", lambda buckets: wire_bytes(buckets) / PERIOD, sync=sync, local=1)


def policies() -> list[Row]:
    """The rows of the second table; for each number of ranks the first is `every_step`."""
    flat, codes = "2(n-1)/n · S", "(L(n-L) + n-1)/n · N(1 + 4/256)"
    local_sgd, diloco, average, broadcast = (
        f"{{{name}: {{every: {PERIOD}}}}}" for name in ("local_sgd", "diloco", "average", "broadcast")
    )
    streaming = f"{{diloco: {{every: {PERIOD}, fragments: 4, overlap_steps: 3}}}}"
    hierarchical = f"{{hierarchical_sgd: {{within: 1, across: {PERIOD}}}}}"
    one, two = ring(FP32, 1), ring(FP32)
    return [
        Row("[]", flat, one, local=1),
        seldom(local_sgd, "[]", flat, one),
        seldom(local_sgd, "[int8]", codes, int8(1)),
        seldom(diloco, "[]", flat, one),
        seldom(streaming, "[]", flat, one),
        seldom(diloco, "[int8]", codes, int8(1)),
        seldom(average, "[]", flat, one),
        replace(seldom(broadcast, "[]", "S", whole), one_way=True),
        Row("[]", flat, two),
        replace(seldom(hierarchical, "[]", flat, two), local=LOCAL),
        replace(seldom(hierarchical, "[hierarchical]", "2(H-1)/H · S", two_levels(FP32)), local=LOCAL),
    ]


def count(folder: Path, row: Row, few: int, many: int) -> tuple[float, list[Counted]]:
    """S in bytes, and each host's count."""
    sent: dict[str, Counter[str]] = {"measured": Counter(), "recorded": Counter()}
    for steps, sign in ((few, -1), (many, 1)):
        settings = [*row.settings(), f"--set=stages[0].train.steps={steps}"]
        on_link = finish(started(folder, "wire.yaml", settings, local=row.local, run_dir=str(steps)))
        (facts,) = (event for event in events(folder / str(steps)) if event["event"] == "started")
        for name, size in on_link.items():
            sent["measured"][name] += sign * size
        for line in lines(folder / str(steps), "buckets"):
            sent["recorded"][facts["hosts"][line["rank"]]] += sign * line["between_hosts_bytes"]
    shapes = {name: tuple(param.shape) for name, param in _model().named_parameters()}
    # Without gradients to exchange there are no buckets of DDP's.
    buckets = [[shapes[name] for name in bucket["params"]] for bucket in facts["buckets"]] or [
        list(shapes.values())
    ]
    predicted = row.wire_bytes(buckets)
    return FP32 * sum(map(elements, buckets)), [
        Counted(
            0.0 if row.one_way and name != facts["hosts"][0] else predicted,
            sent["measured"][name] / (many - few),
            sent["recorded"][name] / (many - few),
        )
        for name in on_link
    ]


def _model() -> torch.nn.Module:
    with torch.device("meta"):
        return mlp(inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS, activation="relu")


def measure(row: Row, few: int, many: int, bases: dict[int, Counted] | None) -> bool:
    """Print a row of a table, from runs of few steps and of many; whether the formula holds. `bases`: what
    `every_step` sends, by ranks on a host, with which a policy is compared; such a row puts itself in. None:
    the table is that of hooks.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "wire.yaml").write_text(PIPELINE)
        if refused := refusal(folder, "wire.yaml", row.settings()):
            print(f"skipped {row.name}: {refused}", file=sys.stderr, flush=True)
            return True
        try:
            size, directions = count(folder, row, few, many)
        except RuntimeError as error:
            print(f"failed {row.name}: {error}", file=sys.stderr, flush=True)
            return False
    held = [one.measured < LARGEST_DIFFERENCE * size for one in directions if not one.predicted]
    shown = max(directions, key=lambda one: (one.predicted, abs(one.measured - one.predicted)))
    difference = shown.measured / shown.predicted - 1 if shown.predicted else 0.0
    held.append(abs(difference) <= LARGEST_DIFFERENCE)
    cells = [
        f"`{row.hooks}`",
        row.formula.replace("-", MINUS) + (", by one host" if row.one_way else ""),
        *(f"{number / size:.4f}" for number in (shown.predicted, shown.recorded, shown.measured)),
        f"{100 * difference:+.2f}%" if shown.predicted else "",
    ]
    if bases is not None:
        base = bases.setdefault(row.local, shown)
        ratio, wanted = shown.measured / base.measured, shown.predicted / base.predicted
        held.append(abs(ratio / wanted - 1) <= LARGEST_DIFFERENCE)
        cells = [f"`{row.policy}`", f"{HOSTS} {TIMES} {row.local}", *cells, f"{ratio:.4f}"]
    print_row(cells)
    return all(held)


def chosen(table: str, name: str | None) -> list[Row]:
    """The rows of a table; with a name those whose stack or policy is that or holds it. Policies are compared
    with `every_step`, which goes with them.
    """
    if table == "hooks":
        return [row for row in ROWS if name in (None, row.hooks, *re.findall(r"\w+", row.hooks))]
    rows = policies()
    if name is None:
        return rows
    found = [row for row in rows if name in (row.sync, *re.findall(r"\w+", f"{row.sync} {row.hooks}"))]
    bases = [row for row in rows if row.sync == EVERY_STEP]
    return [
        row for row in rows if row in found or (row in bases and any(row.local == f.local for f in found))
    ]


def main() -> None:
    """Measure and print a table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--table", choices=["hooks", "policies"], default="hooks")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        metavar=("A", "B"),
        help=f"steps of the two runs (10 40; for policies 16 48, multiples of {PERIOD})",
    )
    parser.add_argument("--only", metavar="NAME", help="a stack, a policy, or the name of one in them")
    arguments = parser.parse_args()
    of_policies = arguments.table == "policies"
    few, many = arguments.steps or ((16, 48) if of_policies else (10, 40))
    if not 0 < few < many:
        parser.error("--steps takes two numbers, the smaller one first")
    if of_policies and (few % PERIOD or many % PERIOD):
        parser.error(f"--steps of policies are multiples of {PERIOD}")
    rows = chosen(arguments.table, arguments.only)
    if not rows:
        parser.error(f"--only: no row of this table is or holds {arguments.only}")
    if REASON is not None:
        sys.exit(REASON)
    columns = ["hooks", "sent per host", "formula", "recorded", "measured", "difference"]
    if of_policies:
        columns = ["sync", f"hosts {TIMES} ranks", *columns, f"relative to {EVERY_STEP}"]
    print_head(columns)
    bases: dict[int, Counted] = {}
    held = [measure(row, few, many, bases if of_policies else None) for row in rows]
    if not all(held):
        sys.exit(DOES_NOT_HOLD)


if __name__ == "__main__":
    main()
