"""Triton kernels, which do in one pass over memory what the hooks' torch code does in several.

The torch code of the hooks is the reference, and runs everywhere else. Kernels give its bits; `blocks` says
where they may not. Triton is imported when the first payload on a GPU comes, and never without one.
"""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor

MAX_BLOCK_SIZE = 4096  # values that a program can hold in its registers

_MIN_COMPUTE_CAPABILITY = (8, 0)  # the lowest for which tests compile kernels


def can_handle_tensors(payload: Tensor, residual: Tensor) -> bool:
    """Whether a payload (fp32 or 16 bits) and its residual (fp32), both (numel,), are what kernels take."""
    if payload.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not payload.is_contiguous():
        return False
    if residual.dtype != torch.float32 or not residual.is_contiguous():
        return False
    return _triton_works(payload.device)


@functools.cache
def _triton_works(device: torch.device) -> bool:
    """Whether this is a GPU where Triton compiles and starts a kernel; if it fails, a warning says why."""
    if (
        device.type != "cuda"
        or importlib.util.find_spec("triton") is None
        or torch.cuda.get_device_capability(device) < _MIN_COMPUTE_CAPABILITY
    ):
        return False
    try:
        from ddprun_hooks.builtin.fused import FusedBlockReduction
        from ddprun_hooks.builtin.two_phase import Int8

        payload, residual = torch.zeros(2, 256, device=device)
        FusedBlockReduction(Int8(256), payload, residual, 0, 1).encode()
    except Exception as error:  # no compiler, a folder that cannot be written, an old Triton
        warnings.warn(
            "Triton is installed but does not work here; hooks compute in torch: the same bits, but slower "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True
