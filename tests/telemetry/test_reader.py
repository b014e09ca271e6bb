"""Reading a run's folder."""

import json
from pathlib import Path

import pytest

from ddprun.telemetry.reader import MeasuredClockOffsets, NoRunError, RecordedRun
from tests.report.made_up import make


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    """With what is wrong about it."""
    with pytest.raises(NoRunError, match="nowhere is not the folder of a run: it does not exist"):
        RecordedRun(tmp_path / "nowhere")
    with pytest.raises(NoRunError, match=r"it has no events\.jsonl"):
        RecordedRun(tmp_path)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    """A run that was killed while it wrote; it has no summary either."""
    run = RecordedRun(make(tmp_path / "run"))
    file = tmp_path / "run" / "steps" / "rank-00001.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    (tmp_path / "run" / "summary.json").unlink()
    assert [line.step for line in run.step_records(1)] == list(range(1, 20))
    assert [line.step for line in run.step_records(0, {3, 20}.__contains__)] == [3, 20]
    assert (run.ranks, run.last_step, run.summary) == ([0, 1], 20, None)


def test_whatever_an_evaluation_measures_is_a_metric(tmp_path: Path) -> None:
    """Of all names that a file may give it, `samples` too."""
    folder = make(tmp_path / "run")
    about = {"event": "evaluated", "level": "info", "time": "now", "monotonic_us": 1, "rank": 0, "stage": 0}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(about | {"step": 7, "loss": 0.5, "samples": 9.0, "told": "no number"}) + "\n")
    assert RecordedRun(folder).evaluations[7, 0] == {"loss": 0.5, "samples": 9.0}


def test_times_of_other_ranks_come_to_rank_0s_clock() -> None:
    """Clocks drift evenly between two measurements, and stay as they were outside of them."""
    ahead = 5e9  # that host has been up for longer
    clocks = MeasuredClockOffsets([1_000_000, 2_000_000], [[0.0, ahead], [0.0, ahead + 20]])
    asked = (500_000, 1_000_000, 1_500_010, 2_000_020, 9_000_000)
    told = [round(clocks.on_rank0_clock(1, ahead + at), 3) for at in asked]
    assert told == pytest.approx([500_000, 1_000_000, 1_500_000, 2_000_000, 8_999_980], abs=0.1)
    assert [clocks.on_rank0_clock(0, at) for at in (500, 9_000_000)] == [500, 9_000_000]
    moved = MeasuredClockOffsets(
        [1_000_000, 2_000_000], [[0.0, ahead], [0.0, 7.0]]
    )  # started again on another host
    assert moved.on_rank0_clock(1, ahead + 1_500_000) == 1_500_000
    assert moved.on_rank0_clock(1, 2_500_007) == 2_500_000
    assert MeasuredClockOffsets([], []).on_rank0_clock(3, 7.0) == 7.0
