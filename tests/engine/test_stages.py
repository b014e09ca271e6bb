"""What stages do: precision, evaluation, losses, dotted parts, schedules, saving."""

import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import nn

from ddprun.config import load
from ddprun.engine.worker import run_worker
from ddprun.zoo.data import digits
from tests.engine.running import events, lines, run_pipeline, summary, weights
from tests.ranks import as_processes, ddprun

MINE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, inputs):
        return self.layers(inputs)


class OwnLoss(Net):
    def forward(self, inputs, labels):
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        return {"loss": loss}


class Keywords(Net):
    def forward(self, pixels, labels):
        return nn.functional.cross_entropy(self.layers(pixels), labels)


def samples(count=320, mapping=False):
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(count, 64, generator=generator)
    labels = (pixels[:, :10] * 3).argmax(1)
    pairs = list(zip(pixels, labels))
    return [{"pixels": x, "labels": y} for x, y in pairs] if mapping else pairs


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count=320):
        self.count = count

    def __iter__(self):
        return iter(samples(self.count))


def squared(output, target, factor=1.0):
    return factor * (output.softmax(1) - nn.functional.one_hot(target, 10)).square().mean()


class Focal(nn.Module):
    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target)


def top2(output, target):
    return (output.topk(2, 1).indices == target[:, None]).any(1).float().mean()
"""


def run(folder: Path, text: str, ranks: int = 2, name: str = "run") -> Path:
    (folder / "mine.py").write_text(MINE)
    return run_pipeline(folder, text, ranks, name)


DIGITS = """
model: {model}
data: digits
loader: {{batch_size: 32}}
optimizer: {{sgd: {{lr: 0.1, momentum: 0.9}}}}
precision: {precision}
hooks: {hooks}
clip_norm: {clip}
stages:
  - train: {{epochs: {epochs}}}
  - evaluate: {{metrics: [accuracy]}}
  - save
"""
MLP = "{mlp: {inputs: 64, hidden: [128], outputs: 10}}"


def on_digits(folder: Path, ranks: int = 2, **changes: Any) -> Path:
    settings = {"model": MLP, "precision": "fp32", "hooks": "[]", "epochs": 8, "clip": "null"} | changes
    return run(folder, DIGITS.format(**settings), ranks)


@pytest.mark.parametrize(
    ("precision", "stored", "sent"),
    [
        ("fp32", torch.float32, "float32"),
        ("bf16", torch.float32, "float32"),
        ("fp16", torch.float32, "float32"),
        ("pure_bf16", torch.bfloat16, "bfloat16"),
        ("pure_fp16", torch.float16, "float16"),
    ],
)
def test_every_precision_learns(tmp_path: Path, precision: str, stored: torch.dtype, sent: str) -> None:
    """Weights and traffic have the type that the precision says, and digits are learned in each."""
    folder = on_digits(tmp_path, precision=precision, clip=1.0)
    assert {value.dtype for value in weights(folder).values()} == {stored}
    assert {line["dtype"] for line in lines(folder, "buckets")} == {sent}
    assert summary(folder)["metrics"]["accuracy"] > 0.93
    assert not [event for event in events(folder) if event["event"] == "step_skipped"]


def test_with_a_loss_scale_gradients_travel_and_are_clipped_unscaled(tmp_path: Path) -> None:
    """fp16's scale is 65,536: were it still in what the hook casts, every gradient above 1 would overflow;
    were it in what is clipped, clipping to a huge norm would change the weights.
    """
    for name in "ab":
        (tmp_path / name).mkdir()
    plain = on_digits(tmp_path / "a", precision="fp16", epochs=2)
    other = on_digits(tmp_path / "b", precision="fp16", hooks="[fp16]", clip=1e4, epochs=2)
    assert not [event for event in events(other) if event["event"] == "step_skipped"]
    for name, value in weights(plain).items():
        assert torch.allclose(value, weights(other)[name], atol=5e-3), name


EXPLODES = """
model: mine.Net
data: {mine.samples: {count: 64}}
loader: {batch_size: 16}
optimizer: {sgd: {lr: 1.0e+30}}
precision: fp16
stages:
  - train: {steps: 6}
  - save
