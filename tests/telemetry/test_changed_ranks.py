"""Figures of a run whose number of ranks changes: summary, report, trace and Prometheus say what its records
say.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ddprun.predict.costs import CostsUnknownError
from ddprun.predict.links import Links
from ddprun.predict.measure import cost_models_of_run
from ddprun.report import trace
from ddprun.report.digest import digest_run
from ddprun.report.sections import headline_facts
from ddprun.telemetry.progress import summary_rows
from ddprun.telemetry.reader import RecordedRun
from ddprun.telemetry.records import PARTS, Summary
from tests.engine.running import SAMPLES, events, lines, run_to_end, summary

PIPELINE = """
model: {mlp: {inputs: 6, hidden: [8], outputs: 3}}
precision: fp32
data: samples.Slow
loader: {batch_size: 4}
optimizer: {sgd: {lr: 0.1}}
hooks: [fp16]
stages: [{train: {steps: STEPS}}]
checkpoint: {every: 5}
track: [prometheus]
"""
SLOW = """

class Slow(Samples):
    def __getitem__(self, index):
        import os, time
        time.sleep(0.001 * (1 + 2 * (os.environ.get("RANK") == "1")))
        sample, target = super().__getitem__(index)
        return sample.float(), target
"""
ATTEMPTS = [(2, 20), (1, 32), (3, 50), (3, 60)]  # ranks, and the steps that the file asks for


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four attempts on 2, 1, 3 and again 3 ranks."""
    folder = tmp_path_factory.mktemp("changed")
    (folder / "samples.py").write_text(SAMPLES + SLOW)
    for attempt, (ranks, steps) in enumerate(ATTEMPTS):
        text = PIPELINE.replace("STEPS", str(steps))
        codes, told = run_to_end(folder, text, ranks, resuming=attempt > 0)
        assert codes == [0] * ranks, told
    return folder / "run"


