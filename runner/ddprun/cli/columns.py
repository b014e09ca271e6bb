"""Text for the screen: labelled paragraphs, tables, sizes, counts, and which steps of a stage."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise

_WIDTH = 110
_INDENT = 16


def labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    """Lines beside a label."""
    for index, line in enumerate(lines):
        yield f"  {'' if index else label:<{_INDENT - 2}}{line}".rstrip()


def told(label: str, text: str) -> Iterator[str]:
    """A paragraph beside a label."""
    return labelled(label, textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False))


def table(rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    """Rows as lines.

    Args:
        rows: the first is the head.
        aligned: `<` or `>` for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True))
        for row in rows
    ]


def size(count: float) -> str:
    """Bytes for a reader, with three significant digits."""
    if count < 1000:
        return f"{count:.3g} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{max(0, 2 - len(str(int(count))) + 1)}f} {unit}"


def count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def ends(names: Sequence[str]) -> str:
    """The first and the last of many names, and their number."""
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def named_steps(steps: Sequence[int], cycle: int, last: int | None) -> str:
    """Steps in words, such as `steps 8, 16, 24 …`.

    Args:
        steps: the steps among the first `cycle`, in order.
        cycle: the number of steps after which they repeat.
        last: the last step of the stage; None: unknown.
    """
    if len(steps) == cycle:
        return "every step"
    if last is not None and last <= cycle:
        return _listed(steps)
    chosen = set(steps)
    period = next(
        period
        for period in range(1, cycle + 1)
        if cycle % period == 0 and all((step - 1 + period) % cycle + 1 in chosen for step in steps)
    )
    first = [step for step in steps if step <= period]
    if len(first) > 1:
        even = len({after - before for before, after in pairwise(first)}) == 1
        named = _listed(first) if even or len(first) <= 4 else str(len(first))
        return f"{named} of every {period}{'' if named.startswith('steps') else ' steps'}"
    found = range(first[0], last + 1 if last is not None else first[0] + 3 * period + 1, period)
    return _listed(found[:3], " …" if len(found) > 3 else "")


def _listed(steps: Sequence[int], more: str = "") -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) > 4:
        return f"steps {', '.join(map(str, steps[:3]))} … {steps[-1]}"
    return f"steps {', '.join(map(str, steps))}{more}"
