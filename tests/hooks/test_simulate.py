"""A rehearsal counts what a run counts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddprun_hooks.buckets import BucketLayout
from ddprun_hooks.comm.communicator import Communicator
from ddprun_hooks.comm.groups import GroupRequirement, RankGroup, RankPlacement, requirements_in_scope
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_queue import HostCommQueue
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.errors import ExchangeError, HookSetupError
from ddprun_hooks.hook import Hook
from ddprun_hooks.payload import Payload
from ddprun_hooks.registry import make_stack
from ddprun_hooks.simulate import dummy_payload, simulate, simulated_group
from ddprun_hooks.stack import Stack, broadcast_stack
from ddprun_hooks.testing import NUMEL, PARAMS, contribution, run_ranks
from tests.hooks.test_stacks import CASTS, EXACT, LOSSY

Counted = list[tuple[str, str, str, int, int, int]]
BUCKET = BucketLayout(0, "float32", NUMEL, PARAMS)
AS_LAUNCHED: HookSpec = {"hierarchical": {"across": ["int8"]}}


def counted(trace: BucketTrace[int]) -> Counted:
    return [
        (leg.op, leg.group, leg.dtype, leg.bytes, leg.wire_bytes, leg.between_hosts_bytes)
        for leg in trace.collectives
    ]


def on_hosts(ranks: int, hosts: int) -> tuple[str, ...]:
    return tuple(f"host {rank * hosts // ranks}" for rank in range(ranks))


def imagined(specs: Sequence[HookSpec], rank: int, names: tuple[str, ...]) -> Counted:
    stack = make_stack(specs)
    layout = RankPlacement(rank, names, tuple(names.count(name) for name in names))
    return counted(
        simulate(
            dummy_payload(BUCKET, "gradient"), stack, simulated_group("world", layout, stack.requirements)
        )
    )


def real(specs: Sequence[HookSpec], names: tuple[str, ...]) -> list[Counted]:
    """The legs of each rank of a run among threads."""

    def body(group: RankGroup) -> Counted:
        traces: list[Any] = []
        payload = Payload(contribution(group.rank, 0, group.size), PARAMS, "gradient", 0)
        HostCommQueue(group).send(payload, make_stack(specs), traces).wait()
        return counted(traces[0])

    return run_ranks(len(names), body, requirements=make_stack(specs).requirements, hosts=names)


STACKS: list[list[HookSpec]] = [*EXACT, *LOSSY, *CASTS, ["noop"], [AS_LAUNCHED]]
CASES = [
    (specs, ranks, hosts)
    for specs in STACKS
    for ranks, hosts in ((2, 1), (4, 1), (4, 2))
    if hosts == 1 or "shared_memory" not in specs
]


@pytest.mark.parametrize(("specs", "ranks", "hosts"), CASES, ids=str)
def test_legs_are_those_of_a_run(specs: list[HookSpec], ranks: int, hosts: int) -> None:
    """Of every stack, on every rank, with shares that are no equal parts of the bucket."""
    names = on_hosts(ranks, hosts)
    found = real(specs, names)
    assert [imagined(specs, rank, names) for rank in range(ranks)] == found
    sends_nothing = specs == ["noop"]
    assert any(found[0]) != sends_nothing


def test_the_ranks_of_a_host_alone() -> None:
    """A group that is a split of another is rehearsed like any other."""
    names = on_hosts(4, 2)
    needs = requirements_in_scope("within", make_stack(["fp16"]).requirements, None)

    def body(group: RankGroup) -> Counted:
        traces: list[Any] = []
        payload = Payload(contribution(group.rank, 0, 2), PARAMS, "delta", 0)
        HostCommQueue(group).send(
            payload, make_stack(["fp16"]), traces, group.splits_by_host_count[None][0]
        ).wait()
        return counted(traces[0])

    for rank, found in enumerate(run_ranks(4, body, requirements=needs, hosts=names)):
        group = simulated_group("world", RankPlacement(rank, names, (2,) * 4), needs)
        legs = counted(
            simulate(
                dummy_payload(BUCKET, "delta"), make_stack(["fp16"]), group.splits_by_host_count[None][0]
            )
        )
        assert legs == found
        assert legs[0][1] == "within.0"
        assert legs[0][4] == NUMEL * 2
        assert legs[0][5] == 0


def test_a_broadcast_is_a_chain() -> None:
    """Every rank but the last passes the payload on once."""
    layouts = [RankPlacement(rank, on_hosts(4, 2), (2,) * 4) for rank in range(4)]
    groups = [simulated_group("plain", layout, {GroupRequirement("world"): 1}) for layout in layouts]
    traces = [simulate(dummy_payload(BUCKET, "parameters"), broadcast_stack(1), group) for group in groups]
    assert [trace.wire_bytes for trace in traces] == [0, 4 * NUMEL, 4 * NUMEL, 4 * NUMEL]
    assert [trace.between_hosts_bytes for trace in traces] == [0, 4 * NUMEL, 0, 4 * NUMEL]


class Everything(Hook):
    """Takes parts of unequal length, and what no built-in hook uses."""

    role = "reducer"
    rounds = 4

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        world, x = comm, payload.tensor
        sizes = unequal(x.numel(), world.size)
        share = await world.reduce_scatter(x, sizes)
        back = await world.all_gather(share, sizes)
        await world.all_reduce(back[:3].clone())
        await world.broadcast(back[:5].clone(), 0)
        return back


def unequal(numel: int, parts: int) -> list[int]:
    first = numel // parts + parts
    return [first, *(numel // parts for _ in range(parts - 2)), numel - first - numel // parts * (parts - 2)]


def test_a_hook_of_ones_own() -> None:
    """Its bytes are those of a run."""
    names = on_hosts(4, 2)

    def body(group: RankGroup) -> Counted:
        traces: list[Any] = []
        payload = dummy_payload(BUCKET, "gradient")
        HostCommQueue(group).send(payload, Stack([("mine.Everything", Everything())]), traces).wait()
        return counted(traces[0])

    for rank, legs in enumerate(run_ranks(4, body, requirements=4, hosts=names)):
        payload = dummy_payload(BUCKET, "gradient")
        group = simulated_group("world", RankPlacement(rank, names, (2,) * 4), Everything().requirements())
        assert counted(simulate(payload, Stack([("mine.Everything", Everything())]), group)) == legs


class Wrong(Hook):
    """Hands on more often than it says, or gives back too little."""

    def __init__(self, times: int, numel: int) -> None:
        self.times, self.numel = times, numel

    async def __call__(self, payload: Payload, comm: Communicator) -> Tensor:
        for _ in range(self.times):
            await comm.reduce(payload.tensor.clone())
        return payload.tensor[: self.numel]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Wrong(2, NUMEL), "ask for collective 2 of one payload"),
        (Wrong(1, 3), r"returned \(3,\)"),
    ],
)
def test_a_wrong_hook_is_found_out(wrong: Wrong, words: str) -> None:
    """What would break a run at its first step breaks the rehearsal."""
    stack = Stack([("mine.Wrong", wrong)])
    group = simulated_group("world", RankPlacement(0, ("a", "a"), (2, 2)), stack.requirements)
    with pytest.raises(ExchangeError, match=words):
        simulate(dummy_payload(BUCKET, "gradient"), stack, group)


def test_ranks_that_lie_wrong_are_refused() -> None:
    """As a run refuses them."""
    layout = RankPlacement(0, on_hosts(4, 2), (2,) * 4)
    shared = make_stack(["shared_memory"])
    with pytest.raises(HookSetupError, match="on host 0, host 1: write hierarchical"):
        simulate(
            dummy_payload(BUCKET, "gradient"), shared, simulated_group("world", layout, shared.requirements)
        )
    with pytest.raises(HookSetupError, match="3 does not divide 4 ranks"):
        simulated_group("world", layout, make_stack([{"hierarchical": {"hosts": 3}}]).requirements)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "bool"])
def test_made_up_payloads(dtype: str) -> None:
    """Any type that a bucket may have."""
    payload = dummy_payload(BucketLayout(3, dtype, 10, ()), "buffers")
    assert (str(payload.tensor.dtype), payload.tensor.numel(), payload.bucket) == (f"torch.{dtype}", 10, 3)


async def past_its_communicator(payload: Payload, comm: Communicator) -> torch.Tensor:
    """Needs process groups, which are not there when ranks are only simulated."""
    torch.distributed.all_reduce(payload.tensor)
    return payload.tensor


def test_a_hook_that_cannot_be_tried_without_other_ranks_is_named() -> None:
    """With what it raised."""
    stack = make_stack(past_its_communicator)
    group = simulated_group("world", RankPlacement(0, ("a", "a"), (2, 2)), stack.requirements)
    name = "tests.hooks.test_simulate.past_its_communicator"
    told = f'hook "{name}" cannot be tried without other ranks: ValueError: '
    with pytest.raises(ExchangeError, match=told):
        simulate(dummy_payload(BUCKET, "gradient"), stack, group)
