"""What travels in codes or in 16 bits and is summed by the rank that owns the share."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks import ParamSlice
from ddprun_hooks.builtin.cast import DTYPES, CastFormat
from ddprun_hooks.builtin.two_phase import BlockScaledFormat, Fp8, Int2, Int4, Int8, WireFormat
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.stack import Stack
from ddprun_hooks.testing import NUMEL, Rank, contribution, run_hooks
from tests.hooks.residuals import residual_total

FINE = [8 + m for m in range(8)]
E4M3 = [m * 2**-9 for m in range(8)] + [m * 2.0 ** (e - 3) for e in range(-6, 9) for m in FINE][:-1]
"""What e4m3 can hold, by its definition; the last code is NaN."""

CODES: list[tuple[BlockScaledFormat, list[float]]] = [
    (Int8(256), list(range(128))),
    (Int4(64), list(range(8))),
    (Fp8(256), E4M3),
]
EXACT: list[WireFormat] = [*(wire for wire, _ in CODES), *map(CastFormat, DTYPES.values())]
FORMATS = [*EXACT, Int2(128)]
SUMMED_IN_FP32: list[HookSpec] = [{name: {"accumulate": "fp32"}} for name in DTYPES]


def named(value: Any) -> str:
    return type(value).__name__ if isinstance(value, WireFormat) else str(value)[:20]


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-4, 3, shape[-1], dtype=dtype)
    return torch.randn(*shape, generator=generator, dtype=dtype) * sizes


@pytest.mark.parametrize(("wire", "magnitudes"), CODES, ids=named)
def test_a_code_is_the_nearest_to_its_value_in_units_of_the_blocks_largest(
    wire: BlockScaledFormat, magnitudes: list[float]
) -> None:
    """No code of the format would be nearer, and the largest value is exact to fp32's rounding."""
    x = spread(3, 1024, dtype=torch.float64)
    message = wire.encode(x)
    assert message.dtype == torch.uint8
    assert message.shape == (3, 1024 * wire.bits // 8 + 4 * 1024 // wire.block)
    given, blocks = (values.view(-1, wire.block) for values in (wire.decode(message, x.dtype), x))
    table = torch.tensor([-value for value in magnitudes] + magnitudes, dtype=x.dtype)
    largest = blocks.abs().amax(-1, keepdim=True)
    all_codes = table * largest.unsqueeze(-1) / magnitudes[-1]
    off, nearest = (given - blocks).abs(), (all_codes - blocks.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose(off, nearest, rtol=0, atol=float(2e-7 * largest.max()))
    assert torch.allclose(given.abs().amax(-1, keepdim=True), largest, rtol=1e-7, atol=0)


@pytest.mark.parametrize("size", [1, 1e-12, 1e-42])
@pytest.mark.parametrize("wire", EXACT, ids=named)
def test_what_is_sent_and_what_is_left_are_the_value_bit_for_bit(wire: WireFormat, size: float) -> None:
    """In fp32: the nearest number of fewer bits is near enough for the difference to be exact. So it is
    where numbers, and scales, have few bits left.
    """
    x = spread(2, 1024) * size
    message = wire.encode(x)
    left = x.clone()
    wire.subtract(left, message)
    assert left.abs().max() > 0
    assert torch.equal(wire.decode(message, torch.float32).double() + left.double(), x.double())


@pytest.mark.parametrize("wire", [wire for wire, _ in CODES], ids=named)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-300])
def test_a_block_without_a_scale_is_kept(wire: BlockScaledFormat, value: float) -> None:
    """Of zeros, and of values whose scale is no fp32 number, nothing is sent and nothing is lost."""
    x = torch.full((wire.block,), value, dtype=torch.float64)
    message, left = wire.encode(x), x.clone()
    wire.subtract(left, message)
    assert torch.equal(wire.decode(message, x.dtype), torch.zeros_like(x))
    assert torch.equal(left, x)


