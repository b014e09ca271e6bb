"""Predicted against measured: over made-up links, and in a real run."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.report.digest import digest_run
from ddprun.report.predicted_vs_measured import PredictionComparison, PredictionFile, compare_with_predictions
from ddprun.telemetry.reader import RecordedRun
from tests.engine.running import run_pipeline
from tests.report.made_up import SENT, over_a_link
from tests.report.pages import words

RATE = 10e6
ENDS = [(10_000, 20_000), (30_000, 45_000), (40_000, 50_000), (47_000, 70_000)]
"""When each bucket of `over_a_link` is ready and done, over 10 MB/s."""

PREDICTED_BUCKETS = [
    {"bucket": f"gradient {n}", "ready_us": ready, "done_us": done} for n, (ready, done) in enumerate(ENDS)
]


PLANNED = [{"bucket": number, "bytes": size} for number, (size, _) in enumerate(SENT)]


def compared(folder: Path, prediction: dict[str, Any]) -> PredictionComparison:
    """The only stage of a run."""
    (stage,) = compare_with_predictions(digest_run(RecordedRun(folder)), read(prediction))
    return stage


def read(prediction: dict[str, Any]) -> PredictionFile:
    file = io.BytesIO(json.dumps(prediction).encode())
    file.name = "predicted.json"
    return PredictionFile.read(file)


def predicted(**changed: Any) -> dict[str, Any]:
    """What would have been predicted of `over_a_link`: the truth, but for what is changed."""
    step = {
        "step_us": 75_000,
        "parts_us": {"backward_us": 49_000, "optimizer_us": 5000},
        "waits_us": {"wire": 20_000, "latency": 1000},
        "buckets": PREDICTED_BUCKETS,
    }
    stage = {"stage": 0, "kind": "train", "sync": "every_step", "hooks": [], "cycle": 1}
    stage["exchanges"] = [{"kind": "gradient", "buckets": PLANNED}]
    whole = {"v": 1, "ranks": 2, "hosts": 2}
    for name, value in changed.items():
        next(one for one in (step, stage, whole) if name in one)[name] = value
    return {**whole, "stages": [{**stage, "predicted": step}]}


def test_only_the_bucket_that_took_longer_differs(tmp_path: Path) -> None:
    """The others are as predicted."""
    stage = compared(over_a_link(tmp_path / "run", longer_us=50_000), predicted())
    off = {name: was.done_us - said.done_us for name, (said, was) in stage.buckets.items() if said and was}
    assert off == pytest.approx(dict(zip(off, (0, 50_000, 0, 0), strict=True)), abs=20)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each bucket record of a run."""
    for file in (folder / "buckets").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            change(line)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_exchange_that_overlaps_with_later_steps_is_compared(tmp_path: Path) -> None:
    """It is recorded in the step that applies it; its times are since the step in which it was ready."""
    folder = over_a_link(tmp_path / "run")

    def apply_later(line: dict[str, Any]) -> None:
        line.update(kind="delta", step=line["step"] + 1)

    rewrite(folder, apply_later)
    buckets = [one | {"bucket": f"delta {n}"} for n, one in enumerate(PREDICTED_BUCKETS)]
    stage = compared(folder, predicted(buckets=buckets))
    assert stage.buckets == {f"delta {n}": (ends, ends) for n, ends in enumerate(ENDS)}


def test_without_a_prediction_the_page_has_no_such_part(tmp_path: Path) -> None:
    assert main(["report", str(over_a_link(tmp_path / "run")), "--no-trace"]) == 0
    assert "Predicted and measured" not in words((tmp_path / "run" / "report.html").read_text())


def test_a_prediction_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """The step, its parts, and each bucket; the one that the file does not have, too."""
    folder = over_a_link(tmp_path / "run")
    stage = compared(folder, predicted())
    assert stage.sentences == [
        "A step was predicted to take 75 ms, and took 75 ms (+0%).",
        "The step differs from the prediction by no more than 10%.",
    ]
    assert stage.step_parts_us == {
        "own work": (54_000, 54_000),
        "hooks": (0, 0),
        "waiting for the last rank": (0, 0),
        "waiting for the wire": (21_000, 21_000),
        "step": (75_000, 75_000),
    }
    assert stage.buckets == {f"gradient {n}": (ends, ends) for n, ends in enumerate(ENDS)}
    fewer = compared(folder, predicted(buckets=PREDICTED_BUCKETS[:3]))
    assert fewer.buckets["gradient 3"] == (None, ENDS[3])


