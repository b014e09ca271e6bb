"""A run that was killed goes on from its newest checkpoint, bit for bit."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint.folder import steps_in
from ddprun.engine.worker import work
from ddprun.spec import load
from tests.engine.running import events, lines, summary
from tests.ranks import as_processes

MODULE = """
import os
import signal
import time
from pathlib import Path

import torch

RANK = int(os.environ["RANK"])


class Samples(torch.utils.data.Dataset):
    \"\"\"Writes down which sample was asked for; kills its rank where the file `kill` says so.\"\"\"

    def __init__(self):
        self.asked = 0
        self.kill = None
        if Path("kill").exists():
            rank, self.kill = map(int, Path("kill").read_text().split())
            self.kill = self.kill if rank == RANK else None

    def __len__(self):
        return 61

    def __getitem__(self, index):
        self.asked += 1
        time.sleep(0.01)  # so that the first checkpoint is on disk soon
        if self.asked == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        with Path(f"asked-{RANK}").open("a") as file:
            print(index, file=file)
        generator = torch.Generator().manual_seed(index)
        noise = 0.1 * torch.randn(1, 8, 8)  # of the generator that is part of the state
        return torch.randn(1, 8, 8, generator=generator) + noise, index % 10
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
MLP = "{mlp: {inputs: 64, hidden: [16], outputs: 10}}"
CNN = "{cnn: {channels: [4]}}"


def run(folder: Path, ranks: int, *, resuming: bool = False, may_die: bool = False) -> Path:
    run_dir = folder / "run"
    codes = as_processes(ranks, _work, folder, run_dir, resuming, cwd=folder, may_die=may_die)
    assert may_die or codes == [0] * ranks
    return run_dir


def _work(folder: Path, run_dir: Path, resuming: bool) -> int:
    return work(load(folder / "p.yaml"), run_dir, resuming=resuming)


def prepare(folder: Path, sync: str, hooks: str, model: str = MLP, precision: str = "fp32") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "samples.py").write_text(MODULE)
    text = PIPELINE.replace("MODEL", model).replace("SYNC", sync).replace("HOOKS", hooks)
    (folder / "p.yaml").write_text(text.replace("PRECISION", precision))


def final(run_dir: Path) -> dict[str, str]:
    """Hash of every file of tensors in the last checkpoint: weights, optimizer, hooks, generators."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name.endswith(".safetensors")}


def asked(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"asked-{rank}").read_text().split()]


def told(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(line["rank"], line["step"], line["samples"], line["loss"]) for line in lines(run_dir, "steps")]


def check(folder: Path, ranks: int, *settings: str, seed: int = 0) -> None:
    """Run it whole; run it again, kill a rank at a random moment, resume: the end is the same."""
    whole, broken = folder / "whole", folder / "broken"
    prepare(whole, *settings)
    expected = final(run(whole, ranks))
    prepare(broken, *settings)
    draw = random.Random(f"{settings} {ranks} {seed}")
    victim = draw.randrange(ranks)
    samples = len(asked(whole, victim))
    # Between the first checkpoint and the end; a step of all ranks takes 4 samples of each.
    (broken / "kill").write_text(f"{victim} {draw.randrange(4 * 4, samples)}")
    run_dir = run(broken, ranks, may_die=True)
    assert not (run_dir / "checkpoints" / max(p.name for p in (whole / "run/checkpoints").iterdir())).exists()
    (broken / "kill").unlink()
    before = len(asked(broken, victim))
    run(broken, ranks, resuming=True)
    assert final(run_dir) == expected
    resumed = [event for event in events(run_dir) if event["event"] == "resumed"]
    assert [event["step"] % 3 for event in resumed] == [0]
    again = asked(broken, victim)[before:]
    assert again
    assert again[-20:] == asked(whole, victim)[-20:], "the same samples"
    assert told(run_dir) == told(whole / "run"), "each step is told once"
    for key in ("steps", "samples", "loss"):
        assert summary(run_dir)[key] == summary(whole / "run")[key]


SYNCS = [
    "every_step",
    "{local_sgd: {every: 4, optimizer_state: average}}",
    "{hierarchical_sgd: {within: 1, across: 4, hosts: 2}}",
    "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}",
    "{diloco: {every: 4, fragments: 2, overlap_steps: 3}}",
    "{average: {every: 4}}",
    "{broadcast: {every: 4}}",
]
HOOKS = ["[]", "[fp16]", "[int8]", "[{topk: {density: 0.1}}]", "[{powersgd: {rank: 2}}]"]
HIERARCHICAL = "[{hierarchical: {hosts: 2, across: [int8]}}]"


@pytest.mark.parametrize(
    ("sync", "hooks", "ranks", "model", "precision"),
    [
        ("every_step", "[{powersgd: {rank: 2}}, int8]", 3, MLP, "fp16"),
        ("{local_sgd: {every: 4, optimizer_state: average}}", "[{topk: {density: 0.1}}]", 2, CNN, "fp32"),
        ("{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}", HIERARCHICAL, 4, MLP, "fp32"),
        ("{diloco: {every: 4, fragments: 2, overlap_steps: 3}}", "[int8]", 3, MLP, "bf16"),
        ("{broadcast: {every: 4}}", "[]", 2, CNN, "fp32"),
        ("independent", "[]", 2, MLP, "fp32"),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, sync: str, hooks: str, ranks: int, model: str, precision: str
) -> None:
    """A rank is killed at a random sample; every final tensor of every rank is that of the unbroken run."""
    check(tmp_path, ranks, sync, hooks, model, precision)


@pytest.mark.parametrize(
    ("sync", "hooks", "after"),
    [
        ("every_step", "[int8]", 2),
        ("{diloco: {every: 3, overlap_steps: 2}}", "[{topk: {density: 0.1}}]", 3),
        ("{local_sgd: {every: 3}}", HIERARCHICAL, 2),
    ],
)
def test_another_number_of_ranks_goes_on(tmp_path: Path, sync: str, hooks: str, after: int) -> None:
    """Each sample of the epoch counts once, whoever has seen it."""
    prepare(tmp_path, sync, hooks)
    (tmp_path / "kill").write_text("3 43")  # in the second epoch of the second stage
    run_dir = run(tmp_path, 4, may_die=True)
    (tmp_path / "kill").unlink()
    checkpoint = steps_in(run_dir / "checkpoints")[0]
    assert checkpoint in (6, 9)
    run(tmp_path, after, resuming=True)
    done = summary(run_dir)
    assert done["status"] == "done"
    assert done["world_size"] == after
    assert done["samples"] == 3 * 61, "one epoch in the first stage, two in the second"
    before = sum(line["samples"] for line in lines(run_dir, "steps") if line["step"] <= checkpoint)
    assert (
        sum(line["samples"] for line in lines(run_dir, "steps") if line["step"] > checkpoint) == 183 - before
    )
    assert done["loss"] < 2.3


def test_independent_replicas_cannot_change_their_number(tmp_path: Path) -> None:
    """There are as many as there were ranks; the fault says so and exits with 2."""
    prepare(tmp_path, "independent", "[]")
    (tmp_path / "kill").write_text("1 70")
    run_dir = run(tmp_path, 2, may_die=True)
    (tmp_path / "kill").unlink()
    assert as_processes(3, _work, tmp_path, run_dir, True, cwd=tmp_path, may_die=True) == [None] * 3
