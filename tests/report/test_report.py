"""The page about one run or several."""

import json
import math
import random
import re
import shutil
import subprocess
import zlib
from base64 import b85decode
from collections.abc import Callable, Iterable, Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.cli import main
from ddprun.host.device import device_name
from ddprun.report import html
from ddprun.report.blocks import Table, format_with_equal_decimals
from ddprun.report.digest import Curve, RunDigest, SlowStep, digest_run, merge_seed_digests
from ddprun.report.sentences import hook_balance, sentences_by_stage, step_time_difference
from ddprun.telemetry.reader import Run
from ddprun.telemetry.records import PARTS
from tests.engine.running import run_pipeline
from tests.report.made_up import bucket_records, episode, make, over_a_link, start_us

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a page is made of; every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.text: list[str] = []
        self.charts: list[dict[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag != "a":
            self.addresses += [value for key, value in attrs if key in ("src", "href", "action") and value]
        elif (target := found.get("href")) is not None and target.startswith("#"):
            self.anchors.append(target[1:])
        if (name := found.get("id")) is not None:
            self.ids.append(name)
        if found.get("class") == "chart":
            self.charts.append(found)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)


def charts_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    charts: dict[str, Any] = json.loads(zlib.decompress(b85decode(found[1].replace(",", "<"))))
    return charts


def page_of(*digests: RunDigest) -> str:
    return html.page(html.with_short_names(digests))


def words(page: str) -> str:
    return " ".join(" ".join(Page(page).text).split())


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """No address but its own parts; every chart has a label, and can be reached without a mouse."""
    text = page_of(digest_run(Run(make(tmp_path / "run", late=1))))
    page = Page(text)
    assert page.addresses == ["data:,"]
    assert "default-src 'none'" in text
    assert "<code>trace.json</code>" in text
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.anchors) <= set(page.ids)
    charts = charts_in(text)
    assert {chart["id"] for chart in page.charts} == set(charts)
    assert all(chart["tabindex"] == "0" and chart["aria-label"] for chart in page.charts)
    drawn = [one for chart in charts.values() for one in chart["choices"].values()]
    assert all(one["data"] for one in drawn)
    assert len(text) < 2e6


def test_sentences_say_where_the_time_went_and_what_to_try(tmp_path: Path) -> None:
    """On made-up runs: one with a late rank, one without."""
    late = sentences_by_stage(digest_run(Run(make(tmp_path / "late", ranks=4, late=1))))
    assert late[""] == [
        "A step took 10.0 ms on average: 68% forward, backward and optimizer, 22% exposed communication (0% "
        "on the wire, 22% waiting for the last rank, 0% in hooks), 5% loading data, and 5% between steps.",
        "Rank 1 was 3.0 ms late in backward, before bucket 1 (1.weight, 1.bias), in steps 1 to 20, and the "
        "others waited for it.",
        "To try first, since nothing is lost: a look at the layers of that bucket, and at what else "
        "runs on the late rank's cores or GPU (saves at most 22% of a step).",
    ]
    assert sentences_by_stage(digest_run(Run(make(tmp_path / "even"))))[""][1:] == [
        "No rank was late for long.",
        "Communication is hidden or small. `compile: true` may make steps faster, and changes only "
        "rounding; more ranks, a larger `loader.batch_size` and `precision: bf16` change training.",
    ]
    assert sentences_by_stage(digest_run(Run(make(tmp_path / "alone", ranks=1))))[""][1] == (
        "There was one rank, so no rank waited for another."
    )


