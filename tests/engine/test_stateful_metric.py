"""Metrics that accumulate: one number, whatever the batch size and the number of ranks."""

import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.config import PipelineError, load
from ddprun.engine.evaluate import evaluate_metrics
from ddprun.engine.objective import ForwardResult
from ddprun.engine.stateful_metric import StatefulMetric
from tests.engine.test_session import open_here
from tests.ranks import as_processes

MODULE = """
import torch


class MacroF1:
    def __init__(self, classes):
        self.classes, self.counts = classes, torch.zeros(3, classes, dtype=torch.int64)

    def update(self, output, target):
        found = output.argmax(1)
        for row, which in enumerate((target[found == target], found, target)):
            self.counts[row] += torch.bincount(which, minlength=self.classes)

    def merge_state(self, others):
        for other in others:
            self.counts += other.counts

    def compute(self):
        right, found, wanted = self.counts.double()
        return (2 * right / (found + wanted).clamp(min=1)).mean()


class Largest:
    \"\"\"Keeps every score, in a list.\"\"\"

    def __init__(self):
        self.scores = []

    def update(self, output, target):
        self.scores.append(output.max().item())

    def merge_state(self, others):
        for other in others:
            self.scores += other.scores

    def compute(self):
        return max(self.scores)


class Vector(Largest):
    def compute(self):
        return torch.zeros(3)


class NoMerge:
    def update(self, output, target):
        pass

    def compute(self):
        return 1.0
"""
PIPELINE = """
model: {mlp: {inputs: 64, hidden: [16], outputs: 10}}
data: DATA
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {steps: 3}
  - evaluate: {metrics: [METRICS]}
"""
OWN = "{mine.MacroF1: {classes: 10}}, mine.Largest"
TORCHMETRICS = (
    "{torchmetrics.classification.MulticlassF1Score: {num_classes: 10}}, "
    "{torchmetrics.classification.MulticlassAUROC: {num_classes: 10}}"
)
NUMBERS = (  # with states of shape (), which add up fractions
    "{torchmetrics.classification.MulticlassHingeLoss: {num_classes: 10}}, "
    "{torchmetrics.classification.MulticlassHingeLoss: {num_classes: 10, squared: true}, name: squared}"
)
SIZES = (4, 32, 180)
needs_torchmetrics = pytest.mark.skipif(
    importlib.util.find_spec("torchmetrics") is None, reason="pip install torchmetrics"
)


def prepare(folder: Path, metrics: str, data: str = "digits") -> None:
    (folder / "mine.py").write_text(MODULE)
    (folder / "p.yaml").write_text(PIPELINE.replace("METRICS", metrics).replace("DATA", data))


