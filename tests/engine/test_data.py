"""The order of samples: each once, known in advance, as DistributedSampler has it, resumable."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from ddprun.engine.data import Feed


class Ids(Dataset[tuple[int, int]]):
    """Sample i is (i, i)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


class Stream(IterableDataset[tuple[int, int]]):
    """The same samples, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter((index, index) for index in range(self.size))


def feed(dataset: Any, rank: int, ranks: int, **changes: Any) -> Feed:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": not isinstance(dataset, IterableDataset),
        "drop_last": False,
        "workers": 0,
        "seed": 3,
        "pin": False,
    }
    return Feed(dataset, rank=rank, ranks=ranks, **(settings | changes))


def epoch(source: Feed, accumulate: int = 1) -> list[list[tuple[list[int], int]]]:
    """One epoch as steps of (ids that count, total of the step)."""
    steps = []
    for step in source.steps(accumulate, epochs=1):
        row = []
        for micro in step.micro_batches:
            ids = micro.content[0].tolist()
            assert len(ids) > 0
            assert micro.samples in (0, len(ids))
            row.append((ids[: micro.samples], step.total))
        assert len(row) == step.count
        steps.append(row)
    return steps


@pytest.mark.parametrize("size", [8, 11, 23, 24, 25, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Ids, Stream])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_sample_counts_once_and_totals_say_how_many(
    kind: type[Ids | Stream], size: int, ranks: int, accumulate: int
) -> None:
    """Over all ranks an epoch is a partition of the data, and every rank knows each step's total."""
    epochs = [epoch(feed(kind(size), rank, ranks), accumulate) for rank in range(ranks)]
    assert len({len(steps) for steps in epochs}) == 1, "ranks have different numbers of steps"
    seen = []
    for steps in zip(*epochs, strict=True):
        ids = [i for micros in steps for batch, _ in micros for i in batch]
        assert {total for micros in steps for _, total in micros} == {len(ids)}
        seen += ids
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("ranks", [2, 3])
def test_full_batches_are_those_of_torchs_distributed_sampler(ranks: int) -> None:
    """A plain DDP loop follows with DistributedSampler(seed=seed), set_epoch and drop_last."""
    data = Ids(4 * ranks * 3)
    for rank in range(ranks):
        ours, sampler = feed(data, rank, ranks), DistributedSampler[Any](data, ranks, rank, seed=3)
        for number in range(2):
            sampler.set_epoch(number)
            theirs = list(sampler)
            assert [i for step in epoch(ours) for batch, _ in step for i in batch] == theirs


def test_one_rank_with_a_large_batch_sees_the_same_steps_as_many_with_small_ones() -> None:
    """The global micro-batch is the next batch_size x ranks samples, however many ranks share it."""
    one = epoch(feed(Ids(40), 0, 1, batch_size=16))
    four = [epoch(feed(Ids(40), rank, 4, batch_size=4)) for rank in range(4)]
    for index, [(ids, _)] in enumerate(one):
        assert sorted(ids) == sorted(i for steps in four for i in steps[index][0][0])


@pytest.mark.parametrize("kind", [Ids, Stream])
def test_loading_processes_change_nothing(kind: type[Ids | Stream]) -> None:
    """Two workers yield the very batches, in order, that none do."""
    for rank in range(2):
        assert epoch(feed(kind(23), rank, 2, workers=2)) == epoch(feed(kind(23), rank, 2))


