"""`Embedding(sparse=True)`: as plain DDP on Gloo trains it, through any hooks, and what torch cannot do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddprun import EXIT_BAD_INPUT
from ddprun.config import load
from ddprun.explain.explain import explain
from tests.engine.running import events, run_pipeline, run_to_end, weights
from tests.ranks import as_processes

MODULE = """
import torch
from torch import nn


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 100, (5,), generator=generator), torch.tensor(index % 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 8, sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, words):
        return self.last(self.words(words).mean(1))


class Rows(nn.EmbeddingBag):
    def __init__(self):
        super().__init__(100, 3, sparse=True)
"""
PIPELINE = """
seed: 5
model: sparse_words.Net
data: sparse_words.Words
loader: {batch_size: 4, drop_last: true}
loss: cross_entropy
optimizer: {adagrad: {lr: 0.1}}
hooks: HOOKS
stages: [{train: {steps: 20}}, save]
"""


def plain_ddp() -> dict[str, Any]:
    """Twenty steps of torch alone: rank 0's weights."""
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {}
    exec(compile(MODULE, "sparse_words", "exec"), scope)
    torch.manual_seed(5)
    model, data = scope["Net"](), scope["Words"]()
    sampler: Any = DistributedSampler(data, seed=5, drop_last=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    done = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            if done < 20:
                nn.functional.cross_entropy(ddp(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    return {name: value.numpy() for name, value in model.state_dict().items()}


def written(folder: Path, text: str) -> str:
    (folder / "sparse_words.py").write_text(MODULE)
    return text


def test_it_is_bitwise_a_plain_ddp_loop(tmp_path: Path) -> None:
    """The optimizer gets the same rows, and the same sums in them."""
    text = written(tmp_path, PIPELINE.replace("HOOKS", "[]"))
    ours = weights(run_pipeline(tmp_path, text, 2))
    for name, value in as_processes(2, plain_ddp)[0].items():
        assert torch.equal(ours[name], torch.from_numpy(value)), name


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of each sparse gradient
@pytest.mark.parametrize("hooks", ["[fp16]", "[int8]", "[{powersgd: {rank: 2}}, bf16]"])
def test_hooks_carry_it(tmp_path: Path, hooks: str) -> None:
    """As the dense tensor that `explain` counts, through a bucket of its own."""
    text = written(tmp_path, PIPELINE.replace("HOOKS", hooks))
    run = run_pipeline(tmp_path, text, 2)
    (started,) = [one for one in events(run) if one["event"] == "started"]
    assert [bucket["numel"] for bucket in started["buckets"]] == [800, 27]
    explained = explain(load(tmp_path / "run.yaml"), hosts=1, ranks_per_host=2)
    steps = [bucket.numel for _, _, bucket in explained.stages[0].step_buckets()]
    assert steps == [800, 27]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("adagrad", "adamw", "optimizer.AdamW: Adam does not support sparse gradients, please consider "),
        ("adagrad", "sparse_adam", "SparseAdam does not support dense gradients, please consider Adam "),
        ("0.1}", "0.1, weight_decay: 0.1}", "weight_decay option is not compatible with sparse gradients"),
        (
            "{adagrad: {lr: 0.1}}",
            "{muon: {lr: 0.02}, others: adagrad}",
            "such as sgd; a group with optimizer: others can have the embedding",
        ),
        ("seed: 5", "clip_norm: 1", "clip_norm: torch clips no sparse gradients, and an embedding of the "),
    ],
)
def test_what_torch_cannot_do_is_told_before_step_1(tmp_path: Path, old: str, new: str, told: str) -> None:
    text = written(tmp_path, PIPELINE.replace("HOOKS", "[]").replace(old, new))
    codes, said = run_to_end(tmp_path, text)
    assert codes == [EXIT_BAD_INPUT] * 2
    assert told in said
    assert "Traceback" not in said


def test_sparse_adam_trains_a_model_of_sparse_gradients_alone(tmp_path: Path) -> None:
    text = (
        PIPELINE.replace("HOOKS", "[]")
        .replace("adagrad", "sparse_adam")
        .replace("sparse_words.Net", "sparse_words.Rows")
    )
    assert weights(run_pipeline(tmp_path, written(tmp_path, text), 2))["weight"].shape == (100, 3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_run_with_sparse_momentum_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """SGD keeps it as a sparse tensor."""
    momentum = PIPELINE.replace("HOOKS", "[]").replace("adagrad: {lr: 0.1}", "sgd: {lr: 0.1, momentum: 0.9}")
    text = written(tmp_path, momentum)
    whole = weights(run_pipeline(tmp_path, text, 2, "whole"))
    for steps in (7, 20):
        codes, said = run_to_end(tmp_path, text.replace("20", str(steps)), resuming=steps == 20)
        assert codes == [0, 0], said
    found = weights(tmp_path / "run")
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
