"""Addresses and interfaces of this host, which of them leads to the other hosts, and rendezvous endpoints."""

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ddprun.host.processes import run_in_daemon_thread

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
HOST_NAME_ADVICE = "give each host a name of its own: hostnamectl hostname NAME, docker run --hostname NAME"

_NOBODYS_ADDRESS = "192.0.2.1"  # no host has it (RFC 5737), so the way there is the default route
_ANY_PORT = 9
_LOOK_UP_S = 2.0
_CONNECT_S = 3.0
_RENDEZVOUS_PORT = 29400  # torchelastic's own, of an endpoint without one


class NetworkError(RuntimeError):
    """There is no such interface, or none that leads to the other hosts."""


def choose_interface(host: str) -> None:
    """Have Gloo and NCCL use the interface that leads to another host, unless the user has named one; raises
    NetworkError if that does not exist, or nothing leads to the host.

    Left to themselves, Gloo takes the one that this host's own name leads to, and NCCL the first that is up:
    on a host with several these may be ones through which the others cannot be reached, and ranks would wait.
    """
    given = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    local_addresses = _local_addresses_towards(host)
    for name, value in given.items():
        check_interfaces(name, value, several_hosts=not any(map(is_loopback, local_addresses)))
    gloo, nccl = INTERFACE_VARIABLES
    if chosen := next(filter(None, map(interface_by_address().get, local_addresses)), None):
        os.environ |= {gloo: chosen, nccl: f"={chosen}", **given}  # to NCCL a bare name is a prefix
    elif not given:
        up = interface_by_address()
        there = ", ".join(f"{name} ({address})" for address, name in up.items() if not is_loopback(address))
        raise NetworkError(
            f"none of this host's network interfaces leads to {host}: {there or 'none has an address'}; name "
            f"one in {gloo}, or for NCCL in {nccl}"
        )


def choose_interface_together(
    here: str, endpoint: str, other: str, gather: Callable[[str], Sequence[str]]
) -> None:
    """Choose the interface that leads to the endpoint (HOST or HOST:PORT); on the endpoint's own host, that
    to `other`, another host. `here` names this host or rank. `gather` gives everybody's fault to everybody,
    so that all raise NetworkError together: else the others would wait for the one that cannot choose.
    """
    host, fault = host_of(endpoint), ""
    try:
        choose_interface(other if is_this_host(host) else host)
    except NetworkError as error:
        fault = f"{here}: {error}"
    if found := next(filter(None, gather(fault)), None):
        raise NetworkError(found)


def machine_id() -> str:
    """What tells this host from another one, such as a clone or a container, that has the same name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii") + os.readlink("/proc/self/ns/net")
    return ""


def duplicate_host_names(hosts: Iterable[tuple[str, str]]) -> list[str]:
    """Of names and what `machine_id` gives: the names that several hosts have."""
    names = [name for name, _ in {*hosts}]
    return sorted({name for name in names if names.count(name) > 1})


def choose_loopback() -> None:
    """Set `GLOO_SOCKET_IFNAME` to the loopback interface, unless it is set: all ranks are on this host.
    Raises NetworkError if it is set to what does not exist.
    """
    if given := os.environ.get(gloo := INTERFACE_VARIABLES[0]):
        check_interfaces(gloo, given, several_hosts=False)
    elif name := interface_by_address().get(LOOPBACK):
        os.environ[gloo] = name


def address_towards(endpoint: str) -> str:
    """The address of this host on the interface that leads to the other hosts: that of `GLOO_SOCKET_IFNAME`
    if it is set, else on the way to the rendezvous (HOST or HOST:PORT), else to anywhere.
    """
    if wanted := os.environ.get(INTERFACE_VARIABLES[0], "").split(",")[0]:
        owned = [address for address, name in interface_by_address().items() if name == wanted]
        return next(iter(sorted(owned, key=lambda address: ":" in address)), LOOPBACK)
    ways = [*_local_addresses_towards(host_of(endpoint)), *_local_addresses_towards(_NOBODYS_ADDRESS)]
    # Some distributions call the host itself 127.0.1.1.
    return next((address for address in ways if not is_loopback(address)), LOOPBACK)


def is_this_host(host: str) -> bool:
    """Whether a name or an address is this host's own."""
    addresses = resolve_addresses(host)
    return not {*addresses}.isdisjoint(interface_by_address()) or any(map(is_loopback, addresses))