def test_a_run_that_does_not_tell_where_its_time_went_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take time, of which no part is known."""
    folder = make(tmp_path / "run")
    for file in (folder / "steps").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        nothing = dict.fromkeys(PARTS, 0)
        file.write_text("".join(json.dumps(line | nothing) + "\n" for line in lines))
    assert sentences_by_stage(digest_run(Run(folder)))[""][0] == (
        "A step took 10.0 ms on average; the records do not tell where the time went."
    )
    assert main(["report", str(folder)]) == 0, capsys.readouterr().err


def test_runs_whose_parts_do_not_tell_what_differs(tmp_path: Path) -> None:
    """One takes longer, and its records have the same parts: none of them is named."""
    even, slow = make(tmp_path / "even"), make(tmp_path / "slow")
    for file in (slow / "steps").iterdir():
        file.write_text(file.read_text().replace('"step_us": 10000', '"step_us": 50000'))
    before, after = (digest_run(Run(folder)).times for folder in (even, slow))
    assert step_time_difference("even", before, after) == "A step took 40.0 ms longer than with even."


def everything(folder: Path) -> Path:
    """A run of three stages with a change of hooks, with evaluations and all that may be recorded."""
    stacks = ((), ("int8",), ("int8",))
    return make(
        folder, steps=60, stages=stacks, fidelity_every=4, groups=True, evaluated=(20, 40, 60), late=1
    )


def over_steps(charts: dict[str, Any]) -> list[dict[str, Any]]:
    found = [chart for one in charts.values() for chart in one["choices"].values()]
    return [chart for chart in found if chart["layout"]["xaxis"]["title"]["text"] == "step"]


def test_a_run_is_told_stage_by_stage(tmp_path: Path) -> None:
    """Advice, step time and communication of each; no mean is taken over two stages."""
    folder = everything(tmp_path / "run")
    slower = folder / "steps" / "rank-00000.jsonl"
    records = [json.loads(line) for line in slower.read_text().splitlines()]
    for record in records[20:40]:
        record["step_us"] += 10_000
        record["data_us"] += 10_000
    slower.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = digest_run(Run(folder))
    told = sentences_by_stage(found)
    assert list(told) == ["stage 0, train", "stage 1, train (int8)", "stage 2, train (int8)"]
    assert [told[name][0].split(" on average")[0] for name in told] == [
        "A step took 10.0 ms",
        "A step took 15.0 ms",
        "A step took 10.0 ms",
    ]
    assert told["stage 1, train (int8)"][2].startswith(
        "To try first, since nothing is lost: more `loader.workers`"
    )
    assert [[(sent.hooks, len(sent.steps)) for sent in stage.traffic] for stage in found.stages] == [
        [((), 20)],
        [(("int8",), 20)],
        [(("int8",), 20)],
    ]
    assert [us["steps"] for us in found.times.total_us_by_rank] == [60, 60]
    page = words(page_of(found))
    assert "0 gradient none: all-reduce 100%" in page
    assert "1 gradient int8 100%" in page
    assert "stage 1, rank 0 10.5" in page


@pytest.mark.parametrize(
    ("slow", "part", "advice"),
    [
        (
            0,
            "exposed_wire_us",
            "To try next, although it changes training: hooks as in stage 1, where a step took 10.0 ms; "
            "synchronising less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`).",
        ),
        (
            1,
            "exposed_hook_us",
            "To try first, since nothing is lost: no hooks, as in stage 0 (saves at most 50% of a step).",
        ),
    ],
)
def test_advice_knows_what_other_stages_have_tried(tmp_path: Path, slow: int, part: str, advice: str) -> None:
    """It names the stage that does so already, and how long a step took there."""
    folder = make(tmp_path / "run", steps=40, stages=((), ("int8",)))
    for file in (folder / "steps").iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records[20 * slow : 20 * slow + 20]:
            record["step_us"] += 10_000
            record[part] += 10_000
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = sentences_by_stage(digest_run(Run(folder)))
    assert list(told.values())[slow][-1] == advice


@pytest.mark.parametrize(
    ("part", "advice"),
    [
        ("exposed_wire_us", "To try next, although it changes training: sending less (`ddprun compare`"),
        ("exposed_hook_us", "To try first, since nothing is lost: no hooks, or cheaper ones"),
    ],
)
def test_advice_puts_nothing_down_to_hooks_that_the_policy_does(
    tmp_path: Path, part: str, advice: str
) -> None:
    """A stage that seldom synchronises is fast with any hooks, and without any."""
    stacks = ((), ("int8",)) if part == "exposed_wire_us" else (("int8",), ())
    folder = make(tmp_path / "run", steps=40, stages=stacks)
    for file in (folder / "steps").iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records[:20]:
            record["step_us"] += 10_000
            record[part] += 10_000
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    events = folder / "events.jsonl"
    seldom = '"stage": 1, "kind": "train", "sync": {"local_sgd": {"every": 8}}'
    text = events.read_text().replace('"stage": 1, "kind": "train", "sync": "every_step"', seldom)
    assert seldom in text
    events.write_text(text)
    told = sentences_by_stage(digest_run(Run(folder)))
    assert next(iter(told.values()))[-1].startswith(advice)


def test_every_chart_over_steps_shows_stages_and_evaluations(tmp_path: Path) -> None:
    """Of one run, and of several: in the colour of each run where they are not the same."""
    one, two = (digest_run(Run(everything(tmp_path / name))) for name in ("one", "two"))
    charts = over_steps(charts_in(page_of(one)))
    labels = [{trace["name"] for trace in chart["data"] if "name" in trace} for chart in charts]
    assert {"rank 0", "rank 1", "mean over ranks", "held-out"} in labels
    groups = {"group 0: head.*, *.bias", "group 1: the rest"}
    assert groups in labels, "learning rates"
    assert {"all gradients", *groups} in labels, "norms of gradients"
    assert {"buckets of 2.00 kB"} in labels
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
    other = digest_run(Run(make(tmp_path / "other", evaluated=(10,))))
    loss = over_steps(charts_in(page_of(one, other)))[0]
    colours = {shape["name"]: shape["line"]["color"] for shape in loss["layout"]["shapes"]}
    assert colours.keys() == {
        f"a stage of {tmp_path.name}/one begins",
        *(f"evaluation of {tmp_path.name}/{name}" for name in ("one", "other")),
    }
    assert len(set(colours.values())) == 2


def test_fidelity_is_not_joined_over_a_change_of_hooks(tmp_path: Path) -> None:
    """A line for each size of buckets, with a gap between stages."""
    folder = everything(tmp_path / "run")
    buckets = folder / "buckets" / "rank-00000.jsonl"
    records = [json.loads(line) for line in buckets.read_text().splitlines()]
    for record in records:
        record["bytes"] *= 1 + record["bucket"]
        if "fidelity" in record and record["bucket"]:
            record["fidelity"]["cosine"] = 0.5
    for rank in (0, 1):
        file = folder / "buckets" / f"rank-{rank:05}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = digest_run(Run(folder))
    sizes = found.fidelity["cosine"]
    assert list(sizes) == ["buckets of 2.00 kB", "buckets of 4.00 kB"]
    assert sizes["buckets of 2.00 kB"].means == pytest.approx([1.0] * 5 + [0.9] * 5 + [0.8] * 5)
    assert set(sizes["buckets of 4.00 kB"].means) == {0.5}
    drawn = [chart for chart in over_steps(charts_in(page_of(found))) if len(chart["data"]) == 2]
    (line, _) = next(chart["data"] for chart in drawn if chart["data"][0]["name"] == "buckets of 2.00 kB")
    gaps = [x for x, y in zip(line["x"], line["y"], strict=True) if y is None]
    assert gaps == [0.5, 20.5, 40.5]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_constant_is_drawn_from_zero(tmp_path: Path, runs: int) -> None:
    """Not in the middle of a scale of two wholes; as learning rates without a schedule are."""
    made = [digest_run(Run(everything(tmp_path / f"run-{n}"))) for n in range(runs)]
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
    loss = over_steps(charts_in(page_of(digest_run(Run(everything(tmp_path / "run"))))))[0]
    names = [trace["name"] for trace in loss["data"] if "name" in trace]
    assert names == ["rank 0", "rank 1", "mean over ranks", "held-out"]
    widths = {trace["name"]: trace["line"]["width"] for trace in loss["data"] if "name" in trace}
    assert widths["mean over ranks"] > widths["rank 0"]


def test_a_comparison_has_one_scale_and_one_speed(tmp_path: Path) -> None:
    """The same quantity of several runs; and no advice that is for a run alone."""
    runs = [Run(make(tmp_path / name, late=late)) for name, late in (("even", None), ("late", 1))]
    slow = tmp_path / "late" / "steps" / "rank-00001.jsonl"
    slow.write_text(slow.read_text().replace('"step_us": 10000', '"step_us": 50000'))
    text = page_of(*map(digest_run, runs))
    told = words(text)
    assert "A step took 20.0 ms longer than with" in told
    assert "did not take turns" in told
    assert "To try next" not in told
    charts = [one["choices"] for one in charts_in(text).values()]
    bars = [one[""] for one in charts if "" in one and one[""]["data"][0].get("type") == "bar"]
    ranks = [chart for chart in bars if "rank 0" in chart["data"][0]["y"]]
    assert len({tuple(chart["layout"]["xaxis"]["range"]) for chart in ranks}) == 1
    assert ranks[0]["layout"]["xaxis"]["range"][1] > 50
    areas = [chart for chart in over_steps(charts_in(text)) if "stackgroup" in chart["data"][0]]
    assert len(areas) == 2
    assert areas[0]["layout"]["yaxis"]["range"] == areas[1]["layout"]["yaxis"]["range"]
    assert "steps per second 100.0 33.3" in told


def test_what_tells_runs_apart_is_on_top(tmp_path: Path) -> None:
    """How each synchronises and through which hooks: the names of folders do not say it."""
    plain = make(tmp_path / "plain")
    told = words(page_of(*(digest_run(Run(folder)) for folder in (plain, everything(tmp_path / "several")))))
    assert "stages that take steps train train; train (int8); train (int8)" in told


def test_steps_that_are_not_timed_count_in_curves_only(tmp_path: Path) -> None:
    """As the first turn of a comparison does; if no step is left, nothing is said about time."""
    run = Run(make(tmp_path / "run", steps=20, stages=((), ())))
    found = digest_run(run, lambda step: step > 15)
    assert [us["steps"] for us in found.times.total_us_by_rank] == [5, 5]
    assert len(found.loss.steps) == 20
    assert list(sentences_by_stage(found)) == ["stage 1, train"]
    none = digest_run(run, lambda _: False)
    assert none.steps_per_s is None
    page = html.page([("some", found), ("none", none)], (["They differ."], []))
    assert "They differ." in words(page)


def test_episodes_of_a_late_rank_are_summed_up(tmp_path: Path) -> None:
    """In words and in a table, the single ones behind it; one that cost little is not what to try first."""
    run = make(tmp_path / "run", ranks=4, late=1)
    summary = json.loads((run / "summary.json").read_text())
    (whole,) = summary["stragglers"]

    def told(*episodes: dict[str, Any]) -> tuple[list[str], str]:
        (run / "summary.json").write_text(json.dumps({**summary, "stragglers": episodes}))
        found = digest_run(Run(run))
        return sentences_by_stage(found)[""], words(page_of(found))

    parts = [{**whole, "first_step": first, "last_step": first + 3} for first in (1, 11)]
    other = {**whole, "rank": 0, "cause": "data", "bucket": None, "params": []}
    some, page = told(*parts, {**other, "last_step": 2})
    assert some[1] == (
        "Rank 1 was 3.0 ms late in backward, before bucket 1 (1.weight, 1.bias), in 8 steps (2 episodes), "
        "and the others waited for it; 1 more episode of late ranks below."
    )
    assert "a look at the layers of that bucket" in some[2]
    assert (
        "rank late by, ms share of a step cause bucket parameters steps from step to step 1 3 30% backward"
        in page
    )
    assert "1.weight, 1.bias 8 1 14 0 3 30% data" in page
    assert "Each of 3 episodes" in page
    assert "Each of" not in told(whole, other)[1], "there is nothing to sum up"
    assert told({**whole, "last_step": 4})[0][2].startswith("To try next, although it changes training"), (
        "one step in five"
    )


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    """Means over ranks and steps, bytes by stack, the steps whose timeline is shown."""
    found = digest_run(Run(make(tmp_path / "run", late=1, hooks=("fp16",), steps=50, every=5)))
    assert found.recorded_steps == list(range(5, 51, 5))
    assert found.times.mean_parts_us["step_us"] == 10_000
    assert found.times.mean_us_by_rank[0]["exposed_wait_us"] == 3000
    assert found.times.mean_us_by_rank[1]["exposed_wait_us"] == 0
    assert found.loss.steps[0] == 5
    assert found.loss.means[0] == pytest.approx(1 / 5)
    (stage,) = found.stages
    (sent,) = stage.traffic
    assert (sent.kind, sent.hooks, sent.payloads, sent.wire_bytes) == ("gradient", ("fp16",), 40, 80_000)
    assert len(sent.steps) == stage.sampled_step_count == 10
    assert {one.step for one in found.timelines} >= {5, 50}
    first = found.timelines[0].ranks
    assert [one.start_us for one in first] == [0, 0], "clocks are aligned"
    began, bucket = first[0].step.start_us, first[0].buckets[1]
    assert first[0].step.waits == [(began + 5500, began + 8500)]
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
    found = digest_run(Run(make(tmp_path / "run", steps=5000)))
    assert len(found.loss.steps) <= 200
    assert found.loss.steps[0] < 20
    assert found.loss.steps[-1] > 4980
    assert found.loss.highest[0] == 1.0
    (stage,) = found.stages
    (sent,) = stage.traffic
    assert 400 < stage.sampled_step_count < 600
    assert sent.payloads == 4 * len(sent.steps) == 4 * stage.sampled_step_count
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
    shown = [one.step for one in digest_run(Run(folder)).timelines]
    assert len(shown) > 8

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
    text = page_of(digest_run(Run(folder)))
    assert len(text.encode()) < 2e6
    assert "more rows are not shown" in words(text)


def rewrite(folder: Path, kind: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change every record of a kind."""
    for file in (folder / kind).iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            change(record)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_first_screen_says_where_the_time_went_before_any_table(tmp_path: Path) -> None:
    """Figures, bars, sentences and a timeline; then the configuration."""
    folder = make(tmp_path / "run", late=1)
    keys = "model: {mlp: {hidden: [8]}}  # line 1\nloader: {batch_size: 32}\n"
    keys += "optimizer: {SGD: {lr: 0.1}}\nseed: 7"
    (folder / "pipeline.yaml").write_text(f"{keys}\naccumulate: 2\n")
    text = page_of(digest_run(Run(folder)))
    order = ['class="facts"', 'id="where-the-time-went"', 'id="chart-0"', 'class="words"', 'id="chart-1"']
    order.append("<table")
    places = list(map(text.index, order))
    assert places == sorted(places)
    told = words(text)
    assert (
        "samples per second 1,600 steps per second 100 step, p50 / p95 / p99 10 / 10 / 10 ms wall time, s "
        "0.2 ranks 2 on 1 host, cpu over gloo mean loss, last step 0.05" in told
    )
    for row in (
        "model mlp: {hidden: [8]} parameters exchanged 1,000 optimizer SGD: {lr: 0.1} seed 7",
        "batch 32 samples a rank, 2 times a step",
        f"pipeline.yaml {' '.join(keys.split())}",
    ):
        assert row in told