LOST = [(math.inf, torch.float32), (-math.inf, torch.float32), (math.nan, torch.float32)]
TOO_LARGE = [(1e300, torch.float64), (torch.finfo(torch.float32).max, torch.float32)]


@pytest.mark.parametrize(("value", "dtype"), [*LOST, *TOO_LARGE], ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=named)
def test_what_is_not_finite_leaves_nothing(wire: WireFormat, value: float, dtype: torch.dtype) -> None:
    """In its block; the others are as without it. A value that is too large for the format is like it, or
    is sent and kept as any other.
    """
    x = spread(1024).to(dtype)
    clean, message = x.clone(), wire.encode(x)
    wire.subtract(clean, message)
    own = slice(512 // wire.block * wire.block, (512 // wire.block + 1) * wire.block)
    x[512] = value
    odd, left = wire.encode(x), x.clone()
    wire.subtract(left, odd)
    given = wire.decode(odd, dtype)
    assert torch.isfinite(left).all()
    if not math.isfinite(value):
        assert not torch.isfinite(given[own]).any()
        assert not left[own].any()
    elif not torch.isfinite(given[512]):
        assert left[512] == 0
    else:
        assert given[512] == pytest.approx(value, rel=0.01)
    others = torch.ones(1024, dtype=torch.bool)
    others[own] = False
    assert torch.equal(given[others], wire.decode(message, dtype)[others])
    assert torch.equal(left[others], clean[others])


def test_int4_puts_two_codes_into_a_byte() -> None:
    """All codes, in every place, come back."""
    x = torch.arange(-7.0, 9.0).clamp_(max=7.0).repeat(4)[torch.randperm(64)]
    message = Int4(64).encode(x)
    assert message.numel() == 32 + 4
    assert torch.equal(Int4(64).decode(message, torch.float32), x)


def test_int2_sends_signs_and_two_magnitudes() -> None:
    """The means of the magnitudes below and above their mean, by block; four codes share a byte."""
    x = torch.tensor([-1.0, 2.0, 3.0, -8.0, 6.0, 1.0, -1.0, 2.0] + [0.5] * 7 + [-0.5])
    message = Int2(8).encode(x)
    assert message.numel() == 16 * 2 // 8 + 2 * 2 * 4
    low = 10 / 6
    wanted = torch.tensor([-low, low, low, -7.0, 7.0, low, -low, low] + [0.5] * 7 + [-0.5])
    assert torch.allclose(Int2(8).decode(message, torch.float32), wanted)


@pytest.mark.parametrize("wire", [Int8(7), Int2(7)], ids=named)
def test_a_block_of_any_length(wire: WireFormat) -> None:
    """Codes that fill no byte, and scales that are not aligned, as of `topk`'s values."""
    x = spread(21)
    message = wire.encode(x)
    off = torch.cat([torch.zeros(1, dtype=torch.uint8), message])[1:]
    blocks = torch.cat([wire.decode(wire.encode(part.clone()), x.dtype) for part in x.view(3, 7)])
    assert torch.equal(wire.decode(off, x.dtype), blocks)


@pytest.mark.parametrize(("hook", "wire"), [("int8", Int8(256)), ("int4", Int4(64)), ("fp8", Fp8(256))])
def test_one_rank_alone_encodes_twice(hook: str, wire: BlockScaledFormat) -> None:
    """The second time what the first one left is exact: codes of codes are the same codes."""
    x = contribution(0, 0, 1)
    result = run_hooks([hook], 1, lambda c: c.send(x))[0]
    padded = torch.cat([x, torch.zeros(-NUMEL % wire.block)])
    assert torch.allclose(result, wire.decode(wire.encode(padded), torch.float32)[:NUMEL], rtol=1e-6)


def whole(numel: int) -> tuple[ParamSlice, ...]:
    return (ParamSlice("last.weight", (numel,), 0, numel),)


@pytest.mark.parametrize(
    "hook", ["int4", "int2", "fp8", {"topk": {"values": "int2"}}, *SUMMED_IN_FP32], ids=str
)
def test_any_length_will_do(hook: HookSpec) -> None:
    """None, one, odd ones, less than a block, a little more than the ranks' blocks: nothing is lost."""
    lengths = [0, 1, 2, 3, 63, 65, 193, 279]
    tensors = [[contribution(r, 0, 3, torch.float64)[:numel] for r in range(3)] for numel in lengths]

    def body(c: Rank) -> list[tuple[Tensor, dict[str, Any]]]:
        found = []
        for sent in tensors:
            stack = make_stack([hook])
            c.stack = stack
            found.append((c.send(sent[c.rank], whole(len(sent[0]))), stack.state_dict()))
        return found

    results = run_hooks([hook], 3, body)
    for number, (numel, sent) in enumerate(zip(lengths, tensors, strict=True)):
        first = results[0][number][0]
        assert all(torch.equal(first, of_rank[number][0]) for of_rank in results)
        if numel:
            merged = make_stack([hook]).merge([of_rank[number][1] for of_rank in results])
            (kept,) = whole(numel)
            total = _total(merged)
            assert torch.allclose(first + kept.of(total), torch.stack(sent).sum(0), rtol=0, atol=1e-14)


def _total(merged: dict[str, Any]) -> Tensor:
    ((_, pieces),) = merged.items()
    total: Tensor = pieces["gradient/last.weight"]["total"].double()
    return total


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_accumulate_rounds_each_share_once_and_the_mean_once(name: str, ranks: int) -> None:
    """Bit for bit, with the bytes of an all-reduce in 16 bits."""
    hooks: list[HookSpec] = [{name: {"accumulate": "fp32"}}]
    results = run_hooks(hooks, ranks, lambda c: (c.step(0), c.traces[0]))
    total = torch.zeros(NUMEL)
    for rank in range(ranks):
        total += contribution(rank, 0, ranks).to(DTYPES[name])
    padded = -(-NUMEL // ranks) * ranks
    for result, trace in results:
        assert torch.equal(result, total.to(DTYPES[name]).float())
        assert trace.wire_bytes == 2 * (ranks - 1) / ranks * 2 * padded
        assert {one.dtype for one in trace.collectives} == {str(DTYPES[name]).removeprefix("torch.")}


@pytest.mark.parametrize(("large", "code"), [(1e5, 1), (math.inf, 2)])
def test_accumulate_says_what_overflows(large: float, code: int) -> None:
    """As a cast that sums in 16 bits does; what is too large is not kept."""

    def body(c: Rank) -> tuple[list[Any], bool]:
        x = contribution(c.rank, 0, 2)
        x[5] = large
        assert not c.send(x)[5].isfinite()
        return list(c.traces[0].findings), bool(c.send(torch.zeros(NUMEL)).isfinite().all())

    for findings, clean in run_hooks([{"fp16": {"accumulate": "fp32"}}], 2, body):
        assert [(found.hook, int(found.code)) for found in findings] == [("fp16", code)]
        assert clean


def test_only_a_cast_with_accumulate_takes_over_what_one_has_kept() -> None:
    """A stage that casts without it leaves the residuals for one with it."""

    def body(c: Rank) -> bool:
        c.step(0)
        first, kept = c.stack, c.stack.state_dict()
        plain, last = make_stack(["bf16"]), make_stack([{"bf16": {"accumulate": "fp32"}}])
        plain.take_state_from([first])
        assert not plain.state_dict()
        last.take_state_from([plain, first])
        assert not first.state_dict()
        assert torch.equal(residual_total(Stack.merge(last, [last.state_dict()])), _of(kept))
        plain.load_state_dict(kept)  # of a checkpoint whose run had it
        return not plain.state_dict()

    assert run_hooks([{"bf16": {"accumulate": "fp32"}}], 1, body) == [True]


def _of(state: dict[str, Any]) -> Tensor:
    total = residual_total(make_stack([{"bf16": {"accumulate": "fp32"}}]).merge([state]))
    assert total.any()
    return total
