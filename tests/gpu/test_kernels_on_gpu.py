"""Triton's kernels on a GPU: the bits of the torch reference on the same GPU, and how fast they are."""

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddprun_hooks import kernels
from ddprun_hooks.builtin.two_phase import Int4, Int8, TwoPhaseReduction
from tests.gpu.conftest import Figure
from tests.hooks import same_bits
from tests.hooks.test_kernels import BLOCKS, DTYPES, KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
GPU = "cuda:0"
LARGE = 64 << 20  # values: 256 MiB
SIZES = [(1, 1), (777, 3), ((1 << 20) + 5, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "block"), [*BLOCKS, ("int8", 4096)])
def test_codes_have_the_bits_of_torch(name: str, block: int, kind: str, dtype: torch.dtype) -> None:
    assert kernels.can_handle_tensors(*torch.zeros(2, 1, device=GPU)), (
        "the kernels are what a hook would take"
    )
    for numel, ranks in SIZES:
        assert same_bits.of_blocks(name, block, numel, ranks, dtype, kind, device=GPU) == []


def ms(act: Callable[[], Any]) -> float:
    """Median of 20 times on the device."""
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        act()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times[5:])


def copied_gb_per_s(nbytes: int) -> float:
    """What a copy on the device reads and writes, of as much memory as a kernel."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=GPU)
    target = torch.empty_like(source)
    return nbytes / ms(lambda: target.copy_(source)) / 1e6


@pytest.mark.parametrize("wire", [Int8(256), Int4(64)], ids=lambda wire: wire.kernel_format)
def test_quantising_takes_little_longer_than_copying_as_much(figure: Figure, wire: Any) -> None:
    """Payload and residual of 256 MiB each are read, the message and what is left are written."""
    from ddprun_hooks.builtin.fused import FusedBlockReduction

    given, residual = torch.randn(LARGE, device=GPU), torch.zeros(LARGE, device=GPU)
    ours = FusedBlockReduction(wire, given, residual, 0, 2)
    theirs = TwoPhaseReduction(wire, given, residual, 0, 2)
    message = ours.encode()
    encoded = 3 * 4 * LARGE + message.numel()
    copied = copied_gb_per_s(encoded)
    share = encoded / ms(ours.encode) / 1e6 / copied
    figure("share of the copy's bandwidth", f"{share:.3f} of {copied:.0f} GB/s")

    def in_torch() -> None:
        theirs.encode()
        wire.subtract(theirs._padded_sum, theirs._message)

    figure("speedup over torch", f"{ms(in_torch) / ms(ours.encode):.1f}x")
    assert share > 0.75


def test_what_the_other_kernels_take(figure: Figure) -> None:
    """Sums of two ranks, and decoding, beside what torch takes."""
    from ddprun_hooks.builtin.fused import FusedBlockReduction

    given, residual = torch.randn(LARGE, device=GPU), torch.zeros(LARGE, device=GPU)
    wire = Int8(256)
    ours = FusedBlockReduction(wire, given, residual, 0, 2)
    message = ours.encode()
    sums = ours.sum_and_encode(message).repeat(2)

    def add_in_torch() -> None:
        first, second = message.view(2, -1)
        total = wire.decode(first, torch.float32).add_(wire.decode(second, torch.float32))
        wire.subtract(total, wire.encode(total))

    def decode_in_torch() -> None:
        given.copy_(wire.decode(sums.view(2, -1), torch.float32).view(-1))

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "sum of two shares": (lambda: ours.sum_and_encode(message), add_in_torch),
        "decoding": (lambda: ours.decode(sums), decode_in_torch),
    }
    for what, (kernel, reference) in pairs.items():
        fast, slow = ms(kernel), ms(reference)
        figure(what, f"{fast:.2f} ms, torch {slow:.2f} ms")
        assert fast < slow, what
