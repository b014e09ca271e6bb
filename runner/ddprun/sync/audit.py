"""The parameter audit: do all ranks hold the same weights, and if not, how far are they apart?"""

import hashlib
from collections.abc import Sequence
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

    differing: tuple[str, ...]
    """Parameters of which not all ranks hold the same, in the model's order."""

    odd_ranks: tuple[int, ...]
    """Ranks that differ from the majority in the first of them."""

    largest_distance: float
    """Largest difference between two ranks in one value of any parameter; 0 if all are equal."""

    farthest: str
    """The parameter of that value; empty if all are equal."""

    @property
    def equal(self) -> bool:
        """All ranks hold the same, bit for bit."""
        return not self.differing


def audit(model: nn.Module, exchange: Exchange, groups: Sequence[Sequence[int]] | None = None) -> Finding:
    """Compare parameters between ranks, by hash; where they differ, by value. Called by all ranks together.

    Args:
        model: of this rank.
        exchange: of the run; what is sent for the audit is in no record of training.
        groups: ranks that have to be equal among each other; None: all of them.

    Returns:
        What differs inside the groups. The distance is over all ranks.
    """
    named = list(model.named_parameters())
    digests = exchange.control.all_gather(
        [float(digest(param)) for _, param in named], "digests of the parameters"
    )  # (ranks, parameters)
    groups = groups or [range(len(digests))]
    odd = torch.stack([_odd(digests, ranks) for ranks in groups]).any(0)  # (ranks, parameters)
    differing = [place for place in range(len(named)) if odd[:, place].any()]
    apart = [place for place in range(len(named)) if len(set(digests[:, place].tolist())) > 1]
    distance, farthest = 0.0, ""
    for place in apart:
        name, param = named[place]
        largest = _spread(param, exchange)
        if largest > distance or not farthest:
            distance, farthest = largest, name
    return Finding(
        tuple(named[place][0] for place in differing),
        tuple(rank for rank in range(len(digests)) if differing and odd[rank, differing[0]]),
        distance,
        farthest,
    )


def digest(tensor: Tensor) -> int:
    """A hash of the tensor's bits, a whole number below 2^48."""
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    found = hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=_DIGEST_BYTES)
    return int.from_bytes(found.digest(), "big")


def _odd(digests: Tensor, ranks: Sequence[int]) -> Tensor:
    """Which of these ranks differ from most of them: shape (ranks, parameters), of all ranks."""
    own = digests[list(ranks)]
    odd = torch.zeros_like(digests, dtype=torch.bool)
    # Of two equally frequent values, that of the first rank counts as the right one.
    for place in range(digests.shape[1]):
        values = own[:, place].tolist()
        usual = max(dict.fromkeys(values), key=values.count)
        odd[list(ranks), place] = own[:, place] != usual
    return odd


def _spread(param: Tensor, exchange: Exchange) -> float:
    """The largest difference between two ranks in one value of a parameter; NaN if one holds a NaN."""
    real = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
    values = real.to(torch.promote_types(real.dtype, torch.float32)).reshape(-1)
    highest = exchange.largest(values.clone())
    lowest = exchange.largest(values.neg()).neg_()
    return float((highest - lowest).max()) if values.numel() else 0.0
