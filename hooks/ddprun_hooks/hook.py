"""How a communication hook is written: a straight line of encode, hand on, decode.

```python
class Halved(Hook):
    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        total = await link.hand_on(payload.tensor.half())   # encode, hand on to the rest of the stack
        return total.float()                                # decode
```

Each `await` is a point at which other buckets go on: overlap with backward, ordering between ranks,
streams, timing and the count of bytes are the engine's business (`ddprun_hooks.lane`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ddprun_hooks.payload import Payload
    from ddprun_hooks.stack import Link

Op = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]


class Hook:
    """Base of every hook. A subclass writes `__call__` and, if it keeps something, the two state methods."""

    role: ClassVar[Literal["codec", "reducer", "alone"]] = "codec"
    """A codec hands on; a reducer carries the payload over the ranks itself and ends the stack."""

    rounds: ClassVar[int] = 1
    """The most `hand_on`s (codec) or collectives (reducer) that one payload needs. Process groups are made
    for so many before the first step; one round more is an error that names the hook."""

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        """Return the mean over ranks, with the shape, dtype and device of `payload.tensor`.

        `payload.tensor` is this hook's own: it may be changed in place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def state_dict(self) -> dict[str, Any]:
        """What decides later steps, keyed by parameter name (see `ddprun_hooks.state.Stateful`)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back what `state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")


class FunctionHook(Hook):
    """A hook that is a plain `async def hook(payload, link)`."""

    def __init__(self, function: Callable[[Payload, Link], Awaitable[Tensor]]) -> None:
        self._function = function

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return await self._function(payload, link)


class Collective:
    """A collective that a hook asks for: `await` it to have it done.

    It is a request: which process group it travels on and when it starts is decided by the lane, so that all
    ranks issue collectives in one order.
    """

    __slots__ = ("op", "output", "source", "tensor")

    def __init__(self, op: Op, tensor: Tensor, output: Tensor, source: int = 0) -> None:
        self.op: Op = op
        self.tensor = tensor
        self.output = output
        self.source = source

    def __await__(self) -> Generator[Collective, Tensor, Tensor]:
        return (yield self)


class Channel:
    """The collectives among one set of ranks, as a hook sees them."""

    __slots__ = ("rank", "size")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Collective:
        """Sum `tensor` (any shape) over the ranks, in place; gives `tensor`."""
        return Collective("all_reduce", tensor, tensor)

    def all_gather(self, tensor: Tensor) -> Collective:
        """Gather `tensor` (numel,) of every rank, in rank order; gives (size * numel,)."""
        return Collective("all_gather", tensor, tensor.new_empty(self.size * tensor.numel()))

    def all_to_all(self, tensor: Tensor) -> Collective:
        """Send the i-th of `size` equal parts of `tensor` (size * k,) to rank i; gives the parts sent to
        this rank, in rank order, (size * k,).
        """
        if tensor.numel() % self.size:
            raise ValueError(
                f"all_to_all cuts {tensor.numel()} elements into {self.size} equal parts: pad them"
            )
        return Collective("all_to_all", tensor, torch.empty_like(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Collective:
        """Overwrite `tensor` with that of rank `source`, in place; gives `tensor`."""
        return Collective("broadcast", tensor, tensor, source)
