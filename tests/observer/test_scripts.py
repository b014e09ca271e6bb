"""Whole scripts under torchrun: how they end, and who is told when they do not."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddprun.report.sentences import ending_problem_sentence
from ddprun.telemetry.reader import RecordedRun
from tests.ranks import Finished, Running, ddprun, free_port

SCRIPT = """
import atexit
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

what, two_lines = sys.argv[1], "--changed" in sys.argv
store, rank, size = next(dist.rendezvous("env://"))
# Gloo would find the addresses of the attempt before in torchrun's store.
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
torch.manual_seed(0)
if what == "scale":
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
model = DistributedDataParallel(nn.Linear(8, 2))
if what == "scale late":
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if what == "fail at the end":
    from ddprun.observer import run

    run._EXIT_WAIT_S = 1.0
    if rank == 1:
        atexit.register(time.sleep, 4)  # until then, torchrun does not end rank 0
if two_lines:
    import ddprun

    ddprun.observe(model, optimizer, run_dir="run", timeout_s=6, track=["prometheus"])
for step in range(30):
    if what == "raise elsewhere" and step == 20 and dist.get_rank() == 0:
        time.sleep(60)
    if step == 20 and dist.get_rank() == 1:
        if what.startswith("raise"):
            raise ValueError("a broken sample")
        if what == "input":
            sys.stdin = os.fdopen(os.pipe()[0])  # as a terminal at which nobody types
            input()
        if what == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "barrier":
            dist.barrier()
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    if what.startswith("scale"):
        scaler.scale(loss * (float("inf") if step == 9 else 1.0)).backward()
        scaler.step(optimizer)  # not in step 10
        scaler.update()
        continue
    loss.backward()
    optimizer.step()
if what == "fail at the end" and dist.get_rank() == 1:
    raise ValueError("a broken sample")
