"""Passes before step 1 leave no trace: step 1 finds model and loss as they were built."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.config import load
from ddprun.engine.build import build_datasets
from ddprun.engine.compiling import compile_model
from ddprun.engine.feeds import build_training_feeds
from ddprun.engine.objective import Objective, Precision, warmup_pass
from ddprun.engine.seeding import preserve_state, seed_everything
from tests.engine.running import lines, run_pipeline, weights

MODULE = '''
import random
import threading
from collections import deque

import numpy as np
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.inputs[index], int(self.inputs[index].sum() > 4)


class Net(nn.Module):
    """A layer of which each of the classes below changes the output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.build()

    def build(self):
        pass

    def change(self, inputs):
        return 0

    def forward(self, inputs):
        return self.layer(inputs) + self.change(inputs)


class Teacher(Net):
    """Frozen, and moved by forward: behind torch's back."""

    def build(self):
        self.teacher = nn.Linear(4, 2).requires_grad_(False)

    def change(self, inputs):
        for mine, own in zip(self.teacher.parameters(), self.layer.parameters()):
            mine.data.lerp_(own.data, 0.3)
        return self.teacher(inputs)


class HiddenTeacher(Teacher):
    """No part of the module: no parameter of its own."""

    def build(self):
        self.__dict__["teacher"] = nn.Linear(4, 2).requires_grad_(False)


class Shifted(Net):
    """Sets a trained parameter from the data that it sees."""

    def build(self):
        self.shift = nn.Parameter(torch.zeros(2))

    def change(self, inputs):
        self.shift.data.sub_(self.layer(inputs).detach().mean(0))
        return self.shift


class Rebound(Net):
    """Gives its buffer's name to another tensor."""

    def build(self):
        self.register_buffer("mean", torch.zeros(2))

    def change(self, inputs):
        self.mean = 0.9 * self.mean + inputs.mean(0)[:2]
        return self.mean


class Stats:
    """What nobody can copy, for its lock."""

    def __init__(self):
        self.lock, self.passes = threading.Lock(), 0


class Extra(Net):
    """Has state that only its own two methods know how to read and write."""

    def build(self):
        self.stats = Stats()

    def get_extra_state(self):
        return {"passes": self.stats.passes}

    def set_extra_state(self, state):
        self.stats.passes = state["passes"]

    def change(self, inputs):
        self.stats.passes += 1
        return torch.tensor([0.0, self.stats.passes])


class Counter(Net):
    """Plain attributes: a number, a queue of tensors, a new attribute, one that a child has."""

    def build(self):
        self.passes, self.queue = 0, deque([torch.ones(2)], maxlen=3)
        self.layer.seen = []

    def change(self, inputs):
        self.passes += 1
        self.queue.append(inputs.mean(0)[2:])
        self.layer.seen.append(self.passes)
        self.cache = getattr(self, "cache", 0) + 1
        return sum(self.queue) + torch.tensor([self.cache, len(self.layer.seen)])


class Hooked(Net):
    """A hook takes itself away."""

    def build(self):
        def once(module, inputs, output):
            handle.remove()
            return output + torch.tensor([0.0, 5.0])

        handle = self.layer.register_forward_hook(once)

    def change(self, inputs):
        return 0


class Drawing(Net):
    """Draws from every generator, and from its own."""

    def build(self):
        self.generator = torch.Generator().manual_seed(3)

    def change(self, inputs):
        drawn = random.random() + float(np.random.rand()) + torch.rand(2, generator=self.generator)
        return nn.functional.dropout(inputs[:, :2]) + drawn


class Smooth:
    """A loss that is an object and no module."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(output, target, label_smoothing=0.5 / self.calls)


class Centres(nn.Module):
    """A loss that is a module, and follows what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        self.centre.add_(output.detach().mean(0))
        return nn.functional.cross_entropy(output - self.centre * self.calls, target)
