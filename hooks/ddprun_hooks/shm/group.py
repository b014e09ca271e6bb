"""Collectives among the ranks of one host through memory that they share.

Memory has a half for even and a half for odd phases, and in each half a slot for every rank. One rule covers
every operation: *in phase i a rank writes to half i % 2, notifies every peer, waits for every peer, and reads
half i % 2 until it notifies phase i + 1*. A half is written again in phase i + 2, which a rank enters once
all peers have notified phase i + 1, after they had read the half: two halves are enough, and one barrier a
phase.

A barrier is a byte on a socket between each two ranks, not a flag in memory: on every architecture the byte
arrives after what was written before it was sent, a rank can sleep until it comes, and the socket of a
process that has died reads as ended.
"""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.futures import Future

from ddprun_hooks.errors import ExchangeError, format_ranks

SLOT_BYTES = 1 << 21  # that a rank puts into memory at a time: small enough for all slots to stay in a cache
CACHE_LINE_BYTES: Final = 64  # no two ranks write to one cache line
_ARRIVED_BYTE: Final = b"\1"


class PeerSocket(socket.socket):
    """This rank's end of the socket to one peer; closed when nothing refers to it any more."""

    __slots__ = ("rank_label",)

    def __init__(self, descriptor: int, rank_label: int) -> None:
        super().__init__(fileno=descriptor)
        self.rank_label = rank_label
        self.setblocking(False)
        _open_sockets.add(self)

    def __del__(self) -> None:
        self.close()


