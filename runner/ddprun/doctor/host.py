"""What one host can say about itself."""

import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ddprun import __version__
from ddprun.doctor.findings import Finding, Level
from ddprun.doctor.gpus import Gpus, gpu_findings
from ddprun.doctor.holes import holes_of
from ddprun.host.network import VARIABLES, NetworkError, addresses, check_named, is_loopback, owners
from ddprun.host.shared_memory import REMEDY, ROOM_FOR_NCCL_BYTES, Room, binary, least_bytes, room

_LOADERS = 4
"""Loading processes of a rank for which there should be room."""

_ROOM_BYTES = 256 << 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def facts(gpus: Gpus, ranks: int) -> dict[str, Any]:
    """What is so on this host, as JSON can carry it.

    Args:
        gpus: of this host.
        ranks: that a run would start on it.
    """
    import torch

    here = room()
    return {
        "name": socket.gethostname(),
        "boot": _BOOT.read_text("ascii").strip() if _BOOT.is_file() else "",
        "interfaces": interfaces(),
        "shm": None if here is None else {"total_bytes": here.total, "free_bytes": here.free},
        "versions": {
            "ddprun": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "CUDA": torch.version.cuda,
            "NCCL": gpus.nccl,
            "NVIDIA driver": gpus.driver,
        },
        "gpus": list(gpus.names),
        "cores": cores(),
        "ranks": ranks,
    }


def look(seen: Mapping[str, Any], gpus: Gpus, environment: Mapping[str, str]) -> list[Finding]:
    """Everything that can be said of this host alone.

    Args:
        seen: its facts.
        gpus: of this host.
        environment: variables of the process.
    """
    name, room_here = seen["name"], seen["shm"]
    several = seen["ranks"] > 1 and len(seen["gpus"]) > 1
    return [
        *_interfaces(name, seen["interfaces"], environment),
        _own_name(name),
        _shm(name, room_here and Room(*room_here.values()), ranks=seen["ranks"], nccl=several),
        _versions(name, seen["versions"]),
        *security(name, seen["versions"]["torch"]),
        *gpu_findings(name, gpus),
        *cores_findings(name, seen["cores"], seen["ranks"], environment),
        _debug(name, environment),
    ]


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces that are up and have an address, without the loopback."""
    states = psutil.net_if_stats()
    found: dict[str, dict[str, Any]] = {}
    for address, name in owners().items():
        state = states.get(name)
        if is_loopback(address) or state is None or not state.isup:
            continue
        entry = found.setdefault(name, {"name": name, "addresses": [], "mbit_per_s": state.speed or None})
        entry["addresses"].append(address)
    return sorted(found.values(), key=lambda entry: str(entry["name"]))


def cores() -> float:
    """Processor cores that this process may use: by affinity and by the container's quota."""
    count: float = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text("ascii").split()
        return min(count, round(int(quota) / int(period), 1))
    except (OSError, ValueError):
        return count


def bad_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that name an interface which is not there, and what is wrong."""
    found = {}
    for name in VARIABLES:
        if environment.get(name):
            try:
                check_named(name, environment[name])
            except NetworkError as error:
                found[name] = str(error)
    return found


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the loopback, which leads to no other host, and its name."""
    loopbacks = {name for address, name in owners().items() if is_loopback(address)}
    named = {name: environment.get(name, "").lstrip("=") for name in VARIABLES}
    return {name: value for name, value in named.items() if value in loopbacks}


def told_interface(entry: Mapping[str, Any]) -> str:
    """`e0 10.77.0.1, 10 Gbit/s`."""
    speed = entry["mbit_per_s"]
    told = f"{entry['name']} {' '.join(entry['addresses'])}"
    return told if speed is None else f"{told}, {speed_of(speed)}"


def speed_of(mbit_per_s: float) -> str:
    """For a reader."""
    if mbit_per_s >= 999.5:
        return f"{mbit_per_s / 1000:.3g} Gbit/s"
    return f"{mbit_per_s:.3g} Mbit/s"


def _interfaces(
    name: str, there: Sequence[Mapping[str, Any]], environment: Mapping[str, str]
) -> Iterator[Finding]:
    if there:
        told = "; ".join(map(told_interface, there))
        yield Finding(where=name, check="interfaces", level="ok", found=told)
    else:
        yield Finding(
            where=name,
            check="interfaces",
            level="note",
            found="none is up but the loopback: runs on this host alone work",
            do="for several hosts bring one up: ip link set NAME up, and give it an address",
        )
    for variable, fault in bad_variables(environment).items():
        yield Finding(
            where=name,
            check="interfaces",
            level="problem",
            found=fault,
            do=f"unset {variable}: ddprun takes the interface that leads to the other hosts",
        )


