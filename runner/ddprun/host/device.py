"""Where a rank runs: its device and the backend between ranks."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ddprun.config import LoadedPipeline


def gpu_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name(device: torch.device) -> str | None:
    """What a GPU, or this host's processor, is called; None if the host does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else None


def default_rank_count(loaded: LoadedPipeline) -> int:
    """Ranks for this host where neither flag nor file says: one per GPU, or 2 on CPUs."""
    gpus = gpu_count()
    return gpus if loaded.pipeline.launch.device != "cpu" and gpus else 2


def rank_device(loaded: LoadedPipeline, local_rank: int) -> torch.device:
    """The device of a rank of this host; `device: auto` takes CUDA where there is a GPU. Raises PipelineError
    if there is none and CUDA or NCCL is wanted.

    A launcher may show each of its ranks one GPU alone (`srun --gpus-per-task=1`): which it is, only its
    identifier says (`gpu_identifier`).
    """
    launch, gpus = loaded.pipeline.launch, gpu_count()
    if launch.device == "cuda" and not gpus:
        text = "cuda is asked for, but torch sees no GPU here"
        raise loaded.error("launch.device", text, "write auto or cpu")
    if launch.device == "cpu" or not gpus:
        if launch.backend == "nccl":
            text = "nccl needs GPUs, but torch sees none here"
            raise loaded.error("launch.backend", text, "write auto or gloo")
        return torch.device("cpu")
    return torch.device("cuda", local_rank % gpus)


def gpu_identifier(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def choose_backend(loaded: LoadedPipeline, gpus: Sequence[tuple[str, str | None]]) -> str:
    """The backend of all ranks, by the host and the GPU's identifier (None: a CPU) of each, in rank order.
    `backend: auto` takes NCCL where every rank has a GPU of its own, else Gloo.

    Raises PipelineError, on all ranks alike, if only some have a GPU, or NCCL is wanted and two have the same
    one.
    """

    def named(rank: int) -> str:
        return f"rank {rank} ({gpus[rank][0]})"

    wanted = loaded.pipeline.launch.backend
    owners: dict[str | None, int] = {}
    for rank, (_, gpu) in enumerate(gpus):
        owner = owners.setdefault(gpu, rank)
        if owner != rank and gpu is not None and wanted == "nccl":
            text = f"nccl needs a GPU for each rank; {named(owner)} and {named(rank)} have the same one"
            hint = "start fewer ranks there, or write gloo, which lets ranks share a GPU"
            raise loaded.error("launch.backend", text, hint)
    on_cpu = owners.pop(None, None)
    if on_cpu is not None and owners:
        text = f"{named(min(owners.values()))} sees a GPU, and {named(on_cpu)} sees none"
        raise loaded.error("launch.device", text, "write cpu, or start ranks only where there are GPUs")
    return "nccl" if len(owners) == len(gpus) and wanted != "gloo" else "gloo"
