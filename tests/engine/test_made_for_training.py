"""What is for training alone, a transform of batches or a collate; and what optimizers are made over."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.engine.build import ChoiceBuilder
from ddprun.engine.optimizers import build_optimizer
from ddprun.engine.turns import build_turns
from tests.engine.running import lines, run_pipeline, run_to_end, summary, weights
from tests.ranks import ddprun_here

MODULE = """
import torch
from torch import nn
from torch.utils.data import default_collate


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def mixed(batch, classes=3):
    inputs, labels = batch
    share = torch.distributions.Beta(1.0, 1.0).sample()
    order = torch.randperm(len(inputs))
    soft = nn.functional.one_hot(labels, classes).float()
    return share * inputs + (1 - share) * inputs[order], share * soft + (1 - share) * soft[order]


class Mixed:
    def __init__(self, classes=3):
        self.classes = classes

    def __call__(self, batch):
        return mixed(batch, self.classes)


class OfTwo(Mixed):
    def __call__(self, inputs, labels):
        return self((inputs, labels))


def in_place(batch):
    batch[0].mul_(2)


def mixing(samples):
    return mixed(default_collate(samples))


def plain(samples):
    return default_collate(samples)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def by_layer(model_or_params, lr, decay):
    return torch.optim.SGD([
        {"params": model_or_params.body.parameters(), "lr": lr * decay},
        {"params": model_or_params.head.parameters()},
    ], lr=lr)


def scaled(model, lr):
    groups = [{"params": [param], "lr_scale": 0.5 ** index} for index, param in enumerate(model.parameters())]
    return torch.optim.SGD(groups, lr=lr)


def by_name(named_parameters, lr):
    assert [name for name, _ in named_parameters] == ["body.weight", "body.bias", "head.weight", "head.bias"]
    return torch.optim.SGD(named_parameters, lr=lr)


class Relative(torch.optim.Optimizer):
    def __init__(self, params, lr=None):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=1e-3)


class WithoutRate(Relative):
    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, {"scale": 1.0})


def head_alone(model, lr):
    return torch.optim.SGD(model.head.parameters(), lr=lr)
