"""Rates and latencies as a command line says them."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddprun.doctor import Finding, Report
from ddprun.doctor.links import LinkMeasurement, link_findings
from ddprun.predict.links import Link, Links, format_nominal_rate, parse_links


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
    """Bits or bytes, with prefixes of 1000; 1,448 of the 1,538 bytes of an Ethernet frame are payload."""
    assert parse_links(text).across.bytes_per_s == pytest.approx(bytes_per_s * 1448 / 1538, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5us", 5e-6), ("5µs", 5e-6), ("0.3ms", 3e-4), ("1s", 1), ("700ns", 7e-7)]
)
def test_latencies(text: str, seconds: float) -> None:
    """One way, in any unit of time."""
    assert parse_links(None, text).across.latency_s == pytest.approx(seconds)


def test_each_level_has_its_own() -> None:
    """What has no name is that between hosts."""
    found = parse_links("within=50GB/s,across=10Gbit", "across=20us")
    assert found.within.bytes_per_s == pytest.approx(47e9)
    assert found.within.latency_s == 0.0
    assert (found.across.bytes_per_s, found.across.latency_s) == pytest.approx((1.175e9, 2e-5))
    assert parse_links("10Gbit") == Links(across=Link(found.across.bytes_per_s))
    assert parse_links(None) == Links(Link(math.inf, 0.0), Link(math.inf, 0.0))


@pytest.mark.parametrize("text", ["fast", "100", "0Mbit", "-1Mbit", "100mbit", "1Gbit 2Gbit", ""])
def test_what_is_no_rate(text: str) -> None:
    """It is named, and so is what would do."""
    said = re.escape(f'"{text}" is not a rate; write 100Mbit, 2.5Gbit, 10GB/s or unlimited')
    for rates in (text, f"within={text}"):
        with pytest.raises(ValueError, match=f"^{said}$"):
            parse_links(rates)


@pytest.mark.parametrize("text", ["8", "8 minutes", "-8ms", "1e-3s", ""])
def test_what_is_no_time(text: str) -> None:
    """It is named, and so is what would do."""
    said = re.escape(f'"{text}" is not a time; write 5us, 0.3ms or 1s')
    for latencies in (text, f"across={text}"):
        with pytest.raises(ValueError, match=f"^{said}$"):
            parse_links(None, latencies)


@pytest.mark.parametrize(
    "text", ["within=1Gbit,within=2Gbit", "inside=1Gbit", "=1Gbit", "within=1Gbit,2Gbit"]
)
def test_what_names_no_link(text: str) -> None:
    """The whole text is named, and the two names there are."""
    said = re.escape(f'"{text}" must name "within" and "across", each at most once')
    with pytest.raises(ValueError, match=f"^{said}$"):
        parse_links(text)


def test_a_link_that_doctor_has_measured(tmp_path: Path) -> None:
    """The slowest of all pairs, with the longest latency: measured, so nothing is taken off for headers."""
    two = LinkMeasurement("gloo", 0.004, 95.0, 96.0, 88.0, 1 << 20, [(65536, 94.0), (1 << 20, 80.0)])
    three = LinkMeasurement("gloo", 0.008, 950.0, 960.0, 880.0, 1 << 20, [])
    findings = [*link_findings("a", "b", two, [None]), *link_findings("a", "c", three, [None])]
    findings.append(Finding("a, c", "bandwidth", "note", "up to 4 pairs at the same time", "measure two"))
    file = tmp_path / "link.json"
    file.write_text(json.dumps(Report([], findings).as_dict()))
    found = parse_links(str(file)).across
    assert found.bytes_per_s == pytest.approx(11e6)
    assert found.latency_s == pytest.approx(0.002)
    assert [size for size, _ in found.rate_by_bytes] == [1 << 15, 1 << 19]
    assert [rate for _, rate in found.rate_by_bytes] == pytest.approx([11.75e6, 10e6])
    assert parse_links(str(file), "5ms").across.latency_s == 0.005


@given(
    st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0.1, 1e6)), max_size=6),
    st.lists(st.floats(0, 1e10), min_size=2, max_size=9),
)
def test_a_longer_message_never_takes_less(measured: list[tuple[int, float]], sizes: list[float]) -> None:
    """Whatever the rates of two sizes are; and a measured size takes what was measured."""
    link = Link.from_measurement("gloo", 0.0, 100.0, sorted(measured))
    times = [link.transmission_seconds(size) for size in sorted(sizes)]
    for one, other in pairwise(times):
        assert one <= other * (1 + 1e-9)
    for size, rate in link.rate_by_bytes:
        assert link.transmission_seconds(size) == pytest.approx(size / rate)
    if not measured:
        assert times == [size / link.bytes_per_s for size in sorted(sizes)]


def test_between_two_sizes() -> None:
    """The time is in between; beyond them the nearest one's rate counts."""
    link = Link(1.0, 0.0, ((100, 10.0), (200, 5.0)))
    assert [link.transmission_seconds(size) for size in (0, 50, 100, 150, 200, 400)] == [0, 5, 10, 25, 40, 80]
    assert link.at_rate(2.0) == Link(2.0, 0.0, ((100, 20.0), (200, 10.0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("no", "is not what `ddprun doctor"),
        ("[" * 100_000, "is not what `ddprun doctor"),
        ('{"findings": [{"check": "latency", "value": {"backend": "smoke"}}]}', "is not what `ddprun doctor"),
        ('{"findings": []}', "has no link between hosts"),
    ],
)
def test_a_file_that_doctor_has_not_written(tmp_path: Path, text: str | None, said: str) -> None:
    """It is refused in one line."""
    file = tmp_path / "link.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=said):
        parse_links(str(file))


@pytest.mark.parametrize("text", ["100 Mbit/s", "2.5 Gbit/s", "37 Mbit/s", "56 kbit/s", "999 Mbit/s"])
def test_a_rate_is_shown_as_it_was_said(text: str) -> None:
    """Nominal again, three digits."""
    assert format_nominal_rate(parse_links(text).across.bytes_per_s) == text
    assert str(Link(latency_s=0.008)) == "unlimited, 8 ms"
