"""Known security holes of torch, by version.

Only what has been published, with where. Of NCCL no hole had been published when this table was written.
"""

import re
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hole:
    """A published hole."""

    name: str
    """Its CVE number."""

    fixed: Version
    """The first version that is not listed as affected."""

    severity: Literal["high", "low"]
    """`high`: whoever gives you a file, or reaches a port, can run code. `low`: whoever is on the host, or
    calls torch with values of a certain kind, can break the process."""

    what: str
    source: str


def _nvd(name: str) -> str:
    return f"https://nvd.nist.gov/vuln/detail/{name}"


HOLES = (
    Hole(
        "CVE-2022-45907",
        (1, 13, 1),
        "high",
        "torch.jit.annotations.parse_type_line runs code that is in an annotation",
        _nvd("CVE-2022-45907"),
    ),
    Hole(
        "CVE-2024-5480",
        (2, 2, 3),
        "high",
        "torch.distributed.rpc runs any function that a peer sends",
        _nvd("CVE-2024-5480"),
    ),
    Hole(
        "CVE-2025-32434",
        (2, 6, 0),
        "high",
        "torch.load runs code of a file even with weights_only=True",
        "https://github.com/pytorch/pytorch/security/advisories/GHSA-53q9-r3pm-6pq6",
    ),
    Hole(
        "CVE-2025-3730",
        (2, 8, 0),
        "low",
        "ctc_loss can be made to end the process",
        _nvd("CVE-2025-3730"),
    ),
    Hole(
        "CVE-2026-24747",
        (2, 10, 0),
        "high",
        "torch.load with weights_only=True lets a file write into memory, and so may run its code",
        "https://github.com/pytorch/pytorch/security/advisories/GHSA-63cw-57p8-fm3p",
    ),
    Hole(
        "CVE-2026-4538",
        (2, 10, 1),
        "low",
        "loading an exported program (.pt2) of someone on this host may run their code",
        _nvd("CVE-2026-4538"),
    ),
    Hole(
        "CVE-2025-3000",
        (2, 13, 0),
        "low",
        "torch.jit.script of code that is made for it writes into memory",
        "https://github.com/advisories/GHSA-rrmf-rvhw-rf47",
    ),
)


def version(text: str) -> Version | None:
    """`2.13.0+cu130` as numbers; None: it is no such version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return None if match is None else tuple(int(part or 0) for part in match.groups())


def holes_of(torch: str) -> tuple[Hole, ...]:
    """The holes that a version of torch has, the worst first."""
    here = version(torch)
    found = [hole for hole in HOLES if here is not None and here < hole.fixed]
    return tuple(sorted(found, key=lambda hole: (hole.severity != "high", hole.name)))
