"""How the ranks of one host get memory that they share, and sockets to each other.

Rank 0 makes all of it and sends descriptors over sockets that are in no folder: nothing of a group has a name
in the file system, and it is gone when the last of its ranks is.
"""

import hashlib
import hmac
import itertools
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ddprun_hooks.errors import ExchangeError, format_ranks
from ddprun_hooks.shm.group import CACHE_LINE_BYTES, SLOT_BYTES, PeerSocket, ShmGroup, round_up

_DESCRIPTOR_MARKER: Final = b"\1"
_NO_LISTENER: Final = b"-"  # shared in place of a secret when rank 0 cannot listen
_PEERCRED_STRUCT: Final = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED
_SECRET_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"={_SECRET_BYTES}sI")  # the secret, and this rank in the group
_BACKLOG: Final = 4096  # connections of strangers may wait beside those of ranks
_RETRY_S: Final = 2e-3  # between two attempts to connect when even that many wait

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
    secret = secrets.token_hex(_SECRET_BYTES // 2).encode()
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
            try:
                listener.bind(_address(secret))
                listener.listen(_BACKLOG)
            except OSError as error:
                broadcast_bytes(_NO_LISTENER)
                raise ExchangeError(f"rank {rank_labels[0]} cannot listen: {error}") from error
            broadcast_bytes(secret)
            _accept_ranks(listener, secret, size, peers, deadline)
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


def _accept_ranks(
    listener: socket.socket, secret: bytes, size: int, peers: dict[int, socket.socket], deadline: float
) -> None:
    """Accept connections until `peers` has one of every other rank; raises TimeoutError.

    Every user of the host can connect. A connection of another user, or one that does not begin with the
    secret, is closed; one that says nothing keeps nobody waiting.
    """
    refused: set[int] = set()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(peers) < size - 1:
                ready = selector.select(_remaining_s(deadline))
                if not ready and time.monotonic() >= deadline:
                    others = ", ".join(map(str, sorted(refused)))
                    raise TimeoutError(f"timed out; {_refusal(others)}" if refused else "timed out")
                for key, _ in ready:
                    if key.fileobj is listener:
                        _accept(listener, selector, refused)
                        continue
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    selector.unregister(peer)
                    rank = _claimed_rank(peer, secret, size)
                    if rank is None or rank in peers:
                        peer.close()
                    else:
                        peers[rank] = peer
        finally:
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                    key.fileobj.close()


def _accept(listener: socket.socket, selector: selectors.BaseSelector, refused: set[int]) -> None:
    """Accept one connection, and register it with the selector if it is of this user."""
    try:
        peer, _ = listener.accept()
    except OSError:  # it has gone already
        return
    user = _peer_uid(peer)
    if user == os.geteuid():
        peer.setblocking(False)
        selector.register(peer, selectors.EVENT_READ)
    else:
        refused.add(user)
        peer.close()


def _receive_descriptors(
    groups: list[Descriptors],
    rank_labels: Sequence[int],
    count: int,
    rank: int,
    secret: bytes,
    deadline: float,
) -> None:
    if secret == _NO_LISTENER:
        raise ExchangeError(f"rank {rank_labels[0]} cannot listen")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank_0:
            _connect(rank_0, _address(secret), deadline)
            user = _peer_uid(rank_0)
            if user != os.geteuid():
                raise ExchangeError(_refusal(str(user)))
            _with_timeout(rank_0, deadline).send(_HELLO.pack(secret, rank))
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


def _connect(rank_0: socket.socket, address: bytes, deadline: float) -> None:
    """Connect, also while strangers keep rank 0 busy."""
    while True:
        try:
            return _with_timeout(rank_0, deadline).connect(address)
        except BlockingIOError:  # as many connections wait as may
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def _remaining_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


def _with_timeout(waiting: socket.socket, deadline: float) -> socket.socket:
    """`waiting`, with what is left of the time."""
    waiting.settimeout(_remaining_s(deadline))
    return waiting


def _address(secret: bytes) -> bytes:
    """Of an abstract socket, which is in no folder. All users can read its name, which tells no secret."""
    return b"\0ddprun-" + hashlib.sha256(secret).hexdigest()[:32].encode()


def _peer_uid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED_STRUCT.size)
    _, uid, _ = _PEERCRED_STRUCT.unpack(credentials)
    return int(uid)


def _claimed_rank(peer: socket.socket, secret: bytes, size: int) -> int | None:
    """The rank that a connection claims to be; None if it does not know the secret, or there is none such."""
    try:
        said, rank = _HELLO.unpack(peer.recv(_HELLO.size + 1))
    except (OSError, struct.error):
        return None
    return rank if hmac.compare_digest(said, secret) and 0 < rank < size else None


def _refusal(users: str) -> str:
    return (
        f"refused to share memory with user {users}: all ranks of a host must run as one user, and this one "
        f"runs as {os.geteuid()}"
    )
