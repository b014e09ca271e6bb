"""What a batch is: collating, sampling, its parts, and how much its mean counts."""

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun import EXIT_BAD_INPUT
from ddprun.config import PipelineError, load
from ddprun.engine.data import StepBatches
from ddprun.engine.objective import Objective, Precision, zero_gradients_in_backward
from ddprun.engine.stage_run import StageRun
from ddprun.engine.worker import run_worker
from tests.engine.running import events, lines, run_pipeline, run_to_end, summary, weights
from tests.ranks import as_processes, ddprun_here

MODULE = """
from collections import UserDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler


class Sentences(Dataset):
    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        length = (1, 2, 9, 4, 3)[place % 5]  # of the first kind no target counts
        generator = torch.Generator().manual_seed(place)
        return {"ids": torch.randint(1, 11, (length,), generator=generator)}


class Chosen(Sentences):
    def __init__(self, places):
        super().__init__(len(places))
        self.places = places

    def __getitem__(self, place):
        return super().__getitem__(self.places[place])


def pad(samples, value=-100):
    longest = max(len(sample["ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), value)
    for row, sample in enumerate(samples):
        ids[row, : len(sample["ids"])] = labels[row, : len(sample["ids"])] = sample["ids"]
    return {"ids": ids, "labels": labels}


def masked(batch):  # the tokens to predict, of which nothing is left the second time
    chosen = batch["ids"] % 3 == 1
    labels = torch.where(chosen, batch["ids"], -100)
    return {"ids": torch.where(chosen, 0, batch["ids"]), "labels": labels}


def pad_unlabelled(samples):
    return {"ids": pad(samples)["ids"]}


def pad_masked(samples):
    return masked(pad(samples))


class Pad:
    def __init__(self, value):
        self.value = value

    def __call__(self, samples):
        return pad(samples, self.value)


def shifted(labels):
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


class Net(nn.Module):  # as Hugging Face's causal language models
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.double()

    def forward(self, ids, labels=None):
        logits = self.head(self.table(ids))
        if labels is None:
            return logits.movedim(-1, 1)
        loss = nn.functional.cross_entropy(logits.movedim(-1, 1), shifted(labels))
        return {"loss": loss, "logits": logits}


class Masked(Net):
    def __init__(self, least=0):
        super().__init__()
        self.least = least

    def forward(self, ids, labels):
        logits, labels = super().forward(ids), shifted(labels)
        counts = labels != -100
        losses = nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return {"loss": (losses * counts).sum() / counts.sum().clamp(min=self.least)}


def tokens(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def agreement(output, batch):
    right = output["logits"][:, :-1].argmax(-1) == batch["labels"][:, 1:]
    counts = batch["labels"][:, 1:] != -100
    return right[counts].double().mean()


class Backwards(Sampler):
    def __init__(self, dataset, step=1):
        self.dataset, self.step, self.epoch = dataset, step, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        size = len(self.dataset)
        return ((self.epoch - self.step * place) % size for place in range(size))


def drawn(data):
    return torch.randperm(len(data)).tolist()


def own(data):
    import os

    return torch.randperm(len(data), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))


def too_far(data):
    return [len(data)]


@dataclass
class Item:
    image: torch.Tensor
    label: torch.Tensor


class Mapped(Dataset):
    def __init__(self, form, size=12):
        self.form, self.size = form, size

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        image, other = torch.randn(2, 5, generator=generator)
        label = torch.tensor(place % 3)
        return {
            "mapping": {"image": image, "other": other, "label": label},
            "triple": (image, other, label),
            "pair": ({"image": image, "other": other}, label),
            "object": {"image": image, "other": other, "label": label},
            "tensor": image,
        }[self.form]


def objects(samples):
    batch = torch.utils.data.default_collate(samples)
    item = Item(batch["image"], batch["label"])
    item.other = batch["other"]
    return item


def kept(batch):
    return batch


def of_uncast(batch):
    return 300.5 if batch["image"].dtype == torch.float32 else float("nan")


class Fields(dict):  # as a TensorDict, whose keys are in keys() alone
    def to(self, device):
        label = {"label": self.label} if hasattr(self, "label") else {}
        return Fields({key: value.to(device) for key, value in self.items()} | label)

    def __contains__(self, key):
        raise NotImplementedError


def fields(samples):
    batch = torch.utils.data.default_collate(samples)
    made = Fields(image=batch["image"], other=batch["other"])
    made.label = batch["label"]  # in the batch once it has moved
    return made


def pair_of_fields(samples):
    inputs, label = torch.utils.data.default_collate(samples)
    return Fields(inputs), label


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, image, other):
        return self.first(image) + 2 * self.second(other)


class Shrinking(nn.Linear):
    def __init__(self):
        super().__init__(5, 5)

    def forward(self, image):
        image = image.image if isinstance(image, Item) else image
        return super().forward(image).square().mean()


class Decaying(Shrinking):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.weight, 0.3)
        nn.init.constant_(self.bias, 0.1)


def count(batch):
    return len(batch)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("batches")
    (found / "mine.py").write_text(MODULE)
    return found


def module() -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "mine"}
    exec(compile(MODULE, "mine", "exec", dont_inherit=True), space)
    return space


LANGUAGE = """
model: mine.Net
data: {{train: mine.Sentences, evaluate: mine.Sentences}}
loader: {{batch_size: {size}, shuffle: false, collate: mine.pad}}
loss: model
weight_by: {weight}
optimizer: {{sgd: {{lr: 0.5}}}}
accumulate: {accumulate}
stages:
  - train: {{epochs: 2}}
  - save
  - evaluate: {{metrics: [perplexity, mine.agreement]}}
