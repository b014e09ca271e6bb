"""Every stack: one result on all ranks, the mean to what it promises, nothing lost, nothing poisoned."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks.config import grammar
from ddprun_hooks.config.options import HookSpec, parse_hook_spec
from ddprun_hooks.registry import make_stack
from ddprun_hooks.testing import (
    NUMEL,
    PARAMS,
    Rank,
    contribution,
    exact_mean,
    run_hooks,
)
from tests.hooks.residuals import residual_total

Specs = list[HookSpec]


def two_level(within: Specs | None = None, across: Specs | None = None) -> HookSpec:
    return {"hierarchical": {"hosts": 2, "within": within or [], "across": across or []}}


TOPK: HookSpec = {"topk": {"density": 0.1}}
MANY: HookSpec = {"topk": {"density": 0.6}}
POWERSGD: HookSpec = {"powersgd": {"rank": 2}}
COMPACT: HookSpec = {"topk": {"density": 0.1, "chunk": 64, "values": "int2"}}
AUTO_BITS: HookSpec = {"auto_bits": {"floor": 0.9, "every": 2}}
BF16_SUMMED_IN_FP32: HookSpec = {"bf16": {"accumulate": "fp32"}}
FP16_SUMMED_IN_FP32: HookSpec = {"fp16": {"accumulate": "fp32"}}
EXACT: list[Specs] = [[], ["shared_memory"], [two_level()], [two_level(within=["shared_memory"])]]
LOSSY: list[Specs] = [
    ["int8"],
    [TOPK],
    [POWERSGD],
    [POWERSGD, "int8"],
    [POWERSGD, MANY],
    [POWERSGD, "shared_memory"],
    [POWERSGD, two_level()],
    [POWERSGD, two_level(across=["int8"])],
    [POWERSGD, two_level(across=[MANY])],
    [two_level(across=["int8"])],
    [two_level(across=[TOPK])],
    [two_level(within=["shared_memory"], across=[POWERSGD])],
    [two_level(across=[POWERSGD, "int8"])],
    ["fp8"],
    [{"int4": {"block": 40}}],
    [BF16_SUMMED_IN_FP32],
    [POWERSGD, FP16_SUMMED_IN_FP32],
    [two_level(across=["int4"])],
    ["int2"],
    [two_level(across=["int2"])],
    [COMPACT],
    [{"topk": {"density": 0.1, "values": "int8"}}],
    [{"topk": {"density": 0.1, "values": "bf16"}}],
    [POWERSGD, {"topk": {"density": 0.6, "chunk": 64, "values": "int8"}}],
    [two_level(across=[COMPACT])],
    [AUTO_BITS],
    [two_level(across=[AUTO_BITS])],
    [POWERSGD, {"auto_bits": {"floor": 0.999, "every": 2}}],
]
CASTS: list[Specs] = [
    ["fp16"],
    ["bf16"],
    ["fp16", TOPK],
    ["fp16", COMPACT],
    ["bf16", "int8"],
    ["fp16", POWERSGD],
    [POWERSGD, "fp16"],
    ["fp16", "shared_memory"],
    ["fp16", two_level()],
    ["bf16", two_level(within=["shared_memory"], across=["int8"])],
    [two_level(within=["fp16"], across=["bf16"])],
    [two_level(within=["bf16", "shared_memory"], across=[POWERSGD, "fp16"])],
    [POWERSGD, "fp16", two_level(within=["shared_memory"])],
]
ALL = [*EXACT, *LOSSY, *CASTS]


def ranks_of(specs: Specs) -> int:
    return 4 if "hierarchical" in str(specs) else 3


@pytest.mark.parametrize("specs", ALL, ids=str)
def test_every_rank_gets_the_same_bits_step_after_step(specs: Specs) -> None:
    """Whatever a stack does; and it is not zero, and of the mean's direction."""
    ranks = ranks_of(specs)
    results = run_hooks(specs, ranks, lambda c: [c.step(step) for step in range(3)])
    for step in range(3):
        first = results[0][step]
        assert all(torch.equal(first, other[step]) for other in results[1:])
        cosine = torch.cosine_similarity(first.double(), exact_mean(step, ranks), dim=0)
        assert cosine > 0.15


