"""Who was late: the episodes of a run, and a report's section about them."""

from collections.abc import Sequence
from typing import Any

from ddprun.report.digest import Digest
from ddprun.report.html import Page, table
from ddprun.telemetry.episodes import StragglerTotal, totals

_HEADS = [
    "rank",
    "late by, ms",
    "of a step",
    "cause",
    "bucket",
    "parameters",
    "steps",
    "from step",
    "to step",
]


def stragglers(digest: Digest) -> list[dict[str, Any]]:
    """Each episode in which a rank was late."""
    summary = digest.run.summary
    if summary is not None and "stragglers" in summary:
        found: list[dict[str, Any]] = summary["stragglers"]
        return found
    return [{**event, "rank": event["straggler"]} for event in digest.run.all("straggler")]


def late_ranks(page: Page) -> str:
    """For each rank, cause and bucket what its episodes come to; behind them the episodes."""
    return page.each(_section)


def _section(digest: Digest) -> str:
    episodes = stragglers(digest)
    if not episodes:
        return "<p>No straggler.</p>"
    sums = totals(episodes)
    if len(sums) == len(episodes):
        return table(_HEADS, _rows(sums))
    each = table(_HEADS, _rows([one for episode in episodes for one in totals([episode])]))
    behind = f"<details><summary>Each of {len(episodes)} episodes</summary>{each}</details>"
    return table(_HEADS, _rows(sums)) + behind


def _rows(found: Sequence[StragglerTotal]) -> list[list[Any]]:
    return [
        [
            one.rank,
            one.late_us / 1000,
            f"{one.late_us / one.step_us:.0%}",
            one.cause,
            one.bucket,
            ", ".join(one.params[:4]) + (" …" if len(one.params) > 4 else ""),
            one.steps,
            one.first_step,
            one.last_step,
        ]
        for one in found
    ]
