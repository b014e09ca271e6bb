"""Whole scripts under torchrun: how they end, and who is told when they do not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Finished, Running, ddprun, free_port

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

what, two_lines = sys.argv[1], "--changed" in sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if two_lines:
    import ddprun

    ddprun.observe(model, optimizer, run_dir="run", timeout_s=6)
for step in range(30):
    if step == 20 and dist.get_rank() == 1:
        if what == "raise":
            raise ValueError("a broken sample")
        if what == "input":
            sys.stdin = os.fdopen(os.pipe()[0])  # as a terminal at which nobody types
            input()
        if what == "barrier":
            dist.barrier()
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
print("weights", model.module.weight.sum().item())
"""


def torchrun(folder: Path, *words: str, source: str = SCRIPT) -> Finished:
    """Run a script on two ranks; the one above: as it is under `ddprun observe`, or with two lines more."""
    (folder / next(word for word in words if word.endswith(".py"))).write_text(source)
    flags = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with Running(*words, cwd=folder, module=["-m", "torch.distributed.run", *flags]) as running:
        return running.wait(170)


def left(folder: Path, rank: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the records of a rank's steps."""
    lines = (folder / "run" / "steps" / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return json.loads((folder / "run" / "summary.json").read_text()), list(map(json.loads, lines))


def test_a_script_that_is_not_changed_is_observed(tmp_path: Path) -> None:
    """With its arguments, and to its end, though it closes nothing and destroys its process groups."""
    done = torchrun(tmp_path, "-m", "ddprun", "observe", "--run-dir", "run", "own.py", "train")
    assert done.code == 0, done.stderr
    assert "observing own, in run" in done.stderr
    assert "30 steps observed: ddprun report run" in done.stderr
    assert len(set(re.findall("weights (.*)", done.stdout))) == 1
    summary, steps = left(tmp_path)
    assert (summary["status"], summary["steps"], summary["records_dropped"]) == ("done", 30, 0)
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert summary["wire_bytes"] == 2 * 30 * (8 * 2 + 2) * 4
    assert len(summary["straggler_wait_s"]) == 2


def test_a_script_without_ddp_is_told(tmp_path: Path) -> None:
    """It runs all the same."""
    (tmp_path / "plain.py").write_text("print('hello')")
    done = ddprun("observe", "plain.py", cwd=tmp_path)
    assert (done.code, done.stdout) == (0, "hello\n")
    assert "plain.py made no DistributedDataParallel, so nothing was observed" in done.stderr


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """As it stands there."""
    page = (Path(__file__).parents[2] / "docs" / "observe.md").read_text(encoding="utf-8")
    source = next(iter(re.findall(r"```python\n(# train\.py.*?)```", page, re.DOTALL)))
    done = torchrun(tmp_path, "train.py", source=source)
    assert done.code == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("done", 20, 2 * 640)


def test_an_exception_of_one_rank_is_in_the_summary(tmp_path: Path) -> None:
    """Of the rank that failed first, with the steps before it."""
    done = torchrun(tmp_path, "own.py", "raise", "--changed")
    assert done.code == 1
    summary, steps = left(tmp_path, rank=1)
    assert summary["status"] == "failed"
    assert summary["error"] == {"rank": 1, "message": "ValueError: a broken sample"}
    assert [step["step"] for step in steps] == list(range(1, 21))


@pytest.mark.parametrize("what", ["input", pytest.param("barrier", marks=pytest.mark.slow)])
def test_a_hang_names_rank_bucket_and_line(tmp_path: Path, what: str) -> None:
    """Of a rank that waits for somebody to type, and of one in a collective that the other has not called."""
    done = torchrun(tmp_path, "own.py", what, "--changed")
    assert done.code == 1
    call = {"input": "input()", "barrier": "dist.barrier()"}[what]
    line = [text.strip() for text in SCRIPT.splitlines()].index(call) + 1
    assert "the run hangs (step 21): rank 1 did not arrive within 6 s" in done.stderr
    assert re.search(r"bucket +0 of gradients: bias, weight", done.stderr)
    assert re.search(rf"rank 1 .*own\.py:{line} in <module>", done.stderr)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["hang"]["ranks"]) == ("failed", [1])
