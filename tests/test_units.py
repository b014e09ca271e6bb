"""Sizes and times for a reader."""

import pytest

from ddprun.units import format_bytes, format_duration


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.5, "1.00 kB"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_rounded_before_their_unit_is_chosen(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (999.4, "999 s"),
        (999.5, "1000 s"),
        (999.6, "1000 s"),
        (1000, "1000 s"),
        (12345.6, "12346 s"),
    ],
)
def test_times_never_have_an_exponent(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
