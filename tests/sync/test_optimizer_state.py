"""State that is made before a first step changes nothing that comes after it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.sync.optimizer_state import complete_state, floating_state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {"amsgrad": True}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adagrad", {"weight_decay": 0.1}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
    ],
)
def test_completed_state_is_that_before_a_first_step(name: str, options: dict[str, Any]) -> None:
    """Weights, gradients and settings stay; five steps after it are, bit for bit, those without it."""
    torch.manual_seed(0)
    one = nn.Linear(5, 3)
    other = copy.deepcopy(one)
    optimizers = [getattr(torch.optim, name)(model.parameters(), **options) for model in (one, other)]
    before = copy.deepcopy(optimizers[0].param_groups[0])
    one.weight.grad = torch.ones(3, 5)
    complete_state(optimizers[0])
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.weight.grad, torch.ones(3, 5))
    after = optimizers[0].param_groups[0]
    assert {key: after[key] for key in after if key != "params"} == {
        key: before[key] for key in before if key != "params"
    }
    assert floating_state(optimizers[0]), "there is state now"
    for step in range(5):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
