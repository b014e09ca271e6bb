"""Built-in data: `digits`, `text`, `synthetic`. Each brings a training and a held-out part."""

import glob
import sysconfig
from collections.abc import Callable, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


class DataError(ValueError):
    """Data that cannot be had; the message says which and why."""


class TrainEvalSplit(NamedTuple):
    """What to train on, and what is held out; None: data that is not built in holds nothing out."""

    train: Dataset[tuple[Tensor, ...]]
    evaluate: Dataset[tuple[Tensor, ...]] | None


def digits(*, held_out: float | None, split_seed: int, folder: Path) -> TrainEvalSplit:
    """1,797 handwritten digits: float32 images (1, 8, 8) with values 0 to 1, int64 labels 0 to 9.

    UCI Machine Learning Repository, https://doi.org/10.24432/C50P49 (CC BY 4.0). The order is shuffled with
    `split_seed` before the last part is held out: the file's last writers differ from its first.
    """
    with (package_files("ddprun.zoo") / "digits.npz").open("rb") as stored, np.load(stored) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32) / 16).unsqueeze(1)
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    keep = len(labels) - round(len(labels) * (held_out or 0))
    return _split_tensors(images[order], labels[order], keep)


def synthetic(
    *, samples: int, shape: Sequence[int], dtype: str, classes: int, held_out: int, folder: Path
) -> TrainEvalSplit:
    """Random samples, always the same ones: normal inputs with random int64 labels, or for int64 tokens, the
    target of each being the next one.
    """
    generator = torch.Generator().manual_seed(0)
    if dtype == "int64":
        size = (samples + held_out, *shape[:-1], shape[-1] + 1)
        tokens = torch.randint(classes, size, generator=generator)
        return _split_tensors(tokens[..., :-1], tokens[..., 1:], samples)
    size = (samples + held_out, *shape)
    inputs = torch.randn(size, generator=generator, dtype=getattr(torch, dtype))
    labels = torch.randint(classes, (samples + held_out,), generator=generator)
    return _split_tensors(inputs, labels, samples)


def text(*, files: Sequence[str], context: int, held_out: float | None, folder: Path) -> TrainEvalSplit:
    """Bytes of local files in sorted order, cut into windows of `context` that do not overlap.

    A sample is (window, window moved on by one byte), both int64 of shape (context,). The last share of the
    bytes is held out. A DataError: no file matches or can be read, or the bytes are too few for a window.
    """
    data = b"".join(_read(path) for path in _matching_files(files, folder))
    stored = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    keep = len(stored) - round(len(stored) * (held_out or 0))
    train, rest = ByteWindows(stored[:keep], context), ByteWindows(stored[keep:], context)
    if not len(train):
        raise DataError(
            f"{keep} bytes to train on are too few for a window of {context} (context) and one more; "
            f"{len(data) - keep} of {len(data)} bytes are held out"
        )
    return TrainEvalSplit(train, rest)


class ByteWindows(Dataset[tuple[Tensor, ...]]):
    """Windows of `context` bytes and the same moved on by one; each byte is an input at most once."""

    def __init__(self, stored: Tensor, context: int) -> None:
        self.stored = stored  # (bytes,) uint8
        self.context = context

    def __len__(self) -> int:
        return max(0, len(self.stored) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.stored[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def _split_tensors(inputs: Tensor, labels: Tensor, keep: int) -> TrainEvalSplit:
    return TrainEvalSplit(
        TensorDataset(inputs[:keep], labels[:keep]), TensorDataset(inputs[keep:], labels[keep:])
    )


def _matching_files(patterns: Sequence[str], folder: Path) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        full = pattern.replace("{stdlib}", glob.escape(sysconfig.get_path("stdlib")))
        full = full.removeprefix(f"{folder}/")  # `{here}`, whose name may hold [ or *
        try:
            paths = glob.glob(full, root_dir=folder, recursive=True)
        except RecursionError:
            raise DataError(f"a pattern of {len(pattern)} characters goes through too many folders") from None
        matches = [path for path in map(folder.joinpath, paths) if path.is_file()]
        if not matches:
            raise DataError(f'no file matches "{pattern}" (looked in {folder})')
        found.update(matches)
    return sorted(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


DATASETS: dict[str, Callable[..., TrainEvalSplit]] = {"digits": digits, "text": text, "synthetic": synthetic}
