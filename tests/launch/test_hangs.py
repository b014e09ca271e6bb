"""Ranks that hang or are stopped: the others end in time, and say who, where and for what."""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from ddprun.host.rank_files import remove_dead_launcher_folders
from ddprun.watchdog.status_page import RankStatus, read_page
from tests.engine.running import events, summary
from tests.ranks import Finished, Running, free_port, is_running, shared_memory_of
from tests.warm import WarmProcess

TIMEOUT_S = 8.0
ENDED_WITHIN_S = TIMEOUT_S + 5

PIPELINE = """
model: {halting.Net: {rank: 9, where: nowhere, call: 1}}
data: {train: halting.Data, evaluate: halting.Data}
loader: {batch_size: 16}
optimizer: {sgd: {lr: 0.1}}
ddp: {bucket_cap_mb: 1}
stages:
  - train: {steps: 1000000}
  - evaluate
launch: {timeout_s: 8, nproc_per_node: 3}
"""

HALTING = """
import os
import time
from pathlib import Path

import torch
from torch import nn

CALLS = {}
WHO = {}


def halt(where):
    CALLS[where] = CALLS.get(where, 0) + 1
    if where == WHO.get("where") and os.environ["RANK"] == str(WHO["rank"]) and CALLS[where] == WHO["call"]:
        Path("asleep").write_text(str(time.time()))
        time.sleep(1000)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        halt("backward")
        return gradient


class Net(nn.Module):
    def __init__(self, rank, where, call):
        super().__init__()
        WHO.update(rank=rank, where=where, call=call)
        self.first, self.last = nn.Linear(64, 27000), nn.Linear(27000, 10)
        self.first.weight.data *= 0.1
        halt("building")

    def forward(self, inputs):
        halt("forward" if self.training else "evaluate")
        return self.last(Gate.apply(self.first(inputs).relu()))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 960

    def __getitem__(self, index):
        halt("data")
        return torch.full((64,), index / 960), index % 10
"""

FIRST_STEP_BACKWARD = 3
"""Backward passes: two before step 1 freeze the layout of buckets."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hang.yaml").write_text(PIPELINE)
    (tmp_path / "halting.py").write_text(HALTING)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@contextmanager
def started(folder: Path, *arguments: str, **more: Any) -> Iterator[Running]:
    """`ddprun` on the pipeline, with a temporary folder of its own."""
    environment = {"TMPDIR": str(folder / "tmp")}
    with Running(
        "hang.yaml", "--run-dir", "run", *arguments, cwd=folder, environment=environment, **more
    ) as it:
        yield it


def workers_of(pid: int) -> list[int]:
    """A rank's loading processes."""
    return [child.pid for child in psutil.Process(pid).children()]


def halting(rank: int, where: str, call: int) -> str:
    """Option that makes a rank sleep for ever."""
    return f"--set=model={{halting.Net: {{rank: {rank}, where: {where}, call: {call}}}}}"


def end_of(running: Running) -> tuple[Finished, float]:
    """How it ended, and when."""
    done = running.wait(60)
    return done, time.time()


def logs(run: Path) -> dict[int, str]:
    """What each rank has told its log."""
    return {int(log.stem[-5:]): log.read_text() for log in (run / "logs").glob("rank-*.log")}


def nothing_left(folder: Path, ranks: list[int]) -> None:
    """No process, no shared memory, nothing in the temporary folder."""
    assert not any(map(is_running, ranks))
    assert shared_memory_of(ranks) == []
    assert temporary(folder) == []


