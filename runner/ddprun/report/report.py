"""`report.html`: one or several runs on a page that needs nothing but itself."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from ddprun import __version__
from ddprun.report import charts
from ddprun.report.digest import Curve, Digest
from ddprun.report.findings import sentences
from ddprun.report.html import Page, shown, table
from ddprun.report.late import late_ranks
from ddprun.telemetry.progress import data_size
from ddprun.telemetry.records import PARTS
from ddprun.telemetry.writer import finite

_FAULTS = {
    "resumed": "went on",
    "hang": "hang",
    "checkpoint_left_out": "checkpoint left out",
    "checkpoint_passed_by": "checkpoint passed by",
    "overflow": "overflow",
    "nonfinite": "not finite",
    "data_differs": "ranks read different data",
    "step_skipped": "step skipped",
}
_MOST_FAULTS = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
"""The page asks no address for anything, whatever is in it."""


def report(
    digests: Sequence[Digest],
    comparison: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
    names: Sequence[str] | None = None,
) -> str:
    """The page.

    Args:
        digests: of the runs, at least one.
        comparison: a table of them: heads and rows.
        names: of the runs; None: by their folders.
    """
    page = Page(list(zip(names or _names(digests), digests, strict=True)))
    sections = [("Comparison", table(*comparison))] if comparison is not None else []
    sections += [(title, body) for title, make in _SECTIONS.items() if (body := make(page))]
    head = "ddprun: " + ", ".join(name for name, _ in page.digests)
    words = "".join(
        (f"<h2>{escape(name)}</h2>" if page.several else "")
        + "".join(f"<p>{_marked(text)}</p>" for text in sentences(digest))
        for name, digest in page.digests
    )
    links = "".join(f'<li><a href="#{_anchor(title)}">{escape(title)}</a></li>' for title, _ in sections)
    main = "".join(
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{body}</section>' for title, body in sections
    )
    here = files("ddprun.report") / "page"
    library = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(head)}</title>
<style>{(here / "report.css").read_text("utf-8")}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header><h1>{escape(head)}</h1></header>
<div class="words">{words}</div>
<nav aria-label="Parts of this page"><ul>{links}</ul></nav>
<main id="main">{main}</main>
<footer><p class="note">ddprun {__version__}. Times are means over the recorded steps; curves of long runs are
means over stretches of steps, with the lowest and the highest value as a band.</p></footer>
<script type="application/json" id="charts">{_json(page.charts)}</script>
<script>{library}</script>
<script>{(here / "report.js").read_text("utf-8")}</script>
</body>
</html>
"""


def _marked(text: str) -> str:
    """A sentence with what stands in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _json(value: Any) -> str:
    """JSON inside a script element: nothing in it ends the element."""
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _names(digests: Sequence[Digest]) -> list[str]:
    """Short names: as many of a folder's last parts as tell the runs apart."""
    paths = [digest.run.folder.resolve() for digest in digests]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names) and length >= min(2, len(paths[0].parts)):
            return names
    return [f"{path} ({place})" for place, path in enumerate(paths, 1)]


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace(",", "")


# The parts of the page.


def _facts(page: Page) -> str:
    columns = [dict(_facts_of(digest)) for _, digest in page.digests]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[key, *(shown(column.get(key)) for column in columns)] for key in keys]
    return table(["", *(name for name, _ in page.digests)], rows)


def _facts_of(digest: Digest) -> Iterator[tuple[str, Any]]:
    run, summary = digest.run, digest.run.summary or {}
    started = run.first("started") or {}
    yield "pipeline", started.get("pipeline")
    yield "status", summary.get("status", "has not ended, or was killed")
    hosts = len(set(started.get("hosts", ())))
    world = started.get("world_size", digest.ranks)
    yield "ranks", f"{world} on {hosts} {'host' if hosts == 1 else 'hosts'}"
    yield "device", f"{started.get('device')} over {started.get('backend')}"
    yield "steps", summary.get("steps", run.last_step)
    yield "steps a second", summary.get("steps_per_s")
    yield "samples, all ranks", summary.get("samples")
    yield "mean loss, last step", summary.get("loss")
    for name, value in (summary.get("metrics") or {}).items():
        yield f"held-out {name}", value
    exposed_s, steps_s = summary.get("exposed_communication_s"), summary.get("seconds_in_steps")
    if exposed_s is not None and steps_s:
        yield "exposed communication", f"{exposed_s:.2f} s, {exposed_s / steps_s:.0%} of step time"
    if "wire_bytes" in summary:
        yield "sent by all ranks", data_size(summary["wire_bytes"])
    yield "seconds", summary.get("seconds")
    for name, version in (summary.get("versions") or {}).items():
        yield name, version
    yield "began", started.get("time")


