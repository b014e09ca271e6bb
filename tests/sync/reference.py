"""Sync policies once more, without any of ddprun's: all ranks in one process, one after the other, in fp64.

`FILES` is what a pipeline needs beside it; `simulate` says what its weights come to.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddprun.zoo.data import digits

SEED, SAMPLES, BATCH, LR = 3, 331, 8, 0.1  # 331: no number of ranks divides it
STEPS_PER_EPOCH = 14  # on 3 ranks
NETS = """
import torch
from torch import nn
from pathlib import Path
from ddprun.zoo.data import digits

def net():
    layers = [nn.Flatten(), nn.Linear(64, 420), nn.Tanh(), nn.Linear(420, 400), nn.Tanh(), nn.Linear(400, 10)]
    return nn.Sequential(*layers).double()

def numbers(samples):
    data = digits(held_out=None, split_seed=0, folder=Path()).train
    return [(data[i][0].double(), data[i][1]) for i in range(samples)]
"""
PIPELINE = f"""
seed: {SEED}
model: nets.net
data:
  nets.numbers: {{samples: {SAMPLES}}}
loader: {{batch_size: BATCH}}
optimizer:
  sgd: {{lr: {LR}, momentum: MOMENTUM}}
ddp: {{bucket_cap_mb: 1}}
MORE
stages:
  - train: {{steps: STEPS}}
  - save
"""

Weights = dict[str, Tensor]


def pipeline(folder: Path, more: str, *, steps: int = 45, batch: int = BATCH, momentum: float = 0.0) -> str:
    """The pipeline's text; puts its module into `folder`."""
    (folder / "nets.py").write_text(NETS)
    text = PIPELINE.replace("BATCH", str(batch)).replace("MOMENTUM", str(momentum))
    return text.replace("STEPS", str(steps)).replace("MORE", more)


