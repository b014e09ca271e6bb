"""The charts of a report: plain data for plotly.js, with colours that colour-blind readers tell apart."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddprun.report.digest import Curve, Digest
from ddprun.telemetry.records import PARTS

Chart = dict[str, Any]

# Okabe and Ito, https://jfly.uni-koeln.de/color/, and patterns, so that nothing hangs on colour alone.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_PART_LOOKS = {
    "data": ("#999999", "."),
    "forward": ("#56B4E9", ""),
    "backward": ("#0072B2", ""),
    "exposed_hook": ("#CC79A7", "x"),
    "exposed_wait": ("#D55E00", "/"),
    "exposed_wire": ("#E69F00", "\\"),
    "optimizer": ("#009E73", ""),
    "sync": ("#F0E442", "-"),
    "other": ("#777777", "+"),
}
WORDS = {
    "data": "loading data",
    "forward": "forward",
    "backward": "backward",
    "exposed_hook": "hooks, exposed",
    "exposed_wait": "waiting for the last rank",
    "exposed_wire": "the wire, exposed",
    "optimizer": "optimizer",
    "sync": "between steps",
    "other": "the rest",
}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def _look(part: str) -> dict[str, Any]:
    colour, shape = _PART_LOOKS[part]
    pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,0.45)", "size": 6}
    return {"color": colour, "pattern": pattern}


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    return {
        "margin": {"l": 10, "r": 15, "t": 10, "b": 45},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "showlegend": False,
        "hovermode": "x unified",
        **more,
    }


def curves(named: Mapping[str, Curve], y: str, *, scale: float = 1.0, log: bool = False) -> Chart:
    """Lines over steps, each with the band between its lowest and its highest value."""
    data: list[dict[str, Any]] = []
    for place, (name, curve) in enumerate(named.items()):
        colour = COLOURS[place % len(COLOURS)]
        line = {"color": colour, "dash": _DASHES[place % len(_DASHES)], "width": 2}
        if curve.lowest != curve.highest and len(named) <= 3:
            for edge, fill in ((curve.lowest, None), (curve.highest, "tonexty")):
                band = {"x": curve.steps, "y": _scaled(edge, scale), "mode": "lines", "line": {"width": 0}}
                band |= {"hoverinfo": "skip", "showlegend": False, "fillcolor": f"{colour}33"}
                data.append(band | ({"fill": fill} if fill else {}))
        points = "lines" if len(curve.steps) > 1 else "markers"
        data.append(
            {"x": curve.steps, "y": _scaled(curve.means, scale), "name": name, "mode": points, "line": line}
        )
    layout = _layout("step", y)
    layout["yaxis"]["rangemode"] = "normal"
    if log:
        layout["yaxis"]["type"] = "log"
    return {"data": data, "layout": layout}


def split_by_rank(digest: Digest) -> Chart:
    """A step's mean time on each rank, part on part."""
    ranks = [f"rank {rank}" for rank in digest.run.ranks]
    data = []
    for part in PARTS:
        name = part.removesuffix("_us")
        us = [one.get(part, 0.0) / 1000 for one in digest.parts_us]
        if max(us, default=0.0) > 0:
            data.append(_bar(name, {"y": ranks, "x": us}))
    layout = _layout("milliseconds of a step", "", barmode="stack", hovermode="closest")
    layout["yaxis"] = {"autorange": "reversed", "automargin": True}
    return {"data": data, "layout": layout, "height": f"{min(60, 9 + 2 * len(ranks))}rem"}


def split_over_time(digest: Digest) -> Chart:
    """A step's parts over the run, means over ranks."""
    data = []
    for part in PARTS:
        name = part.removesuffix("_us")
        curve = digest.parts[part]
        if any(curve.means):
            data.append(
                {
                    "x": curve.steps,
                    "y": _scaled(curve.means, 1e-3),
                    "name": WORDS[name],
                    "stackgroup": "step",
                    "mode": "lines",
                    "line": {"width": 0.5, "color": _PART_LOOKS[name][0]},
                    "fillcolor": _PART_LOOKS[name][0],
                }
            )
    return {"data": data, "layout": _layout("step", "milliseconds")}


def split_side_by_side(digests: Sequence[tuple[str, Digest]]) -> Chart:
    """Several runs' mean steps, part on part."""
    data = []
    for part in PARTS:
        name = part.removesuffix("_us")
        means = [
            sum(one.get(part, 0.0) for one in digest.parts_us) / max(1, len(digest.parts_us)) / 1000
            for _, digest in digests
        ]
        if max(means) > 0:
            data.append(_bar(name, {"y": [label for label, _ in digests], "x": means}))
    layout = _layout("milliseconds of a step, mean over ranks", "", barmode="stack", hovermode="closest")
    layout["yaxis"] = {"autorange": "reversed", "automargin": True}
    return {"data": data, "layout": layout, "height": f"{9 + 2 * len(digests)}rem"}


