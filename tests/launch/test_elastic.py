"""Ranks, hosts and links that go away in the middle of a run, on two real hosts: nothing is lost."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint.folder import steps_in
from ddprun.host.processes import send_signal
from tests.engine.running import events, lines, summary
from tests.namespaces import Host, hosts, needs_namespaces
from tests.ranks import Finished, Running, ddprun, is_running

pytestmark = [needs_namespaces, pytest.mark.netns]

SAMPLES, BATCH, EPOCHS = 22 * 64, 16, 15
FIRST = 1 + BATCH
"""Samples that a rank looks at before its first step: one to compare with the other ranks, and a batch for
shapes. Rank 0 reads 16 more, for checkpoints."""

MODULE = """
import os
import time
from pathlib import Path

from torch.utils.data import Dataset, Subset

from ddprun.zoo.data import digits

TRAIN, EVALUATE = digits(held_out=0.2, split_seed=0, folder=Path())


class Train(Dataset):
    \"\"\"Writes down which samples were asked for, in a file for each start of each rank.\"\"\"

    def __init__(self):
        Path("seen").mkdir(exist_ok=True)
        self.file = open(f"seen/{time.time_ns()}-{os.environ['RANK']}", "w", buffering=1)

    def __len__(self):
        return 22 * 64

    def __getitem__(self, index):
        time.sleep(0.001)
        print(index, file=self.file)
        return TRAIN[index]


def evaluate():
    return EVALUATE
"""

PIPELINE = f"""
model:
  mlp: {{inputs: 64, hidden: [64], outputs: 10}}
data: {{train: seen.Train, evaluate: seen.evaluate}}
loader: {{batch_size: {BATCH}}}
optimizer: {{sgd: {{lr: 0.1, momentum: 0.9}}}}
hooks: [int8]
stages:
  - train: {{epochs: {EPOCHS}}}
  - evaluate: {{metrics: [accuracy]}}
