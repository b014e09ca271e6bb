"""Words for sizes and for rows of steps."""

import pytest

from ddprun.explain.text import paragraph, recurring_steps_text
from ddprun.units import format_bytes, format_count, format_table


@pytest.mark.parametrize(
    ("bytes", "words"),
    [
        (0, "0 B"),
        (0.5, "0.5 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (123_456_789, "123 MB"),
        (5e12, "5 TB"),
        (5e15, "5000 TB"),
    ],
)
def test_size(bytes: float, words: str) -> None:
    """Three digits that count."""
    assert format_bytes(bytes) == words


@pytest.mark.parametrize(
    ("steps", "cycle", "last", "words"),
    [
        ([1], 1, 100, "every step"),
        ([1, 2, 3], 3, None, "every step"),
        ([8], 8, 100, "step 8 of every 8"),
        ([8], 8, None, "step 8 of every 8"),
        ([8], 8, 9, "step 8 of every 8"),
        ([8], 12, 12, "step 8"),
        ([2, 4], 12, 12, "steps 2, 4"),
        ([3, 6], 6, 100, "steps 3, 6 of every 6"),
        ([2, 4, 6], 8, 100, "steps 2, 4, 6 of every 8"),
        ([2, 4, 6, 8, 10, 12, 14], 16, 100, "steps 2, 4, 6 … 14 of every 16"),
        ([2, 3, 5, 7, 11], 12, 100, "steps 2, 3, 5 … 11 of every 12"),
        ([2, 3, 5, 7, 11], 12, 12, "steps 2, 3, 5 … 11"),
    ],
)
def test_named_steps(steps: list[int], cycle: int, last: int | None, words: str) -> None:
    """As one would say it."""
    assert recurring_steps_text(steps, cycle, last) == words


def test_lists_and_tables() -> None:
    """Columns are as wide as they have to be, paragraphs stay beside their label."""
    assert (format_count(1, "rank"), format_count(2000, "rank")) == ("1 rank", "2,000 ranks")
    assert format_table([("a", "bb"), ("ccc", "d")], "<>") == ["a    bb", "ccc   d"]
    lines = list(paragraph("Label", "word " * 40))
    assert lines[0].startswith("  Label         word")
    assert all(line.startswith(" " * 16) for line in lines[1:])
