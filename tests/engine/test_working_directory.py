"""Runs whose own code changes the working directory: what they leave lies where it would lie otherwise."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from ddprun.checkpoint.folder import steps_in
from ddprun.cli import main
from tests.engine.running import events, lines, summary
from tests.ranks import ddprun

MODULE = """
import os
import time
from pathlib import Path

import torch

WHEN = Path("when").read_text()
ELSEWHERE = Path("elsewhere").absolute()
HERE = os.getcwd()
if WHEN == "import":
    os.chdir(ELSEWHERE)


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        if WHEN == "build":
            os.chdir(ELSEWHERE)

    def forward(self, inputs):
        if WHEN == "forward":
            os.chdir(ELSEWHERE)
            time.sleep(0.03)  # threads write meanwhile
            os.chdir(HERE)
        return super().forward(inputs)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), index / 64), index % 2
"""
PIPELINE = """
model: moving.Net
data: {train: moving.Samples, evaluate: moving.Samples}
loader: {batch_size: 2, workers: WORKERS}
optimizer: {sgd: {lr: 0.1}}
checkpoint: {every: 2, keep: 20}
timings: {profile: [3, 4]}
track: TRACK
stages:
  - train: {steps: 12, evaluate: {every: 3}, keep_best: {metric: loss}}
  - save: {to: kept/net.safetensors}
"""
TRACKERS = {
    "tensorboard": "tensorboard",
    "{wandb: {mode: offline}}": "wandb",
    "prometheus": "prometheus_client",
    "{mlflow: {tracking_uri: 'file:mlflow'}}": "mlflow",
}


def prepare(folder: Path, when: str, workers: int = 0, track: str = "[]") -> dict[str, str]:
    """A pipeline in a folder; gives the variables of its runs."""
    (folder / "moving.py").write_text(MODULE)
    (folder / "when").write_text(when)
    (folder / "p.yaml").write_text(PIPELINE.replace("WORKERS", str(workers)).replace("TRACK", track))
    for name in ("elsewhere", "tmp"):
        (folder / name).mkdir()
    return {"TMPDIR": "tmp", "MLFLOW_ALLOW_FILE_STORE": "true"}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check(folder: Path, shown: Path) -> None:
    """All of a run is in its folder, which messages show as it was given, and nothing of it elsewhere."""
    run_dir = folder / shown
    assert files(folder / "elsewhere") == set()
    written = [one for one in events(run_dir) if one["event"] == "checkpoint_written"]
    assert {*steps_in(run_dir / "checkpoints")} == {one["step"] for one in written} >= {12}
    assert all(one["folder"] == f"{shown}/checkpoints/step-{one['step']:08}" for one in written)
    assert len(lines(run_dir, "steps")) == 2 * 12
    assert {line["step"] for line in lines(run_dir, "profile")} <= {3, 4}
    assert summary(run_dir)["status"] == "done"
    names = {"best.safetensors", "kept/net.safetensors", "events.jsonl", "profile/rank-00001.jsonl"}
    assert names <= files(run_dir)


@pytest.mark.parametrize(("when", "workers"), [("import", 0), ("build", 1), ("forward", 0)])
def test_a_run_stays_in_its_folder(tmp_path: Path, when: str, workers: int) -> None:
    """Wherever its code goes, for good or for a moment, with a relative TMPDIR; and so when it is resumed.
    Messages name the folder as it was given.
    """
    track = [one for one, needs in TRACKERS.items() if when == "import" and importlib.util.find_spec(needs)]
    environment = prepare(tmp_path, when, workers, f"[{', '.join(track)}]")
    run = ("p.yaml", "--run-dir=run", "--nproc-per-node=2")
    done = ddprun(*run, "--set", "stages[0].train.steps=7", cwd=tmp_path, environment=environment)
    assert done.code == 0, done.stderr
    assert done.stdout == "run\n"
    assert "save: run/kept/net.safetensors" in done.stderr
    done = ddprun("resume", "run", "--set", "stages[0].train.steps=12", cwd=tmp_path, environment=environment)
    assert done.code == 0, done.stderr
    assert "resuming after step 7 from run/checkpoints/step-00000007" in done.stderr
    check(tmp_path, Path("run"))
    found = files(tmp_path)
    for one, name in (("tensorboard", "run/tensorboard/"), ("prometheus", "run/metrics.prom")):
        assert one not in track or any(path.startswith(name) for path in found)
    for one, name in (("wandb", "run/wandb/"), ("mlflow", "mlflow/")):
        assert not any(one in given for given in track) or any(path.startswith(name) for path in found)


def test_a_new_folder_is_below_where_the_run_was_started(tmp_path: Path) -> None:
    """`runs/p/…`, as the last line says."""
    environment = prepare(tmp_path, "import")
    done = ddprun("p.yaml", "--nproc-per-node=2", cwd=tmp_path, environment=environment)
    assert done.code == 0, done.stderr
    assert done.run_dir.parts[:2] == ("runs", "p")
    check(tmp_path, done.run_dir)


@pytest.mark.parametrize("variable", ["TMPDIR", "TORCHELASTIC_ERROR_FILE"])
def test_folders_of_the_environment_are_absolute_from_the_first_line_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """So that children, and libraries that ask later, mean the same ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "some/where")
    assert main(["--version"]) == 0
    assert os.environ[variable] == str(tmp_path / "some/where")


def test_explain_measures_where_it_was_started(tmp_path: Path) -> None:
    """Though it has built the model itself, whose code has left the folder."""
    environment = prepare(tmp_path, "import")
    words = ("explain", "p.yaml", "--link=1Gbit", "--nnodes=2", "--nproc-per-node=1", "--format=json")
    done = ddprun(*words, cwd=tmp_path, environment=environment)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["stages"][0]["predicted"]
    assert os.listdir(tmp_path / "runs/explain")
    assert files(tmp_path / "elsewhere") == set()