'''
MODELS = ["Teacher", "HiddenTeacher", "Shifted", "Rebound", "Extra", "Counter", "Hooked", "Drawing"]
PIPELINE = """
model: traces.MODEL
data: {train: traces.Points}
loss: LOSS
loader: {batch_size: 8, shuffle: false}
optimizer: {sgd: {lr: 0.05}}
stages: [{train: {steps: 4}}, save]
"""


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Any]:
    """The module of this page, as a run imports it."""
    file = tmp_path / "traces.py"
    file.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("traces", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["traces"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["traces"]


def plain_loop(traces: Any, model: str, loss: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of four steps, as anyone writes them."""
    batches = list(torch.utils.data.DataLoader(traces.Points(), batch_size=8))
    seed_everything(0)
    net = getattr(traces, model)()
    objective = getattr(traces, loss)() if loss != "cross_entropy" else nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    seed_everything(0)
    losses = []
    for inputs, labels in batches[:4]:
        value = objective(net(inputs), labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, net.state_dict()


@pytest.mark.parametrize(
    ("model", "loss"),
    [*((model, "cross_entropy") for model in MODELS), ("Net", "Smooth"), ("Net", "Centres")],
)
def test_a_run_is_the_plain_loop(tmp_path: Path, traces: Any, model: str, loss: str) -> None:
    """Bit for bit, from the first loss to the last weight, though DDP's buckets and the use of buffers are
    found out by passes before.
    """
    own = PIPELINE.replace("MODEL", model)
    own = own.replace("LOSS", loss if loss == "cross_entropy" else f"traces.{loss}")
    run = run_pipeline(tmp_path, own, 1)
    losses, final = plain_loop(traces, model, loss)
    assert [one["loss"] for one in lines(run, "steps")] == losses
    final.pop("_extra_state", None)
    found = weights(run)
    for name, value in final.items():
        assert torch.equal(found[name], value), name


class Version(nn.Linear):
    """Writes into checkpoints what it does not read from there."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}


def test_extra_state_that_cannot_be_set_is_left_alone() -> None:
    """As torch's own `load_state_dict` leaves it."""
    with preserve_state(torch.device("cpu"), module := Version(2, 2)):
        module.bias.data.zero_()
    assert module.bias.abs().sum()


class Holder(nn.Module):
    """Two children share a list; one attribute cannot be copied, and holds what another one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.one.log = self.other.log = []  # type: ignore[assignment]
        self.busy = [self.one.log, threading.Lock()]
        self.parts = {"weight": self.one.weight, "other": self.other}


def test_copies_are_as_connected_as_what_they_stand_for() -> None:
    """What is shared stays shared, parameters and modules stay themselves, and all of it comes back, also
    after an error.
    """
    module = Holder()
    log, busy, weight = module.one.log, module.busy, module.one.weight.detach().clone()

    def passes() -> None:
        with preserve_state(torch.device("cpu"), module, None, max):
            assert module.one.log is module.other.log
            assert module.one.log is not log
            assert module.busy is busy
            assert module.parts["weight"] is module.one.weight
            assert module.parts["other"] is module.other
            module.one.log.append(1)  # type: ignore[operator, union-attr]
            module.one.weight.data.zero_()
            module.one.weight = nn.Parameter(torch.ones(2, 2))
            del module.busy
            module.extra = module.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        passes()
    assert module.one.log is module.other.log is log
    assert log == []
    assert module.busy is busy
    assert torch.equal(module.one.weight, weight)
    assert module.training
    assert module.other.training
    assert not hasattr(module, "extra")


class Cached(nn.Module):
    """Its first pass takes another way than all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.cache: Any = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(10.0)
        output: torch.Tensor = self.layer(images.flatten(1)) + self.cache
        return output


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_both_ways_of_a_model_are_compiled_before_step_1(tmp_path: Path) -> None:
    """The model's first pass is step 1's once more, and no graph is made in it, nor in step 2."""
    (tmp_path / "p.yaml").write_text(
        "model: {mlp: {inputs: 64, outputs: 10}}\ndata: digits\noptimizer: sgd\ncompile: true\n"
    )
    loaded = load(tmp_path / "p.yaml")
    model, device = Cached(), torch.device("cpu")
    objective = Objective(loaded, nn.CrossEntropyLoss(), Precision("fp32", device))
    feed = build_training_feeds(loaded, build_datasets(loaded)[0], rank=0, world_size=1).main
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8, accumulated_recompile_limit=256):
        compiler, _ = compile_model(loaded, model, backend="aot_eager")
        warmup_pass(model, objective, feed, backward=True)
        assert vars(model)["cache"] is None
        before = len(compiler.graphs)
        assert before
        for _ in range(2):
            objective(model, feed.first_batch()).loss.backward()  # type: ignore[no-untyped-call]
        assert vars(model)["cache"] is not None
    torch._dynamo.reset()
    assert len(compiler.graphs) == before