checkpoint: {{every: 10, keep: 3}}
launch: {{nproc_per_node: 2, timeout_s: 8}}
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of a run of four ranks to which nothing happens."""
    folder = tmp_path_factory.mktemp("unbroken")
    prepare(folder)
    done = ddprun("two.yaml", "--nproc-per-node=4", "--run-dir=two", cwd=folder)
    assert done.code == 0, done.stderr
    check_samples(folder)
    return summary(folder / "two")


def prepare(folder: Path) -> None:
    (folder / "seen.py").write_text(MODULE)
    (folder / "two.yaml").write_text(PIPELINE)


def start(folder: Path, host: Host, *flags: str) -> Running:
    return Running(
        "two.yaml",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29400",
        "--rdzv-id=two",
        "--run-dir=two",
        *flags,
        cwd=folder,
        environment={"GLOO_SOCKET_IFNAME": "e0"},
        host=host,
    )


@contextmanager
def two_hosts(folder: Path, *flags: str) -> Iterator[tuple[list[Host], list[Running]]]:
    """The run on two hosts with two ranks each; node0 holds the rendezvous."""
    prepare(folder)
    with hosts(2) as made, contextlib.ExitStack() as stack:
        yield made, [stack.enter_context(start(folder, host, *flags)) for host in made]


def wait_for_step(folder: Path, step: int, timeout_s: float = 120) -> None:
    """Until a checkpoint of that step or a later one is there."""
    end = time.monotonic() + timeout_s
    while not (found := steps_in(folder / "two" / "checkpoints")) or found[0] < step:
        assert time.monotonic() < end, f"no checkpoint of step {step}, but {found}"
        time.sleep(0.02)


def ended(started: list[Running], timeout_s: float = 100) -> list[Finished]:
    return [running.wait(timeout_s) for running in started]


def check_samples(folder: Path) -> list[int]:
    """Every sample counts once in each epoch, over all starts of the ranks; gives the steps of the starts."""
    run_dir = folder / "two"
    starts = [(0, told(event)) for event in events(run_dir) if event["event"] == "started"]
    for event in events(run_dir):
        if event["event"] == "resumed":
            place = max(i for i, (_, when) in enumerate(starts) if when <= told(event))
            starts[place] = (event["step"], starts[place][1])
    files = [(int(path.name.split("-")[0]) / 1e9, path) for path in (folder / "seen").iterdir()]
    steps: dict[int, list[int]] = {}
    for number, (first, when) in enumerate(starts):
        last = starts[number + 1][0] if number + 1 < len(starts) else 10**9
        before = starts[number - 1][1] if number else 0.0
        for rank in {line["rank"] for line in lines(run_dir, "steps")}:
            mine = [path for made, path in files if before < made < when and path.name.endswith(f"-{rank}")]
            if not mine:
                continue
            seen = [int(line) for line in max(mine).read_text().split()][FIRST if rank else FIRST + 16 :]
            for line in lines(run_dir, "steps"):
                if line["rank"] == rank and first < line["step"] <= last:
                    steps.setdefault(line["step"], []).extend(seen[: line["samples"]])
                    del seen[: line["samples"]]
    row = [index for step in sorted(steps) for index in steps[step]]
    assert len(row) == EPOCHS * SAMPLES
    for epoch in range(EPOCHS):
        assert Counter(row[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == Counter(range(SAMPLES)), epoch
    return [first for first, _ in starts]


def told(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def check(folder: Path, unbroken: dict[str, Any], within: float = 0.01) -> list[int]:
    """The run is done, nothing was seen twice or never, and it has learned as much as if nothing had been."""
    found = summary(folder / "two")
    assert found["status"] == "done"
    assert found["samples"] == EPOCHS * SAMPLES
    assert abs(found["metrics"]["accuracy"] - unbroken["metrics"]["accuracy"]) < within
    return check_samples(folder)


def kill_host(running: Running) -> None:
    """Its launcher, and with it all that it has started."""
    ranks = running.ranks()
    os.kill(running.process.pid, signal.SIGKILL)
    end = time.monotonic() + 5
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < end, "ranks outlive their launcher"
        time.sleep(0.02)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_killed_worker_is_started_again(tmp_path: Path, unbroken: dict[str, Any], seed: int) -> None:
    """Any rank of any host, at any time: all go on from the newest checkpoint, with the same bits."""
    draw = random.Random(seed)
    with two_hosts(tmp_path, "--nnodes=2", "--max-restarts=3") as (_, started):
        wait_for_step(tmp_path, draw.choice([10, 40, 70, 100]))
        time.sleep(draw.random() * 0.5)
        victim = draw.choice([pid for running in started for pid in running.ranks()])
        os.kill(victim, signal.SIGKILL)
        done = ended(started)
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    text = "".join(one.stderr for one in done)
    assert (
        text.count("was killed by SIGKILL (out of memory is the usual cause); starting the ranks again") == 1
    )
    assert "Traceback" not in text
    first, second = check(tmp_path, unbroken)
    assert (first, second % 10) == (0, 0)
    assert second > 0
    assert summary(tmp_path / "two")["loss"] == unbroken["loss"], "the same bits as if nothing had been"


def test_a_lost_host_is_gone_on_without(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """With --nnodes 1:2 the host that holds the store goes on within 20 s, with the ranks that it has."""
    with two_hosts(tmp_path, "--nnodes=1:2", "--max-restarts=3") as (_, started):
        wait_for_step(tmp_path, 40)
        kill_host(started[1])
        lost, at = time.monotonic(), steps_in(tmp_path / "two" / "checkpoints")[0]
        wait_for_step(tmp_path, at + 10, timeout_s=20)
        print(f"a checkpoint {time.monotonic() - lost:.1f} s after the host was lost")
        (done, _) = ended(started)
    assert done.code == 0, done.stderr
    assert "starting the ranks again (restart 1 of 3)" in done.stderr
    assert "(restart 2 of 3)" not in done.stderr
    assert "Traceback" not in done.stderr
    starts = check(tmp_path, unbroken)
    assert len(starts) in (2, 3), "3 if the second host came late: that is no restart"
    assert starts[-1] >= 40
    assert summary(tmp_path / "two")["world_size"] == 2


def test_a_lost_rendezvous_host_ends_with_what_to_type(tmp_path: Path) -> None:
    """Without restarts, too. Before, the host on which rank 0 is not has said where to look."""
    with two_hosts(tmp_path, "--nnodes=2", "--set=checkpoint.every=5") as (_, started):
        wait_for_step(tmp_path, 10)
        kill_host(started[0])
        (gone, done) = ended(started)
    assert done.code == 1, done.stderr
    assert done.stderr.endswith("to resume: ddprun resume two\n"), done.stderr
    assert "Traceback" not in done.stderr
    # Torchelastic numbers hosts as it likes, so either may have ranks 0 and 1.
    said = re.findall(
        r"ddprun: this host has ranks 2-3 of 4; rank 0, at (\S+), shows progress", gone.stderr + done.stderr
    )
    assert len(said) == 1, (gone.stderr, done.stderr)


@pytest.mark.slow
def test_without_the_host_that_holds_the_store_the_run_ends_clearly(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    """The other host says so and ends with 1; `resume` goes on, here on one host with two ranks."""
    with two_hosts(tmp_path, "--nnodes=1:2", "--max-restarts=3") as (_, started):
        wait_for_step(tmp_path, 40)
        kill_host(started[0])
        (_, done) = ended(started, 40)
    assert done.code == 1, done.stderr
    assert "cannot reach the other hosts" in done.stderr
    assert done.stderr.endswith("to resume: ddprun resume two\n"), done.stderr
    assert "Traceback" not in done.stderr
    resumed = ddprun("resume", "two", cwd=tmp_path)
    assert resumed.code == 0, resumed.stderr
    assert "resuming after step " in resumed.stderr
    starts = check(tmp_path, unbroken)
    assert starts[-1] >= 40


def test_a_link_that_goes_down_leaves_one_half(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """Long before timeout_s both launchers notice; the one with the store goes on alone, the other ends."""
    flags = ("--nnodes=1:2", "--max-restarts=3", "--set=launch.timeout_s=600")
    with two_hosts(tmp_path, *flags) as (made, started):
        wait_for_step(tmp_path, 40)
        made[1].cut()
        here, there = ended(started)
    assert here.code == 0, here.stderr
    assert there.code == 1, there.stderr
    for one, other in ((here, made[1]), (there, made[0])):
        said = f"the host {other.address} has not answered for 3 s: it is cut off"
        assert one.stderr.count(said) == 1, (here.stderr, there.stderr)
    assert "Traceback" not in here.stderr + there.stderr
    assert "cannot reach the other hosts" in there.stderr
    check(tmp_path, unbroken)
    assert summary(tmp_path / "two")["world_size"] == 2


@pytest.mark.slow
def test_a_host_that_stands_still_is_not_lost(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """Launcher and ranks are stopped for 20 s: the other host waits, and nothing starts again."""
    flags = ("--nnodes=1:2", "--max-restarts=3", "--set=launch.timeout_s=60")
    with two_hosts(tmp_path, *flags) as (_, started):
        wait_for_step(tmp_path, 40)
        stopped = [started[1].process.pid, *started[1].ranks()]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in stopped:
                os.kill(pid, number)
            time.sleep(20 if number is signal.SIGSTOP else 0)
        done = ended(started)
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    assert len(check(tmp_path, unbroken)) == 1


@pytest.mark.slow
def test_a_host_that_comes_is_taken_in(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """The ranks start again with those of the new host, from a checkpoint that is taken for that."""
    prepare(tmp_path)
    with hosts(2) as made, contextlib.ExitStack() as stack:
        flags = ("--nnodes=1:2", "--max-restarts=3", "--set=checkpoint.every=1000")
        first = stack.enter_context(start(tmp_path, made[0], *flags))
        end = time.monotonic() + 60
        while not list((tmp_path / "two" / "steps").glob("*")) and time.monotonic() < end:
            time.sleep(0.05)
        second = stack.enter_context(start(tmp_path, made[1], *flags))
        done = ended([first, second])
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    assert "another host waits at the rendezvous: starting the ranks again" in done[0].stderr
    starts = check(tmp_path, unbroken, within=0.02)  # with half the batch for a part of the run
    assert len(starts) == 2
    # Not the one at the end, for which a host that comes would wait.
    assert 0 < starts[1] < 0.9 * SAMPLES * EPOCHS / (2 * BATCH)
    assert summary(tmp_path / "two")["world_size"] == 4


@pytest.mark.slow
def test_a_host_that_is_asked_to_leaves(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    """SIGTERM to a launcher and its ranks: a checkpoint, then they are gone, and the other host goes on: that
    is no restart, of which there is none here.
    """
    flags = ("--nnodes=1:2", "--set=checkpoint.every=1000")
    with two_hosts(tmp_path, *flags) as (_, started):
        end = time.monotonic() + 60
        while not list((tmp_path / "two" / "steps").glob("*3.jsonl")) and time.monotonic() < end:
            time.sleep(0.05)
        send_signal([*started[1].ranks(), started[1].process.pid], signal.SIGTERM)
        here, there = ended(started)
    assert here.code == 0, here.stderr
    assert there.code == 128 + signal.SIGTERM
    assert "SIGTERM: this host leaves after a checkpoint" in there.stderr
    assert "ddprun: a host has left: starting the ranks again\n" in here.stderr
    starts = check(tmp_path, unbroken)
    assert len(starts) == 2
    assert 0 < starts[1] < 0.9 * SAMPLES * EPOCHS / (4 * BATCH)


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    """A rank that always fails, each time in another way, is started --max-restarts times more; the error is
    the rank's own.
    """
    prepare(tmp_path)
    check = "        assert index != 700, f'sample 700 in {os.getpid()}'\n"
    broken = MODULE.replace("        time.sleep(0.001)\n", check)
    (tmp_path / "seen.py").write_text(broken)
    done = ddprun("two.yaml", "--max-restarts=2", "--run-dir=two", cwd=tmp_path)
    assert done.code == 1, done.stderr
    assert done.stderr.count("AssertionError: sample 700") >= 3
    assert [f"restart {i} of 2" in done.stderr for i in (1, 2, 3)] == [True, True, False]
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["status"] == "failed"
