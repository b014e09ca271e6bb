"""One schedule for the run, the learning rates and norms that are recorded, and the weights' average."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.engine import build
from ddprun.engine.feeds import build_training_feeds
from ddprun.engine.optimizers import build_optimizer, settings_of_stages, try_schedules
from ddprun.engine.turns import build_turns
from tests.checkpoint.runs import MODULE, final
from tests.engine.running import events, lines, run_pipeline, run_to_end, summary
from tests.ranks import ddprun

BASE = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: digits
loader: {batch_size: 8}
"""


def rates(run_dir: Path) -> list[float]:
    """Rank 0's, of each step."""
    return [line["lr"][0] for line in lines(run_dir, "steps") if line["rank"] == 0 and line["lr"]]


STAGES = """
optimizer: {sgd: {lr: 0.1}}
schedule: {CosineAnnealingLR: {eta_min: 0.01}OVER}
warmup_steps: 3
stages:
  - train: {steps: 8}
  - forward: {steps: 2}
  - train: {epochs: 1}
  - evaluate
  - train: {steps: 6, sync: {local_sgd: {every: 4}}}
"""


def cosine(step: int, of: int) -> float:
    return 0.01 + 0.09 * (1 + math.cos(math.pi * step / of)) / 2


def test_one_cosine_spans_the_stages(tmp_path: Path) -> None:
    """And one warm-up; a forward stage without an update takes no part. Without `over` each has its own."""
    over = run_pipeline(tmp_path, BASE + STAGES.replace("OVER", ", over: run"), 2, "over")
    epoch = -(-1438 // 16)
    total = 8 + epoch + 6
    expected = [cosine(step, total) * min(1, (step + 1) / 3) for step in range(total)]
    assert rates(over) == pytest.approx(expected, rel=1e-9)
    assert summary(over)["steps"] == total + 2
    apart = run_pipeline(tmp_path, BASE + STAGES.replace("OVER", ""), 2, "apart")
    expected = [
        cosine(step, length) * min(1, (step + 1) / 3) for length in (8, epoch, 6) for step in range(length)
    ]
    assert rates(apart) == pytest.approx(expected, rel=1e-9)


KILLED = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: {train: samples.Samples, evaluate: samples.Samples}
loader: {batch_size: 2}
optimizer: {adamw: {lr: 0.01}}
schedule: {CosineAnnealingLR: {}, over: run}
warmup_steps: 2
ema: 0.9
sync: {local_sgd: {every: 4}}
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 7}
  - train: {steps: 12, evaluate: {every: 4}, keep_best: {metric: loss}}
  - save
"""


RESUMED = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: digits
loader: {batch_size: 32}
optimizer: {sgd: {lr: 0.1}}
checkpoint: {every: STEP, keep: 99}
"""
OF_STAGE = "schedule: {CosineAnnealingLR: {eta_min: 0.01}}\n"
OF_RUN = "schedule: {CosineAnnealingLR: {eta_min: 0.01}, over: run}\n"
BY_LOSS = "schedule: {ReduceLROnPlateau: {}}\n"
TWO_STAGES = "stages: [{train: {steps: 10}}, {train: {steps: 20}}]"
EVALUATING = "stages: [{train: {steps: 20, evaluate: {every: 5}}}]"
STOPPING = "evaluate: {every: 5}, stop: {metric: loss, min_delta: 99, patience: 1}"
EPOCH = -(-1438 // 32)  # steps of one rank


def resume_after(folder: Path, step: int, before: str, after: str, ranks: tuple[int, int] = (1, 1)) -> Path:
    """Run a pipeline, and go on with another from the checkpoint of a step."""
    base = RESUMED.replace("STEP", str(step))
    codes, told = run_to_end(folder, base + before, ranks[0])
    assert codes == [0] * ranks[0], told
    for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) != step:
            shutil.rmtree(checkpoint)
    codes, told = run_to_end(folder, base + after, ranks[1], resuming=True)
    assert codes == [0] * ranks[1], told
    return folder / "run"


