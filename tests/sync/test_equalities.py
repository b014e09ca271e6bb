"""Each policy against a simulation of all ranks in one process, and policies against each other, in fp64."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ddprun.sync import StageFacts
from ddprun.sync.policies.gossip import Gossip
from tests.engine.running import run_pipeline, weights
from tests.sync.reference import Weights, World, diloco, pipeline

STEPS = 45  # 331 samples on 3 ranks: more than three epochs, each with a short step at its end
FULL_STEPS = 13  # of the first epoch
TOLERANCE = 1e-12


def run(folder: Path, more: str, ranks: int = 3, **changes: float) -> Weights:
    name = f"run-{len(list(folder.iterdir()))}"
    return weights(run_pipeline(folder, pipeline(folder, more, **changes), ranks, name))  # type: ignore[arg-type]


def assert_close(ours: Weights, theirs: Weights, tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= tolerance, name
    start = World(1).weights()
    assert not any(torch.equal(ours[name], start[name]) for name in start), "nothing was learned"


def assert_same_bits(ours: Weights, theirs: Weights) -> None:
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.fixture(scope="module")
def local_every_step(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return run(tmp_path_factory.mktemp("local"), "sync: {local_sgd: {every: 1}}")


def test_local_sgd_every_step_is_every_step(tmp_path: Path) -> None:
    """With plain SGD the mean of the steps is the step of the mean, where ranks have equally many samples."""
    local = run(tmp_path, "sync: {local_sgd: {every: 1}}", steps=FULL_STEPS)
    assert_close(local, run(tmp_path, "sync: every_step", steps=FULL_STEPS))


@pytest.mark.parametrize("sync", ["local_sgd: {every: 4}", "average: {every: 4}"])
def test_local_sgd_is_what_it_says(tmp_path: Path, sync: str) -> None:
    """Steps apart, parameters averaged every fourth, and once more at the end."""
    world = World(3, momentum=0.9)
    for step in range(1, STEPS + 1):
        world.local_step(step - 1)
        if step % 4 == 0 or step == STEPS:
            world.average(range(3))
    assert_close(run(tmp_path, f"sync: {{{sync}}}", momentum=0.9), world.weights())


def test_local_sgd_averages_momentum_if_told(tmp_path: Path) -> None:
    """Parameters and momentum, together."""
    world = World(3, momentum=0.9)
    for step in range(1, STEPS + 1):
        world.local_step(step - 1)
        if step % 4 == 0 or step == STEPS:
            world.average(range(3))
            world.average_momentum()
    sync = "sync: {local_sgd: {every: 4, optimizer_state: average}}"
    assert_close(run(tmp_path, sync, momentum=0.9), world.weights())


@pytest.mark.parametrize("within", [1, 2])
def test_hierarchical_sgd_is_what_it_says(tmp_path: Path, within: int) -> None:
    """Two hosts of two ranks: gradients (1) or parameters (2) inside a host, all ranks every sixth step."""
    hosts = [[0, 1], [2, 3]]
    world = World(4)
    for step in range(1, STEPS + 1):
        world.local_step(step - 1, average=hosts if within == 1 else ())
        if step % 6 == 0 or step == STEPS:
            world.average(range(4))
        elif within > 1 and step % within == 0:
            for ranks in hosts:
                world.average(ranks)
    sync = f"sync: {{hierarchical_sgd: {{within: {within}, across: 6, hosts: 2}}}}"
    assert_close(run(tmp_path, sync, 4), world.weights())


def test_hierarchical_sgd_with_equal_periods_is_local_sgd(tmp_path: Path) -> None:
    """Every average is then one of all ranks."""
    one = run(tmp_path, "sync: {hierarchical_sgd: {within: 5, across: 5, hosts: 2}}", 4)
    assert_close(one, run(tmp_path, "sync: {local_sgd: {every: 5}}", 4))


@pytest.mark.parametrize("sync", ["every_step", "local_sgd: {every: 3}", "diloco: {every: 3}"])
def test_accumulating_is_a_larger_batch(tmp_path: Path, sync: str) -> None:
    """Two micro-batches of 4 are one of 8: the same samples come to each rank in each step."""
    policy = f"sync: {sync if ':' not in sync else f'{{{sync}}}'}"
    halves = run(tmp_path, f"{policy}\naccumulate: 2", 2, batch=4, steps=40)
    assert_close(halves, run(tmp_path, policy, 2, batch=8, steps=40))


def test_diloco_without_an_outer_optimizer_is_local_sgd_bit_for_bit(
    tmp_path: Path, local_every_step: Weights
) -> None:
    """A learning rate of 1 without momentum adds the mean change."""
    sync = "sync: {diloco: {every: 1, fragments: 1, outer_lr: 1, outer_momentum: 0}}"
    assert_same_bits(run(tmp_path, sync), local_every_step)


def fragments(count: int) -> list[tuple[int, int]]:
    """Where parts of about equally many elements begin and end in the flat vector."""
    sizes = [param.numel() for param in World(1).models[0].parameters()]
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    # 1.weight 1.bias 3.weight 3.bias 5.weight 5.bias: nearly everything is in 3.weight
    cuts = {1: [], 2: [ends[1]], 3: [ends[1], ends[2]]}[count]
    bounds = [0, *cuts, ends[-1]]
    return list(pairwise(bounds))


@pytest.mark.parametrize(("count", "overlap"), [(1, 0), (1, 3), (2, 0), (3, 2), (2, 3)])
def test_diloco_is_what_it_says(tmp_path: Path, count: int, overlap: int) -> None:
    """Torch's own SGD with Nesterov momentum on the common weights; fragments at steps of their own; what is
    learned while an exchange is under way is kept.
    """
    wanted = diloco(3, STEPS, 6, 0.7, 0.9, fragments(count), overlap)
    sync = f"sync: {{diloco: {{every: 6, fragments: {count}, overlap_steps: {overlap}}}}}"
    assert_close(run(tmp_path, sync), wanted)


@pytest.mark.parametrize(
    ("outer", "momentum", "overlap", "alpha", "steps"),
    [
        ("sgd", 0.6, 0, None, 45),
        ("adam", 0.8, 2, None, 45),
        ("nesterov", 0.9, 3, 0.5, 45),
        ("nesterov", 0.9, 0, 0.25, 45),
        ("nesterov", 0.9, 0, 0.25, 42),  # the first part's last exchange is after the last step
        ("adam", 0.8, 2, 0.5, 42),
        ("sgd", 0.0, 3, 0.0, 45),
    ],
)
def test_an_outer_optimizer_and_mixing_are_what_they_say(
    tmp_path: Path, outer: str, momentum: float, overlap: int, alpha: float | None, steps: int
) -> None:
    """Torch's own SGD and FedAdam, and Streaming DiLoCo's mixing, of which nothing is left at the end."""
    lr = 0.05 if outer == "adam" else 0.7
    wanted = diloco(3, steps, 6, lr, momentum, fragments(2), overlap, outer=outer, alpha=alpha)
    sync = f"every: 6, fragments: 2, overlap_steps: {overlap}, outer: {outer}, outer_lr: {lr}"
    sync += f", outer_momentum: {momentum}, alpha: {'null' if alpha is None else alpha}"
    assert_close(run(tmp_path, f"sync: {{diloco: {{{sync}}}}}", steps=steps), wanted)


@pytest.mark.parametrize("ranks", [4, 5])
def test_gossip_averages_pairs_and_in_the_end_all(tmp_path: Path, ranks: int) -> None:
    """Pairs are other ones in each round, each rank is in one, and of an odd number one stays alone."""
    policy = Gossip(every=3)
    *rounds, _ = policy.plan(StageFacts(backward=True, changes_weights=True)).transfers
    parts = [one.partition.parts(ranks) for one in rounds if one.partition is not None]
    assert len({*parts}) > 1 + (ranks > 4)
    for pairs in parts:
        assert sorted(rank for pair in pairs for rank in pair) == list(range(ranks))
        assert sorted(map(len, pairs)) == [1] * (ranks % 2) + [2] * (ranks // 2)
    world = World(ranks)
    for step in range(1, STEPS + 1):
        world.local_step(step - 1)
        if step % 3 == 0:
            for pair in parts[(step // 3 - 1) % len(parts)]:
                world.average(pair)
    world.average(range(ranks))
    assert_close(run(tmp_path, "sync: {gossip: {every: 3}}", ranks), world.weights())


def test_broadcast_takes_one_ranks_parameters(tmp_path: Path) -> None:
    """Every fifth step rank 2 is copied, and once more at the end; others' work in between is dropped."""
    world = World(3)
    for step in range(1, STEPS + 1):
        world.local_step(step - 1)
        if step % 5 == 0 or step == STEPS:
            for rank in range(3):
                world.set(rank, world.flat(2))
    assert_close(run(tmp_path, "sync: {broadcast: {every: 5, source: 2}}"), world.weights())


def test_independent_ranks_are_averaged_at_the_end(tmp_path: Path) -> None:
    """Once, exactly."""
    world = World(3)
    for step in range(STEPS):
        world.local_step(step)
    world.average(range(3))
    assert_close(run(tmp_path, "sync: independent"), world.weights())
