"""How well a stack's mean gradient matches the exact one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fidelity:
    """A bucket's mean as the hooks gave it (h), against the exact mean over ranks (e)."""

    cosine: float
    """<h, e> / (|h| |e|), in [-1, 1]; 1 is the same direction. NaN if either is zero."""

    relative_l2: float
    """|h - e| / |e|; 0 is the same."""

    norm_ratio: float
    """|h| / |e|."""

    residual_norm: float
    """2-norm of what this rank has kept back of the bucket so far, in units of its share of the mean."""

    wire_bytes: int
    """What this rank sent to know the exact mean."""


def compare(given: Tensor, exact: Tensor, residual_norm: float, wire_bytes: int) -> Fidelity:
    """Compare a stack's mean with the exact one, both of shape (numel,), in fp64."""
    h, e = given.double(), exact.double()
    h_norm, e_norm = float(torch.linalg.vector_norm(h)), float(torch.linalg.vector_norm(e))
    error = float(torch.linalg.vector_norm(h - e))
    both = h_norm * e_norm
    return Fidelity(
        cosine=min(1.0, max(-1.0, float(h @ e) / both)) if both else math.nan,
        relative_l2=_ratio(error, e_norm),
        norm_ratio=_ratio(h_norm, e_norm),
        residual_norm=residual_norm,
        wire_bytes=wire_bytes,
    )


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 / 0 is 0 parts of nothing."""
    return part / whole if whole else (math.inf if part else 0.0)
