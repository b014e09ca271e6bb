"""Faults that only a run can see: each before the first step, with its place in the file."""

import os
import re
from pathlib import Path

import pytest
import torch

from ddprun.engine.worker import BAD_INPUT, work
from ddprun.spec import load
from tests.ranks import as_processes
from tests.spec.bad import FOLDER, matches, read

FILES = sorted((FOLDER / "run").glob("*.yaml"))


def attempt(file: Path) -> None:
    """Ends with os._exit, so the caller reads what was printed and not what is returned."""
    os.dup2(os.open("printed.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    work(load(file), None)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_fault_of_a_run_is_told_with_its_place(file: Path, tmp_path: Path) -> None:
    """On two ranks: one of them says it, as `check` would, with the quoted line; no step is made."""
    if file.stem == "more-ranks-than-gpus" and torch.cuda.device_count() > 1:
        pytest.skip("this machine has a GPU for each rank")
    bad = read(file)
    with pytest.raises(AssertionError, match="ended without a word"):
        as_processes(2, attempt, file, cwd=tmp_path)
    printed = (tmp_path / "printed.txt").read_text()
    headlines = re.findall(rf"^{re.escape(str(file))}:(.*)$", printed, re.MULTILINE)
    assert len(headlines) == len(bad.expected) == 1, printed
    assert matches(bad.expected[0], headlines[0]), headlines[0]
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("runs/*/*/steps"))
    assert BAD_INPUT == 2