@pytest.mark.parametrize("text", ["model: [", "- a list", "a: &x [*x]", "\0"])
def test_a_pipeline_file_that_is_none_is_no_error(tmp_path: Path, text: str) -> None:
    """And one behind a link is not read."""
    folder = make(tmp_path / "run")
    (folder / "pipeline.yaml").write_text(text)
    assert "samples a rank" not in words(page_of(digest_run(Run(folder))))
    (tmp_path / "secret").write_text("model: secret")
    (folder / "pipeline.yaml").unlink()
    (folder / "pipeline.yaml").symlink_to(tmp_path / "secret")
    assert "secret" not in words(page_of(digest_run(Run(folder))))


def test_slow_steps_are_marked_and_step_times_have_percentiles(tmp_path: Path) -> None:
    """A step that ranks exchange something in is compared with its like; no such step is slow for that."""

    def change(record: dict[str, Any]) -> None:
        more = 40_000 if record["step"] == 50 else 30_000 if record["step"] % 4 == 0 else 0
        record["step_us"] += more
        record["optimizer_us"] += more
        record["mean_loss"] = None if record["step"] % 4 else 1.0

    found = digest_run(Run(rewrite(make(tmp_path / "run", steps=200), "steps", change)))
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


def test_each_bucket_has_its_parameters_and_its_rate(tmp_path: Path) -> None:
    """2,000 bytes in 370 µs; what two buckets send at once counts once in the rate of their stack."""
    folder = make(tmp_path / "run")
    told = words(page_of(digest_run(Run(folder))))
    assert "0 gradient 0 2.00 kB 2.00 kB 0.3700 43.2 Mbit/s 3.weight, 3.bias 0 gradient 1" in told

    def at_once(record: dict[str, Any]) -> None:
        if record["bucket"] == 1:
            (leg,) = record["legs"]
            for fields in (record, leg):
                fields |= {name: at - 2000 for name, at in fields.items() if name in MOMENTS}

    (sent,) = digest_run(Run(rewrite(folder, "buckets", at_once))).stages[0].traffic
    assert sent.wire_us == 20 * 2 * 370
    assert sent.bits_per_s == pytest.approx(2 * 43.24e6, rel=1e-3)


