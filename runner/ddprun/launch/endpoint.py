"""Where hosts meet: whether somebody answers there, and whether strangers can reach it."""

import ipaddress
import socket

from ddprun.host.network import addresses, host_of

_ANSWER_S = 3.0
DEFAULT_PORT = 29400
"""torchelastic's own, of an endpoint without one."""


def public_address(endpoint: str) -> str | None:
    """The public address behind a rendezvous endpoint.

    Args:
        endpoint: `host`, `host:port`, `[IPv6]:port`, or several with commas between them.

    Returns:
        The first address that the whole internet can route to; None if there is none, or if a name cannot be
        looked up at once: then nobody meets there anyway.
    """
    for one in endpoint.split(","):
        for address in addresses(host_of(one.strip())):
            if _is_public(address):
                return address
    return None


def warning(endpoint: str) -> str | None:
    """What to tell a user whose ranks meet at a public address; None if they do not."""
    address = public_address(endpoint)
    if address is None:
        return None
    where = endpoint if address in endpoint else f"{endpoint} ({address})"
    return (
        f"ddprun: warning: ranks meet at the public address {where}. PyTorch's distributed layer has no "
        "authentication: whoever reaches its ports can join the run or end it. Use a private network, or a "
        "firewall"
    )


def answers(endpoint: str) -> bool:
    """Whether a rendezvous can be reached at all; takes a few seconds for each of its places at most."""
    for one in endpoint.split(","):
        try:
            socket.create_connection(place_of(one.strip()), timeout=_ANSWER_S).close()
        except (OSError, ValueError):
            continue
        return True
    return False


def place_of(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT or [IPv6]:PORT.

    Raises:
        ValueError: it is none of these.
    """
    port = endpoint.rpartition(":")[2] if endpoint.count(":") == 1 or "]:" in endpoint else ""
    if not (port or "0").isdigit():
        raise ValueError(f"{endpoint!r} is no HOST:PORT")
    return host_of(endpoint), int(port or DEFAULT_PORT)


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_global and not address.is_multicast
