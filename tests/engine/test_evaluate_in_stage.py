"""Evaluations inside a stage: they change no bit of training, and all ranks go by what they measure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddprun.checkpoint import folder as checkpoints
from ddprun.config import load
from ddprun.config.stages import MonitoredMetric
from ddprun.engine.save import read_saved_step
from tests.checkpoint.runs import CNN, COMPARED, MLP, MODULE, final, told
from tests.engine.running import events, run_pipeline, summary, weights
from tests.ranks import ddprun

MORE = """

class HeldOut(Samples):
    \"\"\"Draws from the generator that training draws from.\"\"\"

    def __init__(self):
        super().__init__()
        self.kill = None

    def __len__(self):
        return 13


class Blocking(Samples):
    def __getitem__(self, index):
        Path("run/best.safetensors").mkdir(exist_ok=True)
        return super().__getitem__(index)


class Centred(torch.nn.Module):
    \"\"\"Moves a buffer in every forward pass, and draws from the generator that training draws from.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("centre", torch.zeros(10))

    def forward(self, inputs):
        output = self.layer(inputs.flatten(1)) - self.centre + torch.randn(10)
        self.centre.lerp_(output.detach().mean(0), 0.1)
        return output


def flat(output, target):
    return 1.0


def never_a_number(output, target):
    return float("nan")
"""
PIPELINE = """
model: MODEL
data: {train: samples.Samples, evaluate: samples.HeldOut}
loader: {batch_size: 2}
optimizer: {adamw: {lr: 0.01}}
schedule: {OneCycleLR: {max_lr: 0.02}}
warmup_steps: 3
hooks: HOOKS
sync: SYNC
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 14MORE}
"""
HIERARCHICAL = "{hierarchical_sgd: {within: 2, across: 4, hosts: 2}}"


def run(folder: Path, more: str, ranks: int, *, sync: str, hooks: str = "[]", model: str = MLP) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "samples.py").write_text(MODULE + MORE)
    text = PIPELINE.replace("MODEL", model).replace("HOOKS", hooks).replace("SYNC", sync)
    return run_pipeline(folder, text.replace("MORE", more), ranks)


def evaluated(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in events(run_dir) if event["event"] == "evaluated"]


@pytest.mark.parametrize(
    ("sync", "hooks", "model", "ranks"),
    [
        ("every_step", "[int8]", CNN, 2),
        ("{local_sgd: {every: 4}}", "[{topk: {density: 0.1}}]", CNN, 2),
        ("{diloco: {every: 4, fragments: 2, overlap_steps: 3}}", "[int8]", MLP, 3),
        (HIERARCHICAL, "[]", MLP, 4),
    ],
)
def test_it_changes_no_bit_of_training(tmp_path: Path, sync: str, hooks: str, model: str, ranks: int) -> None:
    """Weights, optimizer, hooks, buffers, generators and the position in the data of every rank are those of
    the run without, in the middle of a round and with an exchange under way, too; and so is every loss.
    """
    plain = run(tmp_path / "plain", "", ranks, sync=sync, hooks=hooks, model=model)
    more = ", evaluate: {every: 2, metrics: [accuracy]}, keep_best: {metric: loss}"
    watched = run(tmp_path / "watched", more, ranks, sync=sync, hooks=hooks, model=model)
    assert [one["step"] for one in evaluated(watched)] == [2, 4, 6, 8, 10, 12, 14]
    assert final(watched) == final(plain)
    assert told(watched) == told(plain)
    assert (watched / "best.safetensors").exists()
    assert (watched / "best.safetensors.yaml").exists()


def test_an_evaluate_stage_changes_no_bit_of_training(tmp_path: Path) -> None:
    """Not even one of a buffer, such as DINO's centre, that the model moves in evaluation mode, too."""
    (tmp_path / "samples.py").write_text(MODULE + MORE)
    head, _, _ = PIPELINE.replace("MODEL", "samples.Centred").partition("schedule")
    stages = "stages: [train: {steps: 3}, evaluate, train: {steps: 3}, save]\n"
    watched = weights(run_pipeline(tmp_path, head + stages, 2, "watched"))
    plain = weights(run_pipeline(tmp_path, head + stages.replace("evaluate, ", ""), 2, "plain"))
    assert all(torch.equal(value, watched[name]) for name, value in plain.items())


@pytest.mark.parametrize("stages", ["train: {steps: 6, evaluate: {every: 2}}", "train: {steps: 6}, evaluate"])
def test_ranks_that_measure_with_buffers_of_their_own_are_told_once(stages: str, tmp_path: Path) -> None:
    """In a stage, and by a stage: the figure is of no one model, and the file that is saved is rank 0's."""
    (tmp_path / "p.yaml").write_text(f"""
model: cnn
data: digits
loader: {{batch_size: 8}}
optimizer: {{sgd: {{lr: 0.1}}}}
buffers: never
stages: [{stages}, save]
""")
    said = ddprun("p.yaml", "--nproc-per-node=2", cwd=tmp_path).stderr
    differ = "buffers differ between ranks (buffers: never)"
    assert said.count(f"evaluate: {differ}: each rank measures with its own") == 1, said
    assert said.count(f"save: {differ}: rank 0's are saved") == 1