@pytest.mark.parametrize(
    ("run", "changed", "said"),
    [
        ({"bytes_per_s": RATE / 4}, {}, "grew most is waiting for the wire, by 140 ms"),
        ({"late_us": 30_000}, {}, "grew most is own work, by 15 ms"),
        ({}, {"step_us": 50_000}, "grew most is own work, by 25 ms"),
        ({}, {"step_us": 100_000, "parts_us": {"hooks": 25_000}}, "shrank most is hooks, by 25 ms"),
    ],
)
def test_of_a_step_that_differs_the_part_is_named(
    tmp_path: Path, run: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    """The one that differs most, in the direction of the step."""
    stage = compared(over_a_link(tmp_path / "run", **run), predicted(**changed))
    assert stage.sentences[1] == f"The part that {said}."


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hooks": [{"int8": {"block": 256}}]}, "hooks [int8] (in the run [])"),
        ({"sync": {"local_sgd": {"every": 8}}}, "sync {local_sgd: {every: 8}} (in the run every_step)"),
        ({"ranks": 16, "hosts": 4}, "ranks 16 (in the run 2), hosts 4 (in the run 2)"),
        ({"kind": "forward"}, "kind forward (in the run train)"),
        (
            {"exchanges": [{"kind": "gradient", "buckets": [*PLANNED[:1], {"bucket": 1, "bytes": 2000}]}]},
            "gradient 1 of 2,000 bytes (in the run of 150,000 bytes)",
        ),
    ],
)
def test_what_is_not_alike_is_not_compared(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """A sentence says what differs."""
    stage = compared(over_a_link(tmp_path / "run"), predicted(**changed))
    assert stage.sentences == [f"The prediction is not compared, because it is for something else: {said}."]
    assert not stage.step_parts_us
    assert not stage.buckets


def test_an_exchange_of_another_size_now_and_then_is_no_other_model(tmp_path: Path) -> None:
    """Frozen parameters that differ are sent as the bucket of a policy may be, with a size of their own."""
    folder = over_a_link(tmp_path / "run")

    def resize(line: dict[str, Any]) -> None:
        if line["step"] % 2:
            line["bytes"] = 7

    rewrite(folder, resize)
    assert compared(folder, predicted()).buckets


def test_other_stages_and_few_steps(tmp_path: Path) -> None:
    """What there is nothing to say of is said."""
    folder = over_a_link(tmp_path / "run")
    assert compared(folder, predicted(stage=1)).sentences == ["There is no prediction for this stage."]
    few = compared(folder, predicted(cycle=10))
    assert few.sentences == ["Too few steps are recorded: 10 are needed after the first 3."]


def test_a_policy_that_seldom_synchronises_is_compared_by_its_cycle(tmp_path: Path) -> None:
    """A mean step of it."""
    folder = over_a_link(tmp_path / "run", steps=19, every=4)
    mean_us = (3 * 54_000 + 75_000) / 4
    stage = compared(folder, predicted(cycle=4, step_us=mean_us))
    assert stage.step_parts_us["step"] == (mean_us, mean_us)


def test_a_cycle_of_which_only_some_steps_are_recorded_is_not_compared(tmp_path: Path) -> None:
    """Each third step shows a mean step of a cycle of four, each sixth does not."""
    mean_us = (3 * 54_000 + 75_000) / 4
    for stride, cycle in ((3, 4), (6, 4)):
        folder = over_a_link(tmp_path / f"{stride}", steps=60, every=cycle)
        for file in (*(folder / "buckets").iterdir(), *(folder / "steps").iterdir()):
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(line for line in lines if json.loads(line)["step"] % stride == 0))
        stage = compared(folder, predicted(cycle=cycle, step_us=mean_us))
        if stride == 3:
            assert stage.step_parts_us["step"] == (mean_us, mean_us)
        else:
            assert not stage.step_parts_us
            assert stage.sentences == [
                "One in 6 steps is recorded, which shows no mean step of a cycle of 4: `timings.every` must "
                "not share a factor with 4."
            ]


def changed(*path: str | int, to: Any) -> bytes:
    """A prediction with another value somewhere."""
    whole = json.loads(json.dumps(predicted()))
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return json.dumps(whole).encode()


