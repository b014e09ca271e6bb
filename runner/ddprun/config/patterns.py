"""Patterns of the names of parameters and modules, as a shell has them."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

_SHOWN = 6
"""Names in a message, at most."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Each pattern that fits no name: its index, the problem, and what there is."""
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            yield index, f'no parameter is called "{pattern}"', f"there are {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Some names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