@pytest.mark.parametrize("specs", [*LOSSY[:4], ["fp16"], [two_level()], [AUTO_BITS]], ids=str)
def test_nothing_is_sent_of_a_payload_without_elements(specs: Specs) -> None:
    """A bucket of parameters that have none."""

    def body(c: Rank) -> tuple[int, int]:
        return c.send(torch.zeros(0), ()).numel(), len(c.traces[-1].collectives)

    assert run_hooks(specs, 2, body) == [(0, 0)] * 2


@pytest.mark.parametrize(
    ("specs", "ranks"),
    [
        (specs, ranks)
        for specs in [*EXACT, *LOSSY[:3], ["fp16", two_level()]]
        for ranks in (1, 2, 4)
        if ranks > 1 or "hierarchical" not in str(specs)
    ],
    ids=str,
)
def test_any_number_of_ranks_will_do(specs: Specs, ranks: int) -> None:
    """One rank alone, two, four; two hosts need two ranks."""
    results = run_hooks(specs, ranks, lambda c: c.step(0))
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert results[0].abs().sum() > 0


@pytest.mark.parametrize("specs", EXACT, ids=str)
def test_stacks_that_lose_nothing_give_the_mean(specs: Specs) -> None:
    """To the rounding of a sum in fp64."""
    for ranks in (2, 4):
        for result in run_hooks(specs, ranks, lambda c: c.step(5, torch.float64)):
            assert torch.allclose(result, exact_mean(5, ranks), rtol=0, atol=1e-15)


@pytest.mark.parametrize("specs", LOSSY, ids=str)
def test_what_is_not_sent_is_kept(specs: Specs) -> None:
    """After every step: all results so far, and what all ranks keep, add up to all that came in, in fp64."""
    ranks, steps = ranks_of(specs), 4

    def body(c: Rank) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(c.step(step, torch.float64), c.stack.state_dict()) for step in range(steps)]

    results = run_hooks(specs, ranks, body)
    came_in = torch.zeros(NUMEL, dtype=torch.float64)
    went_out = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(steps):
        came_in += exact_mean(step, ranks)
        went_out += results[0][step][0]
        kept = residual_total(make_stack(specs).merge([result[step][1] for result in results]))
        assert kept.abs().max() > 1e-6  # something is lost, so something must be kept
        assert torch.allclose(went_out + kept, came_in, rtol=0, atol=1e-13)


