"""How the ranks of one host get memory that they share, and sockets to each other.

Every rank listens at a socket that is in no folder, and connects to the ranks before it; rank 0 then sends
the memory to the others. Nothing of a group has a name in the file system, and it is gone when the last of
its ranks is.
"""

import itertools
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Final

import torch

from ddprun_hooks.errors import ExchangeError, format_ranks
from ddprun_hooks.shm.group import SLOT_BYTES, PeerSocket, ShmGroup

_MEMORY_MARKER: Final = b"\1"  # what comes with the memory
_HELLO: Final = struct.Struct("=2I")  # what a rank says first: of which group, and its place in it
_PEERCRED: Final = struct.Struct("3i")  # pid, uid, gid

Connections = dict[tuple[int, int], socket.socket]  # by group, and the other rank's place in it


def open_shm_groups(
    *,
    rank: int,
    labels: Sequence[int],
    count: int,
    all_gather_bytes: Callable[[bytes], Sequence[bytes]],
    timeout_s: float,
) -> list[ShmGroup]:
    """Make `count` groups among ranks of one host, which errors call by their `labels`; this one is
    labels[rank]. Each of them has to call this, with equal arguments; raises ExchangeError if some do not
    arrive, are another user's, or have no memory to share.

    `all_gather_bytes` gives what these ranks give (32 bytes at most) to all of them, in rank order; it is
    called once on each. Making the groups, and then any one wait in an operation, may take `timeout_s`.
    """
    size = len(labels)
    nbytes = 2 * size * SLOT_BYTES
    deadline = time.monotonic() + timeout_s
    groups = []
    with ExitStack() as cleanup:
        connections = _connect(rank, labels, count, all_gather_bytes, deadline, cleanup)
        try:
            for index in range(count):
                peers = {other: connections[index, other] for other in range(size) if other != rank}
                if rank == 0:
                    memory = os.memfd_create("ddprun")
                    cleanup.callback(os.close, memory)
                    os.posix_fallocate(memory, 0, nbytes)  # to run out of memory here, not at a write to it
                    for peer in peers.values():
                        socket.send_fds(_with_timeout(peer, deadline), [_MEMORY_MARKER], [memory])
                else:
                    memory = _receive_memory(_with_timeout(peers[0], deadline))
                    cleanup.callback(os.close, memory)
                mapping = torch.frombuffer(mmap.mmap(memory, nbytes), dtype=torch.uint8)
                sockets = [PeerSocket(peer.detach(), labels[other]) for other, peer in peers.items()]
                groups.append(ShmGroup(rank, mapping.view(2, size, SLOT_BYTES), sockets, timeout_s))
        except OSError as error:
            source = f" with rank {labels[0]}" if rank else ""
            raise ExchangeError(f"rank {labels[rank]} cannot share memory{source}: {error}") from error
    return groups


def _connect(
    rank: int,
    labels: Sequence[int],
    count: int,
    all_gather_bytes: Callable[[bytes], Sequence[bytes]],
    deadline: float,
    cleanup: ExitStack,
) -> Connections:
    """Connect to every other rank, once for each group. `cleanup` closes what is not used."""
    size = len(labels)
    connections: Connections = {}
    awaited: Collection[tuple[int, int]] = [(0, other) for other in range(size) if other != rank]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"\0ddprun-" + secrets.token_hex(8).encode())  # an abstract socket: in no folder
            listener.listen(size * count)
            addresses = all_gather_bytes(listener.getsockname())
            for index, other in itertools.product(range(count), range(rank)):
                awaited = [(index, other)]
                peer = connections[index, other] = cleanup.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(addresses[other])  # waits until there is room, or that rank listens no more
                if (user := _uid(peer)) != os.geteuid():
                    raise ExchangeError(
                        f"refused to share memory with user {user}: all ranks of a host must run as one "
                        f"user, and this one runs as {os.geteuid()}"
                    )
                peer.send(_HELLO.pack(index, rank))
            wanted = set(itertools.product(range(count), range(rank + 1, size)))
            while awaited := wanted - connections.keys():
                peer = cleanup.enter_context(_with_timeout(listener, deadline).accept()[0])
                # Every user of the host can connect.
                said = _with_timeout(peer, deadline).recv(_HELLO.size) if _uid(peer) == os.geteuid() else b""
                if len(said) == _HELLO.size and (place := _HELLO.unpack(said)) in awaited:
                    connections[place] = peer
                else:
                    peer.close()
    except OSError as error:
        late = format_ranks(labels[other] for _, other in awaited)
        raise ExchangeError(f"{late} did not arrive: {error}") from error
    return connections


def _receive_memory(rank_0: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(rank_0, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise ConnectionError("it gave up")
    return descriptors[0]


def _with_timeout(waiting: socket.socket, deadline: float) -> socket.socket:
    """`waiting`, with what is left of the time."""
    waiting.settimeout(max(deadline - time.monotonic(), 1e-3))
    return waiting


def _uid(peer: socket.socket) -> int:
    """Whose process the other end is."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(credentials)
    return int(uid)
