"""A stack of hooks: read in the order in which a payload leaves the rank, undone in reverse."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.groups import CollectiveRequest, GroupRequirements, RankGroup
from ddprun_hooks.config import grammar
from ddprun_hooks.ddp_comm_hook import DdpCommHook
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.hook import FunctionHook, Hook, not_async_message
from ddprun_hooks.payload import ParamSlice, Payload

StackRun = Coroutine[CollectiveRequest, Any, Tensor] | Generator[CollectiveRequest, Any, Tensor]
"""A payload's way through a stack: yields each collective, takes its result, and returns the mean."""


class AllReduce(Hook):
    """Sum over all ranks in one all-reduce: how every stack without a reducer of its own ends."""

    role = "reducer"

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.all_reduce(payload.tensor)


class BroadcastFromRank(Hook):
    """Give every rank the payload of rank `source` of the group."""

    role = "reducer"

    def __init__(self, source: int) -> None:
        self.source = source

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await comm.broadcast(payload.tensor, self.source)


class Stack:
    """Hooks in order, ended by a reducer.

    `hooks`: (name, hook) in the order in which a payload passes them; empty for plain all-reduce.
    `description`: names and options as given, to compare between ranks; by default the names. Raises
    HookSetupError, with the reason, for a stack that cannot work.
    """

    def __init__(self, hooks: Sequence[tuple[str, Hook]], description: str = "") -> None:
        self._by_name = dict(hooks)  # those that were given
        self.names = tuple(name for name, _ in hooks)
        self.description = description or repr(list(self.names))
        self.entries: tuple[grammar.StackEntry, ...] = tuple(
            grammar.StackEntry(
                name, hook.role, {level: stack.entries for level, stack in hook.inner_stacks().items()}
            )
            for name, hook in hooks
        )
        if wrong := [one.text for one in grammar.stack_problems(self.entries) if one.severity == "error"]:
            raise HookSetupError("; ".join(wrong))
        self.hooks: list[Hook] = [hook for _, hook in hooks]
        if not self.hooks or self.hooks[-1].role == "codec":
            self.hooks.append(AllReduce())
        *codecs, reducer = self.hooks
        passes = math.prod(hook.rounds for hook in codecs)
        # The most collectives that one payload needs on its way through the whole stack, by ranks.
        self.requirements: GroupRequirements = {
            one: passes * rounds for one, rounds in reducer.requirements().items() if rounds
        }
        self.max_collectives = sum(self.requirements.values())  # of one payload, among any ranks
        self._before_step: list[tuple[Hook, dict[str, Any]]] = []  # hooks' states, to undo a step

        # Names of the hooks that are not built in.
        self.custom_hooks = [
            name
            for name, hook in self.named_hooks()
            if isinstance(hook, FunctionHook | DdpCommHook)
            or not type(hook).__module__.startswith("ddprun_hooks.")
        ]

    def named_hooks(self) -> Iterator[tuple[str, Hook]]:
        """Name and hook of all hooks that were given, those inside other hooks included. Names may repeat."""
        for name, hook in self._by_name.items():
            yield name, hook
            for stack in hook.inner_stacks().values():
                yield from stack.named_hooks()

    def run(self, payload: Payload, group: RankGroup) -> StackRun:
        """`run_from`, for a queue to drive. Without hooks, the all-reduce alone, in one frame, not five."""
        if not self.names:
            return CollectiveRequest(group, "all_reduce", payload.tensor, payload.tensor).__await__()
        return self.run_from(payload, group)

    async def run_from(self, payload: Payload, group: RankGroup, depth: int = 0) -> Tensor:
        """Carry `payload` through the hooks from `depth` on; gives the mean over the ranks of `group`. One
        without elements, which has none on any rank, is not sent.
        """
        if not payload.tensor.numel():
            return payload.tensor
        if depth == len(self.hooks):
            raise HookSetupError(f'"{self.names[-1]}" is a reducer: nothing follows that could reduce for it')

        def rest(
            tensor: Tensor, params: tuple[ParamSlice, ...] | None, compression_error: Tensor | None
        ) -> Awaitable[Tensor]:
            tensor = tensor.contiguous()  # only the sum that comes back counts
            if params is None:
                same = tensor.numel() == payload.tensor.numel()
                params = payload.params if same else ()
                if same and compression_error is None:
                    compression_error = payload.compression_error
            onward = replace(payload, tensor=tensor, params=params, compression_error=compression_error)
            return self.run_from(onward, group, depth + 1)

        result: Any = self.hooks[depth](payload, Communicator(group, rest))
        if not hasattr(result, "__await__"):
            raise HookSetupError(
                not_async_message(self.names[depth], f"called, it gave {type(result).__name__}")
            )
        mean: Tensor = await result
        return mean

    def state_dict(self) -> dict[str, Any]:
        """State of every hook by its name; hooks that keep none are left out."""
        states = {name: hook.state_dict() for name, hook in self._by_name.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring back the state of the hooks that `state` names; other hooks start fresh."""
        self._before_step = []  # that was of another state
        for name, hook in self._by_name.items():
            if name in state:
                hook.load_state_dict(state[name])

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One state that every rank of another world, or with another bucket layout, can load, of those that
        `state_dict` gave on each rank of the old world, in rank order.
        """
        merged = {
            name: hook.merge([state[name] for state in states if name in state])
            for name, hook in self._by_name.items()
        }
        return {name: state for name, state in merged.items() if state}

    def take_state_from(self, others: Sequence[Stack]) -> None:
        """Let this stack's hooks take over the state of hooks of the same name in other stacks, which lose
        it: then what was not sent is sent later, and once. The first of `others` that has state gives it.
        """
        for name, hook in self._by_name.items():
            namesakes = [other._by_name[name] for other in others if name in other._by_name]
            # A cast with `accumulate` keeps state, one without does not.
            alike = [one for one in namesakes if type(one) is type(hook) and one is not hook]
            inner = hook.inner_stacks()
            for level, stack in inner.items():
                stack.take_state_from([one.inner_stacks()[level] for one in alike])
            source = next((one for one in alike if one.state_dict()), None)
            if source is not None and not inner:
                hook.load_state_dict(source.state_dict())
                source.load_state_dict({})

    def begin_step(self) -> None:
        """A step begins that `rollback` may undo."""
        keeping = [hook for _, hook in self.named_hooks() if not hook.inner_stacks()]
        self._before_step = [(hook, hook.state_dict()) for hook in keeping]

    def commit(self) -> None:
        """The optimizer has taken the step."""
        self._before_step = []

    def rollback(self) -> None:
        """The step was skipped: the hooks' state is as before it."""
        # It stays referenced: on a GPU, a bucket's stream reads its tensors in the next step.
        for hook, state in self._before_step:
            hook.load_state_dict(state)

    def take_back(self, kind: str, means: dict[str, Tensor]) -> None:
        """Means that no rank uses, down the stack as a payload: the first hook that keeps residuals of a
        parameter keeps its mean.
        """
        for _, hook in self.named_hooks():
            hook.take_back(kind, means)

    def hooks_with_choices(self) -> list[Hook]:
        """The hooks that choose something for each bucket (`Hook.choices`)."""
        return [hook for _, hook in self.named_hooks() if type(hook).choices is not Hook.choices]

    def residual_norm(self, kind: str, names: Sequence[str]) -> float:
        """2-norm of this rank's residual of the parameters named, in units of its share of the mean."""
        return math.sqrt(sum(hook.residual_square(kind, names) for _, hook in self.named_hooks()))


def broadcast_stack(source: int) -> Stack:
    """The payload of rank `source`, as it is. Other ranks' payloads are overwritten."""
    return Stack([("broadcast", BroadcastFromRank(source))])
