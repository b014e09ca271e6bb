"""What an evaluate stage counts: targets, each once, on any number of ranks and with any batch size."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.engine.evaluate import rank_batches
from ddprun.engine.worker import run_worker
from tests.engine.running import events, run_pipeline, run_to_end, summary
from tests.ranks import as_processes

MODULE = """
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset


def sample(place):
    generator = torch.Generator().manual_seed(place)
    targets = torch.randint(4, (6,), generator=generator)
    targets[place % 7 :] = IGNORED  # of some samples all
    return torch.randn(6, 3, generator=generator), targets


class Padded(Dataset):
    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        return sample(place)


class Row(IterableDataset):
    def __init__(self, size=23):
        self.places = range(size)

    def __iter__(self):
        return (sample(place) for place in self.places)


class OneShot(Row):
    def __init__(self):
        super().__init__()
        self.left = super().__iter__()

    def __iter__(self):
        return self.left


class Net(nn.Module):
    def __init__(self, gathers=False):
        super().__init__()
        self.layer, self.gathers = nn.Linear(3, 4), gathers

    def forward(self, numbers):
        output = self.layer(numbers).movedim(-1, 1)
        if self.gathers:
            everywhere = [torch.empty_like(output) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, output.detach().contiguous())
            assert len({len(one) for one in everywhere}) == 1
        return output


def perplexity(output, target):
    return 4.0


class other:
    @staticmethod
    def top(output, target):
        return 6.0


def top(output, target):
    return 7.0


class Named(Padded):
    def __getitem__(self, place):
        output, targets = sample(place)
        return output, {"classes": targets}


def of_named(output, target):
    return nn.functional.cross_entropy(output, target["classes"])


