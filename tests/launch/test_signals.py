"""Signals to a launcher: a checkpoint at the first, the end at the second, and none that is ignored."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import psutil
import pytest

from ddprun.checkpoint.folder import steps_in
from ddprun.host.processes import send_signal
from ddprun.host.rank_files import (
    SCRATCH_VARIABLE,
    report_outcome_and_exit_code,
    temporary_launcher_folder,
)
from ddprun.launch.host_ranks import _run_with_watchdog
from tests.engine.running import events, summary
from tests.launch.test_processes import ENDLESS, wait_for_steps
from tests.ranks import Running, ddprun, free_port, is_running

DDPRUN = str(Path(sys.executable).parent / "ddprun")
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "endless.yaml").write_text(ENDLESS)
    return tmp_path


def wait_for_text(file: Path, text: str) -> None:
    """Wait until a file holds a text."""
    end = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {file} within a minute"
        time.sleep(0.05)


def interrupted_with_checkpoint(run: Path) -> None:
    """The run stopped as it promises."""
    found = summary(run)
    assert found["status"] == "interrupted"
    assert found["steps"] in steps_in(run / "checkpoints")


def test_ctrl_c_ends_the_reader_of_its_output_too(folder: Path) -> None:
    """`ddprun … 2>&1 | tee log`: Ctrl-C ends tee first; the run stops with its checkpoint all the same."""
    read, write = os.pipe()
    run = folder / "run"
    process = subprocess.Popen(
        [DDPRUN, "endless.yaml", "--run-dir", "run", "--nproc-per-node", "1"],
        cwd=folder,
        stdout=write,
        stderr=write,
        start_new_session=True,
    )
    os.close(write)
    try:
        wait_for_text(run / "events.jsonl", "stage_started")
        os.close(read)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        _end(process)
    interrupted_with_checkpoint(run)


def test_a_terminal_that_is_closed_stops_the_run_with_a_checkpoint(folder: Path) -> None:
    """The kernel sends SIGHUP, and there is no screen any more to say so on."""
    run = folder / "run"
    ours, theirs = pty.openpty()
    take_terminal = [sys.executable, "-c", TAKE_TERMINAL]
    process = subprocess.Popen(
        [*take_terminal, DDPRUN, "endless.yaml", "--run-dir", "run", "--nproc-per-node", "1"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        end = time.monotonic() + 60
        while (
            not (run / "events.jsonl").exists() or "stage_started" not in (run / "events.jsonl").read_text()
        ):
            assert time.monotonic() < end
            _drain(ours)
        os.close(ours)
        assert process.wait(60) == 130
    finally:
        _end(process)
    interrupted_with_checkpoint(run)


def test_sigusr1_takes_a_checkpoint_and_signals_that_were_ignored_stay_ignored(folder: Path) -> None:
    """nohup ignores SIGHUP, a shell's background job SIGINT; SIGTERM still stops the run. SIGUSR1 before that
    takes a checkpoint, which is announced with its step, and the run continues.
    """
    ignoring = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    run = folder / "run"
    with Running("endless.yaml", "--run-dir", "run", cwd=folder, prefix=ignoring) as running:
        ranks = wait_for_steps(running, run)
        running.process.send_signal(signal.SIGUSR1)
        wait_for_text(run / "events.jsonl", "checkpoint_written")
        running.process.send_signal(signal.SIGHUP)
        running.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert running.process.poll() is None
        assert all(map(is_running, ranks))
        running.process.send_signal(signal.SIGTERM)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    first = next(event for event in events(run) if event["event"] == "checkpoint_taken")
    assert f"SIGUSR1: checkpoint of step {first['step']}\n" in done.stderr
    assert "SIGHUP" not in done.stderr
    assert "SIGINT" not in done.stderr
    assert done.stderr.count("SIGTERM: stopping at the end of the step") == 1
    assert done.stderr.rstrip().endswith(f"to resume: ddprun resume {shlex.quote('run')}")
    interrupted_with_checkpoint(run)


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_come_at_once_are_one_request(folder: Path, again: signal.Signals) -> None:
    """GNU `timeout` signals its child, and then the child's process group; systemd may send SIGHUP, too."""
    run = folder / "run"
    with Running("endless.yaml", "--run-dir", "run", cwd=folder) as running:
        wait_for_steps(running, run)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # a signal that is still pending would swallow the second one
        running.process.send_signal(again)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert done.stderr.count("SIGTERM: stopping at the end of the step") == 1
    interrupted_with_checkpoint(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_is_as_to_the_launcher_alone(folder: Path, number: signal.Signals) -> None:
    """As service managers and batch systems send it. Processes that load data work on, and so does what
    empties shared memory; the ranks load again for each of many epochs.
    """
    run = folder / "run"
    flags = ["--max-restarts=1", "--set=loader.workers=1", "--set=checkpoint.memory_every=5"]
    with Running("endless.yaml", "--run-dir", "run", *flags, cwd=folder) as running:
        wait_for_steps(running, run)
        launcher = psutil.Process(running.process.pid)
        [memory] = [one.cmdline()[-1] for one in launcher.children() if one.name() == "sh"]
        pids = [one.pid for one in launcher.children(recursive=True)]
        send_signal([*pids, running.process.pid], number)  # the launcher has it last
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert done.stderr.count(f"{number.name}: stopping at the end of the step") == 1
    assert not any(map(is_running, pids))
    assert not Path(memory).exists()
    interrupted_with_checkpoint(run)
    steps = summary(run)["steps"]
    resumed = ddprun("resume", "run", f"--set=stages[0].train.steps={steps + 10}", cwd=folder)
    assert (resumed.code, summary(run)["steps"]) == (0, steps + 10), resumed.stderr


SLOW = """
import os, time
from pathlib import Path

import torch


class Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 40 and os.environ["RANK"] == "1":
            Path("slow").touch()
            time.sleep(100)
        return super().forward(inputs.flatten(1))
"""


def test_the_second_ctrl_c_ends_a_run_in_a_long_step_at_once(folder: Path) -> None:
    """A rank that is in the middle of a step is not waited for; how to go on is the last line."""
    (folder / "slow.py").write_text(SLOW)
    flags = ["--set", "model=slow.Slow", "--set", "checkpoint.every=10", "--run-dir", "run"]
    with Running("endless.yaml", *flags, cwd=folder) as running:
        wait_for_text(folder / "run" / "events.jsonl", "checkpoint_written")
        end = time.monotonic() + 60
        while not (folder / "slow").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        ranks = running.ranks()
        running.process.send_signal(signal.SIGINT)
        time.sleep(3)  # within one second, it would be the same request
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        done = running.wait(9)  # torchelastic gives ranks 10 s before it kills them
    assert done.code == 130, done.stderr
    assert not any(map(is_running, ranks))
    assert done.stderr.rstrip().endswith("ddprun: stopped by SIGINT; to resume: ddprun resume run")


@pytest.mark.parametrize("node_rank", [0, 1])
def test_ctrl_c_ends_a_launcher_that_waits_for_other_hosts(folder: Path, node_rank: int) -> None:
    """Torch's C++ code waits for them, for minutes; a signal is heard all the same."""
    flags = ["--nnodes=2", f"--node-rank={node_rank}", "--master-addr=127.0.0.1"]
    with Running(
        "endless.yaml",
        *flags,
        f"--master-port={free_port()}",
        cwd=folder,
        environment={"TMPDIR": str(folder)},
    ) as running:
        end = time.monotonic() + 60
        while not [*folder.glob("ddprun-launch-*/outcome")]:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(2)
        running.process.send_signal(signal.SIGINT)
        done = running.wait(20)
    assert (done.code, done.stderr) == (130, "ddprun: stopped by SIGINT\n")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> number - 1 & 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rank_that_waits_for_others(folder: Path, rank: int, number: int) -> None:
    """One that a user, srun or torchrun has started; rank 0 serves the store, and rank 1 looks for it."""
    others = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with Running("endless.yaml", cwd=folder, environment={**others, "TMPDIR": str(folder)}) as running:
        end = time.monotonic() + 60
        while not catches(running.process.pid, signal.SIGUSR1):  # as a rank does, before it waits
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(2)
        running.process.send_signal(number)
        done = running.wait(20)
    assert done.code == 130, done.stderr
    assert done.stderr.endswith(f"ddprun: rank {rank} stops before all ranks have met\n")
    assert not [*folder.glob("ddprun-*")]


def test_ranks_with_different_pipelines_end_before_step_1(folder: Path) -> None:
    """As where a file was edited on one host; one of them says so."""
    port = str(free_port())
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": str(folder)}
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                Running(
                    "endless.yaml", f"--set=seed={rank}", cwd=folder, environment={**both, "RANK": str(rank)}
                )
            )
            for rank in range(2)
        ]
        done = [one.wait(60) for one in running]
    assert [one.code for one in done] == [1, 1]
    told = "".join(one.stderr for one in done)
    assert told.count("rank 1 and rank 0 were given different pipelines") == 1, told
    assert "Traceback" not in told
    assert not [*folder.glob("runs/*/*/steps/*")]


