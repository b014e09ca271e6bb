"""Against loops written by hand, without any of ddprun's code: the same bits, or fp64's rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddprun.zoo.data import digits
from tests.engine.running import run_pipeline, summary, weights
from tests.ranks import as_processes

PIPELINE = """
seed: 5
model:
  mlp: {{inputs: 64, hidden: [600, 600], outputs: 10}}   # 1.6 MB: two buckets, and DDP rebuilds them
data: digits
loader: {{batch_size: 16, drop_last: true}}
optimizer:
  sgd: {{lr: 0.05, momentum: 0.9, weight_decay: 1.0e-4}}
hooks: {hooks}
ddp: {{bucket_cap_mb: 1}}
stages:
  - train: {{steps: 40}}
  - save
"""


def plain_ddp(steps: int, half: bool) -> dict[str, Any]:
    """What a user would write: torch alone, in the order that docs/reproducibility.md gives."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(600, 10))
    data = digits(held_out=0.2, split_seed=0, folder=Path()).train
    sampler: Any = DistributedSampler(data, seed=5, drop_last=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    if half:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    # DDP's first backward pass runs in another bucket layout: leave it behind before step 1.
    for _ in range(2):
        nn.functional.cross_entropy(ddp(torch.zeros(16, 64)), torch.zeros(16, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
    torch.manual_seed(5 + rank)
    done, epoch = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            nn.functional.cross_entropy(ddp(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
        epoch += 1
    assert world > 1
    return {name: value.numpy() for name, value in model.state_dict().items()}


def plain_weights(ranks: int, *, half: bool, steps: int = 40) -> dict[str, torch.Tensor]:
    """Rank 0's weights after so many steps."""
    found = as_processes(ranks, plain_ddp, steps, half)[0]
    return {name: torch.from_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_hooks_it_is_bitwise_a_plain_ddp_loop(tmp_path: Path, ranks: int) -> None:
    """Forty steps over more than one epoch with momentum and weight decay, several buckets."""
    ours = weights(run_pipeline(tmp_path, PIPELINE.format(hooks="[]"), ranks))
    theirs = plain_weights(ranks, half=False)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    torch.manual_seed(5)
    assert not torch.equal(ours["1.weight"], nn.Linear(64, 600).weight), "nothing was learned"


def test_fp16_follows_torchs_own_hook(tmp_path: Path) -> None:
    """Dividing before the cast differs only where fp16 is subnormal: weights stay together, as long as no
    value near 0 is on the other side of a ReLU.
    """
    text = PIPELINE.format(hooks="[fp16]").replace("steps: 40", "steps: 10")
    ours = weights(run_pipeline(tmp_path, text, 2))
    theirs, exact = (plain_weights(2, half=half, steps=10) for half in (True, False))
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() < (exact[name] - theirs[name]).norm() / 4, name


FP64 = """
seed: 1
model: nets.Wide
data:
  nets.Wave: {{samples: 300}}
loader: {{batch_size: {batch}}}
loss: mse_loss
optimizer:
  sgd: {{lr: 0.05, momentum: 0.9}}
accumulate: {accumulate}
stages:
  - train: {{steps: {steps}}}
  - save
"""

NETS = """
import torch
from torch import nn


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.double()


class Wave(torch.utils.data.Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sin().sum(0, keepdim=True)
"""


def one_process(folder: Path, batch: int, steps: int) -> dict[str, torch.Tensor]:
    """One process, large batches, no DDP: the documented order of samples, the last batch smaller."""
    scope: dict[str, Any] = {}
    exec(compile(NETS, "nets", "exec"), scope)
    torch.manual_seed(1)
    model, data = scope["Wide"](), scope["Wave"](300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done, epoch = 0, 0
    while done < steps:
        order = torch.randperm(300, generator=torch.Generator().manual_seed(1 + epoch))
        for start in range(0, 300, batch):
            ids = order[start : start + batch]
            inputs = data.inputs[ids]
            loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if done == steps:
                break
        epoch += 1
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulate"),
    [
        (4, 16, 1),  # the issue in plain words: 4 ranks of 16 are one process of 64
        (3, 16, 1),  # 300 = 6 x 48 + 12: the last step of an epoch is smaller
        (2, 8, 4),  # accumulated: the epoch's last group is shorter, its last batch smaller
        (4, 37, 1),  # 300 = 2 x 148 + 4: one sample for each rank
        (4, 33, 1),  # 300 = 2 x 132 + 36
        (4, 99, 1),  # a step larger than the data: every step is the whole of it
    ],
)
def test_many_ranks_are_one_process_with_a_large_batch(
    tmp_path: Path, ranks: int, batch: int, accumulate: int
) -> None:
    """In fp64 over 60 steps, uneven ends included: every sample weighs the same on whatever rank it is."""
    (tmp_path / "nets.py").write_text(NETS)
    run = run_pipeline(tmp_path, FP64.format(batch=batch, accumulate=accumulate, steps=60), ranks)
    ours = weights(run)
    theirs = one_process(tmp_path, ranks * batch * accumulate, 60)
    for name, value in theirs.items():
        assert value.dtype == torch.float64
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-12), name
    assert summary(run)["steps"] == 60


EXPERTS = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 1)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))  # nobody asks for the last one
        self.double()

    def forward(self, inputs, expert):
        hidden = self.stem(inputs).tanh()
        for index in expert.unique().tolist():
            if index >= 0:
                chosen = (expert == index).double()[:, None]
                hidden = hidden + self.experts[index](hidden).tanh() * chosen
        return self.head(hidden).square().mean()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 144

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        expert = int(torch.randint(-6, 5, (), generator=generator))  # most samples ask for none
        return {"inputs": torch.randn(5, generator=generator, dtype=torch.float64), "expert": expert}
"""
UNUSED = """
seed: 1
model: experts.Experts
data: experts.Samples
loss: model
loader: {{batch_size: 2, shuffle: false}}
optimizer: {{adamw: {{lr: 0.01, weight_decay: 0.1}}}}
ddp: {{find_unused_parameters: true, gradient_as_bucket_view: {view}, bucket_cap_mb: 0.0004}}
accumulate: {accumulate}
stages: [{{train: {{epochs: 1}}}}, save]
"""


def train_experts(batch_size: int, frozen_steps: int = 0) -> tuple[dict[str, torch.Tensor], list[set[int]]]:
    """Weights trained by one process that has the whole batch, and the experts that each step asked for. The
    head is frozen in the first steps.
    """
    scope: dict[str, Any] = {}
    exec(compile(EXPERTS, "experts", "exec"), scope)
    torch.manual_seed(1)
    model, asked_for = scope["Experts"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step, batch in enumerate(DataLoader(scope["Samples"](), batch_size=batch_size)):
        model.head.requires_grad_(step >= frozen_steps)
        asked_for.append(set(batch["expert"].tolist()))
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), asked_for


@pytest.mark.parametrize("view", ["true", "false"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_parameters_that_some_micro_steps_use_count_whole(tmp_path: Path, accumulate: int, view: str) -> None:
    """On one rank or all, in the first micro-step or the last, or never: as in one process that has the whole
    batch. Whatever no rank uses in a step has no gradient, so AdamW leaves it alone.
    """
    (tmp_path / "experts.py").write_text(EXPERTS)
    ours = weights(run_pipeline(tmp_path, UNUSED.format(accumulate=accumulate, view=view), 2))
    expected, asked_for = train_experts(2 * 2 * accumulate)
    assert any(not {0, 1, 2, 3, 4} <= one for one in asked_for)
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() < 1e-12, name


def test_experts_rest_after_a_stage_with_other_frozen_parameters(tmp_path: Path) -> None:
    """Each stage has its DDP module. What a stage's passes use does not count as used in the next one's."""
    (tmp_path / "experts.py").write_text(EXPERTS)
    stages = "{train: {steps: 9, freeze: [head.*]}}, {train: {steps: 9}}"
    text = UNUSED.format(accumulate=2, view="true").replace("{train: {epochs: 1}}", stages)
    ours = weights(run_pipeline(tmp_path, text, 2))
    expected, _ = train_experts(8, frozen_steps=9)
    for name, value in expected.items():
        assert (ours[name] - value).abs().max() < 1e-12, name


def test_experts_rest_after_a_stage_without_ddp(tmp_path: Path) -> None:
    """To its end, although the passes of the first stage have used experts that no rank needs in step 10."""
    (tmp_path / "experts.py").write_text(EXPERTS)
    stages = "{train: {steps: 9, sync: {local_sgd: {every: 3}}}}, {train: {steps: 9}}"
    text = UNUSED.format(accumulate=2, view="true").replace("{train: {epochs: 1}}", stages)
    assert summary(run_pipeline(tmp_path, text, 2))["steps"] == 18


def test_a_rank_without_a_sample_computes_along_and_counts_nothing(tmp_path: Path) -> None:
    """301 samples on 4 ranks of 25: the last step has one sample, for rank 0 alone."""
    (tmp_path / "nets.py").write_text(NETS)
    text = FP64.format(batch=25, accumulate=1, steps=8).replace("samples: 300", "samples: 301")
    ours = weights(run_pipeline(tmp_path, text, 4))
    scope: dict[str, Any] = {}
    exec(compile(NETS, "nets", "exec"), scope)
    torch.manual_seed(1)
    model, data = scope["Wide"](), scope["Wave"](301)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        order = torch.randperm(301, generator=torch.Generator().manual_seed(1 + epoch))
        for ids in torch.split(order, 100):
            inputs = data.inputs[ids]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-12), name


def test_the_same_seed_gives_bitwise_the_same_run(tmp_path: Path) -> None:
    """Dropout, shuffling and three ranks included; another seed gives another run."""
    text = """
seed: {seed}
model:
  transformer: {{width: 32, layers: 1, heads: 2, context: 16, dropout: 0.2}}
data:
  text: {{files: "*.txt", context: 16}}
loader: {{batch_size: 4}}
optimizer: {{adamw: {{lr: 0.003}}}}
stages:
  - train: {{steps: 12}}
  - evaluate: {{metrics: [perplexity]}}
  - save
"""
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    first = run_pipeline(tmp_path, text.format(seed=2), 3, "first")
    second = run_pipeline(tmp_path, text.format(seed=2), 3, "second")
    third = run_pipeline(tmp_path, text.format(seed=3), 3, "third")
    one, two, other = weights(first), weights(second), weights(third)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert summary(first)["loss"] == summary(second)["loss"]
    assert summary(first)["metrics"] == summary(second)["metrics"]
    assert any(not torch.equal(one[name], other[name]) for name in one)
