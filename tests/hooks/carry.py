"""Payloads carried through stacks by ranks that are threads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddprun_hooks import ParamSlice, Payload
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.comm.queue import HostQueue
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.stack import Stack
from tests.ranks import as_threads

SHAPES: dict[str, tuple[int, ...]] = {
    "first.weight": (40, 30),
    "first.bias": (40,),
    "scale": (),
    "conv.weight": (12, 4, 3, 3),
    "last.weight": (7, 40),
}


def slices(names: Sequence[str] = tuple(SHAPES)) -> tuple[ParamSlice, ...]:
    """The parameters one after the other, as they lie in a bucket."""
    found, offset = [], 0
    for name in names:
        numel = int(torch.Size(SHAPES[name]).numel())
        found.append(ParamSlice(name, SHAPES[name], offset, numel))
        offset += numel
    return tuple(found)


PARAMS = slices()
NUMEL = sum(param.numel for param in PARAMS)


def contribution(rank: int, step: int, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's share of a step's mean: unlike any other rank's and step's."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    values = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
    return (values / ranks).to(dtype)


def carry(
    specs: Sequence[HookSpec],
    ranks: int,
    body: Callable[["Carrier"], Any],
    hosts: Sequence[str] = (),
) -> list[Any]:
    """Run `body` on each rank with a stack of its own; gives what they return."""
    stack = make_stack(specs)
    return as_threads(
        ranks,
        lambda team: body(Carrier(team, make_stack(specs))),
        needs=stack.requirements,
        hosts=hosts,
    )


class Carrier:
    """One rank's lane and stack."""

    def __init__(self, team: RankGroup, stack: Stack) -> None:
        self.team = team
        self.rank, self.ranks = team.rank, team.size
        self.stack = stack
        self.traces: list[BucketTrace[int]] = []
        self._lane = HostQueue(team)

    def send(self, tensor: Tensor, params: tuple[ParamSlice, ...] = PARAMS, bucket: int = 0) -> Tensor:
        """Carry one payload; gives the mean over ranks."""
        payload = Payload(tensor.clone(), params, "gradient", bucket)
        return self._lane.send(payload, self.stack, self.traces).wait().clone()

    def step(self, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Carry this rank's contribution to a step."""
        return self.send(contribution(self.rank, step, self.ranks, dtype))


def kept_total(stack: Stack, states: Sequence[dict[str, Any]]) -> Tensor:
    """The sum over ranks of what all hooks of a stack kept, laid out as in a bucket; shape (NUMEL,)."""
    total = torch.zeros(NUMEL, dtype=torch.float64)

    def add(node: dict[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, dict) and "total" in value:
                param = next(param for param in PARAMS if param.name == key)
                kept = value["total"]
                total[param.offset : param.offset + kept.numel()] += kept.double()
            elif isinstance(value, dict):
                add(value)

    add(stack.merge(states))
    return total
