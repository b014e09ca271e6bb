"""`launch`: where the ranks run."""

import re
from typing import Annotated, Any, Literal

from ddprun.config.fields import Validated
from ddprun.config.options import NonNegativeInt, Options, PositiveFloat, PositiveInt
from ddprun.config.problems import mismatch, problem

_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


def _read_nnodes(value: Any) -> int | str:
    """A number of hosts, or the smallest and the largest.

    Raises:
        PydanticCustomError: what is wrong, for `sentences` to tell.
    """
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        least, most = map(int, found.groups())
        if 1 <= least <= most:
            return value
        raise problem(f'"{value}" is no range of hosts', "MIN is at least 1, and MAX at least MIN")
    if isinstance(value, bool) or not isinstance(value, int):
        raise mismatch("a number of hosts or a range", 'write 2, or "1:2"')
    if value < 1:
        raise problem(f"must be greater than 0, got {value}")
    return value


class Launch(Options):
    """Where the ranks run. The launcher's environment and flags go before these."""

    nproc_per_node: PositiveInt | None = None
    """Ranks per host; null is one for each GPU, or two on a host without."""

    nnodes: Annotated[int | str, Validated(_read_nnodes, "nnodes")] = 1
    """Hosts: a number, or "MIN:MAX" for a run that goes on when hosts leave, or come."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` is nccl where each rank of a host has a GPU of its own, else gloo."""

    timeout_s: PositiveFloat = 600.0
    """Seconds that a collective may take before the run fails."""

    max_restarts: NonNegativeInt = 0
    """How often the ranks are started again after a failure, to go on from the newest checkpoint."""

    @property
    def hosts(self) -> tuple[int, int]:
        """The smallest and the largest number of hosts."""
        if isinstance(self.nnodes, int):
            return self.nnodes, self.nnodes
        least, _, most = self.nnodes.partition(":")
        return int(least), int(most)
