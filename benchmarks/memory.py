"""How much more memory does a rank need with each hook, in units of the gradient?

    python -m benchmarks.memory [--width 2048] [--only NAME] [--minutes 3]

Run it in the repository's folder, on Linux. A DDP script trains a model with each hook, in processes of its
own, for a few steps. `kept between steps` and `peak in a step` are resident memory of a rank, beyond that of
plain DDP on as many ranks, which is measured twice, as its own control. Large tensors are given back to the
system at once (MALLOC_MMAP_THRESHOLD_). `hook state` is the size of the tensors in the hook's own state. S is
the gradient, in as many buckets as the model has layers.
Torch's own hooks stand beside ours. Prints a Markdown table of means over ranks.
"""

import gc
import os
import re
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import yaml
from benchmarks.page import Pieces, argument_parser, print_head, print_row
from benchmarks.torch_hooks import TORCH
from tests.ranks import as_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import ddprun_hooks

LAYERS, BATCH = 8, 8
STEPS_FIRST, STEPS = 5, 4
TIMEOUT_S = 120
PLAIN, AGAIN = "plain DDP", "plain DDP, again"

HOOKS = {
    "[]": 2,
    "[fp16]": 2,
    "[bf16]": 2,
    "[{bf16: {accumulate: fp32}}]": 2,
    "[int8]": 2,
    "[fp8]": 2,
    "[int4]": 2,
    "[{topk: {density: 0.05}}]": 2,
    "[{powersgd: {rank: 4}}]": 2,
    "[shared_memory]": 2,
    "[{hierarchical: {hosts: 2}}]": 4,
    "[{hierarchical: {hosts: 2, across: [int8]}}]": 4,
}
"""Our hooks, as in a pipeline file, and on how many ranks each is measured."""

THEIRS = ["allreduce_hook", "fp16_compress_hook"]
"""Torch's hooks that work on Gloo with several buckets."""


def _resident(which: str) -> int:
    """`VmRSS` or `VmHWM` of this process, bytes."""
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measured(hooks: list[Any] | str | None, width: int) -> tuple[int, int, int, int]:
    """On each rank: bytes held between steps, needed within one, of the hooks' state, and of the gradient."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    size = 4 * LAYERS * width * (width + 1)
    layer_mb = size / LAYERS / 2**20
    net = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=layer_mb, gradient_as_bucket_view=True
    )
    handle = None
    if isinstance(hooks, str):
        state, hook = TORCH[hooks]
        net.register_comm_hook(state(), hook)
    elif hooks is not None:
        handle = ddprun_hooks.register(net, hooks)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    batch = torch.randn(BATCH, width)

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(STEPS_FIRST):
        step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(STEPS):
        step()
    at_most = _resident("VmHWM")
    gc.collect()
    state_bytes = 0
    if handle is not None:
        state_bytes = sum(one.nbytes for one in filter(torch.is_tensor, tree_leaves(handle.state_dict())))
        gc.collect()
    return _resident("VmRSS"), at_most, state_bytes, size


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__, in_pieces=True)
    parser.add_argument("--width", type=int, default=2048, help="of the model's layers")
    parser.add_argument("--only", help="one of our hooks")
    asked = parser.parse_args()
    ours = {name: ranks for name, ranks in HOOKS.items() if asked.only in (None, name)}
    if not ours:
        parser.error(f"--only takes one of {', '.join(HOOKS)}")
    # Before the processes start: read by the C library when it is loaded.
    os.environ.update(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_=str(128 << 10), OMP_NUM_THREADS="1")
    pieces = Pieces("memory", [asked.width], asked.minutes)

    def mean(name: str, ranks: int, hooks: list[Any] | str | None) -> list[float]:
        """Means over ranks."""
        work = partial(as_processes, ranks, measured, hooks, asked.width, timeout_s=TIMEOUT_S)
        found = pieces.take(f"{name}, {ranks} ranks", work)
        return [fmean(column) for column in zip(*found, strict=True)]

    counts = sorted(set(ours.values()))
    plain = {ranks: mean(PLAIN, ranks, None) for ranks in counts}
    size = plain[counts[0]][3]
    rows = [(AGAIN, ranks, mean(AGAIN, ranks, None)) for ranks in counts]
    rows += [(f"torch's `{name}`", 2, mean(name, 2, name)) for name in THEIRS if 2 in counts]
    rows += [(f"`{name}`", ranks, mean(name, ranks, yaml.safe_load(name))) for name, ranks in ours.items()]
    print(f"S is {size / 1e6:.0f} MB, in {LAYERS} buckets of S/{LAYERS}:\n")
    print_head(["hook", "ranks", "hook state", "kept between steps", "peak in a step"])
    for name, ranks, (kept, at_most, state, _) in rows:
        more = [kept - plain[ranks][0], at_most - plain[ranks][1]]
        print_row([name, ranks, *(f"{number / size:.2f} S" for number in (state, *more))])
    pieces.end()


if __name__ == "__main__":
    main()
