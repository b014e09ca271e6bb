"""Who takes part in an examination, how the hosts find each other, and what is reported if they do not."""

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddprun.doctor import Finding, Report, first_line
from ddprun.doctor.host import examine_host
from ddprun.host.network import (
    NetworkError,
    host_and_port,
    host_of,
    is_this_host,
    public_address,
    resolve_addresses,
)
from ddprun.host.processes import handle_signal_unless_ignored
from ddprun.launch.launcher import Launcher, LauncherError, detect_launcher, flag_or_variable

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

EXIT_FIT, EXIT_UNFIT = 0, 1
_NO_LIMIT = "1000000"
_CONNECT_TIMEOUT_S = 2.0
_RETRY_DELAY_S = 0.2


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """What this process has to report."""

    code: int
    report: Report | None = None
    """None: another host prints it."""

    fault: str = ""
    """Why this host cannot take part."""

    threads_may_hang: bool = False
    """Hosts did not find each other, or one was lost: threads of this process may never end."""


class UnreachableError(RuntimeError):
    """The hosts do not find each other: what is wrong, and what to do about it."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


def run(flags: Mapping[str, str | bool], timeout_s: float) -> DoctorResult:
    """Examine this host, or all hosts of the launch, waiting so long for the others and for a collective.

    Raises:
        LauncherError: the flags, or the variables that a launcher has set, make no sense.
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
        if multiple_hosts and not _endpoint(flags):
            raise LauncherError(
                f"--nnodes {nodes} needs a rendezvous: add --rdzv-endpoint HOST:PORT, the same on every host"
            )
        # Torchrun's default is static, for which every host needs a number.
        numbered = flag_or_variable(flags, "rdzv_backend") or flag_or_variable(flags, "node_rank")
        if multiple_hosts and "rdzv_endpoint" in flags and not numbered:
            flags["rdzv_backend"] = "c10d"
    for number in (signal.SIGINT, signal.SIGTERM):  # waiting in torch's C++ code must not hold them up
        handle_signal_unless_ignored(number, signal.SIG_DFL)
    # Torch's C++ side prints what it cannot reach, stack and all; what matters becomes a finding.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    own_report = examine_host(int(ranks) if ranks.isdecimal() and int(ranks) else None)
    if multiple_hosts:
        return _run_on_all_hosts(own_report, launcher, flags, timeout_s)
    return DoctorResult(EXIT_FIT if own_report.fit else EXIT_UNFIT, own_report)


def _run_on_all_hosts(
    own_report: Report, launcher: Launcher | None, flags: Mapping[str, str | bool], timeout_s: float
) -> DoctorResult:
    """Examine all hosts, as a rank that a launcher has started, or by torchrun's flags."""
    from ddprun.doctor.hosts import CHECK_HOST_ADVICE, RUN_AGAIN_ADVICE, HostLostError, examine_hosts

    endpoint = _endpoint(flags)
    store: Any = None
    handler: RendezvousHandler | None = None
    try:
        if launcher is None:
            handler, info = join_rendezvous(flags, timeout_s)
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
        report, fit = examine_hosts(own_report, timeout_s, store, [_rendezvous_finding(own_report, endpoint)])
    except UnreachableError as error:
        return _report_without_others(own_report, endpoint, str(error), error.advice)
    except ValueError as error:  # torchrun's way to refuse flags
        raise LauncherError(str(error)) from None
    except NetworkError as error:
        return _report_without_others(own_report, endpoint, str(error), "see `ip addr` and `ip route` there")
    except (HostLostError, OSError, RuntimeError) as error:  # the store's errors are RuntimeErrors
        found = first_line(error)
        if found.startswith("wait timeout"):
            found = f"not all of them answered within {timeout_s:g} s"
        found = f"lost contact between the hosts: {found}"
        return _report_without_others(
            own_report, endpoint, found, f"{CHECK_HOST_ADVICE}, or {RUN_AGAIN_ADVICE}"
        )
    if handler is not None:
        with suppress(Exception):  # the store may have ended with another process
            handler.shutdown()  # tells the other hosts that this is the end
    return DoctorResult(EXIT_FIT if fit else EXIT_UNFIT, report, threads_may_hang=not fit)


def _report_without_others(own_report: Report, endpoint: str, found: str, do: str) -> DoctorResult:
    """What can be said without the others: the host of the rendezvous reports of itself, too."""
    if os.environ.get("RANK", "0") != "0" or not is_this_host(host_of(endpoint)):
        return DoctorResult(EXIT_UNFIT, fault=f"{found}\n  -> {do}", threads_may_hang=True)
    fault = Finding(own_report.hosts[0]["name"], "rendezvous", "problem", found, do)
    return DoctorResult(
        EXIT_UNFIT, Report(own_report.hosts, [*own_report.findings, fault]), threads_may_hang=True
    )


