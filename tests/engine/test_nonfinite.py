"""Runs whose losses or weights are not finite any more: said once, ended or not, and what is kept."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint import folder as checkpoints
from ddprun.config import load
from ddprun.engine.worker import run_worker
from tests.ranks import as_processes, ddprun

MODULE = """
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset


class Samples(Dataset):
    '''Sample `bad` is NaN, unless the data has been mended; `stops` asks the run to stop, once.'''

    def __init__(self, bad=-1, scale=1.0, ignored=False, stops=-1):
        self.bad = -1 if Path("mended").exists() else bad
        self.scale, self.ignored, self.stops = scale, ignored, stops

    def __len__(self):
        return 64

    def __getitem__(self, place):
        numbers = self.scale * torch.randn(4, generator=torch.Generator().manual_seed(place))
        if place == self.bad:
            numbers[0] = float("nan")
        if place == self.stops and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        label = -100 if self.ignored and 8 <= place < 16 else place % 2
        return numbers, label


class Masked(nn.Module):
    '''Has a parameter that is infinite by design.'''

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.mask = nn.Parameter(torch.tensor([0.0, float("-inf")]))

    def forward(self, numbers):
        return self.layer(numbers) + self.mask.exp()
"""
PIPELINE = """
model: MODEL
data: {train: {mine.Samples: {DATA}}, evaluate: mine.Samples}
loader: {batch_size: 2, shuffle: false}
optimizer: {sgd: {lr: LR}}
checkpoint: {every: 2, keep: 1}
timings: {every: 1}
MORE
stages:
  - train: {steps: STEPS}
"""
MLP = "{mlp: {inputs: 4, hidden: [8], outputs: 2}}"


def prepare(folder: Path, **words: str) -> None:
    known = {"MODEL": MLP, "DATA": "", "LR": "0.1", "MORE": "", "STEPS": "12"} | words
    text = PIPELINE
    for word, value in known.items():
        text = text.replace(word, value)
    (folder / "mine.py").write_text(MODULE)
    (folder / "p.yaml").write_text(text)


def run(folder: Path, ranks: int = 2, *, resuming: bool = False) -> tuple[list[int], str]:
    """Run it; gives the exit codes, and what it said."""
    (folder / "said").unlink(missing_ok=True)
    codes = as_processes(ranks, as_rank, resuming, cwd=folder)
    return codes, (folder / "said").read_text()


def as_rank(resuming: bool) -> int:
    os.dup2(os.open("said", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    return run_worker(load(Path("p.yaml")), Path("run"), resuming="yes" if resuming else "no")


def strict(text: str) -> Any:
    """JSON that has nothing but JSON in it."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = strict((folder / "run/summary.json").read_text())
    return found


def found(folder: Path) -> list[dict[str, Any]]:
    """The events that tell of it; every file is strict JSON."""
    for file in (folder / "run").rglob("*.json*"):
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            strict(line)
    told = map(strict, (folder / "run/events.jsonl").read_text().splitlines())
    return [event for event in told if event["event"] == "nonfinite"]


def kept(folder: Path) -> dict[int, str | None]:
    """The checkpoints, and what in each is not finite."""
    root = folder / "run/checkpoints"
    return {step: checkpoints.open_checkpoint(root, step).nonfinite for step in checkpoints.steps_in(root)}


@pytest.mark.parametrize(
    "sync",
    [
        "every_step",
        "{local_sgd: {every: 4}}",
        "{diloco: {every: 4, fragments: 2, overlap_steps: 1}}",
        "{hierarchical_sgd: {across: 4, hosts: 2}}",
        "independent",
    ],
)
def test_a_run_whose_weights_are_lost_fails(tmp_path: Path, sync: str) -> None:
    """Whatever the policy: said once with step, rank and parameter; the ranks end together with code 1."""
    prepare(tmp_path, DATA="bad: 10", MORE=f"sync: {sync}")
    codes, said = run(tmp_path)
    assert codes == [1, 1]
    (event,) = found(tmp_path)
    # Micro-batches of 2 on 2 ranks: sample 10 is in that of step 3, and comes to rank 0.
    assert (event["step"], event["rank"], event["value"]) == (3, 0, "nan")
    assert event["parameter"] == "1.weight"
    assert (
        said.count("step 3: the loss of rank 0 is nan; 1.weight is the first parameter that is not finite")
        == 1
    )
    told = summary(tmp_path)
    assert told["status"] == "failed"
    assert told["nonfinite"] == {"step": 3, "rank": 0, "value": "nan", "parameter": "1.weight"}
    assert "1.weight is no longer finite, and on_nan is stop" in told["error"]["message"]
    assert "ddprun: the run failed (stages[0].train, step" in said
    assert "Traceback" not in said


