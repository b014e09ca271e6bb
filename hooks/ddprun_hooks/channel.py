"""The collectives that a hook can ask for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ddprun_hooks.team import Team

Op = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast"]


class Collective:
    """A collective that a hook asks for: `await` it to have it done.

    It is a request: which process group it travels on and when it starts is decided by the lane, so that all
    ranks issue collectives in one order.
    """

    __slots__ = ("maximum", "op", "output", "shared", "sizes", "source", "team", "tensor")

    def __init__(
        self,
        team: Team,
        op: Op,
        tensor: Tensor,
        output: Tensor,
        *,
        sizes: Sequence[int] | None = None,
        source: int = 0,
        shared: bool = False,
        maximum: bool = False,
    ) -> None:
        self.team = team
        self.op: Op = op
        self.tensor = tensor
        self.output = output
        self.sizes = sizes
        """Elements of each rank's part, where a tensor is cut into parts; None: equal parts."""

        self.source = source
        self.shared = shared
        """Through shared memory."""

        self.maximum = maximum
        """All-reduce to the largest value instead of the sum."""

    def __await__(self) -> Generator[Collective, Tensor, Tensor]:
        return (yield self)


class Channel:
    """The collectives among one team of ranks, as a hook sees them.

    Args:
        team: the ranks.
        shared: exchange through shared memory.
    """

    __slots__ = ("_team", "rank", "shared", "size")

    def __init__(self, team: Team, shared: bool = False) -> None:
        self._team = team
        self.rank = team.rank
        self.size = team.size
        self.shared = shared

    def split(self, hosts: int | None) -> tuple[Team, Team]:
        """The ranks of this rank's host, and the ranks of its place on every host."""
        return self._team.splits[hosts]

    def in_memory(self) -> Channel:
        """The same ranks, exchanging through shared memory."""
        return Channel(self._team, shared=True)

    def all_reduce(self, tensor: Tensor) -> Collective:
        """Sum `tensor` (any shape) over the ranks, in place; gives `tensor`."""
        return Collective(self._team, "all_reduce", tensor, tensor, shared=self.shared)

    def all_reduce_max(self, tensor: Tensor) -> Collective:
        """The ranks' largest value at each place of `tensor` (any shape), in place; gives `tensor`."""
        return Collective(self._team, "all_reduce", tensor, tensor, maximum=True)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Collective:
        """Gather `tensor` of every rank, in rank order.

        Args:
            tensor: shape (sizes[rank],), or of one length on all ranks.
            sizes: elements of each rank's tensor; None if they are equal.

        Returns:
            Shape (sum(sizes),).
        """
        total = self.size * tensor.numel() if sizes is None else sum(sizes)
        return Collective(
            self._team, "all_gather", tensor, tensor.new_empty(total), sizes=sizes, shared=self.shared
        )

    def all_to_all(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Collective:
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
        return Collective(self._team, "all_to_all", tensor, tensor.new_empty(self.size * mine), sizes=sizes)

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
        if self.shared:
            return await Collective(
                self._team, "reduce_scatter", tensor, tensor.new_empty(mine), sizes=sizes, shared=True
            )
        parts = (await self.all_to_all(tensor, sizes)).view(self.size, mine)
        total = parts[0].to(torch.promote_types(tensor.dtype, torch.float32))
        for part in parts[1:]:
            total = total.add_(part)
        return total.to(tensor.dtype)

    def broadcast(self, tensor: Tensor, source: int) -> Collective:
        """Overwrite `tensor` with that of rank `source`, in place; gives `tensor`."""
        return Collective(self._team, "broadcast", tensor, tensor, source=source)
