"""`report.html`: one page about one run or several, which loads nothing from elsewhere.

This module gathers what is on the page: sections of texts, tables and charts, the last as plain data for
plotly.js. How it looks is in the folder `page`: the template, the style sheet, and the script that draws.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import zip_longest
from textwrap import wrap
from typing import Any, ClassVar, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ddprun import __version__
from ddprun.config.resolved import flow_yaml
from ddprun.report.digest import (
    PART_NAMES,
    Curve,
    RunDigest,
    sentences,
    step_time_difference,
    straggler_episodes,
    time_breakdown,
)
from ddprun.report.predicted import StageComparison
from ddprun.report.replay import StepPart
from ddprun.telemetry.reader import event_name
from ddprun.telemetry.steps import PARTS
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.telemetry.writer import nonfinite_to_none
from ddprun.units import format_bytes, format_count

_FAULT_EVENTS = [
    "resumed",
    "hang",
    "checkpoint_left_out",
    "checkpoint_passed_by",
    "overflow",
    "nonfinite",
    "data_differs",
    "step_skipped",
]
_MAX_FAULTS = 50
_MAX_EVALUATIONS = 50
_MAX_STAGES_IN_CELL = 6
_MAX_BARS = 24
_MAX_POINTS_WITH_MARKERS = 30  # a line of no more has a marker at each
_MAX_EVALUATION_MARKS = 200
_MAX_BANDS = 4
_LABEL_WIDTH = 18  # characters of a line beside a bar
_CURVE_ROWS = 20
_KINDS_WITHOUT_HOOKS = ("parameters", "buffers", "optimizer")
_NO_STEPS = "No step records."
_PREDICTION_SECTION = "Predicted and measured"
_MAX_UNFOLDED_BUCKETS = 30
_PREDICTED_PART_NAMES: dict[StepPart, str] = {
    "own": "own work",
    "hooks": "hooks",
    "late": "waiting for the last rank",
    "wire": "waiting for the wire",
    "step": "step",
}
_EMPTY_CELLS = (None, "", "-")
_MAX_DECIMALS = 7
_QUANTITY = re.compile(r"[+-]?[\d.,]+( ± [\d.,]+)?( ?%| [kMGT]?B)?( \([^()]+ to [^()]+\))?")

Chart = dict[str, Any]  # as plotly.js takes it
NamedDigests = Sequence[tuple[str, RunDigest]]  # the names are those under which the page shows them


class _PartStyle(NamedTuple):
    """How a part of a step is shown."""

    colour: str
    pattern: str = ""

    @property
    def marker(self) -> dict[str, Any]:
        """The colour and pattern as the `marker` of a plotly bar trace."""
        pattern = {"shape": self.pattern, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,0.45)", "size": 6}
        return {"color": self.colour, "pattern": pattern}


# Colours that colour-blind readers tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/), and patterns
# and dashes, so that nothing depends on colour alone.
_PART_STYLES = {
    "data_us": _PartStyle("#999999", "."),
    "forward_us": _PartStyle("#56B4E9"),
    "backward_us": _PartStyle("#0072B2"),
    "exposed_hook_us": _PartStyle("#CC79A7", "x"),
    "exposed_wait_us": _PartStyle("#D55E00", "/"),
    "exposed_wire_us": _PartStyle("#E69F00", "\\"),
    "optimizer_us": _PartStyle("#009E73"),
    "sync_us": _PartStyle("#F0E442", "-"),
    "other_us": _PartStyle("#777777", "+"),
}
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_HELD_OUT_STYLE = 5  # the colour of held-out data in the report of one run
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_OUTLINE = {"color": "rgba(0,0,0,0)", "line": {"color": "#D55E00", "width": 1.5}}


@dataclass(frozen=True, slots=True)
class Text:
    """A heading, a paragraph or a note; what is in backticks is shown as code."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under their heads; columns of numbers are aligned right, with as many decimals in each cell."""

    kind: ClassVar[str] = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    folded_title: str = ""  # if not empty, the table is folded away under this title

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether all its cells are numbers, some of them with a unit or an interval."""
        columns = list(zip_longest(*self.rows)) or [()] * len(self.heads)
        return [
            any(cell not in _EMPTY_CELLS for cell in column) and all(map(_is_quantity, column))
            for column in columns
        ]

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text; numbers of a column have equally many decimals."""
        return list(zip(*map(format_alike, zip_longest(*self.rows)), strict=True))


@dataclass(slots=True)
class Figure:
    """A chart, or several of which the reader chooses one."""

    kind: ClassVar[str] = "figure"
    label: str  # what it shows
    charts: Mapping[str, Chart]  # by the choice that shows it; "" if there is only one
    id: str = ""

    @property
    def initial_choice(self) -> str:
        """The choice that is shown first."""
        return next(
            (choice for choice in self.charts if "the median step" in choice), next(iter(self.charts))
        )


