"""What one host can say about itself."""

import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ddprun import __version__
from ddprun.doctor import Finding, Level, Report
from ddprun.host import network
from ddprun.host.dev_shm import SHM_ADVICE, ShmSpace, find_shm_shortage, shm_space
from ddprun.host.processes import cores
from ddprun.units import format_binary_bytes, format_bit_rate, format_count

_LOADER_WORKERS = 4  # loading processes of a rank for which there should be room
_LOADED_BATCH_BYTES = 16 << 20  # of what they load
_NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """What torch and the driver say about the GPUs."""

    names: tuple[str, ...] = ()  # of those that torch sees
    driver: str | None = None
    nccl: str | None = None
    why_unusable: str = ""  # why torch sees none although the driver does


def examine_host(ranks: int | None, *, several_hosts: bool = False) -> Report:
    """Examine this host alone, for so many ranks; None: one for each GPU, or two. GPUs take seconds."""
    gpus, shm = _detect_gpus(), shm_space()
    ranks = ranks or len(gpus.names) or 2
    name, versions, network_interfaces, count = socket.gethostname(), _versions(gpus), interfaces(), cores()
    facts = {
        "name": name,
        "interfaces": network_interfaces,
        "shm": None if shm is None else {"total_bytes": shm.total, "free_bytes": shm.free},
        "versions": versions,
        "gpus": list(gpus.names),
        "cores": count,
        "ranks": ranks,
    }
    listed = ", ".join(f"{what} {which}" for what, which in versions.items() if which)
    if missing := [what for what in ("CUDA", "NCCL") if not versions[what]]:
        listed += f"; this torch has no {' and no '.join(missing)}"
    findings = [
        *_interface_findings(name, network_interfaces, several_hosts=several_hosts),
        shm_finding(name, shm, ranks, nccl=len(gpus.names) > 1),
        Finding(name, "versions", "ok", listed),
        gpu_finding(name, gpus),
        cpu_core_finding(name, count, ranks),
    ]
    return Report([facts], findings)


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces that are up and have an address, without the loopback."""
    states = psutil.net_if_stats()
    found: dict[str, dict[str, Any]] = {}
    for address, name in network.interface_by_address().items():
        state = states.get(name)
        if network.is_loopback(address) or state is None or not state.isup:
            continue
        entry = found.setdefault(name, {"name": name, "addresses": [], "mbit_per_s": state.speed or None})
        entry["addresses"].append(address)
    return sorted(found.values(), key=lambda entry: str(entry["name"]))


def unusable_interface_variables(*, several_hosts: bool) -> dict[str, str]:
    """Environment variables that name an interface which is missing or, for several hosts, leads to none of
    the others, and what is wrong.
    """
    found = {}
    for name in filter(os.environ.get, network.INTERFACE_VARIABLES):
        try:
            network.check_interfaces(name, os.environ[name], several_hosts=several_hosts)
        except network.NetworkError as error:
            found[name] = str(error)
    return found


def _interface_findings(
    name: str, there: Sequence[Mapping[str, Any]], *, several_hosts: bool
) -> Iterator[Finding]:
    if there:
        listed = [
            f"{entry['name']} {' '.join(entry['addresses'])}"
            + (f", {format_bit_rate(1e6 * entry['mbit_per_s'])}" if entry["mbit_per_s"] else "")
            for entry in there
        ]
        yield Finding(name, "interfaces", "ok", "; ".join(listed))
    else:
        found = "only the loopback is up: only runs on this host alone work"
        do = "for several hosts bring one up: ip link set NAME up, and give it an address"
        yield Finding(name, "interfaces", "note", found, do)
    for variable, fault in unusable_interface_variables(several_hosts=several_hosts).items():
        do = f"unset {variable}: ddprun takes the interface that leads to the other hosts"
        yield Finding(name, "interfaces", "problem", fault, do)


def shm_finding(name: str, space: ShmSpace | None, ranks: int, *, nccl: bool) -> Finding:
    """Whether `/dev/shm` has room for what loading processes and, between GPUs, NCCL put there."""
    if space is None:
        found = "it does not exist: loader.workers, and NCCL between the GPUs of a host, need it"
        return Finding(name, "/dev/shm", "warning", found, "mount -t tmpfs -o size=1g tmpfs /dev/shm")
    short = find_shm_shortage(ranks, _LOADER_WORKERS, [_LOADED_BATCH_BYTES], space, nccl=nccl)
    value = {"total_bytes": space.total, "free_bytes": space.free}
    if short is None:
        found = f"{format_binary_bytes(space.total)}, {format_binary_bytes(space.free)} of it free"
        return Finding(name, "/dev/shm", "ok", found, value=value)
    level: Level = "problem" if short.is_fatal else "warning"
    do = f"{SHM_ADVICE}; `loader.workers: 0` and the hook shared_memory need none of it"
    return Finding(name, "/dev/shm", level, short.message, do, value)


def _versions(gpus: Gpus) -> dict[str, str | None]:
    import torch

    return {
        "ddprun": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "NCCL": gpus.nccl,
        "NVIDIA driver": gpus.driver,
    }


def _detect_gpus() -> Gpus:
    import torch
    from torch import distributed as dist

    nccl = None
    if dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver = _driver_version()
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA cannot start"
        return Gpus(driver=driver, nccl=nccl, why_unusable="" if driver is None else why)
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Gpus(names, driver, nccl)


def _driver_version() -> str | None:
    """What `nvidia-smi` says; None where it is missing, fails or does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None


def gpu_finding(name: str, gpus: Gpus) -> Finding:
    """How torch sees the GPUs."""
    if gpus.why_unusable:
        found = f"the driver ({gpus.driver}) sees GPUs, torch does not: {gpus.why_unusable}"
        do = (
            "install a torch build for CUDA (https://pytorch.org/get-started/locally), and check "
            "CUDA_VISIBLE_DEVICES, and that the driver is recent enough"
        )
        return Finding(name, "GPUs", "problem", found, do)
    if not gpus.names:
        return Finding(name, "GPUs", "ok", "no NVIDIA GPU here: ranks use Gloo")
    kinds = ", ".join(f"{gpus.names.count(kind)} x {kind}" for kind in dict.fromkeys(gpus.names))
    return Finding(name, "GPUs", "ok", kinds)


def cpu_core_finding(name: str, count: float, ranks: int) -> Finding:
    """Whether a host's ranks have cores."""
    found = f"{count:g} for {format_count(ranks, 'rank')}"
    if count >= ranks:
        return Finding(name, "cores", "ok", found)
    found += ": ranks share cores, and all wait for the slowest"
    do = "start fewer with --nproc-per-node, or ask for more (srun --cpus-per-task, docker --cpus)"
    return Finding(name, "cores", "warning", found, do)
