"""How late the last rank is, from the spread of the ranks' own steps."""

import math
from collections.abc import Iterable, Sequence


class Lateness:
    """How much later the last of n ranks is than the mean of them, from the spread of each rank's steps.

    With n draws from a distribution, the expected largest is an order statistic, not a mean: of m sorted
    values, the i-th has a share of (i/m)^n - ((i-1)/m)^n in it. Over several steps without an exchange, what
    a rank is always late by adds up, and chance grows with the square root of the steps. `own_us`: of each
    rank, how long it took for each of some steps, in microseconds.
    """

    def __init__(self, own_us: Iterable[Sequence[float]]) -> None:
        ranks = [values for values in own_us if values]
        means = [sum(values) / len(values) for values in ranks]
        middle = sum(means) / len(means) if means else 0.0
        self._spread = [
            (mean - middle, value - mean)
            for values, mean in zip(ranks, means, strict=True)
            for value in values
        ]
        self._known: dict[tuple[int, int], float] = {}

    def expected_us(self, steps: int, ranks: int) -> float:
        """The expected lateness after so many steps without an exchange, in microseconds."""
        if (steps, ranks) not in self._known:
            values = sorted(steps * always + math.sqrt(steps) * chance for always, chance in self._spread)
            count = len(values)
            self._known[steps, ranks] = sum(
                value * ((index / count) ** ranks - ((index - 1) / count) ** ranks)
                for index, value in enumerate(values, 1)
            )
        return self._known[steps, ranks]