def cosines(*parts: tuple[int, int, int]) -> list[float]:
    """From a step to another one of a cosine of a length."""
    return [cosine(step, of) for first, end, of in parts for step in range(first, end)]


@pytest.mark.parametrize(
    ("step", "before", "after", "expected"),
    [
        # The length of the run, of which some is done.
        (
            20,
            OF_RUN + "stages: [{train: {steps: 100}}, {train: {steps: 10}}]",
            OF_RUN + "stages: [{train: {steps: 4}}, {train: {steps: 10}}]",
            cosines((0, 20, 110), (20, 30, 30)),
        ),
        (
            15,
            OF_RUN + f"stages: [{{train: {{steps: 20, {STOPPING}}}}}, {{train: {{steps: 20}}}}]",
            OF_RUN + f"stages: [{{train: {{steps: 20, {STOPPING}}}}}, {{train: {{steps: 20}}}}]",
            cosines((0, 30, 40)),
        ),
        # Another schedule: of other steps, of none, of evaluations.
        (15, OF_STAGE + TWO_STAGES, OF_RUN + TWO_STAGES, cosines((0, 10, 10), (0, 5, 20), (15, 30, 30))),
        (15, OF_RUN + TWO_STAGES, OF_STAGE + TWO_STAGES, cosines((0, 15, 30), (5, 20, 20))),
        (12, EVALUATING, OF_STAGE + EVALUATING, [0.1] * 12 + cosines((12, 20, 20))),
        (12, BY_LOSS + EVALUATING, OF_STAGE + EVALUATING, [0.1] * 12 + cosines((12, 20, 20))),
        (
            20,
            BY_LOSS + EVALUATING,
            OF_RUN + EVALUATING.replace("]", ", {train: {steps: 10}}]"),
            [0.1] * 20 + cosines((20, 30, 30)),
        ),
        # Epochs in place of steps: of an epoch that was begun before the stage, what is left comes first.
        (
            15,
            OF_STAGE + TWO_STAGES,
            OF_STAGE + TWO_STAGES.replace("steps: 20", "epochs: 1"),
            cosines((0, 10, 10), (0, 5, 20), (5, 2 * EPOCH - 10, 2 * EPOCH - 10)),
        ),
        (
            EPOCH + 5,
            OF_STAGE + TWO_STAGES.replace("steps: 10", f"steps: {EPOCH}"),
            OF_STAGE + TWO_STAGES.replace("steps: 10", f"steps: {EPOCH}").replace("steps: 20", "epochs: 1"),
            cosines((0, EPOCH, EPOCH), (0, 5, 20), (5, EPOCH, EPOCH)),
        ),
    ],
)
def test_a_resumed_run_follows_a_schedule_by_the_steps_that_are_done(
    tmp_path: Path, step: int, before: str, after: str, expected: list[float]
) -> None:
    """Whatever the schedule was before, and however long the pipeline is now."""
    assert rates(resume_after(tmp_path, step, before, after)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("stages", "step", "length", "now"),
    [
        ("[{train: {epochs: 2}}]", 60, 2 * EPOCH, 75),
        ("[{train: {steps: 10}}, {train: {epochs: 1}}]", 5, 10 + EPOCH, 10 + 23),
    ],
)
def test_with_more_ranks_a_schedule_of_the_run_is_shorter(
    tmp_path: Path, stages: str, step: int, length: int, now: int
) -> None:
    """By the steps that are left, in this stage and in those that follow."""
    text = OF_RUN + f"stages: {stages}"
    run_dir = resume_after(tmp_path, step, text, text, (1, 2))
    assert rates(run_dir) == pytest.approx(cosines((0, step, length), (step, now, now)), rel=1e-9)