TAKING = """
import os
import signal
import sys
from pathlib import Path

import torch


def on_signal(number, frame):
    sys.exit(7)


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        signal.signal(signal.SIGTERM, on_signal)

    def forward(self, inputs):
        calls.append(1)
        if len(calls) == 1:
            Path("after-imports").write_text(str(signal.getsignal(signal.SIGUSR1)))
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if Path("late").exists() and not late:
            late.append(1)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, on_signal)
            signal.signal(signal.SIGINT, on_signal)
        now = str(signal.getsignal(signal.SIGTERM))
        rank = os.environ["RANK"]
        if late and now != str(signal.SIG_IGN) and not Path("sigterm-" + rank).exists():
            Path("sigterm-" + rank).write_text(now)
        return super().forward(inputs.flatten(1))


calls, late = [], []
signal.signal(signal.SIGUSR1, on_signal)
"""


@pytest.mark.parametrize("by_hand", [False, True])
def test_handlers_that_imported_code_installs_take_no_checkpoint_away(folder: Path, by_hand: bool) -> None:
    """At import, in a constructor, in the passes before step 1, and later: ddprun's are put back. `by_hand`:
    the rank has no launcher, and gets the signals itself.
    """
    (folder / "taking.py").write_text(TAKING)
    run = folder / "run"
    rank = {"RANK": "0", "WORLD_SIZE": "1"} if by_hand else {}
    flags = ["--set", "model=taking.Net", "--run-dir", "run"]
    with Running("endless.yaml", *flags, cwd=folder, environment=rank) as running:
        wait_for_text(run / "events.jsonl", "stage_started")
        running.process.send_signal(signal.SIGUSR1)
        wait_for_text(run / "events.jsonl", "checkpoint_written")
        (folder / "late").touch()
        for one in range(1 if by_hand else 2):
            wait_for_text(folder / f"sigterm-{one}", "o")  # a function
        running.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 60
        while (run / "events.jsonl").read_text().count("checkpoint_written") < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    interrupted_with_checkpoint(run)
    assert "SignalRequests._on_checkpoint_signal" in (folder / "after-imports").read_text()
    for one in range(1 if by_hand else 2):
        now = (folder / f"sigterm-{one}").read_text()
        assert ("SignalRequests._on_stop_signal" if by_hand else "ignore_signals.<locals>") in now


