"""Sizes and counts for a reader."""


def size(count: float) -> str:
    """Bytes with three significant digits, in units of 1000."""
    if count < 1000:
        return f"{count:.3g} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{max(0, 3 - len(str(int(count))))}f} {unit}"


def count(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
