"""Ranks that are started again on one host, by ddprun or by torchrun, go on where they were."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint.folder import steps_in
from ddprun.launch.flags import parse_torchrun_flags
from tests.checkpoint.runs import final
from tests.engine.running import summary
from tests.ranks import Running, ddprun, ddprun_here

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [32], outputs: 10}
data: digits
loader: {batch_size: 32}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
hooks: [int8]
stages:
  - train: {steps: 600}
  - evaluate: {metrics: [accuracy]}
checkpoint: {every: 50}
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


@pytest.mark.parametrize(
    "module",
    [pytest.param([], id="ddprun"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_started_again_and_goes_on(tmp_path: Path, module: list[str], whole: Path) -> None:
    """From the newest checkpoint, with no more than the launcher's own flag; the end has the same bits."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    with Running("p.yaml", "--run-dir=run", cwd=tmp_path, module=module) as running:
        for resumed in range(2):
            end = time.monotonic() + 60
            while told_of(tmp_path / "run", "resumed") < resumed and time.monotonic() < end:
                time.sleep(0.02)
            before = steps_in(tmp_path / "run" / "checkpoints")[:1]
            while steps_in(tmp_path / "run" / "checkpoints")[:1] == before and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(running.ranks()[-1], signal.SIGKILL)
        done = running.wait(100)
    assert done.code == 0, done.stderr
    assert done.stderr.count("resuming after step ") == 2
    if not module:
        assert "rank 1 was killed by SIGKILL (out of memory is the usual cause); starting" in done.stderr
        assert "(restart 1 of 2)" in done.stderr
        assert "(restart 2 of 2)" in done.stderr
    assert told_of(tmp_path / "run", "started") == 3
    assert told_of(tmp_path / "run", "resumed") == 2
    assert final(tmp_path / "run") == final(whole)
    for key in ("steps", "samples", "loss", "metrics"):
        assert summary(tmp_path / "run")[key] == summary(whole)[key]


def told_of(run_dir: Path, kind: str) -> int:
    """How many events of a kind the run has told so far."""
    file = run_dir / "events.jsonl"
    return file.read_text().count(f'"{kind}"') if file.exists() else 0


def test_a_finished_run_has_nothing_left(whole: Path) -> None:
    """`resume` says so, changes nothing, and is done."""
    before = summary(whole)
    done = ddprun("resume", "run", cwd=whole.parent)
    assert done.code == 0
    assert "every stage is done, so nothing is left to do" in done.stderr
    assert {**summary(whole), "seconds": 0} == {**before, "seconds": 0}