def host_of(endpoint: str) -> str:
    """The host of HOST, HOST:PORT or [IPv6]:PORT."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    # More than one colon is an IPv6 address without a port.
    return endpoint if endpoint.count(":") > 1 else endpoint.partition(":")[0]


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT or [IPv6]:PORT; raises ValueError for anything else."""
    host, has_port = host_of(endpoint), endpoint.count(":") == 1 or "]:" in endpoint
    port = endpoint.rpartition(":")[2] if has_port else str(_RENDEZVOUS_PORT)
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"the rendezvous endpoint {endpoint!r} is not HOST:PORT, with a port up to 65535")
    return host, int(port)


def connection_problem(host: str, port: int) -> str:
    """Why nobody answers there; empty if somebody listens. Takes seconds for each address of the host."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except TimeoutError:
        return "no answer"
    except (OSError, UnicodeError) as error:  # the latter for what can be no name
        return (getattr(error, "strerror", None) or str(error)).lower()
    return ""


def public_address_warning(endpoint: str) -> str | None:
    """What to tell a user whose rendezvous has an address that the whole internet can route to; None if it
    has none. A name that cannot be looked up at once has none either: no run can use it anyway.
    """
    for text in resolve_addresses(host_of(endpoint)):
        address = ipaddress.ip_address(text.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_global and not address.is_multicast:
            where = endpoint if text in endpoint else f"{endpoint} ({text})"
            return (
                f"warning: the rendezvous is at the public address {where}. PyTorch's distributed layer has "
                "no authentication: whoever reaches its ports can join the run or end it. Use a private "
                "network, or a firewall"
            )
    return None


def resolve_addresses(host: str) -> list[str]:
    """The addresses of a name or address; none if it cannot be looked up within two seconds."""
    if is_address(host):
        return [str(ipaddress.ip_address(host.partition("%")[0]))]
    if host:  # a name server that does not answer must not hold the run up
        with suppress(OSError, UnicodeError):
            found = run_in_daemon_thread(lambda: socket.getaddrinfo(host, None)).result(_LOOK_UP_S)
            return [str(entry[4][0]) for entry in found]
    return []


def _local_addresses_towards(host: str) -> list[str]:
    """This host's own address on each way to another one."""
    found = []
    for target in resolve_addresses(host):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, _ANY_PORT))  # sends nothing: the kernel chooses a way
            found.append(str(probe.getsockname()[0]).partition("%")[0])
    return found


def interface_by_address() -> dict[str, str]:
    """The interface of each address of this host."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def check_interfaces(variable: str, value: str, *, several_hosts: bool) -> None:
    """Raise NetworkError unless the interfaces that a variable names exist, and for several hosts lead
    elsewhere. NCCL takes prefixes, exact names, and such that it shall not take: `eth,ib`, `=eth0`,
    `^docker`.
    """
    if value.startswith("^"):
        return  # those need not be here
    there = sorted(psutil.net_if_addrs())
    exact = variable == INTERFACE_VARIABLES[0] or value.startswith("=")
    for name in value.lstrip("=").split(","):
        if not any(interface == name or (interface.startswith(name) and not exact) for interface in there):
            raise NetworkError(f"{variable} is {value}, but the interfaces here are {', '.join(there)}")
    up = interface_by_address()
    loopbacks = {name for address, name in up.items() if is_loopback(address)}
    loopbacks -= {name for address, name in up.items() if not is_loopback(address)}  # a router's own address
    if several_hosts and (name := value.lstrip("=")) in loopbacks:
        raise NetworkError(f"{variable} is {name}, the loopback, through which no other host can be reached")


def is_address(host: str) -> bool:
    """Whether a host is given by its address and not by a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address leads to this host alone."""
    return ipaddress.ip_address(address).is_loopback
