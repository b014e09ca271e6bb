"""How often numbers are read from tensors one by one: on a GPU each of these waits for the device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of `__init_subclass__`
    """Counts them while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
