"""How the doctor's report looks: for a reader, and as JSON."""

import json
import textwrap
from collections.abc import Iterator

import click

from ddprun.cli.columns import count
from ddprun.doctor.findings import Finding, Level, Report

_TONES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_WIDTH, _INDENT = 110, 24


def text(report: Report, color: bool = False) -> str:
    """Findings by host, then by pair of hosts; below each that is not ok, what to do."""
    lines = []
    for where in dict.fromkeys(finding.where for finding in report.findings):
        lines.append(click.style(where, bold=True) if color else where)
        for finding in report.findings:
            if finding.where == where:
                lines += _shown(finding, color)
    lines.append(_verdict(report))
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """All of it, with what was measured."""
    return json.dumps(report.plain(), indent=2, ensure_ascii=False)


def _shown(finding: Finding, color: bool) -> Iterator[str]:
    level = f"{finding.level:<9}"
    if color:
        level = click.style(level, fg=_TONES[finding.level], bold=finding.level == "problem")
    first, *rest = _wrapped(finding.found)
    yield f"  {level}{finding.check:<{_INDENT - 11}}{first}"
    for line in rest:
        yield " " * _INDENT + line
    for index, line in enumerate(_wrapped(finding.do)):
        yield " " * (_INDENT - 3) + f"{'  ' if index else '->'} {line}"


def _wrapped(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, _WIDTH - _INDENT, break_on_hyphens=False, break_long_words=False)


def _verdict(report: Report) -> str:
    kinds: tuple[Level, ...] = ("problem", "warning", "note")
    counts = [count(number, kind) for kind in kinds if (number := report.count(kind))]
    hosts = count(len(report.hosts), "host")
    return f"{hosts}: {', '.join(counts) or 'no problems'}"