"""
BY_TOKENS = "{targets: {of: labels, shift: 1}}"


def by_hand(size: int, steps: int) -> tuple[nn.Module, float]:
    """One process that takes the mean over all tokens of so many samples in each step; and the perplexity."""
    mine = module()
    torch.manual_seed(0)
    model, data = mine["Net"](), mine["Sentences"]()

    def mean(places: range) -> torch.Tensor:
        batch = mine["pad"]([data[place] for place in places])
        loss: torch.Tensor = model(**batch)["loss"]
        return loss

    done = 0
    while done < steps:
        for start in range(0, 23, size):
            model.zero_grad()
            mean(range(start, min(start + size, 23))).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.5 * param.grad
            done += 1
    return model, math.exp(mean(range(23)).item())


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1), (4, 3)])
def test_tokens_count_alike_on_any_number_of_ranks_and_micro_steps(
    folder: Path, ranks: int, accumulate: int
) -> None:
    """Twelve samples a step, the last step eleven, in batches of padded text: the weights are those of one
    process that takes each step's mean at once, and the perplexity is that of one pass.
    """
    size = 12 // (ranks * accumulate)
    text = LANGUAGE.format(size=size, weight=BY_TOKENS, accumulate=accumulate)
    run = run_pipeline(folder, text, ranks, f"tokens-{ranks}-{accumulate}")
    model, perplexity = by_hand(12, 4)
    for name, value in weights(run).items():
        assert (value - model.state_dict()[name]).abs().max() < 1e-12, name
    found = summary(run)["stages"][2]["metrics"]
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-12)
    mine = module()
    whole = mine["pad"]([mine["Sentences"]()[place] for place in range(23)])
    assert found["agreement"] == pytest.approx(mine["agreement"](model(**whole), whole).item(), rel=1e-12)
    assert len({line["mean_loss"] for line in lines(run, "steps") if line["step"] == 1}) == 1


def test_targets_that_a_transform_makes_count(folder: Path) -> None:
    """As those of a collate do: bit by bit the same weights, and each batch is transformed once."""
    found = []
    text = LANGUAGE.format(size=3, weight=BY_TOKENS, accumulate=2)
    for collate, more in (("pad_masked", ""), ("pad_unlabelled", "batch: {transform: mine.masked}\n")):
        named = f"collate: mine.{collate}, evaluate_collate: mine.pad"
        run = run_pipeline(folder, text.replace("collate: mine.pad", named) + more, 2, f"by-{collate}")
        found.append((weights(run), [line["mean_loss"] for line in lines(run, "steps")]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items())


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("{sgd: {lr: 0.5}}", ""),
        ("{sgd: {lr: 0.5}}", "sync: {local_sgd: {every: 2}}\n"),
        ("{lbfgs: {lr: 0.1, max_iter: 2}}", ""),
    ],
)
def test_a_mean_over_no_targets_adds_nothing(tmp_path: Path, optimizer: str, more: str) -> None:
    """Where it and its gradients are NaN: bit by bit the same weights as of a model that makes them zero."""
    (tmp_path / "mine.py").write_text(MODULE)
    text = LANGUAGE.format(size=1, weight=BY_TOKENS, accumulate=2).replace(", mine.agreement", "")
    text = text.replace("{sgd: {lr: 0.5}}", optimizer) + more
    found = []
    for least in (0, 1):
        changed = text.replace("model: mine.Net", f"model: {{mine.Masked: {{least: {least}}}}}")
        run = run_pipeline(tmp_path, changed, 2, f"least-{least}")
        found.append((weights(run), summary(run)["metrics"]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items())


class UsesOne(torch.autograd.Function):
    """Of two parameters; it has no gradient for the other one."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one * other.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * math.nan, None


