"""The charts of a report, as plain data for plotly.js."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddprun.report.digest import Curve, Digest
from ddprun.telemetry.steps import PARTS

Chart = dict[str, Any]


class Look(NamedTuple):
    """How a part of a step is shown."""

    name: str
    colour: str
    pattern: str = ""

    @property
    def marker(self) -> dict[str, Any]:
        """For plotly's bars."""
        pattern = {"shape": self.pattern, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,0.45)", "size": 6}
        return {"color": self.colour, "pattern": pattern}


# Colours that colour-blind readers tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/), and patterns
# and dashes, so that nothing depends on colour alone.
LOOKS = {
    "data_us": Look("loading data", "#999999", "."),
    "forward_us": Look("forward", "#56B4E9"),
    "backward_us": Look("backward", "#0072B2"),
    "exposed_hook_us": Look("hooks, exposed", "#CC79A7", "x"),
    "exposed_wait_us": Look("waiting for the last rank", "#D55E00", "/"),
    "exposed_wire_us": Look("wire, exposed", "#E69F00", "\\"),
    "optimizer_us": Look("optimizer", "#009E73"),
    "sync_us": Look("between steps", "#F0E442", "-"),
    "other_us": Look("other", "#777777", "+"),
}
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_OUTLINE = {"color": "rgba(0,0,0,0)", "line": {"color": "#D55E00", "width": 1.5}}


def _layout(x: str, y: str = "", **more: Any) -> dict[str, Any]:
    return {
        "margin": {"l": 10, "r": 15, "t": 10, "b": 45},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "showlegend": False,
        "hovermode": "x unified",
        **more,
    }


