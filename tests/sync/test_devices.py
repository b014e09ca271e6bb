"""A policy's state from a checkpoint, which is in host memory, for parameters that are on a device."""

from typing import Any

import torch
from torch import Tensor

from ddprun.sync.plan import OuterOptimizer
from ddprun.sync.synchronizer import DeltaExchange
from ddprun_hooks.buckets import TensorBuckets

NOTHING: Any = None


def exchange_with(named: dict[str, Tensor], momentum: dict[str, Tensor]) -> DeltaExchange:
    outer = OuterOptimizer(lr=0.7, momentum=0.9)
    return DeltaExchange(TensorBuckets(named, 1e9), NOTHING, NOTHING, NOTHING, outer, momentum)


def test_the_outer_momentum_is_where_the_parameters_are() -> None:
    """DiLoCo's outer step would mix devices in its first round, and so would one after a stage that has
    exchanged only some of the parameters.
    """
    named = {"a": torch.zeros(3, device="meta"), "b": torch.zeros(2, 2, device="meta")}
    momentum = {"a": torch.ones(3), "b": torch.ones(4, device="meta")}
    exchange = exchange_with(named, momentum)
    exchange.set_base_to_weights()
    exchange.load_state_dict({"base": [torch.ones(7)], "left": [], "means": [torch.ones(7)]})
    common: Tensor = exchange._outer_step(0, torch.ones(7, device="meta"))
    assert common.device.type == "meta"
    assert {one.device.type for one in momentum.values()} == {"meta"}


def test_a_parameter_that_the_earlier_stage_froze_has_no_momentum() -> None:
    """Those in one bucket with it keep theirs, and all have it by name from then on."""
    named = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    momentum = {"b": torch.ones(4), "c": torch.ones(2)}
    exchange = exchange_with(named, momentum)
    exchange.set_base_to_weights()
    assert momentum["a"].tolist() == [0.0] * 3
    exchange._outer_step(0, torch.ones(7))
    assert momentum["a"].tolist() == [1.0] * 3
    torch.testing.assert_close(momentum["b"], torch.full((4,), 1.9))
    assert momentum["c"].tolist() == [1.0] * 2
