"""Sizes, rates, counts, times, names and tables for a reader."""

from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """Bytes with three significant digits, in units of 1000."""
    if count < 999.5:
        return f"{count:.3g} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"


def format_binary_bytes(count: float) -> str:
    """Bytes with three significant digits, in units of 1024, in which file systems are sized: `64 KiB`."""
    return _in_units(count, ("B", "KiB", "MiB", "GiB", "TiB"), step=1024, limit=1024)


def format_bit_rate(bits_per_s: float) -> str:
    """Bits a second with three significant digits: `10 Gbit/s`."""
    return _in_units(bits_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"), step=1000, limit=999.5)


def _in_units(value: float, units: Sequence[str], *, step: int, limit: float) -> str:
    for unit in units:
        if value < limit or unit == units[-1]:
            break
        value /= step
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def format_count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def format_world_sizes(world_sizes: Sequence[Sequence[int]]) -> str:
    """`2`, or `2 to step 700, then 1`: of each number of ranks the first step, and the number."""
    (_, text), *changes = ((first, f"{size:,}") for first, size in world_sizes)
    return text + "".join(f" to step {first - 1:,}, then {size}" for first, size in changes)


def abbreviated_list(names: Sequence[str], most: int = 6) -> str:
    """The first `most` names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def format_duration(seconds: float) -> str:
    """A time for a reader: three significant digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"
    raise AssertionError


def format_table(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Rows as lines; the first is the head. `alignment` has `<` or `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True))
        for row in rows
    ]
