"""Joining the other ranks: the store, the default process group, and which rank failed first."""

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddprun.engine.place import Place

_FIRST_FAILURE = "failed"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the launcher told this process (torchrun's environment variables)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int

    @classmethod
    def read(cls) -> "Environment":
        """Read RANK, WORLD_SIZE and their kin."""
        number = {
            name: int(os.environ.get(name, default))
            for name, default in (
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1"),
                ("GROUP_WORLD_SIZE", "1"),
            )
        }
        return cls(*number.values())


class Ranks:
    """This rank among the others.

    Args:
        environment: from the launcher.
        timeout: how long a collective, or joining, may take.
    """

    def __init__(self, environment: Environment, timeout: timedelta) -> None:
        self.environment = environment
        self.rank = environment.rank
        self.size = environment.world_size
        self.hosts: tuple[str, ...] = ()
        """Host name of each rank, once joined."""

        self.local_sizes: tuple[int, ...] = ()
        """For each rank, how many ranks its launcher started on its host, once joined."""

        self._timeout = timeout
        self._base: dist.Store | None = None

    @property
    def store(self) -> dist.Store:
        """Small values that all ranks share; open once `connect` has run."""
        assert self._base is not None
        return dist.PrefixStore("ddprun", self._base)

    @property
    def holds_store(self) -> bool:
        """Whether the store ends with this process: rank 0's, unless torchelastic's agent holds it."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self.rank == 0 and self.size > 1 and not agents

    def connect(self) -> None:
        """Reach the store."""
        base, _, _ = next(iter(dist.rendezvous("env://", self.rank, self.size, timeout=self._timeout)))
        base.set_timeout(self._timeout)
        self._base = base

    def join(self, place: Place) -> None:
        """Make the default process group, and learn which host each rank is on."""
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        dist.init_process_group(
            place.backend, store=self._base, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        place_of_rank = json.dumps([socket.gethostname(), self.environment.local_world_size])
        self.hosts, self.local_sizes = zip(*map(json.loads, self.gather("hosts", place_of_rank)), strict=True)

    def tell_all(self, key: str, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank."""
        if self.rank == 0:
            self.store.set(key, make())
        return str(self.store.get(key).decode())

    def gather(self, key: str, value: str) -> list[str]:
        """Every rank's text on every rank, in rank order."""
        store = self.store
        store.set(f"{key}/{self.rank}", value)
        if self.rank == 0:
            store.set(key, json.dumps([store.get(f"{key}/{rank}").decode() for rank in range(self.size)]))
        found: list[str] = json.loads(store.get(key))
        return found

    def first_to_fail(self, exit_code: int) -> tuple[bool, int]:
        """Claim to be the first rank that failed.

        A rank that raises claims before its connections close, so the others, whose collectives then break,
        find the claim taken and leave the screen to the cause.

        Returns:
            (whether this rank is the first, the first rank's exit code).
        """
        if self._base is None:
            return True, exit_code
        mine = json.dumps([self.rank, exit_code])
        try:
            winner = self.store.compare_set(_FIRST_FAILURE, "", mine).decode() or mine
        except Exception:  # the store's own host is gone: nobody is left to ask
            return True, exit_code
        rank, code = json.loads(winner)
        return rank == self.rank, code

    def leave(self) -> None:
        """Take down the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


def die_with_parent() -> None:
    """Have the kernel end this process when its launcher dies, however that dies (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)
