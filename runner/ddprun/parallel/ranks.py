"""Joining the other ranks: the store, the default process group, and which rank failed first."""

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddprun.host import network
from ddprun.host.processes import run_in_daemon_thread
from ddprun.host.rank_files import attempt_folder
from ddprun.host.tcp_store import open_store
from ddprun.watchdog.hang_report import PeerAddress
from ddprun.watchdog.launcher_watchdog import STATUS_SERVER_VARIABLE
from ddprun.watchdog.rank_watchdog import RankWatchdog
from ddprun.watchdog.status_page import claim_once
from ddprun_hooks.comm.collective_observer import observed_wait
from ddprun_hooks.comm.groups import RankPlacement
from ddprun_hooks.errors import format_ranks

_FIRST_FAILURE = "failed"

_STORE_TIMEOUT_S = 1.0  # in trouble: it may live in the very process that is stuck
_FAILURE_TIMEOUT_S = 5.0  # after a failure nothing need be stuck, but a busy machine answers late
_T = TypeVar("_T")


class FirstFailure(NamedTuple):
    """Which rank failed first, or found a hang first."""

    rank: int | None  # None: another one of this host; nobody could be asked which
    exit_code: int
    is_hang: bool = False


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What the launcher says to this process (torchrun's environment variables)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls) -> "RankEnvironment":
        known = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name, default)) for name, default in known.items()))


