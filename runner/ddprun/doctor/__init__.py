"""`ddprun doctor`: whether this host, and the hosts of a launch together, are fit to run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "problem"]

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")  # from harmless to what breaks runs


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    where: str  # a host, or two of them: `node0 - node1`
    check: str  # what was checked: `ports`, `clock` …
    level: Level
    found: str  # the result, in one line
    do: str = ""  # what to do about it; empty only where all is ok
    value: Mapping[str, Any] = field(default_factory=dict)  # what was measured, with units, for programs

    def __post_init__(self) -> None:
        assert self.level in LEVELS
        assert (self.level == "ok") == (not self.do), f"{self.check}: {self.found}: nothing to do?"


@dataclass(frozen=True, slots=True)
class Report:
    """What was found on one host, or on all of them and between them."""

    hosts: Sequence[Mapping[str, Any]]  # facts of each host
    findings: Sequence[Finding]

    @property
    def fit(self) -> bool:
        return not self.count("problem")

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can carry it."""
        return {"fit": self.fit, "counts": {level: self.count(level) for level in LEVELS}, **asdict(self)}


def pair_label(one: str, other: str) -> str:
    """How two hosts are called in a finding."""
    return f"{one} - {other}"
