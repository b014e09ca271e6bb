"""Ranks write their parts beside each other; rank 0 makes a checkpoint of them, or says why there is none."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import EncodedState, encode_state
from ddprun.checkpoint.location import CheckpointLocation
from ddprun.checkpoint.writer import CheckpointOutcome, CheckpointWriter
from ddprun.engine.checkpoint_state import report_checkpoint_outcomes
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.parallel.ranks import RankEnvironment
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.gpu import PinnedStaging
from tests.fake_gpu import FakeGpu
from tests.ranks import as_processes

RANKS = 3


def writers(root: Path, hold: threading.Event | None = None, **changes: Any) -> list[CheckpointWriter]:
    store = dist.HashStore()
    settings: dict[str, Any] = {"token": "t", "layout": "", "keep": 2, "control": None, "timeout_s": 30.0}
    settings |= {"every": 0, **changes}
    slow: dict[str, Any] = {"before_write": hold.wait} if hold is not None else {}
    places = [CheckpointLocation(root, rank, (0,) * RANKS) for rank in range(RANKS)]
    return [
        CheckpointWriter(place, store, **settings, **(slow if place.rank == 2 else {})) for place in places
    ]


def parts(rank: int, numel: int = 1000) -> dict[str, EncodedState]:
    own = {
        folder.rank_part_name(rank): encode_state({"rank": rank, "own": torch.full((numel,), float(rank))})
    }
    return own if rank else {"shared": encode_state({"shared": torch.arange(numel)}), **own}


def everyone(ranks: list[CheckpointWriter], step: int, **options: Any) -> CheckpointOutcome:
    threads = [
        threading.Thread(target=writer.enqueue, args=(step, parts(rank)), kwargs=options)
        for rank, writer in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ranks[0].outcomes.get(timeout=30)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def close(ranks: list[CheckpointWriter]) -> None:
    for writer in ranks:
        writer.close()


def test_all_parts_are_one_checkpoint(tmp_path: Path) -> None:
    """With everybody's files; only the newest are kept, and at the end nothing that was not finished."""
    ranks = writers(tmp_path)
    folder.unfinished_checkpoint_path(tmp_path, 5, "before-0").mkdir()
    for step in (10, 20, 30):
        outcome = everyone(ranks, step, wait=step == 30)
        assert outcome.problem is None
        assert outcome.checkpoint is not None
    assert folder.steps_in(tmp_path) == [30, 20]
    found = folder.open_checkpoint(tmp_path, 30)
    folder.verify(found, found.files)
    for rank in range(RANKS):
        assert folder.read_part(found, folder.rank_part_name(rank))["rank"] == rank
    close(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_one_that_comes_too_soon_is_left_out(tmp_path: Path) -> None:
    """A rank whose disk is slow: the step is named, nothing is left behind, the next one is written."""
    hold = threading.Event()
    ranks = writers(tmp_path, hold)
    for step in (10, 20):
        for rank, writer in enumerate(ranks):
            writer.enqueue(step, parts(rank))
    hold.set()
    outcomes = [ranks[0].outcomes.get(timeout=30) for _ in range(2)]
    assert outcomes[0].checkpoint is not None
    assert outcomes[1].problem == "rank 0 was still writing the checkpoint of step 10"
    assert everyone(ranks, 30).checkpoint is not None
    close(ranks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000030"]


def test_one_that_comes_too_soon_is_not_missed_where_the_end_writes_it(tmp_path: Path) -> None:
    """The run's last step is due, and the checkpoint at the end is of that step, too."""
    hold, said = threading.Event(), list[str]()
    ranks = writers(tmp_path, hold)
    for step in (10, 20):
        for rank, writer in enumerate(ranks):
            writer.enqueue(step, parts(rank))
    hold.set()
    first = everyone(ranks, 20, wait=True)
    assert first.checkpoint is not None
    close(ranks)
    session: Any = mock.Mock()
    session.reporter.note = said.append
    session.runtime.memory_checkpoints, session.runtime.checkpoints = None, ranks[0]
    session.runtime.display_path = Path
    report_checkpoint_outcomes(session)
    assert said == []
    assert (tmp_path / "step-00000020").is_dir()


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    """After a time; the others' parts are deleted."""
    ranks = writers(tmp_path, timeout_s=0.3)
    for rank in (0, 1):
        ranks[rank].enqueue(10, parts(rank))
    assert ranks[0].outcomes.get(timeout=30).problem == "rank 2 has not written its part within 0.3 s"
    close(ranks)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_by_something_else_than_the_disk_is_named_at_once(tmp_path: Path) -> None:
    """Such as too little memory, of which Python says nothing more."""

    def fail(_: object) -> None:
        raise MemoryError

    ranks = writers(tmp_path)
    ranks[1].find_nonfinite = fail
    assert everyone(ranks, 10).problem == "rank 1 cannot write it: MemoryError()"
    close(ranks)
    assert folder.steps_in(tmp_path) == []


@pytest.mark.parametrize("error", [MemoryError(), PermissionError("no")])
def test_older_ones_that_cannot_be_deleted_end_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """The checkpoint is there, rank 0 says what is wrong, and so training goes on, and ends."""
    monkeypatch.setattr(folder, "prune", mock.Mock(side_effect=error))
    ranks = writers(tmp_path)
    for step in (10, 20):
        assert everyone(ranks, step, wait=True).checkpoint is not None
    close(ranks)
    said = f"ddprun: rank 0: after the checkpoint of step 20: {error!r}\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no small file system here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_older_ones(small_disk: Path) -> None:
    """It says so, deletes what it has begun, and goes on when there is room again."""
    ranks = writers(small_disk)
    assert everyone(ranks, 10).problem is None
    hog = small_disk / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    outcome = everyone(ranks, 20)
    assert "cannot write it: " in str(outcome.problem)
    assert "No space left" in str(outcome.problem)
    assert folder.steps_in(small_disk) == [10]
    found = folder.open_checkpoint(small_disk, 10)
    folder.verify(found, found.files)
    assert sorted(path.name for path in small_disk.iterdir()) == ["hog", "step-00000010"]
    hog.unlink()
    assert everyone(ranks, 30).problem is None
    close(ranks)


HOSTS = (0, 0, 2, 3, 3)
"""Of five ranks on three hosts, the first rank of the host."""


def on_three_hosts(root: Path) -> list[str | None]:
    """What became of two checkpoints, the first of which host 2 cannot write whole, on rank 0."""
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), 60.0, FailureContext())
    ranks.connect_store()
    ranks.join(torch.device("cpu"), "gloo")
    control, other = (open_control_channel(timedelta(seconds=20)) for _ in range(2))
    rank = ranks.rank
    disk = root / str(HOSTS[rank])
    place = CheckpointLocation(disk, rank, HOSTS)
    over = threading.Semaphore(0)
    settings: dict[str, Any] = {"token": "t", "layout": "", "keep": 1, "control": control, "timeout_s": 20.0}
    settings["every"] = 0
    writer = CheckpointWriter(place, ranks.store, after_write=lambda _: over.release(), **settings)
    if rank == 2:  # a folder in the place of a file of the host before it
        unfinished = folder.unfinished_checkpoint_path(disk, 10, "t-0")
        (unfinished / folder.file_names([folder.rank_part_name(1)])[0]).mkdir(parents=True)
    outcomes: list[str | None] = []
    for step in (10, 20):
        other.barrier()
        own = parts(rank)
        own |= {"shared": encode_state({"shared": torch.arange(1000)})} if place.leads else {}
        writer.enqueue(step, own)
        assert over.acquire(timeout=30)
        other.barrier()
        assert folder.steps_in(disk) == ([] if step == 10 else [20])
        outcomes += [writer.outcomes.get(timeout=30).problem] if rank == 0 else []
    writer.close()
    return outcomes