Block = Text | Table | Figure


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `ddprun compare` says about the runs of a page."""

    sentences: Sequence[str]
    blocks: Sequence[Block]


def page(
    runs: NamedDigests,
    comparison: Comparison | None = None,
    predicted: Sequence[Sequence[StageComparison]] = (),
) -> str:
    """The page about at least one run; what compares them comes first.

    Args:
        runs: each with its name.
        comparison: what `ddprun compare` says of them.
        predicted: for each run, what its stages were predicted to take.
    """
    blocks_by_title: dict[str, list[Block]] = {"Comparison": list(comparison.blocks) if comparison else []}
    makers = _SECTIONS | {_PREDICTION_SECTION: partial(_predicted_section, predicted)}
    blocks_by_title |= {title: list(make(runs)) for title, make in makers.items()}
    for blocks in blocks_by_title.values():
        _share_scales([block for block in blocks if isinstance(block, Figure)])
    sections = {title: blocks for title, blocks in blocks_by_title.items() if blocks}
    figures = [block for blocks in sections.values() for block in blocks if isinstance(block, Figure)]
    for number, figure in enumerate(figures):
        figure.id = f"chart-{number}"
    environment = Environment(
        loader=PackageLoader("ddprun.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["code"] = _backticks_to_code
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template("report.html").render(
        title="ddprun: " + (", ".join(name for name, _ in runs) if len(runs) < 3 else f"{len(runs)} runs"),
        words=_summary_sentences(runs, comparison),
        sections=[(title, title.lower().replace(" ", "-"), blocks) for title, blocks in sections.items()],
        charts=nonfinite_to_none(
            {figure.id: {"chosen": figure.initial_choice, "choices": figure.charts} for figure in figures}
        ),
        plotly=Markup((files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")),
        version=__version__,
    )


def _summary_sentences(runs: NamedDigests, comparison: Comparison | None) -> dict[str, Sequence[str]]:
    """The sentences on top, by heading: of one run by stage, of several how each differs from the first."""
    if len(runs) == 1 and comparison is None:
        return dict(sentences(runs[0][1]))
    found: dict[str, Sequence[str]] = {"": comparison.sentences} if comparison else {}
    timed = [(name, digest.times) for name, digest in runs if digest.steps_per_s is not None]
    for name, times in timed:
        about = [step_time_difference(*timed[0], times)] if times is not timed[0][1] else []
        found[name] = [*about, time_breakdown(times)]
    if comparison is None:
        text = "The runs did not take turns, so the machine may have made a part of what differs in time"
        found["All runs"] = [f"{text}: `ddprun compare` tells it apart."]
    return found


def format_value(value: Any) -> str:
    """Format a value for a reader."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def format_alike(values: Iterable[Any]) -> list[str]:
    """Format values of one quantity with equally many decimals: enough for four digits of the largest and two
    of the smallest. If that takes more than seven decimals, format each on its own.
    """
    values = list(values)
    sizes = [abs(value) for value in values if isinstance(value, float) and value and math.isfinite(value)]
    if all(size.is_integer() for size in sizes):
        return [format_value(value) for value in values]
    digits = max(3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))), 0)
    if digits > _MAX_DECIMALS:
        return list(map(format_value, values))
    return [f"{value:,.{digits}f}" if isinstance(value, float) else format_value(value) for value in values]


def _is_quantity(cell: Any) -> bool:
    return cell in _EMPTY_CELLS or isinstance(cell, int | float) or bool(_QUANTITY.fullmatch(str(cell)))


def _backticks_to_code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def with_short_names(digests: Sequence[RunDigest]) -> NamedDigests:
    """Pair each digest with a short name: as many of the last parts of its folder's path as it takes to tell
    the runs apart.
    """
    paths = [digest.run.folder.resolve() for digest in digests]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names) and length >= min(2, len(paths[0].parts)):
            return list(zip(names, digests, strict=True))
    return [
        (f"{path} ({index})", digest)
        for index, (path, digest) in enumerate(zip(paths, digests, strict=True), 1)
    ]


def _per_run_section(
    blocks: Callable[[RunDigest], Iterator[Block]], has_any: Callable[[RunDigest], Any] = lambda _: True
) -> Callable[[NamedDigests], Iterator[Block]]:
    """Make a section that repeats the same blocks for each run, or shows them once if all runs have the same
    text. It is empty if `has_any` is false for every run.
    """

    def section(runs: NamedDigests) -> Iterator[Block]:
        if not any(has_any(digest) for _, digest in runs):
            return
        found = [(name, list(blocks(digest))) for name, digest in runs]
        first = found[0][1]
        if all(isinstance(block, Text) for block in first) and all(one == first for _, one in found):
            found = [("All runs", first)]
        for name, of_run in found:
            if len(runs) > 1:
                yield Text(name, "heading")
            yield from of_run

    return section


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], caption: str, otherwise: str) -> Block:
    """A table; without rows a note instead."""
    return Table(heads, rows, caption) if rows else Text(otherwise, "note")


