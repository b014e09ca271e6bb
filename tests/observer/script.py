"""A usual script, and what its records say."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddprun
from ddprun_hooks.registry import AnyHook
from tests.ranks import Finished, ddprun_here

EPOCHS, BATCHES, ACCUMULATE, BATCH = 3, 8, 2, 4
UPDATES = EPOCHS * BATCHES // ACCUMULATE
NUMEL = (12 * 40 + 40) + (40 * 3 + 3)


class Samples(Dataset[tuple[Tensor, int]]):
    """A data set of a script's own; `slow_s` is for each sample of rank 1."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s if dist.get_rank() == 1 else 0.0

    def __len__(self) -> int:
        return 2 * BATCHES * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.slow_s)
        return torch.randn(12, generator=torch.Generator().manual_seed(index)), index % 3


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))


def start() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(make_net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    observe: Callable[[DistributedDataParallel, torch.optim.Optimizer], Any] | None = None,
    *,
    epochs: int = EPOCHS,
    slow_s: float = 0.0,
    evaluate_s: float = 0.0,
) -> tuple[list[Tensor], Any]:
    """A usual script: accumulation under `no_sync`, clipping, a schedule, an evaluation after each epoch."""
    model, optimizer = start()
    run = None if observe is None else observe(model, optimizer)
    data = Samples(slow_s)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(epochs):
        model.train()  # type: ignore[no-untyped-call]
        for index, (inputs, targets) in enumerate(loader if run is None else run.steps(loader)):
            last = (index + 1) % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                if run is not None:
                    run.note_loss(loss)
                (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(torch.zeros(5, 12))
            time.sleep(evaluate_s)
    return [param.detach().clone() for param in model.parameters()], run


def observed(run_dir: Path, hooks: AnyHook | Sequence[AnyHook] = (), **options: Any) -> list[Tensor]:
    weights, run = train(partial(ddprun.observe, hooks=hooks, run_dir=run_dir), **options)
    run.close()
    return weights


def records(run_dir: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run_dir / kind / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [one for one in found if one["event"] == kind]


PIPELINE = """
model: tests.observer.script.make_net
data: {synthetic: {shape: [12], classes: 3}}
loader: {batch_size: 4}
optimizer: {adamw: {lr: 0.01}}
stages: [{train: {steps: 20}}, {train: {steps: 20, hooks: [fp16], sync: {local_sgd: {every: 4}}}}]
"""


def explained(folder: Path, run: Path, *words: str, text: str = PIPELINE) -> Finished:
    (folder / "p.yaml").write_text(text)
    return ddprun_here("explain", "p.yaml", "--from", str(run), "--format=json", *words, cwd=folder)