def test_a_warm_up_longer_than_a_stage_on_more_ranks_does_not_stop_a_resume(tmp_path: Path) -> None:
    """The stage was longer when the run began, which is when its warm-up is compared with it."""
    text = "warmup_steps: 30\nstages: [{train: {epochs: 1}}, {train: {epochs: 1}}]"
    run_dir = resume_after(tmp_path, 20, text, text, ranks=(1, 2))
    assert summary(run_dir)["status"] == "done"
    assert rates(run_dir)[-1] == pytest.approx(0.1 * -(-1438 // 64) / 30)


def test_a_chained_schedule_may_span_the_run(tmp_path: Path) -> None:
    """It is one of torch's that do not count their steps; the warm-up does without that, too."""
    (tmp_path / "own.py").write_text(CHAINED)
    text = "schedule: {own.chained: {}, over: run}\nwarmup_steps: 3\nstages: [{train: {steps: 10}}]"
    expected = [0.1 * 0.9**step * min(1, (step + 1) / 3) / (1 + (step < 4)) for step in range(10)]
    assert rates(resume_after(tmp_path, 6, text, text)) == pytest.approx(expected, rel=1e-9)


CHAINED = """
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR


def chained(optimizer):
    return ChainedScheduler([ConstantLR(optimizer, 0.5, 4), ExponentialLR(optimizer, 0.9)], optimizer)
"""


def test_a_schedule_by_a_metric_that_begins_anew_is_told(tmp_path: Path) -> None:
    """With other options of the optimizer. Without a change it goes on."""
    text = BY_LOSS + EVALUATING
    other = text.replace("steps: 20", "steps: 20, optimizer: {sgd: {lr: 0.1, weight_decay: 0.1}}")
    for after, times in ((text, 0), (other, 1)):
        folder = tmp_path / str(times)
        folder.mkdir()
        resume_after(folder, 12, text, after)
        told = (folder / "told").read_text()
        assert told.count("train: the schedule begins anew, at a learning rate of 0.1\n") == times


def test_a_lengthened_stage_has_stepped_by_its_last_evaluation(tmp_path: Path) -> None:
    """It goes on as if it had been as long from the start: the rates, and when evaluations stop it."""
    schedule = "schedule: {ReduceLROnPlateau: {patience: 0, factor: 0.5, threshold: 0.9}}\n"
    text = RESUMED.replace("STEP", "10") + schedule + EVALUATING.replace("evaluate: {every: 5}", STOPPING)
    for patience, reduced in ((3, [0.05] * 5 + [0.025] * 5), (1, [])):
        folder = tmp_path / str(patience)
        folder.mkdir()
        for steps in (10, 40):
            longer = text.replace("steps: 20", f"steps: {steps}")
            longer = longer.replace("patience: 1}", f"patience: {patience}}}")
            codes, told = run_to_end(folder, longer, 1, resuming=steps == 40)
            assert codes == [0], told
            (stage,) = summary(folder / "run")["stages"]
            assert stage["stopped_early"] is (steps == 40), "at its end, it has come to its end"
            stop = "train: stops after step"
            assert [line.split(": loss")[0] for line in told.splitlines() if stop in line] == (
                [f"{stop} {10 + len(reduced)}"] if steps == 40 else []
            )
        found = [event["step"] for event in events(folder / "run") if event["event"] == "stopped_early"]
        assert found == [10 + len(reduced)]
        assert rates(folder / "run") == [0.1] * 10 + reduced


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("pct_start: 0.1", "float division by zero"),
        ("total_steps: 5", "it ends after step 5 of 10, and torch refuses to go on"),
    ],
)
def test_a_schedule_that_torch_cannot_compute_is_named(tmp_path: Path, options: str, problem: str) -> None:
    """Before the stage's first step. Torch divides by the steps of the first phase, less one."""
    text = f"schedule: {{OneCycleLR: {{max_lr: 0.1, {options}}}}}\nstages: [{{train: {{steps: 10}}}}]\n"
    codes, told = run_to_end(tmp_path, RESUMED.replace("STEP", "5") + text, 1)
    assert codes == [EXIT_BAD_INPUT]
    assert f"schedule.OneCycleLR: {problem}" in told
    assert "Traceback" not in told


