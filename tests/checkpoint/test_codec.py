"""Nested state comes back as it was, bit for bit; what cannot be held is told with its place."""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.checkpoint.codec import UnstorableError, decode, encode
from tests.hooks.test_stacks import assert_same


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    tree, tensors = encode(state)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def test_state_comes_back_as_it_was() -> None:
    """Kinds of numbers and containers, keys that are no text, names that collide, odd tensors."""
    state: dict[str, Any] = {
        "numbers": [1, 1.0, True, None, "text", -0.0, 2**80, 1e-320, (1, (2.5, "x")), []],
        "odd": {0: torch.arange(3), "0": torch.arange(4), "$": 1, (1, 2): "tuple"},
        "count": Counter({30: 1, 60: 2}),
        "tensors": {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(0.1, dtype=torch.float64),
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "spread": torch.ones(1).expand(5),
            "bf16": torch.randn(3).bfloat16(),
            "bool": torch.tensor([True, False]),
            "complex": torch.randn(2, 3, dtype=torch.complex64).conj(),
            "infinite": torch.tensor([-math.inf, math.inf]),
        },
    }
    found = there_and_back(state)
    assert_same(found, state)
    assert type(found["numbers"][2]) is bool
    assert type(found["numbers"][1]) is float
    assert isinstance(found["count"], Counter)
    assert math.copysign(1, found["numbers"][5]) == -1


def test_numbers_that_are_none_come_back() -> None:
    """NaN and infinities, which JSON does not have."""
    values = there_and_back({"x": [math.inf, -math.inf, math.nan]})["x"]
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])


def test_what_is_taken_apart_no_longer_follows_the_original() -> None:
    """Training goes on while it is written."""
    weights = torch.ones(3)
    _, tensors = encode({"weights": weights})
    weights.zero_()
    assert torch.equal(tensors["weights"], torch.ones(3))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, "a.b is a object"),
        ({"a": [1, {2}]}, "a.1 is a set"),
        ({"a": nn.Linear(1, 1)}, "a is a torch.nn.modules.linear.Linear"),
        ({"a": torch.eye(3).to_sparse()}, "a is a torch.Tensor that is not dense"),
    ],
)
def test_what_cannot_be_held_is_told(state: dict[str, Any], words: str) -> None:
    """With its place and its kind."""
    with pytest.raises(UnstorableError, match=words):
        encode(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"$": "tensor", "name": "gone"}},
        {"a": {"$": "tensor"}},
        {"a": {"$": "os.system", "items": ["true"]}},
        {"a": {"$": "mapping", "items": [1]}},
        {"a": {"$": ["list"]}},
    ],
)
def test_state_that_does_not_hold_together_is_refused(tree: dict[str, Any]) -> None:
    """An unknown tag does nothing."""
    with pytest.raises(ValueError, match="does not hold together"):
        decode(tree, {})