MOMENTS = ("ready_us", "all_ready_us", "launch_us", "done_us", "start_us")


def test_memory_of_ranks_and_load_of_hosts_are_charts(tmp_path: Path) -> None:
    """A host has one line, whichever of its ranks measured; device memory only where there is some."""

    def measure(record: dict[str, Any]) -> None:
        if record["step"] % 5 == 0:
            memory = (100 + record["rank"]) * 10**6
            record["machine"] = {"rss_bytes": memory, "device_bytes": None, "load": record["step"] / 10}

    found = digest_run(Run(rewrite(make(tmp_path / "run"), "steps", measure)))
    assert found.machine["load"][0] == Curve(
        [5, 10, 15, 20], [0.5, 1.0, 1.5, 2.0], [0.5, 1.0, 1.5, 2.0], [0.5, 1.0, 1.5, 2.0]
    )
    drawn = [
        {trace["name"]: trace["y"] for trace in chart["data"]}
        for chart in over_steps(charts_in(page_of(found)))
        if chart["layout"]["yaxis"]["title"]["text"] in ("MB", "processes")
    ]
    assert drawn == [{"rank 0": [100.0] * 4, "rank 1": [101.0] * 4}, {"a": [0.5, 1.0, 1.5, 2.0]}]


def test_words_of_records_do_not_command_a_terminal(tmp_path: Path) -> None:
    """Names of hooks are what the records say."""
    folder = with_hooks(over_a_link(tmp_path / "run"), 0.08)
    rewrite(folder, "buckets", lambda record: record.update(hooks=["\x1b[2Jint8"]))
    told = html.terminal_summary(digest_run(Run(folder)))
    assert "Hooks (`\ufffd[2Jint8`) sent" in told
    assert "\x1b" not in told


