"""Running a pipeline on forked ranks, and reading what it left."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ddprun.config import LoadedPipeline, load
from ddprun.engine.worker import run_worker
from ddprun.run_files import ResumeMode
from tests.ranks import as_processes

SAMPLES = """
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator, dtype=torch.float64), index % 3
"""
"""A data set of 48 samples, at the head of a module that a pipeline names."""


def run_pipeline(folder: Path, text: str, ranks: int, name: str = "run") -> Path:
    """Run a pipeline on `ranks` forked ranks in `folder`; gives the run's folder."""
    file = folder / f"{name}.yaml"
    file.write_text(text)
    codes = as_processes(ranks, _work, file, folder / name, cwd=folder)
    assert codes == [0] * ranks
    return folder / name


def _work(file: Path, run_dir: Path) -> int:
    return run_worker(load(file), run_dir)


class _EndedError(BaseException):
    pass


def to_its_end(loaded: LoadedPipeline, run_dir: Path, told: Path, *, resuming: ResumeMode = "no") -> int:
    """Be a rank until it ends, with its screen in a file; gives the exit code, of a failed one, too."""
    handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    leave = os._exit

    def end(code: int) -> None:
        raise _EndedError(code)

    os._exit = end  # type: ignore[assignment]
    try:
        return run_worker(loaded, run_dir, resuming=resuming)
    except _EndedError as ended:
        return int(ended.args[0])
    finally:
        os._exit = leave
        sys.stderr.flush()


def run_to_end(folder: Path, text: str, ranks: int = 2, *, resuming: bool = False) -> tuple[list[int], str]:
    """Run a pipeline on `ranks` forked ranks in `folder`, into `run` there; gives their exit codes, and
    what all runs there have printed so far.
    """
    (folder / "p.yaml").write_text(text)
    codes = as_processes(ranks, _be_rank, folder, resuming, cwd=folder)
    return codes, (folder / "told").read_text()


def _be_rank(folder: Path, resuming: bool) -> int:
    loaded = load(folder / "p.yaml")
    return to_its_end(loaded, folder / "run", folder / "told", resuming="yes" if resuming else "no")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """What the save stage wrote."""
    return load_file(run_dir / "model.safetensors")


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """All records of a kind (`steps` or `buckets`), rank by rank."""
    return [
        json.loads(line)
        for file in sorted((run_dir / kind).glob("rank-*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def events(run_dir: Path) -> list[dict[str, Any]]:
    """All events."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def summary(run_dir: Path) -> dict[str, Any]:
    """The run's summary."""
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found
