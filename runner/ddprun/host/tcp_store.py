"""c10d's TCP store, listening on the one address where ranks reach it instead of on every interface.

Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from ddprun.host.network import (
    LOOPBACK,
    address_towards,
    interface_by_address,
    is_address,
    is_loopback,
    resolve_addresses,
)

_BACKLOG = 2048  # connections that wait to be accepted, as with the listener of c10d itself


def open_store(
    host: str, port: int, *, serve: bool, timeout: timedelta, world_size: int | None = None
) -> TCPStore:
    """A store at `host:port`.

    Args:
        host: name or address at which every rank reaches it.
        port: of the server; 0 takes a free one if this process serves.
        serve: the server runs in this process, and ends with it.
        timeout: of each question to the store, and of connecting.
        world_size: wait until so many processes have connected; None: do not wait.

    Raises:
        OSError: this process serves, and the port is in use.
        DistError: the server cannot be reached in time.
    """
    address = listen_address(host) if serve else None
    wait = world_size is not None
    if address is None:
        return TCPStore(host, port, world_size, serve, timeout, wait_for_workers=wait, multi_tenant=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=_BACKLOG) as listener:
        port, handle = listener.getsockname()[1], listener.fileno()
        store = TCPStore(
            host, port, world_size, True, timeout, wait_for_workers=wait, master_listen_fd=handle
        )
        listener.detach()  # the store closes it
        return store


def listen_address(host: str) -> str | None:
    """The address of this host on which a store for `host` listens; None: every interface.

    An address of this host counts as it is, and `localhost` as 127.0.0.1. A name may lead to another address
    elsewhere than here: it counts if it leads to exactly one address of this host, which is also the one by
    which this host reaches the network.
    """
    own = interface_by_address()
    here = list(
        dict.fromkeys(found for found in resolve_addresses(host) if found in own or is_loopback(found))
    )
    if host == "localhost":
        return LOOPBACK
    if len(here) == 1 and (is_address(host) or here[0] == address_towards("")):
        return here[0]
    return None