def test_odd_measurements_and_clocks_are_not_believed(tmp_path: Path) -> None:
    """What else a record has is not read; a bound of clocks is a number."""
    folder = with_hooks(over_a_link(tmp_path / "run"), 0.08)

    def odd(record: dict[str, Any]) -> None:
        more = {"x": record["step"] if record["step"] % 2 else "y"}
        record["machine"] = {"rss_bytes": 1, "load": 1, "device_bytes": None, **more}

    rewrite(folder, "steps", odd)
    with (folder / "events.jsonl").open("a") as out:
        for bound in ("far", ["far"], None, [1e400]):
            event = {"event": "clock_offsets", "monotonic_us": 5, "offset_us": [0.0, 0.0], "error_us": bound}
            out.write(json.dumps(event) + "\n")
    found = digest_run(Run(folder))
    assert found.machine.keys() == {"rss_bytes", "load"}
    assert "Here they saved time" in words(page_of(found))


def with_hooks(folder: Path, us_per_byte: float) -> Path:
    """A run over a link, through a hook that sends a quarter, for so much work for each byte that is sent."""

    def change(record: dict[str, Any]) -> None:
        record |= {"hooks": ["int8"], "bytes": 4 * record["wire_bytes"]}
        record["encode_us"] = round(us_per_byte * record["wire_bytes"])

    rewrite(folder, "buckets", change)
    events = folder / "events.jsonl"
    text = events.read_text().replace('"hooks": []', '"hooks": ["int8"]')
    events.write_text(text.replace('"error_us": [50.0, 50.0]', '"error_us": [500.0, 500.0]'))
    return folder