def _gradients(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A mark for each gradient where it was complete, if that was recorded."""
    marks = [
        (
            (one["start_us"] + at) / 1000,
            f"rank {one['rank']}, {bucket['kind']} {bucket['bucket']}",
            f"{name} is complete"
            + (", and with it the bucket" if name == bucket["gradients"][-1][0] else ""),
        )
        for one in step["ranks"]
        for bucket in one["buckets"]
        for name, at in bucket["gradients"]
    ]
    if not marks:
        return []
    at, rows, texts = (list(column) for column in zip(*marks, strict=True))
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "a gradient is complete",
            "marker": {"symbol": "line-ns-open", "size": 14, "line": {"width": 2}, "color": "#CC79A7"},
            "hovertemplate": "%{text}<extra>%{y}</extra>",
            "x": at,
            "y": rows,
            "text": texts,
        }
    ]


def timeline(step: Mapping[str, Any]) -> Chart:
    """What every rank did in one step: its training thread, and below it each bucket."""
    bars: dict[str, dict[str, list[Any]]] = {}
    rows: list[str] = []

    def add(kind: str, row: str, start_us: float, us: float, text: str) -> None:
        if us > 0:
            bar = bars.setdefault(kind, {"y": [], "base": [], "x": [], "text": []})
            bar["y"].append(row)
            bar["base"].append(start_us / 1000)
            bar["x"].append(us / 1000)
            bar["text"].append(text)

    for one in step["ranks"]:
        start, thread = one["start_us"], f"rank {one['rank']}"
        rows.append(thread)
        waits = one["waits"]
        for part, at, us in one["laps"]:
            for begin, length in _without(at, us, waits):
                add(part, thread, start + begin, length, f"{WORDS[part]}, {length / 1000:.2f} ms")
        for at, us in waits:
            add("waits", thread, start + at, us, f"waits, {us / 1000:.2f} ms")
        for bucket in one["buckets"]:
            row = f"rank {one['rank']}, {bucket['kind']} {bucket['bucket']}"
            rows.append(row)
            ready, done = bucket["ready_us"], bucket["done_us"]
            late = min(max(bucket["all_ready_us"] or ready, ready), done)
            about = f"bucket {bucket['bucket']}: {', '.join(bucket['params'])}"
            add(
                "late",
                row,
                start + ready,
                late - ready,
                f"{about}: {(late - ready) / 1000:.2f} ms until the last rank",
            )
            add(
                "wire",
                row,
                start + late,
                done - late,
                f"{about}: {(done - late) / 1000:.2f} ms, {bucket['wire_bytes']:,} bytes",
            )
    looks = {
        "waits": (
            "the training thread waits",
            {"color": "rgba(0,0,0,0)", "line": {"color": "#D55E00", "width": 1.5}},
        ),
        "late": (WORDS["exposed_wait"], _look("exposed_wait")),
        "wire": ("under way", _look("exposed_wire")),
    }
    data = []
    for kind, bar in bars.items():
        name, marker = looks.get(kind) or (WORDS[kind], _look(kind))
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "marker": marker,
                "hovertemplate": "%{text}<extra>%{y}</extra>",
                "textposition": "none",
                **bar,
            }
        )
    data += _gradients(step)
    layout = _layout(
        "milliseconds since the first rank began the step", "", barmode="overlay", hovermode="closest"
    )
    layout["yaxis"] = {
        "categoryorder": "array",
        "categoryarray": rows[::-1],
        "automargin": True,
        "range": [-0.5, len(rows) - 0.5],
    }
    return {"data": data, "layout": layout, "height": f"{min(90, 8 + 1.4 * len(rows))}rem"}


def _without(at: int, us: int, holes: Sequence[list[int]]) -> list[tuple[int, int]]:
    """A stretch without others: (start, length)."""
    found, place = [], at
    for begin, length in sorted(holes):
        low, high = max(begin, at), min(begin + length, at + us)
        if low < high:
            if low > place:
                found.append((place, low - place))
            place = max(place, high)
    if place < at + us:
        found.append((place, at + us - place))
    return found


def _bar(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": WORDS[name],
        "marker": _look(name),
        "hovertemplate": f"{WORDS[name]}: %{{x:.2f}} ms<extra>%{{y}}</extra>",
        **values,
    }


def _scaled(values: Sequence[float | None], scale: float) -> list[float | None]:
    return [None if value is None else float(f"{value * scale:.5g}") for value in values]
