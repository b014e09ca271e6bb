"""The parameter audit: do all ranks hold the same weights, and if not, how far are they apart?"""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddprun_hooks.exchange import Exchange

_DIGEST_BYTES = 6
"""48 bits of a hash: a whole number that float64, in which control messages travel, holds exactly."""


class DriftError(RuntimeError):
    """Ranks hold different parameters where the sync policy does not allow it."""


@dataclass(frozen=True, slots=True)
class AuditResult:
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
    exempt: Container[str] = (),
) -> AuditResult:
    """Compare parameters between ranks by hash, and those that differ by value. Called by all ranks together.

    Within each of `groups` (None: all ranks) parameters have to be equal, except those in `exempt`; distances
    are over all ranks. The audit's traffic is in no record.
    """
    parameters = dict(model.named_parameters())
    hashes = [float(digest(param)) for param in parameters.values()]
    digests = exchange.control.all_gather(hashes, "digests of the parameters")  # (ranks, parameters)
    off_majority = _ranks_off_majority(digests, groups or [range(len(digests))])  # (ranks, parameters)
    judged = zip(parameters, off_majority.any(0), strict=True)
    differing = [name for name, differs in judged if differs and name not in exempt]
    unequal = (digests != digests[0]).any(0)
    distances = {
        name: _largest_difference(param, exchange)
        for (name, param), differs in zip(parameters.items(), unequal, strict=True)
        if differs
    }
    farthest = max(distances, key=lambda name: distances[name], default="")
    odd_ranks: list[int] = []
    if differing:
        odd_ranks = off_majority[:, list(parameters).index(differing[0])].nonzero().flatten().tolist()
    return AuditResult(tuple(differing), tuple(odd_ranks), distances.get(farthest, 0.0), farthest)


def digest(tensor: Tensor) -> int:
    """A hash of the tensor's bits, a whole number below 2^48."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    found = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=_DIGEST_BYTES)
    return int.from_bytes(found.digest(), "big")


def _ranks_off_majority(digests: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Which ranks differ from most of their group: shape (ranks, parameters)."""
    off_majority = torch.zeros_like(digests, dtype=torch.bool)
    for ranks in map(list, groups):
        for index, values in enumerate(digests[ranks].T.tolist()):
            # Of two equally frequent values, that of the first rank counts as the right one.
            usual = max(dict.fromkeys(values), key=values.count)
            off_majority[ranks, index] = digests[ranks, index] != usual
    return off_majority


def _largest_difference(param: Tensor, exchange: Exchange) -> float:
    """The largest difference between two ranks in one value of a parameter; NaN if one holds a NaN."""
    real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
    values = real.to(torch.promote_types(real.dtype, torch.float32)).reshape(-1)
    highest = exchange.exact_max(values.clone())
    lowest = exchange.exact_max(values.neg()).neg_()
    return float((highest - lowest).max()) if values.numel() else 0.0
