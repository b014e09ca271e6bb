"""Whether `/dev/shm` has room for what the ranks of a host put there.

Checkpoints in memory (`checkpoint.memory_every`) are there.
Processes that load data (`loader.workers`) hand batches over in it, and their queues keep semaphores there.
Memory that ranks share is not there: it has no name (`ddprun_hooks.shm.setup`), and so no limit of this
kind. NCCL uses it between the GPUs of one host.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ddprun.units import format_binary_bytes, format_count

SHM_FOLDER = Path("/dev/shm")
PAGE_BYTES = 4096
PREFETCHED_BATCHES = 2  # batches that torch's DataLoader has each loading process make in advance
_LOADER_SEMAPHORES = 8
# Of an event and a queue, and of each loading process's queue (Python's multiprocessing); a page each.
_WORKER_SEMAPHORES = 3
ROOM_FOR_NCCL_BYTES = 1 << 30  # commonly enough for NCCL between the GPUs of a host

SHM_ADVICE = (
    "docker run --shm-size=1g (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory at "
    "/dev/shm; else mount -o remount,size=1g /dev/shm"
)


class ShmSpace(NamedTuple):
    """Bytes of `/dev/shm`."""

    total: int
    free: int


class ShmShortage(NamedTuple):
    """There is not enough room."""

    message: str  # what is missing, in one line
    is_fatal: bool  # loading processes cannot even be started; else batches that are large may not fit


def shm_space(folder: Path = SHM_FOLDER) -> ShmSpace | None:
    """Total and free bytes of a folder's file system; None: this host has no such folder."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return ShmSpace(found.total, found.free)


def worker_startup_bytes(ranks: int, workers: int) -> int:
    """What loading processes need before the first batch; `workers` of them for each rank of the host."""
    return ranks * (_LOADER_SEMAPHORES + _WORKER_SEMAPHORES * workers) * PAGE_BYTES if workers else 0


def worker_needed_bytes(ranks: int, workers: int, tensor_bytes: Iterable[int]) -> int:
    """What they need with the batches that they make in advance, each tensor of which takes whole pages."""
    batch = sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in tensor_bytes)
    return worker_startup_bytes(ranks, workers) + ranks * workers * PREFETCHED_BATCHES * batch


def find_shm_shortage(
    ranks: int, workers: int, tensor_bytes: Iterable[int], space: ShmSpace | None, *, nccl: bool
) -> ShmShortage | None:
    """What so many ranks on the host, with so many loading processes (workers) each and, maybe, NCCL between
    their GPUs, would miss; None: nothing, or the host has no `/dev/shm`.
    """
    if space is None:
        return None
    start = f"/dev/shm has {format_binary_bytes(space.free)} free,"
    least, needed = worker_startup_bytes(ranks, workers), worker_needed_bytes(ranks, workers, tensor_bytes)
    who = f"{workers} DataLoader workers for each of {format_count(ranks, 'rank')}"
    if space.free < least:
        why = f"too little to start {who}, which need {format_binary_bytes(least)} for their queues alone "
        why += f"and about {format_binary_bytes(needed)} with batches"
        return ShmShortage(f"{start} {why}", is_fatal=True)
    if space.free < needed:
        why = f"but {who} need about {format_binary_bytes(needed)} for batches that are loaded in advance; "
        why += "a run whose batches do not fit fails"
        return ShmShortage(f"{start} {why}", is_fatal=False)
    if nccl and ranks > 1 and space.free < ROOM_FOR_NCCL_BYTES:
        why = f"which may be too little for NCCL between {ranks} GPUs"
        return ShmShortage(f"{start} {why}", is_fatal=False)
    return None
