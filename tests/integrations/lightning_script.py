"""A script with Lightning: accumulation, clipping, an evaluation after each epoch, autocast to bf16; with the
hook fp16, autocast to fp16 with a scaler, whose first scale is too large.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddprun.integrations.lightning import ObserveCallback

FOLDER = Path(sys.argv[1])


class Net(lightning.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
        self.fails_at = fails_at

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.global_step == self.fails_at and self.global_rank == 1:
            raise ValueError("a broken sample")
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(name: str, fails_at: int | None = None, **options: object) -> None:
    torch.manual_seed(3)
    net, inputs = Net(fails_at), torch.randn(64, 12)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)
    precision = ("16-mixed", "cpu", scaler) if name == "fp16" else ("bf16-mixed", "cpu")
    callbacks = [] if name == "plain" else [ObserveCallback(run_dir=FOLDER / name, **options)]
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        plugins=MixedPrecision(*precision),
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=callbacks,
    )
    trainer.fit(net, loader, loader)
    torch.save(net.state_dict(), FOLDER / f"{name}-{trainer.global_rank}.pt")


train("plain")
train("observed")
train("fp16", hooks=["fp16"])
try:
    train("failed", fails_at=2)
except ValueError:
    sys.exit(1)  # as Lightning itself does after Ctrl-C
