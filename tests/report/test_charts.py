"""What a report shows: curves, charts and tables, with the numbers of the records."""

import json
import math
import random
import tracemalloc
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddprun.report import html
from ddprun.report.blocks import Table, format_with_equal_decimals
from ddprun.report.digest import Curve, SlowStep, digest_run
from ddprun.report.sections import make_sections
from ddprun.report.sentences import sentences_by_stage
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import PARTS
from tests.report.made_up import bucket_records, episode, make, over_a_link, start_us
from tests.report.pages import charts_in, everything, over_steps, page_of, rewrite, with_hooks, words


def test_every_chart_over_steps_shows_stages_and_evaluations(tmp_path: Path) -> None:
    """Of one run, and of several if they are the same in all."""
    one, two = (digest_run(RecordedRun(everything(tmp_path / name))) for name in ("one", "two"))
    charts = over_steps(charts_in(page_of(one)))
    labels = [{trace["name"] for trace in chart["data"] if "name" in trace} for chart in charts]
    assert {"rank 0", "rank 1", "mean over ranks", "held-out"} in labels
    groups = {"group 0: head.*, *.bias", "group 1: the rest"}
    assert groups in labels, "learning rates"
    assert {"all gradients", *groups} in labels, "norms of gradients"
    assert {"mean over buckets"} in labels
    for chart in (*charts, *over_steps(charts_in(page_of(one, two)))):
        shapes = [(shape["name"], shape["x0"]) for shape in chart["layout"]["shapes"]]
        assert shapes == [
            ("a stage begins", 20.5),
            ("a stage begins", 40.5),
            *(("evaluation", step) for step in (20, 40, 60)),
        ]
        assert chart["layout"]["xaxis"]["range"] == [0.5, 60.5]
    norms = [chart for chart in charts if "all gradients" in {trace.get("name") for trace in chart["data"]}]
    rates = [chart for chart in charts if {trace.get("name") for trace in chart["data"]} == groups]
    looks = [
        {trace["name"]: trace["line"]["color"] for trace in chart["data"] if trace.get("name") in groups}
        for chart in (*norms, *rates)
    ]
    assert looks[0] == looks[1], "a group has one colour"
    other = digest_run(RecordedRun(make(tmp_path / "other", evaluated=(10,))))
    loss = over_steps(charts_in(page_of(one, other)))[0]
    assert loss["layout"]["shapes"] == []
    assert loss["layout"]["xaxis"]["range"] == [0.5, 60.5]


def test_fidelity_is_averaged_within_stages(tmp_path: Path) -> None:
    """The mean over buckets; no interval has steps of two stages."""
    folder = everything(tmp_path / "run")

    def differ(record: dict[str, Any]) -> None:
        if "fidelity" in record and record["bucket"]:
            record["fidelity"]["cosine"] = 0.5

    found = digest_run(RecordedRun(rewrite(folder, "buckets", differ)))
    assert found.fidelity["cosine"].means == pytest.approx([0.75] * 5 + [0.7] * 5 + [0.65] * 5)
    assert set(found.fidelity["relative_l2"].means) == {0.1}


@pytest.mark.parametrize("runs", [1, 3])
def test_a_constant_is_drawn_from_zero(tmp_path: Path, runs: int) -> None:
    """Not in the middle of a scale of two wholes; as learning rates without a schedule are."""
    made = [digest_run(RecordedRun(everything(tmp_path / f"run-{n}"))) for n in range(runs)]
    charts = over_steps(charts_in(page_of(*made)))
    axes = [chart["layout"]["yaxis"] for chart in charts if is_constant(chart)]
    assert len(axes) >= 2
    for axis in axes:
        assert axis["rangemode"] == "tozero"
        assert axis.get("range", [0])[0] == 0


def is_constant(chart: dict[str, Any]) -> bool:
    return len({y for trace in chart["data"] for y in trace["y"] if y is not None}) == 1


