"""Training without a backward pass."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddprun.config import load
from ddprun.engine.worker import run_worker
from ddprun.zoo.weight_functions import evolution_strategies
from tests.engine.running import events, lines, summary
from tests.ranks import as_processes

PIPELINE = """
model:
  mlp: {inputs: 64, hidden: [], outputs: 10}
data: digits
loader: {batch_size: 128}
optimizer: {sgd: {lr: 0.3, momentum: 0.8}}
sync: SYNC
audit: {every: 40}
stages:
  - forward: {steps: STEPS, update: UPDATE}
  - evaluate: {metrics: [accuracy]}
"""
EVOLUTION = "{evolution_strategies: {std: 0.05, population: 12}}"


def without_backward(file: Path, run_dir: Path) -> int:
    def poisoned(*_: object, **__: object) -> None:
        raise AssertionError("a backward pass ran")

    Tensor.backward = poisoned  # type: ignore[method-assign]
    torch.autograd.backward = poisoned
    return run_worker(load(file), run_dir)


def run(folder: Path, *, sync: str = "every_step", update: str = EVOLUTION, steps: int = 120) -> Path:
    text = PIPELINE.replace("SYNC", sync).replace("UPDATE", update).replace("STEPS", str(steps))
    (folder / "p.yaml").write_text(text)
    assert as_processes(2, without_backward, folder / "p.yaml", folder / "run", cwd=folder) == [0, 0]
    return folder / "run"


def test_evolution_strategies_halve_the_loss_without_a_backward_pass(tmp_path: Path) -> None:
    """On digits from 2.3; ranks explore apart and average in every step, so they hold the same weights."""
    folder = run(tmp_path)
    first = next(line for line in lines(folder, "steps") if line["step"] == 1)["mean_loss"]
    assert summary(folder)["loss"] < first / 2
    assert summary(folder)["metrics"]["accuracy"] > 0.6
    assert {line["kind"] for line in lines(folder, "buckets")} == {"delta"}
    assert [look["equal"] for look in events(folder) if look["event"] == "audit"] == [True] * 3


def test_ranks_may_average_seldom(tmp_path: Path) -> None:
    """The sync policy is the stage's: every tenth step here."""
    folder = run(tmp_path, sync="{average: {every: 10}}", steps=30)
    assert {line["step"] for line in lines(folder, "buckets")} == {10, 20, 30}


MINE = """
import torch

def climb(model, closure, std):
    '''Keep a random change if the loss has fallen.'''
    before, own = closure(), [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=std)
    if closure() >= before:
        with torch.no_grad():
            for param, value in zip(model.parameters(), own):
                param.copy_(value)
"""


def test_an_update_of_ones_own_changes_weights_by_losses(tmp_path: Path) -> None:
    """Random hill climbing on each rank, averaged in every step: the loss falls."""
    (tmp_path / "mine.py").write_text(MINE)
    folder = run(tmp_path, update="{mine.climb: {std: 0.02}}", steps=60)
    losses = [line["mean_loss"] for line in lines(folder, "steps") if line["rank"] == 0]
    assert losses[-1] < losses[0] - 0.05


def test_the_estimate_points_along_the_gradient() -> None:
    """On a quadratic the antithetic estimate is exact along each direction: its mean is the gradient."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False).double()
    target = torch.randn(6, dtype=torch.float64)
    before = model.weight.detach().clone()

    def closure() -> Tensor:
        return (model.weight.flatten() - target).square().sum()

    evolution_strategies(model, closure, std=0.3, population=4000)
    gradient = 2 * (before.flatten() - target)
    assert torch.equal(model.weight.detach(), before)
    assert model.weight.grad is not None
    assert torch.nn.functional.cosine_similarity(model.weight.grad.flatten(), gradient, dim=0) > 0.995
    assert model.weight.grad.flatten().norm() == pytest.approx(float(gradient.norm()), rel=0.1)
