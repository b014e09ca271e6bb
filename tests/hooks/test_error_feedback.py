"""What hooks keep: through a save, other buckets, and another number of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks import Communicator, ExchangeError, Hook, Payload
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.registry import make_stack
from ddprun_hooks.stack import Stack
from ddprun_hooks.testing import (
    NUMEL,
    PARAMS,
    SHAPES,
    Rank,
    bucket_slices,
    contribution,
    run_hooks,
    run_ranks,
)
from tests.hooks.residuals import residual_total
from tests.hooks.test_stacks import LOSSY, Specs, assert_same, ranks_of, two_level


def states_of(specs: Specs, ranks: int, steps: int = 3) -> list[dict[str, Any]]:
    """Each rank's state after some steps."""

    def body(c: Rank) -> dict[str, Any]:
        for step in range(steps):
            c.step(step, torch.float64)
        return c.stack.state_dict()

    return run_hooks(specs, ranks, body)


@pytest.mark.parametrize("specs", LOSSY, ids=str)
def test_a_state_that_is_loaded_goes_on_bit_for_bit(specs: Specs) -> None:
    """Saved after two steps and loaded into a fresh stack: steps three and four are as if never saved."""
    ranks = ranks_of(specs)

    def unbroken(c: Rank) -> tuple[dict[str, Any], list[Tensor]]:
        c.step(0), c.step(1)
        return c.stack.state_dict(), [c.step(2), c.step(3)]

    before = run_hooks(specs, ranks, unbroken)

    def resumed(c: Rank) -> tuple[list[Tensor], dict[str, Any]]:
        state = before[c.rank][0]
        c.stack.load_state_dict(state)
        assert_same(c.stack.state_dict(), state)
        return [c.step(2), c.step(3)], c.stack.state_dict()

    after = run_hooks(specs, ranks, resumed)
    for rank in range(ranks):
        for one, other in zip(before[rank][1], after[rank][0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("specs", "ranks", "later"),
    [
        (specs, ranks, later)
        for specs in LOSSY
        for ranks, later in [(4, 2), (2, 4), (4, 3), (3, 3)]
        if "hierarchical" not in str(specs) or ranks % 2 == later % 2 == 0
    ],
    ids=str,
)
def test_another_number_of_ranks_keeps_the_sum(specs: Specs, ranks: int, later: int) -> None:
    """All that four ranks kept is kept by two of them, or by three, after a merge."""
    stack = make_stack(specs)
    states = states_of(specs, ranks)
    kept = residual_total(stack.merge(states))
    merged = stack.merge(states)

    def body(c: Rank) -> tuple[Tensor, dict[str, Any]]:
        c.stack.load_state_dict(merged)
        result = c.send(torch.zeros(NUMEL, dtype=torch.float64))
        return result, c.stack.state_dict()

    results = run_hooks(specs, later, body)
    left = residual_total(stack.merge([state for _, state in results]))
    assert kept.abs().max() > 1e-6
    assert torch.allclose(results[0][0] + left, kept, rtol=0, atol=1e-13)


def test_shares_of_other_hosts_are_cut_anew() -> None:
    """What two ranks of a host kept of their halves is kept by one rank of the next run for both."""
    flat: Specs = ["int8"]
    halves: Specs = [two_level(across=["int8"])]
    states = states_of(halves, 4)
    total = make_stack(halves).merge(states)["hierarchical"]["across"]["int8"]

    def body(c: Rank) -> tuple[Tensor, dict[str, Any]]:
        c.stack.load_state_dict({"int8": total})
        return c.send(torch.zeros(NUMEL, dtype=torch.float64)), c.stack.state_dict()

    results = run_hooks(flat, 2, body)
    left = residual_total(make_stack(flat).merge([state for _, state in results]))
    assert torch.allclose(
        results[0][0] + left, residual_total(make_stack(halves).merge(states)), rtol=0, atol=1e-13
    )


def test_hosts_that_exchange_apart_keep_their_mean() -> None:
    """Each of two hosts takes what both have kept on average: a sum would double what is sent later."""
    specs: Specs = ["int8"]
    hosts = [states_of(specs, 2, steps) for steps in (1, 2)]
    each = [residual_total(make_stack(specs).merge(states)) for states in hosts]
    both = residual_total(make_stack(specs).merge([*hosts[0], *hosts[1]]))
    assert each[0].abs().max() > 1e-6
    assert torch.allclose(both, (each[0] + each[1]) / 2, rtol=0, atol=1e-13)


def test_what_an_older_layout_left_is_of_no_further_host() -> None:
    """Other buckets give a parameter to the other rank of a host; what the first one keeps of it is added."""
    specs: Specs = [two_level(across=["int8"])]

    def body(c: Rank) -> dict[str, Any]:
        for step in range(2):
            c.step(step, torch.float64)
        c.send(contribution(c.rank, 2, c.world_size, torch.float64), bucket_slices(list(SHAPES)[::-1]))
        state: dict[str, Any] = c.stack.state_dict()["hierarchical"]["across"]["int8"]
        return state

    states = run_hooks(specs, 4, body)
    merged = make_stack(["int8"]).merge([{"int8": state} for state in states])["int8"]
    assert any(piece["ranks"] == 0 for state in states for piece in state.values())
    for name, piece in merged.items():
        expected = torch.zeros_like(piece["total"])
        for own in (state[name] for state in states if name in state):
            expected[own["start"] : own["start"] + own["residual"].numel()] += own["residual"]
        assert torch.allclose(piece["total"], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("specs", [["int8"], [two_level(across=["int8"])]], ids=str)
def test_what_another_stack_takes_over_is_kept_there_alone(specs: Specs) -> None:
    """Or a third stage's hooks would send it a second time."""

    def body(c: Rank) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        c.step(0, torch.float64)
        before, later = c.stack.state_dict(), make_stack(specs)
        later.take_state_from([c.stack])
        return before, c.stack.state_dict(), later.state_dict()

    for before, left, taken in run_hooks(specs, 2, body):
        assert residual_total(make_stack(specs).merge([before])).abs().max() > 1e-6
        assert not left
        assert_same(taken, before)


def test_a_stack_with_other_hooks_between_hosts_leaves_their_state_where_it_is() -> None:
    """A third stage has the first one's stack again, and sends what was kept there."""
    specs: Specs = [two_level(across=["int8"])]

    def body(c: Rank) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        c.step(0, torch.float64)
        before, later = c.stack.state_dict(), make_stack([two_level(across=["topk"])])
        later.take_state_from([c.stack])
        return before, c.stack.state_dict(), later.state_dict()

    for before, left, taken in run_hooks(specs, 2, body):
        assert before
        assert_same(left, before)
        assert not taken


@pytest.mark.parametrize("number", [1, 0])
@pytest.mark.parametrize("specs", LOSSY[:3], ids=str)
def test_other_buckets_keep_what_is_kept_by_name(specs: Specs, number: int) -> None:
    """One bucket becomes two, in another order, or is replaced by one of other parameters, as in a stage that
    freezes its own: nothing is lost and nothing counts twice.
    """
    names = [param.name for param in PARAMS]
    first, second = bucket_slices(names[3:]), bucket_slices(names[:3])
    border = sum(param.numel for param in PARAMS[:3])

    def body(c: Rank) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        c.step(0, torch.float64)
        before = c.stack.state_dict()
        nothing = torch.zeros(NUMEL, dtype=torch.float64)
        tail = c.send(nothing[border:], first, bucket=0)
        halfway = c.stack.state_dict()
        head = c.send(nothing[:border], second, bucket=number)
        assert {*before, *halfway} == {*c.stack.state_dict()}
        return torch.cat([head, tail]), before, c.stack.state_dict()

    results = run_hooks(specs, 2, body)
    stack = make_stack(specs)
    kept = residual_total(stack.merge([before for _, before, _ in results]))
    left = residual_total(stack.merge([after for _, _, after in results]))
    assert torch.allclose(results[0][0] + left, kept, rtol=0, atol=1e-13)


class Doubled(Hook):
    """Hands on another number of elements than it was given."""

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        twice = torch.cat([payload.tensor, payload.tensor])
        return (await comm.reduce(twice))[: payload.tensor.numel()].clone()


def test_elements_of_no_parameter_cannot_be_kept_and_the_error_says_what_to_do() -> None:
    """A lossy hook behind a codec that changes the length."""

    def body(group: RankGroup) -> None:
        ((_, int8),) = zip(["int8"], make_stack(["int8"]).hooks, strict=True)
        exchanger = Rank(group, Stack([("mine", Doubled()), ("int8", int8)]))
        with pytest.raises(
            (ExchangeError, RuntimeError), match=r"have it call reduce\(…, compression_error=…\)"
        ):
            exchanger.send(contribution(0, 0, 1))

    run_ranks(1, body, requirements=2)


def test_residuals_lie_on_the_payloads_device_in_fp32_or_more() -> None:
    """A half-precision payload loses nothing of what is kept."""
    for dtype, wanted in ((torch.float16, torch.float32), (torch.float64, torch.float64)):

        def body(c: Rank, dtype: torch.dtype = dtype) -> Tensor:
            c.step(0, dtype)
            kept: Tensor = c.stack.state_dict()["int8"]["gradient/first.weight"]["residual"]
            return kept

        assert run_hooks(["int8"], 1, body)[0].dtype == wanted
