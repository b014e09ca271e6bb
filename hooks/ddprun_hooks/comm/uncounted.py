"""Collectives that a hook issues by itself, past its communicator.

Nothing counts their bytes, and nothing keeps their order between ranks. DDP, the queues and a hook may use
the same process groups, so only the caller tells such a collective from others. The methods of torch's
ProcessGroup are patched, and a call from Python is noted while a hook that is not built in runs on the same
thread. Calls that do not come from Python (DDP's own, or functional collectives) are not seen.
"""

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, Final, NamedTuple

import torch.distributed as dist

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


class UncountedCollective(NamedTuple):
    """One collective of a hook's own."""

    hook: str
    op: str  # as `torch.distributed` calls it

    def __str__(self) -> str:
        return (
            f'hook "{self.hook}" calls {self.op} of torch.distributed itself: its bytes are not recorded, '
            "and nothing keeps its order between ranks; await the collectives of comm instead"
        )


class _ThreadState(threading.local):
    custom_hooks: Mapping[object, str] = MappingProxyType({})
    uncounted: list[UncountedCollective] | None = None


_thread_state = _ThreadState()
_patch_lock = threading.Lock()
_patched = False


def patch_process_groups() -> None:
    """Have the methods of process groups pass by here from now on."""
    global _patched
    with _patch_lock:
        if _patched or not dist.is_available():
            return
        _patched = True
        for method, op in _METHODS.items():
            if (original := getattr(dist.ProcessGroup, method, None)) is not None:
                setattr(dist.ProcessGroup, method, _wrap_method(original, op))


def run_and_detect(
    step: Callable[[], Any], custom_hooks: Mapping[object, str], uncounted: list[UncountedCollective]
) -> Any:
    """Run `step`, and note each collective that one of `custom_hooks`, names by code objects, issues by
    itself, once.
    """
    before = _thread_state.custom_hooks, _thread_state.uncounted
    _thread_state.custom_hooks, _thread_state.uncounted = custom_hooks, uncounted
    try:
        return step()
    finally:
        _thread_state.custom_hooks, _thread_state.uncounted = before


def _wrap_method(original: Callable[..., Any], op: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        uncounted = _thread_state.uncounted
        if uncounted is not None:
            collective = UncountedCollective(_calling_hook(_thread_state.custom_hooks), op)
            if collective not in uncounted:
                uncounted.append(collective)
        return original(*arguments, **options)

    return call


def _calling_hook(custom_hooks: Mapping[object, str]) -> str:
    """The name of the innermost hook that is being run; of all, if none is found."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in custom_hooks:
            return custom_hooks[frame.f_code]
        frame = frame.f_back
    return ", ".join(custom_hooks.values())
