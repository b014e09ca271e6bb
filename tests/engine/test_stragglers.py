"""A rank that sleeps is named, with the cause: on forked ranks that train."""

import statistics
from pathlib import Path

import pytest

from tests.engine.running import events, lines, run_pipeline, summary

pytestmark = pytest.mark.alone

TEXT = """
model: {tests.engine.late.Net: {where: WHERE}}
data: {train: {tests.engine.late.Samples: {late_s: LATE_S}}}
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.01}}
ddp: {bucket_cap_mb: 1}
sync: SYNC
stages: [{train: {steps: 96}}]
checkpoint: {keep: 0}
"""


def text(where: str = "nowhere", late_s: float = 0.0, sync: str = "every_step") -> str:
    return TEXT.replace("WHERE", where).replace("LATE_S", str(late_s)).replace("SYNC", sync)


IN_TURNS = (
    text()
    .replace("tests.engine.late.Net: {where: nowhere}", "tests.engine.late.InTurns: {}")
    .replace(
        "{steps: 96}", "{steps: 96, turns: [{name: first, match: f*}, {name: second, match: s*, every: 2}]}"
    )
    .replace("loader:", "loss: model\nloader:")
)


@pytest.mark.parametrize(
    ("pipeline", "cause"),
    [
        (text(late_s=0.02), "data"),
        (text("forward"), "forward"),
        (text("backward 1"), "backward"),
        (text("backward 1", sync="{local_sgd: {every: 2}}"), "backward"),
        (IN_TURNS, "forward"),
    ],
)
def test_a_rank_that_sleeps_is_named_with_the_cause(tmp_path: Path, pipeline: str, cause: str) -> None:
    """20 ms in every step, or 50 ms in every second one: as an event and in the summary, and the others'
    waiting is for that rank.
    """
    run = run_pipeline(tmp_path, pipeline, 4)
    told = [event for event in events(run) if event["event"] == "straggler"]
    first = next(event for event in told if (event["straggler"], event["cause"]) == (2, cause))
    a_step = 2 if "local_sgd" in pipeline else 1
    assert 12_000 * a_step < first["late_us"]  # a busy machine makes it more
    if cause == "backward" and a_step == 1:
        assert (first["bucket"], "layers.1.weight" in first["params"]) == (1, True)
    done = summary(run)
    assert (2, cause) in [(one["rank"], one["cause"]) for one in done["stragglers"]]
    waited = done["straggler_wait_s"]
    assert 2 * waited[2] < min(waited[0], waited[1], waited[3])


def test_what_a_rank_waits_for_is_told_by_bucket(tmp_path: Path) -> None:
    """Each record says when the last rank had the bucket ready: in most steps the sleeping rank."""
    run = run_pipeline(tmp_path, text("backward 1"), 4)
    waits: dict[int, list[int]] = {rank: [] for rank in range(4)}
    for line in lines(run, "buckets"):
        if line["bucket"] == 1:
            waits[line["rank"]].append(line["all_ready_us"] - line["ready_us"])
    # A busy machine holds up any rank in some step: the median is the sleep's.
    usual = {rank: statistics.median(of_rank) for rank, of_rank in waits.items()}
    assert min(usual[0], usual[1], usual[3]) > 10_000
    assert abs(usual[2]) < 5000