@pytest.mark.parametrize(
    ("sync", "ranks"),
    [("{local_sgd: {every: 50}}", 2), ("{hierarchical_sgd: {within: 2, across: 50, hosts: 2}}", 4)],
)
def test_it_measures_what_an_evaluate_stage_would(tmp_path: Path, sync: str, ranks: int) -> None:
    """In the middle of a round the mean of the ranks' parameters, and at the stage's end the same bits."""
    text = """
model: cnn
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.5}}
sync: SYNC
stages:
  - train: {steps: STEPS, evaluate: {every: 6}}
  - evaluate
"""
    text = text.replace("SYNC", sync)
    middle, end = evaluated(run_pipeline(tmp_path, text.replace("STEPS", "9"), ranks, "long"))[:2]
    short = evaluated(run_pipeline(tmp_path, text.replace("STEPS", "6"), ranks, "short"))
    assert [one["step"] for one in short] == [6, 6]
    assert short[0]["loss"] == short[1]["loss"]
    assert middle["step"] == 6
    assert middle["loss"] == pytest.approx(short[1]["loss"], rel=1e-5)
    assert end["loss"] != middle["loss"]


STOPPED = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: {train: samples.Samples, evaluate: samples.HeldOut}
loader: {batch_size: 2}
optimizer: {adamw: {lr: 0.01}}
sync: {local_sgd: {every: 4}}
checkpoint: {every: 3, keep: 2}
stages:
  - train:
      steps: 60
      evaluate: {every: 5, metrics: [samples.flat]}
      keep_best: {metric: loss}
      stop: {metric: flat, mode: max, patience: 4}
"""


def launch(folder: Path, text: str, ranks: int, kill: str = "", code: int = 0) -> Path:
    """Run it, or resume it, by the command."""
    folder.mkdir(exist_ok=True)
    (folder / "samples.py").write_text(MODULE + MORE)
    (folder / "p.yaml").write_text(text)
    (folder / "kill").unlink(missing_ok=True)
    if kill:
        (folder / "kill").write_text(kill)
    done = ddprun("p.yaml", "--run-dir=run", "--or-resume", f"--nproc-per-node={ranks}", cwd=folder)
    assert done.code == code, done.stderr
    return folder / "run"


def test_best_and_early_stop_are_agreed_and_survive_a_kill(tmp_path: Path) -> None:
    """Four ranks; one is killed between two evaluations, while there is no improvement."""
    whole = launch(tmp_path / "whole", STOPPED, 4)
    found = summary(whole)
    (stage,) = found["stages"]
    assert stage["stopped_early"]
    assert stage["best"] == {"metric": "flat", "value": 1.0, "step": 5}
    assert (found["steps"], stage["steps"]) == (25, 25), "four evaluations after the first, at step 5"
    losses = {one["step"]: one["loss"] for one in evaluated(whole)}
    assert list(losses) == [5, 10, 15, 20, 25]
    assert found["best"]["value"] == min(losses.values()) == losses[found["best"]["step"]]
    (stopped,) = [event for event in events(whole) if event["event"] == "stopped_early"]
    assert (stopped["stage"], stopped["step"], stopped["best_step"]) == (0, 25, 5)
    newest = max((whole / "checkpoints").glob("step-*"))
    states = [json.loads((newest / f"rank-{rank:05}.json").read_text()) for rank in range(4)]
    assert all("results" in state for state in states)
    assert len({json.dumps(state["results"]) for state in states}) == 1

    broken = tmp_path / "broken"
    launch(broken, STOPPED, 4, kill="2 36", code=1)
    assert checkpoints.steps_in(broken / "run" / "checkpoints")[0] in (12, 15, 18)
    assert final(launch(broken, STOPPED, 4)) == final(whole)
    again = summary(broken / "run")
    assert again["stages"][0]["steps"] == 25
    assert [again[key] for key in ("best", "metrics", "steps")] == [
        found[key] for key in ("best", "metrics", "steps")
    ]
    best = [
        {name: value.tolist() for name, value in load_file(path / "best.safetensors").items()}
        for path in (whole, broken / "run")
    ]
    assert best[0] == best[1]
    launch(broken, STOPPED, 4)
    assert summary(broken / "run")["steps"] == 25, "a stage that has stopped early does not go on"


@pytest.mark.parametrize("before", ["flat", "never_a_number"])
def test_a_resumed_stage_that_stops_by_another_metric_begins_to_count_anew(
    tmp_path: Path, before: str
) -> None:
    """The first has not improved for as long as `patience` allows; the run then goes by the loss."""
    text = STOPPED.replace("steps: 60", "steps: 10").replace("patience: 4", "patience: 1")
    text = text.replace("flat", before)
    launch(tmp_path, text, 2)
    text = text.replace("steps: 10", "steps: 15").replace(
        f"{{metric: {before}, mode: max", "{metric: loss, mode: min"
    )
    (stage,) = summary(launch(tmp_path, text, 2))["stages"]
    assert (stage["steps"], stage["best"]["metric"]) == (15, "loss")


def test_an_interrupted_run_measures_what_is_owed(tmp_path: Path) -> None:
    """A stop comes before the evaluation of its step, which the resumed run makes up for."""
    text = (
        STOPPED.replace("steps: 60", "steps: 12")
        .replace("every: 5", "every: 1")
        .replace("every: 4", "every: 1")
    )
    text = text.replace("patience: 4", "patience: 40").replace("every: 3", "every: 0")
    launch(tmp_path, text, 2, kill=f"0 {16 + COMPARED} 2", code=130)
    interrupted = summary(tmp_path / "run")
    assert interrupted["status"] == "interrupted"
    assert evaluated(tmp_path / "run")[-1]["step"] < interrupted["steps"] < 12
    launch(tmp_path, text, 2)
    assert [one["step"] for one in evaluated(tmp_path / "run")] == list(range(1, 13))


def test_the_best_of_steps_that_are_taken_again_is_not_kept(tmp_path: Path) -> None:
    """A run is killed after its best evaluation, then goes on from before it at another rate."""
    text = STOPPED.replace("every: 3", "every: 8").replace("steps: 60", "steps: 15")
    run_dir = launch(tmp_path, text, 2, kill="1 27", code=1)
    assert read_saved_step(run_dir, "best.safetensors") == 10
    assert checkpoints.steps_in(run_dir / "checkpoints") == [8]
    launch(tmp_path, text.replace("lr: 0.01", "lr: 10.0"), 2)
    (removed,) = [event for event in events(run_dir) if event["event"] == "best_removed"]
    assert removed["step"] == 10
    losses = {one["step"]: one["loss"] for one in evaluated(run_dir)}
    best = summary(run_dir)["best"]
    assert losses[5] < best["value"] == losses[best["step"]], "that of step 5 was overwritten"
    assert read_saved_step(run_dir, "best.safetensors") == best["step"]


def test_a_best_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    """A folder stands in the file's place: the event says so, and the summary knows of no best."""
    text = STOPPED.replace("train: samples.Samples", "train: samples.Blocking").replace(
        "steps: 60", "steps: 10"
    )
    run_dir = launch(tmp_path, text, 2)
    failed = [event for event in events(run_dir) if event["event"] == "best_not_kept"]
    assert failed
    assert "directory" in failed[0]["reason"]
    assert summary(run_dir)["best"] is None
    assert not list(run_dir.glob(".best*")), "nothing unfinished is left"