@pytest.mark.parametrize("specs", [specs for specs in LOSSY if "hierarchical" not in str(specs)], ids=str)
def test_a_rank_alone_has_sent_what_it_does_not_keep(specs: Specs) -> None:
    """sent + kept == input, elementwise, on one rank."""

    def body(c: Rank) -> tuple[Tensor, dict[str, Any]]:
        return c.step(0, torch.float64), c.stack.state_dict()

    ((sent, state),) = run_hooks(specs, 1, body)
    kept = residual_total(make_stack(specs).merge([state]))
    assert torch.allclose(sent + kept, contribution(0, 0, 1, torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("specs", LOSSY, ids=str)
def test_error_feedback_delivers_everything_in_the_end(specs: Specs) -> None:
    """Of a gradient that comes once and then no more, all arrives within some steps."""
    ranks = ranks_of(specs)

    def body(c: Rank) -> Tensor:
        total = c.step(0)
        for _ in range(60):
            total += c.send(torch.zeros(NUMEL))
        return total

    result = run_hooks(specs, ranks, body)[0]
    wanted = exact_mean(0, ranks).float()
    assert (result - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("value", [math.inf, 1.0])
@pytest.mark.parametrize("specs", [*LOSSY, *CASTS], ids=str)
def test_a_step_that_is_rolled_back_leaves_no_trace(specs: Specs, value: float) -> None:
    """With a loss scale: after a step that is skipped, for this bucket's sake or another's, state is bit for
    bit as before it; after the first step, there is none.
    """

    def body(c: Rank) -> None:
        c.stack.begin_step()
        c.step(9)
        c.stack.rollback()
        assert not c.stack.state_dict()
        c.step(0)
        before = c.stack.state_dict()
        c.stack.begin_step()
        c.send(contribution(c.rank, 9, c.world_size) * (value if c.rank == 0 else 1.0))
        c.stack.rollback()
        assert_same(c.stack.state_dict(), before)
        c.stack.begin_step()
        c.step(1)
        c.stack.commit()
        if before:
            with pytest.raises(AssertionError):
                assert_same(c.stack.state_dict(), before)

    run_hooks(specs, ranks_of(specs), body)


@pytest.mark.parametrize("specs", ALL, ids=str)
def test_what_is_not_finite_is_passed_on_and_not_kept(specs: Specs) -> None:
    """One such value of one rank makes the mean not finite on all of them; the next steps are clean."""
    odd = {1: math.inf, 4: -math.inf, 7: math.nan}

    def body(c: Rank) -> list[Tensor]:
        tensors = [contribution(c.rank, step, c.world_size) for step in range(10)]
        for step, value in odd.items():
            if c.rank == 1:
                tensors[step][700] = value
        return [c.send(tensor) for tensor in tensors]

    for results in run_hooks(specs, ranks_of(specs), body):
        for step, result in enumerate(results):
            assert bool(torch.isfinite(result).all()) == (step not in odd), step


@pytest.mark.parametrize("specs", ALL, ids=str)
def test_zero_comes_back_as_zero(specs: Specs) -> None:
    """No hook invents a gradient, and none divides by nothing."""
    for result in run_hooks(specs, ranks_of(specs), lambda c: c.send(torch.zeros(NUMEL))):
        assert torch.equal(result, torch.zeros(NUMEL))


@pytest.mark.parametrize("specs", ALL, ids=str)
def test_no_more_rounds_are_used_than_declared_and_bytes_go_down(specs: Specs) -> None:
    """A stack that compresses sends less than plain all-reduce does."""
    ranks = ranks_of(specs)
    trace = run_hooks(specs, ranks, lambda c: (c.step(0), c.traces[0])[1])[0]
    assert len(trace.collectives) <= sum(make_stack(specs).requirements.values())
    plain = 2 * (ranks - 1) / ranks * 4 * NUMEL
    if specs in LOSSY or specs in CASTS:
        assert trace.wire_bytes < 0.95 * plain
    if "shared_memory" in specs and len(specs) == 1:
        assert trace.wire_bytes == 0


@pytest.mark.parametrize("specs", ALL, ids=str)
def test_the_grammar_takes_every_stack_that_is_tested_here(specs: Specs) -> None:
    """Without importing the hooks, as `ddprun check` does it."""
    found = grammar.stack_problems([grammar.make_stack_entry(*parse_hook_spec(spec)) for spec in specs])
    assert [problem for problem in found if problem.severity == "error"] == []


def assert_same(one: Any, other: Any) -> None:
    """Two states are the same, bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_payload_smaller_than_the_team_still_comes_through() -> None:
    """A bucket of one element among four ranks: three of them have nothing to reduce."""
    for specs in ALL:
        param = next(param for param in PARAMS if param.name == "scale")
        single = (type(param)("scale", (), 0, 1),)
        results = run_hooks(specs, 4, lambda c, single=single: c.send(torch.tensor([0.25]), single))  # type: ignore[misc]
        for result in results:
            assert result.item() == pytest.approx(1.0, rel=0.02), specs
