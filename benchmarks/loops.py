"""DDP training loops as their users write them; `overhead.py` runs them in turns with ddprun.

    torchrun --nproc-per-node 2 -m benchmarks.loops hand own MODEL TIMES

MODEL is a built-in model, as JSON of what a pipeline has below `model`. The data are the digits of
`ddprun.zoo`, in a `Dataset` class as users write one (`own`) or in a `TensorDataset` (`tensors`). Rank 0
writes when each step ended into TIMES, seconds of the monotonic clock; the loop never ends by itself.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddprun
from ddprun.zoo import models
from ddprun.zoo.data import digits

MOST = 2_000_000  # steps
BATCH, LR = 32, 0.01


class Times:
    """When steps ended, in a file of each rank (`FILE-RANK`) that whoever ends this process can read."""

    def __init__(self, file: str) -> None:
        self._times = np.memmap(f"{file}-{os.environ['RANK']}", np.float64, "w+", shape=(MOST,))
        self._steps = 0

    def note(self) -> None:
        """A step ends now."""
        self._times[self._steps] = time.monotonic()
        self._steps += 1


class Digits(Dataset[tuple[Tensor, int]]):
    """The training part of the digits, one sample at a time: an image (1, 8, 8) and its label."""

    def __init__(self) -> None:
        images, labels = digits(held_out=0.2, split_seed=0, folder=Path()).train.tensors  # type: ignore[attr-defined]
        self.images, self.labels = images.numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images[index]), self.labels[index]


def data_set(kind: str) -> Any:
    """`own` or `tensors`."""
    return Digits() if kind == "own" else digits(held_out=0.2, split_seed=0, folder=Path()).train


def mlp(*hidden: int) -> dict[str, Any]:
    """An MLP for the digits, as a pipeline has it."""
    return {"mlp": {"inputs": 64, "hidden": list(hidden), "outputs": 10, "activation": "relu"}}


def build(model: dict[str, Any]) -> nn.Module:
    """The model of a pipeline."""
    ((name, options),) = model.items()
    module: nn.Module = getattr(models, name)(**options)
    return module


def hand(
    model: dict[str, Any],
    data: Any,
    times: Times,
    *,
    bucket_cap_mb: float | None = None,
    has_hook: bool = False,
    observed: bool = False,
) -> None:
    """A plain loop around DDP. Without a `bucket_cap_mb` torch cuts the first bucket at 1 MiB; with a hook,
    torch's own, it calls Python for each bucket. With `observed`, `ddprun.observe` records every step.
    """
    dist.init_process_group("gloo")
    net = DistributedDataParallel(build(model), gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
    if has_hook:
        net.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(net.parameters(), LR)
    sampler: DistributedSampler[Any] = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    if observed:
        run = ddprun.observe(net, optimizer, run_dir="run")
    for inputs, labels in run.steps(batches()) if observed else batches():
        loss = nn.functional.cross_entropy(net(inputs), labels)
        if observed:
            run.note_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.note()


def accelerate(model: dict[str, Any], data: Any, times: Times) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = build(model)
    wrapped, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), LR),
        DataLoader(data, BATCH, shuffle=True, drop_last=True),
    )
    while True:
        for inputs, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(wrapped(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            times.note()


def lightning(model: dict[str, Any], data: Any, times: Times) -> None:
    """Lightning's Trainer, without logger, progress bar and checkpoints."""
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build(model)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR)

    class Note(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: object) -> None:
            times.note()

    trainer = pl.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[Note()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, BATCH, shuffle=True, drop_last=True))


if __name__ == "__main__":
    loop, kind, model, file = sys.argv[1:]
    loops: dict[str, Callable[[dict[str, Any], Any, Times], None]] = {
        "hand": hand,
        "hand_with_our_buckets": partial(hand, bucket_cap_mb=25),
        "hand_with_hook": partial(hand, bucket_cap_mb=25, has_hook=True),
        "hand_observed": partial(hand, observed=True),
        "accelerate": accelerate,
        "lightning": lightning,
    }
    loops[loop](json.loads(model), data_set(kind), Times(file))
