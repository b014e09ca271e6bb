"""The GPUs of this host, and how they reach each other."""

import shutil
import subprocess
from dataclasses import dataclass

from ddprun.doctor.findings import Finding

_TOOL = "nvidia-smi"
_ANSWERS_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """What torch and the driver say."""

    names: tuple[str, ...] = ()
    """Of those that torch sees."""

    apart: tuple[tuple[int, int], ...] = ()
    """Pairs that cannot read each other's memory directly."""

    driver: str | None = None
    nccl: str | None = None
    topology: str = ""
    """What `nvidia-smi topo -m` prints."""

    broken: str = ""
    """Why torch sees none although the driver does."""


def look_at_gpus() -> Gpus:
    """Find out; takes seconds where there are GPUs."""
    import torch
    from torch import distributed as dist

    nccl = None
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    told = _ask("--query-gpu=driver_version", "--format=csv,noheader").split()
    driver = told[0] if told else None
    if not torch.cuda.is_available():
        broken = ""
        if driver is not None:
            broken = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA cannot start"
        return Gpus(driver=driver, nccl=nccl, broken=broken)
    count = torch.cuda.device_count()
    return Gpus(
        names=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        apart=tuple(
            (one, other)
            for one in range(count)
            for other in range(one + 1, count)
            if not torch.cuda.can_device_access_peer(one, other)
        ),
        driver=driver,
        nccl=nccl,
        topology=_ask("topo", "-m"),
    )


def gpu_findings(name: str, gpus: Gpus) -> list[Finding]:
    """What there is to say about them."""
    value = {"topology": gpus.topology} if gpus.topology else {}
    if gpus.broken:
        return [
            Finding(
                where=name,
                check="GPUs",
                level="problem",
                found=f"the driver ({gpus.driver}) sees GPUs, torch does not: {gpus.broken}",
                do="install a torch build for CUDA (https://pytorch.org/get-started/locally), and look at "
                "CUDA_VISIBLE_DEVICES and at the driver's age",
            )
        ]
    if not gpus.names:
        return [Finding(where=name, check="GPUs", level="ok", found="no NVIDIA GPU here: ranks use Gloo")]
    kinds = ", ".join(f"{gpus.names.count(kind)} x {kind}" for kind in dict.fromkeys(gpus.names))
    if gpus.apart:
        pairs = ", ".join(f"{one}-{other}" for one, other in gpus.apart)
        return [
            Finding(
                where=name,
                check="GPUs",
                level="warning",
                found=f"{kinds}; without direct access to each other: {pairs}: NCCL goes through host memory",
                do="see `nvidia-smi topo -m`; switch ACS off in the BIOS or pass all GPUs of a switch to one "
                "virtual machine",
                value=value,
            )
        ]
    told = kinds if len(gpus.names) == 1 else f"{kinds}; each reaches each other directly"
    return [Finding(where=name, check="GPUs", level="ok", found=told, value=value)]


def _ask(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where it is missing, fails or does not answer."""
    if shutil.which(_TOOL) is None:
        return ""
    try:
        done = subprocess.run(
            [_TOOL, *arguments], capture_output=True, text=True, timeout=_ANSWERS_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
