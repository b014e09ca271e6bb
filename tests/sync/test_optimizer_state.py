"""State that is made before a first step changes nothing that comes after it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.sync.exchanger import averageable_state, initialize_optimizer_state, merge_optimizer_states


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
    initialize_optimizer_state(optimizers[0])
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.weight.grad, torch.ones(3, 5))
    after = optimizers[0].param_groups[0]
    assert {key: after[key] for key in after if key != "params"} == {
        key: before[key] for key in before if key != "params"
    }
    assert averageable_state(optimizers[0]), "there is state now"
    for step in range(5):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)


class OneElement(nn.Module):
    """A parameter of one element beside one of several."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.weight = nn.Parameter(torch.arange(4.0))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("NAdam", {}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
    ],
)
def test_ranks_that_are_apart_become_one_by_the_mean_and_counters_by_the_most_steps(
    name: str, options: dict[str, Any]
) -> None:
    """State of a parameter of one element is averaged like that of any other: only counters, which go by
    their names, are those of the rank with most steps.
    """
    states = []
    for rank, steps in enumerate((2, 5, 3)):
        model = OneElement()
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        for step in range(steps):
            for param in model.parameters():
                param.grad = torch.full_like(param, 1.0 + rank + 0.1 * step)
            optimizer.step()
        states.append(optimizer.state_dict())
    merged = merge_optimizer_states(states)
    assert merged["param_groups"] == states[0]["param_groups"]
    for place in (0, 1):
        for key, value in merged["state"][place].items():
            of_ranks = [state["state"][place][key] for state in states]
            wanted = of_ranks[1] if key in ("step", "mu_product") else torch.stack(of_ranks).double().mean(0)
            assert torch.equal(value, wanted.to(of_ranks[0].dtype)), (place, key)


def test_state_of_a_kind_that_nobody_knows_is_rank_0s_and_missing_state_does_not_count() -> None:
    """A number or whole numbers of an optimizer of one's own have no mean; a rank that has not stepped has
    no state to average.
    """
    groups: list[dict[str, Any]] = [{"lr": 0.1, "params": [0, 1]}]
    rate, seen = torch.tensor([2.0]), torch.tensor([7, 8])
    one = {"state": {0: {"d": 1.5, "seen": seen, "rate": rate}}, "param_groups": groups}
    other = {
        "state": {0: {"d": 9.5, "seen": seen + 1, "rate": rate + 1}, 1: {"rate": rate}},
        "param_groups": groups,
    }
    merged = merge_optimizer_states([one, other])["state"]
    assert merged[0]["d"] == 1.5
    assert torch.equal(merged[0]["seen"], seen)
    assert torch.equal(merged[0]["rate"], torch.tensor([2.5]))
    assert torch.equal(merged[1]["rate"], rate)


def test_sparse_state_has_a_mean() -> None:
    """As SGD keeps the momentum of an embedding: ranks need not have the same rows in it."""
    dense = [torch.tensor([[2.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])]
    states = [{"state": {0: {"momentum_buffer": one.to_sparse(1)}}, "param_groups": []} for one in dense]
    mean = merge_optimizer_states(states)["state"][0]["momentum_buffer"]
    assert mean.is_sparse
    assert torch.equal(mean.to_dense(), (dense[0] + dense[1]) / 2)
