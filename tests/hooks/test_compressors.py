"""topk and powersgd, each against arithmetic written down here."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks import ParamSlice
from ddprun_hooks.builtin import elias_fano
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.testing import NUMEL, PARAMS, Rank, contribution, run_hooks
from tests.hooks.residuals import residual_total


def test_topk_sends_the_largest_of_each_rank_and_adds_them_up() -> None:
    """Computed here by sorting."""
    results = run_hooks([{"topk": {"density": 0.05}}], 3, lambda c: c.step(0))
    wanted = torch.zeros(NUMEL)
    for rank in range(3):
        x = contribution(rank, 0, 3)
        largest = x.abs().sort(descending=True).indices[: math.ceil(0.05 * NUMEL)]
        wanted[largest] += x[largest]
    assert torch.equal(results[0], wanted)
    assert int((wanted != 0).sum()) < NUMEL * 0.16


def test_topk_sends_so_many_of_each_chunk() -> None:
    """With chunks of equal length, of at most 100 values; the last one is padded."""
    spec: HookSpec = {"topk": {"density": 0.05, "chunk": 100}}
    results = run_hooks([spec], 2, lambda c: c.step(0))
    count = math.ceil(NUMEL / 100)
    length = math.ceil(NUMEL / count)
    assert NUMEL % length
    wanted = torch.zeros(NUMEL)
    for rank in range(2):
        for start in range(0, NUMEL, length):
            x = contribution(rank, 0, 2)[start : start + length]
            largest = x.abs().sort(descending=True).indices[: math.ceil(0.05 * length)]
            wanted[start : start + length][largest] += x[largest]
    assert torch.equal(results[0], wanted)


VALUE_BITS = {"fp32": (32, 0), "bf16": (16, 0), "int8": (8, 32), "int2": (2, 64)}  # of a value, of a chunk


@pytest.mark.parametrize("values", VALUE_BITS)
def test_topk_sends_few_bits(values: str) -> None:
    """64 of 4096 values, as SparseLoCo has it: 511 bits for 64 indices of 12 bits."""
    numel, (bits, scales) = 40 * 4096, VALUE_BITS[values]
    spec: HookSpec = {"topk": {"density": 1 / 64, "values": values}}
    param = (ParamSlice("w", (numel,), 0, numel),)
    (trace,) = run_hooks([spec], 2, lambda c: (c.send(torch.randn(numel), param), c.traces)[1])[0]
    assert trace.wire_bytes == 40 * (64 * bits + scales + 511) / 8
    if values == "int2":
        assert trace.wire_bytes * 8 / numel < 0.22


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
def test_decay_is_the_part_of_what_was_not_sent_that_is_kept(decay: float) -> None:
    """In fp64: what came in and the part of what was kept are what was sent and what is kept."""
    spec: HookSpec = {"topk": {"density": 0.05, "chunk": 128, "values": "int2", "decay": decay}}
    kept = [torch.zeros(NUMEL, dtype=torch.float64)]
    means = []

    def body(c: Rank) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(c.step(step, torch.float64), c.stack.state_dict()) for step in range(4)]

    stack = make_stack([spec])
    for of_ranks in zip(*run_hooks([spec], 3, body), strict=True):
        means.append(of_ranks[0][0])
        kept.append(residual_total(stack.merge([state for _, state in of_ranks])))
    for step, mean in enumerate(means):
        came_in = sum(contribution(rank, step, 3, torch.float64) for rank in range(3))
        off = came_in + decay * kept[step] - mean - kept[step + 1]
        assert off.abs().max() < 1e-12
    assert kept[-1].abs().max() > 0.1


def test_sorted_numbers_in_few_bits_come_back() -> None:
    """Of every shape, in as many bytes as was said; the formula's two bits and the low ones each."""
    generator = torch.Generator().manual_seed(0)
    for rows, k, length in ((1, 1, 1), (3, 1, 2), (5, 64, 4096), (7, 5, 10), (2, 10, 10), (3, 4095, 4096)):
        numbers = torch.stack(
            [torch.randperm(length, generator=generator)[:k].sort().values for _ in range(rows)]
        )
        message = elias_fano.encode(numbers, length)
        assert len(message) == elias_fano.encoded_bytes(rows, k, length)
        assert len(message) <= 2 + rows * k * (2 + math.log2(length / k)) / 8
        assert torch.equal(elias_fano.decode(message, rows, k, length), numbers)