@pytest.mark.parametrize(("us_per_byte", "paid"), [(0.08, True), (0.48, False), (0.295, None)])
def test_whether_hooks_paid_follows_from_their_break_even(
    tmp_path: Path, us_per_byte: float, paid: bool | None
) -> None:
    """Two hosts with 80 Mbit/s between them: what went through is a bound, and so is that without latency."""
    found = digest_run(Run(with_hooks(over_a_link(tmp_path / "run"), us_per_byte)))
    balance = hook_balance(found, found.stages[0])
    assert balance is not None
    assert balance.break_even_bits_per_s == pytest.approx(24e6 / us_per_byte, rel=0.01)
    least, most = balance.link_bits_per_s
    assert least == pytest.approx(80e6, rel=0.01)
    assert least * 1.05 < most < least * 1.2
    assert balance.paid is paid
    (told,) = [text for text in sentences_by_stage(found)[""] if text.startswith("Hooks")]
    assert told.startswith(
        "Hooks (`int8`) sent 75% less than plain all-reduce, 4.88 MB a step and rank, and took"
    )
    verdict = {
        True: "Here they saved time",
        False: "Here they cost more than they saved",
        None: "The records cannot tell whether they saved time here",
    }[paid]
    assert verdict in told
    if paid is False:
        assert "80 Mbit/s went through, latency included, so they saved at most 488 ms." in told


def test_nothing_is_said_of_hooks_where_records_cannot_tell(tmp_path: Path) -> None:
    """Without any, within a part of the ranks, over another number of ranks, or with nothing saved."""
    plain = digest_run(Run(over_a_link(tmp_path / "plain")))
    assert hook_balance(plain, plain.stages[0]) is None
    changes: tuple[Callable[[dict[str, Any]], None], ...] = (
        lambda record: record["legs"][0].update(group="world across.0"),
        lambda record: record.update(encode_us=0, decode_us=0),
        lambda record: record.update(bytes=record["wire_bytes"]),
    )
    for number, change in enumerate(changes):
        folder = with_hooks(over_a_link(tmp_path / f"{number}"), 0.08)
        found = digest_run(Run(rewrite(folder, "buckets", change)))
        assert hook_balance(found, found.stages[0]) is None
    folder = with_hooks(over_a_link(tmp_path / "resumed"), 0.08)
    events = (folder / "events.jsonl").read_text()
    started = next(line for line in events.splitlines() if '"started"' in line)
    resumed = started.replace('"world_size": 2', '"world_size": 4')
    (folder / "events.jsonl").write_text(f"{events}{resumed}\n")
    found = digest_run(Run(folder))
    assert hook_balance(found, found.stages[0]) is None


def test_between_ranks_of_one_host_hooks_are_never_said_to_have_paid(tmp_path: Path) -> None:
    """There is no link; memory and cores carry plain sums faster than casts."""
    folder = with_hooks(over_a_link(tmp_path / "run"), 0.08)
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"hosts": ["a", "b"]', '"hosts": ["a", "a"]'))
    found = digest_run(Run(folder))
    balance = hook_balance(found, found.stages[0])
    assert balance is not None
    assert balance.paid is None


@pytest.mark.parametrize(
    ("hosts", "bucket_bytes", "lossless"),
    [
        (
            "aa",
            2000,
            "`shared_memory` as the last hook, since all ranks are on one host",
        ),
        ("aabb", 2000, "the hook `hierarchical`, since hosts have several ranks"),
        (
            "ab",
            8 << 20,
            "`ddp: {bucket_cap_mb: 2}`, since all gradients are in one bucket and nothing overlaps",
        ),
        ("ab", 2000, None),
    ],
)
def test_advice_names_first_what_loses_nothing(
    tmp_path: Path, hosts: str, bucket_bytes: int, lossless: str | None
) -> None:
    """With what it gains at most; what changes training comes after it, and says so."""
    folder = make(tmp_path / "run", ranks=len(hosts))

    def wait_for_the_wire(record: dict[str, Any]) -> None:
        record["step_us"] += 10_000
        record["exposed_wire_us"] += 10_000

    rewrite(folder, "steps", wait_for_the_wire)
    if bucket_bytes > 2000:
        rewrite(folder, "buckets", lambda record: record.update(bucket=0, bytes=bucket_bytes))
    events = folder / "events.jsonl"
    names = json.dumps(list(hosts))
    events.write_text(
        events.read_text().replace(f'"hosts": {json.dumps(["a"] * len(hosts))}', f'"hosts": {names}')
    )
    *_, before, last = sentences_by_stage(digest_run(Run(folder)))[""]
    if lossless is None:
        assert before == "No rank was late for long."
    else:
        gain = "saves at most 50% of a step"
        assert before == f"To try first, since nothing is lost: {lossless} ({gain})."
    assert last == (
        "To try next, although it changes training: sending less (`ddprun compare` with `--vary "
        "'hooks=[[], [fp16], [int8]]'`); "
        "synchronising less often (`accumulate: 2`, or `sync: {local_sgd: {every: 8}}`)."
    )


