"""How often an evaluation comes, how long it is, and that it ends where a rank is asked to stop."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.explain.explain import explain
from tests.engine.running import events, run_pipeline, run_to_end, summary
from tests.ranks import Running, ddprun

MODULE = """
import itertools
import time
from pathlib import Path

import torch


class Samples(torch.utils.data.Dataset):
    def __init__(self, size=22):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


class Slow(Samples):
    def __init__(self, size=4000):
        super().__init__(size)
        self.asked = 0

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == 100 and not Path("quick").exists():  # after what is read before step 1
            Path("evaluates").touch()
        if not Path("quick").exists():
            time.sleep(0.01)
        return super().__getitem__(index)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Samples()[index] for index in itertools.count())
"""
PIPELINE = """
model: {mlp: {inputs: 6, outputs: 3}}
data: {train: lengths_data.Samples, evaluate: HELD_OUT}
loader: {batch_size: 4}
optimizer: {sgd: {lr: 0.1, momentum: 0.9}}
stages: STAGES
"""


def written(folder: Path, held_out: str, stages: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "lengths_data.py").write_text(MODULE)
    return PIPELINE.replace("HELD_OUT", held_out).replace("STAGES", stages)


def evaluated(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in events(run_dir) if event["event"] == "evaluated"]


@pytest.mark.parametrize(("length", "steps"), [("epochs: 3", [3, 6, 9]), ("steps: 8", [3, 6, 8])])
def test_every_epoch(tmp_path: Path, length: str, steps: list[int]) -> None:
    """An epoch of 22 samples is 3 steps of 2 ranks with batches of 4; `explain` says as many."""
    text = written(tmp_path, "lengths_data.Samples", f"[{{train: {{{length}, evaluate: {{every: epoch}}}}}}]")
    assert [one["step"] for one in evaluated(run_pipeline(tmp_path, text, 2))] == steps
    (stage,) = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    assert sum(one.times for one in stage.evaluations) == len(steps)


def test_an_epoch_that_an_earlier_stage_began_ends_where_it_would(tmp_path: Path) -> None:
    """In the run and in `explain`; a stage that counts epochs begins one."""
    steps = "{train: {steps: 4}}, {train: {steps: 6, evaluate: {every: epoch}}}"
    epochs = "{train: {steps: 1}}, {train: {epochs: 2, evaluate: {every: epoch}}}"
    text = written(tmp_path, "lengths_data.Samples", f"[{steps}, {epochs}]")
    assert [one["step"] for one in evaluated(run_pipeline(tmp_path, text, 2))] == [6, 9, 10, 14, 17]
    stages = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2).stages
    assert [sum(one.times for one in stage.evaluations) for stage in stages] == [0, 3, 0, 2]


def test_so_many_steps_of_a_stream_without_an_end(tmp_path: Path) -> None:
    """In an evaluate stage and in a train stage; of map-style data, too."""
    inside = "{train: {steps: 4, evaluate: {every: 2, steps: 3}}}"
    for name, held_out in (("stream", "lengths_data.Endless"), ("map", "lengths_data.Samples")):
        text = written(tmp_path / name, held_out, f"[{inside}, {{evaluate: {{steps: 2}}}}]")
        run = run_pipeline(tmp_path / name, text, 2)
        assert len(evaluated(run)) == 3
        assert summary(run)["stages"][1]["samples"] == 2 * 2 * 4


def test_the_epochs_of_a_stream_are_not_known(tmp_path: Path) -> None:
    text = written(tmp_path, "lengths_data.Samples", "[{train: {steps: 4, evaluate: {every: epoch}}}]")
    text = text.replace("train: lengths_data.Samples", "train: lengths_data.Endless").replace(
        "4}", "4, shuffle: false}"
    )
    codes, said = run_to_end(tmp_path, text)
    assert codes == [EXIT_BAD_INPUT] * 2, said
    assert "stages[0].train.evaluate.every: the end of an epoch of iterable data is not known before" in said


@pytest.mark.parametrize(
    "stages",
    [
        "[{train: {steps: 4}}, {evaluate: {metrics: [accuracy]}}, save]",
        "[{train: {steps: 4, evaluate: {every: 2}}}, save]",
    ],
)
def test_a_stop_in_an_evaluation(tmp_path: Path, stages: str) -> None:
    """All ranks leave it, with a checkpoint; the resumed run makes up for it and ends with the same bits."""
    stop_and_resume(tmp_path, written(tmp_path, "lengths_data.Slow", stages))


def test_a_stop_in_a_stages_last_evaluation_waits_for_its_end(tmp_path: Path) -> None:
    """The stage is complete then: the resumed run does not measure it again."""
    stages = "[{train: {steps: 4, evaluate: {every: 9}}}, {train: {steps: 2}}, save]"
    stop_and_resume(tmp_path, written(tmp_path, "{lengths_data.Slow: {size: 1000}}", stages), evaluations=1)


def stop_and_resume(folder: Path, text: str, evaluations: int = 0) -> None:
    """Stop a run in its first evaluation, and resume it: as many `evaluations` it has when it stops."""
    (folder / "p.yaml").write_text(text)
    arguments = ("p.yaml", "--run-dir=run", "--or-resume", "--nproc-per-node=2")
    with Running(*arguments, cwd=folder) as running:
        until = time.monotonic() + 60
        while not (folder / "evaluates").exists() and time.monotonic() < until:
            time.sleep(0.05)
        running.process.send_signal(signal.SIGINT)
        done = running.wait(60)
    assert done.code == 130, done.stderr
    assert summary(folder / "run")["status"] == "interrupted"
    assert len(evaluated(folder / "run")) == evaluations
    (folder / "quick").touch()
    again = ddprun(*arguments, cwd=folder)
    assert again.code == 0, again.stderr
    whole = ddprun("p.yaml", "--run-dir=whole", "--nproc-per-node=2", cwd=folder)
    assert whole.code == 0, whole.stderr
    ours, theirs = (folder / name / "model.safetensors" for name in ("run", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()
    measured = [
        [{key: one[key] for key in ("stage", "step", "loss")} for one in evaluated(folder / name)]
        for name in ("run", "whole")
    ]
    assert measured[0] == measured[1]
    assert measured[0]