OWN_SCHEDULES = """
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau


def by_name(name, optimizer, length):
    return {"linear": LinearLR}[name](optimizer, total_iters=length)


def by_place(optimizer, /, length):
    return LinearLR(optimizer, total_iters=length)


class Follows(LRScheduler):
    \"\"\"By what steps leave in the optimizer, and with a hook on them.\"\"\"

    def __init__(self, optimizer):
        super().__init__(optimizer)
        optimizer.register_step_post_hook(lambda *_: None)

    def get_lr(self):
        norms = [float(one["exp_avg"].norm()) for one in self.optimizer.state.values()]
        return [0.1 / sum(norms) if self.last_epoch else 0.1]


class ByRatio(ReduceLROnPlateau):
    def step(self, metrics):
        super().step(1 / metrics)
"""
ALL_KINDS = """
model: {mlp: {inputs: 64, outputs: 10}}
data: digits
optimizer: {adamw: {lr: 0.1}}
stages:
  - train: {steps: 3, schedule: {OneCycleLR: {max_lr: 0.2}}}
  - train: {steps: 3, schedule: own_schedules.Follows}
  - train: {steps: 3, evaluate: {every: 1}, schedule: {own_schedules.ByRatio: {}, metric: loss}}
  - train: {steps: 3, schedule: {own_schedules.by_name: {name: linear, length: 3}}}
  - train: {steps: 3, schedule: {own_schedules.by_place: {length: 3}}}
"""


def test_schedules_that_are_tried_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before step 1, in the optimizer. Your own take no step: they may need what training leaves."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_schedules.py").write_text(OWN_SCHEDULES)
    (tmp_path / "p.yaml").write_text(ALL_KINDS)
    loaded = load(tmp_path / "p.yaml")
    model, (data, _) = build.build_model(loaded), build.build_datasets(loaded)
    turns, feeds = build_turns(loaded, model), build_training_feeds(loaded, data, rank=0, world_size=1)
    optimizer = build_optimizer(loaded, model, turns)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    settings = settings_of_stages(loaded, model, turns, optimizer)
    before = repr((vars(optimizer), settings))
    found = try_schedules(loaded, feeds, optimizer, settings)
    assert [schedule.last_epoch for schedule in found.values()] == [1, 0, 0, 0, 0]
    assert repr((vars(optimizer), settings)) == before


BY_METRIC = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: {train: samples.Samples, evaluate: samples.Samples}
loader: {batch_size: 2}
optimizer: {sgd: {lr: 0.2}}
schedule: {ReduceLROnPlateau: {patience: 0, factor: 0.5}, metric: accuracy}
warmup_steps: 2
checkpoint: {every: 3, keep: 2}
stages:
  - train: {steps: 24, evaluate: {every: 2, metrics: [accuracy]}}
  - save
