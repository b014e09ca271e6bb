"""What a run leaves behind adds up."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ddprun.telemetry.records import PARTS
from tests.engine.running import events, lines, run_pipeline, summary

PIPELINE = """
model:
  mlp: {{inputs: 64, hidden: [700, 700], outputs: 10}}
data: digits
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.05}}}}
hooks: {hooks}
ddp: {{bucket_cap_mb: 1, static_graph: {static}}}
timings: {{every: {every}}}
stages:
  - train: {{steps: {steps}}}
  - train: {{steps: 3, hooks: [noop]}}
  - evaluate: {{metrics: [accuracy]}}
  - save
"""
PARAMETERS = sorted(f"{layer}.{kind}" for layer in (1, 3, 5) for kind in ("weight", "bias"))
ELEMENTS = 64 * 700 + 700 + 700 * 700 + 700 + 700 * 10 + 10


def run(folder: Path, ranks: int = 3, **changes: Any) -> Path:
    settings = {"hooks": "[fp16]", "every": 1, "steps": 6, "static": "false"} | changes
    return run_pipeline(folder, PIPELINE.format(**settings), ranks)


def gradients(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder, "buckets") if line["kind"] == "gradient"]


def averaged_bytes(folder: Path) -> int:
    """What made the ranks equal again after the stage that sends nothing."""
    others = [line for line in lines(folder, "buckets") if line["kind"] != "gradient"]
    assert {(line["kind"], line["stage"], line["step"]) for line in others} == {("parameters", 1, 9)}
    assert sum(line["numel"] for line in others if line["rank"] == 0) == ELEMENTS
    return sum(line["wire_bytes"] for line in others)


@pytest.mark.parametrize("static", ["false", "true"])
def test_there_is_a_line_for_each_bucket_step_and_rank(tmp_path: Path, static: str) -> None:
    """The same buckets in every step from the first on, and together they hold every parameter once."""
    folder = run(tmp_path, static=static)
    buckets = gradients(folder)
    per_step = Counter((line["rank"], line["step"]) for line in buckets)
    assert set(per_step) == {(rank, step) for rank in range(3) for step in range(1, 10)}
    assert set(per_step.values()) == {len(buckets) // 27}
    assert len(buckets) // 27 > 1, "the model has several buckets"
    for rank, step in per_step:
        mine = [line for line in buckets if (line["rank"], line["step"]) == (rank, step)]
        assert sorted(name for line in mine for name in line["params"]) == PARAMETERS
        assert sum(line["numel"] for line in mine) == ELEMENTS
        assert [line["bucket"] for line in mine] == list(range(len(mine)))


def test_times_are_in_order_and_legs_lie_inside(tmp_path: Path) -> None:
    """ready <= launch <= done; each leg within; buckets within their step."""
    folder = run(tmp_path)
    steps = {(line["rank"], line["step"]): line for line in lines(folder, "steps")}
    for line in gradients(folder):
        assert line["ready_us"] <= line["launch_us"] <= line["done_us"]
        step = steps[line["rank"], line["step"]]
        assert step["start_us"] <= line["ready_us"]
        assert line["done_us"] <= step["start_us"] + step["step_us"]
        assert line["encode_us"] >= 0
        assert line["decode_us"] >= 0
        for leg in line["legs"]:
            assert line["launch_us"] <= leg["start_us"] <= leg["done_us"] <= line["done_us"]
        assert len(line["legs"]) == (1 if line["stage"] == 0 else 0)


def test_the_parts_of_a_step_add_up_and_none_is_negative(tmp_path: Path) -> None:
    """To the microsecond; and steps of one stage follow each other without a gap."""
    steps = lines(run(tmp_path), "steps")
    assert len(steps) == 27
    for line in steps:
        assert sum(line[part] for part in PARTS) == line["step_us"]
        assert min(line[part] for part in PARTS) >= 0
        assert line["forward_us"] > 0
        assert line["optimizer_us"] > 0
    for before, after in pairwise(steps):
        if (before["rank"], before["stage"]) == (after["rank"], after["stage"]):
            assert before["start_us"] + before["step_us"] == after["start_us"]


@pytest.mark.parametrize(("hooks", "factor"), [("[]", 1.0), ("[fp16]", 0.5), ("[bf16]", 0.5)])
def test_recorded_wire_bytes_are_the_formulas(tmp_path: Path, hooks: str, factor: float) -> None:
    """Ring all-reduce of S bytes on 4 ranks: 1.5 S from each rank, exactly half with a cast, 0 with noop."""
    folder = run(tmp_path, 4, hooks=hooks)
    sent = Counter[tuple[int, int]]()
    for line in gradients(folder):
        sent[line["rank"], line["step"]] += line["wire_bytes"]
        assert line["bytes"] == 4 * line["numel"]
    for (_, step), wire_bytes in sent.items():
        assert wire_bytes == (ELEMENTS * 4 * 1.5 * factor if step <= 6 else 0)
    assert summary(folder)["wire_bytes"] == 4 * 6 * ELEMENTS * 4 * 1.5 * factor + averaged_bytes(folder)


def test_rank_and_mean_loss_are_named_apart(tmp_path: Path) -> None:
    """The mean in each rank's record is the sample-weighted mean of the ranks' own losses."""
    folder = run(tmp_path)
    for step in range(1, 10):
        mine = [line for line in lines(folder, "steps") if line["step"] == step]
        assert len({line["loss"] for line in mine}) == 3
        mean = sum(line["loss"] * line["samples"] for line in mine) / sum(line["samples"] for line in mine)
        assert all(abs(line["mean_loss"] - mean) < 1e-9 for line in mine)
    assert summary(folder)["loss"] == mine[0]["mean_loss"]


def test_every_n_th_step_is_recorded_and_all_are_summed_up(tmp_path: Path) -> None:
    """`timings.every` thins the records, not the summary."""
    folder = run(tmp_path, every=3)
    assert {line["step"] for line in lines(folder, "steps")} == {3, 6, 9}
    assert {line["step"] for line in gradients(folder)} == {3, 6, 9}
    assert summary(folder)["steps"] == 9
    assert summary(folder)["wire_bytes"] == 3 * 6 * round(ELEMENTS * 2 * 4 / 3) + averaged_bytes(folder)


def test_the_summary_tells_what_the_run_came_to(tmp_path: Path) -> None:
    """Every field of the contract is there; counts are exact."""
    found = summary(run(tmp_path))
    assert found["status"] == "done"
    assert found["world_size"] == 3
    assert found["steps"] == 9
    assert found["samples"] == 9 * 8 * 3
    assert (found["backend"], found["device"]) == ("gloo", "cpu")
    assert [stage["kind"] for stage in found["stages"]] == ["train", "train", "evaluate", "save"]
    assert [stage.get("hooks") for stage in found["stages"][:2]] == [["fp16"], ["noop"]]
    assert len(found["straggler_wait_s"]) == 3
    assert found["exposed_communication_s"] <= found["communication_s"]
    assert found["seconds_in_steps"] <= found["seconds"]
    assert set(found["metrics"]) == {"loss", "accuracy"}
    assert found["records_dropped"] == 0
    assert found["records_failure"] is None


def test_events_carry_the_layout_and_the_clock_offsets(tmp_path: Path) -> None:
    """A reader needs no other file to know which parameter is in which bucket, and whose clock is ahead."""
    found = {event["event"]: event for event in events(run(tmp_path))}
    names = [name for bucket in found["started"]["buckets"] for name in bucket["params"]]
    assert sorted(names) == PARAMETERS
    offsets, errors = found["clock_offsets"]["offset_us"], found["clock_offsets"]["error_us"]
    assert offsets[0] == errors[0] == 0
    assert all(abs(offset) <= error for offset, error in zip(offsets[1:], errors[1:], strict=True))
    assert found["finished"]["status"] == "done"
    assert all({"time", "level", "monotonic_us"} <= event.keys() for event in found.values())
