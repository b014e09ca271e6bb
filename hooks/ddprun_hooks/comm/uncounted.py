"""Collectives that a hook issues by itself, past its communicator.

Nothing counts their bytes, and nothing keeps their order between ranks. Torch's process groups are told apart
by nothing else than who calls them, so every call of one of their methods from Python passes by here; while a
hook that is not built in runs on that thread, it is noted. Calls that do not come from Python (DDP's own, or
functional collectives) are not seen.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from ddprun_hooks.hook import FunctionHook, Hook

_METHODS: Final = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "monitored_barrier",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "scatter": "scatter",
    "send": "send",
}
"""Methods of `torch.distributed.ProcessGroup`, and what a user calls them."""


class Uncounted(NamedTuple):
    """One collective of a hook's own."""

    hook: str
    op: str  # as `torch.distributed` calls it

    def __str__(self) -> str:
        return (
            f'hook "{self.hook}" calls {self.op} of torch.distributed itself: its bytes are not recorded, '
            "and nothing keeps its order between ranks; await the collectives of comm instead"
        )


class _Running(threading.local):
    foreign: Sequence[tuple[str, Hook]] = ()
    notes: list[Uncounted] | None = None


_running = _Running()
_installing = threading.Lock()
_installed = False


def install() -> None:
    """Have the process groups' methods pass by here from now on."""
    global _installed
    with _installing:
        if _installed or not dist.is_available():
            return
        _installed = True
        for method, op in _METHODS.items():
            if (original := getattr(dist.ProcessGroup, method, None)) is not None:
                setattr(dist.ProcessGroup, method, _noted(original, op))


def noting(step: Callable[[], Any], foreign: Sequence[tuple[str, Hook]], notes: list[Uncounted]) -> Any:
    """Run `step`, and note each collective that one of the hooks in `foreign` issues by itself, once."""
    before = _running.foreign, _running.notes
    _running.foreign, _running.notes = foreign, notes
    try:
        return step()
    finally:
        _running.foreign, _running.notes = before


def _noted(original: Callable[..., Any], op: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        notes = _running.notes
        if notes is not None and (note := Uncounted(_who_calls(_running.foreign), op)) not in notes:
            notes.append(note)
        return original(*arguments, **options)

    return call


def _who_calls(foreign: Sequence[tuple[str, Hook]]) -> str:
    """The name of the innermost hook that is being run; of all, if none is found."""
    names = {}
    for name, hook in foreign:
        call = hook.function if isinstance(hook, FunctionHook) else type(hook).__call__
        names[getattr(call, "__code__", None)] = name
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in names:
            return names[frame.f_code]
        frame = frame.f_back
    return ", ".join(name for name, _ in foreign)
