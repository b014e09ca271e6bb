"""Models that are not a plain stack of layers, through every policy in one run."""

from pathlib import Path

import pytest

from tests.engine.running import run_pipeline, summary, weights
from tests.ranks import ddprun

ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    '''Tied, frozen, unused, empty and single-valued parameters, of three dtypes.'''

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0))
        self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(32, dtype=torch.float64))
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(32, 10)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, images):
        hidden = self.first(images.flatten(1)).relu()
        hidden = self.tied(self.frozen(self.second(hidden).relu())) * self.scale * self.wide.float()
        return self.last(hidden)
"""
PIPELINE = """
model: odd.Odd
data: digits
loader: {batch_size: 16}
optimizer: OPTIMIZER
ddp: {find_unused_parameters: true}
audit: {every: 2}
stages:
  - train: {steps: 4}
  - train: {steps: 6, sync: {local_sgd: {every: 4}}}
  - train: {steps: 4}
  - train: {steps: 8, sync: {diloco: {every: 6, fragments: 3, overlap_steps: 2}}, hooks: [int8]}
  - train: {steps: 6, sync: {hierarchical_sgd: {within: 1, across: 4, hosts: 2}}}
  - train: {steps: 6, sync: {hierarchical_sgd: {within: 2, across: 4, hosts: 2, optimizer_state: average}}}
  - train: {steps: 6, sync: {broadcast: {every: 4, source: 1}}}
  - train: {steps: 2, sync: independent, mutate: {noise: {std: 0.001}}}
  - average
  - train: {steps: 6}
  - save
"""


def test_odd_parameters_go_along(tmp_path: Path) -> None:
    """The audit finds all ranks equal wherever they have to be, with momentum that was gathered apart."""
    (tmp_path / "odd.py").write_text(ODD)
    for name, optimizer in (("sgd", "{sgd: {lr: 0.05, momentum: 0.9}}"), ("adam", "{adamw: {lr: 0.001}}")):
        run = run_pipeline(tmp_path, PIPELINE.replace("OPTIMIZER", optimizer), 4, name)
        assert summary(run)["audit"]["equal"]
        assert summary(run)["steps"] == 48
        assert weights(run)["whole"].tolist() == [0, 1, 2, 3]


SMALL = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

def sample(place):
    numbers = torch.randn(4, generator=torch.Generator().manual_seed(place))
    return numbers, int(numbers.sum() > 0)

class Row(IterableDataset):
    def __iter__(self):
        return iter([sample(place) for place in range(64)])

class Spiked(Dataset):
    '''A sample whose gradient is not finite in half precision, which comes to rank 1 alone.'''

    def __len__(self):
        return 64

    def __getitem__(self, place):
        numbers, label = sample(place)
        return (numbers * 1e30 if place == 1 else numbers), label

class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, numbers):
        return self.layer(numbers * self.wave.real + self.wave.imag)
"""
MLP = "{mlp: {inputs: 4, hidden: [8], outputs: 2}}"
TWO_SPLITS = "\n".join(
    f"  - train: {{steps: 4, sync: {{hierarchical_sgd: {{across: 4, hosts: {hosts}}}}}}}" for hosts in (2, 1)
)


@pytest.mark.parametrize(
    ("model", "data", "more", "stages"),
    [
        (
            MLP,
            "small.Row",
            "",
            "  - train: {epochs: 1, sync: {diloco: {every: 2}}, mutate: {noise: {std: 0.1}}}",
        ),
        (
            MLP,
            "small.Spiked",
            "precision: fp16",
            "  - train: {steps: 4, sync: {local_sgd: {every: 2}}}\n  - train: {steps: 4}",
        ),
        (MLP, "small.Row", "", TWO_SPLITS),
        (MLP, "small.Row", "precision: fp16", "  - forward: {steps: 4, update: evolution_strategies}"),
        (
            MLP,
            "small.Spiked",
            "precision: fp16",
            "  - train: {steps: 4, sync: {local_sgd: {every: 1, optimizer_state: average}}}",
        ),
        (
            "small.Complex",
            "small.Row",
            "",
            "  - train: {steps: 5, sync: {local_sgd: {every: 2}}}\n  - train: {steps: 3}",
        ),
    ],
    ids=["unknown-length", "a-skipped-step", "other-hosts", "forward-in-half", "no-state-yet", "complex"],
)
@pytest.mark.parametrize("optimizer", ["{sgd: {lr: 0.1, momentum: 0.9}}", "{nadam: {lr: 0.01}}"])
def test_ranks_end_equal(
    tmp_path: Path, model: str, data: str, more: str, stages: str, optimizer: str
) -> None:
    """Where a stage's length is known when it is over; where one rank skips a step; where hosts are split
    in another way than before; where the loss is never scaled; where weights are complex.
    """
    (tmp_path / "small.py").write_text(SMALL)
    text = (
        f"model: {model}\ndata: {data}\nloader: {{batch_size: 4, shuffle: false}}\noptimizer: {optimizer}\n"
        f"audit: {{every: 1}}\n{more}\nstages:\n{stages}\n"
    )
    run = run_pipeline(tmp_path, text, 2)
    assert summary(run)["audit"]["equal"]
    assert summary(run)["status"] == "done"


UNLIKE = """
import os
import torch
from pathlib import Path
from torch import nn

class Unlike(nn.Module):
    '''Other weights and another buffer on each rank, which writes down the buffer that it computes with.'''

    def __init__(self):
        super().__init__()
        self.rank = int(os.environ["RANK"])
        with torch.random.fork_rng():
            torch.manual_seed(self.rank)
            self.layer = nn.Linear(64, 10)
        self.register_buffer("mine", torch.tensor([7.0 + self.rank]))

    def forward(self, images):
        Path(f"saw-{self.rank}").write_text(str(self.mine.item()))
        return self.layer(images.flatten(1))
"""


@pytest.mark.parametrize("sync", ["every_step", "{local_sgd: {every: 2}}"])
def test_ranks_start_with_what_rank_0_has(tmp_path: Path, sync: str) -> None:
    """Parameters and buffers, whatever each rank's model was made with, and whatever `buffers` says."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    text = PIPELINE.replace("odd.Odd", "unlike.Unlike").replace("OPTIMIZER", "{sgd: {lr: 0.05}}")
    head = text.partition("stages:")[0]
    run = run_pipeline(
        tmp_path, f"{head}sync: {sync}\nbuffers: never\nstages: [{{train: {{steps: 2}}}}]\n", 3
    )
    assert summary(run)["audit"]["equal"]
    assert [(tmp_path / f"saw-{rank}").read_text() for rank in range(3)] == ["7.0"] * 3


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    """By the launcher, not by its ranks again."""
    text = PIPELINE.replace("odd.Odd", "{mlp: {inputs: 64, outputs: 10}}")
    text = text.replace("OPTIMIZER", "{sgd: {lr: 0.05}}").partition("stages:")[0]
    (tmp_path / "p.yaml").write_text(f"{text}stages: [{{train: {{steps: 2}}}}, average]\n")
    done = ddprun("p.yaml", "--nproc-per-node", "2", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.stderr.count("warning: stages[1]") == 1
