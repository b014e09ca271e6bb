"""Checkpoints in memory, and on hosts that share no disk: a run survives the loss of any one host."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import steps_in
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers
from ddprun.host.dev_shm import SHM_FOLDER
from tests.checkpoint.runs import final
from tests.checkpoint.test_resume import HOOKS, SYNCS
from tests.engine.running import events, summary
from tests.namespaces import Host, hosts, needs_namespaces
from tests.ranks import Finished, Running, ddprun

STEPS = 240

PIPELINE = f"""
model: {{mlp: {{inputs: 64, hidden: [64], outputs: 10}}}}
data: slow.Train
loader: {{batch_size: 8}}
optimizer: {{adamw: {{lr: 0.001}}}}
hooks: HOOKS
sync: SYNC
checkpoint: {{every: 40, memory_every: 5, keep: 2}}
stages: [{{train: {{steps: {STEPS}}}}}]
launch: {{nproc_per_node: 2, timeout_s: 20, max_restarts: 5}}
"""

MODULE = """
import time
from pathlib import Path

from torch.utils.data import Dataset

from ddprun.zoo.data import digits

TRAIN, _ = digits(held_out=0.2, split_seed=0, folder=Path())


class Train(Dataset):
    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        time.sleep(0.0008)
        return TRAIN[index]
"""

POLICIES = [("every_step", "[int8]"), ("{local_sgd: {every: 3}}", "[]")]


def prepare(place: Path, sync: str, hooks: str) -> None:
    place.mkdir(parents=True)
    (place / "slow.py").write_text(MODULE)
    (place / "p.yaml").write_text(PIPELINE.replace("SYNC", sync).replace("HOOKS", hooks))


@pytest.fixture(scope="module", params=POLICIES, ids=lambda param: param[0].strip("{").split(":")[0])
def unbroken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str], dict[int, dict[str, str]]]:
    """Policy and hooks, and the final state of a run with two ranks and one with four, on one host."""
    ends = {}
    for ranks in (2, 4):
        place = tmp_path_factory.mktemp("whole") / "here"
        prepare(place, *request.param)
        flags = [f"--nproc-per-node={ranks}", "--set=checkpoint={every: 0}"]
        done = ddprun("p.yaml", "--run-dir=run", *flags, cwd=place)
        assert done.code == 0, done.stderr
        ends[ranks] = final(place / "run")
    return request.param, ends


def memory_of(launcher: int) -> Path | None:
    """The folder in shared memory of a launcher, which its remover names; None: not yet."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            if child.name() == "sh" and (command := child.cmdline()):
                return Path(command[-1])
    return None


def wait_for_memory(running: Running, step: int) -> Path:
    """Until a checkpoint of this step or a later one is in a launcher's memory; gives its folder."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        memory = memory_of(running.process.pid)
        if memory is not None and (steps_in(memory / "checkpoints") or [0])[0] >= step:
            return memory
        time.sleep(0.02)
    pytest.fail("no checkpoint in memory")


def resumed_steps(said: str) -> list[int]:
    return [int(step) for step in re.findall(r"resuming after step (\d+) from memory", said)]


def test_ranks_restart_from_memory(
    unbroken: tuple[tuple[str, str], dict[int, dict[str, str]]], tmp_path: Path
) -> None:
    """Not from disk, where nothing is yet. Of this user alone; nothing of it is left afterwards."""
    (sync, hooks), ends = unbroken
    place = tmp_path / "here"
    prepare(place, sync, hooks)
    with Running("p.yaml", "--run-dir=run", "--set=checkpoint.every=0", cwd=place) as running:
        memory = wait_for_memory(running, 50)
        assert memory.parent == SHM_FOLDER
        assert memory.stat().st_mode & 0o777 == 0o700
        assert memory.stat().st_uid == os.geteuid()
        if os.geteuid() == 0:  # another user can neither read nor plant anything
            for command in (["ls", str(memory)], ["touch", f"{memory}/checkpoints/step-00009999"]):
                done = subprocess.run(command, user="nobody", capture_output=True, text=True, check=False)
                assert "Permission denied" in done.stderr
        os.kill(running.ranks()[1], signal.SIGKILL)
        ended_well = running.wait()
    assert ended_well.code == 0, ended_well.stderr
    (step,) = resumed_steps(ended_well.stderr)
    assert step >= 50
    assert step % 2 == 0
    assert final(place / "run") == ends[2]
    assert not memory.exists()


COUNTED = """
import os
import time

import torch
from torch import nn
from torch.optim import SGD


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.frozen = nn.Parameter(torch.zeros(10_000_000), requires_grad=False)