class Focal(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(torch.tensor([1.0, 20.0, 3.0, 0.1]))

    def forward(self, output, target):
        sure = output.softmax(1).gather(1, target.clamp(0)[:, None])[:, 0]
        weights = self.weight[target.clamp(0)]
        return (-weights * (1 - sure) * sure.log())[target != IGNORED].mean()


def vector(output, target):
    return output.mean((0, 2))


def together(output, target):
    right = (output.argmax(1) == target).double().mean()
    dist.all_reduce(right)
    return right / dist.get_world_size()
"""
PIPELINE = """
model: {mine.Net: {gathers: GATHERS}}
data: {train: mine.Padded, evaluate: DATA}
loader: {batch_size: SIZE, shuffle: false}
loss: LOSS
optimizer: {sgd: {lr: 0.1}}
stages:
  - train: {steps: 1}
  - save
  - evaluate: {metrics: METRICS}
"""


def pipeline(folder: Path, **words: str) -> str:
    known = {
        "GATHERS": "false",
        "DATA": "mine.Padded",
        "SIZE": "4",
        "LOSS": "cross_entropy",
        "METRICS": "[accuracy, perplexity]",
        "IGNORED": "-100",
    } | words
    (folder / "mine.py").write_text(MODULE.replace("IGNORED", known.pop("IGNORED")))
    text = PIPELINE
    for word, value in known.items():
        text = text.replace(word, value)
    return text


def output_and_targets(folder: Path, run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the saved model, for all samples in one pass."""
    from safetensors.torch import load_file

    space: dict[str, Any] = {}
    exec((folder / "mine.py").read_text(), space)
    model = space["Net"]()
    model.load_state_dict(load_file(run / "model.safetensors"))
    inputs, targets = (torch.stack(column) for column in zip(*map(space["sample"], range(23)), strict=True))
    return model(inputs), targets


def by_hand(folder: Path, run: Path, loss: nn.Module, ignored: int) -> tuple[float, float, int]:
    """Loss, accuracy and the number of targets."""
    output, targets = output_and_targets(folder, run)
    counts = targets != ignored
    right = ((output.argmax(1) == targets) & counts).sum().item()
    return loss(output, targets).item(), right / counts.sum().item(), int(counts.sum())


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 16), (2, 16), (3, 2)])
@pytest.mark.parametrize("data", ["mine.Padded", "mine.Row"])
def test_accuracy_and_perplexity_go_by_targets_that_count(
    tmp_path: Path, ranks: int, size: int, data: str
) -> None:
    """Those of `ignore_index` do not, whatever the batch size and the number of ranks."""
    run = run_pipeline(tmp_path, pipeline(tmp_path, SIZE=str(size), DATA=data), ranks)
    loss, accuracy, targets = by_hand(tmp_path, run, nn.CrossEntropyLoss(), -100)
    found = summary(run)["metrics"]
    assert found["accuracy"] == accuracy
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert targets < 23 * 6
    assert summary(run)["stages"][-1]["samples"] == 23


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ("{ignore_index: 3}", nn.CrossEntropyLoss(ignore_index=3)),
        ("{ignore_index: 3, weight: [1.0, 2.0, 3.0, 4.0]}", None),
    ],
)
def test_a_losss_own_ignore_index_and_weights_hold(
    tmp_path: Path, options: str, loss: nn.Module | None
) -> None:
    """A mean of means would weight batches wrongly."""
    loss = loss or nn.CrossEntropyLoss(ignore_index=3, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    text = pipeline(tmp_path, LOSS=f"{{cross_entropy: {options}}}", IGNORED="3", SIZE="3")
    run = run_pipeline(tmp_path, text, 2)
    expected, accuracy, _ = by_hand(tmp_path, run, loss, 3)
    found = summary(run)["metrics"]
    assert found["accuracy"] == accuracy
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


def test_a_class_derived_from_a_loss_may_have_another_mean(tmp_path: Path) -> None:
    """Here over targets, though each is weighted: the weights of classes do not count."""
    text = pipeline(tmp_path, LOSS="mine.Focal", SIZE="3", METRICS="[accuracy]")
    run = run_pipeline(tmp_path, text, 2)
    space: dict[str, Any] = {}
    exec((tmp_path / "mine.py").read_text(), space)
    expected, *_ = by_hand(tmp_path, run, space["Focal"](), -100)
    assert summary(run)["metrics"]["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("mine.vector", "the metric gives shape (4,); expected one number"),
        (
            "accuracy",
            "accuracy compares tensors: the output is float32 (4, 4, 6), the targets are {classes: ",
        ),
    ],
)
def test_what_a_metric_cannot_take_or_give_is_told(tmp_path: Path, metric: str, words: str) -> None:
    text = pipeline(tmp_path, METRICS=f"[{metric}]", LOSS="mine.of_named", DATA="mine.Named")
    codes, said = run_to_end(tmp_path, text.replace("train: mine.Padded", "train: mine.Named"))
    assert codes == [EXIT_BAD_INPUT] * 2
    assert f"stages[2].evaluate.metrics[0]: {words}" in " ".join(said.split())
    assert "Traceback" not in said


def test_what_metrics_are_called(tmp_path: Path) -> None:
    """The last part of an import path, or their `name`."""
    metrics = "[mine.top, {mine.other.top: {}, name: other}, mine.perplexity]"
    run = run_pipeline(tmp_path, pipeline(tmp_path, METRICS=metrics), 1)
    found = summary(run)["metrics"]
    assert {key: found[key] for key in found if key != "loss"} == {
        "top": 7.0,
        "other": 6.0,
        "perplexity": 4.0,
    }


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("data", ["mine.Padded", "{mine.Padded: {size: 2}}", "mine.Row"])
def test_a_model_may_call_collectives_in_evaluate(tmp_path: Path, ranks: int, data: str) -> None:
    """Every rank calls it as often, on batches of one size, though the held-out part is uneven."""
    text = pipeline(tmp_path, GATHERS="true", DATA=data, SIZE="2")
    text = text.replace("train: mine.Padded", "train: {mine.Padded: {size: 12}}")
    run = run_pipeline(tmp_path, text, ranks)
    assert summary(run)["stages"][-1]["samples"] == {"m": 23, "{": 2}[data[0]]