LEAVING = """
import atexit
import os
import signal

from torch import nn


def net():
    if os.environ["RANK"] == "1":
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_a_rank_that_goes_down_after_the_end_changes_nothing(tmp_path: Path) -> None:
    """All is written by then: the run is done, with exit code 0, and nothing starts again."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    text = PIPELINE.replace("model:\n  mlp: {inputs: 64, hidden: [32], outputs: 10}", "model: leaving.net")
    (tmp_path / "p.yaml").write_text(text.replace("steps: 600", "steps: 5"))
    done = ddprun("p.yaml", "--run-dir=run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "again" not in done.stderr
    assert summary(tmp_path / "run")["status"] == "done"


REPEATING = """
import os

from torch import nn


class Net(nn.Linear):
    def __init__(self, call, differs=""):
        super().__init__(64, 10)
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.calls, self.call = 0, call + 5 * restarts * (differs == "step")
        self.told = "like the last time" + f", {restarts}" * (differs == "words")
        self._fail()

    def _fail(self):
        if self.calls == self.call and os.environ["RANK"] == "1":
            raise ValueError(self.told)
        self.calls += 1

    def forward(self, inputs):
        self._fail()
        return super().forward(inputs.flatten(1))
"""


@pytest.mark.parametrize("call", [0, 30])
def test_a_failure_that_comes_again_is_not_started_once_more(tmp_path: Path, call: int) -> None:
    """Before step 1 or in the same step, without a checkpoint in between: one restart shows that."""
    (tmp_path / "repeating.py").write_text(REPEATING)
    text = PIPELINE.replace("model:\n  mlp: {inputs: 64, hidden: [32], outputs: 10}", "model:\n  MODEL")
    (tmp_path / "p.yaml").write_text(text.replace("MODEL", f"repeating.Net: {{call: {call}}}"))
    done = ddprun("p.yaml", "--run-dir=run", cwd=tmp_path)
    assert done.code == 1, done.stderr
    assert done.stderr.count("ValueError: like the last time\n") == 4  # the headline and the traceback, twice
    assert [f"restart {i} of 2" in done.stderr for i in (1, 2)] == [True, False]
    assert done.stderr.count("ddprun: not starting the ranks again: they failed the same way before") == 1


ENDING = """
import os

from torch import nn

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_a_rank_that_user_code_ends_is_started_again(tmp_path: Path) -> None:
    """Whatever the exit code: a small one is the pipeline's own."""
    (tmp_path / "ending.py").write_text(ENDING)
    text = PIPELINE.replace("mlp: {inputs: 64, hidden: [32], outputs: 10}", "ending.net: {}")
    (tmp_path / "p.yaml").write_text(text.replace("steps: 600", "steps: 2"))
    done = ddprun("p.yaml", "--run-dir=run", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "restart 1 of 2" in done.stderr


@pytest.mark.parametrize("differs", ["words", "step"])
def test_another_failure_is_started_again(tmp_path: Path, differs: str) -> None:
    """With other words after the same step, or with the same words later."""
    (tmp_path / "repeating.py").write_text(REPEATING)
    text = PIPELINE.replace("model:\n  mlp: {inputs: 64, hidden: [32], outputs: 10}", "model:\n  MODEL")
    model = f"repeating.Net: {{call: 6, differs: {differs}}}"
    (tmp_path / "p.yaml").write_text(text.replace("MODEL", model))
    done = ddprun("p.yaml", "--run-dir=run", "--set=checkpoint.every=1000", cwd=tmp_path)
    assert done.code == 1, done.stderr
    assert [f"restart {i} of 2" in done.stderr for i in (1, 2)] == [True, True]
    assert "not starting the ranks again" not in done.stderr


def state_of(pid: int) -> str:
    """Of a process, as in /proc: T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_run_that_was_asked_to_stop_is_not_started_again(tmp_path: Path) -> None:
    """A rank that hangs after Ctrl-C does not bring the run back."""
    (tmp_path / "p.yaml").write_text(PIPELINE.replace("steps: 600", "steps: 10000000"))
    with Running("p.yaml", "--run-dir=run", cwd=tmp_path) as running:
        end = time.monotonic() + 60
        while not steps_in(tmp_path / "run" / "checkpoints") and time.monotonic() < end:
            time.sleep(0.02)
        ranks = running.ranks()
        os.kill(ranks[0], signal.SIGSTOP)  # so that they do not stop before one fails
        os.kill(running.process.pid, signal.SIGINT)
        while state_of(ranks[0]) == "T" and time.monotonic() < end:
            time.sleep(0.005)  # the launcher has it continue
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGKILL)
        began = time.monotonic()
        done = running.wait(60)
    assert done.code in (130, 1), done.stderr
    assert time.monotonic() - began < 25, "10 s for the stopped rank, not torchelastic's 30"
    assert "starting the ranks again" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ({"rdzv_endpoint": "192.0.2.77:1"}, "c10d"),
        ({"rdzv_endpoint": "192.0.2.77:1", "node_rank": "0"}, "static"),
        ({"rdzv_endpoint": "192.0.2.77:1", "rdzv_backend": "etcd-v2"}, "etcd-v2"),
        ({"master_addr": "192.0.2.77", "node_rank": "1"}, "static"),
    ],
)
def test_an_endpoint_of_several_hosts_means_c10d(flags: dict[str, str], backend: str) -> None:
    """Unless a backend, or this host's number, is given."""
    arguments: Any = parse_torchrun_flags(
        {"nnodes": "2", "local_addr": "127.0.0.1", **flags}, ["-m", "ddprun"]
    )
    assert arguments.rdzv_backend == backend


def test_hosts_that_may_leave_need_restarts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever says so, the file or a flag."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # what it sets must not reach other tests
    flags = {"nnodes": "1:2", "rdzv_endpoint": "localhost:29511", "local_addr": "127.0.0.1"}
    parse_torchrun_flags({**flags, "max_restarts": "3"}, ["-m", "ddprun"])
    assert capsys.readouterr().err == ""
    parse_torchrun_flags(flags, ["-m", "ddprun"])
    assert "--nnodes 1:2 without --max-restarts: a host that is lost ends the run" in capsys.readouterr().err


def test_a_run_on_this_host_alone_is_of_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever range of hosts the file has: it waits for no others."""
    flags: dict[str, str | bool] = {"nnodes": "1:2", "standalone": True}
    read: Any = parse_torchrun_flags(flags, ["-m", "ddprun"])
    assert (read.nnodes, capsys.readouterr().err) == ("1", "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rdzv-backend=foo", "--rdzv-endpoint=localhost:1"], "foo"),
        (["--nnodes=1:2:3"], "1:2:3"),
        (["--standalone", "--set=launch.nnodes=2"], "on this host alone, but nnodes is 2: add --nnodes 1"),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=localhost", "--max-restarts=1"],
            "add --rdzv-backend c10d",
        ),
        (
            [
                "--nnodes=2",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                "--rdzv-conf=join_timeout=x",
            ],
            "join_timeout",
        ),
        (
            ["--nnodes=2", "--rdzv-backend=static", "--rdzv-endpoint=192.0.2.77:1"],
            "does not say which host this is: add --node-rank 0 on the first host, --node-rank 1 on the next",
        ),
        (
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=:29400"],
            "the rendezvous endpoint ':29400' is not HOST:PORT",
        ),
        (["--nnodes=2", "--master-addr=192.0.2.77"], "does not say which host this is"),
        (
            ["--nnodes=2"],
            "--nnodes 2 needs a rendezvous: add --rdzv-endpoint HOST:PORT",
        ),
        (["--nnodes=two"], "--nnodes is 'two'; it must be a number of hosts, or MIN:MAX"),
        (["--nnodes=0"], "--nnodes is '0'; it must be"),
        (["--nnodes=3:2"], "--nnodes is '3:2'; it must be"),
        (["--nproc-per-node=0"], "--nproc-per-node is '0'; it must be at least 1, or auto, gpu or cpu"),
        (["--nproc-per-node=zero"], "--nproc-per-node is 'zero'; it must be at least 1"),
        (
            ["--nnodes=2", "--node-rank=2", "--master-addr=localhost"],
            "--node-rank is 2, and --nnodes 2; hosts count from 0",
        ),
    ],
)
def test_flags_that_torchelastic_refuses_are_bad_input(tmp_path: Path, flags: list[str], words: str) -> None:
    """One line, and exit code 2."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    done = ddprun_here("p.yaml", *flags, cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("ddprun: ")
    assert words in done.stderr
