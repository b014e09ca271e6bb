"""What a hook sees: one flat tensor, and which parameters lie where in it."""

import functools
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

PayloadKind = Literal["gradient", "parameters", "delta", "buffers", "optimizer"]
"""`delta`: the change of parameters since ranks last held equal ones. `optimizer`: the optimizer's state."""


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Where one parameter, or some of its rows, lies in a flat tensor."""

    name: str
    shape: tuple[int, ...]  # of the slice: fewer rows than the parameter has, if the slice is a part of it
    offset: int  # first element's index in the flat tensor
    numel: int
    start: int = 0  # first element's index in the flattened parameter

    def of(self, flat: Tensor) -> Tensor:
        """The slice's elements of a flat tensor: a view, shape (numel,)."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(slots=True)
class Finding:
    """What a hook reports of a payload: whether its values have overflowed."""

    hook: str
    code: Tensor | int
    """0: all is finite. 1: the result is not, though this rank's payload was. 2: this rank's payload was not.

    A hook leaves it as a tensor of shape () in host memory, which a device may still have to fill; when the
    payload has arrived, `ddprun_hooks.comm.trace.read_finding_codes` makes numbers of many at once."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One rank's contribution to a mean over ranks."""

    tensor: Tensor
    """Shape (numel,). Already divided by the world size, so that the *sum* over ranks is the mean."""

    params: tuple[ParamSlice, ...]
    """The parameters in the tensor; empty if its elements do not belong to parameters, as after a codec."""

    kind: PayloadKind
    bucket: int
    compression_error: Tensor | None = None
    """Shape (numel,), zeros: a lossy hook writes here what it did not send of this payload. None: the hook
    itself keeps what it did not send, by parameter, and adds it to the next payload."""

    findings: list[Finding] = field(default_factory=list, compare=False)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
