"""What a page is made of: texts, tables and charts; and numbers as they are shown in it."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from ddprun.report.digest import RunDigest

_EMPTY_CELLS = (None, "", "-")
_MAX_ROWS = 30  # of a table: a page stays small whatever a run has
_MAX_DECIMALS = 7
_QUANTITY = re.compile(r"[+-]?[\d.,]+( ± [\d.,]+)?( ?%| [kMGT]?B)?( \([^()]+ to [^()]+\))?")

Chart = dict[str, Any]
"""As plotly.js takes it."""

NamedDigests = Sequence[tuple[str, RunDigest]]  # runs under the names that a page shows


@dataclass(frozen=True, slots=True)
class Text:
    """A heading, a paragraph or a note, in which backticks mark code; or a file, folded away."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under their heads; columns of numbers are aligned right, with as many decimals in each cell."""

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    folded_title: str = ""  # if not empty, the table is folded away under this title

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether all its cells are numbers, some of them with a unit or an interval."""
        columns = list(zip_longest(*self.rows[:_MAX_ROWS])) or [()] * len(self.heads)
        return [
            any(cell not in _EMPTY_CELLS for cell in column) and all(map(_is_quantity, column))
            for column in columns
        ]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text; numbers of a column have equally many decimals."""
        return list(zip(*map(format_with_equal_decimals, zip_longest(*self.rows[:_MAX_ROWS])), strict=True))


@dataclass(slots=True)
class Figure:
    """A chart, or several of which the reader chooses one; with `log`, its values may have a log scale."""

    kind: ClassVar[str] = "figure"
    label: str  # what it shows
    charts: Mapping[str, Chart]  # by the choice that shows it, at first the first; "" if there is only one
    log: bool = False
    id: str = ""


Block = Text | Table | Figure


def format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def format_with_equal_decimals(values: Iterable[Any]) -> list[str]:
    """Format values of one quantity with equally many decimals: enough for four digits of the largest and two
    of the smallest. If that takes more than seven decimals, format each on its own.
    """
    values = list(values)
    sizes = [abs(value) for value in values if isinstance(value, float) and value and math.isfinite(value)]
    if all(size.is_integer() for size in sizes):
        return [format_value(value) for value in values]
    digits = max(3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))), 0)
    if digits > _MAX_DECIMALS:
        return list(map(format_value, values))
    return [f"{value:,.{digits}f}" if isinstance(value, float) else format_value(value) for value in values]


def _is_quantity(cell: Any) -> bool:
    return cell in _EMPTY_CELLS or isinstance(cell, int | float) or bool(_QUANTITY.fullmatch(str(cell)))
