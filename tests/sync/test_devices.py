"""A policy's state from a checkpoint, which is in host memory, for parameters that are on a device."""

from typing import Any

import torch
from torch import Tensor

from ddprun.sync.plan import OuterOptimizer
from ddprun.sync.synchronizer import DeltaExchange
from ddprun_hooks.buckets import TensorBuckets


def test_the_outer_momentum_is_where_the_parameters_are() -> None:
    """Also that of an earlier stage. DiLoCo's outer step would mix devices in its first round."""
    named = {"a": torch.zeros(3, device="meta"), "b": torch.zeros(2, 2, device="meta")}
    nothing: Any = None
    outer = OuterOptimizer(lr=0.7, momentum=0.9)
    exchange = DeltaExchange(TensorBuckets(named, 1e9), nothing, nothing, nothing, outer)
    exchange.set_base()
    for load in (load_checkpoint, take_over):
        load(exchange)
        common: Tensor = exchange._outer_step(0, torch.ones(7, device="meta"))
        assert common.device.type == "meta"
        assert {one.device.type for one in exchange._momentum.values()} == {"meta"}


def test_a_parameter_that_the_earlier_stage_froze_has_no_momentum() -> None:
    """Those in one bucket with it keep theirs."""
    named = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    nothing: Any = None
    exchange = DeltaExchange(
        TensorBuckets(named, 1e9), nothing, nothing, nothing, OuterOptimizer(lr=0.7, momentum=0.9)
    )
    exchange.load_momentum({"b": torch.ones(4)})
    assert exchange._momentum[0].tolist() == [0.0] * 3 + [1.0] * 4
    exchange._momentum.clear()
    exchange.load_momentum({"c": torch.ones(4)})
    assert not exchange._momentum


def load_checkpoint(exchange: DeltaExchange) -> None:
    state = {"momentum": {0: torch.ones(7)}, "base": [torch.ones(7)], "left": [], "means": [torch.ones(7)]}
    exchange.load_state_dict(state)


def take_over(exchange: DeltaExchange) -> None:
    exchange._momentum.clear()
    exchange.load_momentum({"a": torch.ones(3), "b": torch.ones(4)})
