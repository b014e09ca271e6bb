"""Communication hooks for PyTorch DistributedDataParallel that compose, keep their state and time themselves.

A hook of one's own: see `ddprun_hooks.hook`. Importing this package does not import torch; the names below do
when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddprun_hooks.comm.communicator import Communicator
    from ddprun_hooks.ddp_comm_hook import DdpCommHook
    from ddprun_hooks.errors import DisagreementError, ExchangeError, HooksError, HookSetupError
    from ddprun_hooks.hook import Hook
    from ddprun_hooks.payload import ParamSlice, Payload
    from ddprun_hooks.stack import Stack
    from ddprun_hooks.standalone import Handle, register

__all__ = [
    "Communicator",
    "DdpCommHook",
    "DisagreementError",
    "ExchangeError",
    "Handle",
    "Hook",
    "HookSetupError",
    "HooksError",
    "ParamSlice",
    "Payload",
    "Stack",
    "register",
]

_MODULES = ("errors", "payload", "hook", "ddp_comm_hook", "stack", "comm.communicator", "standalone")


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        for module in _MODULES:
            if hasattr(found := import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
