"""Hosts that meet as those of a run do, without starting ranks: for `doctor`, `compare` and `tune`."""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousError

from ddprun import EXIT_FAILURE
from ddprun.host.network import host_and_port, resolve_addresses
from ddprun.launch.flags import parse_torchrun_flags, rendezvous_parameters, silence_torchelastic
from ddprun.launch.launcher import Flags, flag_or_variable
from ddprun.launch.rendezvous import make_rendezvous_handler
from ddprun.standard_streams import say

CHECK_HOST_ADVICE = "check that host and the link to it"
_NO_LIMIT = "1000000"
_TICK_S = 0.05
_GRACE_S, _STORE_TIMEOUT_S = 5.0, 5.0


class HostsError(RuntimeError):
    """Hosts do not find each other, or one is lost: what is wrong, and what to do about it."""

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(found)
        self.advice = advice


def lost_contact_error(found: str) -> HostsError:
    """The error for hosts that were there and do not answer any more."""
    return HostsError(f"lost contact between the hosts: {found}", CHECK_HOST_ADVICE)


def error_first_line(error: BaseException) -> str:
    """The first line of what an error says; its name if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts that have met."""

    store: Store
    names: Sequence[str]  # in rank order
    index: int  # of this host

    def gather(self, key: str, value: Any, within_s: float) -> list[Any]:
        """Every host's value on every host, as JSON can carry it; a key is used once. Raises HostsError with
        those that did not answer in time, or if the store is gone.
        """
        names = {f"{key}/{index}": name for index, name in enumerate(self.names)}
        try:
            with exit_on_timeout(_STORE_TIMEOUT_S):
                self.store.set(f"{key}/{self.index}", json.dumps(value))
            if not (missing := wait_for_keys(self.store, [*names], within_s)):
                with exit_on_timeout(_STORE_TIMEOUT_S):
                    return [json.loads(self.store.get(one)) for one in names]
        except RuntimeError as error:  # the store's
            raise lost_contact_error(error_first_line(error)) from None
        late = ", ".join(names[one] for one in missing)
        raise lost_contact_error(f"{late} did not answer within {within_s:g} s ({key})")


def wait_for_keys(store: Store, keys: list[str], within_s: float = math.inf) -> list[str]:
    """Wait until a store holds all keys; gives those that it does not hold in time."""
    until = time.monotonic() + within_s
    while True:
        with exit_on_timeout(_STORE_TIMEOUT_S):
            if store.check(keys):
                return []
            if time.monotonic() > until:
                return [key for key in keys if not store.check([key])]
        time.sleep(_TICK_S)


def leave_together(store: Store, index: int, count: int, within_s: float) -> None:
    """Wait until all have come here: the store ends with the process that holds it."""
    with exit_on_timeout(within_s), suppress(RuntimeError):  # it may have ended already
        store.set(f"bye/{index}", "")
        wait_for_keys(store, [f"bye/{one}" for one in range(count)], within_s)
        time.sleep(_TICK_S)


@contextmanager
def exit_on_timeout(within_s: float) -> Iterator[None]:
    """Exit if the block takes much longer: a dead link raises no error, and the store would block."""

    def end() -> None:
        say(f"the host that holds the store no longer answers\n  -> {CHECK_HOST_ADVICE}")
        os._exit(EXIT_FAILURE)

    timer = threading.Timer(within_s + _GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join_rendezvous(flags: Flags, timeout_s: float, purpose: str) -> tuple[RendezvousHandler, RendezvousInfo]:
    """Meet the other hosts as a run does, with one rank per host and without starting any.

    Of a range of hosts, wait for the largest number. Gives the handler that keeps this host in the rendezvous
    while it lives, and this host's rank. `purpose` separates it from a run with the same id. Raises
    ValueError if torchrun refuses the flags, HostsError if the others do not come.
    """
    silence_torchelastic()
    hosts = (flag_or_variable(flags, "nnodes") or "1").rpartition(":")[2]
    given = {**flags, "nproc_per_node": "1", "max_restarts": "0", "nnodes": hosts}
    config, _, _ = torchrun.config_from_args(parse_torchrun_flags(given, ["-m", "ddprun"]))
    config.run_id = f"{config.run_id}-{purpose}"
    static = config.rdzv_backend == "static"
    limits: dict[str, Any] = {"timeout": round(timeout_s)}
    if not static:
        join_s = str(max(1, round(timeout_s)))
        # Clocks that are apart would make hosts take each other for dead: that is to be reported.
        limits = {"join_timeout": join_s, "read_timeout": join_s, "keep_alive_max_attempt": _NO_LIMIT}
    parameters = rendezvous_parameters(config, **limits)
    host, port = host_and_port(parameters.endpoint)
    if not resolve_addresses(host):
        raise HostsError(
            f"the name {host!r} of {parameters.endpoint!r} does not resolve here",
            "add it to /etc/hosts or to the name service, or write an address",
        )
    try:
        handler = make_rendezvous_handler(parameters)
        return handler, handler.next_rendezvous()
    except (DistError, RendezvousError) as error:
        why = error_first_line(error.__cause__ or error)
        raise HostsError(
            f"not all of the {hosts} hosts reached {parameters.endpoint} within {timeout_s:g} s ({why})",
            f"start the same command on all {hosts} hosts within this time (--timeout SECONDS gives more); "
            f"where it cannot connect, open TCP port {port} to that host; "
            "choose a port that is free" + ("" if static else ", and the same --rdzv-id everywhere"),
        ) from None
