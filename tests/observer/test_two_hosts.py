"""A script that is observed on two hosts, which share no disk, under torchrun alone."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Running

SCRIPT = """
import os, sys

import ddprun
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = ddprun.observe(model, optimizer, run_dir="run", timeout_s=5)
for step in range(30):
    if step == 20 and sys.argv[1:] == ["hang"] and dist.get_rank() == 3:
        sys.stdin = os.fdopen(os.pipe()[0])
        input()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
run.close()
"""


def on_two_hosts(folder: Path, *words: str) -> tuple[list[int], list[str]]:
    """Run the script on two ranks of each of two hosts, each in a folder of its own."""
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", "node0:29400", "--rdzv-id", "two"]
    with hosts(2) as made, contextlib.ExitStack() as stack:
        started = []
        for host in made:
            own = folder / host.name
            own.mkdir()
            (own / "script.py").write_text(SCRIPT)
            module = ["-m", "torch.distributed.run", *flags]
            running = Running("script.py", *words, cwd=own, host=host, module=module)
            started.append(stack.enter_context(running))
        finished = [running.wait(100) for running in started]
    return [one.code for one in finished], [one.stderr for one in finished]


@needs_namespaces
@pytest.mark.netns
def test_records_of_all_hosts_are_in_one_folder(tmp_path: Path) -> None:
    """That of rank 0's host, once the run is closed. The formulas know that two hosts take part."""
    codes, said = on_two_hosts(tmp_path)
    assert codes == [0, 0], said
    run = tmp_path / "node0" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("done", 30, 4)
    for rank in range(4):
        assert len((run / "steps" / f"rank-{rank:05}.jsonl").read_text().splitlines()) == 30
    assert summary["wire_bytes"] == 30 * 2 * 3 * (8 * 2 + 2) * 4
    assert not (tmp_path / "node1" / "run" / "summary.json").exists()


@needs_namespaces
@pytest.mark.netns
def test_a_rank_of_another_host_that_hangs_is_named(tmp_path: Path) -> None:
    """With its line by a rank of its own host; one of the other host cannot ask it, and says so."""
    codes, said = on_two_hosts(tmp_path, "hang")
    assert codes == [1, 1]
    assert said[0].count("the run hangs (step 21)") + said[1].count("the run hangs (step 21)") == 1
    if "the run hangs" in said[1]:
        assert "rank 3 did not arrive within 5 s" in said[1]
        assert "script.py:17 in <module>" in said[1]
    else:
        assert "ranks 2-3 did not arrive within 5 s, or cannot be reached" in said[0]
        assert "whose ranks cannot be asked: no status server of ddprun's launcher runs there" in said[0]
