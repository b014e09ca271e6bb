"""A stack of hooks: read in the order in which a payload leaves the rank, undone in reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddprun_hooks import grammar
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.hook import Channel, Hook
from ddprun_hooks.payload import Payload


class AllReduce(Hook):
    """Sum over all ranks in one all-reduce: how every stack without a reducer of its own ends."""

    role = "reducer"

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return await link.world.all_reduce(payload.tensor)


class Stack:
    """Hooks in order, ended by a reducer.

    Args:
        hooks: (name, hook) in the order in which a payload meets them; empty for plain all-reduce.

    Raises:
        HookSetupError: a stack that cannot work, with the reason.
    """

    def __init__(self, hooks: Sequence[tuple[str, Hook]]) -> None:
        problems = grammar.faults([(name, hook.role) for name, hook in hooks])
        if problems:
            raise HookSetupError("; ".join(problem for _, problem in problems))
        self.names = tuple(name for name, _ in hooks)
        self._hooks = [hook for _, hook in hooks]
        if not self._hooks or self._hooks[-1].role == "codec":
            self._hooks.append(AllReduce())
        self.rounds = math.prod(hook.rounds for hook in self._hooks)
        """The most collectives that one payload needs on its way through the whole stack."""

    async def run(self, payload: Payload, world: Channel, depth: int = 0) -> Tensor:
        """Carry `payload` through the hooks from `depth` on; gives the mean over ranks."""
        if depth == len(self._hooks):
            raise HookSetupError(f'"{self.names[-1]}" is a reducer: it has nothing to hand its payload on to')
        return await self._hooks[depth](payload, Link(self, payload, world, depth))

    def state_dict(self) -> dict[str, Any]:
        """State of every hook by its name; hooks that keep none are left out."""
        states = {name: hook.state_dict() for name, hook in zip(self.names, self._hooks, strict=False)}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back the state of the hooks that `state` names; other hooks start fresh."""
        for name, hook in zip(self.names, self._hooks, strict=False):
            if name in state:
                hook.load_state_dict(state[name])


class Link:
    """A hook's way onwards: the rest of the stack, and the ranks."""

    __slots__ = ("_depth", "_payload", "_stack", "world")

    def __init__(self, stack: Stack, payload: Payload, world: Channel, depth: int) -> None:
        self._stack = stack
        self._payload = payload
        self._depth = depth
        self.world = world
        """The collectives among all ranks, for a reducer."""

    async def hand_on(self, tensor: Tensor) -> Tensor:
        """Give `tensor` (any one-dimensional shape) to the rest of the stack; gives its sum over ranks."""
        return await self._stack.run(replace(self._payload, tensor=tensor), self.world, self._depth + 1)
