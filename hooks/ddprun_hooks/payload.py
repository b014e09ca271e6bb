"""What a hook sees: one flat tensor, and which parameters lie where in it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["gradient", "parameters", "delta"]


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """The place of one parameter in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """First element's index in the flat tensor."""

    numel: int


@dataclass(frozen=True, slots=True)
class Payload:
    """One rank's contribution to a mean over ranks."""

    tensor: Tensor
    """Shape (numel,). Already divided by the world size, so that the *sum* over ranks is the mean."""

    params: tuple[ParamSlice, ...]
    kind: Kind
    bucket: int