def temporary(folder: Path) -> list[Path]:
    """What is in the temporary folder but the cache that torch makes for all of a user's programs."""
    return [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


def test_a_rank_that_sleeps_in_its_third_backward_is_named_by_all_others(folder: Path) -> None:
    """Within timeout_s + 5 s: its rank, what it is at, the bucket and its parameters; once on the screen."""
    with started(folder, halting(2, "backward", FIRST_STEP_BACKWARD + 2)) as running:
        ranks = wait_for(folder / "asleep", running)
        done, ended = end_of(running)
    assert done.code == 1
    assert ended - float((folder / "asleep").read_text()) < ENDED_WITHIN_S
    told = "the run hangs (stages[0].train, step 3): rank 2 did not arrive within 8 s"
    assert done.stderr.count(told) == done.stderr.count("the run hangs") == 1
    found = logs(folder / "run")
    for rank in (0, 1):
        assert told in found[rank]
    for text in (done.stderr, found[0], found[1]):
        assert re.search(r"all_reduce \d+ of world\.0, among ranks 0-2\n", text)
        assert re.search(
            r"rank 2 .* is in backward of step 3 \(stages\[0\]\.train\), for \d+\.\d s, at ", text
        )
        assert "halting.py:17 in halt" in text
    # The second bucket is whole only after the gate; of the first, rank 2 has sent its part.
    assert "bucket      1 (gradient): first.bias, first.weight\n" in done.stderr
    assert "other ranks have waited too long, but rank 2 is not waiting" in found[2]
    assert 'halting.py", line 17 in halt' in found[2]
    assert "Traceback" not in done.stderr
    failure = summary(folder / "run")
    assert failure["status"] == "failed"
    assert failure["error"]["message"] == "the run hangs: rank 2 did not arrive within 8 s"
    hang = failure["error"]["hang"]
    assert (hang["ranks"], hang["step"], hang["bucket"]) == ([2], 3, 1)
    assert hang["params"] == ["first.bias", "first.weight"]
    assert events(folder / "run")[-1]["event"] == "hang"
    recorded = json.loads((folder / "run" / "logs" / "flight-recorder-00000.json").read_text())
    assert recorded["entries"][-1]["process_group"][1].startswith("world.0")
    nothing_left(folder, ranks)


@pytest.mark.parametrize("stopped", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_stopped_rank_is_named_and_ended(folder: Path, stopped: int) -> None:
    """SIGSTOP stops its watch, too; and rank 0 may hold the store and the event log."""
    with started(folder, halting(stopped, "backward", FIRST_STEP_BACKWARD + 2)) as running:
        ranks = wait_for(folder / "asleep", running)
        wait_until_others_wait(ranks, stopped, "bucket 1")
        os.kill(process_of(ranks, stopped), signal.SIGSTOP)
        since = time.time()
        done, ended = end_of(running)
    assert (done.code, ended - since < ENDED_WITHIN_S) == (1, True), (ended - since, done.stderr)
    assert done.stderr.count("the run hangs") == 1
    assert done.stderr.count(f": rank {stopped} did not arrive within 8 s\n") == 1
    assert "is stopped, by SIGSTOP or a debugger" in done.stderr
    assert "first.bias, first.weight" in done.stderr
    assert "killed by" not in done.stderr
    found = logs(folder / "run")
    assert set(found) == {0, 1, 2} - {stopped}
    assert all(f"rank {stopped} did not arrive within 8 s" in text for text in found.values())
    assert summary(folder / "run")["error"]["hang"]["ranks"] == [stopped]
    assert [event["event"] for event in events(folder / "run")][-1] == "hang"
    nothing_left(folder, ranks)


@pytest.mark.parametrize(
    ("where", "call", "options", "told"),
    [
        pytest.param(
            "building",
            1,
            (),
            r"before the first stage\): rank 1 .*\n.*\n.* making the",
            id="building",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "backward",
            1,
            (),
            r"the first stage\): rank 1 .*\n.*\n.* freezing the",
            id="warm-up",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "data", 16 * 4 + 1, (), r"train, step \d\): rank 1 (.*\n)*.* in data of step", id="data"
        ),
        pytest.param(
            "forward",
            12,  # one of them before step 1
            ("--set=sync={local_sgd: {every: 4}}",),
            # The control message may have been under way for longer than the deltas.
            r"step 12\): rank 1 (?=(.*\n)*.*in forward of step 11)(.*\n)*.*\(delta\): first\.\w+",
            id="local_sgd",
        ),
        pytest.param(
            "evaluate",
            2,  # one of them before step 1
            ("--set=stages[0].train.steps=3",),
            r"\(stages\[1\]\.evaluate\): rank 1 .*\n.*\n.* whether to stop\n.* in evaluate",
            id="evaluate",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_sleeps_elsewhere_is_named_too(
    folder: Path, where: str, call: int, options: tuple[str, ...], told: str
) -> None:
    """While it builds, in the passes before step 1, fetching data, between two rounds, in evaluate."""
    with started(folder, halting(1, where, call), *options) as running:
        ranks = wait_for(folder / "asleep", running)
        done, ended = end_of(running)
    assert done.code == 1, done.stderr
    # A rank that waits later than this one sleeps, waits for timeout_s from then on.
    assert ended - float((folder / "asleep").read_text()) < ENDED_WITHIN_S + 2
    assert done.stderr.count("the run hangs") == 1
    assert re.search(told, done.stderr), done.stderr
    assert not any(map(is_running, ranks))


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
)
def test_a_stopped_rank_ends_with_its_launcher(folder: Path, number: signal.Signals, code: int) -> None:
    """Before any timeout: it goes on to stop after its step, or is killed if the launcher is."""
    with started(folder, "--set=launch.timeout_s=600") as running:
        ranks = wait_for(folder / "run" / "steps" / "rank-00000.jsonl", running)
        os.kill(process_of(ranks, 1), signal.SIGSTOP)
        os.kill(running.process.pid, number)
        assert running.wait(30).code == code
    assert bool(temporary(folder)) == (number == signal.SIGKILL)
    end = time.monotonic() + 5
    while any(map(is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))
    with started(folder, "--set=stages[0].train.steps=1", "--run-dir=next") as running:
        assert running.wait(60).code == 0
    assert temporary(folder) == [], "the next launcher clears up after one that was killed"


def by_hand(folder: Path, rank: int, size: int, port: int, *options: str) -> WarmProcess:
    """A rank whose launcher is this test: it gives the exit code of each."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder / "tmp"),
    }
    return WarmProcess(["run", "hang.yaml", "--run-dir", "run", *options], folder, environment, ())


@pytest.mark.parametrize("stopped", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_every_other_rank_exits_1_under_any_launcher(folder: Path, stopped: int) -> None:
    """Ranks that find each other by the store alone. If that is in the stopped rank, nobody waits for it:
    then each tells the screen.
    """
    others = sorted({0, 1, 2} - {stopped})
    port = free_port()
    ranks = [by_hand(folder, rank, 3, port) for rank in range(3)]
    try:
        end = time.monotonic() + 60
        while not (folder / "run" / "steps" / "rank-00002.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        since = time.time()
        outs = [ranks[rank].communicate(timeout=30) for rank in others]
        took, told = time.time() - since, "".join(err for _, err in outs)
        assert took < ENDED_WITHIN_S, told
        assert [ranks[rank].returncode for rank in others] == [1, 1]
        assert told.count(f"rank {stopped} did not arrive within 8 s") == (1 if stopped else 2), told
        assert "is stopped, by SIGSTOP" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    with mock.patch.object(tempfile, "tempdir", str(folder / "tmp")):
        remove_dead_launcher_folders()  # as the next start of the same user does
    assert temporary(folder) == []


def test_a_rank_that_never_comes_is_named_before_the_first_step(folder: Path) -> None:
    """One of two ranks is started, and waits timeout_s for the other."""
    rank = by_hand(folder, 0, 2, free_port())
    try:
        _, told = rank.communicate(timeout=60)
    finally:
        rank.kill()
    assert rank.returncode == 1
    assert "the run hangs (before the first stage): rank 1 did not arrive within 8 s, or cannot be" in told
    assert re.search(r"rank 1 +has not joined", told)
    assert "Traceback" not in told


def wait_for(path: Path, running: Running) -> list[int]:
    """Wait until a file is there and not empty; gives the ranks' process ids."""
    end = time.monotonic() + 60
    while time.monotonic() < end and running.process.poll() is None:
        if path.exists() and path.stat().st_size:
            return running.ranks()
        time.sleep(0.05)
    raise AssertionError(running.wait(10).stderr if running.process.poll() is not None else f"no {path}")


def statuses_of(ranks: list[int]) -> dict[int, RankStatus]:
    """The status pages that processes have open, by rank."""
    found = []
    for file in [file for pid in ranks for file in Path(f"/proc/{pid}/fd").iterdir()]:
        with suppress(FileNotFoundError):  # closed since
            if file.readlink().suffix == ".status":
                found.append(read_page(file))
    return {status.rank: status for status in found if status is not None}


def process_of(ranks: list[int], rank: int) -> int:
    """The process of a rank."""
    return statuses_of(ranks)[rank].pid


def wait_until_others_wait(ranks: list[int], rank: int, what: str) -> None:
    """Wait until all ranks but one wait for this and nothing else."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        waits = {number: status.waits for number, status in statuses_of(ranks).items() if number != rank}
        if len(waits) == len(ranks) - 1 and all(
            len(one) == 1 and what in one[0].what for one in waits.values()
        ):
            return
        time.sleep(0.05)
    raise AssertionError(f"ranks wait for {waits}")


def test_loading_processes_end_with_a_rank_that_is_killed(folder: Path) -> None:
    """By themselves they would look for it every 5 s."""
    rank = by_hand(folder, 0, 1, free_port(), "--set=loader.workers=1")
    try:
        end = time.monotonic() + 60
        while not (folder / "run" / "steps" / "rank-00000.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.05)
        while not (loading := workers_of(rank.pid)) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)
    finally:
        rank.kill()
    end = time.monotonic() + 3
    while any(map(is_running, loading)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [worker for worker in loading if is_running(worker)]
    rank.communicate()
    assert loading
    assert left == []