# An operation under way: it runs until it has to wait, and yields the peers that it waits for. Resume it when
# one of them is readable or the group's deadline has passed; the next may begin when it has ended.
ShmOperation = Generator[Sequence[PeerSocket], None, None]
_open_sockets: "WeakSet[PeerSocket]" = WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked child, which would keep them open when the rank itself has died."""
    for peer in list(_open_sockets):
        peer.close()


os.register_at_fork(after_in_child=_close_in_child)


class ShmGroup:
    """Memory shared by the ranks of one host, and the sockets between them.

    Every rank runs the same operations on a group, one after the other and in the same order. Tensors are
    contiguous, in host memory, and alike in length and dtype on all ranks. Every element is summed by one
    rank, in rank order, and fp16 and bf16 in fp32: all ranks get the same bits.

    `memory` is (2, size, bytes of a slot), uint8, shared; a slot has at least 128 bytes for each rank.
    `peers` has a socket to each other rank, in rank order. An operation waits `timeout_s` for a peer.
    """

    def __init__(self, rank: int, memory: Tensor, peers: Sequence[PeerSocket], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self.error: ExchangeError | None = None  # why the group can be used no more
        self.phase = 0  # barriers that this rank has passed
        # Operations that were submitted and have not ended. One thread at a time runs them: it alone steps
        # the first and removes it, and leaves when there is none.
        self.pending: deque[tuple[ShmOperation, Future[None]]] = deque()
        self.deadline = math.inf  # when the operation under way gives up waiting, by `time.monotonic`
        self._memory = memory
        self._peers = tuple(peers)
        self._timeout_s = timeout_s
        self._plans: dict[tuple[torch.dtype, int | tuple[int, ...]], _ChunkPlan] = {}
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    def all_reduce(self, tensor: Tensor) -> ShmOperation:
        """Sum `tensor` (any shape) over the ranks, in place."""
        flat = tensor.detach().view(-1)
        plan = self._cached_chunk_plan(flat.dtype, flat.numel())
        chunks, rank = plan.split_to_chunks(flat), self.rank
        # A piece is summed as the next is put in: one barrier more than pieces, not twice as many.
        for turn in range(len(plan.pieces) + 1 if plan.pieces else 0):
            half = self.phase & 1
            if turn < len(plan.pieces):
                for part, view in plan.pieces[turn].outgoing_parts[half]:
                    view.copy_(chunks[part][turn])
            if turn:
                piece = plan.pieces[turn - 1]
                # Into the share of its slot that a rank does not fill, because nobody else sums it.
                if piece.lengths[rank]:
                    self._sum(piece.incoming_parts[1 - half], chunks[rank][turn - 1], piece.own_part[half])
            yield from self._barrier()
            if turn:
                for part, view in piece.result_parts[half]:
                    chunks[part][turn - 1].copy_(view)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], output: Tensor) -> ShmOperation:
        """Sum parts of `tensor`, (sum(sizes),), into `output`, (sizes[rank],), maybe its part of `tensor`."""
        tensor, output = tensor.detach(), output.detach()
        plan = self._cached_chunk_plan(tensor.dtype, tuple(sizes))
        chunks, rank = plan.split_to_chunks(tensor), self.rank
        outputs = plan.split_part(output, rank)
        for turn, piece in enumerate(plan.pieces):
            half = self.phase & 1
            for part, view in piece.outgoing_parts[half]:
                view.copy_(chunks[part][turn])
            yield from self._barrier()
            if piece.lengths[rank]:
                self._sum(piece.incoming_parts[half], chunks[rank][turn], outputs[turn])

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], output: Tensor) -> ShmOperation:
        """Gather tensors, (sizes[rank],), into `output`, (sum(sizes),), of which `tensor` may be a part."""
        tensor, output = tensor.detach(), output.detach()
        rank, start = self.rank, sum(sizes[: self.rank])
        output[start : start + sizes[rank]].copy_(tensor)
        plan = self._cached_chunk_plan(tensor.dtype, tuple(sizes))
        chunks = plan.split_to_chunks(output)
        for turn, piece in enumerate(plan.pieces):
            half = self.phase & 1
            if piece.lengths[rank]:
                piece.own_part[half].copy_(chunks[rank][turn])
            yield from self._barrier()
            for part, view in piece.result_parts[half]:
                if part != rank:
                    chunks[part][turn].copy_(view)

    def _barrier(self) -> ShmOperation:
        """Wait until every rank is here; raises ExchangeError with the peers that are gone or late."""
        missing: Sequence[PeerSocket] = self._peers
        for peer in missing:
            try:
                peer.send(_ARRIVED_BYTE)
            except OSError:
                continue  # `_peers_not_arrived` reports it
        self.deadline = math.inf
        while missing := self._peers_not_arrived(missing):
            now = time.monotonic()
            if self.deadline == math.inf:
                self.deadline = now + self._timeout_s
            elif now >= self.deadline:
                raise self._mark_broken(missing, f"did not arrive within {self._timeout_s:g} s")
            yield missing
        self.phase += 1

    def _peers_not_arrived(self, peers: Sequence[PeerSocket]) -> Sequence[PeerSocket]:
        silent, gone = [], []
        for peer in peers:
            try:
                if not peer.recv(1):
                    gone.append(peer)
            except BlockingIOError:
                silent.append(peer)
            except OSError:
                gone.append(peer)
        if gone:
            raise self._mark_broken(gone, "left the exchange: the process has ended or given up")
        return silent

    def _mark_broken(self, peers: Sequence[PeerSocket], what: str) -> ExchangeError:
        ranks = format_ranks(peer.rank_label for peer in peers)
        self.error = self.error or ExchangeError(f"{ranks} {what}")
        return self.error

    def _sum(self, slots: Sequence[Tensor], own: Tensor, out: Tensor) -> None:
        """Sum the peers' `slots` and this rank's `own`, in rank order, into `out`, which may be `own`."""
        terms = [*slots[: self.rank], own, *slots[self.rank + 1 :]]
        if self.size == 1:
            out.copy_(own)
        elif self.size > 2 and out.dtype in (torch.float16, torch.bfloat16):  # torch rounds a sum of two once
            total = self._scratch_for(torch.float32, 0, out.numel()).copy_(terms[0])
            term = self._scratch_for(torch.float32, 1, out.numel())
            for other in terms[1:]:
                total.add_(term.copy_(other))
            out.copy_(total)
        else:
            total = terms[0]
            for other in terms[1:-1]:
                total = torch.add(total, other, out=self._scratch_for(out.dtype, 0, out.numel()))
            torch.add(total, terms[-1], out=out)

    def _scratch_for(self, dtype: torch.dtype, index: int, numel: int) -> Tensor:
        scratch = self._scratch.get((dtype, index))
        if scratch is None or scratch.numel() < numel:
            scratch = self._scratch[dtype, index] = torch.empty(numel, dtype=dtype)
        return scratch[:numel]

    def _cached_chunk_plan(self, dtype: torch.dtype, sizes: int | tuple[int, ...]) -> "_ChunkPlan":
        """How to carry parts of `sizes`, or a tensor of that many elements in parts nearly equal."""
        plan = self._plans.get((dtype, sizes))
        if plan is None:
            if len(self._plans) >= 256:  # of tensors that are never of one length twice
                self._plans.clear()
            memory = self._memory.view(dtype)
            parts = _part_sizes(sizes, self.size, memory.element_size()) if isinstance(sizes, int) else sizes
            plan = self._plans[dtype, sizes] = _ChunkPlan(self.rank, parts, memory)
        return plan


class _ChunkPlan:
    """How tensors of one length travel: each part is cut into chunks, and the i-th chunks of all parts are
    piece i, which fits into a slot. `memory` is (2, size, elements of a slot).
    """

    def __init__(self, rank: int, sizes: Sequence[int], memory: Tensor) -> None:
        self.sizes = list(sizes)
        align = CACHE_LINE_BYTES // memory.element_size()
        room = memory.shape[2] - align * len(sizes)
        count = -(-sum(sizes) // room)
        # Elements of each part's chunks but the last.
        self.chunk_sizes = [round_up(-(-size // max(count, 1)), align) for size in sizes]
        self.pieces: list[_ChunkViews] = []
        for turn in range(count):
            lengths = [
                max(0, min(chunk_size, size - turn * chunk_size))
                for chunk_size, size in zip(self.chunk_sizes, sizes, strict=True)
            ]
            self.pieces.append(_ChunkViews(rank, self.chunk_sizes, lengths, memory))

    def split_to_chunks(self, tensor: Tensor) -> list[Sequence[Tensor]]:
        """The chunks of each part of `tensor` (sum(sizes),)."""
        parts = tensor.split_with_sizes(self.sizes)
        return [self.split_part(part, index) for index, part in enumerate(parts)]

    def split_part(self, part: Tensor, index: int) -> Sequence[Tensor]:
        """The chunks of part `index` (sizes[index],)."""
        chunk_size = self.chunk_sizes[index]
        return (part,) if part.numel() <= chunk_size else torch.split(part, chunk_size)


class _ChunkViews:
    """Where a piece lies in memory; everything but `lengths` for each half."""

    __slots__ = ("incoming_parts", "lengths", "outgoing_parts", "own_part", "result_parts")

    def __init__(self, rank: int, chunk_sizes: Sequence[int], lengths: Sequence[int], memory: Tensor) -> None:
        self.lengths = lengths  # elements of each part, which begins where those before it would end whole
        starts = [sum(chunk_sizes[:part]) for part in range(len(chunk_sizes))]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        filled = [part for part, length in enumerate(lengths) if length]
        # Other ranks' parts in this rank's slot.
        self.outgoing_parts = [
            [(part, half[rank, starts[part] : ends[part]]) for part in filled if part != rank]
            for half in memory
        ]

        # This rank's part in every slot.
        self.incoming_parts = [list(half[:, starts[rank] : ends[rank]]) for half in memory]

        # Every part in the slot of its own rank.
        self.result_parts = [
            [(part, half[part, starts[part] : ends[part]]) for part in filled] for half in memory
        ]
        self.own_part = [slots[rank] for slots in self.incoming_parts]  # this rank's part in its own slot


def _part_sizes(numel: int, count: int, element_bytes: int) -> list[int]:
    """Sizes of `count` parts of whole cache lines, the last but for what is left."""
    share = round_up(-(-numel // count), CACHE_LINE_BYTES // element_bytes)
    return [max(0, min(share, numel - part * share)) for part in range(count)]


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple
