"""Room in `/dev/shm` for what loading processes put there, and what a run says when there is too little."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddprun.config import load
from ddprun.engine.build import build_datasets
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog
from ddprun.engine.feeds import build_training_feeds
from ddprun.engine.setup import _check_shared_memory
from ddprun.host import dev_shm
from ddprun.host.dev_shm import (
    PAGE_BYTES,
    ShmSpace,
    find_shm_shortage,
    shm_space,
    worker_needed_bytes,
    worker_startup_bytes,
)
from ddprun.parallel.ranks import RankEnvironment
from tests.namespaces import hosts, needs_namespaces
from tests.ranks import Finished, Running

PIPELINE = """
model:
  mlp: {{inputs: 64, outputs: 10}}
data: digits
loader: {{batch_size: {batch}, workers: {workers}}}
optimizer: sgd
stages:
  - train: {{steps: 4}}
"""


def test_what_is_needed_is_whole_pages() -> None:
    """Nothing without loading processes; else semaphores, and two batches for each of them."""
    assert worker_startup_bytes(4, 0) == worker_needed_bytes(4, 0, [10**9]) == 0
    assert worker_startup_bytes(2, 2) == 28 * PAGE_BYTES
    assert worker_needed_bytes(2, 2, [1, 4097]) == (28 + 2 * 2 * 2 * 3) * PAGE_BYTES


@pytest.mark.parametrize(
    ("free", "certain"),
    [(28 * 4096 - 1, True), (28 * 4096, False), (36 * 4096 - 1, False), (36 * 4096, None)],
)
def test_a_shortage_is_certain_or_likely(free: int, certain: bool | None) -> None:
    """Certain is one that keeps loading processes from starting."""
    found = find_shm_shortage(2, 2, [1], ShmSpace(1 << 20, free), nccl=False)
    assert (found and found.is_fatal) == certain
    assert find_shm_shortage(2, 0, [1], ShmSpace(0, 0), nccl=False) is None
    assert find_shm_shortage(2, 2, [1], None, nccl=True) is None


def test_the_room_that_there_is(tmp_path: Path) -> None:
    """Of a folder that is there, or is not."""
    found = shm_space(tmp_path)
    assert found is not None
    assert 0 < found.free <= found.total
    assert shm_space(tmp_path / "none") is None


def run_with(folder: Path, size: str, *, workers: int, batch: int, ranks: int) -> Finished:
    """Run a pipeline with a `/dev/shm` of a size."""
    (folder / "p.yaml").write_text(PIPELINE.format(workers=workers, batch=batch))
    setup = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    flags = [f"--nproc-per-node={ranks}", "--run-dir=run"]
    with hosts(1) as (host,), Running("p.yaml", *flags, cwd=folder, host=host, setup=setup) as running:
        return running.wait(90)


WRAPPED = """
from collections import UserDict
from dataclasses import dataclass

import torch
from torch.utils.data import default_collate


@dataclass
class Batch:
    image: torch.Tensor
    label: torch.Tensor


def in_object(samples):
    return Batch(*default_collate(samples))


def in_mapping(samples):
    return UserDict(zip(("image", "label"), default_collate(samples)))


def large():
    return torch.utils.data.TensorDataset(torch.zeros(64, 1000), torch.zeros(64, dtype=torch.long))
"""


@pytest.mark.parametrize("collate", ["in_object", "in_mapping"])
def test_all_tensors_of_the_largest_batches_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], collate: str
) -> None:
    """In whatever a collate function puts them, and of a stage's own data, too."""
    name = f"wrapped_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(WRAPPED)
    text = PIPELINE.format(batch=16, workers=2).replace(
        "workers: 2", f"workers: 2, collate: {name}.{collate}"
    )
    text = text.replace("steps: 4", f"steps: 4, data: {name}.large")
    (tmp_path / "p.yaml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load(tmp_path / "p.yaml")
    feeds = build_training_feeds(loaded, build_datasets(loaded)[0], rank=0, world_size=1)
    needed = worker_needed_bytes(1, 2, [16 * 1000 * 4, 16 * 8])
    for free, told in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(dev_shm, "shm_space", lambda free=free: ShmSpace(1 << 30, free))
        ranks = make_ranks_and_watchdog(RankEnvironment(0, 1, 0, 1), 60.0, FailureContext())
        _check_shared_memory(loaded, feeds, ranks, "gloo")
        assert capfd.readouterr().err.count("ddprun: warning: ") == told


@needs_namespaces
@pytest.mark.netns
def test_loading_processes_that_cannot_start_are_bad_input(tmp_path: Path) -> None:
    """64 KiB: once on the screen, at the line of the file, with what to do."""
    done = run_with(tmp_path, "64k", workers=2, batch=16, ranks=2)
    assert done.code == 2, done.stderr
    assert done.stderr.count("p.yaml:5:") == 1
    assert "node0: /dev/shm has 64 KiB free, too little to start 2 DataLoader workers" in done.stderr
    assert "docker run --shm-size=1g" in done.stderr
    assert "Traceback" not in done.stderr


@needs_namespaces
@pytest.mark.netns
def test_batches_that_may_not_fit_are_warned_about_once(tmp_path: Path) -> None:
    """The run goes on, since it may well have room enough."""
    done = run_with(tmp_path, "512k", workers=2, batch=256, ranks=2)
    assert done.code == 0, done.stderr
    assert done.stderr.count("ddprun: warning: node0: /dev/shm has 512 KiB free, but") == 1


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize(("size", "workers"), [("64k", 0), ("1m", 2)])
def test_nothing_is_said_where_there_is_room(tmp_path: Path, size: str, workers: int) -> None:
    """A run without loading processes needs none at all."""
    done = run_with(tmp_path, size, workers=workers, batch=16, ranks=2)
    assert done.code == 0, done.stderr
    assert "/dev/shm" not in done.stderr


@needs_namespaces
@pytest.mark.netns
def test_the_certain_need_is_what_python_really_takes(tmp_path: Path) -> None:
    """One page less than `worker_startup_bytes`, and a loader's queues cannot be made; with it they can."""
    least = worker_startup_bytes(1, 3)
    script = (
        "import torch.multiprocessing as m\nkept = [m.Event(), m.Queue(), *(m.Queue() for _ in range(3))]\n"
    )
    for size, works in ((least, True), (least - dev_shm.PAGE_BYTES, False)):
        setup = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "--mount", "sh", "-ec", setup, "sh", sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        assert (done.returncode == 0) == works, done.stderr
        assert works or "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "free", "short"), [(8, 64 << 20, True), (8, 2 << 30, False), (1, 4096, False)]
)
def test_nccl_wants_room_between_gpus(ranks: int, free: int, short: bool) -> None:
    """A container's 64 MiB may be too little; said, and no more, since it depends on the GPUs' links."""
    found = find_shm_shortage(ranks, 0, [], ShmSpace(free, free), nccl=True)
    assert (found is not None) == short
    assert found is None or (not found.is_fatal and "64 MiB free" in found.message)
