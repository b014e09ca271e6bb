"""Parameters that are not trained: ranks hold the same from the start, so they are compared, not sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddprun.sync.exchanger import ParameterExchanger, can_be_averaged
from ddprun_hooks.buckets import ParameterBuckets, view_complex_as_real
from ddprun_hooks.comm.control import PendingMessage

_WORDS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # 32-bit words that are hashed at once, by device
_CHECKSUM_BITS = 48
"""A whole number that float64, in which control messages travel, holds exactly."""

_HASH_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, 6364136223846793005)
"""Odd numbers: of splitmix64, and Knuth's."""


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name, in the model's order."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class FrozenParameters:
    """The parameters that require no gradient when the run starts, and so are not trained.

    All ranks hold those of rank 0, and nothing is sent while that stays so. Something may change them all
    the same: a forward pass, `mutate`, `update`, or code of the user's that trains them after all. Where
    ranks synchronise they compare a checksum of the values. Those that differ are made equal as they are,
    without hooks, and `report` gets the names of those that have not differed before.
    """

    def __init__(
        self, model: nn.Module, exchanger: ParameterExchanger, report: Callable[[Sequence[str]], None]
    ) -> None:
        self.trainable = trainable_parameters(model)  # which ranks exchange, by name; fixed from here on
        self.parameters: dict[str, Tensor] = {
            name: param for name, param in model.named_parameters() if name not in self.trainable
        }
        self._exchanger, self._control, self._report = exchanger, exchanger.exchange.control, report
        self._posted: PendingMessage | None = None
        self._ranks_differ = False  # what ranks posted last, and have not acted on yet, was not the same
        self._reported: set[str] = set()

    def post_checksum(self) -> None:
        """Compare, without waiting for other ranks; `make_equal` acts on it."""
        if self.parameters and self._control.size > 1:
            total = 0
            for one in checksums(self.parameters.values()):
                total = (total * _HASH_MULTIPLIERS[2] + one) % (1 << _CHECKSUM_BITS)
            what = "a checksum of the frozen parameters"
            self._posted = self._control.all_gather_async([float(total)], what)

    def ranks_differ(self) -> bool:
        """Whether ranks differed in what they posted last; False once they have acted on it."""
        if self._posted is not None:
            found, self._posted = self._posted.wait(), None
            self._ranks_differ = bool((found != found[0]).any())
        return self._ranks_differ

    def load_ranks_differ(self, differ: bool) -> None:
        """Go on from what `ranks_differ` gave."""
        self._posted, self._ranks_differ = None, differ

    def make_equal(self, source: int | None = None) -> None:
        """If the checksums posted last differed: parameters that differ now become those of rank `source`, or
        their mean. Numbers without a mean (quantised weights) are never averaged.
        """
        if not self.ranks_differ():
            return
        self._ranks_differ = False
        differing = self.differing_parameters()
        if source is None:
            self._average(differing)
        else:
            buckets = ParameterBuckets(differing, self._exchanger.cap_bytes)
            self._exchanger.broadcast(buckets, "parameters", source)

    @contextmanager
    def temporarily_equal(self) -> Iterator[None]:
        """Context in which values that differ are their mean; afterwards each rank has its own back, bit for
        bit.
        """
        differing = self.differing_parameters()
        own = [param.detach().clone() for param in differing.values()]
        self._average(differing)
        try:
            yield
        finally:
            with torch.no_grad():
                for param, value in zip(differing.values(), own, strict=True):
                    param.copy_(value)

    def _average(self, named: Mapping[str, Tensor]) -> None:
        """Overwrite by the mean over ranks those that have one."""
        floating = {name: param for name, param in named.items() if can_be_averaged(param)}
        self._exchanger.average(ParameterBuckets(floating, self._exchanger.cap_bytes), "parameters")

    def differing_parameters(self) -> dict[str, Tensor]:
        """Those of which not all ranks hold the same bits, by name; called by all ranks together."""
        if not self.parameters or self._control.size == 1:
            return {}
        numbers = list(map(float, checksums(self.parameters.values())))
        found = self._control.all_gather(numbers, "checksums of the frozen parameters")  # (ranks, parameters)
        flags = (found != found[0]).any(0).tolist()
        named = zip(self.parameters.items(), flags, strict=True)
        differing = {name: param for (name, param), differs in named if differs}
        if new := [name for name in differing if name not in self._reported]:
            self._reported.update(new)
            self._report(new)
        return differing


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each tensor's bits, a whole number below 2^48, computed where the tensor is.

    A sum of the 32-bit words, each times an odd number of its own (multilinear hashing), so that it costs
    about one pass over memory also on a GPU.
    """
    found = [_checksum(tensor) for tensor in tensors]
    return [number % (1 << _CHECKSUM_BITS) for number in torch.stack([one.cpu() for one in found]).tolist()]


def _checksum(tensor: Tensor) -> Tensor:
    """Shape (), int64; its arithmetic is modulo 2^64."""
    values = view_complex_as_real(tensor.detach()).reshape(-1).view(torch.uint8)
    words = nn.functional.pad(values, (0, -len(values) % 4)).view(torch.int32)
    chunk_words = min(_WORDS_PER_CHUNK.get(tensor.device.type, _WORDS_PER_CHUNK["cpu"]), max(1, len(words)))
    factors = torch.arange(chunk_words, device=tensor.device) * _HASH_MULTIPLIERS[0]
    factors = ((factors ^ (factors >> 32)) * _HASH_MULTIPLIERS[1]) ^ (factors >> 29) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(words, chunk_words):
        total = total * _HASH_MULTIPLIERS[2] + (part * factors[: len(part)]).sum()
    return total ^ (total >> 32)  # its high bits depend on all others
