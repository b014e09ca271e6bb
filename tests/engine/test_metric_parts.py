"""What a metric gets of a model that returns its own loss, and what it is called."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun import EXIT_BAD_INPUT
from ddprun.config import EvaluateStage, load
from tests.engine.running import events, run_pipeline, run_to_end, summary, weights

MODULE = """
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        features = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"features": features, "labels": -100 if index % 5 == 0 else index % 3}


class Words(Samples):
    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        features = torch.randn(self.length, 6, generator=torch.Generator().manual_seed(index))
        labels = torch.arange(self.length) % 3
        return {"features": features, "labels": labels.where(labels > 0, -100)}


class Net(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, features, labels):
        logits = super().forward(features)
        return {"loss": nn.functional.cross_entropy(logits.movedim(-1, 1), labels), "logits": logits}


def right(output, target):
    return (output.argmax(1) == target).double().mean()


class Share:
    def __init__(self, of):
        self.of, self.found, self.all = of, 0, 0

    def update(self, output, target):
        self.found += int((output.argmax(1) == self.of).sum())
        self.all += len(target)

    def merge_state(self, others):
        for other in others:
            self.found, self.all = self.found + other.found, self.all + other.all

    def compute(self):
        return self.found / self.all
"""
PIPELINE = """
model: mine.Net
data: {train: mine.Samples, evaluate: mine.Samples}
loader: {batch_size: 4}
loss: model
weight_by: {targets: {of: labels}}
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {steps: 6}
  - evaluate:
      metrics:
        - {accuracy: {}, output: logits, target: labels}
        - {mine.Share: {of: 0}, name: zeros, output: logits, target: labels}
        - {mine.Share: {of: 1}, name: ones, output: logits, target: labels}
  - save
"""


def test_keys_beside_a_metric_pick_what_it_gets(tmp_path: Path) -> None:
    """Accuracy leaves out targets of -100, as the model's loss does; a class stands twice, by two names."""
    (tmp_path / "mine.py").write_text(MODULE)
    run = run_pipeline(tmp_path, PIPELINE, 2)
    scope: dict[str, type] = {}
    exec(compile(MODULE, "mine", "exec"), scope)
    data, saved = [scope["Samples"]()[index] for index in range(22)], weights(run)
    features = torch.stack([sample["features"] for sample in data])
    labels = torch.tensor([sample["labels"] for sample in data])
    found = nn.functional.linear(features, saved["weight"], saved["bias"]).argmax(1)
    measured = summary(run)["metrics"]
    assert measured["accuracy"] == float((found == labels)[labels >= 0].double().mean())
    assert measured["zeros"] == float((found == 0).double().mean())
    assert measured["ones"] == float((found == 1).double().mean())
    (event,) = [event for event in events(run) if event["event"] == "evaluated"]
    assert {"accuracy", "zeros", "ones"} <= event.keys()
    stage = load(tmp_path / "run.yaml").pipeline.stages[1]
    assert isinstance(stage, EvaluateStage)
    again = stage.metrics[1].to_plain_data()
    assert again == {"mine.Share": {"of": 0}, "name": "zeros", "output": "logits", "target": "labels"}


def test_accuracy_finds_classes_on_the_last_dimension(tmp_path: Path) -> None:
    """As a Hugging Face model has them; where they may be on either dimension it is refused before step 1."""
    (tmp_path / "mine.py").write_text(MODULE)
    words = "{train: {mine.Words: {length: LENGTH}}, evaluate: {mine.Words: {length: LENGTH}}}"
    text = PIPELINE.replace("{train: mine.Samples, evaluate: mine.Samples}", words)
    run = run_pipeline(tmp_path, text.replace("LENGTH", "5"), 2, "five")
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "mine", "exec"), scope)
    data, saved = [scope["Words"](5)[index] for index in range(22)], weights(run)
    features, labels = (torch.stack([sample[name] for sample in data]) for name in ("features", "labels"))
    found = nn.functional.linear(features, saved["weight"], saved["bias"]).argmax(-1)
    assert summary(run)["metrics"]["accuracy"] == float((found == labels)[labels >= 0].double().mean())
    codes, told = run_to_end(tmp_path, text.replace("LENGTH", "3"))
    assert codes == [EXIT_BAD_INPUT] * 2
    where = "metrics[0]: the classes may be on either dimension"
    assert f"{where}: the output is float32 (4, 3, 3), the targets int64 (4, 3); name a " in told


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "output: logits",
            "output: logit",
            'metrics[0].output: the model\'s outputs have no "logit"; they have loss',
        ),
        (
            "target: labels",
            "target: label",
            'metrics[0].target: batches have no "label"; they have features, ',
        ),
    ],
)
def test_a_key_that_is_not_there_is_told_before_step_1(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    codes, said = run_to_end(tmp_path, PIPELINE.replace(old, new))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said


@pytest.mark.parametrize("metric", ["mine.right", "{mine.Share: {of: 0}}"])
def test_a_metric_without_keys_that_fails_gets_a_hint(tmp_path: Path, metric: str) -> None:
    """A function or a class: with the parts that it could have."""
    (tmp_path / "mine.py").write_text(MODULE)
    text = PIPELINE[: PIPELINE.index("        - {accuracy")] + f"        - {metric}\n"
    codes, said = run_to_end(tmp_path, text)
    assert codes == [1] * 2
    hint = "write output: … and target: … beside the metric if it takes parts of these; "
    assert f"{hint}output can be loss, logits; target can be features, labels" in said
