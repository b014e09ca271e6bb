"""The timeline in the Chrome trace format."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ddprun.report import trace
from ddprun.telemetry.reader import RecordedRun
from tests.engine.running import lines, run_pipeline
from tests.report.made_up import LAPS, STEP_US, make

PIPELINE = """
model: {mlp: {inputs: 64, hidden: [600, 600], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.05}}
ddp: {bucket_cap_mb: 1}
hooks: [int8]
accumulate: 2
checkpoint: {every: 3}
stages:
  - train: {steps: 6}
  - train: {steps: 6, sync: {diloco: {every: 3, overlap_steps: 1}}}
"""


def read(file: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Slices by process and track, in the order of their begin; what holds another before it."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {key: sorted(row, key=lambda e: (e["ts"], -e["dur"])) for key, row in found.items()}


def names(events: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    """The names of processes, or of tracks."""
    return {
        (event["pid"], event["tid"]) if "tid" in event else event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == kind
    }


def check_nesting(row: list[dict[str, Any]]) -> None:
    """Slices of a track lie inside one another or apart: others are dropped by who opens the trace."""
    open_until: list[int] = []
    for event in row:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def test_ranks_are_aligned_and_parts_follow_each_other(tmp_path: Path) -> None:
    """Clocks of these ranks are 5 s apart; their steps begin together."""
    run = RecordedRun(make(tmp_path / "run", late=1))
    assert trace.write_chrome_trace(run, tmp_path / "trace.json") == 20
    events = read(tmp_path / "trace.json")
    assert names(events, "process_name") == {1: "run", 2: "rank 0 on a", 3: "rank 1 on a"}
    rows = tracks(events)
    titles = names(events, "thread_name")
    by_name = {(pid, titles[pid, tid]): row for (pid, tid), row in rows.items()}
    for step in range(20):
        assert by_name[2, "steps"][step]["ts"] == by_name[3, "steps"][step]["ts"]
    assert [event["name"] for event in by_name[2, "training thread"][:6]] == [part for part, _ in LAPS]
    assert sum(event["dur"] for event in by_name[2, "training thread"]) == 20 * STEP_US
    assert [event["dur"] for event in by_name[2, "waiting"]] == [3000] * 20
    assert (3, "waiting") not in by_name
    bucket = by_name[2, "gradient 1"]
    assert [event["name"] for event in bucket[:3]] == [
        "gradient 1 of step 1",
        "all_reduce",
        "until the last rank is ready",
    ]
    assert bucket[2]["dur"] == 2990
    assert bucket[0]["args"]["params"] == "1.weight, 1.bias"
    written = [(e["ph"], e["ts"]) for e in events if e["name"] == "checkpoint of step 10"]
    assert written == [("b", 1_130_000), ("e", 1_150_000)]
    assert {event["name"] for event in events if event["ph"] == "i"} == {
        "started",
        "buffers",
        "stage started",
        "straggler",
    }
    for row in rows.values():
        check_nesting(row)


def test_a_real_run_has_a_slice_for_every_part_and_leg(tmp_path: Path) -> None:
    """Gradients and deltas, on a track for each bucket; all inside one another."""
    folder = run_pipeline(tmp_path, PIPELINE, 2)
    trace.write_chrome_trace(RecordedRun(folder), tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    rows, titles = tracks(events), names(events, "thread_name")
    for row in rows.values():
        check_nesting(row)
    for rank in range(2):
        steps = [line for line in lines(folder, "steps") if line["rank"] == rank]
        mine = {titles[at]: row for at, row in rows.items() if at[0] == rank + 2}
        thread = mine["training thread"]
        assert sum(event["dur"] for event in thread) == pytest.approx(
            sum(s["step_us"] for s in steps), abs=50
        )
        second = [event["name"] for event in thread if event["args"]["step"] == 2]
        assert second.count("forward") == second.count("backward") == 2, "two micro-batches"
        buckets = [line for line in lines(folder, "buckets") if line["rank"] == rank]
        tracks_of_buckets = {f"{line['kind']} {line['bucket']}" for line in buckets}
        assert set(mine) == {"steps", "training thread", "waiting", *tracks_of_buckets}
        legs = sum(len(line["legs"]) for line in buckets)
        ops = {leg["op"] for line in buckets for leg in line["legs"]}
        assert sum(event["name"] in ops for event in events if event["pid"] == rank + 2) == legs > 20


def test_of_a_long_run_the_last_steps_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for; of a short run all."""
    run = RecordedRun(make(tmp_path / "run", steps=1000))
    assert trace.write_chrome_trace(run, tmp_path / "trace.json") == 1000
    monkeypatch.setattr(trace, "_MAX_EVENTS", 2000)
    count = trace.write_chrome_trace(run, tmp_path / "trace.json")
    events = read(tmp_path / "trace.json")
    shown = [int(e["name"].split()[1]) for e in events if e["name"].startswith("step ") and e["pid"] == 2]
    assert shown == list(range(1001 - count, 1001))
    assert 1500 < len(events) < 2500


def test_chosen_steps_are_all_there(tmp_path: Path) -> None:
    """As many as are asked for, without what happened in the run at other times."""
    run = RecordedRun(make(tmp_path / "run", steps=100))
    trace.write_chrome_trace(run, tmp_path / "trace.json", steps=(40, 44))
    events = read(tmp_path / "trace.json")
    shown = {event["name"] for event in events if event["name"].startswith("step ")}
    assert shown == {f"step {number}" for number in range(40, 45)}
    assert [event for event in events if event["ph"] != "M" and event["pid"] == 1] == []