def _rendezvous_finding(own_report: Report, endpoint: str) -> Finding:
    name = own_report.hosts[0]["name"]
    if (public := public_address(endpoint)) is None:
        return Finding(name, "rendezvous", "ok", f"{endpoint} can be reached")
    found = f"the rendezvous is at the public address {public}; whoever reaches its ports can join a run"
    do = "use a private network, or let a firewall open them to your hosts alone"
    return Finding(name, "rendezvous", "warning", found, do)


def _endpoint(flags: Mapping[str, str | bool]) -> str:
    """Where the rendezvous is; nothing where neither a flag nor a variable says."""
    address = flag_or_variable(flags, "master_addr")
    static = f"{address}:{flag_or_variable(flags, 'master_port') or '29500'}" if address else ""
    return flag_or_variable(flags, "rdzv_endpoint") or static


def join_rendezvous(
    flags: Mapping[str, str | bool], timeout_s: float, purpose: str = "doctor"
) -> "tuple[RendezvousHandler, RendezvousInfo]":
    """Meet the other hosts as a run does, with one rank per host and without starting any.

    Of a range of hosts, wait for the largest number. Gives the handler that keeps this host in the rendezvous
    while it lives, and this host's rank. `purpose` separates it from a run with the same id.

    Raises:
        ValueError: torchrun refuses the flags.
        UnreachableError: the others do not come.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from ddprun.launch.flags import rendezvous_parameters, silence_torchelastic, torchrun_arguments
    from ddprun.launch.rendezvous import make_handler

    silence_torchelastic()
    until = time.monotonic() + timeout_s
    hosts = (flag_or_variable(flags, "nnodes") or "1").rpartition(":")[2]
    given = {**flags, "nproc_per_node": "1", "max_restarts": "0", "nnodes": hosts}
    config, _, _ = torchrun.config_from_args(torchrun_arguments(given, ["-m", "ddprun"]))
    config.run_id = f"{config.run_id}-{purpose}"
    static = config.rdzv_backend == "static"
    limits: dict[str, Any] = {"timeout": round(timeout_s)}
    if not static:
        join_s = str(max(1, round(timeout_s)))
        # Clocks that are apart would make hosts take each other for dead: that is to be reported.
        limits = {"join_timeout": join_s, "read_timeout": join_s, "keep_alive_max_attempt": _NO_LIMIT}
    parameters = rendezvous_parameters(config, **limits)
    wait_until_reachable(parameters.endpoint, until)
    try:
        handler = make_handler(parameters)
        return handler, handler.next_rendezvous()
    except (DistError, RendezvousError) as error:
        why = f"{type(error).__name__}: {first_line(error.__cause__ or error)}"
        raise UnreachableError(
            f"not all of the {hosts} hosts reached {parameters.endpoint} within {timeout_s:g} s ({why})",
            f"start the same command on all {hosts} hosts within this time (--timeout SECONDS gives more); "
            f"where it cannot connect, open TCP port {host_and_port(parameters.endpoint)[1]} to that host; "
            "take a port that nobody uses" + ("" if static else ", and the same --rdzv-id everywhere"),
        ) from None


def wait_until_reachable(endpoint: str, until: float) -> None:
    """Wait until somebody listens at the rendezvous; at once on its own host, which is to listen.

    Raises:
        UnreachableError: nobody does, or it cannot be reached.
    """
    host, port = host_and_port(endpoint)
    known = ", ".join(dict.fromkeys(resolve_addresses(host)))
    if not known:
        raise UnreachableError(
            f"the name {host!r} of {endpoint!r} does not resolve here",
            "add it to /etc/hosts or to the name service, or write an address",
        )
    if is_this_host(host):
        return
    cause: OSError = TimeoutError()
    while True:
        left_s = until - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(_CONNECT_TIMEOUT_S, left_s))).close()
            return
        except OSError as error:
            cause = cause if isinstance(error, TimeoutError) else error
        if left_s <= 0:
            break
        time.sleep(min(_RETRY_DELAY_S, left_s))
    here = socket.gethostname()
    at = f"{host}:{port}" + ("" if known == host else f" ({known})")
    if isinstance(cause, ConnectionRefusedError):
        do = f"start the same command on {host}; if it runs there, open port {port} in its firewall"
        raise UnreachableError(f"{here} reaches {host}, but nothing listens at {at}", do)
    if isinstance(cause, TimeoutError):
        why = "no answer"
        do = f"open TCP port {port} on {host} for {here} in the firewall or security group"
    else:
        why = cause.strerror or str(cause)
        do = "see `ip route` and `ip addr`: this host has no way there"
    raise UnreachableError(f"{here} cannot connect to {at}: {why}", f"{do}; or correct --rdzv-endpoint")