class Counted(SGD):
    def step(self, closure=None):
        with open(f"steps-{os.environ['RANK']}", "ab") as file:
            file.write(b".")
        time.sleep(0.005)
        return super().step(closure)
"""


@pytest.mark.parametrize(
    ("every", "sync"), [(6, "every_step"), (1, "every_step"), (5, "{local_sgd: {every: 3}}")]
)
def test_at_most_so_many_steps_are_taken_again(every: int, sync: str, tmp_path: Path) -> None:
    """Though they take less time than a checkpoint does to be written: training waits for it."""
    steps, place = 40 + 15 * every, tmp_path / "here"
    prepare(place, sync, "[]")
    (place / "counted.py").write_text(COUNTED)
    flags = [f"--set=checkpoint={{every: 0, memory_every: {every}}}", "--set=model=counted.Net"]
    flags += ["--set=optimizer={counted.Counted: {lr: 0.01}}", f"--set=stages[0].train.steps={steps}"]
    with Running("p.yaml", "--run-dir=run", *flags, cwd=place) as running:
        memory, files = wait_for_memory(running, 1), [place / f"steps-{rank}" for rank in range(2)]
        ahead, kept, until = 0, 0, time.monotonic() + 1.5
        while ahead <= every and time.monotonic() < until:
            kept = max([kept, *steps_in(memory / "checkpoints")])
            ahead = max(file.stat().st_size for file in files) - kept
        os.kill(running.ranks()[1], signal.SIGKILL)
        done = running.wait()
    assert done.code == 0, done.stderr
    assert resumed_steps(done.stderr)
    again = [file.stat().st_size - steps for file in files]
    assert 0 <= max(again) <= every


def test_memory_goes_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """By a process that waits for its end. The run resumes from disk."""
    place = tmp_path / "here"
    prepare(place, *POLICIES[0])
    with Running("p.yaml", "--run-dir=run", cwd=place) as running:
        memory = wait_for_memory(running, 60)
        for child in psutil.Process(running.process.pid).children():
            if child.name() == "sh":
                child.terminate()  # as where a job is ended, with all of its processes
        running.process.send_signal(signal.SIGKILL)
        running.wait()
    until = time.monotonic() + 20
    while memory.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    stop = "--set=stages[0].train.steps=90"
    done = ddprun("resume", "run", stop, cwd=place)
    assert done.code == 0, done.stderr
    assert "resuming after step 40 from run/checkpoints/step-00000040" in done.stderr


def test_memory_that_is_damaged_is_not_used(tmp_path: Path) -> None:
    """The hash is checked as on disk, and the newest checkpoint there is taken."""
    place = tmp_path / "here"
    prepare(place, *POLICIES[0])
    with Running(
        "p.yaml", "--run-dir=run", "--set=checkpoint={memory_every: 50, every: 20}", cwd=place
    ) as running:
        memory = wait_for_memory(running, 50)
        for found in sorted((memory / "checkpoints").glob("step-*")):  # a newer one may just be named
            weights = found / "shared.safetensors"
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        os.kill(running.ranks()[0], signal.SIGKILL)
        said = running.wait().stderr
    name = int(found.name.removeprefix("step-"))
    assert f"skipping the checkpoint of step {name} in memory: " in said
    assert "its SHA-256 differs (deleted)" in said
    assert "resuming after step 40 from run/checkpoints/" in said or "step 60 from run" in said
    assert not resumed_steps(said)


def test_memory_without_a_launcher_is_told(tmp_path: Path) -> None:
    """Without restarts, too: nothing would read it. That of a launcher which has started this one is its."""
    place = tmp_path / "here"
    prepare(place, *POLICIES[0])
    flags = ["--run-dir=run", "--set=launch.max_restarts=0", "--set=stages[0].train.steps=8"]
    done = ddprun("p.yaml", *flags, cwd=place, environment={"DDPRUN_MEMORY": str(tmp_path)})
    assert done.code == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    told = "checkpoint.memory_every is not used: it needs max_restarts, ddprun as the launcher, and /dev/shm"
    assert done.stderr.count(told) == 1


@needs_namespaces
@pytest.mark.netns
def test_memory_that_is_too_small_is_told_and_costs_nothing(tmp_path: Path) -> None:
    """Once."""
    prepare(tmp_path / "here", *POLICIES[0])
    small = "mount -t tmpfs -o size=36k tmpfs /dev/shm"
    with hosts(1) as (host,):
        flags = ["--run-dir=run", "--set=stages[0].train.steps=30"]
        with Running("p.yaml", *flags, cwd=tmp_path / "here", host=host, setup=small) as running:
            done = running.wait()
    assert done.code == 0, done.stderr
    assert done.stderr.count("no checkpoint in memory at step 2: rank ") == 1, done.stderr
    assert done.stderr.count("No space left on device") == 1


@pytest.mark.parametrize("lost", range(4))
def test_what_one_host_loses_the_others_have(lost: int) -> None:
    """For each number of hosts and ranks on them; files travel in one order, from those who have them."""
    for leaders in [(0, 1), (0, 0, 2, 2), (0, 1, 1, 3), (0, 0, 2, 3, 3, 5)]:
        places = [CheckpointLocation(Path(), rank, leaders) for rank in range(len(leaders))]
        kept = places[0].files_kept()
        assert all(place.files_kept() == kept for place in places)
        gone = places[0].folder_leaders[lost % len(kept)]
        left = {leader: files for leader, files in kept.items() if leader != gone}
        everything = set(folder.file_names(folder.part_names(len(leaders))))
        assert set().union(*left.values()) == everything
        held = {**left, gone: set[str]()}
        needed = places[0].files_needed(len(leaders))
        for source, target, names in plan_transfers(needed, held):
            assert target == gone
            assert set(names) <= held[source]
            held[target] |= set(names)
        assert all(needed[leader] <= held[leader] for leader in held)


# Two hosts, each with a disk of its own.


def start(place: Path, host: Host, *flags: str) -> Running:
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=two"]
    own = {"GLOO_SOCKET_IFNAME": "e0"}
    words = ["p.yaml", "--run-dir=run", "--or-resume", *meeting, *flags]
    return Running(*words, cwd=place / host.name, environment=own, host=host)


@contextmanager
def two_hosts(place: Path, sync: str, hooks: str, *flags: str) -> Iterator[tuple[list[Host], list[Running]]]:
    with hosts(2) as made, contextlib.ExitStack() as stack:
        for host in made:
            if not (place / host.name).is_symlink():
                prepare(place / host.name, sync, hooks)
        yield made, [stack.enter_context(start(place, host, *flags)) for host in made]


def wait_for_disk(place: Path, step: int) -> None:
    until = time.monotonic() + 60
    while (steps_in(place / "run" / "checkpoints") or [0])[0] < step:
        assert time.monotonic() < until, "no checkpoint on disk"
        time.sleep(0.02)


def ended(both: list[Running]) -> list[Finished]:
    return [running.wait(100) for running in both]


@needs_namespaces
@pytest.mark.netns
def test_a_host_is_lost_with_its_disk(
    unbroken: tuple[tuple[str, str], dict[int, dict[str, str]]], tmp_path: Path
) -> None:
    """Both launchers are killed. What the lost host had, the other one sends it: the same bits at the end."""
    (sync, hooks), ends = unbroken
    flags, lost = ["--set=checkpoint.memory_every=0"], POLICIES.index((sync, hooks))
    with two_hosts(tmp_path, sync, hooks, *flags) as (made, both):
        for host in made:
            wait_for_disk(tmp_path / host.name, 80)
        for running in both:
            running.process.send_signal(signal.SIGKILL)
        ended(both)
        shutil.rmtree(tmp_path / made[lost].name / "run")
        with contextlib.ExitStack() as stack:
            again = ended([stack.enter_context(start(tmp_path, host, *flags)) for host in made])
    assert [one.code for one in again] == [0, 0], [one.stderr for one in again]
    said = "".join(one.stderr for one in again)
    assert re.search(r"resuming after step \d+ from run/checkpoints/step-", said), said
    runs = [tmp_path / host.name / "run" for host in made]
    assert [final(run) for run in runs] == [ends[4]] * 2
    (shown,) = [run for run in runs if (run / "summary.json").exists()]  # rank 0 may have moved
    assert summary(shown)["steps"] == STEPS


@needs_namespaces
@pytest.mark.netns
def test_two_hosts_restart_from_memory(
    unbroken: tuple[tuple[str, str], dict[int, dict[str, str]]], tmp_path: Path
) -> None:
    """After a rank of the second one is killed."""
    (sync, hooks), ends = unbroken
    with two_hosts(tmp_path, sync, hooks, "--set=checkpoint.every=0") as (_, both):
        for running in both:
            wait_for_memory(running, 60)
        os.kill(both[1].ranks()[0], signal.SIGKILL)
        done = ended(both)
    assert [one.code for one in done] == [0, 0], [one.stderr for one in done]
    (step,) = resumed_steps(done[0].stderr + done[1].stderr)
    assert step >= 55
    for host in ("node0", "node1"):
        assert final(tmp_path / host / "run") == ends[4]


@needs_namespaces
@pytest.mark.netns
def test_a_host_takes_over_from_memory_what_another_one_had(tmp_path: Path) -> None:
    """The host of the last ranks is lost. The other, with which it shared a disk, continues alone, from the
    copies in its memory.
    """
    flags = ["--nnodes=1:2", "--set=checkpoint.every=0"]
    (tmp_path / "node1").symlink_to("node0")
    with two_hosts(tmp_path, *POLICIES[0], *flags) as (_, both):
        for running in both:
            wait_for_memory(running, 60)
        both[1].process.send_signal(signal.SIGKILL)
        both[1].wait()
        done = both[0].wait(100)
    assert done.code == 0, done.stderr
    (step,) = resumed_steps(done.stderr)
    assert step >= 55
    (resumed,) = [event for event in events(tmp_path / "node0" / "run") if event["event"] == "resumed"]
    assert (resumed["world_size_before"], resumed["checkpoint"]) == (4, "memory")
    found = summary(tmp_path / "node0" / "run")
    assert (found["steps"], found["world_size"]) == (STEPS, 2)


@needs_namespaces
@pytest.mark.netns
def test_a_host_that_is_not_there_is_missed(tmp_path: Path) -> None:
    """Its files are in no other place. The run does not start over; nothing is renamed or deleted."""
    stop = "--set=stages[0].train.steps=45"
    with two_hosts(tmp_path, *POLICIES[0], stop) as (_, both):
        done = ended(both)
        assert [one.code for one in done] == [0, 0], done[0].stderr
        run = tmp_path / "node0" / "run"
        for copy in run.glob("checkpoints/*/rank-00002.json"):
            copy.unlink()
        before = sorted((run / "checkpoints").rglob("*"))
        alone = ddprun("resume", "run", "--nnodes=1", "--nproc-per-node=2", cwd=run.parent)
    assert alone.code == 2, alone.stderr
    assert "can be used by all ranks; that of step 45: no host has an intact copy of its" in alone.stderr
    assert sorted((run / "checkpoints").rglob("*")) == before


def unbroken_end(place: Path, sync: str, hooks: str) -> dict[str, str]:
    """The final state of a run of four ranks on one host, made once for a policy with a stack."""
    if not place.exists():
        prepare(place, sync, hooks)
        flags = ["--nproc-per-node=4", "--set=checkpoint={every: 0}"]
        done = ddprun("p.yaml", "--run-dir=run", *flags, cwd=place)
        assert done.code == 0, done.stderr
    return final(place / "run")


@pytest.fixture(scope="session")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


@needs_namespaces
@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_whatever_is_killed_the_end_is_the_same(number: int, ends: Path, tmp_path: Path) -> None:
    """A rank, a launcher, or rank 0's host with its disk, at a random moment of every policy with every stack
    of hooks, on two hosts with disks of their own.
    """
    draw = random.Random(number)
    kind = ("rank", "launcher", "host of rank 0")[number % 3]
    sync = SYNCS[number % len(SYNCS)].replace("HOSTS", "2")
    hooks = HOOKS[number // len(SYNCS) % len(HOOKS)].replace("HOSTS", "2")
    flags = [f"--set=checkpoint.memory_every={draw.choice((3, 5, 7))}"]
    with two_hosts(tmp_path, sync, hooks, *flags) as (made, both):
        moment = draw.randrange(5, STEPS - 100)
        memories = [wait_for_memory(running, moment) for running in both]
        runs = [tmp_path / host.name / "run" for host in made]
        if kind == "rank":
            os.kill(draw.choice(draw.choice(both).ranks()), signal.SIGKILL)
        else:
            first = next(index for index, run in enumerate(runs) if (run / "events.jsonl").exists())
            lost = first if kind == "host of rank 0" else draw.randrange(2)
            both[lost].process.send_signal(signal.SIGKILL)
            both[lost].wait()
            if kind == "host of rank 0":
                shutil.rmtree(runs[lost])
            with contextlib.ExitStack() as stack:
                if lost == 0:  # the host of the rendezvous
                    assert both[1].wait().code == 1
                    both[1] = stack.enter_context(start(tmp_path, made[1], *flags))
                both[lost] = stack.enter_context(start(tmp_path, made[lost], *flags))
                done = ended(both)
        if kind == "rank":
            done = ended(both)
    said = "".join(one.stderr for one in done)
    assert [one.code for one in done] == [0, 0], said
    print(kind, sync, hooks, moment, *re.findall(r"(?:resuming after step|no intact checkpoint).*", said))
    expected = unbroken_end(ends / f"{sync} {hooks}".replace("/", "_"), sync, hooks)
    assert [final(run) for run in runs] == [expected] * 2, (kind, sync, hooks, said)
    assert not any(memory.exists() for memory in memories)
