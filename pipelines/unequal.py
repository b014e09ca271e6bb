"""What unequal.yaml trains on: random vectors, each of which takes a rank a while to make."""

import os
import time

import torch

MS_PER_SAMPLE = {"0": 1.0, "1": 2.0}  # of each rank


class Slow(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """6400 samples of 64 numbers, in ten classes by their largest one of ten."""

    def __init__(self) -> None:
        self.inputs = torch.randn(6400, 64, generator=torch.Generator().manual_seed(0))
        self.wait_s = MS_PER_SAMPLE.get(os.environ.get("RANK", "0"), 1.0) / 1e3

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        return self.inputs[index], int(self.inputs[index, :10].argmax())