class World:
    """All ranks of a run: their models and optimizers, and the data that comes to each."""

    def __init__(self, ranks: int, momentum: float = 0.0) -> None:
        torch.manual_seed(SEED)
        scope: dict[str, Any] = {}
        exec(NETS, scope)
        self.models: list[nn.Module] = [scope["net"]()]
        self.models += [copy.deepcopy(self.models[0]) for _ in range(ranks - 1)]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum) for model in self.models
        ]
        data = digits(held_out=None, split_seed=0, folder=Path()).train
        self.inputs = torch.stack([data[i][0].double() for i in range(SAMPLES)])
        self.labels = torch.tensor([int(data[i][1]) for i in range(SAMPLES)])

    def batches(self, step: int) -> list[Tensor]:
        """Sample indices of each rank in a step, counted from 0."""
        ranks = len(self.models)
        per_epoch = -(-SAMPLES // (BATCH * ranks))
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order[place * BATCH * ranks : (place + 1) * BATCH * ranks]
        return [mine[rank::ranks] for rank in range(ranks)]

    def local_step(self, step: int, *, average: Sequence[Sequence[int]] = ()) -> None:
        """Every rank takes an optimizer step on the mean over its own batch, if it has one.

        `average` lists ranks that take the mean over all their batches instead.
        """
        batches = self.batches(step)
        for group in average or [[rank] for rank in range(len(self.models))]:
            total = sum(len(batches[rank]) for rank in group)
            if not total:
                continue
            models, gradients = [self.models[rank] for rank in group], list[list[Tensor]]()
            for rank, model in zip(group, models, strict=True):
                model.zero_grad()
                batch = batches[rank]
                loss = cross_entropy(model(self.inputs[batch]), self.labels[batch], reduction="sum") / total
                loss.backward()  # type: ignore[no-untyped-call]
                gradients.append([param.grad for param in model.parameters() if param.grad is not None])
            mean = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*gradients, strict=True)]
            for rank, model in zip(group, models, strict=True):
                for param, gradient in zip(model.parameters(), mean, strict=True):
                    param.grad = gradient.clone()
                self.optimizers[rank].step()

    def flat(self, rank: int) -> Tensor:
        """All parameters of a rank in one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.models[rank].parameters()])

    def set(self, rank: int, flat: Tensor) -> None:
        """Overwrite all parameters of a rank."""
        start = 0
        with torch.no_grad():
            for param in self.models[rank].parameters():
                param.copy_(flat[start : start + param.numel()].view_as(param))
                start += param.numel()

    def average(self, ranks: Sequence[int]) -> None:
        """Give some ranks their mean parameters."""
        mean = torch.stack([self.flat(rank) for rank in ranks]).mean(0)
        for rank in ranks:
            self.set(rank, mean)

    def average_momentum(self) -> None:
        """Give all ranks their mean momentum."""
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            states = [o.state[p] for o, p in zip(self.optimizers, params, strict=True)]
            mean = torch.stack([state["momentum_buffer"] for state in states]).mean(0)
            for state in states:
                state["momentum_buffer"].copy_(mean)

    def weights(self) -> Weights:
        """Of rank 0."""
        return {name: value.detach() for name, value in self.models[0].named_parameters()}


def diloco(
    ranks: int,
    steps: int,
    every: int,
    lr: float,
    momentum: float,
    parts: Sequence[tuple[int, int]],
    overlap: int,
    *,
    outer: str = "nesterov",
    alpha: float | None = None,
) -> Weights:
    """DiLoCo with torch's own SGD as the outer optimizer, or `FedAdam`, one for each part (from, to) of the
    flat vector.
    """
    world = World(ranks)
    common = [nn.Parameter(world.flat(0)[low:high].clone()) for low, high in parts]
    nesterov = outer == "nesterov" and momentum > 0
    optimizers: list[Any] = [
        FedAdam(c, lr, momentum)
        if outer == "adam"
        else torch.optim.SGD([c], lr=lr, momentum=momentum, nesterov=nesterov)
        for c in common
    ]
    phases = [index * every // len(parts) for index in range(len(parts))]
    under_way: dict[int, tuple[int, Tensor, list[Tensor]]] = {}
    since = [0] * len(parts)

    def begin(index: int) -> tuple[Tensor, list[Tensor]]:
        low, high = parts[index]
        own = [world.flat(rank)[low:high] for rank in range(ranks)]
        return torch.stack([common[index].detach() - mine for mine in own]).mean(0), own

    def apply(index: int, gradient: Tensor, left: list[Tensor], own_part: float | None = alpha) -> None:
        low, high = parts[index]
        common[index].grad = gradient
        optimizers[index].step()
        for rank in range(ranks):
            flat = world.flat(rank)
            if own_part is None:
                flat[low:high] += common[index].detach() - left[rank]
            else:
                flat[low:high] = own_part * flat[low:high] + (1 - own_part) * common[index].detach()
            world.set(rank, flat)

    for step in range(1, steps + 1):
        world.local_step(step - 1)
        for index in range(len(parts)):
            since[index] += 1
            if index in under_way and under_way[index][0] == step:
                apply(index, *under_way.pop(index)[1:])
        for index in range(len(parts)):
            if step % every == phases[index]:
                since[index] = 0
                under_way[index] = (step + overlap, *begin(index))
                if not overlap:
                    apply(index, *under_way.pop(index)[1:])
    for index in list(under_way):
        apply(index, *under_way.pop(index)[1:])
    for index in range(len(parts)):
        if since[index]:
            apply(index, *begin(index), own_part=0.0)
        low, high = parts[index]
        for rank in range(ranks):
            flat = world.flat(rank)
            flat[low:high] = common[index].detach()
            world.set(rank, flat)
    return world.weights()


class FedAdam:
    """Algorithm 2 of Reddi et al. 2021; second moments begin at the square of tau."""

    def __init__(self, param: Tensor, lr: float, beta: float) -> None:
        self.param, self.lr, self.beta = param, lr, beta
        self.m, self.v = torch.zeros_like(param), torch.full_like(param, 1e-3**2)

    @torch.no_grad()
    def step(self) -> None:
        """x += lr * m / (sqrt(v) + tau), with the change as the negated gradient."""
        assert self.param.grad is not None
        change = -self.param.grad
        self.m = self.beta * self.m + (1 - self.beta) * change
        self.v = 0.99 * self.v + (1 - 0.99) * change * change
        self.param += self.lr * self.m / (self.v.sqrt() + 1e-3)
