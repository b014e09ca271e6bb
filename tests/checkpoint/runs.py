"""Runs that are broken off and go on, and what they are compared by."""

import json
import random
from pathlib import Path
from typing import Any

from ddprun.config import load
from ddprun.engine.worker import run_worker
from tests.engine.running import events, lines, summary
from tests.ranks import ddprun

MODULE = """
import os
import signal
import time
from pathlib import Path

import torch

RANK = int(os.environ["RANK"])


class Samples(torch.utils.data.Dataset):
    \"\"\"Writes down which sample was asked for; signals its rank where the file `kill` says so.\"\"\"

    def __init__(self):
        self.asked = 0
        self.kill = None
        if Path("kill").exists():
            rank, self.kill, self.signal = map(int, [*Path("kill").read_text().split(), "9"][:3])
            self.kill = self.kill if rank == RANK else None

    def __len__(self):
        return 61

    def __getitem__(self, index):
        self.asked += 1
        time.sleep(0.005)  # checkpoints are written meanwhile
        if self.asked == self.kill:
            if self.signal == signal.SIGKILL:
                self.wait_for_checkpoint()
            os.kill(os.getpid(), self.signal)
        with Path(f"asked-{RANK}").open("a") as file:
            print(index, file=file)
        generator = torch.Generator().manual_seed(index)
        noise = 0.1 * torch.randn(1, 8, 8)  # of the generator that is part of the state
        return torch.randn(1, 8, 8, generator=generator) + noise, index % 10

    def wait_for_checkpoint(self):
        \"\"\"Until there is one to go on from: the first may still be being written.\"\"\"
        until = time.monotonic() + 20
        while not [*Path("run/checkpoints").glob("step-*")] and time.monotonic() < until:
            time.sleep(0.01)


def loud(output, target):
    \"\"\"A loss whose gradients overflow fp16 until the loss scale has come down.\"\"\"
    return 512 * torch.nn.functional.cross_entropy(output, target)
"""

PIPELINE = """
model: MODEL
data: {train: samples.Samples}
loader: {batch_size: 2}
optimizer: {adamw: {lr: 0.01}}
schedule: {OneCycleLR: {max_lr: 0.02}}
warmup_steps: 3
clip_norm: 1.0
accumulate: 2
precision: PRECISION
hooks: HOOKS
sync: SYNC
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 4, sync: every_step}
  - train: {epochs: 2}
  - save
"""
MOST_LOOKED = 3
"""Samples that a rank looks at before its first step, for shapes and for what buffers do: at most so many."""

COMPARED = 16
"""Samples that rank 0 reads besides, to know after a resume whether the data is what it was."""

MLP = "{mlp: {inputs: 64, hidden: [16], outputs: 10}}"
CNN = "{cnn: {channels: [4]}}"


def run(folder: Path, ranks: int, *, resuming: bool = False, may_die: bool = False) -> Path:
    more = ["--or-resume"] if resuming else []
    done = ddprun("p.yaml", "--run-dir=run", *more, f"--nproc-per-node={ranks}", cwd=folder)
    assert may_die or done.code == 0, done.stderr
    return folder / "run"


def as_rank(folder: Path, run_dir: Path, resuming: bool) -> int:
    return run_worker(load(folder / "p.yaml"), run_dir, resuming="yes" if resuming else "no")


def prepare(folder: Path, sync: str, hooks: str, model: str = MLP, precision: str = "fp32") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "samples.py").write_text(MODULE)
    text = PIPELINE.replace("MODEL", model).replace("SYNC", sync).replace("HOOKS", hooks)
    (folder / "p.yaml").write_text(text.replace("PRECISION", precision))


def assert_killed_run_ends_alike(folder: Path, files: dict[str, str], kill: str) -> None:
    """Run `p.yaml` of these files twice on two ranks, to its end and killed as the file `kill` says, and
    compare the last checkpoints.
    """
    for name in ("whole", "broken"):
        (folder / name).mkdir()
        for file, text in {**files, "samples.py": MODULE + files.get("samples.py", "")}.items():
            (folder / name / file).write_text(text)
        if name == "broken":
            (folder / name / "kill").write_text(kill)
            done = ddprun("p.yaml", "--run-dir=run", "--nproc-per-node=2", cwd=folder / name)
            assert done.code == 1, done.stderr
            (folder / name / "kill").unlink()
        run(folder / name, 2, resuming=True)
    assert final(folder / "broken" / "run") == final(folder / "whole" / "run")


def final(run_dir: Path) -> dict[str, str]:
    """Hash of every file of tensors in the last checkpoint: weights, optimizer, hooks, generators."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name.endswith(".safetensors")}


def asked(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"asked-{rank}").read_text().split()]


def told(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(line["rank"], line["step"], line["samples"], line["loss"]) for line in lines(run_dir, "steps")]


def check(folder: Path, ranks: int, *settings: str, after: int | None = None) -> None:
    """Run it whole; run it again, kill a rank at a random moment, resume: the end is the same.

    Args:
        folder: for both runs.
        ranks: how many.
        settings: as `prepare` takes them.
        after: kill it in one of the three steps after this one; None: anywhere.
    """
    whole, broken = folder / "whole", folder / "broken"
    prepare(whole, *settings)
    expected = final(run(whole, ranks))
    prepare(broken, *settings)
    draw = random.Random(f"{settings} {ranks} 0")
    victim = draw.randrange(ranks)
    samples = len(asked(whole, victim))
    # Between the first checkpoint and the end; a step of all ranks takes 4 samples of each.
    moments = range(4 * 4, samples) if after is None else range(4 * after + MOST_LOOKED, 4 * (after + 3))
    if victim == 0:
        moments = range(moments.start + COMPARED, min(moments.stop + COMPARED, samples))
    (broken / "kill").write_text(f"{victim} {draw.choice(moments)}")
    run_dir = run(broken, ranks, may_die=True)
    assert not (run_dir / "checkpoints" / max(p.name for p in (whole / "run/checkpoints").iterdir())).exists()
    (broken / "kill").unlink()
    before = [len(asked(broken, rank)) for rank in range(ranks)]
    run(broken, ranks, resuming=True)
    assert final(run_dir) == expected
    resumed = [event for event in events(run_dir) if event["event"] == "resumed"]
    assert [event["step"] % 3 for event in resumed] == [0]
    for rank in range(ranks):
        again, unbroken = asked(broken, rank)[before[rank] :], asked(whole, rank)
        tails = [again[looked:] for looked in range(MOST_LOOKED + COMPARED + 1)]
        assert any(tail and tail == unbroken[-len(tail) :] for tail in tails), "the same samples"
    assert told(run_dir) == told(whole / "run"), "each step is told once"
    for key in ("steps", "samples", "loss"):
        assert summary(run_dir)[key] == summary(whole / "run")[key]
