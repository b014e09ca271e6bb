"""The sections of a page about one run or several: each gathers its texts, tables and charts."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Any

from markupsafe import Markup

from ddprun.config.faults import Source
from ddprun.config.yaml_reader import parse_yaml
from ddprun.config.yaml_writer import flow_yaml
from ddprun.report import charts
from ddprun.report.blocks import (
    Block,
    Chart,
    Figure,
    NamedDigests,
    Table,
    Text,
    format_value,
    format_with_equal_decimals,
)
from ddprun.report.charts import StyledCurve
from ddprun.report.digest import PERCENTILES, STEP_PARTS, Curve, RunDigest, Timeline, TrafficTotals
from ddprun.report.predicted_vs_measured import PredictionComparison
from ddprun.report.sentences import ending_problem_sentence
from ddprun.telemetry.records import BufferUsage, StageStarted, Started, Summary
from ddprun.telemetry.stragglers import StragglerTotal, straggler_totals
from ddprun.units import abbreviated_list, format_bit_rate, format_bytes, format_count, format_world_sizes

_MAX_HELD_OUT_POINTS = 200
_MAX_BARS = 24
_CURVE_ROWS = 12  # in the table of a chart's numbers
_MAX_CELL = 200  # characters
_MIN_NAMED_PARAMS, _MAX_NAMED_PARAMS = 4, 600  # of a bucket, and of all buckets together
_MACHINE_CHARTS = (
    ("rss_bytes", "Resident memory of each rank's process", "MB", 1e6),
    ("device_bytes", "Device memory that each rank's allocator holds", "MB", 1e6),
    ("load", "Load average of each host", "processes", 1.0),
)
_KINDS_WITHOUT_HOOKS = ("parameters", "buffers", "optimizer")
_SECTIONS_OF_SEVERAL_RUNS = (
    "Where the time went",
    "The run",
    "Loss",
    "Held-out data",
    "Learning rate and gradient norm",
    "Predicted and measured",
)


def make_sections(
    runs: NamedDigests, predicted: Sequence[Sequence[PredictionComparison]]
) -> dict[str, list[Block]]:
    """The blocks of each section, by its title: of several runs of what can be laid side by side. Tables
    without rows are left out. `predicted`: of the stages of each run.
    """
    digest = runs[0][1]
    found: dict[str, Iterator[Block]] = {
        "Where the time went": _time_breakdown_section(runs),
        "Timeline of a step": _timeline_section(digest),
        "The run": _run_facts_section(runs),
        "Loss": _loss_section(runs),
        "Held-out data": _held_out_section(runs),
        "Learning rate and gradient norm": _lr_and_grad_norm_section(runs),
        "Step time": _step_time_section(digest),
        "Stages": _stages_section(digest),
        "Predicted and measured": _predicted_vs_measured_section(predicted, runs),
        "Communication": _communication_section(digest),
        "Gradients": _gradient_completion_section(digest),
        "Memory and load": _memory_and_load_section(digest),
        "Fidelity": _fidelity_section(digest),
        "Stragglers": _stragglers_section(digest),
        "Shares of samples": _sample_shares_section(digest),
        "Errors and restarts": _errors_section(digest),
    }
    shown = found if len(runs) == 1 else _SECTIONS_OF_SEVERAL_RUNS
    return {
        title: [block for block in found[title] if not isinstance(block, Table) or block.rows]
        for title in shown
    }


def _curve_blocks(
    label: str,
    unit: str,
    lines: Mapping[str, StyledCurve],
    runs: NamedDigests,
    draw: Callable[[Mapping[str, StyledCurve], str], Chart] = charts.curve_chart,
) -> Iterator[Block]:
    """A chart of curves over steps, with the stages; its table has few enough rows to be read."""
    means = [dict(zip(line.curve.steps, line.curve.means, strict=True)) for line in lines.values()]
    steps = sorted({step for known in means for step in known})
    steps = steps[:: -math.ceil(len(steps) / _CURVE_ROWS) or 1][::-1]  # the last one is among them
    rows = [[round(step), *(known.get(step) for known in means)] for step in steps]
    yield Figure(label, {"": charts.mark_stages_and_evaluations(draw(lines, unit), runs)}, log=True)
    yield Table(["step", *lines], rows, unit, f"{label}: the numbers")


def headline_facts(digest: RunDigest) -> Iterator[tuple[str, Any]]:
    """What to know of a run at first sight: names and values."""
    started, summary = digest.run.started, digest.run.summary
    lengths = [stage.step_percentiles_ms for stage in digest.stages]
    yield "samples per second", digest.samples_per_s
    yield "steps per second", digest.steps_per_s
    if len(lengths) == 1 and lengths[0]:
        *shown, _ = PERCENTILES
        values = format_with_equal_decimals(lengths[0][name] for name in shown)
        yield f"step, {' / '.join(shown)}", f"{' / '.join(values)} ms"
    if digest.slow_step_count:
        yield "slow steps", f"{digest.slow_step_count:,} of {len(digest.recorded_steps):,}"
    yield "wall time, s", summary and summary.seconds
    hosts, ranks = len(set(started.hosts)), format_world_sizes(digest.run.world_sizes)
    device = "GPU" if started.device == "cuda" else started.device
    if hosts:  # else the run has ended before it could say
        yield "ranks", f"{ranks} on {format_count(hosts, 'host')}, {device} over {started.backend}"
    yield "mean loss, last known", summary and summary.loss
    for name, value in ((summary and summary.values) or {}).items():
        yield f"mean {name}, last known", value
    for name, curve in digest.held_out.items():
        yield f"held-out {name}", curve.means[-1]


def _run_facts_section(runs: NamedDigests) -> Iterator[Block]:
    columns = [dict(_run_facts(digest)) for _, digest in runs]
    if len(runs) > 1:  # of one run these are on top of the page
        columns = [
            dict(headline_facts(digest)) | facts for (_, digest), facts in zip(runs, columns, strict=True)
        ]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *format_with_equal_decimals(column.get(key) for column in columns)] for key in keys]
    yield Table(["", *(name for name, _ in runs)], rows)
    if len(runs) == 1 and runs[0][1].run.pipeline_text:
        yield Text(runs[0][1].run.pipeline_text, "file")


def _run_facts(digest: RunDigest) -> Iterator[tuple[str, Any]]:
    run, started = digest.run, digest.run.started
    summary = run.summary or Summary(status="still running, or killed", steps=run.last_step)
    yield "script" if run.is_observed else "pipeline", started.pipeline
    yield "status", summary.status
    if started.cores is not None:
        yield "cores of the first host", started.cores
    if started.device_name is not None:
        yield "GPU or processor of rank 0", started.device_name
    yield from _configuration_facts(digest)
    stages = "; ".join(stage.description for stage in digest.stages)
    yield "stages that take steps", shorten(stages, _MAX_CELL) or None
    yield "steps", summary.steps
    yield "samples, all ranks", summary.samples
    if (best := summary.best) is not None:
        step, file = format_value(best.get("step")), best.get("file")
        yield f"best {best.get('metric')}", f"{format_value(best.get('value'))} after step {step}, in {file}"
    if summary.wire_bytes is not None:
        yield "sent by all ranks", format_bytes(summary.wire_bytes)
    for one in run.events_of(BufferUsage)[:1]:
        yield "buffers", one.verdict
    yield from (summary.versions or {}).items()
    yield "started", _format_event_time(started.time)


def _configuration_facts(digest: RunDigest) -> Iterator[tuple[str, Any]]:
    """What the pipeline's file says of training; stages may say otherwise."""
    text = digest.run.pipeline_text
    root, _ = parse_yaml(text, Source.from_text("pipeline.yaml", 0, text))
    keys = root.data() if root is not None and isinstance(root.value, dict) else {}
    for key in ("model", "data", "loader", "loss", "optimizer", "accumulate", "precision", "seed"):
        value = keys.get(key)
        if isinstance(value, Mapping):
            value = {option: given for option, given in value.items() if given is not None}
        if value is not None:
            yield key, shorten(flow_yaml(value).removeprefix("{").removesuffix("}"), _MAX_CELL)