"""


def test_a_schedule_by_a_metric_steps_after_evaluations(tmp_path: Path) -> None:
    """The rates are those that torch's own schedule gives for the measured values, the larger the better, and
    a run that was killed ends with the same bits.
    """
    whole = launch(tmp_path / "whole", text=BY_METRIC)
    measured = [one["accuracy"] for one in events(whole) if one["event"] == "evaluated"]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, factor=0.5)
    expected = []
    for value in measured:
        expected += 2 * [optimizer.param_groups[0]["lr"]]
        schedule.step(value)
    assert 2 < len(set(expected)) < 12, "some evaluations are better and some are not"
    expected[0] /= 2
    assert rates(whole) == expected
    sixth = 5 * (61 // 2) + 9  # sample that rank 1 reads for an evaluation: more than it reads for training
    launch(tmp_path / "broken", kill=f"1 {sixth}", text=BY_METRIC)
    broken = launch(tmp_path / "broken", text=BY_METRIC)
    (resumed,) = [one["step"] for one in events(broken) if one["event"] == "resumed"]
    assert resumed in (9, 12)
    assert final(broken) == final(whole)
    assert rates(broken) == rates(whole)


def launch(folder: Path, kill: str = "", text: str = KILLED, ranks: int = 2, own: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "samples.py").write_text(MODULE)
    (folder / "own.py").write_text(own)
    (folder / "p.yaml").write_text(text)
    (folder / "kill").unlink(missing_ok=True)
    if kill:
        (folder / "kill").write_text(kill)
    done = ddprun("p.yaml", "--run-dir=run", "--or-resume", f"--nproc-per-node={ranks}", cwd=folder)
    assert done.code == (1 if kill else 0), done.stderr
    return folder / "run"


def test_schedule_and_average_survive_a_kill(tmp_path: Path) -> None:
    """In the second stage, between two averages of local SGD: the same bits, and the same rates. A stage that
    is added, or made longer, goes on from where the schedule was, also after a resume that had nothing to do.
    """
    whole = launch(tmp_path / "whole")
    launch(tmp_path / "broken", kill=f"1 {2 * 14 + 1}")
    broken = launch(tmp_path / "broken")
    assert final(broken) == final(whole)
    for name in ("model.safetensors", "best.safetensors"):
        found = load_file(broken / name)
        assert found.keys() == load_file(whole / name).keys()
        assert all(torch.equal(found[key], value) for key, value in load_file(whole / name).items())
    assert rates(broken) == rates(whole)
    more, total = "", 19
    for steps in (5, 8):
        launch(tmp_path / "whole", text=KILLED + more)  # nothing is left to do
        more, before, total = f"  - train: {{steps: {steps}}}\n", total, 19 + steps
        launch(tmp_path / "whole", text=KILLED + more)
        expected = [0.01 * (1 + math.cos(math.pi * step / total)) / 2 for step in range(before, total)]
        assert rates(whole)[before:] == pytest.approx(expected, rel=1e-9)


def test_rates_that_numpy_computes_survive_a_kill(tmp_path: Path) -> None:
    """A checkpoint has them as Python's numbers: the same bits follow."""
    own = "import numpy, torch\n\n\ndef cosine(optimizer, steps):\n    return torch.optim.lr_scheduler."
    own += "LambdaLR(optimizer, lambda step: 0.5 * (1 + numpy.cos(numpy.pi * step / steps)))\n"
    text = KILLED.replace("{CosineAnnealingLR: {}, over: run}", "{own.cosine: {steps: 19}, over: run}")
    whole = launch(tmp_path / "whole", text=text, own=own)
    launch(tmp_path / "broken", kill=f"1 {2 * 14 + 1}", text=text, own=own)
    broken = launch(tmp_path / "broken", text=text, own=own)
    assert final(broken) == final(whole)
    assert rates(broken) == rates(whole)


def test_another_number_of_ranks_goes_on_with_the_mean_of_the_averages(tmp_path: Path) -> None:
    """Which is the average that the ranks would have saved."""
    launch(tmp_path, kill=f"1 {2 * 14 + 1}", ranks=3)
    run_dir = launch(tmp_path, ranks=2)
    assert summary(run_dir)["status"] == "done"
    assert all(tensor.isfinite().all() for tensor in load_file(run_dir / "model.safetensors").values())


OWN = """
import torch
from pathlib import Path


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(64, affine=False)

    def forward(self, x):
        return self.layer(self.norm(x.flatten(1)))
"""
AVERAGED = """
model: own.Weights
data: digits
loader: {batch_size: 8}
optimizer: {sgd: {lr: 0.5}}
PRECISION
stages:
"""