"""


def module() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "mine", "exec"), scope)
    return scope


PIPELINE = """
model: mine.Net
data: {train: mine.Samples, evaluate: mine.Samples}
loader: {batch_size: 4}
loss: cross_entropy
optimizer: {sgd: {lr: 0.1}}
stages: [{train: {steps: 6}}, {evaluate: {metrics: [accuracy]}}, save]
"""


def written(folder: Path, *changes: tuple[str, str]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MODULE)
    text = PIPELINE
    for old, new in changes:
        text = text.replace(old, new)
    return text


def held_out(run: Path, folder: Path) -> tuple[float, float]:
    """Loss and accuracy of what was saved, over the samples as they are."""
    scope: dict[str, type] = {}
    exec(compile(MODULE, "mine", "exec"), scope)
    model, data = scope["Net"](), scope["Samples"]()
    model.load_state_dict(weights(run))
    inputs = torch.stack([data[index][0] for index in range(24)])
    labels = torch.tensor([data[index][1] for index in range(24)])
    output = model(inputs)
    loss = nn.functional.cross_entropy(output, labels)
    return loss.item(), float((output.argmax(1) == labels).double().mean())


TRANSFORM = ("loss:", "batch: {transform: mine.mixed}\nloss:")
OBJECT = ("loss:", "batch: {transform: {mine.Mixed: {classes: 3}}}\nloss:")
COLLATE = ("batch_size: 4", "batch_size: 4, collate: mine.mixing, evaluate_collate: mine.plain")


@pytest.mark.parametrize("change", [TRANSFORM, OBJECT, COLLATE])
def test_mixup_is_for_training_alone(tmp_path: Path, change: tuple[str, str]) -> None:
    """Evaluations see held-out samples as they are, with class numbers."""
    run = run_pipeline(tmp_path, written(tmp_path, change), 2)
    measured = summary(run)["metrics"]
    loss, accuracy = held_out(run, tmp_path)
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    assert measured["accuracy"] == accuracy
    plain = run_pipeline(tmp_path / "plain", written(tmp_path / "plain"), 2)
    assert not torch.equal(weights(run)["head.weight"], weights(plain)["head.weight"])


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        ("{mine.mixed: {klasses: 3}}", "\"mine.mixed\": got an unexpected keyword argument 'klasses'"),
        (
            "mine.OfTwo",
            "\"mine.OfTwo\" gives OfTwo: missing a required argument: 'labels'; objects of the class are "
            "called with a batch",
        ),
        ("mine.in_place", "gives None; expected the changed batch"),
    ],
)
def test_a_transform_that_does_not_fit_is_told_before_step_1(
    tmp_path: Path, transform: str, told: str
) -> None:
    text = written(tmp_path, ("loss:", f"batch: {{transform: {transform}}}\nloss:"))
    codes, said = run_to_end(tmp_path, text)
    assert codes == [EXIT_BAD_INPUT] * 2
    assert f"batch.transform: {told}" in said


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ("{mine.by_layer: {lr: 0.1, decay: 0.5}}", [0.05, 0.1]),
        ("{mine.scaled: {lr: 0.1}}", [0.1, 0.05, 0.025, 0.0125]),
        ("{mine.by_name: {lr: 0.1}}", [0.1]),
    ],
)
def test_a_function_gets_what_its_first_argument_is_called(
    tmp_path: Path, optimizer: str, rates: list[float]
) -> None:
    """The model, whose groups have rates of their own, those of timm's `lr_scale`, too; or parameters with
    their names. A schedule multiplies each of them.
    """
    change = (
        "optimizer: {sgd: {lr: 0.1}}",
        f"optimizer: {optimizer}\nschedule: {{StepLR: {{step_size: 3}}}}",
    )
    run = run_pipeline(tmp_path, written(tmp_path, change), 2)
    recorded = [line["lr"] for line in lines(run, "steps") if line["rank"] == 0]
    assert recorded[0] == pytest.approx(rates)
    assert recorded[-1] == pytest.approx([rate / 10 for rate in rates])


@pytest.mark.parametrize("name", ["Relative", "WithoutRate"])
def test_only_groups_with_lr_scale_are_scaled(tmp_path: Path, name: str) -> None:
    """A rate that is null, as of Adafactor, or is not there, is left alone."""
    (tmp_path / "p.yaml").write_text(written(tmp_path, ("{sgd: {lr: 0.1}}", f"mine.{name}")))
    loaded = load(tmp_path / "p.yaml")
    model = nn.Linear(2, 2)
    with patch.object(ChoiceBuilder, "import_target", lambda _: module()[name]):
        assert build_optimizer(loaded, model, build_turns(loaded, model)).param_groups[0].get("lr") is None


@pytest.mark.parametrize("optimizer", ["{mine.Relative: {lr: null}}", "mine.WithoutRate"])
def test_an_optimizer_without_a_rate_trains(tmp_path: Path, optimizer: str) -> None:
    """Records, trackers and the report leave the rate out."""
    more = "\ntrack: [prometheus]\ntimings: {grad_norm_every: 1}"
    run = run_pipeline(tmp_path, written(tmp_path, ("{sgd: {lr: 0.1}}", optimizer + more)), 2)
    assert [line["lr"] for line in lines(run, "steps")] == [None] * 12
    exported = (run / "metrics.prom").read_text()
    assert "ddprun_learning_rate{" not in exported
    assert "ddprun_steps_total" in exported
    assert ddprun_here("report", str(run), cwd=tmp_path).code == 0
    page = (run / "report.html").read_text()
    assert "gradient norm over steps" in page.lower()
    assert "learning rate over steps" not in page.lower()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            [("{sgd: {lr: 0.1}}", "{mine.head_alone: {lr: 0.1}}")],
            "it leaves out parameters that are trained: body.weight, body.bias; freeze them, or have it take",
        ),
        (
            [
                ("{sgd: {lr: 0.1}}", "{mine.by_layer: {lr: 0.1, decay: 0.5}}"),
                ("stages:", 'groups: [{match: "*.bias", lr: 0.2}]\nstages:'),
            ],
            'groups: "mine.by_layer" takes model_or_params, and makes groups of its own; remove groups, or',
        ),
        (
            [("{sgd: {lr: 0.1}}", "{mine.Relative: {lr: null}}\nwarmup_steps: 2")],
            'warmup_steps: "Relative" has no learning rate that could rise: "lr" is null or not there; ',
        ),
        (
            [
                ("{sgd: {lr: 0.1}}", "{mine.Relative: {lr: 0.1}}"),
                ("steps: 6}", "steps: 6, optimizer: {mine.Relative: {lr: null}}, warmup_steps: 2}"),
            ],
            'stages[0].train.warmup_steps: "Relative" has no learning rate',
        ),
    ],
)
def test_what_does_not_fit_is_told_before_step_1(
    tmp_path: Path, changes: list[tuple[str, str]], told: str
) -> None:
    codes, said = run_to_end(tmp_path, written(tmp_path, *changes))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said
