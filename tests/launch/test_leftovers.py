"""Threads and processes that a pipeline's own code leaves behind do not keep a run from ending."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from ddprun.host.dev_shm import SHM_FOLDER
from tests.engine.running import summary
from tests.launch.test_processes import SHORT
from tests.ranks import Running, ddprun, is_running

LEAVING = """
import os
import subprocess
import threading
import time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from torch import nn


class Net(nn.Linear):
    def __init__(self, leave, fails=False, everywhere=False, api_token=None):
        super().__init__(64, 10)
        chosen = everywhere or int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        self.fails = fails and chosen
        if chosen:
            globals()[leave]()

    def forward(self, inputs):
        if self.fails:
            raise ValueError("fails")
        return super().forward(inputs.flatten(1))


def threads():
    threading.Thread(target=time.sleep, args=(200,), name="uploader").start()


def thread_and_process():
    threads()
    child = get_context("fork").Process(target=time.sleep, args=(200,))
    child.start()
    Path("child").write_text(str(child.pid))


def shared_memory():
    made = SharedMemory(create=True, size=64)
    Path("shared").write_text(made.name)
    globals()["kept"] = made


def process():
    subprocess.Popen(["sh", "-c", "sleep 201; : " + os.environ["SOME_TOKEN"]])
    null = subprocess.DEVNULL
    detached = subprocess.Popen(["sleep", "202"], stdout=null, stderr=null, start_new_session=True)
    Path("detached").write_text(str(detached.pid))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "leaving.py").write_text(LEAVING)
    (tmp_path / "short.yaml").write_text(SHORT)
    return tmp_path


def flags(leave: str, **more: object) -> list[str]:
    options = "".join(f", {key}: {value}" for key, value in more.items())
    return ["--set", f"model={{leaving.Net: {{leave: {leave}{options}}}}}", "--run-dir", "run"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_python_would_wait_for_is_named_and_not_waited_for(folder: Path, rank: int) -> None:
    """A thread, and a process of `multiprocessing`, which is ended; 0: by a rank without a launcher."""
    by_hand = {} if rank else {"RANK": "0", "WORLD_SIZE": "1"}
    done = ddprun("short.yaml", *flags("thread_and_process"), cwd=folder, environment=by_hand)
    child = (folder / "child").read_text()
    assert done.code == 0, done.stderr
    said = f"ddprun: rank {rank} is done, and no longer waits for thread uploader, process {child} ("
    assert said in done.stderr
    end = time.monotonic() + 30
    while is_running(int(child)):
        assert time.monotonic() < end, "it was sent SIGTERM"
        time.sleep(0.05)
    assert summary(folder / "run")["status"] == "done"


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_outlives_its_rank_is_named_and_ended(folder: Path, fails: bool) -> None:
    """It has the launcher's output open: who reads that would wait. One in a session of its own lives on."""
    secret = {"SOME_TOKEN": "hunter2-hunter2"}
    options = flags("process", fails=str(fails).lower(), api_token='"${env:SOME_TOKEN}"')
    done = ddprun("short.yaml", *options, cwd=folder, environment=secret)
    detached = int((folder / "detached").read_text())
    try:
        assert done.code == int(fails), done.stderr
        [line] = [line for line in done.stderr.splitlines() if "have left behind" in line]
        found = re.findall(r"process (\d+) \((.+?)\)", line)
        commands = {"sh -c sleep 201; : ${env:SOME_TOKEN}", "sleep 201"}
        assert {command for _, command in found} == commands
        assert not any(is_running(int(pid)) for pid, _ in found)
        assert is_running(detached)
    finally:
        os.kill(detached, signal.SIGKILL)


def test_the_first_signal_after_the_end_ends_the_ranks_at_once(folder: Path) -> None:
    """The run is over, and its exit code stays."""
    (folder / "tmp").mkdir()
    asked = {"TMPDIR": str(folder / "tmp")}
    with Running(
        "short.yaml", *flags("threads", everywhere="true"), cwd=folder, environment=asked
    ) as running:
        end = time.monotonic() + 60
        while not any(one.read_text().strip() for one in folder.glob("tmp/ddprun-launch-*/outcome")):
            assert time.monotonic() < end
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        done = running.wait(60)
    assert done.code == 0, done.stderr
    assert "no longer waits" not in done.stderr
    assert "SIGTERM" not in done.stderr


def test_shared_memory_of_a_rank_that_is_ended_goes(folder: Path) -> None:
    """By a process of `multiprocessing`, which a rank starts for that: another rank fails meanwhile."""
    (folder / "failing.py").write_text(
        "import os\n\nimport leaving\n\n\nclass Net(leaving.Net):\n    def forward(self, inputs):\n"
        "        if os.environ['RANK'] == '0':\n            raise ValueError('fails')\n"
        "        return super().forward(inputs)\n"
    )
    options = flags("shared_memory")
    done = ddprun("short.yaml", options[0], options[1].replace("leaving", "failing"), cwd=folder)
    assert done.code == 1
    assert "ValueError: fails" in done.stderr
    name = (folder / "shared").read_text()
    until = time.monotonic() + 10
    while (SHM_FOLDER / name).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