def curves(named: Mapping[str, Curve], y: str) -> Chart:
    """Lines over steps, each with the band between its lowest and its highest value."""
    data: list[dict[str, Any]] = []
    for index, (name, curve) in enumerate(named.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line = {"color": colour, "dash": _DASHES[index % len(_DASHES)], "width": 2}
        if curve.lowest != curve.highest and len(named) <= 3:
            hidden = {"hoverinfo": "skip", "showlegend": False, "mode": "lines", "line": {"width": 0}}
            band = {"x": curve.steps, "fillcolor": f"{colour}33", **hidden}
            data.append({**band, "y": _rounded(curve.lowest)})
            data.append({**band, "y": _rounded(curve.highest), "fill": "tonexty"})
        mode = "lines" if len(curve.steps) > 1 else "markers"
        data.append({"x": curve.steps, "y": _rounded(curve.means), "name": name, "mode": mode, "line": line})
    layout = _layout("step", y)
    layout["yaxis"]["rangemode"] = "normal"
    return {"data": data, "layout": layout}


def split(rows: Mapping[str, Mapping[str, float]], x: str) -> Chart:
    """A bar of milliseconds for each row: its parts of a step, given in microseconds, one after the other."""
    data = []
    for part in PARTS:
        ms = [us.get(part, 0.0) / 1000 for us in rows.values()]
        if max(ms, default=0.0) > 0:
            name = LOOKS[part].name
            bar = _bars(name, LOOKS[part].marker, f"{name}: %{{x:.2f}} ms<extra>%{{y}}</extra>")
            data.append({**bar, "y": list(rows), "x": ms})
    layout = _layout(x, barmode="stack", hovermode="closest")
    layout["yaxis"] = {"autorange": "reversed", "automargin": True}
    return {"data": data, "layout": layout, "height": f"{min(60, 9 + 2 * len(rows))}rem"}


def split_over_time(digest: Digest) -> Chart:
    """The parts of a step over the run, means over ranks."""
    data = []
    for part in PARTS:
        look, curve = LOOKS[part], digest.parts_ms[part]
        if any(curve.means):
            line = {"width": 0.5, "color": look.colour}
            area = {"stackgroup": "step", "mode": "lines", "line": line, "fillcolor": look.colour}
            data.append({"x": curve.steps, "y": _rounded(curve.means), "name": look.name, **area})
    return {"data": data, "layout": _layout("step", "milliseconds")}


def timeline(step: Mapping[str, Any]) -> Chart:
    """What every rank did in one step: its training thread, and below it each bucket."""
    bars: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"y": [], "base": [], "x": [], "text": []})
    rows: list[str] = []

    def add(kind: str, row: str, start_us: float, us: float, text: str) -> None:
        if us > 0:
            values = {"y": row, "base": start_us / 1000, "x": us / 1000, "text": text}
            for key, value in values.items():
                bars[kind][key].append(value)

    for one in step["ranks"]:
        start, thread = one["start_us"], f"rank {one['rank']}"
        rows.append(thread)
        for part, at, us in one["laps"]:
            kind = f"{part}_us" if f"{part}_us" in LOOKS else "other_us"
            for begin, length in _without(at, us, one["waits"]):
                add(kind, thread, start + begin, length, f"{LOOKS[kind].name}, {length / 1000:.2f} ms")
        for at, us in one["waits"]:
            add("waits", thread, start + at, us, f"waits, {us / 1000:.2f} ms")
        for bucket in one["buckets"]:
            row = f"{thread}, {bucket['kind']} {bucket['bucket']}"
            rows.append(row)
            ready, done = bucket["ready_us"], bucket["done_us"]
            all_ready = min(max(bucket["all_ready_us"] or ready, ready), done)
            about = f"bucket {bucket['bucket']}: {', '.join(bucket['params'])}"
            late, wire = all_ready - ready, done - all_ready
            add(
                "exposed_wait_us",
                row,
                start + ready,
                late,
                f"{about}: {late / 1000:.2f} ms until the last rank",
            )
            sent = f"{about}: {wire / 1000:.2f} ms, {bucket['wire_bytes']:,} bytes"
            add("wire", row, start + all_ready, wire, sent)
    looks = {part: (look.name, look.marker) for part, look in LOOKS.items()}
    looks["waits"] = "the training thread waits", _OUTLINE
    looks["wire"] = "exchange", LOOKS["exposed_wire_us"].marker
    hover = "%{text}<extra>%{y}</extra>"
    data = [{**_bars(*looks[kind], hover), "textposition": "none", **bar} for kind, bar in bars.items()]
    data += _gradients(step, hover)
    layout = _layout("milliseconds since the step began", barmode="overlay", hovermode="closest")
    order = {"categoryorder": "array", "categoryarray": rows[::-1], "range": [-0.5, len(rows) - 0.5]}
    layout["yaxis"] = {**order, "automargin": True}
    return {"data": data, "layout": layout, "height": f"{min(90, 8 + 1.4 * len(rows))}rem"}


def _gradients(step: Mapping[str, Any], hover: str) -> list[dict[str, Any]]:
    """A mark where each gradient was complete, if that was recorded."""
    marks: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    for one in step["ranks"]:
        for bucket in one["buckets"]:
            for name, at in bucket["gradients"]:
                last = ", and with it the bucket" if name == bucket["gradients"][-1][0] else ""
                marks["x"].append((one["start_us"] + at) / 1000)
                marks["y"].append(f"rank {one['rank']}, {bucket['kind']} {bucket['bucket']}")
                marks["text"].append(f"{name} is complete{last}")
    if not marks["x"]:
        return []
    marker = {"symbol": "line-ns-open", "size": 14, "line": {"width": 2}, "color": "#CC79A7"}
    about = {"type": "scatter", "mode": "markers", "name": "gradient complete", "marker": marker}
    return [{**about, "hovertemplate": hover, **marks}]


def _without(at: int, us: int, waits: Sequence[list[int]]) -> list[tuple[int, int]]:
    """What is left of an interval without the waits in it: (start, length) each."""
    found, end = [], at + us
    for begin, length in sorted(waits):
        low, high = max(begin, at), min(begin + length, end)
        if low < high:
            found.append((at, low - at))
            at = high
    return [(start, length) for start, length in (*found, (at, end - at)) if length > 0]


def _bars(name: str, marker: Mapping[str, Any], hover: str) -> dict[str, Any]:
    return {"type": "bar", "orientation": "h", "name": name, "marker": marker, "hovertemplate": hover}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]
