"""Whether a rank that sleeps is named, and by how much it is said to be late; and whether nobody is else.

    python -m benchmarks.stragglers [--rounds 5] [--steps 100] [--late-ms 20] [--width 128]

Four ranks of this machine train a small model in real runs; in all but `nowhere` the third of them sleeps in
every step: before it has its batch, in forward, or in backward before the first layer's gradients. A line for
each run: the rank, the cause and the bucket that the first event names, in which step, and by how much; then
which share of all steps' time each rank's records call `other_us`. Exits 1 if a sleeping rank is not named
within 50 steps, within 20% and with its cause, or if one is named where none sleeps.
"""

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import argument_parser, environment
from tests.engine.running import events, lines

LATE = 2
WITHIN_STEPS = 50
WITHIN = 0.2

PIPELINE = """
name: late
model: {{tests.engine.late.Net: {{where: {where}, late_s: {net_s}, width: {width}}}}}
data: {{train: {{tests.engine.late.Samples: {{late_s: {data_s}, width: {width}}}}}}}
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.01}}}}
ddp: {{bucket_cap_mb: 1}}
stages: [{{train: {{steps: {steps}}}}}]
checkpoint: {{keep: 0}}
launch: {{nproc_per_node: 4}}
"""

WHERE = {"nowhere": "nowhere", "data": "nowhere", "forward": "forward", "backward": "backward 0"}


def run(folder: Path, cause: str, late_s: float, steps: int, width: int) -> Path:
    """Train; gives the run's folder."""
    data_s = late_s if cause == "data" else 0.0
    text = PIPELINE.format(where=WHERE[cause], net_s=late_s, data_s=data_s, steps=steps, width=width)
    (folder / "late.yaml").write_text(text)
    command = [sys.executable, "-m", "ddprun", str(folder / "late.yaml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return Path(done.stdout.strip())


def judged(run_dir: Path, cause: str, late_s: float) -> tuple[str, bool]:
    """What the run said about who is late, and whether that is right."""
    told: list[dict[str, Any]] = [event for event in events(run_dir) if event["event"] == "straggler"]
    if not told:
        return "no straggler", cause == "nowhere"
    first = told[0]
    bucket = "" if first["bucket"] is None else f", bucket {first['bucket']}"
    late_ms = first["late_us"] / 1000
    messages = (
        f"step {first['step']}: rank {first['straggler']} by {late_ms:.1f} ms ({first['cause']}{bucket})"
    )
    named = (first["straggler"], first["cause"]) == (LATE, cause)
    if cause == "backward":
        named = named and "layers.0.weight" in first["params"]
    near = abs(late_ms / 1000 - late_s) <= WITHIN * late_s
    return messages, named and near and first["step"] <= WITHIN_STEPS and len(told) == 1


def parts(run_dir: Path) -> str:
    """The median step, and the share of `other_us` in all steps' time, rank by rank."""
    spent: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines(run_dir, "steps"):
        spent[line["rank"]].append(line)
    step_ms = median(step["step_us"] for step in spent[0]) / 1000
    other = [
        sum(one["other_us"] for one in own) / sum(one["step_us"] for one in own) for own in spent.values()
    ]
    return f"step {step_ms:.1f} ms, other_us " + " ".join(f"{share:.2%}" for share in other)


def main() -> None:
    """Run all of them in turns and say what came out."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--late-ms", type=float, default=20.0)
    parser.add_argument("--width", type=int, default=128, help="from 384 on there are two buckets")
    asked = parser.parse_args()
    right = True
    for _ in range(asked.rounds):
        for cause in WHERE:
            with tempfile.TemporaryDirectory() as scratch:
                late_s = asked.late_ms / 1000
                run_dir = run(Path(scratch), cause, late_s, asked.steps, asked.width)
                messages, well = judged(run_dir, cause, late_s)
                right = right and well
                print(
                    f"{cause:8} {'correct' if well else 'WRONG':8} {messages:52} {parts(run_dir)}",
                    flush=True,
                )
    sys.exit(not right)


if __name__ == "__main__":
    main()
