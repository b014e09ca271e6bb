"""The parameter audit: do all ranks hold the same values, and if not, how far are they apart?"""

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ddprun_hooks.buckets import view_as_real
from ddprun_hooks.comm.control_channel import ControlChannel

_WORDS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # 32-bit words that are hashed at once, by device
_CHECKSUM_BITS = 48  # a whole number that float64, in which control messages travel, holds exactly
# Odd numbers: of splitmix64, and Knuth's.
_HASH_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, 6364136223846793005)


class AuditResult(BaseModel, strict=True, frozen=True):
    """What one audit found; the same on every rank."""

    differing: tuple[str, ...]  # tensors of which not all ranks hold the same, in the order given
    odd_ranks: tuple[int, ...]  # ranks that differ from the majority in the first of them
    largest_distance: float  # between two ranks, in one value of any tensor; 0 if all are equal
    farthest: str  # the tensor of that value; empty if all are equal


def audit_tensors(
    named: Mapping[str, Tensor],
    control: ControlChannel,
    groups: Sequence[Sequence[int]] | None = None,
    exempt: Container[str] = (),
    *,
    measure_allowed: bool = True,
) -> AuditResult:
    """Compare tensors between ranks by checksum, and those that differ by value. Called by all ranks
    together. Its traffic is in no record.

    Within each of `groups` they have to be equal (None: on all ranks), but for the names in `exempt`.
    `measure_allowed`: by value also where none differs that has to be equal. Distances are over all ranks.
    """
    found = gather_checksums(named, control, "checksums of the parameters")
    odd, unequal = (
        differs_from_majority(found, groups),
        (found != found[0]).any(0),
    )  # (ranks, tensors), (tensors,)
    judged = zip(named, odd.any(0), strict=True)
    differing = [name for name, differs in judged if differs and name not in exempt]
    if not (differing or measure_allowed):
        unequal[:] = False
    distances = {
        name: _largest_difference(tensor, control)
        for (name, tensor), differs in zip(named.items(), unequal, strict=True)
        if differs
    }
    farthest = max(distances, key=lambda name: distances[name], default="")
    ranks: list[int] = []
    if differing:
        ranks = odd[:, list(named).index(differing[0])].nonzero().flatten().tolist()
    return AuditResult(
        differing=tuple(differing),
        odd_ranks=tuple(ranks),
        largest_distance=distances.get(farthest, 0.0),
        farthest=farthest,
    )


def gather_checksums(named: Mapping[str, Tensor], control: ControlChannel, what: str) -> Tensor:
    """Each rank's checksum of each tensor: shape (ranks, tensors). Called by all ranks together."""
    return control.all_gather(list(map(float, checksums(named.values()))), what)


def differs_from_majority(found: Tensor, groups: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Which ranks differ from most of their group, of checksums of shape (ranks, tensors): the same shape."""
    odd = torch.zeros_like(found, dtype=torch.bool)
    for ranks in map(list, groups or [range(len(found))]):
        unequal = (found[ranks] != found[ranks[0]]).any(0).nonzero().flatten().tolist()
        for index in unequal:
            values = found[ranks, index].tolist()
            # Of two equally frequent values, that of the first rank counts as the right one.
            usual = max(dict.fromkeys(values), key=values.count)
            odd[ranks, index] = found[ranks, index] != usual
    return odd


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each tensor's bits, a whole number below 2^48, computed where the tensor is.

    A sum of the 32-bit words, each times an odd number of its own (multilinear hashing), so that it costs
    about one pass over memory also on a GPU.
    """
    found = [_checksum(tensor) for tensor in tensors]
    return [number % (1 << _CHECKSUM_BITS) for number in torch.stack([one.cpu() for one in found]).tolist()]


def _checksum(tensor: Tensor) -> Tensor:
    """Shape (), int64; its arithmetic is modulo 2^64."""
    values = view_as_real(tensor.detach()).reshape(-1).view(torch.uint8)
    words = nn.functional.pad(values, (0, -len(values) % 4)).view(torch.int32)
    chunk_words = min(_WORDS_PER_CHUNK.get(tensor.device.type, _WORDS_PER_CHUNK["cpu"]), max(1, len(words)))
    factors = torch.arange(chunk_words, device=tensor.device) * _HASH_MULTIPLIERS[0]
    factors = ((factors ^ (factors >> 32)) * _HASH_MULTIPLIERS[1]) ^ (factors >> 29) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(words, chunk_words):
        total = total * _HASH_MULTIPLIERS[2] + (part * factors[: len(part)]).sum()
    return total ^ (total >> 32)  # its high bits depend on all others


def _largest_difference(tensor: Tensor, control: ControlChannel) -> float:
    """The largest difference between two ranks in one value of a tensor; NaN if one holds a NaN."""
    real = view_as_real(tensor.detach())
    values = real.to(torch.promote_types(real.dtype, torch.float32)).reshape(-1)
    highest = control.all_reduce_max(values, "the largest value, for the audit")
    lowest = control.all_reduce_max(values.neg(), "the smallest value, for the audit").neg_()
    return float((highest - lowest).max()) if values.numel() else 0.0