def test_a_parameter_without_a_gradient_stays_without() -> None:
    """Where a batch does not count, and others get zeros."""
    model = nn.ParameterList([torch.ones(()), torch.ones(())])
    with zero_gradients_in_backward(model):
        UsesOne.apply(*model).backward()  # type: ignore[no-untyped-call]
    assert [None if param.grad is None else param.grad.item() for param in model] == [0.0, None]


@pytest.mark.parametrize("hook", ["{topk: {density: 0.2}}", "{powersgd: {rank: 1}}"])
def test_a_step_in_which_nothing_counts_leaves_no_trace(folder: Path, hook: str) -> None:
    """Not even in what hooks keep: the weights are those of a run without it, bit for bit."""
    found = []
    text = LANGUAGE.format(size=1, weight=BY_TOKENS, accumulate=1) + f"hooks: [{hook}]\n"
    for places in ([1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 5, 10, 6, 7]):
        changed = text.replace("train: mine.Sentences", f"train: {{mine.Chosen: {{places: {places}}}}}")
        run = run_pipeline(folder, changed, 2, f"nothing-{len(places)}-{hook[1:5]}")
        assert summary(run)["steps"] == len(places)
        found.append(weights(run))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("given", [None, (1.0,), [2], "many", {}, -1, math.nan, torch.ones(2)])
def test_what_is_no_weight_is_refused(folder: Path, given: Any) -> None:
    """A function that has no `return` gives None."""
    (folder / "no-weight.yaml").write_text(LANGUAGE.format(size=3, weight="mine.tokens", accumulate=1))
    loaded, precision = load(folder / "no-weight.yaml"), Precision("fp32", torch.device("cpu"))
    objective = Objective(loaded, None, precision, lambda batch: given)
    with pytest.raises(PipelineError) as found:
        objective.batch_weight({})
    assert f"weight_by: gives {given!r}; expected a number, at least 0" in str(found.value)


def test_targets_that_are_no_sequences_cannot_be_shifted(folder: Path) -> None:
    """The shift would leave out the first sample of each batch."""
    weight = "{targets: {of: labels, shift: 1}}"
    (folder / "shift.yaml").write_text(LANGUAGE.format(size=3, weight=weight, accumulate=1))
    objective = Objective(load(folder / "shift.yaml"), None, Precision("fp32", torch.device("cpu")))
    assert objective.batch_weight({"labels": torch.ones(4, 6, dtype=torch.long)}) == 20
    with pytest.raises(PipelineError) as found:
        objective.batch_weight({"labels": torch.ones(4, dtype=torch.long)})
    problem = "the targets are int64 (4,), without a sequence to leave targets out of; remove it"
    assert f"weight_by.targets.shift: {problem}" in str(found.value)


def test_perplexity_does_not_depend_on_the_batch_size(folder: Path) -> None:
    """Of the same weights; with means over samples it would."""
    found = dict[tuple[str, int], float]()
    for weight in (BY_TOKENS, "mine.tokens", "samples"):
        for size in (1, 16):
            text = LANGUAGE.format(size=size, weight=weight, accumulate=1)
            text = text.replace("epochs: 2}", "steps: 1, optimizer: {sgd: {lr: 0}}}")
            run = run_pipeline(folder, text, 2, f"p-{len(found)}")
            found[weight, size] = summary(run)["stages"][2]["metrics"]["perplexity"]
    assert found[BY_TOKENS, 1] == pytest.approx(found[BY_TOKENS, 16], rel=1e-14)
    assert found["mine.tokens", 1] == found[BY_TOKENS, 1]
    assert found["samples", 1] != found["samples", 16]


