"""How hosts find each other: torchelastic's rendezvous, without its trust in whoever reaches the port.

torchelastic's own handlers listen on every interface, and its c10d one unpickles what it finds in the store
(https://docs.pytorch.org/docs/stable/elastic/rendezvous.html). Here a single host needs no network, stores
listen on one address, and the state of the rendezvous holds nothing but what torchelastic puts there.
"""

import io
import pickle
import socket
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    api,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _delay

from ddprun.host.network import LOOPBACK, host_and_port, is_this_host
from ddprun.host.tcp_store import open_store

_STORE_ANSWERS_S = 60
_POLL_S = 0.2  # between two looks at the state of the rendezvous
_RANK_STORE_TIMEOUT = timedelta(seconds=300)

# All that torchelastic's state of a rendezvous is made of.
_ALLOWED_STATE_CLASSES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("builtins", "set"),
}


def make_rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler for these parameters; raises ValueError for a wrong one, api.RendezvousConnectionError."""
    if parameters.backend in ("static", "c10d") and parameters.max_nodes == 1:
        return SingleHostRendezvous(parameters.run_id)
    if parameters.backend == "c10d" and parameters.get("store_type", "tcp") == "tcp":
        store = _open_rendezvous_store(parameters)
        handler = create_handler(store, _CheckedC10dBackend(store, parameters.run_id), parameters)
        # Torchelastic caches the state for 1 s, and sleeps for 1 s between reads while it waits for hosts.
        handler._state_holder._cache_duration = _POLL_S  # type: ignore[attr-defined]
        dynamic_rendezvous._delay = _capped_delay
        # The store for ranks listens on one address, too.
        handler._create_tcp_store_server = partial(  # type: ignore[method-assign]
            open_store, serve=True, timeout=_RANK_STORE_TIMEOUT
        )
        return handler
    found = rendezvous.get_rendezvous_handler(parameters)  # static: checks the parameters, and opens nothing
    if parameters.backend == "static" and isinstance(found, StaticTCPRendezvous):
        timeout_s = round(found.timeout.total_seconds())
        found = _StaticRendezvousOnOneAddress(
            found.master_addr, found.master_port, found.rank, found.world_size, found.run_id, timeout_s
        )
    return found


def _capped_delay(seconds: float | tuple[float, float]) -> None:
    """Wait as torchelastic does while it looks for other hosts, but not for as long."""
    _delay(seconds if isinstance(seconds, tuple) else min(seconds, _POLL_S))


class SingleHostRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single host: there are no others. Each start of the ranks gets stores of its own,
    held by this process, so that a restart finds nothing that the ranks before it left.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(LOOPBACK, 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """This host as the only one, with new stores."""
        self._rank_store = open_store(LOOPBACK, 0, serve=True, timeout=_RANK_STORE_TIMEOUT)
        address = api.RendezvousStoreInfo(LOOPBACK, self._rank_store.port)
        return RendezvousInfo(HashStore(), 0, 1, address)


class _StaticRendezvousOnOneAddress(StaticTCPRendezvous):
    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = open_store(
                self.master_addr,
                self.master_port,
                serve=self.rank == 0,
                timeout=self.timeout,
                world_size=self.world_size,
            )
        return super().next_rendezvous()


class _CheckedC10dBackend(C10dRendezvousBackend):
    """torchelastic's state of a rendezvous in a store, which is held against what it may hold."""

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Token] | None:
        found: tuple[bytes, Token] | None = super()._decode_state(base64_state)
        if found is not None:
            check_pickled_state(found[0])
        return found


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_STATE_CLASSES:
            raise api.RendezvousStateError(
                f"the store of the rendezvous holds {module}.{name}, which no host of a run puts there; it "
                "was not loaded. Somebody else reaches the port: use a private network or a firewall"
            )
        return super().find_class(module, name)


def check_pickled_state(state: bytes) -> None:
    """Raise RendezvousStateError unless the state is intact and names only what torchelastic's is made of."""
    try:
        _StateUnpickler(io.BytesIO(state)).load()
    except api.RendezvousStateError:
        raise
    except Exception as error:  # pickle's ways to fail on damaged bytes are many
        raise api.RendezvousStateError(f"the store of the rendezvous holds damaged state: {error}") from error


def _open_rendezvous_store(parameters: RendezvousParameters) -> Store:
    """The store of the rendezvous. The endpoint's host holds it; of several launchers there, the first."""
    host, port = host_and_port(parameters.endpoint)
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout") or _STORE_ANSWERS_S)
    serve = parameters.get_as_bool("is_host")
    if serve is None:
        serve = is_this_host(host) or host == socket.gethostname()
    try:
        if serve:
            try:
                return open_store(host, port, serve=True, timeout=timeout)
            except (OSError, RuntimeError) as error:  # torch's own for a port in use is a RuntimeError
                if parameters.get_as_bool("is_host"):
                    raise api.RendezvousConnectionError(f"cannot listen at {host}:{port}: {error}") from error
        return open_store(host, port, serve=False, timeout=timeout)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise api.RendezvousConnectionError(str(error)) from error
