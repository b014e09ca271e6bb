"""Data that shards itself by rank: found before step 1, and taken as it is where the file says so."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.engine.worker import run_worker
from tests.engine.running import events, summary
from tests.ranks import as_processes, ddprun

MODULE = """
import os
import random

import torch
from torch.utils.data import Dataset, IterableDataset

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def sample(place):
    return torch.randn(4, generator=torch.Generator().manual_seed(place)), place % 2


def note(place):
    with open(f"asked-{RANK}", "a") as file:
        print(place, file=file)


class Row(IterableDataset):
    def __init__(self, by_rank=False, size=60):
        self.places = range(RANK, size, RANKS) if by_rank else range(size)

    def __iter__(self):
        for place in self.places:
            note(place)
            yield sample(place)


class Picked(Dataset):
    def __init__(self, by_rank=False, size=60, cut=False):
        self.places = range(RANK, size, RANKS) if by_rank else range(size - RANK if cut else size)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        note(self.places[index])
        return sample(self.places[index])


class Growing(Picked):
    asked = 0

    def __getitem__(self, index):
        self.asked += 1
        if RANK and self.asked == 40:
            self.places = range(61)
        return super().__getitem__(index)


class Augmented(Picked):
    '''Draws noise from the seeded generators.'''

    def __getitem__(self, index):
        numbers, label = super().__getitem__(index)
        return numbers + torch.randn(4) + random.random(), label


class OneSource(Row):
    def __init__(self):
        super().__init__()
        self.left = iter(list(self.places))

    def __iter__(self):
        return (sample(place) for place in self.left)