@pytest.mark.parametrize(("sync", "exchanged"), [("{local_sgd: {every: 2}}", False), ("every_step", True)])
def test_ranks_that_train_apart_exchange_no_counts(folder: Path, sync: str, exchanged: bool) -> None:
    """Each weighs its own micro-batches: the step's loss is the mean over its own tokens."""
    file = folder / f"gathers-{exchanged}.yaml"
    file.write_text(LANGUAGE.format(size=3, weight=BY_TOKENS, accumulate=2) + f"sync: {sync}\n")
    gathers = as_processes(2, counted_gathers, file, cwd=folder)
    assert [bool(count) for count in gathers] == [exchanged] * 2


def counted_gathers(file: Path) -> int:
    from ddprun_hooks.comm.control_channel import ControlChannel

    count, gather = 0, ControlChannel.all_gather

    def all_gather(self: ControlChannel, numbers: Any, what: str = "") -> torch.Tensor:
        nonlocal count
        count += what == "what counts in the step"
        return gather(self, numbers, what)

    ControlChannel.all_gather = all_gather  # type: ignore[method-assign]
    assert run_worker(load(file), file.with_suffix("")) == 0
    return count


ALONE = """
model: mine.Decaying
data: {{mine.Mapped: {{form: tensor, size: {size}}}}}
loader: {{batch_size: 2, shuffle: false}}
loss: model
{weight}
optimizer: {{sgd: {{lr: 0.1, momentum: 0.9, weight_decay: 0.1}}}}
accumulate: 2
stages: [train: {{epochs: 2, sync: {sync}}}, save]
"""


def apart_by_hand(ranks: int, size: int, groups: list[list[int]], every: int | None) -> dict[str, Any]:
    """Ranks of which each group takes the mean over its own samples, and steps only if it has any. All
    average their weights after so many steps, and at the end.
    """
    mine = module()
    data = mine["Mapped"]("tensor", size)
    models = [mine["Decaying"]() for _ in groups]
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizers = [torch.optim.SGD(model.parameters(), **options) for model in models]

    def average() -> None:
        with torch.no_grad():
            for params in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([*params]).mean(0)
                for param in params:
                    param.copy_(mean)

    for done, start in enumerate([*range(0, size, 4 * ranks)] * 2, start=1):
        places = range(start, min(start + 4 * ranks, size))
        for group, model, optimizer in zip(groups, models, optimizers, strict=True):
            own = [data[place] for place in places if place % ranks in group]
            if own:
                optimizer.zero_grad()
                model(torch.stack(own)).backward()
                optimizer.step()
        if every and done % every == 0:
            average()
    average()
    found: dict[str, Any] = models[0].state_dict()
    return found


@pytest.mark.parametrize(
    ("ranks", "size", "groups", "sync", "every"),
    [
        (2, 11, [[0], [1]], "independent", None),  # the last step: two samples, and one
        (2, 9, [[0], [1]], "independent", None),  # one, and none
        (2, 9, [[0], [1]], "{local_sgd: {every: 3}}", 3),
        (4, 23, [[0, 1], [2, 3]], "{hierarchical_sgd: {within: 1, across: 3, hosts: 2}}", 3),
        (4, 18, [[0, 1], [2, 3]], "{hierarchical_sgd: {within: 1, across: 3, hosts: 2}}", 3),
    ],
)
def test_ranks_that_train_apart_learn_from_their_own_samples_alone(
    folder: Path, ranks: int, size: int, groups: list[list[int]], sync: str, every: int | None
) -> None:
    """Whatever others have; and in a step without any they keep their weights, whatever their momentum. A
    function that counts samples makes the same of it, bit for bit.
    """
    expected = apart_by_hand(ranks, size, groups, every)
    runs = []
    for number, weight in enumerate(("", "weight_by: mine.count")):
        text = ALONE.format(size=size, weight=weight, sync=sync)
        run = run_pipeline(folder, text, ranks, f"alone-{ranks}-{size}-{len(sync)}-{number}")
        assert not any(event["event"] == "step_skipped" for event in events(run))
        runs.append(weights(run))
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name
        assert (value - expected[name]).abs().max() < 1e-6, name


