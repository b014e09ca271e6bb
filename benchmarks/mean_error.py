"""How far are the gradients that DDP gets through a hook from the exact mean, by number of ranks?

    python -m benchmarks.mean_error [--ranks 2 4 8 16] [--steps 32]

Run it in the repository's folder. A DDP script of its own registers each hook in turn and takes backward
passes of a small transformer, each rank on its own batch, without an optimizer. Before each pass the exact
mean is taken in fp64 from the same batch. Prints two Markdown tables of |given - exact| / |exact|: of the
first mean that goes through the hook, and of the sum of the means of so many steps, where error feedback
makes up for what single means lack.
"""

from typing import Any

import torch
import torch.distributed as dist
import yaml
from benchmarks.page import argument_parser, print_head, print_row
from tests.ranks import as_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddprun_hooks

HOOKS = ("fp16", "fp16: {accumulate: fp32}", "bf16", "bf16: {accumulate: fp32}", "int8", "fp8", "int4")
WORDS, CONTEXT, WIDTH, BATCH = 256, 32, 64, 8
BEFORE = 2  # steps of plain all-reduce, until DDP's buckets are known


class Net(nn.Module):
    """A transformer of 0.1 million parameters that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The loss of words, shape (batch, context + 1)."""
        given = self.head(self.layer(self.words(words[:, :-1])))
        return nn.functional.cross_entropy(given.flatten(0, 1), words[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """Words of this rank: some are frequent, most are rare."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    shares = 1 / torch.arange(1, WORDS + 1)
    return torch.multinomial(shares.expand(BATCH, -1), CONTEXT + 1, True, generator=generator)


def gradients(model: nn.Module, step: int) -> Tensor:
    """The gradients of one backward pass, fp64, shape (parameters,)."""
    model.zero_grad()
    model(batch(step)).backward()
    return torch.cat(
        [param.grad.flatten().double() for param in model.parameters() if param.grad is not None]
    )


def errors(hooks: list[Any], steps: int) -> tuple[float, float]:
    """Relative error of the first mean through the hooks, and of the sum of all; on each rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    ddprun_hooks.register(model, hooks)
    for step in range(BEFORE):
        gradients(model, step)
    first = given_sum = exact_sum = torch.zeros(())
    for step in range(BEFORE, BEFORE + steps):
        exact = gradients(model.module, step)
        dist.all_reduce(exact.div_(dist.get_world_size()))
        given = gradients(model, step)
        if step == BEFORE:
            first = (given - exact).norm() / exact.norm()
        given_sum, exact_sum = given_sum + given, exact_sum + exact
    return float(first), float((given_sum - exact_sum).norm() / exact_sum.norm())


def main() -> None:
    """Measure and print both tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], metavar="N")
    parser.add_argument("--steps", type=int, default=32, metavar="N")
    arguments = parser.parse_args()
    if min(arguments.ranks) < 1 or arguments.steps < 1:
        parser.error("--ranks and --steps take numbers from 1")
    stacks = [yaml.safe_load(f"[{hook}]") for hook in HOOKS]
    found = {
        ranks: [as_processes(ranks, errors, stack, arguments.steps)[0] for stack in stacks]
        for ranks in arguments.ranks
    }
    headings = (
        "The first mean that goes through the hook:",
        f"The sum of {arguments.steps} means. In all columns but `fp16` and `bf16`, "
        "error feedback corrects earlier errors:",
    )
    for which, heading in enumerate(headings):
        print(f"{heading}\n")
        print_head(["ranks", *(f"`{hook}`" for hook in HOOKS)])
        for ranks, measured in found.items():
            print_row([ranks, *(f"{one[which]:.2e}".replace("e-0", "e-") for one in measured)])
        print()


if __name__ == "__main__":
    main()
