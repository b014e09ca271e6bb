"""Where a rank runs: its device and the backend between ranks."""

from dataclasses import dataclass

import torch

from ddprun.config import Loaded, PipelineError


@dataclass(frozen=True, slots=True)
class Place:
    """The device of one rank and how it talks to the others."""

    device: torch.device
    backend: str
    """`gloo` or `nccl`."""


def gpu_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def default_ranks(loaded: Loaded) -> int:
    """Ranks for this host where neither flag nor file says: one per GPU, or 2 on CPUs."""
    gpus = gpu_count()
    return gpus if loaded.pipeline.launch.device != "cpu" and gpus else 2


def place_of(loaded: Loaded, local_rank: int, local_ranks: int) -> Place:
    """Choose the device and the backend of one rank.

    `device: auto` takes CUDA where there is a GPU. `backend: auto` takes NCCL where every rank of the host
    has a GPU of its own, else Gloo.

    Raises:
        PipelineError: CUDA without a GPU, or NCCL with more ranks than GPUs.
    """
    launch, gpus = loaded.pipeline.launch, gpu_count()

    def refused(key: str, message: str, do: str) -> PipelineError:
        return loaded.error(key, message, do)

    if launch.device == "cuda" and not gpus:
        raise refused("launch.device", "cuda is asked for, but torch sees no GPU here", "write auto or cpu")
    if launch.device == "cpu" or not gpus:
        if launch.backend == "nccl":
            raise refused("launch.backend", "nccl needs GPUs, but torch sees none here", "write auto or gloo")
        return Place(torch.device("cpu"), "gloo")
    if launch.backend == "nccl" and local_ranks > gpus:
        raise refused(
            "launch.backend",
            f"nccl needs a GPU for each rank; this host has {local_ranks} ranks and "
            f"{gpus} GPU{'s' if gpus > 1 else ''}",
            f"start at most {gpus} ranks here, or write gloo, which lets ranks share a GPU",
        )
    backend = launch.backend
    if backend == "auto":
        backend = "nccl" if local_ranks <= gpus else "gloo"
    return Place(torch.device("cuda", local_rank % gpus), backend)