def test_each_host_keeps_its_part_and_a_copy_of_the_one_before_it(tmp_path: Path) -> None:
    """A host that cannot write makes the others wait for nothing. Older ones go where all have the next."""
    (first, second), *_ = as_processes(len(HOSTS), on_three_hosts, tmp_path)
    assert "rank 2 cannot write it: " in str(first)
    assert second is None
    digests = set()
    for host, expected in {"0": (0, 1, 3, 4), "2": (0, 1, 2), "3": (2, 3, 4)}.items():
        assert folder.steps_in(tmp_path / host) == [20]
        found = folder.open_checkpoint(tmp_path / host, 20)
        here = folder.file_names(["shared", *map(folder.rank_part_name, expected)])
        assert sorted(path.name for path in found.path.iterdir()) == sorted([*here, folder.MANIFEST])
        folder.verify(found, here)
        assert folder.read_part(found, "shared")["shared"].tolist() == list(range(1000))
        assert folder.read_part(found, folder.rank_part_name(expected[1]))["rank"] == expected[1]
        digests.add(found.digest)
    assert len(digests) == 1


def test_writing_goes_on_beside_training(tmp_path: Path) -> None:
    """`enqueue` returns before anything is on disk."""
    ranks = writers(tmp_path)
    started = time.monotonic()
    for rank, writer in enumerate(ranks[:2]):
        writer.enqueue(10, parts(rank))
    assert folder.steps_in(tmp_path) == [], "rank 2 has not come yet"
    assert time.monotonic() - started < 20
    ranks[2].enqueue(10, parts(2))
    assert ranks[0].outcomes.get(timeout=30).checkpoint is not None
    close(ranks)


