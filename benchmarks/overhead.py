"""What ddprun costs a step: its engine against a DDP loop written by hand, on two ranks of this machine.

    python benchmarks/overhead.py [--rounds 5]

Both train the same model on the same digits without hooks, ddprun with every bucket and step recorded.
Rounds are interleaved and the hand-written loop runs twice in each, once as its own control. Prints medians
of steps per second and ratios to the first hand-written one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {"small": [64], "medium": [512, 512], "large": [2048, 2048]}
STEPS = {"small": 1500, "medium": 500, "large": 60}

PIPELINE = """
model:
  mlp: {{inputs: 64, hidden: {hidden}, outputs: 10}}
data: digits
loader: {{batch_size: 32, drop_last: true}}
optimizer: {{sgd: {{lr: 0.01}}}}
stages:
  - train: {{steps: {steps}}}
"""

PLAIN = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from ddprun.zoo.data import digits

hidden, steps = json.loads(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
widths = [64, *hidden, 10]
layers = [nn.Flatten()]
for index, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
    layers += [nn.ReLU()] * (index > 0) + [nn.Linear(fan_in, fan_out)]
model = nn.Sequential(*layers)
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = digits(held_out=0.2, split_seed=0, folder=Path()).train
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
done, epoch, started = 0, 0, None
while done < steps:
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == 3:
            dist.barrier()
            started = time.monotonic()
        if done == steps:
            break
    epoch += 1
if dist.get_rank() == 0:
    print((steps - 3) / (time.monotonic() - started))
dist.barrier()
sys.stdout.flush()
os._exit(0)  # torch's threads may abort an interpreter that is being taken down
"""


def plain(folder: Path, name: str) -> float:
    """Steps per second of the hand-written loop."""
    (folder / "plain.py").write_text(PLAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "plain.py"]
    command = [*torchrun, json.dumps(MODELS[name]), str(STEPS[name])]
    done = _run(command, folder)
    return float(done.stdout.split()[-1])


def ours(folder: Path, name: str) -> float:
    """Steps per second of ddprun, from its own step records and without the first three steps."""
    (folder / "p.yaml").write_text(PIPELINE.format(hidden=MODELS[name], steps=STEPS[name]))
    command = [sys.executable, "-m", "ddprun", "p.yaml", "--nproc-per-node", "2"]
    done = _run(command, folder)
    file = folder / done.stdout.strip() / "steps" / "rank-00000.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    end = steps[-1]["start_us"] + steps[-1]["step_us"]
    return 1e6 * (len(steps) - 3) / float(end - steps[3]["start_us"])


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done


def main() -> None:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{'model':8} {'by hand':>12} {'by hand again':>20} {'ddprun':>20}")
    for name in MODELS:
        rates: dict[str, list[float]] = {"by hand": [], "again": [], "ddprun": []}
        with tempfile.TemporaryDirectory() as scratch:
            for _ in range(rounds):
                rates["by hand"].append(plain(Path(scratch), name))
                rates["ddprun"].append(ours(Path(scratch), name))
                rates["again"].append(plain(Path(scratch), name))
        base, again, engine = (statistics.median(rates[key]) for key in ("by hand", "again", "ddprun"))
        ratios = f"{again:10.1f}/s ({again / base:.2f}) {engine:10.1f}/s ({engine / base:.2f})"
        print(f"{name:8} {base:10.1f}/s {ratios}")


if __name__ == "__main__":
    main()
