"""Buffers: what is found out about them, when they are sent, and that readers see the same on all ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddprun.engine.seeding import preserve_state
from ddprun.sync.buffers import BufferUse, clone_buffers, is_counter_buffer, load_buffers, probe_buffer_use
from ddprun.zoo.data import digits
from tests.engine.running import events, lines, run_pipeline, run_to_end, weights
from tests.ranks import as_processes

MODELS = """
import os
from pathlib import Path
import torch
from torch import nn

class Watched(nn.Module):
    '''A cnn that writes down its running statistics when it is called for evaluation, the last time.'''

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        )

    def forward(self, images):
        file = Path(f"seen-{os.environ['RANK']}.pt")
        if not self.training:
            torch.save({name: buffer.clone() for name, buffer in self.named_buffers()}, file)
        return self.layers(images)

class Constant(nn.Module):
    '''A mask that never changes, and a table of whole numbers.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(64))
        self.register_buffer("order", torch.randperm(64))
        self.layer = nn.Linear(64, 10)

    def forward(self, images):
        return self.layer(images.flatten(1)[:, self.order] * self.mask)

class Centred(nn.Module):
    '''Training reads the running mean that it moves.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.layer = nn.Linear(64, 10)

    def forward(self, images):
        flat = images.flatten(1)
        out = self.layer(flat - self.mean)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(flat.mean(0), 0.1)
        return out

class Highest(Centred):
    '''A second pass on the same batch leaves its buffer as it is.'''

    def forward(self, images):
        flat = images.flatten(1)
        if self.training:
            self.mean.copy_(torch.maximum(self.mean, flat.amax(0)))
        return self.layer(flat / (1 + self.mean))

class Rebound(Centred):
    '''Its mean is another tensor after each pass.'''

    def forward(self, images):
        flat = images.flatten(1)
        out = self.layer(flat - self.mean)
        if self.training:
            self.mean = self.mean.lerp(flat.mean(0), 0.1)
        else:
            Path(f"mean-{os.environ['RANK']}").write_text(str(self.mean.tolist()))
        return out