def test_every_rank_hears_when_one_is_over(tmp_path: Path) -> None:
    """Written or left out: so a launcher can wait for a checkpoint, whichever of its ranks it asks."""
    heard: list[int] = []
    ranks = writers(tmp_path, after_write=heard.append)
    everyone(ranks, 10)
    wait_for(lambda: len(heard) == RANKS)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the folder was")
    assert everyone(ranks, 20).problem is not None
    wait_for(lambda: len(heard) == 2 * RANKS)
    close(ranks)


class Under:
    """Copies that are under way: they are there once somebody has waited."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.released = tensors, 0

    def wait(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(7.0)

    def release(self) -> None:
        self.released += 1


def test_the_writing_thread_waits_for_what_a_gpu_still_copies(tmp_path: Path) -> None:
    """And gives the memory back, also of a checkpoint that is left out."""
    hold = threading.Event()
    ranks = writers(tmp_path, hold)
    own = [parts(rank) for rank in range(RANKS)]
    copies = [Under([tensor for state in part.values() for tensor in state.tensors.values()]) for part in own]
    for rank, writer in enumerate(ranks):
        writer.enqueue(10, own[rank], staged=copies[rank])  # type: ignore[arg-type]
    late = Under([])
    ranks[2].enqueue(20, parts(2), staged=late)  # type: ignore[arg-type]
    hold.set()
    assert ranks[0].outcomes.get(timeout=30).problem is None
    wait_for(lambda: all(one.released == 1 for one in [*copies, late]))
    found = folder.open_checkpoint(tmp_path, 10)
    for rank in range(RANKS):
        state = folder.read_part(found, folder.rank_part_name(rank))
        assert bool((state["own"] == 7.0).all())
    close(ranks)


def test_page_locked_memory_is_used_again_once_it_is_written() -> None:
    """Nothing is copied into memory from which a checkpoint is still being written."""
    gpu = FakeGpu()
    staging = PinnedStaging(gpu)
    weights = {f"w{index}": torch.randn(1000, index + 1) for index in range(40)}
    for round_number in range(3):
        assert staging.try_acquire()
        assert not staging.try_acquire(), "it is in use"
        copied = {name: staging.copy(tensor) for name, tensor in weights.items()}
        staging.block_current_stream()
        staging.wait()
        assert all(torch.equal(copied[name], tensor) for name, tensor in weights.items())
        assert all(tensor.data_ptr() % 8 == 0 for tensor in copied.values())
        save(copied)  # they share storage, and overlap nowhere
        staging.release()
        assert gpu.pinned_bytes == 64 << 20, f"round {round_number}"
    assert gpu.log[-2:] == [("stream 0", "waits for", "compute"), ("compute", "waits for", "stream 0")]