def test_it_is_torchs_average_of_what_is_trained(tmp_path: Path) -> None:
    """Saved bit for bit as `AveragedModel` has it, from the weights after each step; buffers are the model's.
    Training goes on with its own weights.
    """
    (tmp_path / "own.py").write_text(OWN)
    stages = "".join(f"  - train: {{steps: 1}}\n  - save: {{to: {n}.safetensors}}\n" for n in range(5))
    text = AVERAGED.replace("PRECISION", "")
    plain = run_pipeline(tmp_path, text + stages, 2, "plain")
    averaged = run_pipeline(tmp_path, "ema: 0.8\n" + text + stages, 2, "averaged")
    saved = [load_file(plain / f"{n}.safetensors") for n in range(5)]
    model = nn.ParameterDict({"weight": saved[0]["layer.weight"], "bias": saved[0]["layer.bias"]})
    average: Any = get_ema_multi_avg_fn  # which has no types
    theirs = AveragedModel(model, multi_avg_fn=average(0.8))
    expected: Any = theirs.module
    for n, weights in enumerate(saved):
        with torch.no_grad():
            model["weight"].copy_(weights["layer.weight"])
            model["bias"].copy_(weights["layer.bias"])
        theirs.update_parameters(model)
        ours = load_file(averaged / f"{n}.safetensors")
        assert torch.equal(ours["layer.weight"], expected["weight"])
        assert torch.equal(ours["layer.bias"], expected["bias"])
        assert n == 0 or not torch.equal(ours["layer.weight"], weights["layer.weight"])
        for name in set(ours) - {"layer.weight", "layer.bias"}:
            assert torch.equal(ours[name], weights[name]), name


