"""Ranks are forked from a process that has imported torch, and are all that fresh processes would be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.running import events
from tests.ranks import Running, ddprun, is_running

MODULE = """
import json, os, signal, sys
from torch import nn

with open("imported", "a") as file:
    print(os.getpid(), file=file)


class Net(nn.Linear):
    def __init__(self, key):
        super().__init__(64, 10)
        ignored = [n.name for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
        facts = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "launcher": "DDPRUN_LAUNCHER" in os.environ,
            "session": os.getsid(0),
            "path": sys.path,
            "arguments": sys.argv[1:],
            "ignored": ignored,
            "masked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "variables": {k: os.environ.get(k) for k in ("RANK", "LOCAL_RANK", "MINE", "OMP_NUM_THREADS")},
            "inherited": os.path.exists("/proc/self/fd/77"),
            "write_through": sys.stdout.write_through,
        }
        with open(f"facts-{os.environ['RANK']}", "w") as file:
            json.dump(facts, file)

    def forward(self, inputs):
        return super().forward(inputs.flatten(1))
"""
SECRET = "abcdefgh1234"
MINE = {"MINE": SECRET}
PIPELINE = """
model: {nets.Net: {key: "${env:MINE}"}}
data: digits
optimizer: {sgd: {lr: 0.1}}
checkpoint: {every: 5}
stages: [{train: {steps: 20}}]
"""
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(MODULE)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    (tmp_path / "thready.py").write_text(THREAD)
    (tmp_path / "broken.py").write_text("import os\nraise ValueError('of its own ' + os.environ['MINE'])\n")
    return tmp_path


def facts_of(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [json.loads((folder / f"facts-{rank}").read_text()) for rank in range(2)]
    for one in found:
        assert one.pop("pid") == one.pop("session")
    return found


def test_a_forked_rank_is_as_a_fresh_one(folder: Path) -> None:
    """Parent, session, signals, paths, arguments, variables, files: as of processes that were executed, under
    `nohup` here. Neither leaves temporary files behind.
    """
    (folder / "temporary").mkdir()
    environment = {**MINE, "TMPDIR": str(folder / "temporary")}
    shell = ["bash", "-c", 'trap \'\' HUP; unset TORCHINDUCTOR_CACHE_DIR; exec 77</dev/null; exec "$0" "$@"']
    found = []
    for preload in ("[]", "null"):
        command = ("p.yaml", "--run-dir", f"run{preload}", "--set", f"launch.preload={preload}")
        with Running(*command, cwd=folder, prefix=shell, environment=environment) as running:
            launcher = running.process.pid
            done = running.wait(60)
        assert (done.code, "afresh" in done.stderr) == (0, False), done.stderr
        assert list((folder / "temporary").iterdir()) == []
        of_ranks = facts_of(folder)
        assert [one.pop("parent") for one in of_ranks] == [launcher] * 2
        found.append(of_ranks)
    assert found[0] == found[1]
    assert found[0][0]["variables"] == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MINE": SECRET,
        "OMP_NUM_THREADS": "1",
    }
    assert found[0][0]["ignored"] == ["SIGHUP", "SIGPIPE", "SIGXFSZ"], found


@pytest.mark.parametrize(
    ("preload", "imports", "said"),
    [
        ("[]", 2, ""),
        ("[nets]", 1, ""),
        (
            "[nets, thready]",
            3,
            "ranks are started afresh, not forked: importing nets, thready starts threads",
        ),
        ("[broken, nets]", 1, 'cannot preload "broken": ValueError: of its own ${env:MINE}'),
        ("[missing]", 2, 'cannot preload "missing": ModuleNotFoundError'),
    ],
)
def test_modules_are_imported_once_where_they_are_named(
    folder: Path, preload: str, imports: int, said: str
) -> None:
    """By the server and not by ranks; what cannot be forked, or imported, is said once, and the run ends
    well.
    """
    done = ddprun("p.yaml", "--set", f"launch.preload={preload}", cwd=folder, environment=MINE)
    assert done.code == 0, done.stderr
    assert len(set((folder / "imported").read_text().split())) == imports
    assert done.stderr.count("preload") + done.stderr.count("afresh") == bool(said)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("preload", "message"),
    [
        ("[os system]", 'expected the name of a module, got "os system"'),
        ("[subprocess]", '"subprocess" may not be imported'),
    ],
)
def test_names_that_are_no_module_or_not_trusted_are_faults(folder: Path, preload: str, message: str) -> None:
    done = ddprun(
        "p.yaml",
        "--set",
        f"launch.preload={preload}",
        cwd=folder,
        environment={"DDPRUN_TRUSTED": "./nets", "DDPRUN_ENV": "MINE", "MINE": SECRET},
    )
    assert (done.code, message in done.stderr) == (2, True), done.stderr
    assert not (folder / "imported").exists()


DIRECT = """
import ctypes, os, signal, sys, time
from pathlib import Path

