"""Sizes, rates, counts, times, names and tables for a reader."""

from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """Bytes in units of 1000: `1.5 MB`."""
    return _in_units(count, ("B", "kB", "MB", "GB", "TB"))


def format_binary_bytes(count: float) -> str:
    """Bytes in units of 1024, in which file systems are sized: `64 KiB`."""
    return _in_units(count, ("B", "KiB", "MiB", "GiB", "TiB"), step=1024, limit=1024)


def format_bit_rate(bits_per_s: float) -> str:
    """Bits a second: `10 Gbit/s`."""
    return _in_units(bits_per_s, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))


def format_duration(seconds: float) -> str:
    """A time: `2.5 ms`."""
    return _in_units(1e6 * seconds, ("µs", "ms", "s"))


def _in_units(value: float, units: Sequence[str], *, step: int = 1000, limit: float = 999.5) -> str:
    """Three significant digits, and no exponent, in the first unit in which the value is below `limit`."""
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


def format_table(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Rows as lines; the first is the head. `alignment` has `<` or `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True))
        for row in rows
    ]