@dataclass(eq=False)
class Ranks:
    """This rank among the others."""

    environment: RankEnvironment
    timeout: timedelta  # of a collective, and of joining
    watchdog: RankWatchdog  # knows what this rank waits for
    host: str = field(default_factory=lambda: socket.gethostname())
    placement: RankPlacement = field(init=False)  # where all ranks are, once joined
    _base_store: dist.Store | None = None
    _second_connection: dist.Store | None = None
    _pending_query: Future[Any] | None = None  # the last one to the store
    _peers: dict[int, PeerAddress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.size = self.environment.rank, self.environment.world_size
        self._joining = self.watchdog.new_sequence("joining", range(self.size))

    @property
    def store(self) -> dist.Store:
        """Small values that all ranks share; open once `connect_store` has run."""
        assert self._base_store is not None
        return dist.PrefixStore("ddprun", self._base_store)

    @property
    def holds_store(self) -> bool:
        """Whether the store ends with this process: rank 0's, unless torchelastic's agent holds it."""
        return self.rank == 0 and self.size > 1 and _rank_0_holds_store()

    def connect_store(self) -> None:
        with observed_wait(self._joining, "rendezvous", "reaching the ranks' store"):
            base: Any = open_store(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                serve=self.rank == 0 and _rank_0_holds_store(),
                timeout=self.timeout,
                world_size=self.size,
            )
        base.set_timeout(self.timeout)
        # A second connection, because the first is not free while the training thread waits for a value.
        second, prefix = base.clone(), _store_prefix()
        self._base_store = dist.PrefixStore(prefix, base)
        self._second_connection = dist.PrefixStore("ddprun", dist.PrefixStore(prefix, second))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            network.choose_loopback()
        elif self.size > 1:
            self._discover_hosts()

    def _discover_hosts(self) -> None:
        """Find out which ranks are on this host, if the launcher has not said so, and choose the network
        interface to the other hosts: the one over which this host reached the store; on the store's own host,
        the one towards another host. Raises NetworkError if there is none, or if hosts have the same name.
        """
        endpoint = os.environ["MASTER_ADDR"]
        found = self.gather("addresses", [self.host, network.machine_id(), network.address_towards(endpoint)])
        hosts, machines, addresses = zip(*found, strict=True)
        if shared := network.duplicate_host_names(zip(hosts, machines, strict=True)):
            ranks = format_ranks(rank for rank, host in enumerate(hosts) if host == shared[0])
            raise network.NetworkError(
                f"{ranks} are on several hosts that are all called {shared[0]}; {network.HOST_NAME_ADVICE}"
            )
        if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            local_rank = int(os.environ.get("LOCAL_RANK", hosts[: self.rank].count(self.host)))
            self.environment = RankEnvironment(self.rank, self.size, local_rank, hosts.count(self.host))
        others = [one for host, one in zip(hosts, addresses, strict=True) if host != self.host]
        if others:
            network.choose_interface_together(
                self.host, endpoint, others[0], partial(self.gather, "interfaces")
            )

    def join(self, device: torch.device, backend: str) -> None:
        """Make the default process group, and learn which host each rank is on."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.watchdog.device = device
        self._publish_address()
        with observed_wait(self._joining, "init_process_group", "making the process group of all ranks"):
            dist.init_process_group(
                backend,
                store=self._base_store,
                rank=self.rank,
                world_size=self.size,
                timeout=self.timeout,
            )
        self._learn_hosts()

    def adopt_process_group(self, prefix: str) -> None:
        """Use the default process group, which a script has made, and its store, with this prefix of keys."""
        store = dist.distributed_c10d._get_default_store()
        base: Any = dist.PrefixStore(f"{prefix}-{_store_prefix()}", store)
        self._base_store, self._second_connection = base, dist.PrefixStore("ddprun", base.clone())
        self._publish_address()
        self._learn_hosts()

    def _publish_address(self) -> None:
        local_size, server = self.environment.local_world_size, os.environ.get(STATUS_SERVER_VARIABLE, "")
        page = self.watchdog.status_page.path
        self.store.set(f"host/{self.rank}", json.dumps([self.host, local_size, page, server]))

    def _learn_hosts(self) -> None:
        everyone = self._collect("host", "learning which host each rank is on")
        hosts, local_sizes, pages, servers = zip(*everyone, strict=True)
        self.placement = RankPlacement(self.rank, hosts, local_sizes)
        self._peers = dict(enumerate(map(PeerAddress, hosts, pages, servers)))

    def from_rank_0(self, key: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank, as JSON has it."""
        if self.rank == 0:
            self.store.set(key, json.dumps(make()))
        with observed_wait(self._joining, "get", f"rank 0's value of {key}", [0]):
            return json.loads(self.store.get(key))

    def peers(self) -> dict[int, PeerAddress]:
        """The ranks that have joined; takes no longer than a second."""
        if self._peers:
            return self._peers
        found: dict[int, PeerAddress] = {}

        def ask(store: dist.Store) -> None:
            for rank in range(self.size):
                if store.check([f"host/{rank}"]):
                    host, _, page, server = json.loads(store.get(f"host/{rank}"))
                    found[rank] = PeerAddress(host, page, server)

        self._query_store(ask)
        return dict(found)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Every rank's value on every rank, in rank order, as JSON has it."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))  # ASCII: a path may not be UTF-8
        return self._collect(key, f"every rank's value of {key}")

    def _collect(self, key: str, what: str) -> list[Any]:
        """What every rank has put under its own key, on every rank."""
        store = self.store
        with observed_wait(self._joining, "get", what):
            if self.rank == 0:
                everyone = [json.loads(store.get(f"{key}/{rank}")) for rank in range(self.size)]
                store.set(key, json.dumps(everyone))
            found: list[Any] = json.loads(store.get(key))
        return found

    def claim_first_failure(self, exit_code: int, *, is_hang: bool = False) -> FirstFailure:
        """Claim to be the first rank that failed, or found a hang; gives which one was.

        A rank that raises claims before its connections close, so the others, whose collectives then break,
        find the claim taken and leave the screen to the cause.
        """
        if self._base_store is None:
            return FirstFailure(self.rank, exit_code, is_hang)
        mine = json.dumps([self.rank, exit_code, is_hang])
        winner = self._query_store(
            lambda store: store.compare_set(_FIRST_FAILURE, "", mine).decode() or mine,
            _STORE_TIMEOUT_S if is_hang else _FAILURE_TIMEOUT_S,
        )
        if winner is None:  # the store's own host is gone, or its process: only this host's ranks can agree
            is_first = claim_once(attempt_folder(), _FIRST_FAILURE)
            return FirstFailure(self.rank if is_first else None, exit_code, is_hang)
        return FirstFailure(*json.loads(winner))

    def first_failure(self) -> FirstFailure | None:
        """Which rank failed first; None if none has, or the store does not answer."""
        if self._pending_query is not None and not self._pending_query.done():
            return None  # each further question would be a thread that waits, too

        def ask(store: dist.Store) -> str:
            return store.get(_FIRST_FAILURE).decode() if store.check([_FIRST_FAILURE]) else ""

        found = self._query_store(ask)
        return FirstFailure(*json.loads(found)) if found else None

    def _query_store(
        self, query: Callable[[dist.Store], _T], timeout_s: float = _STORE_TIMEOUT_S
    ) -> _T | None:
        """Run a query on the store; None if it is gone, or does not answer in time."""
        if self._second_connection is None:
            return None
        ask = partial(query, self._second_connection)
        with suppress(Exception):  # no answer, or the store's connection is what is broken
            try:
                self._pending_query = question = run_in_daemon_thread(ask)
            except RuntimeError:  # the interpreter ends
                return ask()
            return question.result(timeout_s)
        return None

    def destroy_process_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store_prefix() -> str:
    """Prefix of this start's keys: a launcher's store outlives ranks, and only one host counts starts."""
    if _rank_0_holds_store() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return "start"
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _rank_0_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