"""
PIPELINE = """
model: {mlp: {inputs: 4, hidden: [8], outputs: 2}}
data: {train: {mine.KIND: {OPTIONS}}}
loader: {batch_size: 4, shuffle: false, MORE}
optimizer: {sgd: {lr: 0.1}}
stages: [STAGES]
"""


def run(
    folder: Path, kind: str, options: str = "", more: str = "", stages: str = "{train: {epochs: 1}}"
) -> tuple[Path, str]:
    """Run it on two ranks; gives its folder, and what it said."""
    write(folder, kind, options, more, stages)
    assert as_processes(2, as_rank, cwd=folder) == [0, 0]
    return folder / "run", (folder / "said").read_text()


def write(folder: Path, kind: str, options: str, more: str, stages: str = "{train: {epochs: 1}}") -> None:
    """The pipeline, and the module that it names."""
    (folder / "mine.py").write_text(MODULE)
    text = PIPELINE.replace("KIND", kind).replace("OPTIONS", options).replace("MORE", more)
    text = text.replace("STAGES", stages)
    (folder / "p.yaml").write_text(text)


def as_rank() -> int:
    os.dup2(os.open("said", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    return run_worker(load(Path("p.yaml")), Path("run"))


def found(folder: Path) -> Iterator[dict[str, Any]]:
    return (event for event in events(folder) if event["event"].startswith("data_"))


@pytest.mark.parametrize("kind", ["Row", "Picked"])
def test_data_that_is_sharded_twice_is_told(tmp_path: Path, kind: str) -> None:
    """Half of the samples are never used: said once, with both readings and what to do."""
    folder, said = run(tmp_path, kind, "by_rank: true")
    (event,) = found(folder)
    assert (event["event"], event["ranks"]) == ("data_differs", [1])
    assert said.count("data: first samples of rank 1 differ from rank 0's\n") == 1
    lines = said.partition("data: first samples of rank 1")[2].splitlines()[1:3]
    assert lines == [
        "  if the data set shards itself by rank, 1 of 2 samples are never used: "
        "write loader: {sharded: true}",
        "  if it draws at random, draw from torch, NumPy or random, which are seeded",
    ]
    assert summary(folder)["samples"] == 30


@pytest.mark.parametrize(
    "held_out", ["Row: {by_rank: true}", "Picked: {by_rank: true}", "Picked: {cut: true}"]
)
def test_held_out_data_that_differs_between_ranks_is_refused(tmp_path: Path, held_out: str) -> None:
    """Whether its first sample or only its length differs; map-style data before step 1."""
    options = f"by_rank: true}}}}, evaluate: {{mine.{held_out[:-1]}"
    write(tmp_path, "Row", options, "sharded: true", "{train: {epochs: 1}}, evaluate")
    done = ddprun("p.yaml", "--nproc-per-node=2", "--run-dir=run", cwd=tmp_path)
    assert done.code == EXIT_BAD_INPUT, done.stderr
    assert "the first sample or the length of rank 1 differs from rank 0's; have each" in done.stderr
    assert "Traceback" not in done.stderr
    assert any((tmp_path / "run").glob("steps*")) == held_out.startswith("Row")


def test_held_out_data_that_grows_on_one_rank_is_refused(tmp_path: Path) -> None:
    """At the next evaluation: ranks would take other passes, and wait for each other."""
    stages = "{train: {epochs: 2, evaluate: {every: 2}}}"
    write(tmp_path, "Row", "by_rank: true}}, evaluate: {mine.Growing: {", "sharded: true", stages)
    done = ddprun("p.yaml", "--nproc-per-node=2", "--run-dir=run", cwd=tmp_path)
    assert done.code == EXIT_BAD_INPUT, done.stderr
    assert "the first sample or the length of rank 1 differs from rank 0's" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["Row", "Picked", "Augmented"])
def test_data_that_all_ranks_have_alike_is_not_told_of(tmp_path: Path, kind: str) -> None:
    """Even if samples are drawn upon, from generators that are seeded."""
    folder, said = run(tmp_path, kind)
    assert not list(found(folder))
    assert "data:" not in said
    assert summary(folder)["samples"] == 60


@pytest.mark.parametrize("kind", ["Row", "Picked"])
def test_sharded_data_counts_each_sample_once(tmp_path: Path, kind: str) -> None:
    """All of it, though ranks have unequal parts; nothing is said."""
    folder, said = run(tmp_path, kind, "by_rank: true, size: 61", "sharded: true")
    assert not list(found(folder))
    assert "data:" not in said
    assert summary(folder)["samples"] == 61
    asked = {int(line) for rank in range(2) for line in (tmp_path / f"asked-{rank}").read_text().split()}
    assert asked == set(range(61))


@pytest.mark.parametrize(
    "held_out",
    [
        "mine.Picked: {size: 21}",
        "mine.Row: {size: 21}",
        "mine.Augmented: {size: 21}",
        "synthetic: {samples: 21, shape: [4], classes: 2}",
    ],
)
def test_held_out_data_counts_once_beside_sharded_training_data(tmp_path: Path, held_out: str) -> None:
    """All ranks have it alike, and nothing is said."""
    options = f"by_rank: true, size: 24}}}}, evaluate: {{{held_out[:-1]}"
    stages = "{train: {epochs: 1}}, evaluate, evaluate"
    folder, said = run(tmp_path, "Row", options, "sharded: true", stages)
    assert [one["samples"] for one in summary(folder)["stages"][1:]] == [21] * 2
    assert not list(found(folder))
    assert "held-out data" not in said


def test_sharded_data_that_is_not(tmp_path: Path) -> None:
    """Every rank reads all of it: that is said."""
    folder, said = run(tmp_path, "Row", "", "sharded: true")
    assert [event["event"] for event in found(folder)] == ["data_not_sharded"]
    assert "each sample is used 2 times in an epoch" in said


def test_samples_that_loading_processes_do_not_get_are_told(tmp_path: Path) -> None:
    """A data set that reads one source goes on in them after what was read before step 1."""
    write(tmp_path, "OneSource", "", "workers: 2")
    done = ddprun("p.yaml", "--nproc-per-node=2", "--run-dir=run", cwd=tmp_path)
    said = done.stderr
    assert done.code == 0, said
    assert [event["event"] for event in found(tmp_path / "run")] == ["data_lost"]
    assert said.count("data: read again, it begins with other samples; if it reads on from one source") == 1
    assert "then write loader: {workers: 0}" in said


def test_a_warm_up_is_held_against_the_steps_of_all_ranks(tmp_path: Path) -> None:
    """Of 21 and 20 samples: six steps, of which a rank on its own would count five."""
    stage = "{train: {epochs: 1, warmup_steps: 5}}"
    folder, _ = run(tmp_path, "Picked", "by_rank: true, size: 41", "sharded: true", stage)
    assert summary(folder)["steps"] == 6
