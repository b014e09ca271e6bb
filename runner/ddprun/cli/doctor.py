"""`ddprun doctor`."""

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from ddprun import EXIT_FAILURE, EXIT_SUCCESS, standard_streams
from ddprun.cli import printing
from ddprun.cli.run import FiniteRange, FlagValue, add_torchrun_flags, format_option, given_flags
from ddprun.doctor import Finding, Report
from ddprun.units import format_count

_LEVEL_COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_WIDTH, _INDENT = 110, 24


@add_torchrun_flags
@click.command(options_metavar="[OPTIONS]")
@format_option("text", "json", text="How findings are printed: as text, or as a JSON object.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1, max=3600),
    default=30,
    metavar="SECONDS",
    help="How long to wait for the other hosts, and for a collective.",
)
def doctor(form: str, timeout_s: float, **flags: FlagValue) -> int:
    """Check this host, or all hosts of a launch together.

    For several hosts, run this command once on each, with torchrun's own flags or by
    srun --ntasks-per-node=1: the hosts find each other as in a run, and the first one prints what was found
    and what to do. Exit code 0 if there is no problem, 1 if there is.
    """
    from ddprun.doctor.examination import run_examination

    fit, report = run_examination(given_flags(flags), timeout_s)
    if report is not None:
        if form == "json":
            click.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
        else:
            click.echo(format_report(report), color=printing.use_color(sys.stdout))
    if not fit:
        standard_streams.flush_standard_streams()
        os._exit(EXIT_FAILURE)  # threads may hang in collectives whose peers are gone
    return EXIT_SUCCESS


def format_report(report: Report) -> str:
    """Findings by host, then by pair of hosts; below each that is not ok, what to do. With colors."""
    lines = []
    for where in dict.fromkeys(finding.where for finding in report.findings):
        lines.append(click.style(where, bold=True))
        for finding in report.findings:
            if finding.where == where:
                lines += _lines(finding)
    counts = [
        format_count(number, kind)
        for kind in ("problem", "warning", "note")
        if (number := report.count(kind))
    ]
    lines.append(f"{format_count(len(report.hosts), 'host')}: {', '.join(counts) or 'no problems'}")
    return "\n".join(lines)


def _lines(finding: Finding) -> Iterator[str]:
    style: dict[str, Any] = {"fg": _LEVEL_COLORS[finding.level], "bold": finding.level == "problem"}
    level = click.style(f"{finding.level:<9}", **style)
    first, *rest = _wrap_text(finding.found)
    yield f"  {level}{finding.check:<{_INDENT - 11}}{first}"
    for line in rest:
        yield " " * _INDENT + line
    for index, line in enumerate(_wrap_text(finding.do)):
        yield " " * (_INDENT - 3) + f"{'  ' if index else '->'} {line}"


def _wrap_text(paragraph: str) -> list[str]:
    return textwrap.wrap(paragraph, _WIDTH - _INDENT, break_on_hyphens=False, break_long_words=False)
