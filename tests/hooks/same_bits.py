"""Kernels against the torch reference: on a GPU, or interpreted, on CPU tensors in a process of their own."""

import math
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ddprun_hooks import kernels
from ddprun_hooks.builtin.two_phase import BlockScaledFormat, Int4, Int8, TwoPhaseReduction
from ddprun_hooks.testing import run_hooks

WIRES = {"int8": Int8, "int4": Int4}


def prepare() -> None:
    """Have Triton's interpreter round to bf16 as a GPU does (`cvt.rn.bf16.f32`): to the nearest. It cuts off,
    and loses denormal numbers. And have numpy say nothing about overflows and NaN, which are meant.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    other = interpreter._convert_float

    def convert(given: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if (from_type, to_type) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(given.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        if (from_type, to_type) == (tl.bfloat16, tl.float32):
            return given.view("uint16").astype("uint32") << 16
        return other(given, from_type, to_type, rounding)

    interpreter._convert_float = convert
    warnings.filterwarnings("ignore", category=RuntimeWarning)


def values(kind: str, numel: int, seed: int) -> Tensor:
    """Values of many magnitudes, fp32; the kinds are what arithmetic stumbles over."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(numel, generator=generator)
        * torch.logspace(-4, 3, numel)[torch.randperm(numel, generator=generator)]
    )
    if kind == "zeros":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "denormal":
        return x * 1e-42
    if kind == "whole":  # halves: every quotient is a tie, or near one
        return (x.sign() * (x.abs() % 255).floor()) / 2
    if kind == "lost":
        odd = [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max, -3e38, 1e5]
        for place, value in zip(torch.randperm(numel, generator=generator).tolist(), odd, strict=False):
            x[place] = value
    return x


def differences(
    wire: BlockScaledFormat, ranks: int, steps: Sequence[Sequence[Tensor]], same_codes: bool
) -> list[str]:
    """What kernels and reference give differently, of payloads of all ranks in some steps."""
    from ddprun_hooks.builtin.fused import FusedBlockReduction

    reductions: tuple[type[TwoPhaseReduction], ...] = (TwoPhaseReduction, FusedBlockReduction)
    found = []
    device = steps[0][0].device
    residuals = [[torch.zeros(one.numel(), device=device) for one in steps[0]] for _ in range(2)]
    for number, payloads in enumerate(steps):
        outcomes = []
        for made, kept in zip(reductions, residuals, strict=True):
            given = [one.clone() for one in payloads]
            all_ranks = [made(wire, given[rank], kept[rank], rank, ranks) for rank in range(ranks)]
            sent = torch.stack([one.encode().view(ranks, -1) for one in all_ranks])
            sums = torch.cat(
                [one.sum_and_encode(sent[:, rank].flatten()) for rank, one in enumerate(all_ranks)]
            )
            means = [one.decode(sums.clone()) for one in all_ranks]
            assert all(torch.equal(bits(one), bits(means[0])) for one in means)
            assert means[0].data_ptr() == given[0].data_ptr()
            outcomes.append({"sent": sent, "sums": sums, "mean": means[0], "kept": torch.stack(kept)})
        reference, ours = outcomes
        found += [
            f"step {number}: {name}"
            for name in (reference if same_codes else ("mean", "kept"))
            if not torch.equal(bits(reference[name]), bits(ours[name]))
        ]
        if not reference["mean"].any() and not reference["kept"].any() and steps[0][0].any():
            found.append("nothing was computed")
    return found


def bits(x: Tensor) -> Tensor:
    """The bits of values; all that are not finite are the same."""
    if not x.is_floating_point():
        return x
    x = torch.where(torch.isfinite(x), x, math.nan)
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def of_blocks(
    name: str,
    block: int,
    numel: int,
    ranks: int,
    dtype: torch.dtype,
    kind: str,
    seed: int = 0,
    device: str = "cpu",
) -> list[str]:
    """Differences of a format with scales, in two steps."""
    wire: BlockScaledFormat = WIRES[name](block)
    steps = [
        [values(kind, numel, seed + 10 * step + rank).to(device, dtype) for rank in range(ranks)]
        for step in range(2)
    ]
    return differences(wire, ranks, steps, kind != "lost")


def through_a_stack(hook: str, numel: int) -> tuple[list[str], int]:
    """Differences of what a hook gives and keeps with kernels and without, and how often one was launched."""
    from ddprun_hooks.builtin.fused import FusedBlockReduction
    from ddprun_hooks.payload import ParamSlice
    from ddprun_hooks.registry import make_stack

    params = (ParamSlice("w", (numel,), 0, numel),)
    outcomes, launched = [], 0
    for with_kernels in (False, True):
        stack = make_stack([hook])

        def body(rank: Any, stack: Any = stack) -> list[Tensor]:
            rank.stack = stack
            return [rank.send(values("normal", numel, step), params) for step in range(3)]

        encode = FusedBlockReduction.encode
        with (
            mock.patch.object(kernels, "_triton_works", lambda device, works=with_kernels: works),
            mock.patch.object(FusedBlockReduction, "encode", autospec=True, side_effect=encode) as encoding,
        ):
            given = run_hooks([hook], 1, body)[0]
        launched = encoding.call_count
        assert not launched or with_kernels
        kept = stack.state_dict()
        outcomes.append([*given, next(iter(kept.values()))["gradient/w"]["residual"]])
    return [
        f"{number}"
        for number, (reference, ours) in enumerate(zip(*outcomes, strict=True))
        if not torch.equal(bits(reference), bits(ours))
    ], launched