def test_losses_of_ranks_are_below_their_mean(tmp_path: Path) -> None:
    """What is drawn last is on top."""
    loss = over_steps(charts_in(page_of(digest_run(RecordedRun(everything(tmp_path / "run"))))))[0]
    names = [trace["name"] for trace in loss["data"] if "name" in trace]
    assert names == ["rank 0", "rank 1", "mean over ranks", "held-out"]
    widths = {trace["name"]: trace["line"]["width"] for trace in loss["data"] if "name" in trace}
    assert widths["mean over ranks"] > widths["rank 0"]


def test_bars_of_runs_have_one_scale_and_a_table(tmp_path: Path) -> None:
    """And no advice that is for a run alone."""
    runs = [RecordedRun(make(tmp_path / name, late=late)) for name, late in (("even", None), ("late", 1))]
    slow = tmp_path / "late" / "steps" / "rank-00001.jsonl"
    slow.write_text(slow.read_text().replace('"step_us": 10000', '"step_us": 50000'))
    text = page_of(*map(digest_run, runs))
    told = words(text)
    assert "did not take turns" in told
    assert "To try next" not in told
    charts = [one[""] for one in charts_in(text).values()]
    (bars,) = [chart for chart in charts if chart["data"][0].get("type") == "bar"]
    names = [f"{tmp_path.name}/{name}" for name in ("even", "late")]
    assert bars["data"][0]["y"] == names
    (table,) = [
        block
        for block in make_sections(list(zip(names, map(digest_run, runs), strict=True)), [])[
            "Where the time went"
        ]
        if isinstance(block, Table)
    ]
    assert [[row[0], row[-1]] for row in table.rows] == [[names[0], 10.0], [names[1], 30.0]]
    assert "steps per second 100.0 33.3" in told


def test_steps_that_are_not_timed_count_in_curves_only(tmp_path: Path) -> None:
    """As the first turn of a comparison does; if no step is left, nothing is said about time."""
    run = RecordedRun(make(tmp_path / "run", steps=20, stages=((), ())))
    found = digest_run(run, lambda step: step > 15)
    assert [us["steps"] for us in found.times.step_totals_by_rank] == [5, 5]
    assert len(found.loss.steps) == 20
    assert list(sentences_by_stage(found)) == ["stage 1, train"]
    none = digest_run(run, lambda _: False)
    assert none.steps_per_s is None
    page = html.render_page([("some", found), ("none", none)], (["They differ."], []))
    assert "They differ." in words(page)


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    """Means over ranks and steps, bytes by stack, the steps whose timeline is shown."""
    found = digest_run(RecordedRun(make(tmp_path / "run", late=1, hooks=("fp16",), steps=50, every=5)))
    assert found.recorded_steps == list(range(5, 51, 5))
    assert found.times.mean_parts_us["step_us"] == 10_000
    assert found.times.mean_parts_us_by_rank[0]["exposed_wait_us"] == 3000
    assert found.times.mean_parts_us_by_rank[1]["exposed_wait_us"] == 0
    assert found.loss.steps[0] == 5
    assert found.loss.means[0] == pytest.approx(1 / 5)
    (stage,) = found.stages
    (sent,) = stage.traffic
    assert (sent.kind, sent.hooks, sent.payloads, sent.wire_bytes) == ("gradient", ("fp16",), 40, 80_000)
    assert len(sent.steps) == stage.bucket_sample_step_count == 10
    assert [(one.step, one.why) for one in found.timelines] == [
        (30, "the median step"),
        (50, "the longest"),
        (10, "the longest wait"),
    ]
    first = found.timelines[0].ranks
    assert [one.start_us for one in first] == [0, 0], "clocks are aligned"
    began, bucket = first[0].step_record.start_us, first[0].buckets[1]
    assert first[0].step_record.waits == [(began + 5500, began + 8500)]
    assert bucket.all_ready_us is not None
    assert bucket.all_ready_us - bucket.ready_us == 3000


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([2.956, 19.2252, 6.97], ["2.96", "19.23", "6.97"]),
        ([81.2371, None, 4.08], ["81.24", "-", "4.08"]),
        ([0.05044, 10.95], ["0.050", "10.950"]),
        ([3.0, 12.0], ["3", "12"]),
        ([5.0, 1e-9], ["5", "1e-09"]),
        ([1234.56, math.nan], ["1,235", "nan"]),
        (["done", 7], ["done", "7"]),
    ],
)
def test_numbers_of_a_column_have_as_many_decimals(values: list[Any], cells: list[str]) -> None:
    """So that a reader compares them by their place."""
    assert format_with_equal_decimals(values) == cells