def steps_of(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The records of each step, one for each rank that took it."""
    found = defaultdict(list)
    for record in lines(run_dir, "steps"):
        found[record["step"]].append(record)
    return found


def seconds(run_dir: Path, *parts: str) -> float:
    """Per step the mean over the ranks that took it, added up."""
    steps = steps_of(run_dir).values()
    return sum(fmean(sum(one[part] for part in parts) for one in step) for step in steps) / 1e6


def test_each_step_was_taken_by_the_ranks_of_its_attempt(run_dir: Path) -> None:
    """And the summary, the event, the screen and the report say which these were."""
    counts = {step: len(records) for step, records in sorted(steps_of(run_dir).items())}
    assert list(counts) == list(range(1, 61))
    assert [*counts.values()] == [2] * 20 + [1] * 12 + [3] * 28
    sizes = [[1, 2], [21, 1], [33, 3]]
    assert summary(run_dir)["world_sizes"] == sizes
    resumed = [event["world_sizes"] for event in events(run_dir) if event["event"] == "resumed"]
    assert resumed == [sizes[:2], sizes, sizes]
    assert RecordedRun(run_dir).world_sizes == [tuple(one) for one in sizes]
    said = "2 to step 20, then 1 to step 32, then 3 on"
    assert f"{said} cpu over gloo" in (run_dir.parent / "told").read_text()
    assert str(dict(headline_facts(digest_run(RecordedRun(run_dir))))["ranks"]).startswith(f"{said} 1 host")


def test_a_refused_attempt_took_no_step(run_dir: Path, tmp_path: Path) -> None:
    """It has started, on seven ranks, and neither resumed nor begun a stage."""
    run = RecordedRun(shutil.copytree(run_dir, tmp_path / "again"))
    sizes = RecordedRun(run_dir).world_sizes
    started = next(event for event in run.events if event["event"] == "started")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({**started, "world_size": 7}) + "\n")
    assert RecordedRun(run.folder).world_sizes == sizes


def test_the_summary_is_per_step_over_the_ranks_that_took_it(run_dir: Path) -> None:
    """Times are means over ranks; samples and bytes are sums."""
    found, exact = summary(run_dir), 1e-5  # each change of ranks rounds to a microsecond
    exposed = [f"exposed_{part}_us" for part in ("hook", "wait", "wire")]
    assert found["seconds_in_steps"] == pytest.approx(seconds(run_dir, "step_us"), abs=exact)
    assert found["data_s"] == pytest.approx(seconds(run_dir, "data_us"), abs=exact)
    assert found["exposed_communication_s"] == pytest.approx(seconds(run_dir, *exposed), abs=exact)
    compute = seconds(run_dir, "forward_us", "backward_us", "optimizer_us")
    assert found["compute_s"] == pytest.approx(compute, abs=exact)
    waits = seconds(run_dir, "exposed_wait_us")
    assert fmean(found["straggler_wait_s"]) == pytest.approx(waits, abs=exact)
    assert found["samples"] == sum(one["samples"] for one in lines(run_dir, "steps"))
    assert found["wire_bytes"] == sum(one["wire_bytes"] for one in lines(run_dir, "buckets"))
    least, most = found["exposed_communication_s"] - exact, found["seconds_in_steps"] + exact
    assert least <= found["communication_s"] <= most


def test_the_report_says_the_same(run_dir: Path) -> None:
    """Of the mean step, its parts, and samples per second."""
    digest = digest_run(RecordedRun(run_dir))
    for part in (*PARTS, "step_us"):
        mean_us = 1e6 * seconds(run_dir, part) / ATTEMPTS[-1][1]
        assert digest.times.mean_parts_us[part] == pytest.approx(mean_us, abs=0.1)
    samples = sum(one["samples"] for one in lines(run_dir, "steps"))
    assert digest.samples_per_s == pytest.approx(samples / seconds(run_dir, "step_us"), rel=1e-5)
    assert digest.steps_per_s == pytest.approx(summary(run_dir)["steps_per_s"], rel=1e-5)


def test_the_trace_says_the_same(run_dir: Path) -> None:
    """A slice for each step of each rank."""
    trace.write_chrome_trace(RecordedRun(run_dir), run_dir / "trace.json")
    us_by_step = defaultdict(list)
    for event in json.loads((run_dir / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and re.fullmatch(r"step \d+", event["name"]):
            us_by_step[event["name"]].append(event["dur"])
    total_s = sum(map(fmean, us_by_step.values())) / 1e6
    assert len(us_by_step) == 60
    assert total_s == pytest.approx(seconds(run_dir, "step_us"), abs=1e-4)  # clocks are corrected by rounding


def test_prometheus_counts_what_rank_0_did_since_it_started(run_dir: Path) -> None:
    """Its counters begin at 0 with each start, as those of any process."""
    own = [one for one in lines(run_dir, "steps") if one["rank"] == 0 and one["step"] > 50]
    found = dict(numbers((run_dir / "metrics.prom").read_text()))
    assert found["ddprun_steps_total"] == len(own) == 10
    assert found["ddprun_samples_total"] == sum(one["samples"] for one in own)
    for part in PARTS:
        counted = found.get(f'ddprun_step_part_seconds_total{{part="{part.removesuffix("_us")}"}}')
        assert counted == pytest.approx(sum(one[part] for one in own) / 1e6, abs=1e-9)


def numbers(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            yield name, float(value)


def test_no_costs_are_taken_from_it(run_dir: Path) -> None:
    """A prediction is for one number of ranks."""
    said = r"the number of its ranks has changed \(2 to step 20, then 1 to step 32, then 3\)"
    with pytest.raises(CostsUnknownError, match=said):
        cost_models_of_run(run_dir, Links())


def test_a_summary_without_the_field_shows_its_number_of_ranks() -> None:
    """As one that an error has ended."""
    rows = dict(summary_rows(Summary(status="done", steps=1, world_size=4, steps_per_s=1, communication_s=0)))
    assert rows["ranks"].startswith("4 on")
