"""Faults that only a run can see: each before the first step, with its place in the file."""

import os
import re
from pathlib import Path

import pytest
import torch

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.engine.worker import run_worker
from tests.config.bad import FOLDER, matches, read
from tests.engine.running import run_pipeline, summary
from tests.ranks import as_processes, ddprun

FILES = sorted((FOLDER / "run").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_fault_of_a_run_is_told_with_its_place(file: Path, tmp_path: Path) -> None:
    """On two ranks: one of them says it, as `check` would, with the quoted line; no step is made."""
    if file.stem == "more-ranks-than-gpus" and torch.cuda.device_count() > 1:
        pytest.skip("this machine has a GPU for each rank")
    if file.stem == "loss-refused-by-torch" and not hasattr(torch.nn, "LinearCrossEntropyLoss"):
        pytest.skip("torch 2.13 has this loss")
    bad = read(file)
    done = ddprun(file, "--nproc-per-node=2", cwd=tmp_path)
    assert done.code == EXIT_BAD_INPUT, done.stderr
    printed = done.stderr
    headlines = re.findall(rf"^{re.escape(str(file))}:(.*)$", printed, re.MULTILINE)
    assert len(headlines) == len(bad.expected) == 1, printed
    assert matches(bad.expected[0], headlines[0]), headlines[0]
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("runs/*/*/steps"))


MODULE = """
import os

import torch
from torch import nn
from torch.utils.data import Dataset

RANK = int(os.environ["RANK"])


class Samples(Dataset):
    def __init__(self, at=-1, what=""):
        self.at, self.what = at, what

    def __len__(self):
        return 64

    def __getitem__(self, place):
        if place == self.at:
            if self.what == "reset":
                raise ConnectionResetError(104, "Connection reset by peer")
            if self.what == "ends":
                os._exit(1)
            return torch.zeros(5), 0
        return torch.ones(4), place % 2


class Heads(nn.Module):
    '''Uses its second head for so many forward passes only.'''

    def __init__(self, passes=0, ignored=False, freezes=False):
        super().__init__()
        self.first, self.second, self.left = nn.Linear(4, 2), nn.Linear(4, 2), passes
        self.freezes = freezes
        if ignored:
            self._ddp_params_and_buffers_to_ignore = ["second.weight", "second.bias"]

    def forward(self, numbers):
        self.left -= 1
        self.second.requires_grad_(self.left >= 0 or not self.freezes)
        return self.first(numbers) + (self.second(numbers) if self.left >= 0 else 0)
"""
PIPELINE = """
model: MODEL
data: {train: {mine.Samples: {OPTIONS}}}
loader: {batch_size: 4, shuffle: false}
optimizer: {sgd: {lr: 0.1}}
stages: [{train: {steps: 8}}]
"""


def attempt(file: Path) -> None:
    """Be a rank that no launcher ends; it ends with os._exit."""
    os.dup2(os.open("printed.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    run_worker(load(file), None)


def said(folder: Path, model: str = "mine.Heads", options: str = "", ddp: str = "") -> str:
    """What two ranks print that do not come to their end."""
    (folder / "mine.py").write_text(MODULE)
    text = PIPELINE.replace("MODEL", model).replace("OPTIONS", options)
    (folder / "p.yaml").write_text(text + ddp)
    done = ddprun("p.yaml", "--nproc-per-node=2", cwd=folder)
    assert done.code in (1, 2), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("model", "of"),
    [
        ("mine.Heads", "the loss of a rank's first batch"),
        ("{mine.Heads: {passes: 2}}", "the loss of rank [01] in step 3"),
    ],
)
def test_parameters_that_take_no_part_are_named(tmp_path: Path, model: str, of: str) -> None:
    """With the key of the file, before step 1 or when it first happens, and no word of torch's flags."""
    printed = said(tmp_path, model)
    told = (
        r"^p\.yaml: ddp.find_unused_parameters: is false, its default, but second.weight, second.bias "
        f"took no part in {of}, so ranks would wait for their gradients forever; "
        "write ddp: {find_unused_parameters: true}, or leave them out of the model, or freeze them "
        r"\(requires_grad_\(False\)\), or, if they are in a reentrant checkpoint, use_reentrant=False"
    )
    assert len(re.findall(told, printed, re.MULTILINE)) == 1, printed
    assert "^" not in printed
    assert "Traceback" not in printed
    assert "find_unused_parameters=True" not in printed


def test_static_graph_is_named_where_it_does_not_hold(tmp_path: Path) -> None:
    """And not to be kept: DDP takes one of the two keys only."""
    printed = said(tmp_path, "{mine.Heads: {passes: 4}}", ddp="ddp: {static_graph: true}\n")
    told = (
        r"p\.yaml:7:21: ddp.static_graph: is true, but second.weight, second.bias took no part in the loss "
        r"of rank [01] in step 5, so .*; write ddp: {find_unused_parameters: true} in its place, or leave"
    )
    assert re.search(told, printed), printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("passes", "place"), [(1, "a rank's first batch"), (2, "rank [01] in step 3")])
def test_parameters_that_a_model_freezes_itself_are_named(tmp_path: Path, passes: int, place: str) -> None:
    """And no others of their bucket."""
    printed = said(tmp_path, f"{{mine.Heads: {{passes: {passes}, freezes: true}}}}")
    told = (
        rf"but second.weight, second.bias took no part in the loss of {place}, so ranks would wait for their "
        "gradients forever; their requires_grad was turned off after the start: write it as freeze of a "
        r"stage, or write ddp: \{find_unused_parameters: true\}"
    )
    assert re.search(told, printed), printed
    assert "Traceback" not in printed


def test_parameters_that_ddp_ignores_may_take_no_part(tmp_path: Path) -> None:
    """DDP waits for none of their gradients."""
    (tmp_path / "mine.py").write_text(MODULE)
    text = PIPELINE.replace("MODEL", "{mine.Heads: {ignored: true}}").replace("OPTIONS", "")
    assert summary(run_pipeline(tmp_path, text, 2))["steps"] == 8


def test_samples_that_are_no_batch_are_told_with_their_place(tmp_path: Path) -> None:
    """In mid-run, and in the words of the file."""
    printed = said(tmp_path, "{mlp: {inputs: 4, outputs: 2}}", "at: 20")
    told = (
        'data.train: "mine.Samples": samples do not fit into one batch: sample 16 is (float32 (4,), int), '
        "sample 20 is (float32 (5,), int); give all samples the same keys"
    )
    assert told in printed
    assert "Traceback" not in printed


def test_a_datasets_own_connection_is_no_lost_rank(tmp_path: Path) -> None:
    """Its traceback says where it comes from."""
    printed = said(tmp_path, "{mlp: {inputs: 4, outputs: 2}}", "at: 21, what: reset")
    assert "another rank is gone" not in printed
    assert "ConnectionResetError: [Errno 104] Connection reset by peer" in printed
    assert "mine.py" in printed
    assert "in __getitem__" in printed


def test_a_rank_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    """By a rank whose exchange with it breaks: its own traceback would lead nowhere."""
    (tmp_path / "mine.py").write_text(MODULE)
    text = PIPELINE.replace("MODEL", "{mlp: {inputs: 4, outputs: 2}}").replace(
        "OPTIONS", "at: 20, what: ends"
    )
    (tmp_path / "p.yaml").write_text(text)
    assert as_processes(2, attempt, Path("p.yaml"), cwd=tmp_path, may_die=True) == [None, None]
    printed = (tmp_path / "printed.txt").read_text()
    assert "another rank is gone; its own message" in printed
    assert "Traceback" not in printed