@pytest.mark.parametrize("more", ["", "weight_by: {targets: {}}"])
def test_a_metric_may_call_collectives(tmp_path: Path, more: str) -> None:
    """In the last pass rank 1 has no sample left, and in some passes there are targets on one rank alone.
    What the function gives for a pass counts as often as the pass has samples, or targets.
    """
    text = pipeline(tmp_path, METRICS="[mine.together, accuracy]", SIZE="1") + more
    run = run_pipeline(tmp_path, text.replace("stages:", "launch: {timeout_s: 20}\nstages:"), 2)
    output, targets = output_and_targets(tmp_path, run)
    right = (output.argmax(1) == targets).double().mean(1)
    weights = (targets != -100).sum(1).double() if more else torch.ones(23, dtype=torch.float64)
    passes = [[place, place + 1] for place in range(0, 22, 2)] + [[22]]
    total = sum(right[both].mean() * weights[both].sum() for both in passes)
    found = summary(run)["stages"][-1]
    assert found["samples"] == 23
    assert found["metrics"]["together"] == pytest.approx(float(total / weights.sum()), rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 21, 22, 35, 257])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [1, 4, 64])
def test_calls_are_as_many_and_as_large_on_every_rank(length: int, ranks: int, most: int) -> None:
    """Sample i goes to rank i modulo ranks, once and in order."""
    passes = [list(rank_batches(range(length), most, rank, ranks)) for rank in range(ranks)]
    sizes = [[len(samples) for samples, _ in of_rank] for of_rank in passes]
    assert sizes == [sizes[0]] * ranks
    assert all(0 < size <= most for size in sizes[0])
    assert len(sizes[0]) <= length // ranks // most + 2
    for rank, of_rank in enumerate(passes):
        counted = [index for samples, count in of_rank for index in samples[:count]]
        assert counted == list(range(rank, length, ranks))


def attempt() -> None:
    os.dup2(os.open("said", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    run_worker(load(Path("p.yaml")), Path("run"))


def test_held_out_data_that_is_at_its_end_is_named(tmp_path: Path) -> None:
    """A second evaluate stage would measure nothing."""
    text = pipeline(tmp_path, DATA="mine.OneShot") + "  - evaluate\n"
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(AssertionError, match="ended without a word"):
        as_processes(1, attempt, cwd=tmp_path)
    said = (tmp_path / "said").read_text()
    assert (
        'data.evaluate: "mine.OneShot": it has no sample to evaluate on; data that can be read only' in said
    )
    assert "Traceback" not in said


DRAWING = """
model: mine.Noisy
data: {train: mine.Padded, evaluate: mine.Drawn}
loss: model
loader: {batch_size: 4}
optimizer: {sgd: {lr: 0.1}}
launch: {device: cpu}
stages:
  - train: {steps: 4, evaluate: {every: 2}}
"""
DRAWING_MODULE = """

class Drawn(IterableDataset):
    def __iter__(self):
        for _ in range(11):
            yield torch.randn(6, 3), torch.zeros(6)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, numbers, targets):
        torch.randn(1 + int(os.environ["RANK"]))
        return {"loss": self.layer(numbers).square().mean(), "seen": numbers.mean()}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_draws_alike_on_all_ranks_though_the_model_draws_too(ranks: int, tmp_path: Path) -> None:
    """Each evaluation has the samples that the seed gives, each of them once."""
    (tmp_path / "mine.py").write_text(MODULE.replace("IGNORED", "-100") + DRAWING_MODULE)
    run_dir = run_pipeline(tmp_path, DRAWING, ranks)
    torch.manual_seed(1 << 31)  # training data draws from seeds that begin at 0
    wanted = torch.stack([torch.randn(6, 3) for _ in range(11)]).mean().item()
    measured = [event["seen"] for event in events(run_dir) if event["event"] == "evaluated"]
    assert measured == [pytest.approx(wanted, abs=1e-7)] * 2
    assert not [event for event in events(run_dir) if event["event"] == "data_differs"]