def test_runs_stand_side_by_side_under_names_that_tell_them_apart(tmp_path: Path) -> None:
    """And nothing of a run's own words is taken for HTML."""
    odd = "</script><b>&amp;"
    runs = [Run(make(tmp_path / "x" / "one", name=odd)), Run(make(tmp_path / "y" / "one", late=0))]
    text = page_of(*map(digest_run, runs))
    told = words(text)
    assert "x/one" in told
    assert "y/one" in told
    assert odd in told
    assert told.count("Nothing went wrong.") == 1  # said once of all runs
    assert told.count("stage kind steps") == 2
    assert "<b>" not in text.partition("<script>")[0]
    loss = over_steps(charts_in(text))[0]
    assert {trace["name"] for trace in loss["data"] if "name" in trace} == {"x/one", "y/one"}


def test_every_warning_is_among_the_faults(tmp_path: Path) -> None:
    """And every error; but for stragglers, which have a part of their own."""
    folder = make(tmp_path / "run", late=1)
    assert "Nothing went wrong." in words(page_of(digest_run(Run(folder))))
    levels = {"resumed": "info", "hang": "error", "best_kept": "info"}
    kinds = [
        "checkpoint_left_out",
        "overflow",
        "step_skipped",
        "data_lost",
        "tracker_failed",
        "frozen_differ",
    ]
    with (folder / "events.jsonl").open("a") as file:
        for kind in (*levels, *kinds):
            event = {"event": kind, "level": levels.get(kind, "warning"), "reason": f"why-{kind}"}
            file.write(json.dumps(event) + "\n")
    page = words(page_of(digest_run(Run(folder))))
    assert "Nothing went wrong." not in page
    told = [kind for kind in (*levels, *kinds, "straggler") if f"reason: why-{kind}" in page]
    assert told == ["resumed", "hang", *kinds]


def test_what_is_sent_twice_in_a_step_has_one_row(tmp_path: Path) -> None:
    """In a step's timeline, as buffers with accumulation."""
    folder = make(tmp_path / "run")
    for file in (folder / "buckets").iterdir():
        file.write_text("".join(2 * line for line in file.read_text().splitlines(keepends=True)))
    charts = charts_in(page_of(digest_run(Run(folder)))).values()
    (choices,) = [chart["choices"] for chart in charts if len(chart["choices"]) > 1]
    for chart in choices.values():
        rows = chart["layout"]["yaxis"]["categoryarray"]
        assert len(set(rows)) == len(rows) == 6


def test_a_rank_without_records_under_one_seed(tmp_path: Path) -> None:
    """Runs under several seeds are one all the same, whichever lacks a rank."""
    one, two = (digest_run(Run(make(tmp_path / f"{ranks}", ranks=ranks))) for ranks in (1, 2))
    for some in ((one, two), (two, one)):
        merged = merge_seed_digests(some)
        assert [us["steps"] for us in merged.times.total_us_by_rank] == [40, 20]
        assert merged.steps_per_s == pytest.approx(100)
        assert "rank 0" in words(page_of(merged))


def test_a_run_without_records_has_a_page(tmp_path: Path) -> None:
    """One that ended before its first step."""
    folder = make(tmp_path / "run", steps=0)
    (folder / "summary.json").unlink()
    told = words(page_of(digest_run(Run(folder))))
    assert "The run has no step records" in told
    assert "still running, or killed" in told


def test_what_events_say_is_not_believed(tmp_path: Path) -> None:
    """A metric is a number; a policy may be anything; later evaluations of a step count."""
    folder = make(tmp_path / "run", evaluated=(5, 10))
    odd = [
        {"event": "stage_started", "stage": 0, "kind": "train", "sync": 5, "hooks": []},
        {
            "event": "evaluated",
            "stage": 0,
            "step": 5,
            "loss": 7.0,
            "accuracy": True,
            "huge": 10**30,
            "f1": "x",
        },
        {"event": "evaluated", "stage": 0, "step": "9", "loss": 1.0},
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in odd)
    found = digest_run(Run(folder))
    assert found.run.evaluations == {5: {"loss": 7.0}, 10: {"loss": 0.2, "accuracy": 0.9}}
    assert found.stages[0].name == "stage 0, train (5)"
    assert "<main" in page_of(found)


