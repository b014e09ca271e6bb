"""How fast are ddprun's hooks beside those that torch brings, in a DDP script of one's own?

    python -m benchmarks.torch_hooks [--rounds 30] [--ranks 2]

Run it in the repository's folder. Every hook has a DDP model of its own, with equal weights, in the same
processes and over the same default process group (Gloo). Models take a few whole steps in turns, in an order
that is drawn anew for each round; DDP without a hook is there twice, as its own control. First each hook of
torch's is tried in processes of its own, since some fail or hang on Gloo. Prints a Markdown table for a
layout of one bucket and one for several. Bytes are those of the loopback interface, with packets' headers:
as root in a network namespace of its own; elsewhere whatever else uses loopback is in them.
"""

import os
import random
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from benchmarks.page import argument_parser, faster, print_head, print_row, shown
from tests.namespaces import REASON
from tests.ranks import as_processes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import ddprun_hooks

WIDTH, LAYERS, BATCH = 512, 8, 16
GRADIENT_MB = 4 * LAYERS * (WIDTH + 1) * WIDTH / 1e6
LAYOUTS = {"1 bucket": 100, f"{LAYERS} buckets": 1}  # by bucket_cap_mb
RANK = 4
PLAIN, AGAIN = "none", "none, again"
TRIED_S, MEASURED_S = 30, 250
_OWN_NETWORK = "DDPRUN_BENCHMARK_NETWORK"


def _power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)


TORCH: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "allreduce_hook": (lambda: None, default_hooks.allreduce_hook),
    "fp16_compress_hook": (lambda: None, default_hooks.fp16_compress_hook),
    "bf16_compress_hook": (lambda: None, default_hooks.bf16_compress_hook),
    "quantization_pertensor_hook": (lambda: dist.group.WORLD, quantization_hooks.quantization_pertensor_hook),
    "powerSGD_hook": (_power_sgd, powerSGD_hook.powerSGD_hook),
    "batched_powerSGD_hook": (_power_sgd, powerSGD_hook.batched_powerSGD_hook),
}
"""Torch's hooks: what makes their state, and the hook."""

OURS = {
    "[]": "allreduce_hook",
    "[fp16]": "fp16_compress_hook",
    "[bf16]": "bf16_compress_hook",
    "[int8]": "quantization_pertensor_hook",
    f"[{{powersgd: {{rank: {RANK}}}}}]": "powerSGD_hook",
    "[shared_memory]": "",
}
"""Ours, as in a pipeline file, and the one of torch's that sends the same."""


class Replica:
    """A model with a hook, and its optimizer."""

    def __init__(self, name: str, bucket_cap_mb: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = DistributedDataParallel(
            nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
        )
        if name in TORCH:
            state, hook = TORCH[name]
            self.model.register_comm_hook(state(), hook)
        elif name in OURS:
            ddprun_hooks.register(self.model, yaml.safe_load(name))
        self._optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self, batch: torch.Tensor) -> None:
        """One step of training."""
        self.model(batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _join() -> torch.Tensor:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def tried(name: str, bucket_cap_mb: int) -> str | None:
    """Why a hook does not work, on each rank; None if it does."""
    batch = _join()
    try:
        replica = Replica(name, bucket_cap_mb)
        for _ in range(5):
            replica.step(batch)
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0].strip(": ")
        return told[[found.start() for found in re.finditer(r"\w+Error", told)][-1] :]  # the innermost
    return None


def refusal(name: str, ranks: int, bucket_cap_mb: int) -> str | None:
    """The same, from processes that are ended if they hang."""
    try:
        told = as_processes(ranks, tried, name, bucket_cap_mb, may_die=True, timeout_s=TRIED_S)
    except AssertionError as error:
        return "hangs" if "says nothing" in str(error) else str(error).splitlines()[-1]
    return next((one for one in told if one), None)


def _sent() -> int:
    """Bytes that the loopback interface of this network namespace has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def measured(
    names: list[str], bucket_cap_mb: int, rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """On each rank: seconds and bytes of a step in each round, of this rank and of all ranks."""
    batch = _join()
    replicas = {name: Replica(name, bucket_cap_mb) for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-3, rounds):
        for name in random.Random(number).sample(names, len(names)):
            dist.barrier()
            sent, start = _sent(), time.perf_counter()
            for _ in range(steps):
                replicas[name].step(batch)
            seconds = time.perf_counter() - start
            dist.barrier()
            if number >= 0:  # before, DDP lays out its buckets and caches fill
                found[name].append((seconds / steps, (_sent() - sent) / steps))
    return found


def show(layout: str, ranks: int, rounds: int, steps: int) -> None:
    """Measure a layout and print its table."""
    cap = LAYOUTS[layout]
    refused = {name: refusal(name, ranks, cap) for name in TORCH}
    names = [PLAIN, AGAIN, *(name for name in TORCH if refused[name] is None), *OURS]
    found = as_processes(ranks, measured, names, cap, rounds, steps, timeout_s=MEASURED_S)[0]

    def ratio(name: str, base: str) -> tuple[float, float, float]:
        """Steps per second of one to those of another."""
        return faster(*([seconds for seconds, _ in found[one]] for one in (name, base)))

    print(f"{layout}, {GRADIENT_MB:.1f} MB of gradients, {ranks} ranks:\n")
    ratios = [f"steps/s relative to {base}" for base in ("no hook", "torch's hook")]
    print_head(["hook", "ms per step", *ratios, "sent per rank"])
    slower = []
    for name in [PLAIN, AGAIN, *TORCH, *OURS]:
        label = name if name in (PLAIN, AGAIN) else f"`{name}`" if name in OURS else f"torch's `{name}`"
        if refused.get(name):
            print_row([label, textwrap.shorten(str(refused[name]), 60), "", "", ""])
            continue
        step_ms = 1000 * median(seconds for seconds, _ in found[name])
        size = median(sent for _, sent in found[name]) / ranks / (1e6 * GRADIENT_MB)
        cells = ["1" if name == PLAIN else shown(ratio(name, PLAIN)), ""]
        if name in OURS and (theirs := OURS[name]) in found:
            against = ratio(name, theirs)
            cells[1] = shown(against)
            if against[2] < 1:
                slower.append(f"`{name}` (`{theirs}`)")
        print_row([label, f"{step_ms:.1f}", *cells, f"{size:.3f} S"])
    told = ", ".join(slower) or "none"
    print(f"\nSlower than torch's hook: {told}. The values are medians of {rounds} rounds.\n")


def main() -> None:
    """Measure and print both tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8, help="of each in a round")
    parser.add_argument("--layout", choices=list(LAYOUTS), help="one of them only")
    asked = parser.parse_args()
    if REASON is None and shutil.which("unshare") and _OWN_NETWORK not in os.environ:
        words = [sys.executable, "-m", "benchmarks.torch_hooks", *sys.argv[1:]]
        os.environ[_OWN_NETWORK] = "1"
        up = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", up, "sh", *words])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for layout in [asked.layout] if asked.layout else LAYOUTS:
        show(layout, asked.ranks, asked.rounds, asked.steps)


if __name__ == "__main__":
    main()