def _chart(chart: Chart, label: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[Block]:
    """A chart, and its numbers as a table."""
    yield Figure(label, {"": chart})
    yield Table(heads, rows, folded_title=f"{label}: the numbers")


def _curves_over_steps(
    label: str,
    unit: str,
    lines: Mapping[str, "_Line"],
    runs: NamedDigests,
    draw: Callable[[Mapping[str, "_Line"], str], Chart] | None = None,
) -> Iterator[Block]:
    """A chart of curves over steps, with the stages; its table has few enough rows to be read."""
    rows: list[list[Any]] = []
    for name, (curve, *_) in lines.items():
        every = max(1, len(curve.steps) // _CURVE_ROWS)
        rows += [[name, round(s), m] for s, m in zip(curve.steps[::every], curve.means[::every], strict=True)]
    chart = _with_marks((draw or _curve_chart)(lines, unit), runs)
    return _chart(chart, label, ["", "step", unit], rows)


# The sections.


def _run_section(runs: NamedDigests) -> Iterator[Block]:
    columns = [dict(_run_facts(digest)) for _, digest in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *format_alike(column.get(key) for column in columns)] for key in keys]
    yield Table(["", *(name for name, _ in runs)], rows)


def _run_facts(digest: RunDigest) -> Iterator[tuple[str, Any]]:
    run, summary = digest.run, digest.run.summary or {}
    started = run.first_event("started") or {}
    hosts = len(set(started.get("hosts", ())))
    world = started.get("world_size", digest.rank_count)
    yield "pipeline", started.get("pipeline")
    yield "status", summary.get("status", "still running, or killed")
    yield "ranks", f"{world} on {format_count(hosts, 'host')}"
    yield "device", f"{started.get('device')} over {started.get('backend')}"
    if digest.stages:
        shown_stages = [stage.description for stage in digest.stages[:_MAX_STAGES_IN_CELL]]
        more = ["…"] * (len(digest.stages) > _MAX_STAGES_IN_CELL)
        yield "stages that take steps", "; ".join([*shown_stages, *more])
    yield "steps", summary.get("steps", run.last_step)
    yield "steps per second", digest.steps_per_s
    yield "samples, all ranks", summary.get("samples")
    yield "mean loss, last step", summary.get("loss")
    for name, curve in digest.held_out.items():
        yield f"held-out {name}", curve.means[-1]
    best = summary.get("best")
    if isinstance(best, Mapping):
        step, file = format_value(best.get("step")), best.get("file")
        yield f"best {best.get('metric')}", f"{format_value(best.get('value'))} after step {step}, in {file}"
    if digest.recorded_steps:
        yield "exposed communication", f"{digest.times.exposed_share:.0%} of step time"
    if "wire_bytes" in summary:
        yield "sent by all ranks", format_bytes(summary["wire_bytes"])
    yield "seconds", summary.get("seconds")
    for name, version in (summary.get("versions") or {}).items():
        yield name, version
    yield "started", _format_event_time(started.get("time"))


def _format_event_time(time: Any) -> Any:
    """A time of an event, without fractions of a second: `2026-11-23 23:30:38 UTC`."""
    return re.sub(r"^([\d-]+)T([\d:]+)(\.\d+)?Z$", r"\1 \2 UTC", time) if isinstance(time, str) else time


def _loss_section(runs: NamedDigests) -> Iterator[Block]:
    if not any(digest.loss.steps for _, digest in runs):
        return
    lines: dict[str, _Line] = {}
    for index, (name, digest) in enumerate(runs):
        if len(runs) == 1 and digest.rank_count > 1:
            of_ranks = zip(digest.run.ranks, digest.rank_losses, strict=False)
            lines |= {f"rank {rank}": _Line(curve, rank + 1, "rank") for rank, curve in of_ranks}
        of_run = "mean over ranks" if len(runs) == 1 else name
        lines[of_run] = _Line(digest.loss, index, "mean")  # on top of those of the ranks
        if "loss" in digest.held_out:
            lines[_held_out_label(name, runs)] = _held_out_line(digest, "loss", index, runs)
    yield from _curves_over_steps("Loss over steps", "loss", lines, runs)


def _held_out_label(name: str, runs: NamedDigests) -> str:
    return "held-out" if len(runs) == 1 else f"{name}, held-out"


def _held_out_line(digest: RunDigest, metric: str, index: int, runs: NamedDigests) -> "_Line":
    """The line in the colour of its run; in the report of a single run, in a colour of its own."""
    return _Line(digest.held_out[metric], index if len(runs) > 1 else _HELD_OUT_STYLE, "held-out")


def _held_out_section(runs: NamedDigests) -> Iterator[Block]:
    """A chart of each metric but the loss, which is beside the training loss; and all numbers."""
    metrics = list(dict.fromkeys(name for _, digest in runs for name in digest.held_out))
    for metric in metrics:
        lines = {
            _held_out_label(name, runs): _held_out_line(digest, metric, index, runs)
            for index, (name, digest) in enumerate(runs)
            if metric in digest.held_out
        }
        if metric != "loss" and any(len(line.curve.steps) > 1 for line in lines.values()):
            yield from _curves_over_steps(f"Held-out {metric} over steps", metric, lines, runs)
    rows: list[list[Any]] = []
    for name, digest in runs:
        found: dict[float, dict[str, float | None]] = defaultdict(dict)
        for metric, curve in digest.held_out.items():
            for step, value in zip(curve.steps, curve.means, strict=True):
                found[step][metric] = value
        of_run = [name] * (len(runs) > 1)
        rows += [[*of_run, round(step), *map(found[step].get, metrics)] for step in sorted(found)]
    if rows:
        last = rows[-_MAX_EVALUATIONS:]
        caption = f"The last {len(last)} of {len(rows)} evaluations." if len(last) < len(rows) else ""
        yield Table([*["run"] * (len(runs) > 1), "step", *metrics], last, caption)


def _param_groups_section(runs: NamedDigests) -> Iterator[Block]:
    for key, label in (("lr", "Learning rate"), ("group_grad_norms", "Gradient norm")):
        lines: dict[str, _Line] = {}
        for name, digest in runs:
            curves = _param_group_curves(digest, key)
            if key != "lr" and len(runs) > 1:  # those of groups would be too many
                curves = {"": digest.grad_norm} if digest.grad_norm.steps else {}
            for group, curve in curves.items():  # of one run a group looks alike in both charts
                about = [name] * (len(runs) > 1) + [group] * bool(group)
                lines[", ".join(about) or label.lower()] = _Line(curve, len(lines))
        if lines:
            yield from _curves_over_steps(f"{label} over steps", label.lower(), lines, runs)


def _param_group_curves(digest: RunDigest, key: str) -> dict[str, Curve]:
    """The curve of each group of parameters, under the group's name if there are several. For gradient norms,
    the norm of all gradients comes last.
    """
    curves = digest.param_group_curves[key]
    several = len(curves) > 1
    patterns = (digest.run.first_event("started") or {}).get("groups")
    names = [f": {name}" for name in (*patterns, "the rest")] if patterns else []
    found = {f"group {n}{''.join(names[n : n + 1])}" * several: curve for n, curve in enumerate(curves)}
    if key != "lr" and digest.grad_norm.steps:
        found["all gradients" * several] = digest.grad_norm
    return found


def _step_time_section(runs: NamedDigests) -> Iterator[Block]:
    heads = ["", *PART_NAMES.values(), "step"]

    def rows(named: Mapping[str, Mapping[str, float]]) -> list[list[Any]]:
        parts = (*PARTS, "step_us")
        return [[name, *(us.get(part, 0.0) / 1000 for part in parts)] for name, us in named.items()]

    def of_run(digest: RunDigest) -> Iterator[Block]:
        if not digest.recorded_steps:
            yield Text(_NO_STEPS, "note")
            return
        several = len(digest.stages) > 1
        of_ranks = {
            f"stage {stage.index}, rank {rank}" if several else f"rank {rank}": us
            for stage in digest.stages
            for rank, us in zip(digest.run.ranks, stage.times.mean_us_by_rank, strict=True)
            if us
        }
        of_stages = {stage.name: stage.times.mean_parts_us for stage in digest.stages}
        label = f"Step time by {'stage and ' * several}rank, in milliseconds"
        bars = of_ranks if len(of_ranks) <= _MAX_BARS else of_stages
        yield from _chart(_parts_chart(bars, "ms per step"), label, heads, rows(of_stages | of_ranks))
        used = {
            PART_NAMES[part]: _Line(curve, index)
            for index, (part, curve) in enumerate(digest.parts_ms.items())
            if any(curve.means)
        }
        label = "Step time over the run, mean over ranks"
        yield from _curves_over_steps(label, "milliseconds", used, [("", digest)], _stacked_area_chart)

    if len(runs) > 1:
        means = {name: digest.times.mean_parts_us for name, digest in runs if digest.recorded_steps}
        label = "Step time of the runs, mean over ranks, in milliseconds"
        yield from _chart(_parts_chart(means, "ms per step"), label, heads, rows(means))
    yield from _per_run_section(of_run)(runs)


def _predicted_section(predicted: Sequence[Sequence[StageComparison]], runs: NamedDigests) -> Iterator[Block]:
    for (name, _), stages in zip(runs, predicted, strict=False):
        for one in stages:
            title = [name] * (len(runs) > 1) + [one.stage] * (len(stages) > 1)
            if title:
                yield Text(": ".join(title), "heading")
            yield from map(Text, one.sentences)
            heads = ["", "predicted, ms", "measured, ms", "difference, ms", "difference"]
            rows = [
                [_PREDICTED_PART_NAMES[part], *_predicted_measured_cells(*us)]
                for part, us in one.step_parts_us.items()
            ]
            if rows:
                yield Table(heads, rows, "A step of the training thread.")
            ready_heads, done_heads = (
                [f"{what}, {how}, ms" for how in ("predicted", "measured")] for what in ("ready", "done")
            )
            heads = ["bucket", *ready_heads, *done_heads, *heads[3:]]
            rows = []
            for bucket, both in one.buckets.items():
                ready = _predicted_measured_cells(*(times and times.ready_us for times in both))
                done = _predicted_measured_cells(*(times and times.done_us for times in both))
                rows.append([bucket, *ready[:2], *done])
            if rows:
                caption = "Since the step began: medians over steps and ranks."
                yield Table(heads, rows, caption, "Each bucket" * (len(rows) > _MAX_UNFOLDED_BUCKETS))
            if one.sweep:
                heads = ["ranks", "a step, ms", "waiting, ms"]
                in_ms = [[ranks, us / 1000, waiting / 1000] for ranks, us, waiting in one.sweep]
                yield from _chart(_sweep_chart(in_ms, heads), "A step on more ranks, predicted", heads, in_ms)


def _sweep_chart(rows: Sequence[Sequence[float]], heads: Sequence[str]) -> Chart:
    """Times over the number of ranks, both on logarithmic scales."""
    columns = list(zip(*rows, strict=True))
    data = [
        {
            "x": columns[0],
            "y": [value or None for value in column],
            "name": name.removesuffix(", ms"),
            "mode": "lines+markers",
            "line": {"color": _COLOURS[style], "dash": _DASHES[style]},
        }
        for style, (name, column) in enumerate(zip(heads[1:], columns[1:], strict=True))
    ]
    layout = _layout("ranks", "ms")
    layout["xaxis"] |= {"type": "log", "tickvals": columns[0], "ticktext": list(map(str, columns[0]))}
    layout["yaxis"] |= {"type": "log", "rangemode": "normal", "dtick": 1}
    known = [value for column in columns[1:] for value in column if value]
    return {"data": data, "layout": layout, "values": ("yaxis", min(known), max(known))}


def _predicted_measured_cells(predicted_us: float | None, measured_us: float | None) -> list[Any]:
    """Four cells: the predicted time, the measured time, and their difference in ms and in percent."""
    if predicted_us is None or measured_us is None:
        return [predicted_us and predicted_us / 1000, measured_us and measured_us / 1000, None, None]
    us = measured_us - predicted_us
    percent = f"{us / predicted_us:+.0%}" if predicted_us else None
    return [predicted_us / 1000, measured_us / 1000, us / 1000, percent]


def _timeline_section(runs: NamedDigests) -> Iterator[Block]:
    link = Markup('<a href="https://ui.perfetto.dev">Perfetto</a>')
    note = Markup(
        "The first row of each rank is its training thread; an outline marks where it only waits. The rows "
        "below it are its buckets, from the moment each is ready: first the time until the last rank has it "
        "ready, then the exchange. For more steps, open `trace.json` from the run's folder in {}."
    )
    yield Text(note.format(link), "note")

    def of_run(digest: RunDigest) -> Iterator[Block]:
        choices = {_timeline_title(digest, step): _timeline_chart(step) for step in digest.timelines}
        if not choices:
            yield Text(_NO_STEPS, "note")
            return
        yield Figure("Timeline of one step, one rank below the other", choices)

    yield from _per_run_section(of_run)(runs)


def _timeline_title(digest: RunDigest, step: Mapping[str, Any]) -> str:
    """The step, its stage, and why it is shown."""
    stages = [stage.name for stage in digest.stages if stage.first_step <= step["step"] <= stage.last_step]
    about = ", ".join([*stages[: len(digest.stages) > 1], *[step["why"]] * bool(step["why"])])
    return f"step {step['step']:,}" + (f": {about}" if about else "")


def _gradients_section(digest: RunDigest) -> Iterator[Block]:
    rows: list[list[Any]] = []
    for bucket, one in digest.bucket_completions.items():
        total = one.completed_by.total()
        for index, (name, times) in enumerate(one.completed_by.most_common(3)):
            about = ["", ""] if index else [bucket, len(one.params)]
            spread = "" if index else one.first_to_last_us / total / 1000
            rows.append([*about, name, f"{times / total:.0%}", spread])
    heads = ["bucket", "parameters", "last gradient", "how often", "first to last gradient, ms"]
    caption = "A bucket is sent when its last gradient is complete."
    yield _table(heads, rows, caption, "Not recorded: `timings.gradients` is off.")


def _communication_section(digest: RunDigest) -> Iterator[Block]:
    heads = ["stage", "what", "hooks", "in steps", "payloads per step", "before hooks", "sent by a rank"]
    heads += ["between hosts", "ready to done, ms", "encode, ms", "decode, ms"]
    rows = []
    for stage in digest.stages:
        for one in stage.traffic:
            steps, payloads = max(1, one.steps) * max(1, digest.rank_count), max(1, one.payloads)
            amounts = one.bytes, one.wire_bytes, one.between_hosts_bytes
            sizes = [format_bytes(amount / steps) for amount in amounts]
            totals_us = one.ready_to_done_us, one.encode_us, one.decode_us
            times = [us / payloads / 1000 for us in totals_us]
            none = "none" if one.kind in _KINDS_WITHOUT_HOOKS else "none: all-reduce"
            hooks = ", ".join(one.hooks) or none
            share = f"{one.steps / max(1, stage.sampled_step_count):.0%}"
            rows.append([stage.index, one.kind, hooks, share, one.payloads / steps, *sizes, *times])
    caption = "Means over ranks and over the steps with such an exchange; times are for one payload."
    yield _table(heads, rows, caption, "Nothing was exchanged, or there are no bucket records.")


def _fidelity_section(digest: RunDigest) -> Iterator[Block]:
    labels = {
        "cosine": ("Cosine of the mean gradient with hooks and the exact mean", "cosine"),
        "relative_l2": (
            "Distance of the mean gradient with hooks from the exact mean, as a share of its norm",
            "relative L2 error",
        ),
    }
    draw = partial(_curve_chart, breaks=_stage_starts(digest))
    for measure, curves in digest.fidelity.items():
        lines = {name: _Line(curve, index) for index, (name, curve) in enumerate(curves.items())}
        yield from _curves_over_steps(*labels[measure], lines, [("", digest)], draw)
    if not digest.fidelity:
        yield Text("Not measured: `timings.fidelity_every` is 0.", "note")


def _stragglers_section(digest: RunDigest) -> Iterator[Block]:
    """The total for each rank, cause and bucket; folded below them the episodes."""
    heads = ["rank", "late by, ms", "share of a step", "cause", "bucket", "parameters", "steps"]
    heads += ["from step", "to step"]

    def row(one: StragglerTotal) -> list[Any]:
        params = ", ".join(one.params[:4]) + (" …" if len(one.params) > 4 else "")
        late = [one.late_us / 1000, f"{one.late_us / one.step_us:.0%}"]
        return [one.rank, *late, one.cause, one.bucket, params, one.steps, one.first_step, one.last_step]

    episodes = straggler_episodes(digest)
    totals = straggler_totals(episodes)
    if not episodes:
        yield Text("No straggler.")
        return
    yield Table(heads, list(map(row, totals)))
    if len(totals) < len(episodes):
        singly = [row(one) for episode in episodes for one in straggler_totals([episode])]
        yield Table(heads, singly, folded_title=f"Each of {len(episodes)} episodes")


def _stages_section(digest: RunDigest) -> Iterator[Block]:
    start_events = {event["stage"]: event for event in digest.run.events_of_kind("stage_started")}
    digests = {stage.index: stage for stage in digest.stages}
    rows = []
    for index, stage in enumerate((digest.run.summary or {}).get("stages", ())):
        event, found = start_events.get(index, {}), digests.get(index)
        sync = event.get("sync")
        sync = sync if sync is None else flow_yaml(sync)
        about = [stage.get(key) for key in ("kind", "steps", "seconds")]
        about += [found.step_ms, f"{found.times.exposed_share:.0%}"] if found else [None, None]
        rows.append([index, *about, sync, ", ".join(event.get("hooks", ())) or None])
    heads = ["stage", "kind", "steps", "seconds", "ms per step", "exposed", "sync", "hooks"]
    yield _table(heads, rows, "", "The run has no summary yet.")


def _buffers_section(digest: RunDigest) -> Iterator[Block]:
    verdict = (digest.run.first_event("buffers") or {}).get("verdict")
    text = str(verdict or "the pipeline file says when buffers are sent")
    yield Text(f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _faults_section(digest: RunDigest) -> Iterator[Block]:
    found = [event for event in digest.run.events if event["event"] in _FAULT_EVENTS]
    starts = len(digest.run.events_of_kind("started"))
    yield Text("Started once." if starts == 1 else f"Started {format_count(starts, 'time')}.")
    if not found:
        yield Text("Nothing went wrong.")
        return
    rows = [
        [
            _format_event_time(event.get("time")),
            event_name(event["event"]),
            event.get("step"),
            _details(event),
        ]
        for event in found[-_MAX_FAULTS:]
    ]
    left_out = f"The last {_MAX_FAULTS} of {len(found)}." if len(found) > _MAX_FAULTS else ""
    yield Table(["when", "what", "step", ""], rows, left_out)


def _details(event: Mapping[str, Any]) -> str:
    left_out = {"event", "level", "time", "monotonic_us", "rank", "step", "params"}
    if event["event"] == "nonfinite":
        left_out.remove("rank")  # whose loss it was
    return ", ".join(f"{key}: {format_value(value)}" for key, value in event.items() if key not in left_out)


_SECTIONS: dict[str, Callable[[NamedDigests], Iterator[Block]]] = {
    "The run": _run_section,
    "Loss": _loss_section,
    "Held-out data": _held_out_section,
    "Learning rate and gradient norm": _param_groups_section,
    "Step time": _step_time_section,
    _PREDICTION_SECTION: lambda _: iter(()),  # `page` is told what
    "Timeline of a step": _timeline_section,
    "Gradients": _per_run_section(_gradients_section, lambda digest: digest.bucket_completions),
    "Communication": _per_run_section(_communication_section),
    "Fidelity": _per_run_section(_fidelity_section, lambda digest: digest.fidelity),
    "Stragglers": _per_run_section(_stragglers_section),
    "Stages": _per_run_section(_stages_section),
    "Buffers": _per_run_section(_buffers_section),
    "Faults and restarts": _per_run_section(_faults_section),
}


# Charts. Each says in `values` which axis has its values, and from where to where they reach.


def _layout(x: str, y: str = "", **more: Any) -> dict[str, Any]:
    return {
        "margin": {"l": 10, "r": 15, "t": 10, "b": 45},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True, "rangemode": "tozero"},
        "showlegend": False,
        "hovermode": "x unified",
        **more,
    }


def _share_scales(figures: Sequence[Figure]) -> None:
    """Give all charts of the same quantity one scale; a choice that needs more has its own."""
    for label in {figure.label for figure in figures}:
        alike = [figure for figure in figures if figure.label == label]
        if len(alike) < 2:
            continue
        first = [figure.charts[figure.initial_choice]["values"] for figure in alike]
        for chart in (chart for figure in alike for chart in figure.charts.values()):
            axis, *own = chart["values"]
            low, high = min(own[0], *(one[1] for one in first)), max(own[1], *(one[2] for one in first))
            if high - low <= 1e-5 * abs(high):  # one value
                low, high = min(low, 0.0), max(high, 0.0)
            room = (high - low) * 0.04
            chart["layout"][axis]["range"] = [low - room if low else 0, high + room]


def _with_marks(chart: Chart, runs: NamedDigests) -> Chart:
    """The chart with where stages begin and evaluations took place: of each run, if they are not the same."""
    named = {name: (_stage_starts(digest), list(digest.run.evaluations)) for name, digest in runs}
    alike = all(one == named[runs[0][0]] for one in named.values())
    shapes: list[dict[str, Any]] = []

    def mark(name: str, at: float, height: float, colour: str, dash: str) -> None:
        line = {"color": colour, "width": 1.5, "dash": dash}
        ends = {"x0": at, "x1": at, "y0": 0, "y1": height}
        shapes.append({"type": "line", "yref": "paper", "name": name, "line": line, **ends})

    for index, (name, (begins, evaluations)) in enumerate(named.items()):
        if not (alike and index):
            of_run = "" if alike else f" of {name}"
            grey, orange = (
                ("#888888", _COLOURS[_HELD_OUT_STYLE]) if alike else (_COLOURS[index % len(_COLOURS)],) * 2
            )
            for at in begins[1:]:
                mark(f"a stage{of_run} begins", at, 1, grey, "dot")
            for step in evaluations[:: math.ceil(len(evaluations) / _MAX_EVALUATION_MARKS) or 1]:
                mark(f"evaluation{of_run}", step, 0.05, orange, "solid")
    layout = chart["layout"]
    layout["shapes"], layout["annotations"] = shapes, []
    stages = runs[0][1].stages
    if alike and len(stages) > 1:
        layout["margin"]["t"] = 24
        place = {"y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        for stage, at in zip(stages, _stage_starts(runs[0][1]), strict=True):
            text = f"{stage.index}: {stage.description if len(runs) == 1 else stage.kind}"
            layout["annotations"].append({"x": at, "text": text, "name": str(stage.index), **place})
    ends: list[float] = [
        step for _, digest in runs for step in (*digest.recorded_steps[:1], *digest.recorded_steps[-1:])
    ]
    ends += [step for _, evaluations in named.values() for step in evaluations]
    layout["xaxis"]["range"] = [min(ends, default=0) - 0.5, max(ends, default=0) + 0.5]
    return chart


def _stage_starts(digest: RunDigest) -> list[float]:
    return [stage.first_step - 0.5 for stage in digest.stages]


class _Line(NamedTuple):
    """A curve, and how it is drawn."""

    curve: Curve
    style: int  # number of its colour and dash
    kind: Literal["", "mean", "rank", "held-out"] = ""


def _curve_chart(lines: Mapping[str, _Line], y: str, breaks: Sequence[float] = ()) -> Chart:
    """Lines over steps, each with a band from its lowest to its highest value; no line crosses a break."""
    data: list[dict[str, Any]] = []
    banded = not breaks and sum(line.kind in ("", "mean") for line in lines.values()) <= _MAX_BANDS
    values: list[float | None] = []
    for name, (curve, style, kind) in lines.items():
        colour = _COLOURS[style % len(_COLOURS)]
        dash = "solid" if kind == "held-out" else _DASHES[style % len(_DASHES)]
        width = {"mean": 3.0, "rank": 1.0}.get(kind, 2.0)
        gaps = [(at, None) for at in breaks]
        points = sorted([*zip(curve.steps, curve.means, strict=True), *gaps], key=lambda point: point[0])
        xs, means = [at for at, _ in points], [mean for _, mean in points]
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
        mode = "lines+markers" if marked else "lines"
        one = {"x": xs, "y": _rounded(means), "name": name, "mode": mode, "line": line, "cliponaxis": False}
        data.append({**one, "marker": marker} if marked else one)
    layout = _layout("step", y)
    known = [value for value in values if value is not None] or [0.0]
    if len(set(_rounded(known))) > 1:  # around one value plotly would show a whole on either side
        layout["yaxis"]["rangemode"] = "normal"
    return {"data": data, "layout": layout, "values": ("yaxis", min(known), max(known))}


def _parts_chart(rows: Mapping[str, Mapping[str, float]], x: str) -> Chart:
    """A bar of milliseconds for each row: its parts of a step, given in microseconds, one after the other."""
    data = []
    for part in PARTS:
        ms = [us.get(part, 0.0) / 1000 for us in rows.values()]
        if max(ms, default=0.0) > 0:
            name = PART_NAMES[part]
            bar = _bars(name, _PART_STYLES[part].marker, f"{name}: %{{x:.2f}} ms<extra>%{{y}}</extra>")
            data.append({**bar, "y": list(rows), "x": ms})
    layout = _layout(x, barmode="stack", hovermode="closest")
    wrapped = ["<br>".join(wrap(row, _LABEL_WIDTH)) for row in rows]  # a phone is narrow
    ticks = {"tickvals": list(rows), "ticktext": wrapped}
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, **ticks}
    longest = max((us.get("step_us", 0.0) / 1000 for us in rows.values()), default=0.0)
    lines = sum(text.count("<br>") + 1 for text in wrapped)
    height = f"{min(60, 9 + max(2 * len(rows), 1.3 * lines))}rem"
    return {"data": data, "layout": layout, "height": height, "values": ("xaxis", 0, longest)}


def _stacked_area_chart(lines: Mapping[str, _Line], y: str) -> Chart:
    """The parts of a step over the run, one above the other."""
    data = []
    for name, (curve, part, _) in lines.items():
        style = _PART_STYLES[PARTS[part]]
        area = {"stackgroup": "step", "mode": "lines", "line": {"width": 0.5, "color": style.colour}}
        fill = {"fillcolor": style.colour, "fillpattern": style.marker["pattern"]}
        data.append({"x": curve.steps, "y": _rounded(curve.means), "name": name, **area, **fill})
    columns = zip(*(line.curve.means for line in lines.values()), strict=False)
    highest = max((sum(value or 0.0 for value in column) for column in columns), default=0.0)
    return {"data": data, "layout": _layout("step", y), "values": ("yaxis", 0, highest)}


def _timeline_chart(step: Mapping[str, Any]) -> Chart:
    """What every rank did in one step: its training thread, and below it each bucket."""
    bars: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"y": [], "base": [], "x": [], "text": []})
    rows: list[str] = []

    def add(kind: str, row: str, start_us: float, us: float, text: str) -> None:
        if us > 0:
            values = {"y": row, "base": start_us / 1000, "x": us / 1000, "text": text}
            for key, value in values.items():
                bars[kind][key].append(value)

    for one in step["ranks"]:
        start, thread, at = one["start_us"], f"rank {one['rank']}", 0
        rows.append(thread)
        for part, us in one["laps"]:
            kind = f"{part}_us" if f"{part}_us" in _PART_STYLES else "other_us"
            for begin, length in _interval_without_waits(at, us, one["waits"]):
                add(kind, thread, start + begin, length, f"{PART_NAMES[kind]}, {length / 1000:.2f} ms")
            at += us
        for begin, us in one["waits"]:
            add("waits", thread, start + begin, us, f"waits, {us / 1000:.2f} ms")
        for bucket in one["buckets"]:
            row = f"{thread}, {bucket['kind']} {bucket['bucket']}"
            rows.append(row)
            ready, done = bucket["ready_us"], bucket["done_us"]
            all_ready = min(max(bucket["all_ready_us"] or ready, ready), done)
            hooks = ", ".join(bucket["hooks"]) or "all-reduce"
            about = f"bucket {bucket['bucket']}: {', '.join(bucket['params'])}, through {hooks}"
            late, wire = all_ready - ready, done - all_ready
            waited = f"{about}: {late / 1000:.2f} ms until the last rank"
            add("exposed_wait_us", row, start + ready, late, waited)
            sent = f"{about}: {wire / 1000:.2f} ms, {bucket['wire_bytes']:,} bytes"
            add("wire", row, start + all_ready, wire, sent)
    styles = {part: (PART_NAMES[part], style.marker) for part, style in _PART_STYLES.items()}
    styles["waits"] = "the training thread waits", _OUTLINE
    styles["wire"] = "exchange", _PART_STYLES["exposed_wire_us"].marker
    hover = "%{text}<extra>%{y}</extra>"
    data = [{**_bars(*styles[kind], hover), "textposition": "none", **bar} for kind, bar in bars.items()]
    data += _gradient_marks(step, hover)
    layout = _layout("ms since the step began", barmode="overlay", hovermode="closest")
    order = {"categoryorder": "array", "categoryarray": rows[::-1], "range": [-0.5, len(rows) - 0.5]}
    layout["yaxis"] = {**order, "automargin": True}
    height = f"{min(90, 8 + 1.4 * len(rows))}rem"
    ends = (
        base + length for bar in bars.values() for base, length in zip(bar["base"], bar["x"], strict=True)
    )
    return {"data": data, "layout": layout, "height": height, "values": ("xaxis", 0, max(ends, default=0.0))}


def _gradient_marks(step: Mapping[str, Any], hover: str) -> list[dict[str, Any]]:
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


def _interval_without_waits(at: int, us: int, waits: Sequence[list[int]]) -> list[tuple[int, int]]:
    """The parts of an interval that no wait covers, as (start, length) pairs."""
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