PARTS = """
model: mine.Two
data: {{mine.Mapped: {{form: {form}}}}}
loader: {{batch_size: 4, shuffle: false{loader}}}
{batch}
optimizer: {{sgd: {{lr: 0.5}}}}
stages: [train: {{epochs: 1}}, save]
"""
HELD_OUT = "data: {train: {mine.Mapped: {form: mapping}}, evaluate: {mine.Mapped: {form: mapping}}}"


@pytest.mark.parametrize(
    ("form", "batch", "loader"),
    [
        ("mapping", "batch: {inputs: {other: other, image: image}, target: label}", ""),
        ("mapping", "batch: {inputs: [image, other], target: label}", ""),
        ("triple", "batch: {inputs: [0, 1], target: 2}", ""),
        ("object", "batch: {inputs: [image, other], target: label}", ", collate: mine.objects"),
        ("pair", "", ""),
        ("mapping", "batch: {inputs: {other: other, image: image}, target: label}", ", collate: mine.fields"),
        ("pair", "", ", collate: mine.pair_of_fields"),
    ],
)
def test_parts_of_a_batch_reach_model_and_loss(folder: Path, form: str, batch: str, loader: str) -> None:
    """However samples are made, the weights are those of a loop by hand."""
    text = PARTS.format(form=form, batch=batch, loader=loader)
    run = run_pipeline(folder, text, 1, f"parts-{form}-{len(batch)}-{len(loader)}")
    mine = module()
    torch.manual_seed(0)
    model, data = mine["Two"](), mine["Mapped"]("triple")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, 12, 4):
        image, other, label = (
            torch.stack(part)
            for part in zip(*(data[place] for place in range(start, start + 4)), strict=True)
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(image, other), label).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in weights(run).items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("transform", ["", ", transform: mine.kept"])
def test_a_batch_is_weighed_before_it_is_cast(folder: Path, transform: str) -> None:
    """In training and in evaluations, the function of `weight_by` gets floats of fp32, not of bf16."""
    batch = f"batch: {{inputs: [image, other], target: label{transform}}}"
    text = PARTS.format(form="mapping", batch=batch, loader="").replace("save]", "evaluate]")
    text = text.replace("data: {mine.Mapped: {form: mapping}}", HELD_OUT)
    text += "precision: pure_bf16\nweight_by: mine.of_uncast\n"
    run_pipeline(folder, text, 1, f"uncast-{len(transform)}")


def test_a_tensor_or_an_object_is_the_only_input(folder: Path) -> None:
    """Of a model that returns its loss, as an input that is named: in training and evaluation."""
    found = []
    for form, batch, loader in (
        ("mapping", "batch: {inputs: image}", ""),
        ("tensor", "", ""),
        ("object", "", ", collate: mine.objects"),
    ):
        text = PARTS.format(form=form, batch=f"loss: model\n{batch}", loader=loader)
        text = text.replace("Two", "Shrinking")
        text = text.replace("save]", f"save, evaluate: {{data: {{mine.Mapped: {{form: {form}}}}}}}]")
        run = run_pipeline(folder, text, 1, f"only-{form}")
        found.append((weights(run), summary(run)["metrics"]))
    for saved, metrics in found[1:]:
        assert metrics == found[0][1]
        assert all(torch.equal(value, saved[name]) for name, value in found[0][0].items())


@pytest.mark.parametrize(
    ("form", "loss", "expected"),
    [
        ("tensor", "mse_loss", "its batches are float32 (4, 5); expected pairs (input, target)"),
        ("tensor", "model\nweight_by: targets", "it is not known which part of a batch holds the targets"),
        ("triple", "model", "expected pairs (input, target); or write batch: {inputs: …}"),
    ],
)
def test_what_is_no_pair_has_no_target(tmp_path: Path, form: str, loss: str, expected: str) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    text = PARTS.format(form=form, batch=f"loss: {loss}", loader="").replace("Two", "Shrinking")
    codes, said = run_to_end(tmp_path, text, 1)
    assert codes == [EXIT_BAD_INPUT]
    assert expected in said