def test_iterating_draws_nothing_from_torchs_own_generator() -> None:
    """So dropout does not depend on how data is loaded."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    epoch(feed(Ids(23), 0, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [Ids, Stream])
@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_feed_goes_on_where_its_state_was_taken(kind: type[Ids | Stream], done: int) -> None:
    """Within an epoch and over its end, the rest of the row is the same."""

    def take(source: Feed, count: int) -> list[list[int]]:
        row = []
        for _, step in zip(range(count), source.steps(1), strict=False):
            row.append([i for micro in step.micro_batches for i in micro.content[0].tolist()])
        return row

    whole = take(feed(kind(22), 1, 2), 8)
    first = feed(kind(22), 1, 2)
    assert take(first, done) == whole[:done]
    second = feed(kind(22), 1, 2)
    second.load_state_dict(first.state_dict())
    assert take(second, 8 - done) == whole[done:]


class Noisy(Ids):
    """Sample i is (i, a random number)."""

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, torch.rand(()) + random.random() + np.random.rand()


def test_what_loading_processes_draw_depends_on_the_batch_alone() -> None:
    """One process or two, from the epoch's start or from its middle: the same augmentation."""

    def draws(workers: int, skip: int) -> list[list[float]]:
        source = feed(Noisy(40), 1, 2, workers=workers)
        source.load_state_dict({"epoch": 1, "samples": 8 * skip})
        return [
            micro.content[1].tolist() for step in source.steps(1, epochs=1) for micro in step.micro_batches
        ]

    whole = draws(1, 0)
    assert len({value for batch in whole for value in batch}) == 20, "every sample draws its own"
    assert draws(2, 0) == whole
    assert draws(2, 2) == whole[2:]


@pytest.mark.parametrize("kind", [Ids, Stream])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (3, 4), (2, 1)])
def test_another_number_of_ranks_goes_on_in_the_same_order(
    kind: type[Ids | Stream], before: int, after: int
) -> None:
    """No sample twice and none left out, in the global order, wherever the old ranks stopped."""

    def step_ids(steps: list[Any]) -> set[int]:
        return {
            index
            for step in steps
            for micro in step.micro_batches
            for index in micro.content[0].tolist()[: micro.samples]
        }

    old = [feed(kind(61), rank, before) for rank in range(before)]
    rows = [source.steps(1, epochs=1) for source in old]
    seen: list[int] = []
    for _ in range(3):
        ids = [step_ids([next(row)]) for row in rows]
        seen += [index for of_rank in ids for index in of_rank]
    states = [source.state_dict() for source in old]
    assert all(state == states[0] for state in states)
    new = [feed(kind(61), rank, after) for rank in range(after)]
    for source in new:
        source.load_state_dict(states[0])
    rest = [step_ids(list(source.steps(1, epochs=1))) for source in new]
    seen += [index for of_rank in rest for index in of_rank]
    assert sorted(seen) == list(range(61))
    if kind is Ids:
        whole = [index for step in epoch(feed(kind(61), 0, 1)) for ids, _ in step for index in ids]
        assert set(seen[: before * 12]) == set(whole[: before * 12]), "the first ones of the epoch's order"


def test_an_epochs_stage_starts_a_new_epoch() -> None:
    """What is left of a begun epoch is left out."""
    source = feed(Ids(24), 0, 2)
    for _, step in zip(range(1), source.steps(1), strict=False):
        list(step.micro_batches)
    source.start_epoch()
    assert source.state_dict() == {"epoch": 1, "samples": 0}
    assert len(epoch(source)) == 3


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    """And then every step is full."""
    steps = epoch(feed(Ids(23), 0, 2, drop_last=True))
    assert [total for step in steps for _, total in step] == [8, 8]
    assert epoch(feed(Stream(23), 0, 2, drop_last=True))[-1][0][1] == 8


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (7, {"drop_last": True}, "7 samples are fewer than one step needs: 8"),
        (1, {}, "1 samples are too few for 2 ranks"),
    ],
)
def test_too_little_data_is_told_before_the_first_step(
    size: int, changes: dict[str, Any], message: str
) -> None:
    """Not by a loop that never runs."""
    with pytest.raises(ValueError, match=message):
        feed(Ids(size), 0, 2, **changes)


def test_an_iterable_that_yields_too_little_says_so() -> None:
    """Its length is known only when it ends."""
    with pytest.raises(ValueError, match="too few samples"):
        epoch(feed(Stream(1), 0, 2))


def test_shuffling_an_iterable_is_refused() -> None:
    """It has an order of its own."""
    with pytest.raises(ValueError, match=r"loader\.shuffle must be false"):
        feed(Stream(8), 0, 2, shuffle=True)


def test_no_epochs_left_are_no_steps() -> None:
    """A run may be resumed with fewer epochs than it has done."""
    source = feed(Ids(21), 0, 2)
    assert [source.steps_left(2, epochs) for epochs in (2, 1, 0, -1)] == [4, 2, 0, 0]
