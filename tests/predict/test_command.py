"""`ddprun explain --link`: with a short run of its own, from a saved run, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddprun.cli import main
from ddprun.config import load
from ddprun.predict.links import Links
from ddprun.predict.measure import contention_warning, cost_models_of_run
from tests.ranks import Running

Out = pytest.CaptureFixture[str]

GOOD = """
model:
  mlp: {inputs: 64, hidden: [64], outputs: 10}
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.02}}
launch: {nproc_per_node: 2}
hooks: [fp16]
stages:
  - train: {steps: 6}
  - train: {steps: 8, sync: {local_sgd: {every: 4}}}
  - evaluate
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A pipeline's file, beside which a short run is, and what the command printed."""
    folder = tmp_path_factory.mktemp("explained")
    (folder / "good.yaml").write_text(GOOD)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with Running(
            "explain", "good.yaml", "--nnodes=2", "--link=1Mbit", "--latency=1ms", cwd=folder
        ) as command:
            finished = command.wait(150)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert finished.code == 0, finished.stderr
    assert "a short run measures what steps cost here" in finished.stderr
    assert "warning: this machine was busy while its costs were measured: other processes took" in (
        finished.stderr
    )
    return folder / "good.yaml", finished.stdout


def test_a_short_run_has_equal_shares_and_no_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """It also has stages that exchange nothing, which unequal shares do not go with, and all are shorter
    than many a warm-up.
    """
    monkeypatch.chdir(tmp_path)
    head = GOOD.partition("stages:")[0].replace("8}", '8, balance: {"1": 0.5}}', 1)
    schedule = "warmup_steps: 100\nschedule: {CosineAnnealingLR: {T_max: 400}, over: run}\n"
    (tmp_path / "good.yaml").write_text(f"{head}{schedule}stages: [train: {{steps: 500}}]\n")
    assert main(["explain", "good.yaml", "--link=1Gbit"]) == 0
    assert "Predicted" in capsys.readouterr().out


def saved(file: Path) -> Path:
    """The short run's folder."""
    (found,) = (file.parent / "runs" / "explain").iterdir()
    return found


def test_a_short_run_is_taken_and_read(measured: tuple[Path, str]) -> None:
    """Each stage with steps has a prediction, hooks are judged, and an evaluation has none."""
    _, said = measured
    text = " ".join(said.split())
    halves = r"[\d.]+ m?s \([\d.]+ m?s and [\d.]+ m?s by each half of the measurement alone\), of which ranks"
    assert len(re.findall(f"Predicted Over 1 Mbit/s, 1 ms between hosts, a step takes {halves}", text)) == 2
    assert "The limit is the link between hosts." in text
    assert text.count("fp16 It helps: ") == 2
    assert text.count("Memory A rank holds ") == 2


def test_a_saved_run_gives_the_same(measured: tuple[Path, str], capsys: Out) -> None:
    """Word for word, without another run."""
    file, said = measured
    command = [
        "explain",
        str(file),
        "--nnodes=2",
        "--link=1Mbit",
        "--latency=1ms",
        "--from",
        str(saved(file)),
    ]
    assert main(command) == 0
    found = capsys.readouterr()
    assert found.out == said
    assert not found.err


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["optimizer.sgd.lr=1", "stages=[{train: {steps: 5}}]"], None),
        (["model.mlp.hidden=[32]", "data.digits.held_out=0.5", "loss=mse"], "model, data, loss"),
        (["precision=bf16", "compile=true", "loader.batch_size=4"], "precision, compile, loader.batch_size"),
    ],
)
def test_a_saved_run_that_computed_something_else_is_named(
    measured: tuple[Path, str], capsys: Out, settings: list[str], names: str | None
) -> None:
    """In a warning; what changes no computation is not."""
    file, _ = measured
    run, loaded = saved(file), load(file, settings)
    assert list(cost_models_of_run(run, Links(), loaded))
    said = f"warning: {run} ran with other settings than {file} has ({names}): computation is predicted"
    assert (said in capsys.readouterr().err) == (names is not None)


def test_json_has_it_stage_by_stage(measured: tuple[Path, str], capsys: Out) -> None:
    """With a sweep: more hosts take no less time, and null where no steps are taken."""
    file, _ = measured
    command = ["explain", str(file), "--link=1Gbit", "--sweep=nnodes=1..5", "--from", str(saved(file))]
    assert main([*command, "--format=json"]) == 0
    stages: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["stages"]
    assert stages[2]["predicted"] is None
    for stage in stages[:2]:
        one = stage["predicted"]
        assert one["step_us"] >= one["exposed_us"] >= 0
        assert len(one["repeated_us"]) == 2
        assert one["limit"]
        assert [row["nnodes"] for row in one["sweep"]] == [1, 2, 4, 5]
        assert [row["ranks"] for row in one["sweep"]] == [2, 4, 8, 10]
        assert {hook["hook"] for hook in one["hooks"]} == {"fp16"}
        assert one["memory_bytes"]["weights"] == one["memory_bytes"]["gradients"] > 0
        assert [bucket["bucket"].split()[0] for bucket in one["buckets"]]
    assert main([*command]) == 0
    assert "Sweep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("busy", "own", "warned"),
    [(1.0, 0.8, "20%"), (1.0, 0.95, ""), (0.5, 0.1, "")],
    ids=["full of others' work", "full of its own", "half empty"],
)
def test_a_busy_machine_is_one_whose_cores_others_took(busy: float, own: float, warned: str) -> None:
    """Others' work matters where no core was left."""
    found = contention_warning(busy, own)
    assert (f"other processes took {warned} of its cores' time" in found) if warned else not found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--link=fast"], '--link or --latency: "fast" is not a rate; write 100Mbit'),
        (["--from=.", "--from-link=abc"], '--from-link or --from-latency: "abc" is not a rate'),
        (["--latency=8"], "is not a time; write 5us"),
        (["--link=within=1Gbit,within=2Gbit"], 'must name "within" and "across"'),
        (
            ["--link=1Gbit", "--sweep=ranks=1..4"],
            "is not a range of 1 to 1,048,576 hosts; write nnodes=1..64",
        ),
        (["--link=1Gbit", "--sweep=nnodes=8..4"], "is not a range of 1 to 1,048,576 hosts"),
        (["--from-link=1Gbit"], "add --from"),
        (["--cores=4"], "--cores is for a prediction"),
        (["--link=1Gbit", "--from=nowhere"], "nowhere"),
        (["--link=1Gbit", "--from=."], "is not the folder of a run"),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, arguments: list[str], said: str
) -> None:
    """It says what is wrong, and what would do; nothing is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    assert main(["explain", "good.yaml", *arguments]) in (1, 2)
    found = capsys.readouterr()
    assert said in " ".join(found.err.split())
    assert "Traceback" not in found.err
    assert not (tmp_path / "runs").exists()


FAILS = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == 100:
            raise ValueError("sample 100 is torn")
        return torch.zeros(64), 0
"""


def test_a_short_run_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The first batch is fine, a later one is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.py").write_text(FAILS)
    text = GOOD.replace("data: digits", "data: torn.Data").replace("  - evaluate\n", "")
    (tmp_path / "good.yaml").write_text(text.replace("batch_size: 8", "batch_size: 8, shuffle: false"))
    assert main(["explain", "good.yaml", "--link=1Gbit"]) == 1
    error = capsys.readouterr().err
    assert "warning: a link between hosts has no effect, since there is one host" in error
    assert "the short run in runs/explain/" in error
    assert "failed with exit code 1" in error
    assert "sample 100 is torn" in error