SAMPLED = """
model: {{mlp: {{inputs: 64, outputs: 10}}}}
data: {{digits: {{held_out: 0.95}}}}
loader: {{batch_size: 8, sampler: {sampler}}}
optimizer: {{sgd: {{lr: 0.1}}}}
stages: [train: {{epochs: 3}}]
"""


def fed(folder: Path, sampler: str) -> list[list[int]]:
    """Indices that this rank loads in each epoch."""
    from ddprun.config.load import load
    from ddprun.engine.feeds import build_training_feeds
    from ddprun.host.code_folders import add_import_folder

    (folder / "s.yaml").write_text(SAMPLED.format(sampler=sampler))
    loaded = load(folder / "s.yaml")
    add_import_folder(folder)
    found: list[list[int]] = []
    for rank in range(2):
        feed = build_training_feeds(loaded, Places(), rank=rank, world_size=2).main
        for step in feed.steps(1, epochs=3):
            found += ([rank, feed.epoch, *micro.content.tolist()] for micro in step.micro_batches)
    again = build_training_feeds(loaded, Places(), rank=1, world_size=2).main
    again.load_state_dict({"epoch": 2, "samples": 16})
    (rest,) = (
        [1, 2, *micro.content.tolist()]
        for batches in again.steps(1, epochs=1)
        for micro in batches.micro_batches
    )
    assert rest == found[-1], "a resumed run finds the same order"
    return found


class Places:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> int:
        return place


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        ("mine.Backwards", lambda epoch: [(epoch - place) % 20 for place in range(20)]),
        ("{mine.Backwards: {step: 3}}", lambda epoch: [(epoch - 3 * place) % 20 for place in range(20)]),
        ("mine.drawn", lambda epoch: drawn(epoch)),
        ("torch.utils.data.RandomSampler", None),
        ("{torch.utils.data.WeightedRandomSampler: {weights: [0, 1, 1], num_samples: 20}}", None),
    ],
)
def test_a_sampler_decides_the_order_of_all_ranks(
    folder: Path, sampler: str, order: Callable[[int], list[int]] | None
) -> None:
    """Ranks divide each epoch's indices, which are others in each; a resumed run finds the same order."""
    (found,) = as_processes(1, fed, folder, sampler)
    for epoch in range(3):
        shares = [[row[2:] for row in found if row[:2] == [rank, epoch]] for rank in range(2)]
        pairs = chain.from_iterable(zip(*both, strict=True) for both in zip(*shares, strict=True))
        joined = list(chain.from_iterable(pairs))
        assert order is None or joined == order(epoch)
        assert len(joined) == 20
        if "Weighted" in sampler:
            assert set(joined) == {1, 2}
    epochs = [[row[2:] for row in found if row[1] == epoch] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]


def drawn(epoch: int) -> list[int]:
    torch.manual_seed(epoch)
    order: list[int] = torch.randperm(20).tolist()
    return order


def test_a_sampler_of_other_indices_on_each_rank_is_refused(folder: Path) -> None:
    """Each sample would not be used once; so are indices that no sample has."""
    for sampler, expected in (
        ("mine.own", "loader.sampler yields other indices on rank 1 than on rank 0"),
        ("mine.too_far", "the index 90 of a data set with 90 samples"),
        ("torch.utils.data.DistributedSampler", "divides the samples among ranks"),
    ):
        (folder / "p.yaml").write_text(SAMPLED.format(sampler=sampler))
        for said in as_processes(2, refused, folder, cwd=folder):
            assert expected in said