def _own_name(name: str) -> Finding:
    found = addresses(name)
    if not found:
        return Finding(
            where=name,
            check="own name",
            level="warning",
            found=f"the host's own name, {name}, cannot be looked up: torchrun may not take it for the one "
            "on which ranks meet",
            do="add it to /etc/hosts with the address that the other hosts know, or give --local-addr and, "
            "on the host of --rdzv-endpoint, --rdzv-conf is_host=1",
        )
    if all(map(is_loopback, found)):
        return Finding(
            where=name,
            check="own name",
            level="note",
            found=f"{name} leads to {', '.join(dict.fromkeys(found))}, the loopback: Gloo in scripts without "
            "ddprun listens where no other host can reach it",
            do="for such scripts set GLOO_SOCKET_IFNAME, or correct /etc/hosts; ddprun chooses by itself",
        )
    return Finding(
        where=name,
        check="own name",
        level="ok",
        found=f"{name} is {', '.join(dict.fromkeys(found))}",
    )


def _shm(name: str, here: Room | None, *, ranks: int, nccl: bool) -> Finding:
    if here is None:
        return Finding(
            where=name,
            check="/dev/shm",
            level="warning",
            found="there is none: loader.workers and NCCL between GPUs of a host need it",
            do="mount -t tmpfs -o size=1g tmpfs /dev/shm",
        )
    told = f"{binary(here.total)}, {binary(here.free)} of it free"
    least, enough = least_bytes(ranks, _LOADERS), ROOM_FOR_NCCL_BYTES if nccl else _ROOM_BYTES
    level: Level = "ok"
    if here.free < least:
        level = "problem"
        told += (
            f": loader.workers: {_LOADERS} on {ranks} ranks cannot even start in less than {binary(least)}"
        )
    elif here.free < enough:
        level = "warning"
        told += ": batches of loading processes" + (" and NCCL" if nccl else "") + " may not fit"
        told += f", for which {binary(enough)} are commonly enough"
    do = "" if level == "ok" else f"{REMEDY}; loader.workers: 0 needs none, nor does the hook shared_memory"
    value = {"total_bytes": here.total, "free_bytes": here.free}
    return Finding(where=name, check="/dev/shm", level=level, found=told, do=do, value=value)


def _versions(name: str, versions: Mapping[str, str | None]) -> Finding:
    told = ", ".join(f"{what} {which}" for what, which in versions.items() if which)
    missing = [what for what in ("CUDA", "NCCL") if not versions[what]]
    if missing:
        told += f"; this torch has no {' and no '.join(missing)}"
    return Finding(where=name, check="versions", level="ok", found=told)


def security(name: str, torch: str) -> list[Finding]:
    """Known holes of the installed torch."""
    found = holes_of(torch)
    return [
        Finding(
            where=name,
            check="security",
            level="warning" if hole.severity == "high" else "note",
            found=f"torch {torch} has {hole.name}: {hole.what}",
            do=f"pip install 'torch>={'.'.join(map(str, hole.fixed))}'; see {hole.source}",
            value={"id": hole.name, "severity": hole.severity, "source": hole.source},
        )
        for hole in found
    ] or [
        Finding(
            where=name,
            check="security",
            level="ok",
            found=f"torch {torch}: none of the holes that are known here",
        )
    ]


def cores_findings(name: str, cores: float, ranks: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether ranks and their threads have cores."""
    told = f"{cores:g} for {ranks} rank{'s' if ranks > 1 else ''}"
    if cores < ranks:
        yield Finding(
            where=name,
            check="cores",
            level="warning",
            found=f"{told}: ranks take turns, and each waits for the slowest",
            do="start fewer with --nproc-per-node, or ask for more (srun --cpus-per-task, docker --cpus)",
        )
    else:
        yield Finding(where=name, check="cores", level="ok", found=told)
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * ranks > max(cores, ranks):
        yield Finding(
            where=name,
            check="cores",
            level="warning",
            found=f"OMP_NUM_THREADS={threads} on {ranks} ranks are more threads than the {cores:g} cores",
            do=f"set OMP_NUM_THREADS={max(1, int(cores // ranks))}; unset, ddprun and torchrun take 1",
        )


def _debug(name: str, environment: Mapping[str, str]) -> Finding:
    value = environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    if value == "DETAIL":
        return Finding(
            where=name,
            check="debug",
            level="problem",
            found="TORCH_DISTRIBUTED_DEBUG=DETAIL: torch checks every collective twice, and ends every run "
            "that uses DDP in a segmentation fault, so ddprun refuses it",
            do="unset it, or set INFO; keep DETAIL for `ddprun doctor` and for scripts without DDP",
        )
    if value == "INFO":
        return Finding(
            where=name,
            check="debug",
            level="note",
            found="TORCH_DISTRIBUTED_DEBUG=INFO: DDP logs its settings and times its steps",
            do="unset TORCH_DISTRIBUTED_DEBUG to measure speed",
        )
    return Finding(where=name, check="debug", level="ok", found="TORCH_DISTRIBUTED_DEBUG is off")
