"""A stack of hooks: read in the order in which a payload leaves the rank, undone in reverse."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddprun_hooks import grammar, uncounted
from ddprun_hooks.channel import Channel
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.hook import FunctionHook, Hook, Needs, not_async
from ddprun_hooks.payload import ParamSlice, Payload


class AllReduce(Hook):
    """Sum over all ranks in one all-reduce: how every stack without a reducer of its own ends."""

    role = "reducer"

    async def __call__(self, payload: Payload, link: Link) -> Tensor:
        return await link.world.all_reduce(payload.tensor)


class Stack:
    """Hooks in order, ended by a reducer.

    Args:
        hooks: (name, hook) in the order in which a payload meets them; empty for plain all-reduce.
        described: names and options as they were given, to compare between ranks; by default the names.

    Raises:
        HookSetupError: a stack that cannot work, with the reason.
    """

    def __init__(self, hooks: Sequence[tuple[str, Hook]], described: str = "") -> None:
        self.names = tuple(name for name, _ in hooks)
        self.described = described or repr(list(self.names))
        self.entries: tuple[grammar.Entry, ...] = tuple(
            grammar.Entry(name, hook.role, {leg: stack.entries for leg, stack in hook.legs().items()})
            for name, hook in hooks
        )
        wrong = [problem.text for problem in grammar.problems(self.entries) if problem.severity == "error"]
        if wrong:
            raise HookSetupError("; ".join(wrong))
        self.hooks: list[Hook] = [hook for _, hook in hooks]
        if not self.hooks or self.hooks[-1].role == "codec":
            self.hooks.append(AllReduce())
        *codecs, reducer = self.hooks
        passes = math.prod(hook.rounds for hook in codecs)
        self.foreign = tuple(self._foreign())
        """The hooks that are not built in, those of legs included, by their names."""

        if self.foreign:
            uncounted.install()
        self.needs: Needs = {need: passes * rounds for need, rounds in reducer.needs().items() if rounds}
        """The most collectives that one payload needs on its way through the whole stack, by ranks."""

    def _foreign(self) -> Iterator[tuple[str, Hook]]:
        for name, hook in zip(self.names, self.hooks, strict=False):
            if isinstance(hook, FunctionHook) or not type(hook).__module__.startswith("ddprun_hooks."):
                yield name, hook
            for leg in hook.legs().values():
                yield from leg.foreign

    async def run(self, payload: Payload, world: Channel, depth: int = 0) -> Tensor:
        """Carry `payload` through the hooks from `depth` on; gives the mean over ranks."""
        if depth == len(self.hooks):
            raise HookSetupError(f'"{self.names[-1]}" is a reducer: it has nothing to hand its payload on to')
        coming: object = self.hooks[depth](payload, Link(self, payload, world, depth))
        if not isinstance(coming, Awaitable):
            raise HookSetupError(not_async(self.names[depth], f"called, it gave {type(coming).__name__}"))
        mean: Tensor = await coming
        return mean

    def state_dict(self) -> dict[str, Any]:
        """State of every hook by its name; hooks that keep none are left out."""
        states = {name: hook.state_dict() for name, hook in zip(self.names, self.hooks, strict=False)}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back the state of the hooks that `state` names; other hooks start fresh."""
        for name, hook in zip(self.names, self.hooks, strict=False):
            if name in state:
                hook.load_state_dict(state[name])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state that every rank of another world, or with another bucket layout, can load.

        Args:
            states: `state_dict` of each rank of the old world, in rank order.
        """
        merged = {
            name: hook.merge([state[name] for state in states if name in state])
            for name, hook in zip(self.names, self.hooks, strict=False)
        }
        return {name: state for name, state in merged.items() if state}

    def take_over(self, others: Sequence[Stack]) -> None:
        """Let this stack's hooks go on from the state of hooks of the same name in other stacks, which lose
        it: then what was not sent is sent later, and once.

        Args:
            others: the first one that has state for a hook gives it.
        """
        for name, hook in zip(self.names, self.hooks, strict=False):
            for other in others:
                there = dict(zip(other.names, other.hooks, strict=False)).get(name)
                if there is not None and there is not hook and (state := there.state_dict()):
                    hook.load_state_dict(state)
                    there.load_state_dict({})
                    break

    def guard(self) -> None:
        """Be ready to take the coming step back."""
        for hook in self.hooks:
            hook.guard()

    def settle(self, *, applied: bool) -> None:
        """Tell the hooks whether the step was applied; if not, their state is as before it."""
        for hook in self.hooks:
            hook.settle(applied=applied)

    def kept_norm(self, kind: str, names: Sequence[str]) -> float:
        """2-norm of what this rank has kept of the parameters named, in units of its share of the mean."""
        return math.sqrt(sum(hook.kept_square(kind, names) for hook in self.hooks))


class Link:
    """A hook's way onwards: the rest of the stack, and the ranks."""

    __slots__ = ("_depth", "_payload", "_stack", "world")

    def __init__(self, stack: Stack, payload: Payload, world: Channel, depth: int) -> None:
        self._stack = stack
        self._payload = payload
        self._depth = depth
        self.world = world
        """The collectives among all ranks that the stack reduces over, for a reducer."""

    async def hand_on(
        self, tensor: Tensor, params: tuple[ParamSlice, ...] | None = None, unsent: Tensor | None = None
    ) -> Tensor:
        """Give `tensor` to the rest of the stack; gives its sum over ranks.

        Args:
            tensor: shape (any,); given away, its memory is overwritten.
            params: which parameters its elements are; None: as in the payload if the length is the same, else
                none.
            unsent: shape (any,), zeros: takes what later hooks did not send. None: they keep it themselves,
                which they can for elements of parameters only.
        """
        if params is None:
            same = tensor.numel() == self._payload.tensor.numel()
            params = self._payload.params if same else ()
            unsent = self._payload.unsent if same and unsent is None else unsent
        onward = replace(self._payload, tensor=tensor, params=params, unsent=unsent)
        return await self._stack.run(onward, self.world, self._depth + 1)
