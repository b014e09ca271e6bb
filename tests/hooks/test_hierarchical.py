"""Two levels: where shares are cut, who exchanges with whom, and what is refused."""

import itertools
import random
from collections.abc import Sequence
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddprun_hooks import HookSetupError, ParamSlice
from ddprun_hooks.builtin.hierarchical import param_slices_between, row_aligned_ends
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.groups import GroupRequirement, RankPlacement
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.config.options import HookSpec
from ddprun_hooks.testing import NUMEL, PARAMS, Rank, contribution, run_hooks
from tests.ranks import as_processes


def random_params(generator: random.Random) -> tuple[ParamSlice, ...]:
    params, offset = [], 0
    for index in range(generator.randrange(1, 12)):
        shape = tuple(generator.randrange(1, 40) for _ in range(generator.randrange(0, 4)))
        numel = int(torch.Size(shape).numel())
        params.append(ParamSlice(f"p{index}", shape, offset, numel))
        offset += numel
    return tuple(params)


def test_shares_hold_whole_rows_and_everything_once() -> None:
    """Of any parameters, for any number of ranks; each share is even to within a row."""
    generator = random.Random(3)
    for _ in range(300):
        params = random_params(generator)
        numel, parts = params[-1].offset + params[-1].numel, generator.randrange(1, 6)
        ends = row_aligned_ends(params, numel, parts)
        assert ends == sorted(ends)
        assert (len(ends), ends[-1]) == (parts, numel)
        row = max(param.numel // (param.shape[0] if param.shape else 1) for param in params)
        for part, end in enumerate(ends, start=1):
            assert abs(end - part * numel / parts) <= row / 2 + 1
        seen: list[tuple[str, int]] = []
        for low, high in itertools.pairwise([0, *ends]):
            place = 0
            for piece in param_slices_between(params, low, high):
                whole = next(param for param in params if param.name == piece.name)
                assert piece.offset == place
                assert piece.numel == torch.Size(piece.shape).numel()
                assert piece.shape[1:] == whole.shape[1:]
                assert low + piece.offset == whole.offset + piece.start
                place += piece.numel
                seen += [(piece.name, piece.start + index) for index in range(piece.numel)]
            assert place == high - low
        assert seen == [(param.name, index) for param in params for index in range(param.numel)]


def test_between_hosts_travels_once_what_plain_sends_for_every_rank() -> None:
    """Two hosts of two ranks: 2(H-1)/H of each share, against 2(n-1)/n of the whole for one rank in two."""

    def body(c: Rank) -> tuple[int, list[str]]:
        c.step(0)
        return c.traces[0].between_hosts_bytes, [leg.group for leg in c.traces[0].collectives]

    hosts = ["a", "a", "b", "b"]
    plain = run_hooks([], 4, body, hosts)
    numel = contribution(0, 0, 4).numel()
    assert [sent for sent, _ in plain] == [0, 6 * numel, 0, 6 * numel]
    two = run_hooks(["hierarchical"], 4, body, hosts)
    assert two[0][0] + two[1][0] == 4 * numel
    assert two[2][0] + two[3][0] == 4 * numel
    assert [groups for _, groups in two] == [["within.0", "across.0", "within.1"]] * 4


PLACEMENTS = [("a", "b", "a", "b"), ("a", "b", "b", "a"), ("a", "a", "b", "b")]


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=["cyclic", "uneven", "neighbours"])
@pytest.mark.parametrize("option", [None, 2])
def test_hosts_go_by_their_names_wherever_their_ranks_lie(hosts: tuple[str, ...], option: int | None) -> None:
    """Inside a host nothing leaves it, between hosts every byte does, once; and the sum is the sum."""

    def body(c: Rank) -> tuple[Tensor, list[tuple[str, int, int]]]:
        result = c.step(0)
        inside, across = c.group.splits_by_host_count[option]
        assert set(inside.hosts) == {c.group.hosts[c.rank]}
        assert sorted(across.hosts) == ["a", "b"]
        return result, [
            (leg.group, leg.wire_bytes, leg.between_hosts_bytes) for leg in c.traces[0].collectives
        ]

    ran = run_hooks([{"hierarchical": {"hosts": option}}], 4, body, hosts)
    wanted = torch.stack([contribution(rank, 0, 4).double() for rank in range(4)]).sum(0)
    for result, legs in ran:
        assert torch.allclose(result.double(), wanted, atol=1e-6)
        for group, sent, left in legs:
            assert left == (sent if group.startswith("across") else 0)
    for host in "ab":
        left_host = [leg[2] for rank in range(4) if hosts[rank] == host for leg in ran[rank][1]]
        assert sum(left_host) == 4 * NUMEL


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=["cyclic", "uneven", "neighbours"])
def test_ranks_of_a_host_share_memory_wherever_they_lie(hosts: tuple[str, ...]) -> None:
    """`within: [shared_memory]` works for every placement."""
    ran = run_hooks([{"hierarchical": {"within": ["shared_memory"]}}], 4, lambda c: c.step(0), hosts)
    wanted = torch.stack([contribution(rank, 0, 4).double() for rank in range(4)]).sum(0)
    for result in ran:
        assert torch.allclose(result.double(), wanted, atol=1e-6)


