"""Sizes, rates and times for a reader."""

import pytest

from ddprun.units import format_binary_bytes, format_bit_rate, format_bytes, format_duration


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.5, "1 kB"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (9_994, "9.99 kB"),
        (9_996, "10 kB"),
        (99_960, "100 kB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_rounded_before_their_unit_is_chosen(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (100, "100 B"),
        (1023, "1023 B"),
        (64 << 10, "64 KiB"),
        (1_023_590, "1000 KiB"),
        (1000 << 20, "1000 MiB"),
        (3 << 40, "3 TiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes_of_file_systems_have_binary_units(count: float, text: str) -> None:
    assert format_binary_bytes(count) == text


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [
        (0, "0 bit/s"),
        (999.4e3, "999 kbit/s"),
        (999.6e3, "1 Mbit/s"),
        (2.5e9, "2.5 Gbit/s"),
        (999.6e9, "1000 Gbit/s"),
        (1.6e12, "1600 Gbit/s"),
    ],
)
def test_rates_never_have_an_exponent(bits_per_s: float, text: str) -> None:
    assert format_bit_rate(bits_per_s) == text


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
