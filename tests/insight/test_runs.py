"""Reading a run's folder."""

from pathlib import Path

import pytest

from ddprun.insight.runs import Clocks, NoRunError, Run
from tests.insight.made_up import make


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    """With what is wrong about it."""
    with pytest.raises(NoRunError, match="nowhere is no run's folder: it does not exist"):
        Run(tmp_path / "nowhere")
    with pytest.raises(NoRunError, match=r"it has no events\.jsonl"):
        Run(tmp_path)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    """A run that was killed while it wrote; it has no summary either."""
    run = Run(make(tmp_path / "run"))
    file = tmp_path / "run" / "steps" / "rank-00001.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    (tmp_path / "run" / "summary.json").unlink()
    assert [line["step"] for line in run.steps(1)] == list(range(1, 20))
    assert [line["step"] for line in run.steps(0, {3, 20}.__contains__)] == [3, 20]
    assert (run.ranks, run.last_step, run.summary) == ([0, 1], 20, None)


def test_times_of_other_ranks_come_to_rank_0s_clock() -> None:
    """Clocks drift evenly between two measurements, and stay as they were outside of them."""
    clocks = Clocks([1000, 2000], [[0.0, 100.0], [0.0, 200.0]])
    assert [clocks.aligned(1, at) for at in (500, 1000, 1500, 2000, 9000)] == [400, 900, 1350, 1800, 8800]
    assert [clocks.aligned(0, at) for at in (500, 9000)] == [500, 9000]
    assert Clocks([], []).aligned(3, 7.0) == 7.0
