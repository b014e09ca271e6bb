"""The pieces of a page: charts with their numbers beside them, tables, values as a reader wants them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any

from ddprun.report.charts import Chart
from ddprun.report.digest import Digest


@dataclass
class Page:
    """A page while it grows."""

    digests: Sequence[tuple[str, Digest]]
    """By a short name."""

    charts: dict[str, Chart] = field(default_factory=dict)

    def chart(self, chart: Chart, label: str, rows: Sequence[Sequence[Any]], heads: Sequence[str]) -> str:
        """A chart, and the same as a table for those who read it so.

        Args:
            chart: as `charts` makes them.
            label: what it shows, for a screen reader.
            rows: of the table.
            heads: of its columns.
        """
        name = f"chart-{len(self.charts)}"
        self.charts[name] = chart
        return (
            f'<div class="chart" id="{name}" role="img" tabindex="0" aria-label="{escape(label)}"></div>'
            f"<details><summary>{escape(label)}: the numbers</summary>{table(heads, rows)}</details>"
        )

    def choice(self, choices: Mapping[str, Chart], chosen: str, ask: str, label: str) -> str:
        """A chart of which the reader chooses one."""
        name = f"chart-{len(self.charts)}"
        self.charts[name] = {"choices": dict(choices), "chosen": chosen}
        options = "".join(
            f'<option{" selected" if key == chosen else ""} value="{escape(key)}">{escape(key)}</option>'
            for key in choices
        )
        return (
            f'<label>{escape(ask)} <select data-for="{name}">{options}</select></label>'
            f'<div class="scroll"><div class="chart" id="{name}" role="img" tabindex="0" '
            f'aria-label="{escape(label)}"></div></div>'
        )

    @property
    def several(self) -> bool:
        """Whether runs stand side by side."""
        return len(self.digests) > 1

    def each(self, part: Callable[[Digest], str]) -> str:
        """The same part of each run."""
        if not self.several:
            return part(self.digests[0][1])
        return "".join(f"<h3>{escape(name)}</h3>{part(digest)}" for name, digest in self.digests)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A table; numbers to the right."""
    numeric = [
        all(isinstance(cell, int | float) or cell is None for cell in column)
        for column in zip_longest(*rows, fillvalue=None)
    ] or [False] * len(heads)

    def cell(kind: str, value: Any, place: int) -> str:
        css = ' class="number"' if place < len(numeric) and numeric[place] else ""
        return f"<{kind}{css}>{escape(shown(value))}</{kind}>"

    head = "".join(cell("th", title, place) for place, title in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(cell('td', value, place) for place, value in enumerate(row))}</tr>" for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def shown(value: Any) -> str:
    """A value as a reader wants it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
