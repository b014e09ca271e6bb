"""Parameters that are not trained: ranks hold the same from the start, so they are compared, not sent."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddprun.sync.exchanger import ParameterExchanger, has_mean
from ddprun_hooks.buckets import ParameterBuckets, real
from ddprun_hooks.comm.control import PendingMessage

_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}  # 32-bit words that are hashed at once, by device
_BITS = 48  # of a checksum: a whole number that float64, in which control messages travel, holds exactly
_MIX = (-7046029254386353131, -4658895280553007687, 6364136223846793005)  # odd: of splitmix64, and Knuth's


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
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
        self.trained = trained_parameters(model)  # which ranks exchange, by name; fixed from here on
        self.named: dict[str, Tensor] = {
            name: param for name, param in model.named_parameters() if name not in self.trained
        }
        self._exchanger, self._control, self._report = exchanger, exchanger.exchange.control, report
        self._posted: PendingMessage | None = None
        self._unequal = False  # what ranks posted last, and have not acted on yet, was not the same
        self._reported: set[str] = set()

    def post(self) -> None:
        """Compare, without waiting for other ranks; `make_equal` acts on it."""
        if self.named and self._control.size > 1:
            whole = 0
            for one in checksums(self.named.values()):
                whole = (whole * _MIX[2] + one) % (1 << _BITS)
            self._posted = self._control.post([float(whole)], "a checksum of the frozen parameters")

    def unequal(self) -> bool:
        """Whether ranks differed in what they posted last; False once they have acted on it."""
        if self._posted is not None:
            found, self._posted = self._posted.wait(), None
            self._unequal = bool((found != found[0]).any())
        return self._unequal

    def load_unequal(self, unequal: bool) -> None:
        """Go on from what `unequal` gave."""
        self._posted, self._unequal = None, unequal

    def make_equal(self, source: int | None = None) -> None:
        """If ranks differed in what they posted last: every rank's values become those of rank `source`, or
        the mean, where they differ now. Numbers without a mean (quantised weights) are never averaged.
        """
        if not self.unequal():
            return
        self._unequal = False
        differing = self.differing()
        if source is None:
            self._average(differing)
        else:
            buckets = ParameterBuckets(differing, self._exchanger.cap_bytes)
            with torch.no_grad():
                self._exchanger.broadcast(buckets, "parameters", source)

    @contextmanager
    def equal_meanwhile(self) -> Iterator[None]:
        """Inside, values that differ are their mean; then each rank has its own again, bit for bit."""
        differing = self.differing()
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
        floating = {name: param for name, param in named.items() if has_mean(param)}
        with torch.no_grad():
            self._exchanger.average(ParameterBuckets(floating, self._exchanger.cap_bytes), "parameters")

    def differing(self) -> dict[str, Tensor]:
        """Those of which not all ranks hold the same bits, by name; called by all ranks together."""
        if not self.named or self._control.size == 1:
            return {}
        numbers = list(map(float, checksums(self.named.values())))
        found = self._control.all_gather(numbers, "checksums of the frozen parameters")  # (ranks, parameters)
        flags = (found != found[0]).any(0).tolist()
        differing = {
            name: param for (name, param), differs in zip(self.named.items(), flags, strict=True) if differs
        }
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
    return [number % (1 << _BITS) for number in torch.stack([one.cpu() for one in found]).tolist()]


def _checksum(tensor: Tensor) -> Tensor:
    """Shape (), int64; its arithmetic is modulo 2^64."""
    values = real(tensor.detach()).reshape(-1).view(torch.uint8)
    words = nn.functional.pad(values, (0, -len(values) % 4)).view(torch.int32)
    at_once = min(_WORDS.get(tensor.device.type, _WORDS["cpu"]), max(1, len(words)))
    factors = torch.arange(at_once, device=tensor.device) * _MIX[0]
    factors = ((factors ^ (factors >> 32)) * _MIX[1]) ^ (factors >> 29) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(words, at_once):
        total = total * _MIX[2] + (part * factors[: len(part)]).sum()
    return total ^ (total >> 32)  # its high bits depend on all others
