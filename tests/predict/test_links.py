"""Rates and latencies as a command line says them."""

import math

import pytest

from ddprun.predict.links import TCP_SHARE, Link, Links, parse_links, rate_of, shown


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100Mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("2.5Gbit", 312.5e6),
        ("1Tbit", 125e9),
        ("56kbps", 7e3),
        ("10GB/s", 10e9),
        ("8bit", 1),
        ("unlimited", math.inf),
    ],
)
def test_a_rate_is_what_headers_leave_of_it(text: str, bytes_per_s: float) -> None:
    """Bits or bytes, with prefixes of 1000."""
    assert parse_links(text).across.bytes_per_s == pytest.approx(TCP_SHARE * bytes_per_s)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5us", 5e-6), ("5µs", 5e-6), ("0.3ms", 3e-4), ("1s", 1), ("700ns", 7e-7)]
)
def test_latencies(text: str, seconds: float) -> None:
    """One way, in any unit of time."""
    assert parse_links(None, text).across.latency_s == pytest.approx(seconds)


def test_each_level_has_its_own() -> None:
    """What has no name is that between hosts."""
    found = parse_links("within=50GB/s,across=10Gbit", "across=20us")
    assert found.within == Link(TCP_SHARE * 50e9, 0.0)
    assert (found.across.bytes_per_s, found.across.latency_s) == pytest.approx((TCP_SHARE * 1.25e9, 2e-5))
    assert parse_links("10Gbit") == Links(across=Link(TCP_SHARE * 1.25e9))
    assert parse_links(None) == Links()


@pytest.mark.parametrize(
    ("rate", "latency"),
    [
        ("fast", None),
        ("100", None),
        ("0Mbit", None),
        ("-1Mbit", None),
        ("100mbit", None),
        ("within=1Gbit,within=2Gbit", None),
        ("inside=1Gbit", None),
        ("within=", None),
        (None, "8"),
        (None, "8 minutes"),
        (None, "-8ms"),
    ],
)
def test_what_is_neither_a_rate_nor_a_time(rate: str | None, latency: str | None) -> None:
    """It is named, and so is what would do."""
    with pytest.raises(ValueError, match=r"(write|must name)"):
        parse_links(rate, latency)


@pytest.mark.parametrize("text", ["100 Mbit/s", "2.5 Gbit/s", "37 Mbit/s", "56 kbit/s", "999 Mbit/s"])
def test_a_rate_is_shown_as_it_was_said(text: str) -> None:
    """Nominal again, three digits."""
    assert rate_of(parse_links(text).across.bytes_per_s) == text
    assert shown(Link(latency_s=0.008)) == "unlimited, 8 ms"