EARLY = """
import os

from torch import nn


class Early(nn.Linear):
    def __init__(self, who):
        super().__init__(64, 10)
        self.who, self.calls = who, 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 30 and int(os.environ["RANK"]) in self.who:
            os._exit(0)
        return super().forward(inputs.flatten(1))
"""


@pytest.mark.parametrize("who", [[1], [0, 1]])
def test_a_rank_that_ends_before_the_run_is_a_failure(folder: Path, who: list[int]) -> None:
    """Exit code 0 is no success as long as the run is not over; the rank is named."""
    (folder / "early.py").write_text(EARLY)
    with Running("endless.yaml", "--set", f"model={{early.Early: {{who: {who}}}}}", cwd=folder) as running:
        done = running.wait(60)
    assert done.code == 1, done.stderr
    assert "ended with exit code 0 before the run was over" in done.stderr
    assert any(f"rank {rank} ended" in done.stderr for rank in who) or "ranks 0, 1 ended" in done.stderr


def _drain(descriptor: int) -> None:
    """Read what a terminal shows, so that nobody waits to write to it."""
    if select.select([descriptor], [], [], 0.1)[0]:
        os.read(descriptor, 65536)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_a_signal_while_the_launcher_closes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is over, and how it has ended is known."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    agent = mock.Mock(run=mock.Mock(return_value=None))
    config = mock.Mock(max_nodes=1, min_nodes=1, max_restarts=0, nproc_per_node=1, rdzv_endpoint="")
    try:
        with temporary_launcher_folder() as scratch:
            monkeypatch.setenv(SCRATCH_VARIABLE, str(scratch))
            assert report_outcome_and_exit_code(3) == 0
            assert _run_with_watchdog(agent, config, scratch) == 3
            for number in numbers:
                os.kill(os.getpid(), number)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