def _format_event_time(time: Any) -> Any:
    """A time of an event, without fractions of a second: `2026-11-23 23:30:38 UTC`."""
    return re.sub(r"^([\d-]+)T([\d:]+)(\.\d+)?Z$", r"\1 \2 UTC", time) if isinstance(time, str) else time


def _loss_section(runs: NamedDigests) -> Iterator[Block]:
    if not any(digest.loss.steps for _, digest in runs):
        return
    first = runs[0][1]
    values = [{"loss": digest.loss, **digest.values} for _, digest in runs]
    for value in dict.fromkeys(name for known in values for name in known):
        lines: dict[str, StyledCurve] = {}
        if value == "loss" and len(runs) == 1 and len(first.run.ranks) > 1:
            of_ranks = zip(first.run.ranks, first.rank_losses, strict=False)
            lines |= {f"rank {rank}": StyledCurve(curve, rank + 1, "rank") for rank, curve in of_ranks}
        for index, (name, _) in enumerate(runs):
            if (curve := values[index].get(value)) is not None:  # on top of those of the ranks
                of_run = "mean over ranks" if len(runs) == 1 else name
                lines[of_run] = StyledCurve(curve, index, "mean")
            lines |= _styled_held_out_curve(runs, index, value)
        label = "Loss" if value == "loss" else value
        yield from _curve_blocks(f"{label} over steps", value, lines, runs)


