"""The parameter audit: do all ranks hold the same weights, and if not, how far are they apart?"""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddprun_hooks.comm.exchange import Exchange

_DIGEST_BYTES = 6
"""48 bits of a hash: a whole number that float64, in which control messages travel, holds exactly."""


class DriftError(RuntimeError):
    """Ranks hold different parameters where the sync policy does not allow it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one audit found; the same on every rank."""

    differing: tuple[str, ...]  # parameters of which not all ranks hold the same, in the model's order
    odd_ranks: tuple[int, ...]  # ranks that differ from the majority in the first of them
    largest_distance: float
    """Largest difference between two ranks in one value of any parameter; 0 if all are equal."""

    farthest: str  # the parameter of that value; empty if all are equal


def audit(
    model: nn.Module,
    exchange: Exchange,
    groups: Sequence[Sequence[int]] | None = None,
    not_judged: Container[str] = (),
) -> Finding:
    """Compare parameters between ranks, by hash; where they differ, by value. Called by all ranks together.

    The ranks of each of `groups` have to be equal (None: all of them), but for parameters that are
    `not_judged`; the distance is over all ranks. What is sent for it is in no record of training.
    """
    named = dict(model.named_parameters())
    hashes = [float(digest(param)) for param in named.values()]
    digests = exchange.control.all_gather(hashes, "digests of the parameters")  # (ranks, parameters)
    odd = _odd(digests, groups or [range(len(digests))])  # (ranks, parameters)
    judged = zip(named, odd.any(0), strict=True)
    differing = [name for name, differs in judged if differs and name not in not_judged]
    apart = (digests != digests[0]).any(0)
    distances = {
        name: _spread(param, exchange)
        for (name, param), differs in zip(named.items(), apart, strict=True)
        if differs
    }
    farthest = max(distances, key=lambda name: distances[name], default="")
    odd_ranks = odd[:, list(named).index(differing[0])].nonzero().flatten().tolist() if differing else []
    return Finding(tuple(differing), tuple(odd_ranks), distances.get(farthest, 0.0), farthest)


def digest(tensor: Tensor) -> int:
    """A hash of the tensor's bits, a whole number below 2^48."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    found = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=_DIGEST_BYTES)
    return int.from_bytes(found.digest(), "big")


def _odd(digests: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Which ranks differ from most of their group: shape (ranks, parameters)."""
    odd = torch.zeros_like(digests, dtype=torch.bool)
    for ranks in map(list, groups):
        for index, values in enumerate(digests[ranks].T.tolist()):
            # Of two equally frequent values, that of the first rank counts as the right one.
            usual = max(dict.fromkeys(values), key=values.count)
            odd[ranks, index] = digests[ranks, index] != usual
    return odd


def _spread(param: Tensor, exchange: Exchange) -> float:
    """The largest difference between two ranks in one value of a parameter; NaN if one holds a NaN."""
    real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
    values = real.to(torch.promote_types(real.dtype, torch.float32)).reshape(-1)
    highest = exchange.largest(values.clone())
    lowest = exchange.largest(values.neg()).neg_()
    return float((highest - lowest).max()) if values.numel() else 0.0
