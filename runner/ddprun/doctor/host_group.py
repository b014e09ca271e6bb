"""The hosts of a launch, of which one rank each takes part in what is measured between them."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ddprun.parallel.ranks import Ranks
from ddprun.screen import say

_TICK_S = 0.05
_MORE_S, _ANSWERS_S = 5.0, 5.0
_FAILED = 1

LOOK = "look at that host and at the link to it"


class LostError(RuntimeError):
    """Hosts that were there do not answer any more; says which."""


@contextmanager
def bounded(within_s: float) -> Iterator[None]:
    """End this process if the block does not come to its end: a dead link says nothing, and the store waits.

    Args:
        within_s: what the block takes at most by its own account.
    """

    def end() -> None:
        told = f"the host on which ranks meet does not answer any more\n  -> {LOOK}"
        say(f"ddprun doctor: {told}")
        os._exit(_FAILED)

    timer = threading.Timer(within_s + _MORE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class HostGroup:
    """One rank of each host, in rank order.

    Args:
        store: that all ranks share.
        members: rank that stands for each host.
        rank: this one.
        names: of the hosts.
    """

    def __init__(self, store: dist.Store, members: Sequence[int], rank: int, names: Sequence[str]) -> None:
        self.store = store
        self.size = len(members)
        self.names = tuple(names)
        self.index: int | None = members.index(rank) if rank in members else None
        """Place of this rank's host; None: another rank stands for it."""

    @property
    def place(self) -> int:
        """Of this host, for a rank that stands for it."""
        assert self.index is not None
        return self.index

    @classmethod
    def of(cls, ranks: Ranks, here: Sequence[str]) -> "HostGroup":
        """Find the hosts. Every rank has to call this.

        Args:
            ranks: that have reached the store.
            here: what this rank's host is known by: its name, and something that tells it from another one
                of the same name.
        """
        places = [tuple(json.loads(text)) for text in ranks.gather("doctor/places", json.dumps(here))]
        hosts = list(dict.fromkeys(places))
        names = [name for name, _ in hosts]
        told = [
            name if names.count(name) == 1 else f"{name} (rank {places.index(host)})"
            for (name, _), host in zip(hosts, hosts, strict=True)
        ]
        store = dist.PrefixStore("doctor", ranks.store)
        return cls(store, [places.index(host) for host in hosts], ranks.rank, told)

    def gather(self, key: str, value: Any, within_s: float) -> list[Any]:
        """Every host's value on every host, as JSON can carry it.

        Args:
            key: used once.
            value: this host's.
            within_s: how long to wait for the last one.

        Raises:
            LostError: not all have come.
        """
        keys = [f"{key}/{index}" for index in range(self.size)]
        until = time.monotonic() + within_s
        with bounded(_ANSWERS_S):
            self.store.set(keys[self.place], json.dumps(value))
        while not self._there(keys):
            if time.monotonic() > until:
                late = [name for name, one in zip(self.names, keys, strict=True) if not self._there([one])]
                raise LostError(f"{', '.join(late)} did not answer within {within_s:g} s ({key})")
            time.sleep(_TICK_S)
        with bounded(_ANSWERS_S):
            return [json.loads(self.store.get(one)) for one in keys]

    def _there(self, keys: list[str]) -> bool:
        with bounded(_ANSWERS_S):
            return bool(self.store.check(keys))

    def tell(self, key: str, value: Any) -> None:
        """Leave a value for every rank."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """Wait for what some rank tells, however long that takes."""
        while not self._there([key]):
            time.sleep(_TICK_S)
        with bounded(_ANSWERS_S):
            return json.loads(self.store.get(key))

    def part(self, rank: int, ranks: int, within_s: float) -> None:
        """Let this process end: whoever holds the store has to be the last.

        Args:
            rank: this one.
            ranks: how many there are.
            within_s: how long to wait for the others.
        """
        until = time.monotonic() + within_s
        with bounded(within_s), suppress(RuntimeError):  # the store may end with another process first
            self.store.set(f"bye/{rank}", "")
            keys = [f"bye/{one}" for one in range(ranks)]
            while not self.store.check(keys) and time.monotonic() < until:
                time.sleep(_TICK_S)
            time.sleep(_TICK_S)