def _styled_held_out_curve(runs: NamedDigests, index: int, metric: str) -> dict[str, StyledCurve]:
    """A run's line, if it has one, in the run's colour; in the report of a single run, in one of its own."""
    name, digest = runs[index]
    if (curve := digest.held_out.get(metric)) is None:
        return {}
    every = math.ceil(len(curve.steps) / _MAX_HELD_OUT_POINTS)
    steps, means = curve.steps[::-every][::-1], curve.means[::-every][::-1]  # the last one is among them
    label, style = (f"{name}, held-out", index) if len(runs) > 1 else ("held-out", charts.HELD_OUT_STYLE)
    return {label: StyledCurve(Curve(steps, means, means, means), style, "held-out")}


def _held_out_section(runs: NamedDigests) -> Iterator[Block]:
    """A chart of each metric that was measured several times; of others the headline has the number."""
    for metric in dict.fromkeys(name for _, digest in runs for name in digest.held_out):
        lines: dict[str, StyledCurve] = {}
        for index in range(len(runs)):
            lines |= _styled_held_out_curve(runs, index, metric)
        if any(len(line.curve.steps) > 1 for line in lines.values()):
            yield from _curve_blocks(f"Held-out {metric} over steps", metric, lines, runs)


def _lr_and_grad_norm_section(runs: NamedDigests) -> Iterator[Block]:
    for key, label in (("lr", "Learning rate"), ("group_grad_norms", "Gradient norm")):
        lines: dict[str, StyledCurve] = {}
        for name, digest in runs:
            curves = _param_group_curves(digest, key)
            if key != "lr" and len(runs) > 1:  # those of groups would be too many
                curves = {"": digest.grad_norm} if digest.grad_norm.steps else {}
            for group, curve in curves.items():  # of one run a group looks alike in both charts
                about = [name] * (len(runs) > 1) + [group] * bool(group)
                lines[", ".join(about) or label.lower()] = StyledCurve(curve, len(lines))
        if lines:
            yield from _curve_blocks(f"{label} over steps", label.lower(), lines, runs)


def _param_group_curves(digest: RunDigest, key: str) -> dict[str, Curve]:
    """The curve of each group of parameters, by its name if several; last the norm of all gradients."""
    curves = digest.param_group_curves[key]
    several = len(curves) > 1
    names = [f": {name}" for name in digest.run.started.groups]
    found = {f"group {n}{''.join(names[n : n + 1])}" * several: curve for n, curve in enumerate(curves)}
    if key != "lr" and digest.grad_norm.steps:
        found["all gradients" * several] = digest.grad_norm
    return found


