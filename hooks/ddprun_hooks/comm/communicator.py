"""The collectives that a hook can ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from ddprun_hooks.comm.groups import CollectiveRequest, RankGroup
from ddprun_hooks.payload import ParamSlice

RestOfStack = Callable[[Tensor, tuple[ParamSlice, ...] | None, Tensor | None], Awaitable[Tensor]]
"""The rest of a stack, behind the hook that is running: called as `Communicator.reduce`."""


class Communicator:
    """The ranks that a hook reduces over.

    A codec awaits `reduce`, which hands its tensor to the rest of the stack; a reducer awaits collectives.
    """

    __slots__ = ("_rest_of_stack", "group", "rank", "size", "via_shared_memory")

    def __init__(
        self, group: RankGroup, rest_of_stack: RestOfStack | None = None, *, via_shared_memory: bool = False
    ) -> None:
        self.group = group
        self.rank = group.rank  # this rank in the group
        self.size = group.size
        self.via_shared_memory = via_shared_memory
        self._rest_of_stack = rest_of_stack

    async def reduce(
        self,
        tensor: Tensor,
        params: tuple[ParamSlice, ...] | None = None,
        compression_error: Tensor | None = None,
    ) -> Tensor:
        """Reduce `tensor` over the ranks by the rest of the stack; returns the sum.

        Args:
            tensor: shape (any,); its memory may be overwritten.
            params: the parameters to which its elements belong; None: as in the payload if the length is the
                same, else none.
            compression_error: shape (any,), zeros: later hooks add to it what they did not send. None: they
                keep that themselves, by parameter; each element must then belong to one of `params`.
        """
        assert self._rest_of_stack is not None, "a hook's communicator knows the rest of its stack"
        return await self._rest_of_stack(tensor, params, compression_error)

    def split(self, host_count: int | None) -> tuple[Communicator, Communicator]:
        """The ranks of this rank's host, and the ranks of the same index on every host. `host_count` says
        into how many hosts the ranks are split; None: as they were launched.
        """
        within, across = self.group.splits_by_host_count[host_count]
        return Communicator(within), Communicator(across)

    def in_shared_memory(self) -> Communicator:
        """The same ranks: `all_reduce`, `all_gather` and `reduce_scatter` go through shared memory."""
        return Communicator(self.group, self._rest_of_stack, via_shared_memory=True)

    def all_reduce(self, tensor: Tensor) -> CollectiveRequest:
        """Sum `tensor` (any shape, contiguous) over the ranks, in place; gives `tensor`."""
        _check_contiguous("all_reduce", tensor)
        return CollectiveRequest(self.group, "all_reduce", tensor, tensor, self.via_shared_memory)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> CollectiveRequest:
        """Gather `tensor` of every rank, in rank order.

        Args:
            tensor: any shape, taken flat, of sizes[rank] elements, or of equally many on all ranks.
            sizes: elements of each rank's tensor; None if they are equal.

        Returns:
            Shape (sum(sizes),).
        """
        if sizes is not None and tensor.numel() != sizes[self.rank]:
            raise ValueError(
                f"all_gather: sizes[{self.rank}] is {sizes[self.rank]}, but the tensor of rank {self.rank} "
                f"has {tensor.numel()} elements"
            )
        tensor = tensor.reshape(-1)
        total = self.size * tensor.numel() if sizes is None else sum(sizes)
        output = tensor.new_empty(total)
        return CollectiveRequest(self.group, "all_gather", tensor, output, self.via_shared_memory, sizes)

    def all_to_all(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> CollectiveRequest:
        """Send the i-th part of `tensor` to rank i; gives the parts sent to this rank, in rank order.

        Args:
            tensor: shape (sum(sizes),).
            sizes: elements of each part, the same list on every rank; None for equal parts.

        Returns:
            Shape (size * sizes[rank],).
        """
        if sizes is None and tensor.numel() % self.size:
            raise ValueError(
                f"all_to_all cuts {tensor.numel()} elements into {self.size} equal parts: pad them"
            )
        mine = tensor.numel() // self.size if sizes is None else sizes[self.rank]
        output = tensor.new_empty(self.size * mine)
        return CollectiveRequest(self.group, "all_to_all", tensor, output, sizes=sizes)

    async def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum the parts of `tensor` over the ranks; gives this rank's part of the sum.

        16-bit floats are summed in fp32 and rounded once, in rank order everywhere.

        Args:
            tensor: shape (sum(sizes),).
            sizes: elements of each rank's part, the same list on every rank.

        Returns:
            Shape (sizes[rank],).
        """
        mine = sizes[self.rank]
        if self.size == 1:
            return tensor
        if self.via_shared_memory:
            output = tensor.new_empty(mine)
            return await CollectiveRequest(self.group, "reduce_scatter", tensor, output, True, sizes)
        parts = (await self.all_to_all(tensor, sizes)).view(self.size, mine)
        total = parts[0].to(torch.promote_types(tensor.dtype, torch.float32))
        for part in parts[1:]:
            total = total.add_(part)
        return total.to(tensor.dtype)

    def broadcast(self, tensor: Tensor, source: int) -> CollectiveRequest:
        """Overwrite `tensor` (contiguous) with that of rank `source`, in place; gives `tensor`."""
        _check_contiguous("broadcast", tensor)
        return CollectiveRequest(self.group, "broadcast", tensor, tensor, source=source)


def _check_contiguous(op: str, tensor: Tensor) -> None:
    """Gloo ignores strides: it would sum, or overwrite, other elements of the memory."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op} changes a contiguous tensor in place: pass tensor.contiguous(), and use what comes back"
        )


def view_per_rank(gathered: Tensor, size: int) -> Tensor:
    """What each of `size` ranks sent, shape (size, n); on the meta device the first one's alone, (1, n)."""
    whole = gathered.view(size, -1)
    return whole[:1] if whole.is_meta else whole
