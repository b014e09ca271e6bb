"""The built-in hooks: what they compute and what they say they send."""

import pytest
import torch
from torch import Tensor

from ddprun_hooks import Payload
from ddprun_hooks.comm.groups import CollectiveRequest, RankGroup
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.comm_queue import HostCommQueue
from ddprun_hooks.registry import make_stack
from ddprun_hooks.testing import run_ranks


def gradient(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(10_000, generator=generator)


def mean_by(names: list[str], size: int, make=gradient) -> tuple[list[Tensor], list[BucketTrace[int]]]:  # type: ignore[no-untyped-def]
    """What each rank gets, and the journey's record on rank 0."""

    def body(group: RankGroup) -> tuple[Tensor, BucketTrace[int]]:
        traces: list[BucketTrace[int]] = []
        payload = Payload(make(group.rank).mul_(1.0 / group.size), (), "gradient", 0)
        result = HostCommQueue(group).send(payload, make_stack(names), traces).wait()
        return result.clone(), traces[0]

    results = run_ranks(size, body)
    return [result for result, _ in results], [trace for _, trace in results]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("names", [[], ["fp16"], ["bf16"]])
def test_every_rank_gets_the_same_bits(names: list[str], size: int) -> None:
    """Whatever a stack does, all ranks end with one result, and it is not zero."""
    results, _ = mean_by(names, size)
    assert results[0].abs().sum() > 0
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("size", [2, 4])
def test_plain_all_reduce_is_the_mean(size: int) -> None:
    """Against the mean in fp64, to fp32's rounding."""
    results, _ = mean_by([], size)
    wanted = torch.stack([gradient(rank).double() for rank in range(size)]).mean(0)
    assert torch.allclose(results[0].double(), wanted, rtol=0, atol=1e-6)


def test_fp16_is_what_torchs_own_hook_computes_in_fp16s_normal_range() -> None:
    """Torch casts, then divides; this divides, then casts: the same bits where nothing is subnormal."""

    def normal(rank: int) -> Tensor:
        values = gradient(rank)
        return values.sign() * values.abs().clamp_min(1e-2)

    results, _ = mean_by(["fp16"], 2, normal)
    wanted = (normal(0).half() / 2 + normal(1).half() / 2).float()
    assert torch.equal(results[0], wanted)


def test_casts_divide_before_they_sum_so_large_gradients_do_not_overflow() -> None:
    """1e5 is beyond fp16, half of it is not: it carries each rank's share of the mean."""
    results, _ = mean_by(["fp16"], 2, lambda rank: torch.full((8,), 1e5 if rank == 0 else -9e4))
    assert torch.isfinite(results[0]).all()
    assert results[0][0] == (torch.tensor(5e4).half() + torch.tensor(-4.5e4).half()).float()


@pytest.mark.parametrize(("names", "share"), [([], 1.0), (["fp16"], 0.5), (["bf16"], 0.5), (["noop"], 0.0)])
def test_wire_bytes_are_the_rings(names: list[str], share: float) -> None:
    """A ring all-reduce sends 2(n-1)/n of the payload from each rank; a cast halves it, noop sends none."""
    _, traces = mean_by(names, 4)
    assert traces[0].bytes == 40_000
    assert traces[0].wire_bytes == 40_000 * 2 * 3 // 4 * share


def test_noop_gives_each_rank_its_own_gradient() -> None:
    """Ranks then differ: it is an upper bound on speed, not a way to train."""
    results, traces = mean_by(["noop"], 2)
    assert torch.equal(results[0], gradient(0))
    assert torch.equal(results[1], gradient(1))
    assert traces[0].collectives == []


def test_bytes_between_hosts_are_those_of_the_ranks_whose_neighbour_is_away() -> None:
    """In a ring over two hosts with two ranks each, one rank of each host sends to the other host."""

    def body(group: RankGroup) -> int:
        traces: list[BucketTrace[int]] = []
        payload = Payload(torch.ones(1000), (), "gradient", 0)
        HostCommQueue(group).send(payload, make_stack([]), traces).wait()
        return traces[0].between_hosts_bytes

    assert run_ranks(4, body, hosts=["a", "a", "b", "b"]) == [0, 6000, 0, 6000]


@pytest.mark.parametrize(("sizes", "between"), [(None, [0, 24, 0, 24]), ([2, 2, 3, 2], [16, 16, 24, 16])])
def test_bytes_between_hosts_of_a_gather(sizes: list[int] | None, between: list[int]) -> None:
    """Equal parts travel in a ring; unequal ones go to each rank directly."""
    found = []
    for rank in range(4):
        tensor = torch.ones(2 if sizes is None else sizes[rank])
        group = RankGroup("world", rank, ("a", "a", "b", "b"))
        gather = CollectiveRequest(group, "all_gather", tensor, torch.empty(0), sizes=sizes)
        assert group.wire_bytes(gather) == 3 * tensor.nbytes
        found.append(group.between_hosts_bytes(gather))
    assert found == between