def _learning(page: Page) -> str:
    if not any(digest.loss.steps for _, digest in page.digests):
        return ""
    if page.several:
        named = {name: digest.loss for name, digest in page.digests}
    else:
        digest = page.digests[0][1]
        ranks = {
            f"rank {rank}": curve for rank, curve in zip(digest.run.ranks, digest.rank_losses, strict=False)
        }
        named = {"mean over ranks": digest.loss, **(ranks if len(ranks) > 1 else {})}
    return page.chart(charts.curves(named, "loss"), "Loss over steps", *_curve_table(named, "loss"))


def _curve_table(named: Mapping[str, Curve], what: str) -> tuple[list[list[Any]], list[str]]:
    """Every n-th point, so that the table can be read."""
    rows: list[list[Any]] = []
    for name, curve in named.items():
        every = max(1, len(curve.steps) // 20)
        rows += [[name, round(s), m] for s, m in zip(curve.steps[::every], curve.means[::every], strict=True)]
    return rows, ["", "step", what]


def _time(page: Page) -> str:
    heads = ["rank", *(charts.WORDS[part.removesuffix("_us")] for part in PARTS), "step"]
    parts = ""
    if page.several:
        rows: list[list[Any]] = []
        for name, digest in page.digests:
            rows += [[f"{name}, {row[0]}", *row[1:]] for row in _split_rows(digest)]
        parts += page.chart(
            charts.split_side_by_side(page.digests), "Step time of the runs, in milliseconds", rows, heads
        )

    def own(digest: Digest) -> str:
        if not digest.recorded:
            return '<p class="note">No step records.</p>'
        label = "Step time by rank, in milliseconds"
        over = {charts.WORDS[part.removesuffix("_us")]: digest.parts[part] for part in PARTS}
        scaled = {name: _in_ms(curve) for name, curve in over.items() if any(curve.means)}
        return page.chart(charts.split_by_rank(digest), label, _split_rows(digest), heads) + page.chart(
            charts.split_over_time(digest),
            "Step time over the run, mean over ranks",
            *_curve_table(scaled, "milliseconds"),
        )

    return parts + page.each(own)


def _split_rows(digest: Digest) -> list[list[Any]]:
    return [
        [f"rank {rank}", *(one.get(part, 0.0) / 1000 for part in (*PARTS, "step_us"))]
        for rank, one in zip(digest.run.ranks, digest.parts_us, strict=True)
    ]


def _in_ms(curve: Curve) -> Curve:
    return Curve(curve.steps, [None if m is None else m / 1000 for m in curve.means], [], [])


def _timeline(page: Page) -> str:
    def own(digest: Digest) -> str:
        choices = {}
        for step in digest.timelines:
            why = f" ({step['why']})" if step["why"] else ""
            choices[f"step {step['step']:,}{why}"] = charts.timeline(step)
        if not choices:
            return '<p class="note">No step records.</p>'
        chosen = next((key for key in choices if "the median step" in key), next(iter(choices)))
        return page.choice(choices, chosen, "Show", "Timeline of one step, all ranks above each other")

    note = (
        '<p class="note">The first row of a rank is its training thread; outlined is where it only waits. '
        "Below are its buckets, from the moment in which they are ready: first until the last rank has them "
        "ready, then under way. <code>trace.json</code> in the run's folder has more steps, for "
        '<a href="https://ui.perfetto.dev">Perfetto</a>.</p>'
    )
    return note + page.each(own)


def _communication(page: Page) -> str:
    heads = [
        "what",
        "hooks",
        "payloads a step",
        "before hooks",
        "sent by a rank",
        "between hosts",
        "ready to done, ms",
        "encode, ms",
        "decode, ms",
    ]

    def own(digest: Digest) -> str:
        rows = []
        for one in digest.sent:
            steps, ranks = max(1, one.steps) * max(1, digest.ranks), max(1, one.payloads)
            rows.append(
                [
                    one.kind,
                    ", ".join(one.hooks) or "none: all-reduce",
                    one.payloads / steps,
                    data_size(one.bytes / steps),
                    data_size(one.wire_bytes / steps),
                    data_size(one.between_hosts_bytes / steps),
                    one.us / ranks / 1000,
                    one.encode_us / ranks / 1000,
                    one.decode_us / ranks / 1000,
                ]
            )
        if not rows:
            return '<p class="note">Nothing was exchanged, or there are no bucket records.</p>'
        shares = ", ".join(
            f"{one.kind} in {one.steps / max(1, digest.bucket_steps):.0%} of the steps" for one in digest.sent
        )
        caption = "Of a step in which it is exchanged, mean over ranks; milliseconds of one payload. "
        return table(heads, rows, f"{caption}Exchanged: {shares}.")

    return page.each(own)


def _gradients(page: Page) -> str:
    if not any(digest.gathered for _, digest in page.digests):
        return ""
    heads = ["bucket", "parameters", "completed by", "of the time", "first to last gradient, ms"]

    def own(digest: Digest) -> str:
        rows: list[list[Any]] = []
        for bucket, one in digest.gathered.items():
            for place, (name, times) in enumerate(one.completed_by.most_common(3)):
                total = one.completed_by.total()
                rest = [one.us / total / 1000] if place == 0 else [""]
                first = [bucket, len(one.params)] if place == 0 else ["", ""]
                rows.append([*first, name, f"{times / total:.0%}", *rest])
        if not rows:
            return '<p class="note">Not recorded: <code>timings.gradients</code> is off.</p>'
        return table(heads, rows, "A bucket is sent when the last of its gradients is complete.")

    return page.each(own)


def _fidelity(page: Page) -> str:
    if not any(digest.fidelity for _, digest in page.digests):
        return ""

    def own(digest: Digest) -> str:
        if not digest.fidelity:
            return '<p class="note">Not measured: <code>timings.fidelity_every</code> is 0.</p>'
        label = "Hooks' mean gradient against the exact one, over steps"
        return page.chart(charts.curves(digest.fidelity, ""), label, *_curve_table(digest.fidelity, "value"))

    return page.each(own)


def _buffers(page: Page) -> str:
    def own(digest: Digest) -> str:
        event = digest.run.first("buffers")
        if event is None or not event.get("verdict"):
            return "<p>The pipeline says when they are sent; nothing had to be found out.</p>"
        return f"<p>{escape(str(event['verdict']))}</p>"

    return page.each(own)


def _faults(page: Page) -> str:
    def own(digest: Digest) -> str:
        found = [event for event in digest.run.events if event["event"] in _FAULTS]
        starts = len(digest.run.all("started"))
        text = f"<p>Started {starts} {'time' if starts == 1 else 'times'}.</p>"
        if not found:
            return text + "<p>Nothing went wrong.</p>"
        left = f"The last {_MOST_FAULTS} of {len(found)}." if len(found) > _MOST_FAULTS else ""
        rows = [
            [event.get("time"), _FAULTS[event["event"]], event.get("step"), _said(event)]
            for event in found[-_MOST_FAULTS:]
        ]
        return text + table(["when", "what", "step", ""], rows, left)

    return page.each(own)


def _said(event: Mapping[str, Any]) -> str:
    left_out = {"event", "level", "time", "monotonic_us", "rank", "step", "params"}
    if event["event"] == "nonfinite":
        left_out.remove("rank")  # whose loss it was
    return ", ".join(f"{key}: {shown(value)}" for key, value in event.items() if key not in left_out)


def _stages(page: Page) -> str:
    heads = ["stage", "kind", "steps", "seconds", "sync", "hooks"]

    def own(digest: Digest) -> str:
        begun = {event["stage"]: event for event in digest.run.all("stage_started")}
        rows = []
        for place, stage in enumerate((digest.run.summary or {}).get("stages", ())):
            event = begun.get(place, {})
            rows.append(
                [
                    place,
                    stage.get("kind"),
                    stage.get("steps"),
                    stage.get("seconds"),
                    json.dumps(event["sync"]) if "sync" in event else None,
                    ", ".join(event.get("hooks", ())) or None,
                ]
            )
        return table(heads, rows) if rows else '<p class="note">The run has no summary yet.</p>'

    return page.each(own)


_SECTIONS: dict[str, Callable[[Page], str]] = {
    "The run": _facts,
    "Loss": _learning,
    "Step time": _time,
    "Timeline of a step": _timeline,
    "Gradients": _gradients,
    "Communication": _communication,
    "Fidelity": _fidelity,
    "Stragglers": late_ranks,
    "Stages": _stages,
    "Buffers": _buffers,
    "Faults and restarts": _faults,
}
