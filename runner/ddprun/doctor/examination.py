"""Who takes part in an examination, how the hosts find each other, and what is reported if they do not."""

import os
import signal
from contextlib import suppress

from ddprun.doctor import Finding, Report
from ddprun.doctor.host import examine_host
from ddprun.host.network import NetworkError, host_of, is_this_host, public_address_warning
from ddprun.host.processes import handle_signal_unless_ignored
from ddprun.launch.launcher import (
    Flags,
    LauncherError,
    detect_launcher,
    flag_or_variable,
    parse_host_range,
    parse_rank_count,
)
from ddprun.standard_streams import say


def run_examination(flags: Flags, timeout_s: float) -> tuple[bool, Report | None]:
    """Examine this host, or all hosts of the launch, waiting so long for the others and for a collective;
    gives whether no problem was found, and the report, unless another host prints it. Raises LauncherError
    for flags, or variables of a launcher, that make no sense.
    """
    launcher = detect_launcher(os.environ, flags)
    if launcher is not None and not launcher.starts_ranks:
        raise LauncherError(
            f"started by {launcher.summary}; doctor runs once on each host, and not as a rank: start it with "
            "torchrun's own flags, or by srun --ntasks-per-node=1"
        )
    flags = {**({} if launcher is None else launcher.flags), **flags}
    ranks = parse_rank_count(flag_or_variable(flags, "nproc_per_node") or "auto")
    multiple_hosts = parse_host_range(flag_or_variable(flags, "nnodes") or "1")[1] > 1
    for number in (signal.SIGINT, signal.SIGTERM):  # waiting in torch's C++ code must not hold them up
        handle_signal_unless_ignored(number, signal.SIG_DFL)
    # Torch's C++ side prints what it cannot reach, stack and all; what matters becomes a finding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    own_report = examine_host(ranks, several_hosts=multiple_hosts)
    if multiple_hosts:
        return _run_on_all_hosts(own_report, flags, timeout_s)
    return own_report.fit, own_report


def _run_on_all_hosts(own_report: Report, flags: Flags, timeout_s: float) -> tuple[bool, Report | None]:
    from ddprun.doctor.between_hosts import RUN_AGAIN_ADVICE, examine_hosts
    from ddprun.launch.host_group import HostsError, error_first_line, join_rendezvous, lost_contact_error

    endpoint = _rendezvous_endpoint(flags)
    if warning := public_address_warning(endpoint):
        say(warning)
    try:
        handler, info = join_rendezvous(flags, timeout_s, "doctor")
        report = examine_hosts(own_report, info, endpoint, timeout_s)
    except HostsError as error:
        found, do = str(error), error.advice
    except ValueError as error:  # torchrun's way to refuse flags
        raise LauncherError(str(error)) from None
    except NetworkError as error:
        found, do = str(error), "see `ip addr` and `ip route` there"
    except (OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
        timed_out = str(error).startswith("wait timeout")
        why = f"not all of them answered within {timeout_s:g} s" if timed_out else error_first_line(error)
        lost = lost_contact_error(why)
        found, do = str(lost), f"{lost.advice}, or {RUN_AGAIN_ADVICE}"
    else:
        with suppress(Exception):  # the store may have ended with another process
            handler.shutdown()  # tells the other hosts that this is the end
        return report.fit, (report if info.rank == 0 else None)
    # What can be said without the others: the host of the rendezvous reports of itself, too.
    if not is_this_host(host_of(endpoint)):
        say(f"{found}\n  -> {do}")
        return False, None
    fault = Finding(own_report.hosts[0]["name"], "rendezvous", "problem", found, do)
    return False, Report(own_report.hosts, [*own_report.findings, fault])


def _rendezvous_endpoint(flags: Flags) -> str:
    """Where the rendezvous is; nothing where neither a flag nor a variable says."""
    address = flag_or_variable(flags, "master_addr")
    static = f"{address}:{flag_or_variable(flags, 'master_port') or '29500'}" if address else ""
    return flag_or_variable(flags, "rdzv_endpoint") or static
