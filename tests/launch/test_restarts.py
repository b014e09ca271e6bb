"""Ranks that are started again on one host, by ddprun or by torchrun, go on where they were."""

import os
import signal
import time
from pathlib import Path

import pytest

from ddprun.checkpoint.folder import steps_in
from tests.checkpoint.runs import final
from tests.engine.running import events, summary
from tests.ranks import Running, ddprun

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [32], outputs: 10}
data: digits
loader: {batch_size: 32}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
hooks: [int8]
stages:
  - train: {steps: 1500}
  - evaluate: {metrics: [accuracy]}
checkpoint: {every: 100}
launch: {nproc_per_node: 2, max_restarts: 2}
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "ddprun"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "p.yaml").write_text(PIPELINE)
    done = ddprun("p.yaml", "--run-dir=run", cwd=folder)
    assert done.code == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("module", [[], TORCHRUN], ids=["ddprun", "torchrun"])
def test_a_killed_rank_is_started_again_and_goes_on(tmp_path: Path, module: list[str], whole: Path) -> None:
    """From the newest checkpoint, with no more than the launcher's own flag; the end has the same bits."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    with Running("p.yaml", "--run-dir=run", cwd=tmp_path, module=module) as running:
        for _ in range(2):
            before = steps_in(tmp_path / "run" / "checkpoints")[:1]
            end = time.monotonic() + 60
            while steps_in(tmp_path / "run" / "checkpoints")[:1] == before and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(running.ranks()[-1], signal.SIGKILL)
            time.sleep(1)
        done = running.wait(100)
    assert done.code == 0, done.stderr
    assert done.stderr.count("goes on after step ") == 2
    if not module:
        assert "rank 1 was killed by SIGKILL (out of memory is the usual cause); starting" in done.stderr
        assert "(restart 1 of 2)" in done.stderr
        assert "(restart 2 of 2)" in done.stderr
    told = [event["event"] for event in events(tmp_path / "run")]
    assert (told.count("started"), told.count("resumed")) == (3, 2)
    assert final(tmp_path / "run") == final(whole)
    for key in ("steps", "samples", "loss", "metrics"):
        assert summary(tmp_path / "run")[key] == summary(whole)[key]


def test_a_finished_run_has_nothing_left(whole: Path) -> None:
    """`resume` says so, changes nothing, and is done."""
    before = summary(whole)
    done = ddprun("resume", "run", cwd=whole.parent)
    assert done.code == 0
    assert "nothing is left to do: every stage is done" in done.stderr
    assert {**summary(whole), "seconds": 0} == {**before, "seconds": 0}