"""


def test_a_step_with_a_non_finite_gradient_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    """An absurd learning rate blows the weights up in step 1; from then on nothing moves, on any rank."""
    folder = run(tmp_path, EXPLODES)
    skipped = [event["step"] for event in events(folder) if event["event"] == "step_skipped"]
    assert skipped
    assert summary(folder)["steps"] == 6


@pytest.mark.parametrize("ranks", [1, 3])
def test_evaluation_counts_each_sample_once(tmp_path: Path, ranks: int) -> None:
    """359 held-out digits on any number of ranks give the accuracy that one pass by hand gives."""
    folder = on_digits(tmp_path, ranks)
    held_out: Any = digits(held_out=0.2, split_seed=0, folder=tmp_path).evaluate
    inputs, labels = held_out[:]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model.load_state_dict(weights(folder))
    output = model(inputs)
    found = summary(folder)
    assert found["stages"][1]["samples"] == len(labels) == 359
    assert found["metrics"]["accuracy"] == (output.argmax(1) == labels).sum().item() / 359
    loss = nn.functional.cross_entropy(output, labels).item()
    assert abs(found["metrics"]["loss"] - loss) < 1e-6


def test_batchnorm_is_evaluated_and_saved_with_rank_0s_statistics(tmp_path: Path) -> None:
    """Buffers differ between ranks after the last step; evaluation by hand with what was saved agrees."""
    folder = on_digits(tmp_path, 2, model="cnn", epochs=3)
    held_out: Any = digits(held_out=0.2, split_seed=0, folder=tmp_path).evaluate
    inputs, labels = held_out[:]
    from ddprun.zoo.models import cnn

    model = cnn(channels=(16, 32), inputs=(1, 8, 8), outputs=10)
    model.load_state_dict(weights(folder))
    right = (model.eval()(inputs).argmax(1) == labels).sum().item()
    assert summary(folder)["metrics"]["accuracy"] == right / 359
    assert weights(folder)["1.num_batches_tracked"].item() == summary(folder)["steps"]


@pytest.mark.parametrize(
    "head",
    [
        "model: mine.Net\ndata: mine.samples\nloss: mine.squared",
        "model: mine.Net\ndata: mine.samples\nloss: {mine.squared: {factor: 20.0}}",
        "model: {mine.Net: {width: 48}}\ndata: mine.samples\nloss: mine.Focal",
        "model: mine.OwnLoss\ndata: mine.samples\nloss: model",
        "model: mine.Keywords\ndata: {mine.samples: {mapping: true}}\nloss: model",
        "model: mine.Net\ndata: {train: mine.Stream, evaluate: {mine.Stream: {count: 33}}}\n"
        "loader: {shuffle: false}\nloss: {CrossEntropyLoss: {label_smoothing: 0.1}}",
    ],
)
def test_dotted_models_data_and_losses_train(tmp_path: Path, head: str) -> None:
    """Pairs, mappings, streams; functions, modules and the model's own loss: the loss falls."""
    keys = yaml.safe_load(head)
    rest = {"loader": {"batch_size": 16}, "optimizer": {"adam": {"lr": 0.01}}} | keys
    rest["loader"] = {"batch_size": 16} | rest["loader"]
    rest["stages"] = [{"train": {"steps": 60}}]
    if isinstance(keys["data"], dict) and "evaluate" in keys["data"]:
        rest["stages"].append({"evaluate": {"metrics": ["accuracy", "mine.top2"]}})
    folder = run(tmp_path, yaml.safe_dump(rest, sort_keys=False))
    losses = [line["mean_loss"] for line in lines(folder, "steps") if line["rank"] == 0]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    if len(rest["stages"]) > 1:
        metrics = summary(folder)["metrics"]
        assert summary(folder)["stages"][1]["samples"] == 33
        assert 0 < metrics["accuracy"] <= metrics["top2"] <= 1


SCHEDULED = """
model: mine.Net
data: mine.samples
loader: {batch_size: 16}
optimizer: {mine2.Noting: {lr: 1.0}}
schedule: SCHEDULE
warmup_steps: 4
stages:
  - train: {steps: 10}
  - train: {steps: 5, warmup_steps: 0}
"""
NOTING = """
import json
import os
import torch


class Noting(torch.optim.SGD):
    def step(self, closure=None):
        if os.environ["RANK"] == "0":
            with open("rates.txt", "a") as file:
                file.write(json.dumps(self.param_groups[0]["lr"]) + chr(10))
        self.param_groups[0]["lr"], lr = 0.0, self.param_groups[0]["lr"]
        super().step(closure)
        self.param_groups[0]["lr"] = lr
"""