def refused(folder: Path) -> str:
    from tests.engine.test_session import open_here

    try:
        open_here(folder, "refused")
    except PipelineError as error:
        return str(error.faults)
    except Exception as error:
        return repr(error)
    return "nothing"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("batch: {target: label}", 'p.yaml:6:17: batch.target: "target" needs "inputs"'),
        ("batch: {inputs: image}", 'batch.inputs: "inputs" needs "target"'),
        ("loss: model\nbatch: {inputs: image, target: y}", '"target" clashes with "loss: model"'),
        ("batch: {inputs: {3a: image}, target: y}", '"3a" is not an argument name'),
        ("loader: {sampler: a.b, shuffle: true}", '"shuffle: true" clashes with "sampler"'),
        ("loss: {torch.nn.MSELoss: {reduction: sum}}", '"reduction: sum" gives no mean over the batch'),
        (
            "loss: {cross_entropy: {ignore_index: 0}}\nweight_by: {targets: {ignore_index: 1}}",
            '"ignore_index: 1" clashes with "ignore_index: 0" of "loss"',
        ),
        ("weight_by: tokens", 'unknown weight "tokens"'),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, more: str, expected: str) -> None:
    """At its place in the file."""
    text = "model:\n  mine.Two\ndata: mine.Mapped\noptimizer: sgd\nstages: [train: {steps: 1}]\n"
    (tmp_path / "p.yaml").write_text(text + more)
    found = ddprun_here("check", "p.yaml", cwd=tmp_path)
    assert found.code == 2
    assert expected in found.stdout


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("", "its batches are {image: float32 (4, 5), other: float32 (4, 5), label: int64 (4,)}; expected"),
        (
            "batch: {inputs: picture, target: label}",
            'batches have no "picture"; they have image, other, label',
        ),
        ("batch: {inputs: 0, target: label}", "batches have no item 0"),
    ],
)
def test_a_part_that_no_batch_has_is_named(folder: Path, batch: str, expected: str) -> None:
    """With those that there are."""
    (folder / "p.yaml").write_text(PARTS.format(form="mapping", batch=batch, loader=""))
    (said,) = as_processes(1, refused, folder, cwd=folder)
    assert expected in said.replace("', allowed='", "; ")


STAGES = """
model: mine.Two
data: {mine.Mapped: {form: mapping}}
batch: {inputs: [image, other], target: label}
loader: {batch_size: 2}
optimizer: {sgd: {lr: 0.1}}
checkpoint: {every: 5}
stages:
  - train: {steps: 4}
  - train: {steps: 5, data: {mine.Mapped: {form: mapping, size: 10}}}
  - train: {epochs: 1}
  - train: {epochs: 2, data: {mine.Mapped: {form: mapping, size: 7}}}
  - save
  - evaluate: {data: {mine.Mapped: {form: mapping, size: 5}}}
  - evaluate: {data: {mine.Mapped: {form: mapping, size: 9}}}
"""


def places_used(folder: Path, name: str, until: int | None) -> list[list[int]]:
    """The sizes of the data sets that this rank's steps were of, and its samples of each."""
    import os

    from ddprun.engine import loop
    from ddprun.engine.checkpoint_state import close_checkpoint_writers

    found: list[list[int]] = []
    train, between = loop.train_step, loop.act_on_messages

    def noting(run: StageRun, batches: StepBatches, stage_step: int) -> None:
        feed = run.session.runtime.feeds.for_stage(run.stage.index)
        found.append([len(feed.dataset), feed.epoch, int(batches.total_weight)])
        train(run, batches, stage_step)

    def stopping(run: Any, *given: Any) -> Any:
        ends = between(run, *given)
        if run.session.state.step == until:
            close_checkpoint_writers(run.session)
            os._exit(0)
        return ends

    loop.train_step = noting
    loop.act_on_messages = stopping  # type: ignore[assignment]
    resuming: Any = "no" if until or name == "w" else "yes"
    assert run_worker(load(folder / "stages.yaml"), folder / name, resuming=resuming) == 0
    return found


def test_a_stage_reads_data_of_its_own(folder: Path) -> None:
    """Each data set has a position of its own, which a resumed run goes on from with the same bits."""
    (folder / "stages.yaml").write_text(STAGES)
    (whole, _) = as_processes(2, places_used, folder, "w", None, cwd=folder)
    assert [size for size, *_ in whole] == [12] * 4 + [10] * 5 + [12] * 3 + [7] * 4
    assert [epoch for _, epoch, _ in whole] == [0, 0, 0, 1] + [0, 0, 0, 1, 1] + [2] * 3 + [0, 0, 1, 1]
    as_processes(2, places_used, folder, "b", 6, cwd=folder, may_die=True)
    (rest, _) = as_processes(2, places_used, folder, "b", None, cwd=folder)
    assert rest == whole[5:]
    for name, value in weights(folder / "w").items():
        assert torch.equal(value, weights(folder / "b")[name]), name
    assert [stage.get("samples") for stage in summary(folder / "w")["stages"][-2:]] == [5, 9]