def test_a_failed_run_goes_on_from_its_last_finite_checkpoint(tmp_path: Path) -> None:
    """Which the message names, and later ones have not pushed out."""
    prepare(tmp_path, DATA="bad: 10")
    codes, said = run(tmp_path)
    assert codes == [1, 1]
    assert kept(tmp_path)[2] is None
    assert "from step 2, with a lower learning rate" in said
    (tmp_path / "mended").touch()
    codes, said = run(tmp_path, resuming=True)
    assert codes == [0, 0]
    assert "resuming after step 2 from" in said
    assert summary(tmp_path)["status"] == "done"
    assert summary(tmp_path)["steps"] == 12
    assert set(kept(tmp_path).values()) == {None}


def test_a_run_may_go_on_all_the_same(tmp_path: Path) -> None:
    """Said once; its checkpoints are marked, and the last finite one stays beside the newest."""
    prepare(tmp_path, DATA="bad: 10", MORE="on_nan: continue")
    with (tmp_path / "p.yaml").open("a") as file:
        print("  - evaluate: {metrics: [accuracy]}\n  - save", file=file)
    codes, said = run(tmp_path)
    assert codes == [0, 0]
    assert len(found(tmp_path)) == said.count("is the first parameter that is not finite") == 1
    told = summary(tmp_path)
    assert (told["status"], told["loss"], told["metrics"]["loss"]) == ("done", None, None)
    assert told["nonfinite"]["step"] == 3
    assert kept(tmp_path) == {12: "1.weight", 2: None}
    # From there it goes on as it is, or without what is not finite.
    codes, said = run(tmp_path, resuming=True)
    assert "using the checkpoint of step 12, though 1.weight is not finite in it" in said
    prepare(tmp_path, DATA="bad: 10", MORE="on_nan: stop")
    (tmp_path / "mended").touch()
    codes, said = run(tmp_path, resuming=True)
    assert codes == [0, 0]
    assert (
        "skipping the checkpoint of step 12: 1.weight is not finite in it "
        "(renamed to checkpoints/step-00000012.unused)" in said
    )
    assert "resuming after step 2 from" in said
    assert kept(tmp_path) == {12: None}


def test_a_stage_may_have_a_rule_of_its_own(tmp_path: Path) -> None:
    """Beside the pipeline's."""
    prepare(tmp_path, DATA="bad: 10, stops: 28", STEPS="12, on_nan: continue")
    codes, said = run(tmp_path)
    assert codes == [130, 130]
    newest = max(kept(tmp_path))
    assert kept(tmp_path)[newest] == "1.weight"
    codes, said = run(tmp_path, resuming=True)
    assert codes == [0, 0]
    assert f"using the checkpoint of step {newest}, though 1.weight is not finite in it" in said
    assert f"resuming after step {newest} from" in said
    # A later stage of the file that is resumed may say otherwise, and fails.
    prepare(tmp_path, DATA="bad: 10, stops: 28", STEPS="12, on_nan: continue")
    with (tmp_path / "p.yaml").open("a") as file:
        print("  - train: {steps: 2}", file=file)
    codes, said = run(tmp_path, resuming=True)
    assert codes == [1, 1]
    assert "using the checkpoint of step 12, though 1.weight is not finite in it" in said
    assert "1.weight is no longer finite, and on_nan is stop" in said
    # Where none says `continue`, it is left.
    prepare(tmp_path, DATA="bad: 10, stops: 28", MORE="on_nan: continue", STEPS="12, on_nan: stop")
    (tmp_path / "mended").touch()
    codes, said = run(tmp_path, resuming=True)
    assert codes == [0, 0]
    assert "skipping the checkpoint of step 12: 1.weight is not finite in it" in said
    assert "resuming after step 2 from" in said


