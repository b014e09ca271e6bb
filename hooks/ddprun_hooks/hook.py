"""How a communication hook is written: a straight line of encode, reduce, decode.

```python
class Halved(Hook):
    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        total = await comm.reduce(payload.tensor.half())   # encode; reduce by the rest of the stack
        return total.float()                               # decode
```

Other buckets proceed at each `await`. The queue sees to overlap with backward, order between ranks, streams,
timing and the count of bytes (`ddprun_hooks.comm_queue`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ddprun_hooks.comm.groups import GroupRequirement, GroupRequirements
from ddprun_hooks.config.options import Role

if TYPE_CHECKING:
    from ddprun_hooks.comm.communicator import Communicator
    from ddprun_hooks.payload import Payload
    from ddprun_hooks.stack import Stack


class Hook:
    """Base class of all hooks. A subclass defines `__call__` and, if it keeps state, the state methods.

    State is a dictionary with string keys whose leaves are tensors, numbers, strings, booleans or None, in
    nested dictionaries and lists: it is written as safetensors plus JSON, and nothing in it is pickled.
    """

    role: ClassVar[Role] = "codec"
    """A codec encodes and awaits `comm.reduce`; a reducer reduces over the ranks itself and ends the
    stack."""

    rounds: int = 1
    """The largest number of `reduce` calls (codec) or of collectives among all ranks (reducer) that one
    payload needs. Process groups for this number are created before the first step; one more round is an
    error that names the hook."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        """Return the mean over ranks, with the shape, dtype and device of `payload.tensor`.

        The hook may change `payload.tensor` in place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def requirements(self) -> GroupRequirements:
        """The groups of ranks in which this hook itself calls collectives, and how many for one payload."""
        return {} if self.role == "codec" else {GroupRequirement("world"): self.rounds}

    def inner_stacks(self) -> Mapping[str, Stack]:
        """The stacks inside this hook, by the level that each serves. A hook with inner stacks keeps no state
        of its own: a skipped step would not undo it.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state that affects later steps, keyed by kind of payload and parameter name. It consists of
        copies, which no later step changes. Loading it undoes a step that GradScaler skips.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or `merge` for all ranks; `{}` means: start anew."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one, for a different number of ranks or different buckets.

        The states are in rank order. A hook with state that does not override this keeps only rank 0's state.
        """
        return states[0] if states else {}

    def take_back(self, kind: str, means: dict[str, Tensor]) -> None:
        """Take back means that no rank used, as this hook returned them on all ranks. A hook that keeps what
        it does not send removes its own parameters from `means`, and keeps their means for later steps. A
        codec that scales values scales the means as it does a payload, for the hooks after it.

        Args:
            kind: the kind of payload.
            means: by parameter name, each of shape (numel,).
        """

    def choices(self) -> Mapping[tuple[str, int], str]:
        """What this hook has chosen for each bucket, by kind of payload and bucket number. A run records
        changes of these choices.
        """
        return {}

    def residual_square(self, kind: str, names: Sequence[str]) -> float:
        """Squared 2-norm of this rank's residual (what it has not sent yet) of the parameters named."""
        return 0.0


class FunctionHook(Hook):
    """A hook that is a plain `async def hook(payload, comm)`."""

    def __init__(self, function: Callable[[Payload, Communicator], Awaitable[Tensor]]) -> None:
        self.function = function

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        return await self.function(payload, comm)


def not_async_message(name: str, because: str) -> str:
    return (
        f'hook "{name}" is not async: {because}; write "async def", and "await" before comm.reduce and '
        "every collective of comm"
    )
