"""How much of DiLoCo's exchange does `overlap_steps` hide behind training, over a slow link?

    python -m benchmarks.overlap [--rounds 5] [--rate-mbit 200]

Needs Linux, root and tc; run it in the repository's folder. Two network namespaces with one rank each are
joined by a link that is held to a rate (`benchmarks.two_hosts`). The same pipeline is run with `diloco`
of every 16 steps, which waits for its exchange; the same once more as its own control; and with 8 steps of
overlap: the three in turn, as often as `--rounds` says. From the step records of both ranks, for each
exchange:

    exposed   exposed_hook_us + exposed_wait_us + exposed_wire_us: the training thread could not hide it
    sync      sync_us: copying changes, applying what has come; waiting for the other rank's control message
    period    16 whole steps

The first period is left out: it warms up. Prints a Markdown table of medians over the runs; ends with 3 if
overlap leaves 10% or more exposed of what is exposed without it.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.page import DOES_NOT_HOLD, argument_parser, print_head, print_row
from benchmarks.two_hosts import HOSTS, Link, finish, started
from tests.engine.running import lines

EVERY, OVERLAP, PERIODS = 16, 8, 7
OVERLAPPED = f"`overlap_steps: {OVERLAP}`"
VARIANTS = {"no overlap": 0, "no overlap, repeated": 0, OVERLAPPED: OVERLAP}
LARGEST_SHARE = 0.1

PIPELINE = f"""
model:
  mlp: {{inputs: 64, hidden: [512, 512, 512, 512], outputs: 10}}   # 3.3 MB
data:
  synthetic: {{samples: 1792, shape: [64], classes: 10, held_out: 0}}
loader: {{batch_size: 448}}
optimizer: {{sgd: {{lr: 0.01, momentum: 0.9}}}}
stages:
  - train: {{steps: {EVERY * (PERIODS + 1)}}}
"""

PARTS = {
    "exposed": ("exposed_hook_us", "exposed_wait_us", "exposed_wire_us"),
    "hook": ("exposed_hook_us",),
    "wait": ("exposed_wait_us",),
    "wire": ("exposed_wire_us",),
    "sync": ("sync_us",),
    "period": ("step_us",),
}


def costs(run_dir: Path) -> dict[str, float]:
    """What a period costs a rank in milliseconds, by part: means over the periods but the first."""
    own = [line for line in lines(run_dir, "steps") if line["step"] > EVERY]
    return {
        part: sum(line[field] for line in own for field in fields) / 1e3 / PERIODS / HOSTS
        for part, fields in PARTS.items()
    }


def measure(rounds: int, link: Link) -> dict[str, list[dict[str, float]]]:
    """The costs of each variant's runs; raises RuntimeError if one failed."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name, overlap in VARIANTS.items():
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                (folder / "overlap.yaml").write_text(PIPELINE)
                sync = f"--set=sync={{diloco: {{every: {EVERY}, overlap_steps: {overlap}}}}}"
                finish(started(folder, "overlap.yaml", [sync], local=1, link=link))
                found[name].append(costs(folder / "run"))
            print(f"round {number + 1}, {name}: {_told(found[name][-1])}", file=sys.stderr, flush=True)
    return found


def _told(costs: dict[str, float]) -> str:
    return ", ".join(f"{part} {ms:.1f}" for part, ms in costs.items())


def main() -> None:
    """Measure and print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate-mbit", type=int, default=200, help="of the link, in each direction (200)")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.rate_mbit < 1:
        parser.error("--rounds and --rate-mbit take numbers from 1")
    link = Link(arguments.rate_mbit)
    if refused := link.refusal():
        sys.exit(refused)
    try:
        found = measure(arguments.rounds, link)
    except RuntimeError as error:
        sys.exit(f"failed: {error}")
    print_head(["", *(f"{part} (ms)" for part in PARTS), "relative exposed time"])
    medians = {
        name: {part: median(one[part] for one in runs) for part in PARTS} for name, runs in found.items()
    }
    base = medians["no overlap"]["exposed"]
    for name, parts in medians.items():
        print_row([name, *(f"{ms:.1f}" for ms in parts.values()), f"{parts['exposed'] / base:.3f}x"])
    if medians[OVERLAPPED]["exposed"] >= LARGEST_SHARE * base:
        sys.exit(DOES_NOT_HOLD)


if __name__ == "__main__":
    main()
