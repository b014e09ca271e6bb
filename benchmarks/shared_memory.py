"""`shared_memory` against Gloo over loopback, on the ranks of this machine.

    python -m benchmarks.shared_memory [--ranks 2] [--rounds 30]

Run it in the repository's folder. All-reduce of one fp32 tensor through a queue, from the hook's call until
its future is done; and forward and backward of a DDP model on the CPU. Variants are interleaved within each
round; Gloo runs twice in each, once as its own control. Prints a Markdown table of medians, and of ratios of
Gloo's median to the others'.
"""

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from benchmarks.page import argument_parser, print_head, print_row
from tests.ranks import as_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddprun_hooks
from ddprun_hooks import Payload
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.groups import RankPlacement, merge_requirements
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.registry import make_stack
from ddprun_hooks.stack import Stack

TIMEOUT_S = 300
KIB = (64, 1024, 16 * 1024, 64 * 1024)
VARIANTS = {"gloo": [], "gloo, repeated": [], "shared memory": ["shared_memory"]}
Times = dict[str, list[float]]


def all_reduces(ranks: int, rounds: int) -> list[tuple[str, Times]]:
    """Seconds for one all-reduce, by size and variant."""
    stacks = {name: make_stack(hooks) for name, hooks in VARIANTS.items()}
    timeout = timedelta(seconds=60)
    control = open_control_channel(timeout)
    queue = CommContext.open(
        control=control,
        device=torch.device("cpu"),
        backend="gloo",
        placement=RankPlacement(dist.get_rank(), ("here",) * ranks, (ranks,) * ranks),
        gradients=merge_requirements(stack.requirements for stack in stacks.values()),
        timeout=timeout,
    ).gradient_queue

    def once(stack: Stack, tensor: torch.Tensor) -> None:
        queue.send(Payload(tensor, (), "gradient", 0), stack, []).wait()

    found = []
    for kib in KIB:
        tensor = torch.ones(256 * kib)
        times: Times = {name: [] for name in VARIANTS}
        repeats = max(2, min(64, 64 * 1024 // kib))  # so that starting together does not count
        for round_index in range(rounds + 2):
            for name, stack in stacks.items():
                tensor.fill_(1.0)
                took = timed(control.barrier, partial(once, stack, tensor), repeats)
                if round_index >= 2:
                    times[name].append(took)
        label = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        found.append((f"all-reduce of {label}", times))
    return found


def passes(rounds: int) -> list[tuple[str, Times]]:
    """Seconds for one forward and backward of a DDP model, by variant."""
    models = {}
    for name, hooks in VARIANTS.items():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)
        )
        models[name] = DistributedDataParallel(net, gradient_as_bucket_view=True)
        ddprun_hooks.register(models[name], hooks)
    control = open_control_channel(timedelta(seconds=60))
    batch = torch.randn(16, 1024)
    times: Times = {name: [] for name in VARIANTS}

    def step(model: nn.Module) -> None:
        model(batch).square().mean().backward()

    for round_index in range(rounds + 3):
        for name, model in models.items():
            took = timed(control.barrier, partial(step, model), 1)
            if round_index >= 3:
                times[name].append(took)
    return [("DDP forward and backward, 32 MiB of gradients", times)]


def timed(barrier: Callable[[], None], run: Callable[[], None], repeats: int) -> float:
    """Seconds for one `run`, started together on all ranks."""
    barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def work(ranks: int, rounds: int) -> list[tuple[str, Times]]:
    """What one rank has measured."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo")
    return all_reduces(ranks, rounds) + passes(rounds)


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    found = as_processes(chosen.ranks, work, chosen.ranks, chosen.rounds, timeout_s=TIMEOUT_S)[0]
    speedups = [f"{name}: speedup" for name in list(VARIANTS)[1:]]
    print_head([f"{chosen.ranks} ranks", *(f"{name} (ms)" for name in VARIANTS), *speedups])
    for label, times in found:
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = [medians["gloo"] / medians[name] for name in list(VARIANTS)[1:]]
        cells = [f"{1e3 * median:.3f}" for median in medians.values()] + [f"{ratio:.2f}x" for ratio in ratios]
        print_row([label, *cells])


if __name__ == "__main__":
    main()
