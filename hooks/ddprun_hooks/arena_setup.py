"""How the ranks of one host come by memory that they share, and by links to each other."""

import itertools
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ddprun_hooks.arena import LINE_BYTES, SLOT_BYTES, Arena, Link, round_up
from ddprun_hooks.errors import ExchangeError

_HERE: Final = b"\1"
_NOBODY: Final = b"-"  # shared in place of a name when rank 0 could make none
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED
_RANK: Final = struct.Struct("I")


def open_arenas(
    *,
    rank: int,
    size: int,
    count: int,
    share: Callable[[bytes], bytes],
    timeout_s: float,
    slot_bytes: int = SLOT_BYTES,
    names: Sequence[int] | None = None,
) -> list[Arena]:
    """Make arenas among the ranks of one host. Every one of them has to call this, with equal arguments.

    Nothing of an arena has a name in the file system: it is gone when the last of its ranks is.

    Args:
        rank: this rank's place among them.
        size: how many they are.
        count: how many arenas to make.
        share: gives rank 0's argument (32 bytes at most) to every rank; called once on each.
        timeout_s: how long making them, and then any one wait in an operation, may take.
        slot_bytes: bytes that each rank puts into memory at a time, at least 128 for each rank.
        names: what errors call the ranks, if not 0, 1, ….

    Raises:
        ExchangeError: ranks that did not arrive, belong to another user, or have no memory to share.
    """
    slot_bytes = round_up(slot_bytes, mmap.PAGESIZE)
    if slot_bytes < 2 * LINE_BYTES * size:
        raise ValueError(f"slots of {slot_bytes} bytes are too small for {size} ranks")
    names = range(size) if names is None else names
    if size == 1:
        return [Arena(0, torch.empty((2, 1, 0), dtype=torch.uint8), (), timeout_s) for _ in range(count)]
    nbytes = 2 * size * slot_bytes
    setup = _Setup(names, time.monotonic() + timeout_s)
    if rank == 0:
        arenas = setup.hand_out(size, count, nbytes, share)
    else:
        arenas = setup.collect(rank, size, count, share(b""))
    made = []
    try:
        for descriptors in arenas:
            mapping = mmap.mmap(descriptors[0], nbytes)
            memory = torch.frombuffer(mapping, dtype=torch.uint8).view(2, size, slot_bytes)
            peers = [name for place, name in enumerate(names) if place != rank]
            links = [Link(descriptors.pop(1), peer) for peer in peers]
            made.append(Arena(rank, memory, links, timeout_s))
    except OSError as error:
        raise ExchangeError(f"rank {names[rank]} cannot map shared memory: {error}") from error
    finally:
        for descriptor in [descriptor for descriptors in arenas for descriptor in descriptors]:
            os.close(descriptor)
    return made


class _Setup:
    """How the ranks come by the descriptors of their arenas: for each, that of its memory and those of the
    links to the other ranks, in rank order. All are made by rank 0 and sent over sockets in no folder.
    """

    def __init__(self, names: Sequence[int], deadline: float) -> None:
        self._names = names
        self._deadline = deadline
        self._mine: list[list[int]] = []

    def hand_out(
        self, size: int, count: int, nbytes: int, share: Callable[[bytes], bytes]
    ) -> list[list[int]]:
        """Make everything, and give every other rank its own."""
        # Whoever knows the name can connect, so it cannot be guessed; others of this user could do worse.
        name = secrets.token_hex(16).encode()
        peers: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(_address(name))
                listener.listen(size)
            except OSError as error:
                share(_NOBODY)
                raise ExchangeError(f"rank {self._names[0]} cannot listen: {error}") from error
            share(name)
            try:
                while len(peers) < size - 1:
                    peer, _ = self._in_time(listener).accept()
                    self._refuse_strangers(peer)
                    (rank,) = _RANK.unpack(self._in_time(peer).recv(_RANK.size))
                    peers[rank] = peer
                for _ in range(count):
                    self._hand_out_one(peers, size, nbytes)
            except (OSError, struct.error) as error:
                self._give_up()
                late = ", ".join(str(self._names[rank]) for rank in range(1, size) if rank not in peers)
                what = f"rank {late} did not arrive" if late else "no memory could be shared"
                raise ExchangeError(f"{what}: {error}") from error
            except BaseException:
                self._give_up()
                raise
            finally:
                for peer in peers.values():
                    peer.close()
        return self._mine

    def _hand_out_one(self, peers: dict[int, socket.socket], size: int, nbytes: int) -> None:
        def give(rank: int, descriptor: int) -> None:
            if rank == 0:
                self._mine[-1].append(descriptor)
                return
            # Rank 0 must keep no copy of what is another's, or that rank's death would go unnoticed.
            try:
                socket.send_fds(self._in_time(peers[rank]), [_HERE], [descriptor])
            finally:
                os.close(descriptor)

        self._mine.append([])
        memory = os.memfd_create("ddprun")
        give(0, memory)
        os.posix_fallocate(memory, 0, nbytes)  # to run out of memory here, not at a write to it
        for rank in range(1, size):
            give(rank, os.dup(memory))
        for low, high in itertools.combinations(range(size), 2):
            ends = [end.detach() for end in socket.socketpair()]
            give(low, ends[0])
            give(high, ends[1])

    def collect(self, rank: int, size: int, count: int, name: bytes) -> list[list[int]]:
        """Take what rank 0 hands out."""
        if name == _NOBODY:
            raise ExchangeError(f"rank {self._names[0]} cannot listen")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
                self._in_time(host).connect(_address(name))
                self._refuse_strangers(host)
                host.send(_RANK.pack(rank))
                for _ in range(count):
                    self._mine.append([])
                    for _ in range(size):
                        _, got, _, _ = socket.recv_fds(self._in_time(host), 1, 1, socket.MSG_CMSG_CLOEXEC)
                        if not got:
                            raise ConnectionError("it gave up")
                        self._mine[-1].extend(got)
        except OSError as error:
            self._give_up()
            raise ExchangeError(f"rank {self._names[0]} shares no memory: {error}") from error
        except BaseException:
            self._give_up()
            raise
        return self._mine

    def _in_time(self, waiting: socket.socket) -> socket.socket:
        """`waiting`, with what is left of the time."""
        waiting.settimeout(max(self._deadline - time.monotonic(), 1e-3))
        return waiting

    def _refuse_strangers(self, peer: socket.socket) -> None:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.geteuid():
            peer.close()
            raise ExchangeError(
                f"refused to share memory with user {uid}: all ranks of a host must run as one user, "
                f"and this one runs as {os.geteuid()}"
            )

    def _give_up(self) -> None:
        for descriptor in [descriptor for descriptors in self._mine for descriptor in descriptors]:
            os.close(descriptor)


def _address(name: bytes) -> bytes:
    """Of the abstract socket `name`, which is in no folder."""
    return b"\0ddprun-" + name