def test_a_loss_alone_ends_nothing(tmp_path: Path) -> None:
    """A batch whose targets are all ignored has NaN for a mean, and no gradient: said, and trained on."""
    prepare(tmp_path, DATA="ignored: true")
    codes, said = run(tmp_path)
    assert codes == [0, 0]
    (event,) = found(tmp_path)
    assert (event["step"], event["rank"], event["parameter"]) == (3, 0, None)
    assert said.count("step 3: the loss of rank 0 is nan; all parameters are still finite") == 1
    assert summary(tmp_path)["status"] == "done"
    assert summary(tmp_path)["loss"] > 0
    assert kept(tmp_path) == {12: None}


def test_a_checkpoint_is_finite_if_only_its_last_loss_is_not(tmp_path: Path) -> None:
    """`resume` uses it, so a message that names the checkpoint to resume from must name this one."""
    prepare(tmp_path, DATA="ignored: true", STEPS="3")
    codes, _ = run(tmp_path)
    assert codes == [0, 0]
    assert summary(tmp_path)["loss"] is None
    assert kept(tmp_path) == {3: None}


def test_a_step_that_the_scaler_skips_ends_nothing(tmp_path: Path) -> None:
    """In fp16 a NaN sample is skipped on all ranks, and weights stay finite."""
    prepare(tmp_path, DATA="bad: 10", MORE="precision: fp16")
    codes, said = run(tmp_path)
    assert codes == [0, 0]
    assert "all parameters are still finite" in said
    assert summary(tmp_path)["status"] == "done"


def test_weights_that_the_last_step_loses(tmp_path: Path) -> None:
    """Every loss was finite, and the run fails all the same; nothing is saved after it."""
    prepare(tmp_path, LR="1.0e+38", STEPS="1", DATA="scale: 1.0e+3")
    codes, said = run(tmp_path)
    (event,) = found(tmp_path)
    assert codes == [1, 1]
    assert event["value"] is None
    assert "though every loss was" in said
    assert "no finite checkpoint is left" in said


def test_a_parameter_that_is_infinite_by_design_is_no_loss(tmp_path: Path) -> None:
    """It was so before the first step, in checkpoints too."""
    prepare(tmp_path, MODEL="mine.Masked")
    codes, _ = run(tmp_path)
    assert codes == [0, 0]
    assert not found(tmp_path)
    assert kept(tmp_path) == {12: None}


def test_a_launcher_does_not_start_the_ranks_again(tmp_path: Path) -> None:
    """The same steps would come to the same end; and it ends with code 1."""
    prepare(tmp_path, DATA="bad: 10")
    done = ddprun("p.yaml", "--nproc-per-node", "2", "--max-restarts", "2", cwd=tmp_path)
    assert done.code == 1
    assert done.stderr.count("ddprun: the run failed (") == 1
    assert "starting the ranks again" not in done.stderr


def test_pruning_keeps_the_last_finite_one(tmp_path: Path) -> None:
    """In addition to the newest `keep`, until there is a newer one."""
    files = {
        f"{name}.{kind}": checkpoints.FileRecord(bytes=2, sha256="0" * 64)
        for name in ("shared", "rank-00000")
        for kind in ("json", "safetensors")
    }

    def take(step: int, nonfinite: str | None) -> list[int]:
        unfinished = checkpoints.unfinished_checkpoint_path(tmp_path, step, "t")
        unfinished.mkdir(parents=True)
        for name in files:
            (unfinished / name).write_text("{}")
        path = tmp_path / checkpoints.checkpoint_name(step)
        checkpoint = checkpoints.Checkpoint(
            path=path, step=step, world_size=1, nonfinite=nonfinite, layout="", files=files
        )
        checkpoints.commit(unfinished, checkpoint, files)
        checkpoints.prune(tmp_path, 2)
        return checkpoints.steps_in(tmp_path)

    assert take(1, None) == [1]
    assert take(2, None) == [2, 1]
    assert take(3, "layer.weight") == [3, 2]
    assert take(4, "optimizer/state/0/exp_avg") == [4, 3, 2]
    assert take(5, "layer.weight") == [5, 4, 2]
    assert checkpoints.newest_finite_step(tmp_path) == 2
    assert take(6, None) == [6, 5]