class Cached(Centred):
    '''Makes one buffer in its first pass, and another longer, for the longest input so far.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("order", None, persistent=False)
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, images):
        if self.order is None:
            self.order = torch.arange(64)
        wanted = 64 if self.training else 65
        if len(self.table) < wanted:
            self.register_buffer("table", torch.ones(wanted), persistent=False)
        return super().forward(images.flatten(1)[:, self.order] * self.table[:64])

class Late(Constant):
    '''The mask begins to change on rank 1 after three forward passes in training.'''

    calls = 0

    def forward(self, images):
        if self.training:
            self.calls += 1
            if self.calls > 3 and os.environ["RANK"] == "1":
                self.mask.mul_(0.5)
        return super().forward(images)

class Backward(Constant):
    '''The mask changes in backward passes.'''

    def forward(self, images):
        out = super().forward(images)
        if self.training:
            out.register_hook(lambda gradient: gradient + 0 * self.mask.add_(gradient.norm()).sum())
        return out

class Norm(nn.Module):
    '''Its norm layer changes from the first or the fourth training pass on, and reads from the fourth on.'''

    def __init__(self, frozen, ranks="01"):
        super().__init__()
        self.frozen, self.calls = frozen, 0
        self.here = os.environ["RANK"] in ranks
        self.layers = nn.ModuleList([nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10)])

    def forward(self, images):
        flat = images.flatten(1)
        self.calls += self.training
        if self.frozen and self.calls > 3 and self.here:
            self.layers[0].eval()
        if self.frozen or self.calls > 3:
            flat = self.layers[0](flat)
        return self.layers[1](flat)

class Skewed(Constant):
    '''The mask changes on rank 1 alone; ranks add up their outputs.'''

    def forward(self, images):
        if self.training and os.environ["RANK"] == "1":
            self.mask.mul_(0.5)
        return AddUp.apply(super().forward(images))

class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        total = own.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Again(torch.optim.SGD):
    '''Takes its gradient at another point.'''

    def step(self, closure):
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad)
        closure()
        super().step()
"""
PIPELINE = """
model: MODEL
data: digits
loader: {batch_size: 8}
optimizer: {OPTIMIZER: {lr: 0.05}}
MORE
stages:
  - train: {steps: 5}
  - evaluate
  - save
"""
CNN = "{cnn: {channels: [4, 6]}}"
STATISTICS = [f"{layer}.{name}" for layer in (1, 4) for name in ("running_mean", "running_var")]


def run(folder: Path, model: str, more: str = "", ranks: int = 2, optimizer: str = "sgd") -> Path:
    (folder / "nets.py").write_text(MODELS)
    text = PIPELINE.replace("MODEL", model).replace("OPTIMIZER", optimizer).replace("MORE", more)
    return run_pipeline(folder, text, ranks)


def verdict(run: Path) -> dict[str, Any]:
    (found,) = [event for event in events(run) if event["event"] == "buffers"]
    return found


def sent(run: Path) -> dict[int, int]:
    """Bytes of buffers in each step, on rank 0."""
    found: dict[int, int] = {}
    for line in lines(run, "buckets"):
        if line["kind"] == "buffers" and line["rank"] == 0:
            found[line["step"]] = found.get(line["step"], 0) + line["bytes"]
    return found


def test_a_model_without_buffers_sends_none(tmp_path: Path) -> None:
    """Auto says so, and no record has any."""
    folder = run(tmp_path, "{mlp: {inputs: 64, hidden: [16], outputs: 10}}")
    assert verdict(folder)["verdict"] == "the model has no buffers: nothing is sent"
    assert sent(folder) == {}


def test_batchnorms_statistics_go_out_before_evaluate_and_never_in_training(tmp_path: Path) -> None:
    """Auto sees that they change and that training does not read them; counters stay where they are."""
    folder = run(tmp_path, CNN)
    found = verdict(folder)
    assert found["changing"] == STATISTICS
    assert found["counters"] == ["1.num_batches_tracked", "4.num_batches_tracked"]
    assert not found["read_in_training"]
    assert found["bytes"] == 4 * 2 * (4 + 6)
    facts = "1.running_mean, 1.running_var and 2 more, 80 bytes"
    what = f"4 of 6 buffers change in training ({facts}), and training never reads them"
    assert found["verdict"] == f"{what}: sent before evaluate and save"
    assert sent(folder) == {5: 80}, "once: before evaluate; at save nothing has changed since"


def test_constant_buffers_are_never_sent(tmp_path: Path) -> None:
    """Nor are whole numbers that all ranks have alike."""
    folder = run(tmp_path, "nets.Constant")
    assert verdict(folder)["constant"] == ["mask", "order"]
    assert verdict(folder)["verdict"] == "none of 2 buffers changes in a training pass: nothing is sent"
    assert sent(folder) == {}


def test_what_training_reads_is_sent_before_a_step(tmp_path: Path) -> None:
    """As DDP does it, because ranks would compute different things otherwise."""
    folder = run(tmp_path, "nets.Centred")
    assert verdict(folder)["read_in_training"]
    assert sent(folder) == {1: 256, 2: 256, 3: 256, 4: 256, 5: 2 * 256}


def by_hand(name: str, closure: bool) -> dict[str, Any]:
    """Five steps of two micro-batches under DDP, which sends buffers itself: what rank 0 has then."""
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {}
    exec(MODELS, scope)
    torch.manual_seed(0)
    model = scope[name]()
    ddp = DistributedDataParallel(model)
    optimizer = (scope["Again"] if closure else torch.optim.SGD)(model.parameters(), lr=0.05)
    data = digits(held_out=0.2, split_seed=0, folder=Path()).train
    sampler: Any = DistributedSampler(data, seed=0)
    batches = iter(DataLoader(data, batch_size=8, sampler=sampler))
    for _ in range(5):
        micro_batches = [next(batches), next(batches)]

        def passes(micro_batches: Any = micro_batches) -> None:
            optimizer.zero_grad()
            for index, (images, labels) in enumerate(micro_batches):
                ddp.require_backward_grad_sync = index == 1  # as `no_sync` does
                (nn.functional.cross_entropy(ddp(images), labels) / 2).backward()  # type: ignore[no-untyped-call]

        passes()
        optimizer.step(passes if closure else None)
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("name", "closure"), [("Centred", False), ("Centred", True), ("Highest", False)])
def test_several_micro_steps_send_once_as_under_ddp(tmp_path: Path, name: str, closure: bool) -> None:
    """Ranks read their own buffers in between: bit for bit, in each call of a closure, too."""
    optimizer = "nets.Again" if closure else "sgd"
    folder = run(tmp_path, f"nets.{name}", "accumulate: 2", optimizer=optimizer)
    each = 512 if closure else 256
    assert sent(folder) == {1: each, 2: each, 3: each, 4: each, 5: each + 256}
    theirs = as_processes(2, by_hand, name, closure)[0]
    assert all(torch.equal(weights(folder)[name], torch.from_numpy(theirs[name])) for name in theirs)


def test_what_training_reads_goes_with_the_policys_rounds(tmp_path: Path) -> None:
    """Where ranks train apart, their buffers are apart as their weights are."""
    folder = run(tmp_path, "nets.Centred", "sync: {local_sgd: {every: 2}}")
    assert sent(folder) == {2: 256, 4: 256, 5: 256}


def test_a_buffer_that_is_another_tensor_each_time_is_the_same_buffer(tmp_path: Path) -> None:
    """It is sent by its name, wherever one that is changed in place is."""
    folder = run(tmp_path, "nets.Rebound")
    assert verdict(folder)["changing"] == ["mean"]
    assert verdict(folder)["read_in_training"]
    assert sent(folder) == {1: 256, 2: 256, 3: 256, 4: 256, 5: 512}
    assert (tmp_path / "mean-0").read_text() == (tmp_path / "mean-1").read_text()


def test_caches_that_passes_make_are_left_to_them(tmp_path: Path) -> None:
    """A run ends as without them, though an evaluation makes one longer in the middle of training."""
    pipeline = PIPELINE.replace("steps: 5", "steps: 5, evaluate: {every: 2}")
    pipeline = pipeline.replace("MORE", "").replace("OPTIMIZER", "sgd")
    (tmp_path / "nets.py").write_text(MODELS)
    found = {}
    for model in ("Centred", "Cached"):
        folder = run_pipeline(tmp_path, pipeline.replace("MODEL", f"nets.{model}"), 2, model)
        assert verdict(folder)["changing"] == ["mean"]
        assert verdict(folder)["read_in_training"]
        found[model] = weights(folder)
    assert found["Centred"].keys() == found["Cached"].keys()
    assert all(torch.equal(value, found["Cached"][name]) for name, value in found["Centred"].items())


@pytest.mark.parametrize("model", ["nets.Late", "{nets.Norm: {frozen: false}}"])
def test_a_buffer_that_changes_later_is_sent_all_the_same(tmp_path: Path, model: str) -> None:
    """Values are looked at before each evaluate. Until then a norm layer's statistics may differ."""
    more = "audit: {on_drift: continue}" if model == "nets.Late" else ""
    folder = run(tmp_path, model, more)
    assert verdict(folder)["changing"] == []
    assert sent(folder) == {5: 256 if more else 512}


@pytest.mark.parametrize(
    ("model", "steps", "name", "where"),
    [
        ("nets.Late", "steps: 5", "mask", "at the end of stages[0].train"),
        ("nets.Late", "steps: 5, evaluate: {every: 4}", "mask", "in stages[0].train, step 4"),
        ("nets.Backward", "steps: 5", "mask", "after step 1 of stages[0].train"),
        ("{nets.Norm: {frozen: true}}", "steps: 5", "layers.0.running_mean", "at the end of stages[0].train"),
        (
            "{nets.Norm: {frozen: true, ranks: '1'}}",
            "steps: 5",
            "layers.0.running_mean",
            "at the end of stages[0].train",
        ),
    ],
)
def test_a_buffer_that_is_not_sent_and_differs_ends_the_run(
    tmp_path: Path, model: str, steps: str, name: str, where: str
) -> None:
    """It is named, with the way out."""
    (tmp_path / "nets.py").write_text(MODELS)
    text = PIPELINE.replace("MODEL", model).replace("OPTIMIZER", "sgd").replace("steps: 5", steps)
    codes, printed = run_to_end(tmp_path, text.replace("MORE", ""))
    assert codes == [1, 1]
    text = "the ranks hold different buffers, which the sync policy does not allow"
    assert f'{where} {text}: "{name}"' in printed
    assert "write buffers: every_forward" in printed
    assert "mutate" not in printed


def test_what_changes_on_one_rank_is_found_though_the_model_calls_collectives(tmp_path: Path) -> None:
    """Ranks make as many passes to find out, whatever each one sees."""
    folder = run(tmp_path, "nets.Skewed", "launch: {timeout_s: 20}")
    assert verdict(folder)["changing"] == ["mask"]
    assert verdict(folder)["read_in_training"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("every_forward", {1: 80, 2: 80, 3: 80, 4: 80, 5: 160}),
        ("{every: 2}", {2: 80, 4: 80, 5: 80}),
        ("{every: 2, reduce: mean}", {2: 80, 4: 80, 5: 80}),
        ("before_evaluate", {5: 80}),
        ("{when: before_evaluate, reduce: mean}", {5: 80}),
        ("never", {}),
    ],
)
def test_each_setting_sends_when_it_says(tmp_path: Path, setting: str, expected: dict[int, int]) -> None:
    """Running statistics of 80 bytes, by step; before evaluate too, but under `never`."""
    assert sent(run(tmp_path, CNN, f"buffers: {setting}")) == expected


@pytest.mark.parametrize(
    "more",
    [
        "",
        "buffers: {when: auto, reduce: mean}",
        "sync: {local_sgd: {every: 2}}",
        "sync: independent",
        "sync: {diloco: {every: 4, overlap_steps: 2}}\nbuffers: before_evaluate",
    ],
)
def test_every_rank_evaluates_and_saves_the_same_statistics(tmp_path: Path, more: str) -> None:
    """Bit for bit on three ranks, though each has seen other samples."""
    folder = run(tmp_path, "nets.Watched", more, 3)
    seen = [torch.load(tmp_path / f"seen-{rank}.pt", weights_only=True) for rank in range(3)]
    for name, value in seen[0].items():
        assert all(torch.equal(value, other[name]) for other in seen[1:]), name
        assert torch.equal(weights(folder)[name], value), name
    assert seen[0]["layers.1.num_batches_tracked"] == 5, "what was tried before step 1 left no trace"
    assert not torch.equal(seen[0]["layers.1.running_mean"], torch.zeros(8))


def test_a_mean_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    """Against `never`, under which each rank evaluates with its own: those differ, and this is their mean."""
    (tmp_path / "own").mkdir()
    (tmp_path / "mean").mkdir()
    run(tmp_path / "own", "nets.Watched", "buffers: never", 3)
    own = [torch.load(tmp_path / "own" / f"seen-{rank}.pt", weights_only=True) for rank in range(3)]
    run(tmp_path / "mean", "nets.Watched", "buffers: {when: before_evaluate, reduce: mean}", 3)
    mean = torch.load(tmp_path / "mean" / "seen-1.pt", weights_only=True)
    name = "layers.1.running_var"
    assert not torch.equal(own[0][name], own[1][name])
    assert torch.allclose(mean[name], torch.stack([seen[name] for seen in own]).mean(0), rtol=1e-6)


def test_a_probe_leaves_no_trace() -> None:
    """Values are put back bit for bit, NaN included."""
    model = nn.BatchNorm1d(3)
    assert model.running_mean is not None
    model.running_mean[1] = torch.nan
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def forward(buffers: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with preserve_state(torch.device("cpu"), model):
            return model(torch.randn(4, 3)).sum(), clone_buffers(model)

    found = probe_buffer_use(model, forward)
    assert found.changing == ("running_mean", "running_var")
    for name, buffer in model.named_buffers():
        assert buffer.numpy().tobytes() == before[name].numpy().tobytes()


class OwnNorm(nn.BatchNorm1d):
    """It might do anything."""


@pytest.mark.parametrize(
    ("layer", "read"),
    [
        (nn.BatchNorm1d(3), False),
        (nn.InstanceNorm1d(3, track_running_stats=True), False),
        (OwnNorm(3), True),
        (nn.Sequential(nn.BatchNorm1d(3), OwnNorm(3)), True),
    ],
)
def test_only_torchs_own_norm_layers_are_known_not_to_read(layer: nn.Module, read: bool) -> None:
    """Though two passes come out the same."""
    samples = torch.randn(4, 3, 5)

    def forward(buffers: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with preserve_state(torch.device("cpu"), layer):
            load_buffers(layer, buffers)
            return layer(samples).sum().detach(), clone_buffers(layer)

    assert probe_buffer_use(layer, forward).read_in_training is read


@pytest.mark.parametrize(
    ("tensor", "counts"),
    [
        (torch.tensor(3), True),
        (torch.tensor([3]), True),
        (torch.tensor([3, 4]), False),
        (torch.tensor(3.0), False),
        (torch.tensor(1j), False),
    ],
)
def test_a_counter_is_a_whole_number_alone(tensor: Tensor, counts: bool) -> None:
    """BatchNorm's has no dimension, a queue's pointer has one."""
    assert is_counter_buffer(tensor) == counts


def test_no_verdict_is_plain_words() -> None:
    """Of an empty model."""
    assert BufferUse().describe() == "the model has no buffers"