dist.destroy_process_group()
print("weights", model.module.weight.sum().item())
"""


def torchrun(folder: Path, *words: str, source: str = SCRIPT, restarts: int = 0) -> Finished:
    """Run a script on two ranks; the one above: as it is under `ddprun observe`, or with two lines more."""
    (folder / next((word for word in words if word.endswith(".py")), "own.py")).write_text(source)
    flags = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    flags += ["--max-restarts", str(restarts)]
    with Running(*words, cwd=folder, module=["-m", "torch.distributed.run", *flags]) as running:
        return running.wait(170)


def left(folder: Path, rank: int = 0, run: str = "run") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the records of a rank's steps."""
    lines = (folder / run / "steps" / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return json.loads((folder / run / "summary.json").read_text()), list(map(json.loads, lines))


@pytest.mark.parametrize("script", [["own.py", "scale"], ["-m", "own", "scale late"]])
def test_a_script_that_is_not_changed_is_observed(tmp_path: Path, script: list[str]) -> None:
    """With its arguments and its scaler, and to its end, though it closes nothing and destroys its process
    groups.
    """
    pytest.importorskip("prometheus_client")
    command = ["-m", "ddprun", "observe", "--run-dir", "run", "--track", "[prometheus]"]
    done = torchrun(tmp_path, *command, *script)
    assert done.code == 0, done.stderr
    assert "observing own, in run" in done.stderr
    assert "30 steps observed: ddprun report run" in done.stderr
    assert len(set(re.findall("weights (.*)", done.stdout))) == 1
    summary, steps = left(tmp_path)
    assert (summary["status"], summary["steps"], summary["records_dropped"]) == ("done", 30, 0)
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert tracked_steps(tmp_path) == 30
    assert summary["wire_bytes"] == 2 * 30 * (8 * 2 + 2) * 4
    assert len(summary["straggler_wait_s"]) == 2


def test_a_script_that_imports_observe_late_draws_its_own_numbers() -> None:
    """Augmentation often draws from `random`, which a script may have seeded before."""
    program = (
        "import random; random.seed(0); import ddprun; ddprun.observe; drawn = random.random();"
        "random.seed(0); print(drawn == random.random())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("module", "code", "told"),
    [
        ("nowhere.train", 2, "ddprun: Error while finding module specification for 'nowhere.train'"),
        ("package", 2, "ddprun: No module named package.__main__; 'package' is a package"),
        ("package.train", 1, "ModuleNotFoundError: No module named 'missing'"),
    ],
)
def test_a_module_that_cannot_be_run_is_named(tmp_path: Path, module: str, code: int, told: str) -> None:
    """An error of its own code keeps its traceback."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import missing")
    done = ddprun("observe", "-m", module, cwd=tmp_path)
    assert done.code == code
    assert told in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


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


def tracked_steps(folder: Path) -> int:
    """How many steps Prometheus was told of when its tracker was closed: before, it was written with one."""
    (line,) = re.findall(r"^ddprun_steps_total (.*)", (folder / "run" / "metrics.prom").read_text(), re.M)
    return int(float(line))


@pytest.mark.parametrize(("what", "over"), [("raise", 20), ("raise elsewhere", 20), ("fail at the end", 30)])
def test_an_exception_of_one_rank_is_in_the_summary(tmp_path: Path, what: str, over: int) -> None:
    """Of the rank that failed first, with the steps before it. Trackers on rank 0 flush, whether that waits
    for the rank, does something else when torchrun ends it, or has ended its own part without an error.
    """
    pytest.importorskip("prometheus_client")
    done = torchrun(tmp_path, "own.py", what, "--changed")
    assert done.code == 1
    assert "rank 1 has failed in run, so ranks that wait for it end: ValueError: a broken" in done.stderr
    assert tracked_steps(tmp_path) > 1
    summary, steps = left(tmp_path, rank=1)
    assert summary["status"] == "failed"
    assert summary["error"] == {"rank": 1, "message": "ValueError: a broken sample"}
    assert [step["step"] for step in steps] == list(range(1, over + 1))


def test_a_restart_by_torchrun_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Beside that of the attempt in which a rank was killed, whose records stay and which is not done."""
    pytest.importorskip("prometheus_client")
    done = torchrun(tmp_path, "own.py", "restart", "--changed", restarts=1)
    assert done.code == 0, done.stderr
    summary, steps = left(tmp_path, run="run-restart-1")
    assert (summary["status"], summary["steps"], len(steps)) == ("done", 30, 30)
    first = tmp_path / "run" / "summary.json"
    assert not first.exists() or json.loads(first.read_text())["status"] == "failed"
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run", "run-restart-1"]


@pytest.mark.parametrize("what", ["input", pytest.param("barrier", marks=pytest.mark.slow)])
def test_a_hang_names_rank_bucket_and_line(tmp_path: Path, what: str) -> None:
    """Of a rank that waits for somebody to type, and of one in a collective that the other has not called.
    Trackers flush.
    """
    pytest.importorskip("prometheus_client")
    done = torchrun(tmp_path, "own.py", what, "--changed")
    assert done.code == 1
    assert tracked_steps(tmp_path) > 1
    call = {"input": "input()", "barrier": "dist.barrier()"}[what]
    line = [text.strip() for text in SCRIPT.splitlines()].index(call) + 1
    assert "the run hangs (step 21): rank 1 did not arrive within 6 s" in done.stderr
    assert re.search(r"bucket +0 \(gradient\): bias, weight", done.stderr)
    assert re.search(rf"rank 1 .*own\.py:{line} in <module>", done.stderr)
    summary, steps = left(tmp_path)
    assert (summary["status"], summary["error"]["hang"]["ranks"]) == ("failed", [1])
    assert [step["step"] for step in steps] == list(range(1, 21))
    told = ending_problem_sentence(RecordedRun(tmp_path / "run"))
    assert told is not None
    assert re.match(rf"The run hung in step 21, in .* Rank 1 is in .*own\.py:{line} in <module>\.", told)