STEP = ("stages", 0, "predicted")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "valid dictionary"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"v": NaN}', "NaN is not a finite number"),
        (changed("v", to=2), "v: Input should be 1"),
        (changed("ranks", to="2"), "ranks: Input should be a valid integer"),
        (
            changed("stages", 0, "exchanges", 0, "buckets", 1, "bytes", to=-1),
            "stages.0.exchanges.0.buckets.1.bytes: Input should be greater",
        ),
        (changed("stages", 0, "predicted", to=None), "no stage has `predicted`; `--link` adds it"),
        (changed(*STEP, "step_us", to=0), "stages.0.predicted.step_us: Input should be greater than 0"),
        (changed(*STEP, "step_us", to=True), "stages.0.predicted.step_us: Input should be a valid number"),
        (changed(*STEP, "step_us", to=1e300), "stages.0.predicted.step_us: Input should be less than"),
        (
            changed(*STEP, "waits_us", "wire", to=-1),
            "stages.0.predicted.waits_us.wire: Input should be greater",
        ),
        (changed(*STEP, "waits_us", "\n\x1bwire", to=-1), "stages.0.predicted.waits_us.wire: Input"),
        (changed(*STEP, "buckets", 1, "done_us", to=[]), "stages.0.predicted.buckets.1.done_us"),
        (changed(*STEP, "buckets", 1, "bucket", to="x" * 101), "stages.0.predicted.buckets.1.bucket: String"),
    ],
)
def test_a_bad_file_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, message: str
) -> None:
    """What is wrong, and where; nothing is written."""
    folder, file = over_a_link(tmp_path / "run"), tmp_path / "file.json"
    file.write_bytes(data)
    assert main(["report", str(folder), "--predicted", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"{file} is not what `ddprun explain --link … --format json` prints: " in err
    assert message in err
    assert err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_file_has_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more of it is read; and one that is not there is not there."""
    for module in ("run_files", "report.predicted_vs_measured"):
        monkeypatch.setattr(f"ddprun.{module}.MAX_JSON_BYTES", 100)
    folder = over_a_link(tmp_path / "run")
    assert main(["report", str(folder), "--predicted", "/dev/zero"]) == 2
    assert "longer than 100 bytes" in capsys.readouterr().err
    assert main(["report", str(folder), "--predicted", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_words_of_a_file_are_not_taken_for_html(tmp_path: Path) -> None:
    """The name of a bucket is text."""
    folder, file = over_a_link(tmp_path / "run"), tmp_path / "file.json"
    file.write_bytes(changed(*STEP, "buckets", 0, "bucket", to="<b>x</b>"))
    assert main(["report", str(folder), "--predicted", str(file), "--no-trace"]) == 0
    assert "<b>" not in (folder / "report.html").read_text().partition("<script>")[0]


@pytest.mark.parametrize("value", [-(10**18), -5, 0, 10**18])
@pytest.mark.parametrize(
    "key", ["ready_us", "done_us", "wire_bytes", "start_us", "between_hosts_bytes", "step_us"]
)
def test_odd_records_make_no_odd_page(tmp_path: Path, key: str, value: int) -> None:
    """Whatever numbers a record has."""
    folder = over_a_link(tmp_path / "run")
    for file in (*(folder / "buckets").iterdir(), *(folder / "steps").iterdir()):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines[8::3]:
            for one in (line, *line.get("legs", ())):
                if key in one:
                    one[key] = value
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare_with_predictions(digest_run(RecordedRun(folder)), read(predicted()))


def test_a_report_imports_no_code_of_the_pipeline(tmp_path: Path) -> None:
    """Nor what builds models and runs them."""
    folder, file = over_a_link(tmp_path / "run"), tmp_path / "file.json"
    (folder / "pipeline.yaml").write_text("model: {mine.Net: {}}\n")
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\n")
    file.write_text(json.dumps(predicted()))
    script = (
        "import sys\nfrom ddprun.cli import main\n"
        f"assert main(['report', {str(folder)!r}, '--predicted', {str(file)!r}]) == 0\n"
        "loads = ('mine', 'ddprun.explain', 'ddprun.engine', 'ddprun.predict.cost_model')\n"
        "assert not (found := [name for name in sys.modules if name.startswith(loads)]), found\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_real_run_and_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` predicts the run from itself, and `report` shows both."""
    text = """
model: {mlp: {inputs: 64, hidden: [600, 600], outputs: 10}}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.02}}
ddp: {bucket_cap_mb: 1}
checkpoint: {keep: 0}
stages:
  - train: {steps: 12}
  - train: {steps: 12, sync: {local_sgd: {every: 3}}, hooks: [int8]}
  - train: {steps: 5, sync: independent}
"""
    folder = run_pipeline(tmp_path, text, 2)
    arguments = ["--nnodes", "1", "--nproc-per-node", "2", "--link", "100Mbit", "--from", str(folder)]
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "run.yaml"), *arguments, "--format", "json"]) == 0
    file = tmp_path / "predicted.json"
    file.write_text(capsys.readouterr().out)
    assert main(["report", str(folder), "--no-trace", "--predicted", str(file)]) == 0
    page = words((folder / "report.html").read_text())
    assert page.count("A step was predicted to take") == 3
    with file.open("rb") as opened:
        measured = compare_with_predictions(digest_run(RecordedRun(folder)), PredictionFile.read(opened))
    for stage, prefix in zip(measured, ("gradient", "delta", None), strict=True):
        assert all(said is not None and was is not None for said, was in stage.buckets.values()), stage
        assert {name.split()[0] for name in stage.buckets} == ({prefix} if prefix else set())
    times_us = [
        line.step_us
        for rank in (0, 1)
        for line in RecordedRun(folder).step_records(rank, range(4, 13).__contains__)
    ]
    own, hooks, late, wire, step = (was for _, was in measured[0].step_parts_us.values())
    assert min(times_us) <= step <= max(times_us)  # a busy machine may make outliers, which do not count
    assert own + hooks + late + wire == pytest.approx(step)
    assert page.count("The prediction was fitted to this very run") == 3
    (tmp_path / "again").mkdir()
    other = run_pipeline(tmp_path / "again", text, 2)
    assert main(["report", str(other), "--no-trace", "--predicted", str(file)]) == 0
    assert "very run" not in words((other / "report.html").read_text())
