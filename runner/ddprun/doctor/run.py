"""Who takes part in an examination, how the hosts find each other, and what is reported if they do not."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddprun.doctor import Finding, Report
from ddprun.doctor.host import examine_host
from ddprun.host.network import NetworkError, host_and_port, host_of, is_this_host, public_warning
from ddprun.host.processes import handle_signal_unless_ignored
from ddprun.launch.launcher import Flags, Launcher, LauncherError, detect_launcher, flag_or_variable
from ddprun.standard_streams import say


@dataclass(frozen=True, slots=True)
class DoctorResult:
    fit: bool  # no problem was found
    report: Report | None = None  # None: another host prints it
    fault: str = ""  # why this host cannot take part


def run(flags: Flags, timeout_s: float) -> DoctorResult:
    """Examine this host, or all hosts of the launch, waiting so long for the others and for a collective;
    raises LauncherError for flags, or variables of a launcher, that make no sense.
    """
    launcher = detect_launcher(os.environ, flags)
    flags = {**({} if launcher is None else launcher.flags), **flags}
    ranks = flag_or_variable(flags, "nproc_per_node")
    if launcher is not None and not launcher.starts_ranks:
        multiple_hosts = launcher.variables["WORLD_SIZE"] != "1"
        ranks = os.environ.get("LOCAL_WORLD_SIZE", launcher.variables.get("LOCAL_WORLD_SIZE", ""))
    else:
        launcher = None
        nodes = flag_or_variable(flags, "nnodes") or "1"
        most = nodes.rpartition(":")[2]
        if not most.isdecimal() or int(most) < 1:
            raise LauncherError(f"--nnodes is {nodes!r}; it must be a number of hosts, or MIN:MAX")
        multiple_hosts = int(most) > 1
        # Torchrun's default is static, for which every host needs a number.
        numbered = flag_or_variable(flags, "rdzv_backend") or flag_or_variable(flags, "node_rank")
        if multiple_hosts and "rdzv_endpoint" in flags and not numbered:
            flags["rdzv_backend"] = "c10d"
    for number in (signal.SIGINT, signal.SIGTERM):  # waiting in torch's C++ code must not hold them up
        handle_signal_unless_ignored(number, signal.SIG_DFL)
    # Torch's C++ side prints what it cannot reach, stack and all; what matters becomes a finding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    count = int(ranks) if ranks.isdecimal() and int(ranks) else None
    own_report = examine_host(count, several_hosts=multiple_hosts)
    if multiple_hosts:
        return _run_on_all_hosts(own_report, launcher, flags, timeout_s)
    return DoctorResult(own_report.fit, own_report)


def _run_on_all_hosts(
    own_report: Report, launcher: Launcher | None, flags: Flags, timeout_s: float
) -> DoctorResult:
    """Examine all hosts, as a rank that a launcher has started, or by torchrun's flags."""
    from ddprun.doctor.hosts import RUN_AGAIN_ADVICE, examine_hosts
    from ddprun.launch.meeting import HostsError, join_rendezvous, lost_contact, wait_until_reachable

    endpoint = _endpoint(flags)
    if warning := public_warning(endpoint):
        say(warning)
    store: Any = None
    handler: Any = None
    try:
        if launcher is None:
            handler, info = join_rendezvous(flags, timeout_s, "doctor")
            os.environ["RANK"] = os.environ["GROUP_RANK"] = str(info.rank)
            os.environ["WORLD_SIZE"] = os.environ["GROUP_WORLD_SIZE"] = str(info.world_size)
            os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
            os.environ["MASTER_ADDR"], port = host_and_port(endpoint)
            os.environ["MASTER_PORT"] = str(port)
            store = info.store
            store = store.clone()  # ranks of a run open another one, at a port that may be closed
        else:
            for name, value in launcher.variables.items():
                os.environ.setdefault(name, value)
            endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            if os.environ["RANK"] != "0":
                wait_until_reachable(endpoint, time.monotonic() + timeout_s)
        report, fit = examine_hosts(own_report, timeout_s, store)
    except HostsError as error:
        found, do = str(error), error.advice
    except ValueError as error:  # torchrun's way to refuse flags
        raise LauncherError(str(error)) from None
    except NetworkError as error:
        found, do = str(error), "see `ip addr` and `ip route` there"
    except (OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
        timed_out = str(error).startswith("wait timeout")
        lost = lost_contact(f"not all of them answered within {timeout_s:g} s" if timed_out else error)
        found, do = str(lost), f"{lost.advice}, or {RUN_AGAIN_ADVICE}"
    else:
        if handler is not None:
            with suppress(Exception):  # the store may have ended with another process
                handler.shutdown()  # tells the other hosts that this is the end
        return DoctorResult(fit, report)
    # What can be said without the others: the host of the rendezvous reports of itself, too.
    if os.environ.get("RANK", "0") != "0" or not is_this_host(host_of(endpoint)):
        return DoctorResult(False, fault=f"{found}\n  -> {do}")
    fault = Finding(own_report.hosts[0]["name"], "rendezvous", "problem", found, do)
    return DoctorResult(False, Report(own_report.hosts, [*own_report.findings, fault]))


def _endpoint(flags: Flags) -> str:
    """Where the rendezvous is; nothing where neither a flag nor a variable says."""
    address = flag_or_variable(flags, "master_addr")
    static = f"{address}:{flag_or_variable(flags, 'master_port') or '29500'}" if address else ""
    return flag_or_variable(flags, "rdzv_endpoint") or static
