"""Patterns of the names of parameters and modules, as a shell has them."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ddprun.units import abbreviated_list


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def pattern_problems(patterns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Each pattern that fits no name: its index, the problem, and what there is."""
    for index, pattern in enumerate(patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            yield index, f'no parameter is called "{pattern}"', f"there are {abbreviated_list(names)}"