from ddprun.launch import fork_server

fork_server._PRELOADED_MODULES = ()  # nobody needs torch here
fork_server._run_cli = lambda: exec(os.environ["BODY"], globals()) or 0
server = fork_server.ForkServer((), Path())


def start(body):
    return server.fork_process([], {**os.environ, "BODY": body})


for _ in range(50):  # its session is there, and it is not deaf
    rank = start("time.sleep(60)")
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.wait(10) == -signal.SIGTERM
assert start("sys.exit()").wait(10) == 0
assert start("sys.exit('the reason')").wait(10) == 1
assert start("ctypes.CDLL(None).puts(b'from C')").wait(10) == 0
assert start("time.sleep(0.3); os.fork() or time.sleep(0.1)").wait(10) == 0
time.sleep(0.5)
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
assert children == [str(server._pid)], "an orphan was adopted"
rank = start("time.sleep(60)")
os.kill(server._pid, signal.SIGKILL)
assert start("") is None
os.kill(rank.pid, signal.SIGKILL)
"""


def test_processes_start_and_end_as_those_of_a_shell(tmp_path: Path) -> None:
    """Exit codes, signals at once, output of C code, orphans; and a server that dies while a rank lives."""
    done = subprocess.run(
        [sys.executable, "-c", DIRECT], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "from C\n"
    assert done.stderr == "the reason\n"


def server_of(running: Running) -> int:
    """The launcher's child that is no rank."""
    [pid] = {child.pid for child in psutil.Process(running.process.pid).children()} - {*running.ranks()}
    return pid


def wait_for_checkpoint(folder: Path, running: Running) -> None:
    until = time.monotonic() + 60
    while not list((folder / "run" / "checkpoints").glob("step-*")):
        assert running.process.poll() is None, running.wait()
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.02)


ENDLESS = ("p.yaml", "--run-dir", "run", "--max-restarts", "1", "--set", "stages[0].train.steps=1000000")


def test_ranks_are_forked_again_after_a_failure(folder: Path) -> None:
    """The same server forks them: nothing that was preloaded is imported again."""
    with Running(*ENDLESS, "--set", "launch.preload=[nets]", cwd=folder, environment=MINE) as running:
        wait_for_checkpoint(folder, running)
        server, ranks = server_of(running), running.ranks()
        os.kill(ranks[1], signal.SIGKILL)
        until = time.monotonic() + 60
        while "resumed" not in [event["event"] for event in events(folder / "run")]:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert server_of(running) == server
        assert not {*ranks} & {*running.ranks()}
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(30).code == 130
    assert (folder / "imported").read_text().split() == [str(server)]
    assert not is_running(server)


def test_a_server_that_is_gone_is_replaced_by_fresh_processes(folder: Path) -> None:
    with Running(*ENDLESS, cwd=folder, environment=MINE) as running:
        wait_for_checkpoint(folder, running)
        os.kill(server_of(running), signal.SIGKILL)
        os.kill(running.ranks()[0], signal.SIGKILL)
        until = time.monotonic() + 60
        while "resumed" not in [event["event"] for event in events(folder / "run")]:
            assert time.monotonic() < until
            time.sleep(0.02)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(30).code == 130


def test_nothing_outlives_a_launcher_that_is_killed(folder: Path) -> None:
    with Running(*ENDLESS, cwd=folder, environment=MINE) as running:
        wait_for_checkpoint(folder, running)
        processes = [server_of(running), *running.ranks()]
        running.process.kill()
        until = time.monotonic() + 10
        while any(map(is_running, processes)):
            assert time.monotonic() < until, "a process is left"
            time.sleep(0.02)