def test_a_run_that_goes_on_meanwhile_has_a_page(tmp_path: Path) -> None:
    """Lines come while they are read; those of later steps are left for the next page."""
    run = Run(make(tmp_path / "run", late=1))
    run.__dict__["recorded_steps"] = range(1, 13)  # as it was when the reading began
    assert digest_run(run).recorded_steps == list(range(1, 13))
    assert "<main" in page_of(digest_run(run))


def test_a_real_run_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes the page and the trace, and says where."""
    text = """
model: {cnn: {channels: [4]}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
hooks: [int8]
timings: {fidelity_every: 2}
stages:
  - train: {steps: 6}
  - train: {steps: 6, sync: {local_sgd: {every: 3}}}
  - evaluate: {metrics: [accuracy]}
"""
    folder = run_pipeline(tmp_path, text, 2)
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / 'report.html'}\n"
    figures, *lines, traced = err.splitlines()
    assert figures.startswith("samples per second: ")
    assert traced == f"{folder / 'trace.json'}: 12 of 12 steps"
    assert [line.partition(":")[0] for line in lines if line.startswith("stage")] == [
        "stage 0, train (int8)",
        "stage 1, train (local_sgd, int8)",
    ]
    assert sum("ms on average" in line for line in lines) == 2
    told = words((folder / "report.html").read_text())
    for word in (
        "gradient",
        "delta",
        "int8",
        "held-out accuracy",
        "cosine",
        "running_mean",
        "Started once",
        "local_sgd: {every: 3",
        "samples a rank",
        "Resident memory of each rank's process",
        "Load average of each host",
        f"GPU or processor of rank 0 {device_name(torch.device('cpu')) or ''}",
    ):
        assert word.lower() in told.lower(), word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not the folder of a run: it does not exist"),
        (["run", "--steps", "1:²"], '"1:²" is not a range of steps such as 100:200'),
        (["run", "--steps", "9:3"], '"9:3" is not a range of steps such as 100:200'),
        (
            ["run", "--output", "no/such/page.html"],
            "cannot write no/such/page.html: there is no folder no/such\n",
        ),
        ([], "missing argument 'RUN...'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Exit code 2, no traceback."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def browse(file: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What a browser makes of a page, and what it writes to its console."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome here")
def test_a_phone_scrolls_tables_and_not_the_page_and_values_have_a_log_scale(tmp_path: Path) -> None:
    """In a frame of 400 pixels: its width, what scrolls, and the scales before and after a click."""
    text = page_of(digest_run(Run(everything(tmp_path / "run"))))
    look = """
const frame = document.querySelector("iframe");
const wait = setInterval(function () {
  const page = frame.contentDocument;
  if (page.documentElement.dataset.drawn !== "yes") return;
  clearInterval(wait);
  for (const one of page.querySelectorAll("details")) one.open = true;
  const tables = [...page.querySelectorAll(".scroll")];
  const scale = () => page.querySelector("#chart-2")._fullLayout.yaxis.type;
  const found = [
    page.documentElement.scrollWidth, Math.max(...tables.map((one) => one.clientWidth)),
    Math.max(...tables.map((one) => one.scrollWidth)), scale(),
  ];
  page.querySelector('input[data-for="chart-2"]').click();
  setTimeout(() => { document.title = JSON.stringify([...found, scale()]); }, 500);
}, 100);
"""
    frame = f'<iframe width="400" height="800" style="border: 0" srcdoc="{escape(text)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html>{frame}<script>{look}</script>")
    title = re.search("<title>(.*?)</title>", browse(tmp_path / "frame.html", tmp_path).stdout)
    assert title is not None
    page_width, shown, widest, before, after = json.loads(title[1])
    assert (before, after) == ("linear", "log")
    assert page_width <= 400
    assert shown <= 400 < widest


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome here")
@pytest.mark.parametrize("runs", [1, 3])
def test_a_browser_draws_every_chart_and_asks_for_nothing(tmp_path: Path, runs: int) -> None:
    """Nothing on the console; each chart has its shapes."""
    digests = [digest_run(Run(everything(tmp_path / f"run-{n}"))) for n in range(runs)]
    file = tmp_path / "page.html"
    file.write_text(page_of(*digests))
    done = browse(file, tmp_path)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    assert 'data-drawn="yes"' in done.stdout
    pieces = re.split(r'<div class="chart', done.stdout)[1:]
    assert len(pieces) == len(charts_in(file.read_text()))
    for piece in pieces:
        assert "main-svg" in piece
        assert re.search(r'class="(scatterlayer|barlayer)[^"]*">\s*<g', piece) is not None
    drawn = set(re.findall(r"stroke-dasharray: ([^;]+);", done.stdout)) | {""}
    legends = set(re.findall(r'stroke-dasharray="([\d ]*)"', done.stdout))
    assert len(legends) > 2
    assert {", ".join(f"{length}px" for length in one.split() if length != "0") for one in legends} <= drawn