@pytest.mark.parametrize(
    ("sync", "ranks"), [("every_step", 2), ("{local_sgd: {every: 1}}", 2), ("{average: {every: 1}}", 3)]
)
def test_where_ranks_are_apart_the_mean_of_their_averages_is_read(
    tmp_path: Path, sync: str, ranks: int
) -> None:
    """Policies that are plain SGD give one average, in the middle of a stage and at its end."""
    stage = "  - train: {steps: 7, sync: SYNC, evaluate: {every: 3}}\n  - save\n  - evaluate\n"
    text = "ema: 0.8\n" + BASE + "optimizer: {sgd: {lr: 0.5}}\nstages:\n"
    plain = run_pipeline(tmp_path, text + stage.replace("SYNC", "every_step"), ranks, "plain")
    ours = run_pipeline(tmp_path, text + stage.replace("SYNC", sync), ranks, "ours")
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.allclose(load_file(ours / "model.safetensors")[name], tensor, atol=1e-6), name
    found = [
        [event["loss"] for event in events(run_dir) if event["event"] == "evaluated"]
        for run_dir in (plain, ours)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[1][-1] == found[1][-2], "the stage's last evaluation is that of the stage that follows"


def test_half_precision_weights_have_an_average_in_fp32(tmp_path: Path) -> None:
    """In bf16 an average of decay 0.999 would never move."""
    (tmp_path / "own.py").write_text(OWN)
    text = AVERAGED.replace("PRECISION", "precision: pure_bf16")
    stage = "  - train: {steps: 3}\n  - save\n"
    run_dir = run_pipeline(tmp_path, "ema: 0.999\n" + text + stage, 1)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    kept = load_file(newest / "shared.safetensors")
    assert kept["ema/tensors/layer.weight"].dtype == torch.float32
    assert kept["parameters/layer.weight"].dtype == torch.bfloat16
    assert load_file(run_dir / "model.safetensors")["layer.weight"].dtype == torch.bfloat16
    assert "ema/tensors/frozen.weight" not in kept


@pytest.mark.parametrize("clip", ["null", "0.05"])
@pytest.mark.parametrize("group", ["", '{match: "*.bias", momentum: 0}'])
def test_the_gradient_norm_is_that_before_clipping(tmp_path: Path, clip: str, group: str) -> None:
    """By hand, from what plain SGD did to the weights in the first step, also of each parameter group; the
    same on all ranks, and only in recorded steps.
    """
    timings = f"timings: {{every: 2, grad_norm_every: 1}}\ngroups: [{group}]"
    text = BASE + f"optimizer: {{sgd: {{lr: 0.25}}}}\nclip_norm: {clip}\n{timings}\nstages:\n"
    # A step at a rate of 0 leaves the initial weights.
    stages = (
        "  - train: {steps: 1, optimizer: {sgd: {lr: 0.0}}}\n  - save: {to: before.safetensors}\n"
        "  - train: {steps: 1, clip_norm: null}\n  - save: {to: after.safetensors}\n"
        "  - train: {steps: 4}\n"
    )
    run_dir = run_pipeline(tmp_path, text + stages, 2)
    before, after = (load_file(run_dir / f"{name}.safetensors") for name in ("before", "after"))
    biases = {name for name in before if group and name.endswith(".bias")}
    groups = [biases, before.keys() - biases] if group else [before.keys()]
    norms = [
        torch.cat([(before[name] - after[name]).flatten().double() for name in names]).norm().item() / 0.25
        for names in groups
    ]
    found = lines(run_dir, "steps")
    assert [line["step"] for line in found] == [2, 4, 6] * 2
    assert found[0]["group_grad_norms"] == pytest.approx(norms, rel=1e-4)
    for line in found:
        assert line["grad_norm"] == pytest.approx(math.hypot(*line["group_grad_norms"]), rel=1e-6)
        assert line["lr"] == [0.25] * len(groups)
    for key in ("grad_norm", "group_grad_norms"):
        assert [line[key] for line in found[:3]] == [line[key] for line in found[3:]]
    if clip != "null":
        assert all(line["grad_norm"] > 0.06 for line in found if line["step"] > 2), "before clipping"


def test_a_step_without_an_update_has_neither(tmp_path: Path) -> None:
    """A forward stage that measures."""
    run_dir = run_pipeline(tmp_path, BASE + "optimizer: sgd\nstages: [{forward: {steps: 2}}]\n", 1)
    assert [(line["lr"], line["grad_norm"]) for line in lines(run_dir, "steps")] == [(None, None)] * 2


LOUD_ONCE = """
import os

from torch.nn.functional import cross_entropy

calls = 0


def loss(output, target):
    global calls
    calls += 1
    is_loud = calls == LOUD_AT and os.environ["RANK"] == "0"
    return cross_entropy(output, target) * (1e30 if is_loud else 1.0)
"""

SKIPS = """
precision: fp16
loss: loud.loss
optimizer: {sgd: {lr: 0.1}}
schedule: {CosineAnnealingLR: {}, over: run}
ema: 0.9
stages:
  - train: {steps: 10, APART}
  - train: {steps: 4}
"""


@pytest.mark.parametrize("apart", ["sync: {local_sgd: {every: 4}}", "hooks: [noop]"])
def test_an_update_that_one_rank_skips_leaves_schedules_and_averages_together(
    tmp_path: Path, apart: str
) -> None:
    """Its loss scaler has found gradients that are not finite, and its updates are its own."""
    (tmp_path / "loud.py").write_text(LOUD_ONCE.replace("LOUD_AT", "9"))
    (tmp_path / "p.yaml").write_text(BASE + SKIPS.replace("APART", apart))
    done = ddprun("p.yaml", "--run-dir=run", "--set=launch.timeout_s=20", cwd=tmp_path)
    assert done.code == 0, done.stderr
    found = [event for event in events(tmp_path / "run") if event["event"] == "step_skipped"]
    assert {event["rank"] for event in found} == {0}
    by_rank = [
        [line["lr"] for line in lines(tmp_path / "run", "steps") if line["rank"] == rank] for rank in (0, 1)
    ]
    assert by_rank[0] == by_rank[1]
