"""The charts of a page, as plain data for plotly.js."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Literal, NamedTuple

from ddprun.report.blocks import Chart, NamedDigests
from ddprun.report.digest import STEP_PARTS, Curve, SlowStep, Timeline
from ddprun.telemetry.records import PARTS
from ddprun.units import abbreviated_list, format_bit_rate

HELD_OUT_STYLE = 5  # the style of held-out data in the report of one run
_MAX_POINTS_WITH_MARKERS = 30  # a line of no more has a marker at each
_MAX_EVALUATION_MARKS = 100
_MAX_BANDS = 4
_LABEL_WIDTH = 18  # characters of a line beside a bar
_MARKED_GRADIENTS, _NAMED_PARAMS = 16, 8  # of a bucket in a timeline


# Dashes beside colours, as patterns in `STEP_PARTS`, so that nothing depends on colour alone.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_PALE_OUTLINE = {"color": "rgba(255,255,255,0.55)", "line": {"color": "#D55E00", "width": 1.5}}


def _layout(x: str, y: str = "", **more: Any) -> dict[str, Any]:
    return {
        "margin": {"l": 10, "r": 15, "t": 10, "b": 45},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "showlegend": False,
        "hovermode": "x unified",
        **more,
    }


def mark_stages_and_evaluations(chart: Chart, runs: NamedDigests) -> Chart:
    """The chart with where stages begin and evaluations took place, if that is the same in all runs."""
    marked = []
    for _, digest in runs:
        begins = [stage.first_step - 0.5 for stage in digest.stages]  # half a step before the first
        marked.append((begins, sorted({step for step, _ in digest.run.evaluations})))
    (begins, evaluations), layout = marked[0], chart["layout"]
    shapes: list[dict[str, Any]] = []

    def mark(name: str, at: float, height: float, colour: str, dash: str) -> None:
        line = {"color": colour, "width": 1.5, "dash": dash}
        ends = {"x0": at, "x1": at, "y0": 0, "y1": height}
        shapes.append({"type": "line", "yref": "paper", "name": name, "line": line, **ends})

    if all(one == marked[0] for one in marked):
        for at in begins[1:]:
            mark("a stage begins", at, 1, "#888888", "dot")
        for step in evaluations[:: math.ceil(len(evaluations) / _MAX_EVALUATION_MARKS) or 1]:
            mark("evaluation", step, 0.05, _COLOURS[HELD_OUT_STYLE], "solid")
    layout["shapes"], layout["annotations"] = shapes, []
    stages = runs[0][1].stages
    if len(runs) == 1 and len(stages) > 1:
        layout["margin"]["t"] = 24
        place = {"y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        for stage, at in zip(stages, begins, strict=True):
            text = f"{stage.index}: {stage.description}"
            layout["annotations"].append({"x": at, "text": text, "name": str(stage.index), **place})
    ends = [step for _, all_evaluations in marked for step in all_evaluations]
    for _, digest in runs:
        ends += [*digest.recorded_steps[:1], *digest.recorded_steps[-1:]]
    layout["xaxis"]["range"] = [min(ends, default=0) - 0.5, max(ends, default=0) + 0.5]
    return chart


class StyledCurve(NamedTuple):
    curve: Curve
    style: int  # number of its colour and dash
    kind: Literal["", "mean", "rank", "held-out"] = ""


def curve_chart(lines: Mapping[str, StyledCurve], y: str) -> Chart:
    """Lines over steps, each with a band from its lowest to its highest value."""
    data: list[dict[str, Any]] = []
    banded = sum(line.kind in ("", "mean") for line in lines.values()) <= _MAX_BANDS
    values: list[float] = []
    for name, (curve, style, kind) in lines.items():
        colour = _COLOURS[style % len(_COLOURS)]
        dash = "solid" if kind == "held-out" else _DASHES[style % len(_DASHES)]
        width = {"mean": 3.0, "rank": 1.0}.get(kind, 2.0)
        values += curve.means
        if banded and kind in ("", "mean") and curve.lowest != curve.highest:
            hidden = {"hoverinfo": "skip", "showlegend": False, "mode": "lines", "line": {"width": 0}}
            band = {"x": curve.steps, "fillcolor": f"{colour}33", **hidden}
            data.append({**band, "y": _rounded(curve.lowest)})
            data.append({**band, "y": _rounded(curve.highest), "fill": "tonexty"})
            values += [*curve.lowest, *curve.highest]
        line = {"color": colour, "dash": dash, "width": width}
        marked = kind == "held-out" or len(curve.steps) <= _MAX_POINTS_WITH_MARKERS
        symbol, length = ("diamond", 8) if kind == "held-out" else ("circle", 5)
        marker = {"color": colour, "size": length, "symbol": symbol}
        about = {"mode": "lines+markers", "marker": marker} if marked else {"mode": "lines"}
        points = {"x": curve.steps, "y": _rounded(curve.means)}
        data.append({**points, "name": name, "line": line, "cliponaxis": False, **about})
    layout = _layout("step", y)
    if len(set(_rounded(values))) > 1:  # around one value plotly would show a whole on either side
        layout["yaxis"]["rangemode"] = "normal"
    return {"data": data, "layout": layout}


def step_parts_bar_chart(rows: Mapping[str, Mapping[str, float]], x: str) -> Chart:
    """A bar of milliseconds for each row: its parts of a step, given in microseconds, one after the other."""
    data = []
    for name, part in STEP_PARTS.items():
        ms = [us.get(name, 0.0) / 1000 for us in rows.values()]
        if max(ms, default=0.0) > 0:
            bar = _bar_trace(part.name, part.marker, f"{part.name}: %{{x:.2f}} ms<extra>%{{y}}</extra>")
            data.append({**bar, "y": list(rows), "x": ms})
    layout = _layout(x, barmode="stack", hovermode="closest")
    wrapped = ["<br>".join(wrap(row, _LABEL_WIDTH)) for row in rows]  # a phone is narrow
    ticks = {"tickvals": list(rows), "ticktext": wrapped}
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, **ticks}
    lines = sum(text.count("<br>") + 1 for text in wrapped)
    height = f"{min(60, 9 + max(2 * len(rows), 1.3 * lines))}rem"
    return {"data": data, "layout": layout, "height": height}


def step_parts_area_chart(slow: Sequence[SlowStep], lines: Mapping[str, StyledCurve], y: str) -> Chart:
    """The parts of a step over the run, one above the other, with a mark for each slow step."""
    data = []
    for name, (curve, number, _) in lines.items():
        part = STEP_PARTS[PARTS[number]]
        area = {"stackgroup": "step", "mode": "lines", "line": {"width": 0.5, "color": part.colour}}
        fill = {"fillcolor": part.colour, "fillpattern": part.marker["pattern"]}
        data.append({"x": curve.steps, "y": _rounded(curve.means), "name": name, **area, **fill})
    if slow:
        text = "step {}: {:.1f} ms, longer by most: {}"
        hover = [text.format(one.step, one.ms, STEP_PARTS[one.most_slowed_part].name) for one in slow]
        marks = {"x": [one.step for one in slow], "y": _rounded([one.ms for one in slow]), "text": hover}
        marker = {"symbol": "diamond-open", "size": 9, "color": "#D55E00", "line": {"width": 2}}
        about = {"name": "slow step", "mode": "markers", "hovertemplate": "%{text}<extra></extra>"}
        data.append({**about, **marks, "marker": marker})
    return {"data": data, "layout": _layout("step", y)}


def timeline_chart(step: Timeline) -> Chart:
    """What every rank did in one step: its training thread, and below it each bucket."""
    bars: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"y": [], "base": [], "x": [], "text": []})
    rows: dict[str, None] = {}  # in order; what is sent twice in a step has one row

    def add(kind: str, row: str, start_us: float, us: float, text: str) -> None:
        if us > 0:
            values = {"y": row, "base": round(start_us / 1000, 3), "x": round(us / 1000, 3), "text": text}
            for key, value in values.items():
                bars[kind][key].append(value)

    for start_us, line, buckets in step.ranks:
        thread, at, offset = f"rank {line.rank}", line.start_us, start_us - line.start_us
        rows[thread] = None
        for part, us in line.laps:
            kind = f"{part}_us" if f"{part}_us" in STEP_PARTS else "other_us"
            add(kind, thread, offset + at, us, STEP_PARTS[kind].name)
            at += us
        for begin, end in line.waits:
            add("waits", thread, offset + begin, end - begin, "waits")
        for bucket in buckets:
            row = f"{thread}, {bucket.kind} {bucket.bucket}"
            rows[row] = None
            ready, done = bucket.ready_us, bucket.done_us
            all_ready = min(max(bucket.all_ready_us or ready, ready), done)
            params = abbreviated_list(bucket.params, _NAMED_PARAMS)
            about = f"bucket {bucket.bucket}: {params}, through {', '.join(bucket.hooks) or 'all-reduce'}"
            late, wire = all_ready - ready, done - all_ready
            add("exposed_wait_us", row, offset + ready, late, f"{about}: the last rank is not ready")
            sent = f"{about}: {bucket.wire_bytes:,} bytes"
            if wire:
                sent += f" at {format_bit_rate(8e6 * bucket.wire_bytes / wire)}"
            add("wire", row, offset + all_ready, wire, sent)
    styles = {name: (part.name, part.marker) for name, part in STEP_PARTS.items()}
    styles["waits"] = "the training thread waits", _PALE_OUTLINE
    styles["wire"] = "exchange", STEP_PARTS["exposed_wire_us"].marker
    hover = "%{text}, %{x:.2f} ms<extra>%{y}</extra>"
    kinds = sorted(bars, key=lambda kind: kind == "waits")  # waits are above the parts that they are in
    data = [{**_bar_trace(*styles[kind], hover), "textposition": "none", **bars[kind]} for kind in kinds]
    data += _gradient_completion_marks(step)
    layout = _layout("ms since the step began", barmode="overlay", hovermode="closest")
    order = {"categoryorder": "array", "categoryarray": [*rows][::-1], "range": [-0.5, len(rows) - 0.5]}
    layout["yaxis"] = {**order, "automargin": True}
    height = f"{min(90, 8 + 1.4 * len(rows))}rem"
    return {"data": data, "layout": layout, "height": height}


def _gradient_completion_marks(step: Timeline) -> list[dict[str, Any]]:
    """A mark where each gradient was complete, if that was recorded."""
    marks: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    for start_us, line, buckets in step.ranks:
        for bucket in buckets:
            known = zip(bucket.params_ready_us or (), bucket.params, strict=False)
            gradients = sorted((at, name) for at, name in known if at is not None)[-_MARKED_GRADIENTS:]
            for at, name in gradients:
                last = ", and with it the bucket" if name == gradients[-1][1] else ""
                marks["x"].append((start_us + at - line.start_us) / 1000)
                marks["y"].append(f"rank {line.rank}, {bucket.kind} {bucket.bucket}")
                marks["text"].append(f"{name} is complete{last}")
    if not marks["x"]:
        return []
    marker = {"symbol": "line-ns-open", "size": 14, "line": {"width": 2}, "color": "#CC79A7"}
    about = {"type": "scatter", "mode": "markers", "name": "gradient complete", "marker": marker}
    return [{**about, "hovertemplate": "%{text}<extra>%{y}</extra>", **marks}]


def _bar_trace(name: str, marker: Mapping[str, Any], hover: str) -> dict[str, Any]:
    return {"type": "bar", "orientation": "h", "name": name, "marker": marker, "hovertemplate": hover}


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
