"""Who takes part in an examination, and what comes of it if hosts do not come together."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddprun.doctor.examine import AGAIN, Examined, all_hosts, this_host
from ddprun.doctor.findings import Finding, Report
from ddprun.host.network import NetworkError, host_of, is_own
from ddprun.host.signals import handle
from ddprun.launch import endpoint
from ddprun.launch.launcher import Launcher, LauncherError, recognise

FIT, UNFIT = 0, 1


@dataclass(frozen=True, slots=True)
class DoctorRun:
    """What this process has to tell."""

    code: int
    report: Report | None = None
    """None: another host prints it."""

    fault: str = ""
    """Why this host cannot take part."""

    stuck: bool = False
    """Hosts have not come together, or one was lost: threads of this process may not come to an end."""


def visit(flags: Mapping[str, str | bool], timeout_s: float) -> DoctorRun:
    """Examine this host, or together with the other hosts of the launch all of them.

    Args:
        flags: torchrun's own that were given.
        timeout_s: how long to wait for the others, and for a collective.

    Raises:
        LauncherError: the flags, or the variables that a launcher has set, make no sense.
    """
    launcher = recognise(os.environ, flags)
    asked = {**({} if launcher is None else launcher.flags), **flags}
    joins = launcher is not None and not launcher.starts_ranks
    if joins:
        assert launcher is not None
        together = launcher.variables["WORLD_SIZE"] != "1"
    else:
        together = _hosts(asked) > 1
        if together:
            asked = _completed(asked)
    for number in (signal.SIGINT, signal.SIGTERM):  # waiting in torch's C++ code must not hold them up
        handle(number, signal.SIG_DFL)
    # Torch's C++ side tells what it cannot reach, stack and all; what matters becomes a finding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    here = this_host(_ranks(asked, launcher if joins else None))
    if together:
        return _together(here, launcher if joins else None, asked, timeout_s)
    report = Report([here.facts], here.findings)
    return DoctorRun(FIT if report.fit else UNFIT, report)


def _together(
    here: Examined, launcher: Launcher | None, asked: Mapping[str, str | bool], timeout_s: float
) -> DoctorRun:
    """With the other hosts: as the rank that a launcher has started, or by the flags."""
    from ddprun.doctor.host_group import LOOK, LostError
    from ddprun.launch.meeting import Meeting, MeetingError, meet, reach

    where = _where(asked)
    meeting: Meeting | None = None
    try:
        if launcher is None:
            meeting = meet(asked, timeout_s)
            os.environ.update(meeting.variables())
        else:
            for name, value in launcher.variables.items():
                os.environ.setdefault(name, value)
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            if os.environ["RANK"] != "0":
                reach(where, time.monotonic() + timeout_s)
        store = None if meeting is None else meeting.store
        report, fit = all_hosts(here, timeout_s, store, _meeting_point(here.facts["name"], where))
    except MeetingError as error:
        return _apart(here, where, str(error), error.do)
    except ValueError as error:  # torchrun's way to refuse flags
        raise LauncherError(str(error)) from None
    except NetworkError as error:
        return _apart(here, where, str(error), "see `ip addr` and `ip route` there")
    except (LostError, OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
        found = str(error).strip().partition("\n")[0] or type(error).__name__
        if found.startswith("wait timeout"):
            found = f"not all that had come answered within {timeout_s:g} s"
        return _apart(here, where, f"the hosts have lost each other: {found}", f"{LOOK}, or {AGAIN}")
    if meeting is not None:
        with suppress(Exception):  # the store may have ended with another process
            meeting.close()
    return DoctorRun(FIT if fit else UNFIT, report, stuck=not fit)


def _apart(here: Examined, where: str, found: str, do: str) -> DoctorRun:
    """What is there to tell without the others: the host at which they meet reports of itself, too."""
    name = here.facts["name"]
    if os.environ.get("RANK", "0") != "0" or not is_own(host_of(where)):
        return DoctorRun(UNFIT, fault=f"{found}\n  -> {do}", stuck=True)
    fault = Finding(where=name, check="rendezvous", level="problem", found=found, do=do)
    return DoctorRun(UNFIT, Report([here.facts], [*here.findings, fault]), stuck=True)


def _meeting_point(name: str, where: str) -> list[Finding]:
    """What there is to say of the place at which hosts meet."""
    if (told := endpoint.public_address(where)) is not None:
        return [
            Finding(
                where=name,
                check="rendezvous",
                level="warning",
                found=f"hosts meet at the public address {told}; whoever reaches its ports can join a run",
                do="use a private network, or let a firewall open them to your hosts alone",
            )
        ]
    return [Finding(where=name, check="rendezvous", level="ok", found=f"{where} can be reached")]


def _hosts(asked: Mapping[str, str | bool]) -> int:
    """The largest number of hosts that the flags, or torchrun's own variables, allow."""
    nodes = str(asked.get("nnodes") or os.environ.get("PET_NNODES", "1"))
    most = nodes.rpartition(":")[2]
    if not most.isdigit() or int(most) < 1:
        raise LauncherError(f"--nnodes is {nodes!r}; it is a number of hosts, or MIN:MAX")
    return int(most)


def _ranks(asked: Mapping[str, str | bool], launcher: Launcher | None) -> int | None:
    """Ranks on this host, where somebody says."""
    told = str(asked.get("nproc_per_node") or os.environ.get("PET_NPROC_PER_NODE", ""))
    if launcher is not None:
        told = os.environ.get("LOCAL_WORLD_SIZE", launcher.variables.get("LOCAL_WORLD_SIZE", ""))
    return int(told) if told.isdigit() and int(told) else None


def _completed(asked: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """With c10d where a meeting point is named without a way to meet there: torchrun's default is static,
    for which every host needs a number.
    """
    if not _where(asked):
        raise LauncherError(
            f"--nnodes {asked.get('nnodes', os.environ.get('PET_NNODES'))} needs a place to meet: add "
            "--rdzv-endpoint HOST:PORT, the same on every host"
        )
    named = "rdzv_backend" in asked or "PET_RDZV_BACKEND" in os.environ
    if named or "rdzv_endpoint" not in asked or "node_rank" in asked or "PET_NODE_RANK" in os.environ:
        return dict(asked)
    return {**asked, "rdzv_backend": "c10d"}


def _where(asked: Mapping[str, str | bool]) -> str:
    """Where hosts meet; nothing where neither a flag nor a variable says."""
    for host, port in (("rdzv_endpoint", None), ("master_addr", "master_port")):
        if told := str(asked.get(host) or os.environ.get(f"PET_{host.upper()}", "")):
            given = port and str(asked.get(port) or os.environ.get(f"PET_{port.upper()}", "29500"))
            return f"{told}:{given}" if given else told
    return ""
