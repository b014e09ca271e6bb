"""How the ranks of one host get memory that they share, and sockets to each other.

Rank 0 makes all of it and sends descriptors over sockets that are in no folder: nothing of a group has a name
in the file system, and it is gone when the last of its ranks is.
"""

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

from ddprun_hooks.errors import ExchangeError, format_ranks
from ddprun_hooks.shm.group import CACHE_LINE_BYTES, SLOT_BYTES, PeerSocket, ShmGroup, round_up

_DESCRIPTOR_MARKER: Final = b"\1"
_RANK: Final = struct.Struct("=I")  # what a rank says first: its place in the group
_PEERCRED: Final = struct.Struct("3i")  # pid, uid, gid

Descriptors = list[int]  # of one group: of its memory, and of the sockets to the other ranks, in rank order


def open_shm_groups(
    *,
    rank: int,
    size: int,
    count: int,
    broadcast_bytes: Callable[[bytes], bytes],
    timeout_s: float,
    slot_bytes: int = SLOT_BYTES,
    rank_labels: Sequence[int] | None = None,
) -> list[ShmGroup]:
    """Make `count` groups among the `size` ranks of one host. Each of them has to call this, with equal
    arguments; raises ExchangeError if some do not arrive, are another user's, or have no memory to share.

    `broadcast_bytes` gives rank 0's argument (32 bytes at most) to every rank; it is called once on each.
    Making the groups, and then any one wait in an operation, may take `timeout_s`. A rank puts `slot_bytes`
    into memory at a time, at least 128 for each rank. Errors name ranks by `rank_labels`; None: by number.
    """
    slot_bytes = round_up(slot_bytes, mmap.PAGESIZE)
    if slot_bytes < 2 * CACHE_LINE_BYTES * size:
        raise ValueError(f"slots of {slot_bytes} bytes are too small for {size} ranks")
    rank_labels = range(size) if rank_labels is None else rank_labels
    if size == 1:
        return [ShmGroup(0, torch.empty((2, 1, 0), dtype=torch.uint8), (), timeout_s) for _ in range(count)]
    nbytes = 2 * size * slot_bytes
    other_labels = [label for index, label in enumerate(rank_labels) if index != rank]
    deadline = time.monotonic() + timeout_s
    groups: list[Descriptors] = []
    try:
        if rank == 0:
            _create_and_send_descriptors(groups, rank_labels, count, nbytes, broadcast_bytes, deadline)
        else:
            _receive_descriptors(groups, rank_labels, count, rank, broadcast_bytes(b""), deadline)
        made = []
        for descriptors in groups:
            mapping = mmap.mmap(descriptors[0], nbytes)
            memory = torch.frombuffer(mapping, dtype=torch.uint8).view(2, size, slot_bytes)
            peers = [PeerSocket(descriptors.pop(1), label) for label in other_labels]
            made.append(ShmGroup(rank, memory, peers, timeout_s))
        return made
    except OSError as error:
        raise ExchangeError(f"rank {rank_labels[rank]} cannot map shared memory: {error}") from error
    finally:
        for descriptor in itertools.chain(*groups):
            os.close(descriptor)


def _create_and_send_descriptors(
    groups: list[Descriptors],
    rank_labels: Sequence[int],
    count: int,
    nbytes: int,
    broadcast_bytes: Callable[[bytes], bytes],
    deadline: float,
) -> None:
    """Make everything, put rank 0's own descriptors into `groups`, and give every other rank its own."""
    size = len(rank_labels)
    peers: dict[int, socket.socket] = {}

    def give(rank: int, descriptor: int) -> None:
        if rank == 0:
            groups[-1].append(descriptor)
            return
        # Rank 0 must keep no copy of what is another's, or that rank's death would go unnoticed.
        try:
            socket.send_fds(_with_timeout(peers[rank], deadline), [_DESCRIPTOR_MARKER], [descriptor])
        finally:
            os.close(descriptor)

    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            address = b"\0ddprun-" + secrets.token_hex(8).encode()  # of an abstract socket: in no folder
            listener.bind(address)
            listener.listen(size)
            broadcast_bytes(address)
            while len(peers) < size - 1:
                peer, _ = _with_timeout(listener, deadline).accept()
                # Every user of the host can connect.
                said = _with_timeout(peer, deadline).recv(_RANK.size) if _uid(peer) == os.geteuid() else b""
                other = _RANK.unpack(said)[0] if len(said) == _RANK.size else 0
                if 0 < other < size and other not in peers:
                    peers[other] = peer
                else:
                    peer.close()
        for _ in range(count):
            groups.append([])
            memory = os.memfd_create("ddprun")
            give(0, memory)
            os.posix_fallocate(memory, 0, nbytes)  # to run out of memory here, not at a write to it
            for rank in range(1, size):
                give(rank, os.dup(memory))
            for low, high in itertools.combinations(range(size), 2):
                ends = [end.detach() for end in socket.socketpair()]
                give(low, ends[0])
                give(high, ends[1])
    except OSError as error:
        late = [rank_labels[rank] for rank in range(1, size) if rank not in peers]
        what = f"{format_ranks(late)} did not arrive" if late else "no memory could be shared"
        raise ExchangeError(f"{what}: {error}") from error
    finally:
        for peer in peers.values():
            peer.close()


def _receive_descriptors(
    groups: list[Descriptors],
    rank_labels: Sequence[int],
    count: int,
    rank: int,
    address: bytes,
    deadline: float,
) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank_0:
            rank_0.connect(address)  # waits until there is room, or rank 0 listens no more
            if (user := _uid(rank_0)) != os.geteuid():
                raise ExchangeError(
                    f"refused to share memory with user {user}: all ranks of a host must run as one user, "
                    f"and this one runs as {os.geteuid()}"
                )
            rank_0.send(_RANK.pack(rank))
            for _ in range(count):
                groups.append([])
                for _ in rank_labels:
                    _, got, _, _ = socket.recv_fds(
                        _with_timeout(rank_0, deadline), 1, 1, socket.MSG_CMSG_CLOEXEC
                    )
                    if not got:
                        raise ConnectionError("it gave up")
                    groups[-1].extend(got)
    except OSError as error:
        raise ExchangeError(f"rank {rank_labels[0]} shares no memory: {error}") from error


def _with_timeout(waiting: socket.socket, deadline: float) -> socket.socket:
    """`waiting`, with what is left of the time."""
    waiting.settimeout(max(deadline - time.monotonic(), 1e-3))
    return waiting


def _uid(peer: socket.socket) -> int:
    """Whose process the other end is."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(credentials)
    return int(uid)
