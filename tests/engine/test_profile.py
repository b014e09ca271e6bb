"""When gradients were complete, and what torch's profiler saw: on forked ranks that train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.report import trace
from ddprun.report.digest import digest_run
from ddprun.telemetry.reader import RecordedRun
from tests.engine.running import lines, run_pipeline, summary, weights
from tests.report.test_trace import check_nesting, names, read, tracks

TEXT = """
model: {tests.engine.late.Net: {where: backward 1, rank: 1, late_s: 0.01}}
data: {train: {tests.engine.late.Samples: {}}}
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.01}}
ddp: {bucket_cap_mb: 1}
accumulate: 2
timings: TIMINGS
stages: [{train: {steps: 6}}, save]
checkpoint: {keep: 0}
"""


def text(timings: str) -> str:
    return TEXT.replace("TIMINGS", timings)


def gradients(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run, "buckets") if line["kind"] == "gradient"]


def test_a_bucket_says_which_gradient_completed_it(tmp_path: Path) -> None:
    """The last of its gradients, right before the bucket is ready; backward goes from the head down."""
    run = run_pipeline(tmp_path, text("{gradients: true}"), 2)
    buckets = gradients(run)
    assert len({line["bucket"] for line in buckets}) > 1
    for line in buckets:
        ready = dict(zip(line["params"], line["params_ready_us"], strict=True))
        assert ready[line["completed_by"]] == max(ready.values()) <= line["ready_us"]
    first = next(line for line in buckets if line["bucket"] == 0)
    assert first["params"][0].startswith("head.")
    slept = {}
    for line in lines(run, "steps"):
        at = (line["rank"], line["step"])
        ready = {
            name: us
            for bucket in buckets
            if (bucket["rank"], bucket["step"]) == at
            for name, us in zip(bucket["params"], bucket["params_ready_us"], strict=True)
        }
        assert min(ready.values()) > line["start_us"]
        slept[at] = ready["layers.1.weight"] - ready["layers.2.weight"] >= 10_000
    by_rank = [{slept[at] for at in slept if at[0] == rank} for rank in range(2)]
    assert by_rank[1] == {True}, "rank 1 sleeps before the gradients of that layer in each step"
    assert False in by_rank[0], "rank 0 does not, unless the machine is busy"
    gathered = digest_run(RecordedRun(run)).bucket_completions
    assert [one.completed_by.total() for one in gathered.values()] == [12] * len(gathered)


def test_nobody_asks_nothing_is_noted(tmp_path: Path) -> None:
    """Records are as they are without it, and so is the training."""
    plain = run_pipeline(tmp_path, text("{}"), 2, "plain")
    assert not any("params_ready_us" in line for line in gradients(plain))
    assert not (plain / "profile").exists()
    told = run_pipeline(tmp_path, text("{gradients: true, profile: [2, 3]}"), 2, "told")
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(told)[name]), name


def test_torchs_profiler_is_merged_into_the_timeline(tmp_path: Path) -> None:
    """Its events lie in the steps that were chosen, on each rank's own clock, in tracks of their own."""
    run = run_pipeline(tmp_path, text("{profile: [3, 4]}"), 2)
    seen = lines(run, "profile")
    steps = lines(run, "steps")
    for rank in range(2):
        mine = [line for line in seen if line["rank"] == rank]
        assert {(line["first_step"], line["step"]) for line in mine} == {(3, 4)}
        ops = {line["name"] for line in mine}
        assert ops >= {"aten::addmm", "AddmmBackward0", "gloo:all_reduce"}
        begin = next(s["start_us"] for s in steps if (s["step"], s["rank"]) == (3, rank))
        after = next(s["start_us"] for s in steps if (s["step"], s["rank"]) == (5, rank))
        on_thread = [line for line in mine if line["ph"] == "X" and line["name"] == "aten::addmm"]
        assert len(on_thread) == 2 * 2 * 4, "two steps of two micro-batches through four layers"
        for line in on_thread:
            assert begin < line["start_us"]
            assert line["start_us"] + line["us"] < after
    assert RecordedRun(run).profiled_steps == {3, 4}

    trace.write_chrome_trace(RecordedRun(run), tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    titles = names(events, "thread_name")
    theirs = {at for at, title in titles.items() if title.startswith("torch: thread")}
    assert {pid for pid, _ in theirs} == {2, 3}
    rows = tracks(events)
    for at in theirs & rows.keys():
        check_nesting(rows[at])
    flows = [event for event in events if event["ph"] in "sf"]
    begun = [event["id"] for event in flows if event["ph"] == "s"]
    assert len(set(begun)) == len(begun) > 0, "each flow has a number of its own in the whole trace"
    assert set(begun) == {event["id"] for event in flows if event["ph"] == "f"}


def test_a_profile_that_the_run_does_not_reach_the_end_of_is_written(tmp_path: Path) -> None:
    """It ends with the run."""
    run = run_pipeline(tmp_path, text("{profile: [5, 100]}"), 2)
    assert {(line["first_step"], line["step"]) for line in lines(run, "profile")} == {(5, 6)}
    assert summary(run)["status"] == "done"


@pytest.mark.parametrize("steps", [(1, 1), (6, 6)])
def test_one_step_is_a_profile(tmp_path: Path, steps: tuple[int, int]) -> None:
    """The first and the last of a run, too."""
    run = run_pipeline(tmp_path, text(f"{{profile: {json.dumps(steps)}}}"), 2)
    assert RecordedRun(run).profiled_steps == {steps[0]}
