"""The table of a comparison: on a terminal, in Markdown, as CSV and as JSON."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddprun.telemetry.writer import finite
from ddprun.units import size

_COLUMNS = {
    "variant": "",
    "steps_per_s": "steps/s",
    "times_first": "times the first",
    "exposed_share": "exposed",
    "wire_bytes_per_step": "sent per step",
    "cosine": "fidelity",
    "loss": "loss",
    "verdict": "",
}
HEADS = list(_COLUMNS.values())  # of the columns for a reader; JSON and CSV have more
FORMATS = ("text", "json", "csv", "markdown")

Row = Mapping[str, Any]  # as `compare.rows` makes it


def table(rows: Sequence[Row], form: str, width: int | None) -> str:
    """The table of at least one row in one of `FORMATS`.

    `width`: columns of text; None: those of the terminal, on which it will be shown.
    """
    out = io.StringIO()
    if form == "json":
        return json.dumps(finite(list(rows)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if form == "csv":
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif form == "markdown":
        lines = [
            HEADS,
            ["---"] * len(HEADS),
            *([cell.replace("|", "\\|") for cell in cells(row)] for row in rows),
        ]
        out.writelines(f"| {' | '.join(line)} |\n" for line in lines)
    else:
        shown = Table(box=SIMPLE)
        for key, head in _COLUMNS.items():
            shown.add_column(head, justify="left" if key in ("variant", "verdict") else "right")
        for row in rows:
            shown.add_row(*map(Text, cells(row)))
        Console(file=out, highlight=False, width=width, force_terminal=width is None or None).print(shown)
    return out.getvalue()


def cells(row: Row) -> list[str]:
    """A row for a reader."""
    return [_cell(key, row) for key in _COLUMNS]


def _cell(key: str, row: Row) -> str:
    value = row[key]
    if value is None:
        return "-"
    match key:
        case "steps_per_s":
            return f"{value:.1f} ± {row['spread']:.1f}"
        case "times_first":
            return f"{value:.2f} ({row['times_first_low']:.2f} to {row['times_first_high']:.2f})"
        case "exposed_share":
            return f"{value:.0%}"
        case "wire_bytes_per_step":
            return size(value)
        case "cosine" | "loss":
            return f"{value:.4f}"
    return str(value)
