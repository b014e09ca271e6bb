"""The links between ranks: how much goes through, and how long a message is under way. Imports no torch."""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt

from ddprun.run_files import MAX_JSON_BYTES, parse_json
from ddprun.units import format_bit_rate

LinkLevel = Literal["within", "across"]  # between the ranks of a host, or between hosts
TCP_SHARE = 0.94
"""Of a link's nominal rate, what is left for payload: 1,448 of 1,538 bytes of an Ethernet frame."""

_CARD_QUEUE_BYTES, _LOCAL_LATENCY_S = 100e3, 1e-3
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])?(bit|bps|B)(?:/s)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|ns)")
_PREFIX = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
UNLIMITED = "unlimited"
_ALL_REDUCE_LATENCIES = {"gloo": 4, "nccl": 2}
"""One-way latencies that a small all-reduce between two hosts takes: each of its two messages takes one, and
over Gloo another one before it, in which the receiver says that it is ready."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between two neighbouring ranks or hosts, in each direction."""

    bytes_per_s: float = math.inf  # of payload
    latency_s: float = 0.0  # from a message's leaving to its arrival
    rate_by_bytes: tuple[tuple[float, float], ...] = ()
    """Where it depends on the size of a message: sizes in bytes, and bytes a second of payload, by increasing
    size. Larger ones never keep the link busy for a shorter time."""

    @classmethod
    def from_measurement(
        cls,
        backend: str,
        all_reduce_s: float,
        mbit_per_s: float = math.inf,
        mbit_by_bytes: Sequence[tuple[int, float]] = (),
    ) -> "Link":
        """A link as `ddprun doctor` measures it between two hosts: by how long a small all-reduce takes, all
        of which counts as latency, and by the rate of larger ones, whose bytes go each way in two messages.
        """
        found: list[tuple[float, float]] = []
        for nbytes, mbit in mbit_by_bytes:
            size, rate = nbytes / 2, 1e6 * mbit / 8
            if not found or size / rate > found[-1][0] / found[-1][1]:
                found.append((size, rate))
        return cls(1e6 * mbit_per_s / 8, all_reduce_s / _ALL_REDUCE_LATENCIES[backend], tuple(found))

    def at_rate(self, bytes_per_s: float) -> "Link":
        """The same link at another rate; that of each size changes by the same factor, if it has one."""
        factor = bytes_per_s / self.bytes_per_s
        rates = tuple((size, factor * rate) for size, rate in self.rate_by_bytes)
        return Link(bytes_per_s, self.latency_s, rates)

    def transmission_seconds(self, nbytes: float) -> float:
        """How long a message of so many bytes keeps the link busy: between two measured sizes interpolated,
        below and above them at the nearest one's rate.
        """
        if not self.rate_by_bytes:
            return nbytes / self.bytes_per_s
        at = bisect_left(self.rate_by_bytes, (nbytes,))
        if at in (0, len(self.rate_by_bytes)):
            return nbytes / self.rate_by_bytes[max(0, at - 1)][1]
        (low, low_rate), (high, high_rate) = self.rate_by_bytes[at - 1 : at + 1]
        low_s, high_s = low / low_rate, high / high_rate
        return low_s + (high_s - low_s) * (nbytes - low) / (high - low)

    @property
    def max_queued_bytes(self) -> float:
        """How many bytes of one connection can be queued ahead of another's. In its own network card's queue
        Linux lets a connection have about 100 kB; on a longer way, queues of routers hold whatever comes.
        """
        return _CARD_QUEUE_BYTES if self.latency_s < _LOCAL_LATENCY_S else math.inf

    @property
    def takes_time(self) -> bool:
        """Whether the link's rate or latency costs any time."""
        return math.isfinite(self.bytes_per_s) or self.latency_s > 0

    def __str__(self) -> str:
        rate = format_nominal_rate(self.bytes_per_s) if math.isfinite(self.bytes_per_s) else UNLIMITED
        return f"{rate}, {1e3 * self.latency_s:.3g} ms" if self.latency_s else rate