def test_the_ranks_of_each_host() -> None:
    """By name; of several launchers on one host, each has its own. A trial's split keeps a host's ranks
    together as far as it can.
    """

    def blocks(hosts: str, sizes: Sequence[int], split: int | None = None) -> list[list[int]]:
        return RankPlacement(0, tuple(hosts), tuple(sizes)).split_by_host(split)

    assert blocks("abab", (2,) * 4) == [[0, 2], [1, 3]]
    assert blocks("abba", (2,) * 4) == [[0, 3], [1, 2]]
    assert blocks("abcabc", (2,) * 6) == [[0, 3], [1, 4], [2, 5]]
    assert blocks("aaaa", (2,) * 4) == [[0, 1], [2, 3]], "two launchers on one host"
    assert blocks("abab", (2,) * 4, 1) == [[0, 1, 2, 3]]
    assert blocks("abab", (2,) * 4, 2) == [[0, 2], [1, 3]]
    assert blocks("abab", (2,) * 4, 4) == [[0], [1], [2], [3]]
    assert blocks("abcabc", (2,) * 6, 2) == [[0, 1, 3], [2, 4, 5]]
    assert blocks("aaaa", (4,) * 4, 2) == [[0, 1], [2, 3]]
    with pytest.raises(HookSetupError, match="here they are a: 3, b: 1"):
        blocks("abaa", (3, 1, 3, 3))


def test_hosts_are_those_of_the_launcher_unless_the_option_splits_them() -> None:
    """Four ranks of one host are two hosts for a trial."""
    hooks = [{"hierarchical": {"hosts": 2}}]
    groups = run_hooks(hooks, 4, lambda c: (c.step(0), [leg.group for leg in c.traces[0].collectives])[1])
    assert groups[0] == ["within/2.0", "across/2.0", "within/2.1"]


@pytest.mark.parametrize(
    ("hosts", "option", "what"),
    [
        (["a", "a", "b"], None, "equally many ranks on each host; here they are a: 2, b: 1"),
        (["a", "a", "a", "a"], 3, "3 does not divide 4 ranks"),
    ],
)
def test_uneven_hosts_are_refused_on_every_rank(hosts: list[str], option: int | None, what: str) -> None:
    """With the ranks of each host."""
    with pytest.raises(HookSetupError, match=what):
        run_hooks([{"hierarchical": {"hosts": option}}], len(hosts), lambda c: None, hosts)


def test_shared_memory_between_hosts_is_refused() -> None:
    """With what to write instead."""
    with pytest.raises(HookSetupError, match=r"these are on a, b: write hierarchical: \{within: \[shared"):
        run_hooks(["shared_memory"], 2, lambda c: None, ["a", "b"])


def _open_with_uneven_deltas() -> None:
    dist.init_process_group("gloo")
    everybody, within = GroupRequirement("world"), GroupRequirement("within", hosts=3)
    control = open_control_channel(timedelta(seconds=60))
    with mock.patch.object(dist, "new_group") as made, pytest.raises(HookSetupError, match="3 does not"):
        CommContext.open(
            control=control,
            device=torch.device("cpu"),
            backend="gloo",
            placement=RankPlacement(0, ("a",), (1,)),
            gradients={everybody: 1},
            deltas={within: 1},
            timeout=timedelta(seconds=60),
        )
    assert not made.called


def test_uneven_hosts_are_refused_before_any_group_is_made() -> None:
    """Ranks that still make one would wait for a rank that was refused and has ended."""
    as_processes(1, _open_with_uneven_deltas)


def test_ranks_whose_shares_need_other_numbers_of_collectives_stay_in_step() -> None:
    """A share of matrices takes two collectives between hosts, a share of vectors one; then all gather."""
    matrix, vector = PARAMS[0], ParamSlice("vector", (1200,), 1200, 1200)

    def body(c: Rank) -> tuple[list[Tensor], list[int]]:
        results = []
        for step in range(20):
            values = torch.full((2400,), float(step + c.rank))
            values[1200:] += 0.5
            results.append(c.send(values, (matrix, vector), bucket=step % 5))
        return results, [len(trace.collectives) for trace in c.traces]

    ran = run_hooks([{"hierarchical": {"hosts": 2, "across": ["powersgd"]}}], 4, body)
    assert ran[0][1] == [4] * 20
    assert ran[1][1] == [3] * 20
    for results, _ in ran:
        for step, result in enumerate(results):
            assert torch.allclose(result[1200:], torch.tensor(4.0 * step + 6 + 2))
            assert torch.equal(result, ran[0][0][step])


def test_a_cast_inside_hosts_halves_those_legs_and_adds_in_fp32() -> None:
    """`within: [fp16]`: legs inside a host travel in half; four ranks' halves are rounded once, as a sum."""
    hooks: list[HookSpec] = [{"hierarchical": {"hosts": 1, "within": ["fp16"]}}]

    def body(c: Rank) -> tuple[Tensor, list[str]]:
        return c.step(0), [leg.dtype for leg in c.traces[0].collectives]

    given, dtypes = run_hooks(hooks, 4, body)[0]
    assert dtypes == ["float16", "float16"]
    halves = [contribution(rank, 0, 4).half().float() for rank in range(4)]
    assert torch.equal(given, (halves[0] + halves[1] + halves[2] + halves[3]).half().float())
    in_half = halves[0].half() + halves[1].half() + halves[2].half() + halves[3].half()
    assert not torch.equal(given, in_half.float())
