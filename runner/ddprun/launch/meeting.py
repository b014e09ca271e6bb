"""Meeting the other hosts as a run does, with a place among the ranks, but without starting any."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError

from ddprun.host.network import addresses, is_own
from ddprun.launch.endpoint import place_of
from ddprun.launch.local import quieten, torchrun_arguments
from ddprun.launch.rendezvous import make_handler

_LONG_PATIENCE = "1000000"
_TRY_S = 2.0
_AGAIN_S = 0.2


class MeetingError(RuntimeError):
    """The hosts do not come together.

    Args:
        found: what is so, in one line.
        do: what to do about it.
    """

    def __init__(self, found: str, do: str) -> None:
        super().__init__(found)
        self.do = do


class Meeting:
    """A place among the hosts; what holds it lives as long as this does."""

    def __init__(self, handler: RendezvousHandler, info: RendezvousInfo, where: str) -> None:
        self._handler, self._info, self._where = handler, info, where

    @property
    def store(self) -> Any:
        """Where they have met. Ranks of a run open another store, at a port that may be closed."""
        info: Any = self._info
        return info.store.clone()

    def variables(self) -> dict[str, str]:
        """Torchrun's for the only rank of this host."""
        host, port = place_of(self._where)
        place = {"RANK": self._info.rank, "WORLD_SIZE": self._info.world_size}
        return {
            **{name: str(number) for name, number in place.items()},
            "GROUP_RANK": str(self._info.rank),
            "GROUP_WORLD_SIZE": str(self._info.world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }

    def close(self) -> None:
        """Tell the other hosts that this is the end."""
        self._handler.shutdown()


def meet(flags: Mapping[str, str | bool], timeout_s: float) -> Meeting:
    """Meet the other hosts.

    Args:
        flags: torchrun's own, as they would be given to a run; of a range of hosts the largest number counts.
        timeout_s: how long to wait for them.

    Raises:
        ValueError: torchrun refuses the flags.
        MeetingError: they do not come.
    """
    quieten()
    until = time.monotonic() + timeout_s
    parameters, hosts, static = _parameters(flags, timeout_s)
    where = parameters.endpoint
    reach(where, until)
    try:
        handler = make_handler(parameters)
        return Meeting(handler, handler.next_rendezvous(), where)
    except (DistError, RendezvousError) as error:
        raise MeetingError(
            f"not all of the {hosts} hosts have come to {where} within {timeout_s:g} s ({_in_short(error)})",
            f"start the same command on all {hosts} hosts within this time (--timeout SECONDS gives more); "
            f"where it says that it cannot connect, open TCP port {place_of(where)[1]} to that host; take a "
            "port that nobody uses" + ("" if static else ", and the same --rdzv-id everywhere"),
        ) from None


def reach(endpoint: str, until: float) -> None:
    """Wait until somebody listens where the ranks meet; at once on the host itself, which is to listen.

    Args:
        endpoint: HOST or HOST:PORT.
        until: by the monotonic clock.

    Raises:
        MeetingError: nobody does, or it cannot be reached.
    """
    host, port = place_of(endpoint)
    if not addresses(host):
        raise MeetingError(
            f"the name {host!r} of {endpoint!r} cannot be looked up here",
            "add it to /etc/hosts or to the name service, or write an address",
        )
    if is_own(host):
        return
    told: OSError = TimeoutError()
    while True:
        left_s = until - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(_TRY_S, left_s))).close()
            return
        except OSError as error:
            told = told if isinstance(error, TimeoutError) else error
            if left_s <= 0:
                raise MeetingError(*_unreachable(host, port, told)) from None
            time.sleep(min(_AGAIN_S, left_s))


def _unreachable(host: str, port: int, error: OSError) -> tuple[str, str]:
    here, where = socket.gethostname(), f"{host}:{port}"
    known = ", ".join(dict.fromkeys(addresses(host)))
    at = where if known == host else f"{where} ({known})"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{here} reaches {host}, but nobody listens at {at}",
            f"start the same command on {host}; if it runs there, a firewall refuses port {port}: open it",
        )
    if isinstance(error, TimeoutError):
        return (
            f"{here} cannot connect to {at}: no answer",
            f"open TCP port {port} on {host} for {here} in the firewall or security group, or correct the "
            "address of --rdzv-endpoint",
        )
    return (
        f"{here} cannot connect to {at}: {error.strerror or error}",
        "see `ip route` and `ip addr`: this host has no way there; or correct the address of --rdzv-endpoint",
    )


def _parameters(flags: Mapping[str, str | bool], timeout_s: float) -> tuple[RendezvousParameters, int, bool]:
    """What torchrun makes of the flags; number of hosts; whether the rendezvous is static."""
    given = dict(flags) | {"nproc_per_node": "1", "max_restarts": "0"}
    nodes = str(given.get("nnodes") or os.environ.get("PET_NNODES", "1"))
    given["nnodes"] = nodes.rpartition(":")[2]
    arguments: Any = torchrun_arguments(given, ["-m", "ddprun"])
    config, _, _ = torchrun.config_from_args(arguments)
    static = config.rdzv_backend == "static"
    join_s = str(max(1, round(timeout_s)))
    meeting: dict[str, Any] = {"timeout": round(timeout_s)}
    if not static:
        # Clocks that are apart would make hosts take each other for dead: that is to be told, not met.
        meeting = {
            "join_timeout": join_s,
            "read_timeout": join_s,
            "keep_alive_max_attempt": _LONG_PATIENCE,
        }
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=f"{config.run_id}-doctor",
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{**config.rdzv_configs, **meeting},
    )
    return parameters, config.max_nodes, static


def _in_short(error: Exception) -> str:
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
