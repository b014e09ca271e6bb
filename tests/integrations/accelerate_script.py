"""A script with Accelerate: accumulation, clipping, an evaluation after each epoch, autocast to bf16."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddprun.integrations.accelerate import observe

FOLDER = Path(sys.argv[1])
ACCELERATOR = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)


def train(name: str, fails_at: int | None = None, **options: object) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    inputs = torch.randn(64, 12)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), 4)
    model, optimizer, loader = ACCELERATOR.prepare(net, optimizer, loader)
    run = None
    if name != "plain":
        run = observe(ACCELERATOR, model, optimizer, run_dir=FOLDER / name, **options)
    batches = 0
    for _ in range(3):
        model.train()
        for features, targets in loader if run is None else run.steps(loader):
            if batches == fails_at and ACCELERATOR.process_index == 1:
                raise ValueError("a broken sample")
            batches += 1
            with ACCELERATOR.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), targets)
                if run is not None:
                    run.note_loss(loss)
                ACCELERATOR.backward(loss)
                if ACCELERATOR.sync_gradients:
                    ACCELERATOR.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(inputs[:4])
    if run is not None:
        run.close()
    torch.save(net.state_dict(), FOLDER / f"{name}-{ACCELERATOR.process_index}.pt")


train("plain")
train("observed")
train("fp16", hooks=["fp16"])
train("failed", fails_at=7)