@dataclass(frozen=True, slots=True)
class Links:
    """The link inside a host, and the one by which each host reaches the others; fields by `LinkLevel`."""

    within: Link = Link()
    across: Link = Link()

    def __str__(self) -> str:
        across = f"{self.across} between hosts"
        return f"{across} and {self.within} inside a host" if self.within.takes_time else across


def parse_links(rates: str | None, latencies: str | None = None) -> Links:
    """Links as a command line says them: `100Mbit`, or `within=50Gbit,across=10Gbit`; latencies alike.

    A value without a name is that of the link between hosts. A rate that ends in `.json` is a file that
    `ddprun doctor --format json` has written on several hosts. Raises ValueError, with what is allowed.
    """
    links = Links()
    if rates is not None and rates.endswith(".json"):
        links, rates = Links(across=slowest_link_in_report(Path(rates))), None
    for text, read in ((rates, _with_parsed_rate), (latencies, _with_parsed_latency)):
        for level, value in _split_by_level(text).items():
            links = replace(links, **{level: read(getattr(links, level), value)})
    return links


class _LinkMeasurement(BaseModel):
    """What a finding about a link has in `value`."""

    backend: Literal["gloo", "nccl"]
    all_reduce_us: PositiveFloat | None = None
    all_reduce_mbit_per_s: PositiveFloat | None = None
    all_reduce_mbit_per_s_by_bytes: tuple[tuple[PositiveInt, PositiveFloat], ...] = ()


class _DoctorFinding(BaseModel):
    check: str
    value: dict[str, object] = {}


class _DoctorReport(BaseModel):
    findings: list[_DoctorFinding]


def slowest_link_in_report(file: Path) -> Link:
    """The slowest link between hosts in a report of `ddprun doctor`; raises ValueError without one."""
    try:
        with file.open("rb") as opened:
            report = _DoctorReport.model_validate(parse_json(opened.read(MAX_JSON_BYTES + 1)))
        values = [one.value for one in report.findings if one.check in ("bandwidth", "latency")]
        found = [_LinkMeasurement.model_validate(value) for value in values if value]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{file} is not what `ddprun doctor --format json` prints") from None
    links = []
    for one in found:
        all_reduce_s, mbit_per_s = (one.all_reduce_us or 0.0) / 1e6, one.all_reduce_mbit_per_s or math.inf
        by_bytes = sorted(one.all_reduce_mbit_per_s_by_bytes)
        links.append(Link.from_measurement(one.backend, all_reduce_s, mbit_per_s, by_bytes))
    slowest = min(links, key=lambda link: link.bytes_per_s, default=Link())
    latency_s = max((link.latency_s for link in links), default=0.0)
    if not (math.isfinite(slowest.bytes_per_s) and latency_s):
        raise ValueError(f"{file} has no link between hosts: run ddprun doctor on two hosts at least")
    return replace(slowest, latency_s=latency_s)


def _split_by_level(text: str | None) -> Mapping[str, str]:
    if text is None:
        return {}
    if "=" not in text:
        return {"across": text.strip()}
    found: dict[str, str] = {}
    for part in text.split(","):
        level, _, value = (word.strip() for word in part.partition("="))
        if level not in ("within", "across") or level in found:
            raise ValueError(f'"{text}" must name "within" and "across", each at most once')
        found[level] = value
    return found


def _with_parsed_rate(link: Link, text: str) -> Link:
    if text == UNLIMITED:
        return replace(link, bytes_per_s=math.inf)
    found = _RATE.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f'"{text}" is not a rate; write 100Mbit, 2.5Gbit, 10GB/s or {UNLIMITED}')
    bytes_per_s = float(found[1]) * _PREFIX[found[2]] / (1 if found[3] == "B" else 8)
    return replace(link, bytes_per_s=TCP_SHARE * bytes_per_s)


def _with_parsed_latency(link: Link, text: str) -> Link:
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f'"{text}" is not a time; write 5us, 0.3ms or 1s')
    return replace(link, latency_s=float(found[1]) * _SECONDS[found[2]])


def format_nominal_rate(bytes_per_s: float) -> str:
    """Format a rate of payload, in bytes a second, as the nominal rate of a link."""
    return format_bit_rate(8 * bytes_per_s / TCP_SHARE)