def test_what_is_better() -> None:
    """By the metric's own direction, by more than is asked for, and never by what is not a number."""
    loss, accuracy = MonitoredMetric(metric="loss"), MonitoredMetric(metric="accuracy")
    assert loss.improves(0.4, 0.5)
    assert not loss.improves(0.5, 0.5)
    assert not loss.improves(0.45, 0.5, by=0.1)
    assert accuracy.improves(0.5, 0.4)
    assert not accuracy.improves(0.5, 0.4, by=0.1 + 1e-9)
    assert MonitoredMetric(metric="accuracy", mode="min").improves(0.4, 0.5)
    assert loss.improves(3.0, None)
    assert not any(loss.improves(value, None) for value in (float("nan"), float("inf")))


def test_a_pipeline_with_all_of_it_reads_back(tmp_path: Path) -> None:
    """`check --resolved` is a pipeline again."""
    (tmp_path / "p.yaml").write_text(STOPPED.replace("samples.", "mylab."))
    loaded = load(tmp_path / "p.yaml")
    (tmp_path / "again.yaml").write_text(loaded.resolved_yaml())
    assert load(tmp_path / "again.yaml").as_dict() == loaded.as_dict()


def test_the_screen_says_what_did_not_improve_by_how_much(tmp_path: Path) -> None:
    """Beside a table with an evaluation that was better, by less than `min_delta`."""
    text = STOPPED.replace("metric: flat", "metric: loss, min_delta: 100")
    (tmp_path / "samples.py").write_text(MODULE + MORE)
    (tmp_path / "p.yaml").write_text(text)
    done = ddprun("p.yaml", "--run-dir=run", cwd=tmp_path)
    (event,) = [event for event in events(tmp_path / "run") if event["event"] == "stopped_early"]
    assert summary(tmp_path / "run")["best"]["step"] > event["best_step"]
    shown = f"loss has not improved by more than 100 since step {event['best_step']} ({event['best']:.4f})"
    assert shown in done.stderr


def test_a_stage_that_changes_no_weights_measures_them_again(tmp_path: Path) -> None:
    """Its ranks exchange nothing but control messages."""
    text = "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\noptimizer: {sgd: {lr: 0.1}}\n"
    run_dir = run_pipeline(tmp_path, f"{text}stages: [forward: {{steps: 4, evaluate: {{every: 2}}}}]\n", 2)
    found = [(one["step"], one["loss"]) for one in events(run_dir) if one["event"] == "evaluated"]
    assert found == [(2, found[0][1]), (4, found[0][1])]
