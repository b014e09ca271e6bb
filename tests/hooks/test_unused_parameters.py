"""Parameters that no rank uses in a step: DDP leaves their gradients as they are, and nothing that hooks have
sent for them out of residuals is lost.
"""

import inspect
import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddprun_hooks
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.standalone import Handle
from tests.hooks.residuals import residual_totals
from tests.ranks import as_processes

EXPERTS, STEPS, FLUSHING_STEPS = 2, 12, 14  # two: a host's shares are cut within the first one's weights

TOPK: HookSpec = {"topk": {"density": 0.2}}
POWERSGD: HookSpec = {"powersgd": {"rank": 1}}
FP16: HookSpec = {"fp16": {"accumulate": "fp32"}}
ONE_LEVEL: list[list[HookSpec]] = [
    [TOPK],
    ["int8"],
    ["int4"],
    ["fp8"],
    [POWERSGD],
    [{"bf16": {"accumulate": "fp32"}}],
    [FP16],
    [POWERSGD, "int8"],
    ["int2"],
    [{"topk": {"density": 0.2, "chunk": 64, "values": "int2"}}],
]
TWO_LEVELS: list[list[HookSpec]] = [
    [{"hierarchical": {"hosts": 2, "across": [TOPK]}}],
    [{"hierarchical": {"hosts": 2, "within": ["shared_memory"], "across": [POWERSGD, "int4"]}}],
    [POWERSGD, {"hierarchical": {"hosts": 2, "across": ["fp8"]}}],
]
FLUSHED = ONE_LEVEL[:6]  # to the last bit; fp16 has a least value, and powersgd's factors lose some, too


class Way(NamedTuple):
    """How a script trains."""

    view: bool  # gradient_as_bucket_view
    set_to_none: bool = True  # what zero_grad does
    micro_steps: int = 1
    no_sync: bool = True  # in all micro-steps but the last
    scaled: bool = False  # by a GradScaler, which skips two steps


WAYS = [
    Way(view=True),
    Way(view=False, micro_steps=3),
    Way(view=False, set_to_none=False),
    Way(view=True, set_to_none=False, micro_steps=3),
    Way(view=False, micro_steps=2, no_sync=False),
    Way(view=False, set_to_none=False, scaled=True),
    Way(view=True, scaled=True),
]


class Experts(nn.Module):
    """Its gradients do not depend on weights: they are drawn, and zeros for a rank that uses an expert no
    more than to flush it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 6, dtype=torch.float64) for _ in range(1 + EXPERTS))
        self.came_in = torch.zeros(1 + EXPERTS, 36, dtype=torch.float64)  # the sum of gradients, by layer
        self.generator = torch.Generator()

    def forward(self, used: Sequence[int], scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index in (0, *used):
            gradient = torch.randn(36, generator=self.generator, dtype=torch.float64) * scale
            self.came_in[index] += gradient
            params = torch.cat([param.flatten() for param in self.layers[index].parameters()])
            total = total + (params * gradient).sum()
        return total


def start(way: Way) -> tuple[DistributedDataParallel, Experts]:
    """The same weights on all ranks, and gradients of each rank's own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = Experts()
    net.generator.manual_seed(dist.get_rank())
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": way.view, buffers: False}
    return DistributedDataParallel(net, find_unused_parameters=True, **options), net


def weights(net: Experts) -> Tensor:
    """As `came_in` lies."""
    return torch.cat([param.detach().flatten() for param in net.parameters()]).view_as(net.came_in)


def draw(chance: random.Random) -> list[int]:
    """The experts that this rank uses; every rank draws for all, so some are used by all, some by none."""
    ranks = dist.get_world_size()
    drawn = [[e for e in range(1, 1 + EXPERTS) if chance.random() < 0.7 / ranks] for _ in range(ranks)]
    return drawn[dist.get_rank()]


def losses(hooks: list[HookSpec], way: Way) -> tuple[float, float]:
    """The largest |start - end - sum of mean gradients|, as it is and with what hooks still keep."""
    model, net = start(way)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way.scaled)
    handle = ddprun_hooks.register(model, hooks, scaler=scaler if way.scaled else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chance, before = random.Random(5), weights(net)
    for step in range(STEPS + FLUSHING_STEPS):
        came_in, flushing = net.came_in.clone(), step >= STEPS
        overflows = way.scaled and step in (5, 9)
        for micro in range(way.micro_steps):
            last = micro == way.micro_steps - 1
            with model.no_sync() if way.no_sync and not last else nullcontext():
                loss = model(range(1, 1 + EXPERTS) if flushing else draw(chance), float(not flushing))
                scaler.scale(loss * math.inf if overflows else loss).backward()
        if overflows:
            net.came_in = came_in
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=way.set_to_none)
    dist.all_reduce(net.came_in.div_(dist.get_world_size()))
    lost = before - weights(net) - net.came_in
    return float(lost.abs().max()), float((lost + kept(net, handle)).abs().max())


def kept(net: Experts, handle: Handle) -> Tensor:
    """The sum over ranks of what hooks keep, as `came_in` lies."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, handle.state_dict())
    totals = dict(residual_totals(handle.merge(states)))
    return torch.cat([totals[name] for name, _ in net.named_parameters()]).view_as(net.came_in)


def losses_of(stacks: list[list[HookSpec]]) -> list[list[tuple[float, float]]]:
    """For each stack, of some ways, and of the first stack of all."""
    return [
        [losses(hooks, way) for way in (WAYS if index == 0 else [WAYS[0], WAYS[1 + index % 6]])]
        for index, hooks in enumerate(stacks)
    ]


@pytest.mark.parametrize(("ranks", "stacks"), [(2, ONE_LEVEL), (4, TWO_LEVELS)], ids=["flat", "two levels"])
def test_nothing_is_lost_of_experts_that_no_rank_uses(ranks: int, stacks: list[list[HookSpec]]) -> None:
    """Whatever hooks keep, with and without micro-steps, views of buckets, and steps that are skipped."""
    found = as_processes(ranks, losses_of, stacks, timeout_s=240)[0]
    for stack, of_ways in zip(stacks, found, strict=True):
        for lost, lost_beside_kept in of_ways:
            assert lost_beside_kept < 1e-12, stack
            assert lost < (1e-12 if stack in FLUSHED else 1.0 if "int2" in str(stack) else 0.1), stack


def untouched(way: Way) -> list[tuple[list[list[bool]], list[bool]]]:
    """Without hooks and with them: which gradients are None after each backward pass, and whether the first
    expert's weights moved in each step.
    """
    found = []
    for hooks in (None, [TOPK], ["int8"]):
        model, net = start(way)
        if hooks is not None:
            ddprun_hooks.register(model, hooks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        without, moved, chance = [], [], random.Random(5)
        for step in range(STEPS):
            before = weights(net)[1]
            model(draw(chance) if step > 3 else [1, 2], 1.0).backward()
            without.append([param.grad is None for param in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=way.set_to_none)
            moved.append(not torch.equal(weights(net)[1], before))
        found.append((without, moved))
    return found


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=str)
def test_an_optimizer_leaves_unused_parameters_alone_as_under_plain_ddp(way: Way) -> None:
    """AdamW's decay moves them only where `zero_grad` has left zeros for gradients."""
    for plain, *hooked in as_processes(2, untouched, way):
        assert hooked == [plain, plain]
        assert all(plain[1]) != way.set_to_none
