"""The one protocol by which everything that outlives a step is saved and brought back."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Hooks, sync policies, the data position and the engine keep their state by this protocol.

    A state is a dictionary with string keys whose leaves are tensors, numbers, strings, booleans or None, in
    nested dictionaries and lists: it can be written as safetensors plus JSON, and nothing in it is pickled.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
