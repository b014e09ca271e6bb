"""A model and a dataset of which one rank's are slow, for runs that have a straggler."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    """Three layers; a rank may sleep in forward, or in backward behind one of the layers.

    Args:
        where: `forward`, `backward 0` … `backward 2`, or nowhere.
        rank: whose it is.
        late_s: how long it sleeps in each pass.
        width: inputs and outputs of each layer.
    """

    def __init__(self, where: str = "nowhere", rank: int = 2, late_s: float = 0.02, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)
        self.where, self.late_s = where, late_s if rank == RANK else 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.where == "forward":
            time.sleep(self.late_s)
        for place, layer in enumerate(self.layers):
            inputs = layer(inputs).relu()
            if self.where == f"backward {place}":
                inputs = _Late.apply(inputs, self.late_s)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(inputs)
        return out


class InTurns(nn.Module):
    """Two layers with a turn each; a rank sleeps 50 ms in the forward pass of the second.

    Args:
        rank: whose it is.
    """

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 10), nn.Linear(512, 10)
        self.late_s = 0.05 if rank == RANK else 0.0

    def forward(self, inputs: Tensor, label: Tensor, turn: str = "second") -> dict[str, Tensor]:
        if turn == "second":
            time.sleep(self.late_s)
        return {"loss": self.get_submodule(turn)(inputs).square().mean()}


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, late_s: float) -> Tensor:
        context.late_s = late_s
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.late_s)
        return gradients[0], None


class Samples(Dataset[tuple[Tensor, int]]):
    """A rank may sleep over its samples.

    Args:
        rank: whose it is.
        late_s: how long it sleeps over the first of each eight.
        width: numbers in a sample.
    """

    def __init__(self, rank: int = 2, late_s: float = 0.0, width: int = 512) -> None:
        self.late_s, self.width = (late_s if rank == RANK else 0.0), width
        self._fetched = 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.late_s and self._fetched % 8 == 0:
            time.sleep(self.late_s)
        self._fetched += 1
        return torch.full((self.width,), index % 10 / 10), index % 10
