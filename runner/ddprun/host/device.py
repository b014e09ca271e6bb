"""Where a rank runs: its device and the backend between ranks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ddprun.config import LoadedPipeline
from ddprun.units import format_count


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


class RankLaunchFacts(NamedTuple):
    """What one rank has, and what its file or command line asks for; ranks exchange them before they join."""

    host: str
    wanted_device: str  # `launch.device`
    wanted_backend: str  # `launch.backend`
    gpu_uuid: str | None  # identifier of its GPU; None: it runs on a CPU


def check_launch(loaded: LoadedPipeline, local_ranks: int) -> None:
    """Refuse, before ranks are started, what this host cannot give so many of them; raises PipelineError."""
    gpus, on_gpu = gpu_count(), device_of(loaded, 0).type == "cuda"
    if on_gpu and loaded.pipeline.launch.backend == "nccl" and local_ranks > gpus:
        raise loaded.error(
            "launch.backend",
            f"nccl needs a GPU for each rank; this host has {local_ranks} ranks and "
            f"{gpus} GPU{'s' if gpus > 1 else ''}",
            f"start at most {format_count(gpus, 'rank')} here, or write gloo, which lets ranks share a GPU",
        )


def device_of(loaded: LoadedPipeline, local_rank: int) -> torch.device:
    """The device of a rank of this host; `device: auto` takes CUDA where there is a GPU. Raises PipelineError
    if there is none and CUDA or NCCL is wanted.

    A launcher may show each of its ranks one GPU alone (`srun --gpus-per-task=1`): which it is, only its
    identifier says (`launch_facts`).
    """
    launch, gpus = loaded.pipeline.launch, gpu_count()
    if launch.device == "cuda" and not gpus:
        text = "cuda is asked for, but torch sees no GPU here"
        raise loaded.error("launch.device", text, "write auto or cpu")
    if launch.device == "cpu" or not gpus:
        if launch.backend == "nccl":
            text = "nccl needs GPUs, and these ranks run on the CPU"
            raise loaded.error("launch.backend", text, "write auto or gloo")
        return torch.device("cpu")
    return torch.device("cuda", local_rank % gpus)


def launch_facts(loaded: LoadedPipeline, host: str, device: torch.device) -> RankLaunchFacts:
    """The launch facts of this rank."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return RankLaunchFacts(host, loaded.pipeline.launch.device, loaded.pipeline.launch.backend, gpu)


def agree_on_backend(loaded: LoadedPipeline, facts: Sequence[RankLaunchFacts]) -> str:
    """The backend of all ranks, by the facts of each, in rank order. `backend: auto` takes NCCL where every
    rank has a GPU of its own, else Gloo.

    Raises PipelineError, on all ranks alike, if they were asked for different things, only some have a GPU,
    or NCCL is wanted and two have the same one.
    """

    def named(rank: int) -> str:
        return f"rank {rank} ({facts[rank].host})"

    first = facts[0]
    for rank, one in enumerate(facts):
        for key, wanted, other in (
            ("device", first.wanted_device, one.wanted_device),
            ("backend", first.wanted_backend, one.wanted_backend),
        ):
            if wanted != other:
                text = f"{named(0)} was given {wanted}, and {named(rank)} {other}"
                raise loaded.error(f"launch.{key}", text, "give all ranks the same")
    on_cpu = [rank for rank, one in enumerate(facts) if one.gpu_uuid is None]
    if len(on_cpu) == len(facts):
        return "gloo"
    if on_cpu:
        has = next(rank for rank, one in enumerate(facts) if one.gpu_uuid is not None)
        text = f"{named(has)} sees a GPU, and {named(on_cpu[0])} sees none"
        raise loaded.error("launch.device", text, "write cpu, or start ranks only where there are GPUs")
    owners: dict[str | None, int] = {}
    for rank, one in enumerate(facts):
        owner = owners.setdefault(one.gpu_uuid, rank)
        if owner != rank:
            if first.wanted_backend != "nccl":
                return "gloo"
            text = f"nccl needs a GPU for each rank; {named(owner)} and {named(rank)} have the same one"
            raise loaded.error(
                "launch.backend", text, "start fewer ranks there, or write gloo, which lets ranks share a GPU"
            )
    return "gloo" if first.wanted_backend == "gloo" else "nccl"