def test_topk_of_everything_is_the_sum() -> None:
    """density: 1 loses nothing."""
    result = run_hooks([{"topk": {"density": 1.0}}], 2, lambda c: c.step(0))[0]
    assert torch.allclose(result, contribution(0, 0, 2) + contribution(1, 0, 2), rtol=0, atol=1e-7)


def paper(gradients: list[list[Tensor]], rank: int, start: Tensor) -> list[Tensor]:
    """PowerSGD of one matrix by the paper's algorithms 1 and 2, with the mean's Q in the error, in fp64."""
    ranks, q, means = len(gradients[0]), start, []
    errors = [torch.zeros_like(gradients[0][0]) for _ in range(ranks)]
    for step in gradients:
        matrices = [gradient + error for gradient, error in zip(step, errors, strict=True)]
        p = torch.linalg.qr(sum(matrices, torch.zeros_like(matrices[0])) / ranks @ torch.linalg.qr(q).Q).Q
        q = sum((matrix.T @ p for matrix in matrices), torch.zeros_like(q)) / ranks
        mean = p @ q.T
        errors = [matrix - mean for matrix in matrices]
        means.append(mean)
    return means


def test_powersgd_gives_what_the_paper_does() -> None:
    """Over several steps on three ranks, though each rank keeps its own error and not the mean's."""
    shape, ranks, steps = (24, 18), 3, 6
    param = (ParamSlice("w", shape, 0, 24 * 18),)
    generator = torch.Generator().manual_seed(5)
    gradients = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        for _ in range(steps)
    ]

    def body(c: Rank) -> tuple[Tensor, list[Tensor]]:
        from ddprun_hooks.builtin.powersgd import PowerSgd

        hook = c.stack.hooks[0]
        assert isinstance(hook, PowerSgd)
        start = hook._last_q("gradient", param[0], torch.empty(0, dtype=torch.float64))
        return start, [c.send(step[c.rank].reshape(-1) / ranks, param) for step in gradients]

    results = run_hooks([{"powersgd": {"rank": 3}}], ranks, body)
    for given, wanted in zip(results[0][1], paper(gradients, 3, results[0][0]), strict=True):
        assert torch.allclose(given.view(shape), wanted, rtol=0, atol=1e-10)


def test_powersgd_is_exact_where_the_matrix_has_no_more_than_its_rank() -> None:
    """A mean of rank two through factors of rank two, from the first step on."""
    left, right = torch.randn(40, 2, dtype=torch.float64), torch.randn(2, 30, dtype=torch.float64)
    param = (ParamSlice("w", (40, 30), 0, 1200),)
    result = run_hooks(
        [{"powersgd": {"rank": 2}}], 2, lambda c: c.send((left @ right).reshape(-1) / 2, param)
    )[0]
    assert torch.allclose(result.view(40, 30), left @ right, rtol=0, atol=1e-12)


def test_powersgd_leaves_alone_what_factors_would_not_make_smaller() -> None:
    """Vectors, scalars and thin matrices are exact from the first step on."""
    results = run_hooks([{"powersgd": {"rank": 4}}], 2, lambda c: c.step(0, torch.float64))
    wanted = contribution(0, 0, 2, torch.float64) + contribution(1, 0, 2, torch.float64)
    for param in PARAMS:
        part = slice(param.offset, param.offset + param.numel)
        exact = torch.allclose(results[0][part], wanted[part], rtol=0, atol=1e-15)
        assert exact == (param.name in ("first.bias", "scale"))


def test_powersgd_reports_the_bytes_of_its_factors() -> None:
    """rank * (rows + columns) numbers for a matrix, and the rest as it is."""
    traces = run_hooks([{"powersgd": {"rank": 2}}], 2, lambda c: (c.step(0), c.traces)[1])[0]
    numbers = 2 * (40 + 30) + 2 * (12 + 36) + 2 * (7 + 40) + 40 + 1
    assert traces[0].wire_bytes == 4 * numbers