@pytest.mark.parametrize(
    ("schedule", "scheduler"),
    [
        ("CosineAnnealingLR", lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=n)),
        ("{steplr: {step_size: 2, gamma: 0.5}}", lambda o, n: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)),
        ("null", None),
    ],
)
def test_learning_rates_follow_schedule_and_warmup_stage_by_stage(
    tmp_path: Path, schedule: str, scheduler: Any
) -> None:
    """A length left out is the stage's steps; warm-up multiplies; the next stage starts from the file."""
    (tmp_path / "mine2.py").write_text(NOTING)
    run(tmp_path, SCHEDULED.replace("SCHEDULE", schedule))
    rates = [json.loads(line) for line in (tmp_path / "rates.txt").read_text().splitlines()]
    wanted = []
    for steps, warmup in ((10, 4), (5, 0)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        made = scheduler(optimizer, steps) if scheduler else None
        for index in range(steps):
            wanted.append(
                optimizer.param_groups[0]["lr"] * (min(1.0, (index + 1) / warmup) if warmup else 1.0)
            )
            optimizer.step()
            if made:
                made.step()
    assert rates == pytest.approx(wanted, rel=1e-12)


def test_clipping_bounds_the_norm_of_the_mean_gradient(tmp_path: Path) -> None:
    """One step of plain SGD with rate 1: the weights move by exactly the clipped norm."""
    text = """
model: mine.Net
data: mine.samples
loader: {batch_size: 16}
optimizer: {sgd: {lr: 1.0}}
clip_norm: 0.01
stages: [{train: {steps: 1}}, save]
"""
    after = weights(run(tmp_path, text))
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(compile(MINE, "mine", "exec"), scope)
    before = scope["Net"]().state_dict()
    moved = sum((after[name] - before[name]).square().sum() for name in before) ** 0.5
    assert abs(float(moved) - 0.01) < 1e-6


def test_save_leaves_weights_and_the_pipeline_that_made_them(tmp_path: Path) -> None:
    """The file beside it runs again to the same weights."""
    folder = on_digits(tmp_path, epochs=1)
    assert not list(folder.glob(".*")), "unfinished files are left"
    beside = (folder / "model.safetensors.yaml").read_text()
    assert beside == (folder / "pipeline.yaml").read_text()
    again = run(tmp_path, beside, name="again")
    for name, value in weights(folder).items():
        assert torch.equal(value, weights(again)[name])


TIED = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wörter = nn.Linear(64, 64)
        self.shared = nn.ModuleList([self.wörter] * 5)
        self.last = nn.Linear(64, 10, dtype=torch.float32)
        self.register_buffer("bits", self.last.bias.detach().view(torch.int32))

    def forward(self, inputs):
        return self.last(self.shared[0](inputs.flatten(1)))
"""


def test_equal_runs_leave_equal_files(tmp_path: Path) -> None:
    """Byte for byte, whatever order a process has drawn for its hashes: weights with tied names and what else
    depends on the pipeline alone.
    """
    (tmp_path / "tied.py").write_text(TIED, encoding="utf-8")
    text = "name: x\nmodel: tied.Net\ndata: digits\noptimizer: {sgd: {lr: 0.1}}\nhooks: [fp16]\n"
    stages = "stages: [{train: {steps: 1}}, save]\n"
    found: dict[str, set[str]] = {}
    (tmp_path / "p.yaml").write_text(text + stages)
    for number in range(2):
        run_dir = tmp_path / f"run-{number}"
        done = ddprun(
            *("p.yaml", "--run-dir", run_dir.name, "--nproc-per-node", "1"),
            cwd=tmp_path,
            environment={"PYTHONHASHSEED": str(number)},  # fresh processes, since forks of one draw alike
        )
        assert done.code == 0, done.stderr
        for file in (
            *(run_dir / "pipeline.yaml", run_dir / "run.json"),
            *run_dir.glob("model.safetensors*"),
            *(run_dir / "checkpoints").glob("*/shared.*"),
            *run_dir.glob("*/*/*.safetensors"),
        ):
            content = file.read_bytes()
            if file.name == "run.json":
                content = content.replace(json.loads(content)["id"].encode(), b"")  # each run has its own
            digest = hashlib.sha256(content).hexdigest()
            found.setdefault(str(file.relative_to(run_dir)), set()).add(digest)
    assert len(found) >= 7
    assert {name: len(digests) for name, digests in found.items()} == dict.fromkeys(found, 1)
    assert torch.equal(weights(run_dir)["last.bias"], weights(tmp_path / "run-0")["last.bias"])
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert metadata == {"format": "pt"}
    tensors = {"wörter.weight", "wörter.bias", "last.weight", "last.bias", "bits"}
    assert names == tensors, "tied tensors once, and what has the same bytes as another type, too"


WALKED = """
import gc

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(64, 10)

    def forward(self, inputs):
        if self.training:
            with open("frozen", "a") as file:
                print(gc.get_freeze_count(), gc.get_threshold()[0], file=file)
        return self.only(inputs.flatten(1))
"""


def _work_unfrozen(file: Path, run_dir: Path) -> int:
    gc.unfreeze()  # the fork server has frozen what it has imported
    return run_worker(load(file), run_dir)


@pytest.mark.parametrize(("own", "threshold"), [("", 5000), ("gc.set_threshold(1234)\n", 1234)])
def test_what_is_imported_is_none_of_the_collectors(tmp_path: Path, own: str, threshold: int) -> None:
    """A walk through all of it would hold all ranks. It walks less often then, unless the pipeline's code has
    said how often.
    """
    (tmp_path / "walked.py").write_text(WALKED + own)
    head = "data: digits\nloader: {batch_size: 32}\noptimizer: {sgd: {lr: 0.1}}\n"
    file = tmp_path / "p.yaml"
    file.write_text(f"model: walked.Net\n{head}stages: [{{train: {{steps: 3}}}}]\n")
    assert as_processes(1, _work_unfrozen, file, tmp_path / "run", cwd=tmp_path) == [0]
    told = [tuple(map(int, line.split())) for line in (tmp_path / "frozen").read_text().splitlines()]
    assert min(count for count, _ in told) > 100_000
    assert {young for _, young in told[-3:]} == {threshold}