def measured(folder: Path, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """What a session measures of the untrained model, with each batch size."""
    os.chdir(folder)
    session = open_here(folder, "run")
    session.runtime.model.eval()
    found = []
    for size in sizes:
        loaded = session.runtime.loaded = load(folder / "p.yaml", [f"loader.batch_size={size}"])
        stage: Any = loaded.pipeline.stages[-1]
        held_out = session.runtime.held_out
        values, samples = evaluate_metrics(session, held_out, stage, stage.path)
        found.append(values | {"samples": samples})
    return found


@pytest.mark.parametrize(
    "metrics", [OWN, *(pytest.param(one, marks=needs_torchmetrics) for one in (TORCHMETRICS, NUMBERS))]
)
def test_batch_size_and_ranks_change_nothing(tmp_path: Path, metrics: str) -> None:
    """1, 2 and 4 ranks, which hold unevenly many samples; batches of 4, of 32, and one of all."""
    prepare(tmp_path, metrics)
    found = [
        values
        for ranks in (1, 2, 4)
        for of_rank in as_processes(ranks, measured, tmp_path, SIZES)
        for values in of_rank
    ]
    names = [name for name in found[0] if name not in ("loss", "samples")]
    assert len(names) == 2
    for name in names:
        different = {values[name] for values in found}
        assert len(different) == 1 or (metrics == NUMBERS and max(different) < (1 + 1e-6) * min(different))
    assert found[0]["samples"] == 359


@needs_torchmetrics
def test_the_pages_metric_of_logits_does_not_depend_on_batches() -> None:
    """As torchmetrics' own does, which takes a batch whose logits lie in [0, 1] for probabilities."""
    page = (Path(__file__).parents[2] / "docs" / "your-own.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    exec(page[page.index("from torchmetrics") : page.index("```", page.index("from torchmetrics"))], space)
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(40, generator=generator), torch.arange(40) % 2
    for name, alike in (("AUROC", True), ("BinaryAUROC", False)):
        values = []
        for size in (1, 40):
            metric = space[name]()
            for batch in zip(output.chunk(40 // size), target.chunk(40 // size), strict=True):
                metric.update(*batch)
            values.append(metric.compute())
        assert (values[0] == values[1]) == alike


def test_a_rank_without_samples_adds_nothing(tmp_path: Path) -> None:
    """Two held-out samples on three ranks."""
    data = "{synthetic: {samples: 24, held_out: 2}}"
    prepare(tmp_path, OWN, data)
    (alone,) = as_processes(1, measured, tmp_path, (1,))
    for of_rank in as_processes(3, measured, tmp_path, (1,)):
        assert of_rank[0]["samples"] == 2
        assert of_rank[0]["MacroF1"] == alone[0]["MacroF1"]
        assert of_rank[0]["Largest"] == alone[0]["Largest"]


def refused(folder: Path) -> str:
    try:
        measured(folder, (32,))
    except PipelineError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("mine.NoMerge", "NoMerge has update and compute, but no merge_state; ranks merge what each has"),
        (
            "mine.Vector",
            "compute gives shape (3,); expected one number, as torchmetrics gives with average: macro",
        ),
        ("{mine.MacroF1: {labels: 10}}", "labels"),
        ("torch.nn.Linear", '"torch.nn.Linear" lacks update or compute; expected a function of'),
    ],
)
def test_what_is_no_such_metric_is_refused(tmp_path: Path, metric: str, words: str) -> None:
    """At its place in the file, and before the run trains if that can be seen then."""
    prepare(tmp_path, metric)
    (said,) = as_processes(1, refused, tmp_path)
    assert "stages[1].evaluate.metrics[0]" in said
    assert words in said


def test_a_metric_must_say_how_states_merge() -> None:
    """Of torchmetrics the states say how they merge; any other class has to."""
    with pytest.raises(ValueError, match="merge_state"):
        StatefulMetric(lambda: object(), lambda text, more: ValueError(text), torch.device("cpu"))


def test_that_states_merge_is_tried_before_step_1() -> None:
    """On one rank nothing is merged."""
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "mine", "exec"), scope)

    def largest_with_lock() -> Any:
        made = scope["Largest"]()
        made.lock = threading.Lock()
        return made

    made = StatefulMetric(largest_with_lock, lambda text, more: ValueError(text), torch.device("cpu"))
    made.update(ForwardResult(torch.zeros(()), torch.ones(2, 3), torch.zeros(2), None))
    made.check_compute(1)
    with pytest.raises(ValueError, match="a rank's state cannot be sent"):
        made.check_compute(2)


def test_what_a_metric_was_called_with_is_told() -> None:
    """A model that returns its own loss returns no tensor that a metric could take."""
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "mine", "exec"), scope)
    made = StatefulMetric(scope["Largest"], lambda text, more: ValueError(text), torch.device("cpu"))
    with pytest.raises(AttributeError) as raised:
        made.update(ForwardResult(torch.zeros(()), {"logits": torch.ones(2, 3)}, torch.zeros(2), None))
    assert raised.value.__notes__ == [
        "the metric was called as Largest.update({logits: float32 (2, 3)}, float32 (2,))",
        "write output: … and target: … beside the metric if it takes parts of these; output can be logits",
    ]