def _mean_step_parts_by_rank(
    digest: RunDigest,
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """The mean parts of a step, in microseconds: of each stage, and of each rank in it."""
    several = len(digest.stages) > 1
    of_ranks = {
        f"stage {stage.index}, rank {rank}" if several else f"rank {rank}": us
        for stage in digest.stages
        for rank, us in zip(digest.run.ranks, stage.times.mean_parts_us_by_rank, strict=False)
        if us
    }
    return {stage.name: stage.times.mean_parts_us for stage in digest.stages}, of_ranks


def _time_breakdown_section(runs: NamedDigests) -> Iterator[Block]:
    """Bars: of each of several runs, or of the ranks and stages of one."""
    if len(runs) > 1:
        bars = {name: digest.times.mean_parts_us for name, digest in runs if digest.recorded_steps}
        by = "run"
    else:
        of_stages, bars = _mean_step_parts_by_rank(runs[0][1])
        by = "stage and rank" if len(of_stages) > 1 else "rank"
        if len(bars) > _MAX_BARS:
            bars, by = dict(list(of_stages.items())[:_MAX_BARS]), "stage"
    if not bars:
        return
    yield Figure(
        f"Step time by {by}, in milliseconds", {"": charts.step_parts_bar_chart(bars, "ms per step")}
    )
    if len(runs) > 1:  # those of one run are in a section of their own
        yield _step_parts_table(bars)


def _step_parts_table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """The parts of a step, given in microseconds."""
    parts = (*STEP_PARTS, "step_us")
    cells = [[name, *(us.get(part, 0.0) / 1000 for part in parts)] for name, us in rows.items()]
    heads = ["", *(part.name for part in STEP_PARTS.values()), "step"]
    return Table(heads, cells, folded_title="Parts of a step, in milliseconds: the numbers")


def _step_time_section(digest: RunDigest) -> Iterator[Block]:
    """Step time over the run with its slow steps, and the numbers of the bars."""
    if not digest.recorded_steps:
        return
    slow, label = digest.slow_steps, "Step time over the run, mean over ranks"
    used = {
        STEP_PARTS[part].name: StyledCurve(curve, index)
        for index, (part, curve) in enumerate(digest.parts_ms.items())
        if any(curve.means)
    }
    draw = partial(charts.step_parts_area_chart, slow)
    yield from _curve_blocks(label, "milliseconds", used, [("", digest)], draw)
    if slow:
        rows = [[one.step, one.ms, one.median_ms, STEP_PARTS[one.most_slowed_part].name] for one in slow]
        title = f"{format_count(digest.slow_step_count, 'step')} took more than twice the median"
        caption = f"The {len(slow)} longest. " * (digest.slow_step_count > len(slow))
        caption += "The median is over the stage's steps of the same kind: with or without an exchange, "
        caption += "and with the same turns."
        heads = ["step", "ms", "median, ms", "part that grew most"]
        yield Table(heads, rows, caption, f"{title}: which, and why")
    of_stages, of_ranks = _mean_step_parts_by_rank(digest)
    yield _step_parts_table(of_stages | of_ranks)


def _predicted_vs_measured_section(
    predicted: Sequence[Sequence[PredictionComparison]], runs: NamedDigests
) -> Iterator[Block]:
    for (name, _), stages in zip(runs, predicted, strict=False):
        for one in stages:
            title = [name] * (len(runs) > 1) + [one.stage] * (len(stages) > 1)
            if title:
                yield Text(": ".join(title), "heading")
            yield from map(Text, one.sentences)
            heads = ["", "predicted, ms", "measured, ms", "difference, ms", "of the step"]
            rows = [
                [part, *_predicted_measured_cells(*us, one.step_parts_us["step"][0])]
                for part, us in one.step_parts_us.items()
            ]
            yield Table(heads, rows, "A step of the training thread, means over ranks and steps.")
            both = [f"{what}, {how}, ms" for what in ("ready", "done") for how in ("predicted", "measured")]
            heads = ["bucket", *both, "difference, ms", "difference"]
            rows = []
            for bucket, times in one.buckets.items():
                ready_us = (known and known.ready_us for known in times)
                done_us = [known and known.done_us for known in times]
                done = _predicted_measured_cells(done_us[0], done_us[1], done_us[0])
                rows.append([bucket, *(us and us / 1000 for us in ready_us), *done])
            yield Table(heads, rows, "Times count from the start of the step.")


def _predicted_measured_cells(
    predicted_us: float | None, measured_us: float | None, whole_us: float | None
) -> list[Any]:
    """Both times, and their difference, in ms and in percent of the whole that was predicted."""
    both = [None if us is None else us / 1000 for us in (predicted_us, measured_us)]
    if predicted_us is None or measured_us is None:
        return [*both, None, None]
    us = measured_us - predicted_us
    return [*both, us / 1000, f"{us / whole_us:+.0%}" if whole_us else None]


def _timeline_section(digest: RunDigest) -> Iterator[Block]:
    note = Markup(
        "The first row of each rank is its training thread; an outline marks where it only waits. The rows "
        "below it are its buckets, from the moment each is ready: first the time until the last rank has it "
        "ready, then the exchange. For more steps, open `trace.json` from the run's folder in "
        '<a href="https://ui.perfetto.dev">Perfetto</a>.'
    )
    choices = {_timeline_title(digest, one): charts.timeline_chart(one) for one in digest.timelines}
    if choices:
        yield Figure("Timeline of one step, one rank below the other", choices)
        yield Text(note, "note")


def _timeline_title(digest: RunDigest, shown: Timeline) -> str:
    stages = [stage.name for stage in digest.stages if stage.first_step <= shown.step <= stage.last_step]
    return f"step {shown.step:,}: {', '.join([*stages[: len(digest.stages) > 1], shown.why])}"


def _gradient_completion_section(digest: RunDigest) -> Iterator[Block]:
    rows: list[list[Any]] = []
    for bucket, one in digest.bucket_completions.items():
        total = one.completed_by.total()
        for index, (name, times) in enumerate(one.completed_by.most_common(3)):
            about = ["", ""] if index else [bucket, len(one.params)]
            spread = "" if index else one.first_to_last_us / total / 1000
            rows.append([*about, name, f"{times / total:.0%}", spread])
    heads = ["bucket", "parameters", "last gradient", "how often", "first to last gradient, ms"]
    yield Table(heads, rows, "A bucket is sent when its last gradient is complete.")


def _communication_section(digest: RunDigest) -> Iterator[Block]:
    heads = ["stage", "what", "hooks", "in steps", "payloads per step", "before hooks", "sent by a rank"]
    heads += ["between hosts", "on the wire", "ready to done, ms", "encode, ms", "decode, ms"]
    rows = []
    for stage in digest.stages:
        for one in stage.traffic:
            steps, payloads = len(one.steps) * len(digest.run.ranks), one.payloads
            amounts = one.bytes, one.wire_bytes, one.between_hosts_bytes
            sizes = [format_bytes(amount / steps) for amount in amounts]
            totals_us = one.ready_to_done_us, one.encode_us, one.decode_us
            times = [us / payloads / 1000 for us in totals_us]
            none = "none" if one.kind in _KINDS_WITHOUT_HOOKS else "none: all-reduce"
            hooks = ", ".join(one.hooks) or none
            share = f"{len(one.steps) / max(1, stage.bucket_sample_step_count):.0%}"
            about = [stage.index, one.kind, hooks, share, one.payloads / steps]
            rows.append([*about, *sizes, _format_rate(one), *times])
    caption = (
        "Means over ranks and over the steps with such an exchange; times are for one payload. The rate is "
        "what a rank sent while anything that all ranks had ready was on the wire, latency included."
    )
    yield Table(heads, rows, caption)
    heads = ["stage", "bucket", "size", "sent by a rank", "on the wire, ms", "on the wire", "parameters"]
    sent = [(stage, one) for stage in digest.stages for one in stage.buckets]
    named = max(_MIN_NAMED_PARAMS, _MAX_NAMED_PARAMS // max(1, len(sent)))
    rows = []
    for stage, one in sent:
        sizes = [format_bytes(amount / one.payloads) for amount in (one.bytes, one.wire_bytes)]
        wire = [one.wire_us / one.payloads / 1000, _format_rate(one)]
        params = abbreviated_list(one.params, named)
        rows.append([stage.index, f"{one.kind} {one.bucket}", *sizes, *wire, params])
    title = "Each bucket: its parameters, and how fast it was sent"
    yield Table(heads, rows, "Means over ranks and steps.", title)


def _format_rate(traffic: TrafficTotals) -> str | None:
    return None if traffic.bits_per_s is None else format_bit_rate(traffic.bits_per_s)


def _memory_and_load_section(digest: RunDigest) -> Iterator[Block]:
    hosts = digest.run.started.hosts
    for key, label, unit, scale in _MACHINE_CHARTS:
        lines: dict[str, StyledCurve] = {}
        for rank, curve in digest.machine_curves.get(key, {}).items():
            host = hosts[rank] if key == "load" and rank < len(hosts) else f"rank {rank}"
            values = [value / scale for value in curve.highest]
            lines.setdefault(host, StyledCurve(Curve(curve.steps, values, values, values), len(lines)))
        if lines:
            yield from _curve_blocks(f"{label} over steps", unit, lines, [("", digest)])


def _fidelity_section(digest: RunDigest) -> Iterator[Block]:
    distance = "Distance of the mean gradient with hooks from the exact mean"
    labels = {
        "cosine": ("Cosine similarity between the mean gradient with hooks and the exact mean", "cosine"),
        "relative_l2": (f"{distance}, as a share of the latter's norm", "relative L2 error"),
    }
    for measure, curve in digest.fidelity.items():
        lines = {"mean over buckets": StyledCurve(curve, 0)}
        yield from _curve_blocks(*labels[measure], lines, [("", digest)])


def _stragglers_section(digest: RunDigest) -> Iterator[Block]:
    """The total for each rank, cause and bucket; folded below them the episodes."""
    heads = ["rank", "late by, ms", "share of a step", "cause", "bucket", "parameters", "steps"]
    heads += ["from step", "to step"]

    def row(one: StragglerTotal) -> list[Any]:
        params = abbreviated_list(one.params, 4)
        late = [one.late_us / 1000, f"{one.late_us / one.step_us:.0%}"]
        return [one.rank, *late, one.cause, one.bucket, params, one.steps, one.first_step, one.last_step]

    episodes = digest.run.stragglers
    totals = straggler_totals(episodes)
    yield Table(heads, list(map(row, totals))) if episodes else Text("No straggler.")
    if len(totals) < len(episodes):
        singly = [row(one) for episode in episodes for one in straggler_totals([episode])]
        yield Table(heads, singly, folded_title=f"Each of {len(episodes)} episodes")


def _sample_shares_section(digest: RunDigest) -> Iterator[Block]:
    """What each rank took, from when on, and how fast the run was with that."""
    rows = []
    for one in digest.sample_shares:
        samples = ", ".join(map(str, one.shares.samples))
        rows.append([one.shares.step, samples, one.total["steps"] or None, one.samples_per_s])
    yield Table(["from step", "samples of each rank", "recorded steps", "samples/s"], rows)


def _stages_section(digest: RunDigest) -> Iterator[Block]:
    start_events = {one.stage: one for one in digest.run.events_of(StageStarted)}
    digests = {stage.index: stage for stage in digest.stages}
    of_summary = dict(enumerate((digest.run.summary and digest.run.summary.stages) or ()))
    rows = []
    for index in sorted({*digests, *of_summary}):
        started, found, stage = start_events.get(index), digests.get(index), of_summary.get(index, {})
        kind = stage.get("kind", started and started.kind)
        about = [kind, stage.get("steps"), stage.get("seconds")]
        lengths = found.step_percentiles_ms if found else {}
        about += [found and found.times.mean_parts_us["step_us"] / 1000, *map(lengths.get, PERCENTILES)]
        exposed = f"{found.times.exposed_share:.0%}" if found else None
        sync = flow_yaml(started.sync) if started and started.sync is not None else None
        rows.append([index, *about, exposed, sync, (started and ", ".join(started.hooks)) or None])
    heads = ["stage", "kind", "steps", "seconds", "ms per step", *PERCENTILES, "exposed", "sync", "hooks"]
    yield Table(heads, rows)


def _errors_section(digest: RunDigest) -> Iterator[Block]:
    def stands_out(event: Mapping[str, Any]) -> bool:
        kind, level = event["event"], event.get("level")
        return kind == "resumed" or (kind != "straggler" and level in ("warning", "error"))

    found = list(filter(stands_out, digest.run.events))
    starts = len(digest.run.events_of(Started))
    yield Text("Started once." if starts == 1 else f"Started {format_count(starts, 'time')}.")
    rows, columns = [], {"event", "level", "time", "monotonic_us", "step", "params"}
    for event in reversed(found):
        when, what = _format_event_time(event.get("time")), event["event"].replace("_", " ")
        told = {key: item for key, item in event.items() if key not in columns and item not in ("", None, [])}
        about = [f"{key}: {format_value(item)}" for key, item in told.items()]
        rows.append([when, what, event.get("step"), ", ".join(about)])
    otherwise = Text(ending_problem_sentence(digest.run) or "Nothing went wrong.")
    order = "The latest first." * (len(rows) > 1)
    yield Table(["when", "what", "step", ""], rows, order) if rows else otherwise