def test_quantities_are_aligned_right() -> None:
    """With units and intervals, too; a column of nothing is none."""
    rows: list[list[Any]] = [
        ["a", 7, "19%", "288 kB", "1.12 (1.00 to 1.26)", "7.9 ± 1.2", None, "none: all-reduce"],
        ["b", None, "-", "0 B", "-", "8.9 ± 1.5", None, "3 of 4"],
    ]
    assert Table([""] * 8, rows).numeric == [False, *[True] * 5, False, False]


def test_a_long_run_is_thinned_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves reach from the first step to the last, in few points; what is sent is drawn from all steps."""
    monkeypatch.setattr("ddprun.report.digest._MAX_BUCKET_RECORDS", 2000)
    found = digest_run(RecordedRun(make(tmp_path / "run", steps=5000)))
    assert len(found.loss.steps) <= 200
    assert found.loss.steps[0] < 20
    assert found.loss.steps[-1] > 4980
    assert found.loss.highest[0] == 1.0
    (stage,) = found.stages
    (sent,) = stage.traffic
    assert 400 < stage.bucket_sample_step_count < 600
    assert sent.payloads == 4 * len(sent.steps) == 4 * stage.bucket_sample_step_count
    assert len(page_of(found)) < 2e6


def test_a_page_stays_below_2_mb_whatever_a_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 ranks, 100,000 steps of eight stages, 100 buckets, accumulation; hundreds of episodes and events."""
    monkeypatch.setattr("ddprun.report.digest._MAX_BUCKET_RECORDS", 10**9)  # few steps have any, for speed
    ranks, last, noise, stacks = 32, 100_000, random.Random(0), (("int8",), ()) * 4
    folder = make(tmp_path / "run", ranks=ranks, steps=last, every=125, stages=stacks, groups=True)

    def write(kind: str, rank: int, records: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / kind / f"rank-{rank:05}.jsonl").write_text(text)

    for rank in range(ranks):
        lines = (folder / "steps" / f"rank-{rank:05}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            record["laps"] = [(part, noise.randint(10, 900)) for part in ("data", "forward", "backward") * 4]
            record |= {part: noise.randint(0, 9000) for part in (*PARTS, "step_us")}
            record |= {"loss": noise.random(), "mean_loss": noise.random(), "grad_norm": noise.random()}
            record |= {name: [noise.random() for _ in range(8)] for name in ("lr", "group_grad_norms")}
            memory = {name: noise.randint(1, 9**9) for name in ("rss_bytes", "device_bytes")}
            record["machine"] = {**memory, "load": 99 * noise.random()}
        write("steps", rank, records)
        write("buckets", rank, ())
    shown = [one.step for one in digest_run(RecordedRun(folder)).timelines]
    assert len(shown) == 3

    def buckets(rank: int, step: int) -> Iterator[dict[str, Any]]:
        (record, _) = bucket_records(rank, step, None, ("int8",))
        for bucket in range(100):
            start = start_us(rank, step) + noise.randint(0, 9000)
            times = {"ready_us": start, "all_ready_us": start + noise.randint(0, 900)}
            params = [f"blocks.{bucket}.attention.{name}.weight" for name in range(20)]
            about = {"bucket": bucket, "params": params, "stage": (step - 1) * len(stacks) // last}
            yield {**record, **about, **times, "done_us": start + noise.randint(1000, 9000)}

    for rank in range(ranks):
        write("buckets", rank, (record for step in shown for record in buckets(rank, step)))
    summary = json.loads((folder / "summary.json").read_text())
    late = [
        {"rank": n % ranks, "bucket": n % 100, "first_step": n + 1, "last_step": n + 9} for n in range(500)
    ]
    summary["stragglers"] = [episode(0, last) | one for one in late]
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "events.jsonl").open("a") as out:
        for step in range(500):
            for event in ({"event": "evaluated", "stage": 0}, {"event": "overflow", "level": "warning"}):
                out.write(json.dumps({**event, "step": step, "loss": noise.random()}) + "\n")
    text = page_of(digest_run(RecordedRun(folder)))
    assert len(text.encode()) < 2e6
    assert "more rows are not shown" in words(text)


def test_memory_does_not_grow_with_ranks_times_steps(tmp_path: Path) -> None:
    """Only the first ranks have curves, and with them a number for each step."""

    def peak_bytes(ranks: int) -> int:
        run = RecordedRun(make(tmp_path / str(ranks), ranks=ranks, steps=5))
        run.__dict__["recorded_steps"] = array("q", range(1, 20_001))
        tracemalloc.start()
        try:
            assert len(digest_run(run).rank_losses) == 8
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(40) < peak_bytes(8) + 2e6


@pytest.mark.parametrize("turn", [False, True])
def test_slow_steps_are_marked_and_step_times_have_percentiles(tmp_path: Path, turn: bool) -> None:
    """A step is compared with its like: with or without an exchange, and with the same turns."""

    def change(record: dict[str, Any]) -> None:
        more = 40_000 if record["step"] == 50 else 30_000 if record["step"] % 4 == 0 else 0
        if turn:
            record["values"] = {"generator": None if record["step"] % 4 else 1.0}
        record["step_us"] += more
        record["optimizer_us"] += more
        record["mean_loss"] = None if record["step"] % 4 and not turn else 1.0

    found = digest_run(RecordedRun(rewrite(make(tmp_path / "run", steps=200), "steps", change)))
    assert found.slow_steps == [SlowStep(50, 50.0, 10.0, "optimizer_us")]
    assert found.stages[0].step_percentiles_ms == {"p50": 10.0, "p95": 40.0, "p99": 40.0, "longest": 50.0}
    text = page_of(found)
    told = words(text)
    assert "p50 p95 p99 longest exposed sync hooks 0 train 200 1 17.70 10 40 40 50" in told
    assert "slow steps 1 of 200" in told
    assert "1 step took more than twice the median" in told
    assert "50 50 10 optimizer" in told
    marks = [
        trace
        for chart in over_steps(charts_in(text))
        for trace in chart["data"]
        if trace.get("name") == "slow step"
    ]
    assert [(trace["x"], trace["y"]) for trace in marks] == [([50], [50.0])]


def test_the_part_that_grew_most_is_compared_with_steps_alike(tmp_path: Path) -> None:
    """What takes long in every step with an exchange did not grow in the slow one."""

    def change(record: dict[str, Any]) -> None:
        exchanged, slow = record["step"] % 4 == 0, record["step"] == 24
        more = {"exposed_hook_us": 100_000 * exchanged, "forward_us": 70_000 * slow}
        more |= {"backward_us": 71_000 * slow}
        for part, us in more.items():
            record[part] += us
        record["step_us"] += sum(more.values())
        record["mean_loss"] = 1.0 if exchanged else None

    found = digest_run(RecordedRun(rewrite(make(tmp_path / "run", steps=48), "steps", change)))
    assert found.slow_steps == [SlowStep(24, 251.0, 110.0, "backward_us")]


def test_each_bucket_has_its_parameters_and_its_rate(tmp_path: Path) -> None:
    """2,000 bytes in 370 µs; what two buckets send at once counts once in the rate of their stack."""
    folder = make(tmp_path / "run")
    told = words(page_of(digest_run(RecordedRun(folder))))
    assert "0 gradient 0 2 kB 2 kB 0.3700 43.2 Mbit/s 3.weight, 3.bias 0 gradient 1" in told

    def at_once(record: dict[str, Any]) -> None:
        if record["bucket"] == 1:
            (leg,) = record["legs"]
            for fields in (record, leg):
                fields |= {name: at - 2000 for name, at in fields.items() if name in MOMENTS}

    (sent,) = digest_run(RecordedRun(rewrite(folder, "buckets", at_once))).stages[0].traffic
    assert sent.wire_us == 20 * 2 * 370
    assert sent.bits_per_s == pytest.approx(2 * 43.24e6, rel=1e-3)


MOMENTS = ("ready_us", "all_ready_us", "launch_us", "done_us", "start_us")


def test_memory_of_ranks_and_load_of_hosts_are_charts(tmp_path: Path) -> None:
    """A host has one line, whichever of its ranks measured; device memory only where there is some."""

    def measure(record: dict[str, Any]) -> None:
        if record["step"] % 5 == 0:
            memory = (100 + record["rank"]) * 10**6
            record["machine"] = {"rss_bytes": memory, "device_bytes": None, "load": record["step"] / 10}

    found = digest_run(RecordedRun(rewrite(make(tmp_path / "run"), "steps", measure)))
    assert found.machine_curves["load"][0] == Curve(
        [5, 10, 15, 20], [0.5, 1.0, 1.5, 2.0], [0.5, 1.0, 1.5, 2.0], [0.5, 1.0, 1.5, 2.0]
    )
    drawn = [
        {trace["name"]: trace["y"] for trace in chart["data"]}
        for chart in over_steps(charts_in(page_of(found)))
        if chart["layout"]["yaxis"]["title"]["text"] in ("MB", "processes")
    ]
    assert drawn == [{"rank 0": [100.0] * 4, "rank 1": [101.0] * 4}, {"a": [0.5, 1.0, 1.5, 2.0]}]


def test_odd_measurements_and_clocks_are_not_believed(tmp_path: Path) -> None:
    """What else a record has is not read; the error of clocks is a number."""
    folder = with_hooks(over_a_link(tmp_path / "run"), 0.08)

    def odd(record: dict[str, Any]) -> None:
        more = {"x": record["step"] if record["step"] % 2 else "y"}
        record["machine"] = {"rss_bytes": 1, "load": 1, "device_bytes": None, **more}

    rewrite(folder, "steps", odd)
    with (folder / "events.jsonl").open("a") as out:
        for bound in ("far", ["far"], None, [1e400]):
            event = {"event": "clock_offsets", "monotonic_us": 5, "offset_us": [0.0, 0.0], "error_us": bound}
            out.write(json.dumps(event) + "\n")
    found = digest_run(RecordedRun(folder))
    assert found.machine_curves.keys() == {"rss_bytes", "load"}
    assert "went through, latency included" in words(page_of(found))


def test_what_is_sent_twice_in_a_step_has_one_row(tmp_path: Path) -> None:
    """In a step's timeline, as buffers with accumulation."""
    folder = make(tmp_path / "run")
    for file in (folder / "buckets").iterdir():
        file.write_text("".join(2 * line for line in file.read_text().splitlines(keepends=True)))
    charts = charts_in(page_of(digest_run(RecordedRun(folder)))).values()
    (choices,) = [chart for chart in charts if len(chart) > 1]
    for chart in choices.values():
        rows = chart["layout"]["yaxis"]["categoryarray"]
        assert len(set(rows)) == len(rows) == 6
