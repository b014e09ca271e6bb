"""c10d's TCP store, listening on the one address where ranks reach it instead of on every interface.

Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore.
"""

import socket
import time
from datetime import timedelta
from functools import partial

from torch.distributed import DistNetworkError, TCPStore

from ddprun.host import network
from ddprun.host.processes import run_in_daemon_thread

_BACKLOG = 2048  # connections that wait to be accepted, as with the listener of c10d itself
_ANSWER_S = 5.0  # for a store's first answer, after the connection
_RETRY_DELAY_S = 0.2


def open_store(
    host: str, port: int, *, serve: bool, timeout: timedelta, world_size: int | None = None
) -> TCPStore:
    """A store at `host:port`, an address that every rank reaches.

    If this process is to `serve`, the store ends with it, and port 0 takes a free one. `timeout` is of each
    question to the store, and of connecting; with `world_size`, wait until so many processes have connected.
    Raises OSError if the port is in use here, DistError if the server cannot be reached in time.
    """
    address = listen_address(host) if serve else None
    wait = world_size is not None
    if address is None:
        if not serve:
            # In a thread, which a signal can interrupt.
            run_in_daemon_thread(partial(_wait_for_server, host, port, timeout.total_seconds())).result()
        connect = partial(
            TCPStore, host, port, world_size, serve, timeout, wait_for_workers=wait, multi_tenant=True
        )
        try:
            return run_in_daemon_thread(connect).result((1 + wait) * timeout.total_seconds() + _ANSWER_S)
        except TimeoutError:  # once it is connected, torch waits for an answer for ever
            raise DistNetworkError(
                f"another program may have port {port} (ss -ltnp): it takes connections, but does not answer "
                "as a store of ranks"
            ) from None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=_BACKLOG) as listener:
        port, handle = listener.getsockname()[1], listener.fileno()
        store = TCPStore(
            host, port, world_size, True, timeout, wait_for_workers=wait, master_listen_fd=handle
        )
        listener.detach()  # the store closes it
        return store


def _wait_for_server(host: str, port: int, within_s: float) -> None:
    """Wait until somebody listens there; raises DistNetworkError that says why this host does not get there.
    Torch itself waits for up to twice the time, tries ever more rarely, and does not say why.
    """
    until = time.monotonic() + within_s
    while problem := network.connection_problem(host, port):
        if time.monotonic() > until:
            known = ", ".join(dict.fromkeys(network.resolve_addresses(host)))
            at = f"{host}:{port}" + ("" if known in ("", host) else f" ({known})")
            raise DistNetworkError(f"{socket.gethostname()} cannot connect to {at}: {problem}")
        time.sleep(_RETRY_DELAY_S)


def listen_address(host: str) -> str | None:
    """The address of this host on which a store for `host` listens; None: every interface.

    An address of this host counts as it is, and `localhost` as 127.0.0.1. A name may lead to another address
    elsewhere than here: it counts if it leads to exactly one address of this host, which is also the one by
    which this host reaches the network.
    """
    own = network.interface_by_address()
    found = network.resolve_addresses(host)
    here = [*dict.fromkeys(one for one in found if one in own or network.is_loopback(one))]
    if host == "localhost":
        return network.LOOPBACK
    if len(here) == 1 and (network.is_address(host) or here[0] == network.address_towards("")):
        return here[0]
    return None
