"""What a run's episodes of late ranks come to, by rank, cause and bucket."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StragglerTotal:
    """All episodes in which a rank was late for one cause, and before one bucket."""

    rank: int
    cause: str
    bucket: int | None
    params: tuple[str, ...]
    late_us: float
    """By how much whenever ranks met: the mean over `steps`."""

    step_us: float
    """The time between two meetings, which is that of several steps where ranks do not meet in each: the mean
    over `steps`.
    """

    steps: int
    """In how many."""

    episodes: int
    first_step: int
    last_step: int

    @property
    def lost_steps(self) -> float:
        """How many steps would have taken as long as another rank waited for this one."""
        return self.steps * self.late_us / self.step_us

    def when(self) -> str:
        """In which steps, or in how many."""
        if self.episodes == 1:
            return f"in steps {self.first_step:,} to {self.last_step:,}"
        return f"in {self.steps:,} steps ({self.episodes} episodes)"


def totals(episodes: Iterable[Mapping[str, Any]]) -> list[StragglerTotal]:
    """What cost most comes first.

    Args:
        episodes: as `summary.json` has them.
    """
    alike: dict[tuple[int, str, int | None, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for one in episodes:
        alike.setdefault((one["rank"], one["cause"], one["bucket"], tuple(one["params"])), []).append(one)
    found = [_total(who, some) for who, some in alike.items()]
    return sorted(found, key=lambda one: one.lost_steps, reverse=True)


def _total(
    who: tuple[int, str, int | None, tuple[str, ...]], episodes: Iterable[Mapping[str, Any]]
) -> StragglerTotal:
    lengths = [(one["last_step"] - one["first_step"] + 1, one) for one in episodes]
    steps = sum(length for length, _ in lengths)
    late_us, step_us = (
        sum(one[name] * length for length, one in lengths) / steps for name in ("late_us", "step_us")
    )
    first, last = min(one["first_step"] for _, one in lengths), max(one["last_step"] for _, one in lengths)
    return StragglerTotal(*who, late_us, step_us, steps, len(lengths), first, last)
