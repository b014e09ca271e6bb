"""The order of samples: each once, known in advance, as DistributedSampler has it, resumable."""

import multiprocessing
import random
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ddprun.config import Loader, PipelineError, load
from ddprun.engine.build import build_datasets, build_model, build_stage_held_out
from ddprun.engine.data import BatchDataset, Feed
from ddprun.engine.feeds import build_training_feeds
from ddprun.engine.samples import BatchFault, collate, digest_samples
from ddprun.engine.seeding import seed_everything
from ddprun.zoo.data import text
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.groups import RankGroup
from ddprun_hooks.testing import run_ranks
from tests.ranks import as_processes


@dataclass
class Sample:
    values: Any
    cached: Any = field(init=False)


@pytest.mark.parametrize("kind", [Sample, lambda value: array("i", [value]), lambda value: [{"x": value}]])
def test_digests_tell_samples_apart_by_their_values(kind: Callable[[int], Any]) -> None:
    """Also those of a dataclass, and those that give their bytes, as images do."""
    assert digest_samples([kind(1)]) == digest_samples([kind(1)]) != digest_samples([kind(2)])


def test_a_digest_of_objects_of_unknown_types_is_of_their_type() -> None:
    """Whatever they raise when they are asked for something."""

    class Lookup:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    assert digest_samples([Lookup()]) == digest_samples([Lookup()]) != digest_samples([object()])


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


def value_error(problem: str, allowed: str | None) -> ValueError:
    return ValueError(problem if allowed is None else f"{problem}; {allowed}")


def feed(dataset: Any, rank: int, ranks: int, **changes: Any) -> Feed:
    loader = {"batch_size": 4, "shuffle": not isinstance(dataset, IterableDataset), **changes}
    return Feed(dataset, Loader(**loader), seed=3, rank=rank, world_size=ranks, make_error=value_error)


def epoch(source: Feed, accumulate: int = 1) -> list[list[tuple[list[int], int]]]:
    """One epoch as steps of (ids that count, total of the step)."""
    steps = []
    for step in source.steps(accumulate, epochs=1):
        row = []
        for micro in step.micro_batches:
            ids = micro.content[0].tolist()
            assert len(ids) > 0
            assert micro.samples in (0, len(ids))
            row.append((ids[: micro.samples], int(step.total_weight)))
        assert len(row) == step.micro_batch_count
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


def batch_sizes(group: RankGroup, data: Any, **changes: Any) -> list[int]:
    """Samples of each micro-batch of an epoch, those that do not count included."""
    source = feed(data, group.rank, group.size, shuffle=False, **changes)
    compare(group, source)
    return [len(micro.content[0]) for step in source.steps(3, epochs=1) for micro in step.micro_batches]


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `body(group, *arguments)` gives on forked ranks, which may start loading processes."""
    return as_processes(size, _in_group, body, *arguments)


def _in_group(body: Callable[..., Any], *arguments: Any) -> Any:
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # it may have children
    dist.init_process_group("gloo")
    world, hosts = dist.group.WORLD, ("here",) * dist.get_world_size()
    assert world is not None
    dist.barrier()  # rank 0 may be done, and take the store with it, before another one has joined
    return body(RankGroup("world", dist.get_rank(), hosts, [world]), *arguments)


def sizes_at_epochs_ends(group: RankGroup, kind: type[Ids | Stream], workers: int) -> dict[int, list[int]]:
    return {size: batch_sizes(group, kind(size), workers=workers) for size in (37, 38, 39, 40, 44)}


@pytest.mark.parametrize("kind", [Ids, Stream])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_an_epochs_end_are_one_sample_apart_at_most(
    kind: type[Ids | Stream], workers: int
) -> None:
    """Those of ranks without a sample, too, which compute along."""
    of_ranks = on_ranks(3, sizes_at_epochs_ends, kind, workers)
    for size in of_ranks[0]:
        sizes = [found[size] for found in of_ranks]
        for micro in zip(*sizes, strict=True):
            assert max(micro) - min(micro) <= 1
        assert [max(micro) for micro in zip(*sizes, strict=True)] == [4, 4, 4, -(-(size - 36) // 3)]


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


def masked(samples: list[Any]) -> list[torch.Tensor]:
    """As a collate of masked language modelling: the sample, and a random number."""
    return [torch.tensor([index for index, _ in samples]), torch.rand(len(samples))]


@pytest.mark.parametrize(("data", "custom"), [(Noisy(40), None), (Ids(40), masked), (Stream(40), masked)])
def test_what_loading_processes_draw_depends_on_the_batch_alone(data: Any, custom: Any) -> None:
    """One process or two, from the epoch's start or from its middle: the same augmentation."""

    def draws(workers: int, skip: int) -> list[list[float]]:
        source = feed(data, 1, 2, workers=workers)
        source.collate = custom
        source.load_state_dict({"epoch": 1, "samples": 8 * skip})
        steps = source.steps(1, epochs=1)
        return [micro.content[1].tolist() for step in steps for micro in step.micro_batches]

    whole = draws(1, 0)
    assert len({value for batch in whole for value in batch}) == 20, "every sample draws its own"
    assert draws(2, 0) == whole
    assert draws(2, 2) == whole[2:]


def test_batches_that_begin_with_the_same_sample_draw_other_numbers() -> None:
    """As those of a sampler that repeats indices do."""
    source = feed(Noisy(40), 0, 1, workers=1, shuffle=False)
    source.sampler_order = lambda epoch: [7] * 40
    values = [
        value
        for step in source.steps(1, epochs=2)
        for micro in step.micro_batches
        for value in micro.content[1].tolist()
    ]
    assert len(set(values)) == len(values) == 80


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


class Doubled(TensorDataset):
    """Samples that are not what lies in the tensors."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


@pytest.mark.parametrize("kind", [TensorDataset, Doubled])
def test_batches_of_tensors_are_those_of_torchs_default_collate(kind: type[TensorDataset]) -> None:
    """Values, shapes, types and layout in memory; also of views, and for indices from the end."""
    data = kind(torch.randn(3, 4, 9).permute(2, 1, 0), torch.arange(9), torch.rand(9, 1).half() > 0.5)
    indices = [3, 0, -1, 3]
    made, own = BatchDataset(data, None)[indices, 2, 0]
    wanted = default_collate([data[index] for index in indices])
    assert own == 2
    assert type(made) is type(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


class Resampled(Ids):
    """Draws a subset of another size in an epoch."""

    def __init__(self, epoch: int, size: int) -> None:
        super().__init__(24)
        self.other = epoch, size

    def set_epoch(self, epoch: int) -> None:
        self.size = self.other[1] if epoch == self.other[0] else 24


@pytest.mark.parametrize("size", [16, 40])
def test_data_of_another_length_in_an_epoch_is_refused(size: int) -> None:
    """Samples would be left out, or weighted by a total of before."""
    steps = feed(Resampled(1, size), 0, 2).steps(1, epochs=2)
    with pytest.raises(ValueError, match=f"are {size} samples in epoch 2, but 24 before; keep"):
        list(steps)


class EpochStream(IterableDataset[int]):
    """Its samples are the number of the epoch, which it does not know before `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 8)


def test_data_knows_the_epoch_before_anything_is_read() -> None:
    """The first batch is read before step 1, and its stream continues in the first epoch."""
    source = feed(EpochStream(), 0, 2)
    assert source.first_batch().tolist() == [0] * 4
    read = [micro.content.tolist() for step in source.steps(1, epochs=2) for micro in step.micro_batches]
    assert read == [[0] * 4, [1] * 4]


def test_a_sampler_of_another_length_in_an_epoch_is_refused() -> None:
    """As the data itself."""
    source = feed(Ids(24), 0, 2)
    source.sampler_order = lambda epoch: list(range(24 - 8 * epoch))
    with pytest.raises(ValueError, match="are 16 samples in epoch 2, but 24 before; keep"):
        list(source.steps(1, epochs=2))


def test_an_epochs_stage_starts_a_new_epoch() -> None:
    """What is left of a begun epoch is left out."""
    source = feed(Ids(24), 0, 2)
    for _, step in zip(range(1), source.steps(1), strict=False):
        list(step.micro_batches)
    source.skip_rest_of_epoch()
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
        (7, {"drop_last": True}, "7 samples are fewer than one step of 2 ranks needs: 8"),
        (1, {}, "1 samples are fewer than one step of 2 ranks needs: 2"),
        (1, {"drop_last": True, "global_batch": 1}, "1 samples are fewer than one step of 2 ranks needs: 2"),
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


def test_a_sampler_of_an_iterable_is_refused(tmp_path: Path) -> None:
    """It would be ignored."""
    (tmp_path / "p.yaml").write_text(
        "model: {mlp: {inputs: 6, outputs: 3}}\ndata: mine.Stream\noptimizer: sgd\n"
        "loader: {sampler: torch.utils.data.RandomSampler, shuffle: false}\nstages: [{train: {steps: 1}}]\n"
    )
    with pytest.raises(PipelineError, match=r"an iterable dataset has an order of its own: loader\.sampler"):
        build_training_feeds(load(tmp_path / "p.yaml"), Stream(8), rank=0, world_size=1)


def test_a_loader_as_data_is_refused(tmp_path: Path) -> None:
    """Its batches would be taken for samples: of training, to evaluate on, or of a stage."""
    made = "{torch.utils.data.DataLoader: {dataset: [1, 2]}}"
    (tmp_path / "p.yaml").write_text(
        f"model: {{mlp: {{inputs: 6, outputs: 3}}}}\ndata: {{train: {made}, evaluate: {made}}}\n"
        f"optimizer: sgd\nstages: [train: {{steps: 1, data: {made}}}, evaluate: {{data: {made}}}]\n"
    )
    loaded = load(tmp_path / "p.yaml")
    of_stages = partial(build_training_feeds, dataset=Ids(8), rank=0, world_size=1)
    for build in (build_datasets, build_stage_held_out, of_stages):
        with pytest.raises(PipelineError, match="gives DataLoader; give the data set itself; batch_size"):
            build(loaded)


def test_no_epochs_left_are_no_steps() -> None:
    """A run may be resumed with fewer epochs than it has done."""
    source = feed(Ids(21), 0, 2)
    assert [source.steps_left(2, epochs) for epochs in (2, 1, 0, -1)] == [4, 2, 0, 0]


class OneShot(IterableDataset[tuple[int, int]]):
    """Its own iterator: what was read is gone."""

    def __init__(self, size: int) -> None:
        self.left = iter(range(size))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        index = next(self.left)
        return index, index


class OneSource(OneShot):
    """Another iterator each time, over one source."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((index, index) for index in self.left)


class StartsAnew(OneShot):
    """Its own iterator, which starts anew with each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.left = iter(range(self.size))
        return self


def generator(size: int) -> Iterator[tuple[int, int]]:
    return ((index, index) for index in range(size))


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(OneShot, 0), (OneSource, 0), (StartsAnew, 0), (StartsAnew, 2), (generator, 0)],
)
def test_looking_at_data_before_step_1_loses_none_of_it(kind: Any, workers: int) -> None:
    """What the passes before step 1 have read of an iterable that is read once is handed out again."""
    seen = []
    for rank in range(2):
        source = feed(kind(23), rank, 2, workers=workers, shuffle=False)
        for _ in range(3):
            assert source.first_batch()[0].tolist() == [rank, rank + 2, rank + 4, rank + 6]
        seen += [i for step in epoch(source) for batch, _ in step for i in batch]
    assert sorted(seen) == list(range(23))


def test_map_style_samples_are_read_once_before_step_1() -> None:
    """However often the first batch is looked at."""

    class Counts(Ids):
        asked = 0

        def __getitem__(self, index: int) -> tuple[int, int]:
            self.asked += 1
            return index, index

    data = Counts(23)
    source = feed(data, 0, 2)
    first = [source.first_batch()[0].tolist() for _ in range(3)]
    assert first[0] == first[1] == first[2]
    assert data.asked == 4


class Random(Stream):
    """Draws from the seeded generators, as loading processes do with seeds of their own."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return iter((torch.rand(()), index) for index in range(self.size))


def begins_anew(group: RankGroup, kind: Any, sharded: bool) -> bool:
    source = feed(kind(40), group.rank, group.size, sharded=sharded, workers=2, shuffle=False)
    compare(group, source)
    return source.repeats_first_sample()


@pytest.mark.parametrize(
    ("kind", "anew"), [(OneSource, False), (Random, True), (Stream, True), (StartsAnew, True)]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_data_whose_first_samples_loading_processes_do_not_get_is_known(
    kind: Any, anew: bool, sharded: bool
) -> None:
    """Not if the data set draws at random from seeded generators, or starts over."""
    assert on_ranks(1, begins_anew, kind, sharded) == [anew]


def refused(group: RankGroup) -> str:
    with pytest.raises(ValueError, match="its own iterator") as raised:
        begins_anew(group, OneShot, False)
    return str(raised.value)


def test_an_iterator_is_not_shared_by_loading_processes() -> None:
    """Each would read other samples."""
    (said,) = on_ranks(1, refused)
    assert "write loader: {workers: 0}, or have its __iter__ start over" in said


@pytest.mark.parametrize("kind", [OneShot, StartsAnew, Stream])
def test_a_stage_that_ends_in_mid_epoch_loses_nothing(kind: Any) -> None:
    """The next stage goes on with the next sample, however often ranks have looked at the first ones: each
    for itself, and to compare them, as before step 1 of a run.
    """

    def body(group: RankGroup) -> list[int]:
        source, seen = feed(kind(40), 0, 1), list[int]()
        source.first_batch()
        assert compare(group, source) == []
        source.first_batch()
        for count in (3, 2, 5):
            for _, step in zip(range(count), source.steps(1), strict=False):
                seen += [i for micro in step.micro_batches for i in micro.content[0].tolist()]
        return seen

    assert run_ranks(1, body) == [list(range(40))]


@pytest.mark.parametrize("kind", [StartsAnew, Stream])
def test_epochs_of_an_iterable_are_alike(kind: Any) -> None:
    """What was read ahead is handed out in the first one only."""
    source = feed(kind(23), 1, 2)
    source.first_batch()
    steps = [
        [micro.content[0].tolist() for micro in step.micro_batches] for step in source.steps(1, epochs=2)
    ]
    assert steps[:3] == steps[3:]


def test_an_iterator_at_its_end_is_named() -> None:
    """A second epoch has nothing to read."""
    steps = feed(OneShot(24), 0, 2).steps(1, epochs=2)
    assert len(list(islice(steps, 3))) == 3
    with pytest.raises(ValueError, match=r"its own iterator and has nothing left for epoch 2.* only once"):
        next(steps)


def test_samples_that_were_read_ahead_are_those_of_any_rank() -> None:
    """A run that is resumed on more ranks begins in the midst of them."""
    seen = []
    for rank in range(3):
        source = feed(OneShot(37), rank, 3, shuffle=False)
        source.first_batch()
        source.load_state_dict({"epoch": 0, "samples": 8})
        seen += [i for step in epoch(source) for batch, _ in step for i in batch]
    assert sorted(seen) == list(range(8, 37))


class ByWorker(Stream):
    """Divides itself among loading processes, as torch's documentation shows."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        return iter((index, index) for index in range(first, self.size, every))


def test_a_dataset_that_divides_itself_among_loading_processes_loses_nothing() -> None:
    """It is not divided twice."""
    for rank in range(2):
        assert epoch(feed(ByWorker(40), rank, 2, workers=2)) == epoch(feed(Stream(40), rank, 2))


class Shuffled(Stream):
    """Draws its order, and a number for each sample, from the generators that are seeded."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        order = [order[at] for at in torch.randperm(self.size).tolist()]
        for index in np.random.permutation(order).tolist():
            yield index, random.random() + torch.rand(()).item() + np.random.rand()


def two_epochs_of_shuffled(
    rank: int, ranks: int, start: tuple[int, int] = (0, 0), **changes: Any
) -> list[list[tuple[int, float]]]:
    """From an epoch and a position in it, by step, on a rank that draws other numbers than others do."""
    seed_everything(rank)
    source = feed(Shuffled(37), rank, ranks, **changes)
    source.first_batch()
    source.load_state_dict({"epoch": start[0], "samples": start[1]})
    steps = []
    for step in source.steps(1, epochs=2 - start[0]):
        row = [
            (ids.tolist(), drawn.tolist()) for ids, drawn in (micro.content for micro in step.micro_batches)
        ]
        samples = sum(micro.samples for micro in step.micro_batches)
        steps.append([pair for ids, drawn in row for pair in zip(ids, drawn, strict=True)][:samples])
        torch.rand(()), random.random(), np.random.rand()  # as a model does
    return steps


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_draws_the_same_numbers_wherever_it_is_read(workers: int) -> None:
    """So one that shuffles gives each sample once per epoch, in another order in each, and resumes exactly,
    also in mid-epoch and on another number of ranks.
    """
    of_ranks = [two_epochs_of_shuffled(rank, 2, workers=workers) for rank in range(2)]
    steps = [sorted(pair for row in both for pair in row) for both in zip(*of_ranks, strict=True)]
    orders = [[index for row in steps[at : at + 5] for index, _ in row] for at in (0, 5)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(37))
    assert orders[0] != orders[1]
    for epoch_, done, changes in ((0, 2, {"workers": 0}), (1, 1, {"workers": 2}), (1, 3, {"workers": 0})):
        for ranks, batch_size in ((2, 4), (1, 8)):
            changed = {**changes, "batch_size": batch_size}
            again = [
                two_epochs_of_shuffled(rank, ranks, (epoch_, 8 * done), **changed) for rank in range(ranks)
            ]
            rest = [sorted(pair for row in both for pair in row) for both in zip(*again, strict=True)]
            assert rest == steps[5 * epoch_ + done :]


def parts_that_draw(group: RankGroup, workers: int) -> tuple[list[Any], list[Any]]:
    def rows(start: int) -> list[Any]:
        seed_everything(group.rank)
        source = feed(Shuffled(36), group.rank, 2, sharded=True, workers=workers)
        compare(group, source)
        source.load_state_dict({"epoch": 0, "samples": 8 * start})
        steps = source.steps(1, epochs=2)
        contents = [micro.content for step in steps for micro in step.micro_batches]
        return [[*zip(ids.tolist(), drawn.tolist(), strict=True)] for ids, drawn in contents]

    return rows(0), rows(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shards_itself_draws_numbers_of_its_rank(workers: int) -> None:
    """The same in each loading process, and when it is resumed."""
    for whole, rest in (of_ranks := on_ranks(2, parts_that_draw, workers)):
        for at in (0, 9):
            assert sorted(index for row in whole[at : at + 9] for index, _ in row) == list(range(36))
        assert rest == whole[2:]
    assert of_ranks[0][0][1:] != of_ranks[1][0][1:]


# Data that shards itself by rank.


class Part(Ids):
    """Of `size` samples those of a rank."""

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        self.ids = range(rank, size, ranks)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.ids[index], self.ids[index]


class PartStream(IterableDataset[tuple[int, int]]):
    """The same, one after the other."""

    def __init__(self, size: int, rank: int, ranks: int) -> None:
        self.ids = range(rank, size, ranks)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter((index, index) for index in self.ids)


def compare(group: RankGroup, source: Feed) -> list[int]:
    return source.ranks_with_other_samples(ControlChannel(group.process_groups[0]))


def seeds_of_gpus(group: RankGroup) -> tuple[bool, list[int]]:
    seeds: list[int] = []
    source = feed(OneSource(64), 0, 1, workers=2)
    with mock.patch.object(torch.cuda, "manual_seed_all", seeds.append):
        compare(group, source)
        anew = source.repeats_first_sample()
        epoch(source)
    return anew, seeds


def test_data_that_is_looked_at_leaves_the_generators_of_gpus_alone() -> None:
    """Each rank has seeded its own; they would be equal if looking seeded them."""
    [(anew, seeds)] = on_ranks(1, seeds_of_gpus)
    assert not anew, "it was read a second time"
    assert seeds == []


def test_the_order_of_an_epoch_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very large data that takes seconds."""
    made: list[int] = []
    randperm = torch.randperm

    def counted(size: int, **named: Any) -> torch.Tensor:
        made.append(size)
        return randperm(size, **named)

    monkeypatch.setattr(torch, "randperm", counted)

    def body(group: RankGroup) -> None:
        source = feed(Ids(25), 0, 1)
        compare(group, source)
        source.first_batch()
        for _ in range(2):
            epoch(source)

    run_ranks(1, body)
    assert made == [25, 25]


def odd_and_alike(
    group: RankGroup, kind: type[Part | PartStream], workers: int
) -> tuple[list[int], list[int]]:
    same = kind(24, 0, 1) if group.rank < 2 else kind(48, 1, 2)
    shuffle = kind is Part
    odd = compare(group, feed(same, group.rank, 3, workers=workers, shuffle=shuffle))
    alike = compare(group, feed(kind(24, 0, 1), group.rank, 3, workers=workers, shuffle=shuffle))
    return odd, alike


@pytest.mark.parametrize("kind", [Part, PartStream])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_read_different_samples_are_found(kind: type[Part | PartStream], workers: int) -> None:
    """Before step 1; of the ranks that read what rank 0 reads nothing is said."""
    assert on_ranks(3, odd_and_alike, kind, workers) == [([2], [])] * 3


def refusal_of_different_lengths(group: RankGroup) -> str:
    with pytest.raises(ValueError, match="sharded: true") as caught:
        compare(group, feed(Part(25, group.rank, 2), group.rank, 2))
    return str(caught.value)


def test_datasets_of_different_lengths_are_refused() -> None:
    """Ranks would take different numbers of steps."""
    messages = on_ranks(2, refusal_of_different_lengths)
    assert messages[0].startswith("the data set has 13 samples on rank 0 and 12 on rank 1; give every rank")


def two_epochs_of_parts(
    group: RankGroup, kind: type[Part | PartStream], size: int, accumulate: int, workers: int
) -> list[list[tuple[int, list[int]]]]:
    data = kind(size, group.rank, group.size)
    source = feed(data, group.rank, group.size, sharded=True, shuffle=kind is Part, workers=workers)
    assert compare(group, source) == list(range(1, group.size))
    source.first_batch()
    return [
        [
            (int(step.total_weight), micro.content[0].tolist()[: micro.samples])
            for step in source.steps(accumulate, epochs=1)
            for micro in step.micro_batches
        ]
        for _ in range(2)
    ]


@pytest.mark.parametrize("kind", [Part, PartStream])
@pytest.mark.parametrize(
    ("size", "accumulate", "workers"), [(24, 1, 0), (41, 1, 0), (50, 3, 0), (41, 3, 0), (41, 1, 2)]
)
def test_data_that_shards_itself_is_taken_as_it_is(
    kind: type[Part | PartStream], size: int, accumulate: int, workers: int
) -> None:
    """Each sample counts once; ranks take equally many steps and know each one's total; so in every epoch."""
    of_ranks = on_ranks(3, two_epochs_of_parts, kind, size, accumulate, workers)
    for epochs in zip(*of_ranks, strict=True):
        assert len({len(steps) for steps in epochs}) == 1
        assert sorted(i for steps in epochs for _, ids in steps for i in ids) == list(range(size))
        for row in zip(*epochs, strict=True):
            assert len({total for total, _ in row}) == 1


def very_different_sizes(
    group: RankGroup, kind: type[Part | PartStream], drop_last: bool
) -> list[tuple[int, int]]:
    data = kind(30, 0, 1) if group.rank == 0 else kind(5, 0, 1)
    source = feed(data, group.rank, 2, sharded=True, shuffle=False, drop_last=drop_last)
    compare(group, source)
    return [
        (int(step.total_weight), micro.samples)
        for step in source.steps(1, epochs=1)
        for micro in step.micro_batches
        if len(micro.content[0])
    ]


@pytest.mark.parametrize("kind", [Part, PartStream])
def test_parts_of_very_different_sizes(kind: type[Part | PartStream]) -> None:
    """A rank that has none left computes along on what counts nothing; `drop_last` ends with it."""
    first, second = on_ranks(2, very_different_sizes, kind, False)
    assert first == [(8, 4), (5, 4), *[(4, 4)] * 5, (2, 2)]
    assert second == [(8, 4), (5, 1), *[(4, 0)] * 5, (2, 0)]
    assert on_ranks(2, very_different_sizes, kind, True) == [[(8, 4)], [(8, 4)]]


def own_totals(
    group: RankGroup, data: Any, counted: list[list[int]], changes: dict[str, Any]
) -> list[tuple[float, int]]:
    """The total of each step in which these ranks average gradients, and the samples of this rank."""
    source = feed(data[group.rank], group.rank, group.size, shuffle=False, **changes)
    compare(group, source)
    ranks = next(block for block in counted if group.rank in block)
    steps = source.steps(2, epochs=1, ranks=ranks)
    return [(step.total_weight, sum(micro.samples for micro in step.micro_batches)) for step in steps]


@pytest.mark.parametrize("counted", [[[0], [1], [2], [3]], [[0, 1], [2, 3]]])
@pytest.mark.parametrize("kind", [Part, PartStream])
@pytest.mark.parametrize("changes", [{}, {"global_batch": 22}, {"sharded": True}])
def test_the_total_of_ranks_that_train_apart_is_their_own(
    kind: type[Part | PartStream], changes: dict[str, Any], counted: list[list[int]]
) -> None:
    """Scaled to the number of all ranks, so that a rank's own part of it is the factor on its loss."""
    sizes = (30, 5, 9, 9) if "sharded" in changes else (49,) * 4
    of_ranks = on_ranks(4, own_totals, [kind(size, 0, 1) for size in sizes], counted, changes)
    for step in zip(*of_ranks, strict=True):
        for block in counted:
            own = sum(step[rank][1] for rank in block)
            assert {step[rank][0] for rank in block} == {own * 4 / len(block)}
    assert any(len({samples for _, samples in step}) > 1 for step in zip(*of_ranks, strict=True))


def sizes_of_unequal_parts(group: RankGroup, kind: type[Part | PartStream]) -> list[int]:
    return batch_sizes(group, kind(15, 0, 1) if group.rank == 0 else kind(4, 0, 1), sharded=True)


@pytest.mark.parametrize("kind", [Part, PartStream])
def test_a_rank_without_a_sample_computes_along_on_as_many_as_the_largest_share(
    kind: type[Part | PartStream],
) -> None:
    """Of data that shards itself, whose parts may be of any size."""
    assert on_ranks(2, sizes_of_unequal_parts, kind) == [[4, 4, 4, 3]] * 2


def whole_and_resumed(group: RankGroup, kind: type[Part | PartStream]) -> tuple[list[int], list[int]]:
    def ids(steps: Any) -> list[int]:
        return [i for step in steps for micro in step.micro_batches for i in micro.content[0].tolist()]

    sources = []
    for _ in range(3):
        data = kind(60, group.rank, group.size)
        sources.append(feed(data, group.rank, group.size, sharded=True, shuffle=kind is Part))
        compare(group, sources[-1])
    unbroken, first, second = sources
    whole = ids(unbroken.steps(1, epochs=1))
    begun = ids(islice(first.steps(1, epochs=1), 3))
    second.load_state_dict(first.state_dict())
    return whole, begun + ids(second.steps(1, epochs=1))


@pytest.mark.parametrize("kind", [Part, PartStream])
def test_sharded_data_goes_on_where_its_state_was_taken(kind: type[Part | PartStream]) -> None:
    """On as many ranks."""
    for whole, parts in on_ranks(2, whole_and_resumed, kind):
        assert parts == whole


# Samples that are no batch.


class Odd(Ids):
    """Sample 5 is larger than the others."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.zeros(3, 9 if index == 5 else 8), index


class Objects(Ids):
    """Samples with something that is no tensor."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return (1.5, random.Random()), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            Odd(16),
            "samples do not fit into one batch: sample 4 is (float32 (3, 8), int), sample 5 is "
            "(float32 (3, 9), int); give all samples the same keys, types and shapes: resize, crop or pad "
            "them in the data set; or, if shapes alone differ, write loader: {batch_size: 1}",
        ),
        (
            Objects(16),
            "samples do not fit into one batch: sample 0 is ((float, random.Random), int); default_collate: "
            "batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class "
            "'random.Random'>; a sample is made of tensors, NumPy arrays, numbers and text, and of tuples, "
            "lists and mappings of these: convert it in the data set",
        ),
    ],
)
def test_samples_that_are_no_batch_are_named(data: Any, message: str, iterable: bool, workers: int) -> None:
    """With their numbers and shapes, wherever they are loaded; no traceback of a loading process."""
    if iterable:
        data = [data[place] for place in range(len(data))]
        data = type("Row", (), {"__iter__": lambda self, row=data: iter(row)})()
    source = feed(data, 0, 1, shuffle=False, workers=workers)
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        epoch(source)


class Ends(Ids):
    """Sample 5 ends the iteration of what asks for it."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return next(iter([(index, index)] if index != 5 else []))


def ends(samples: list[Any]) -> Any:
    return next(iter([samples] if (5, 5) not in samples else []))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("data", "custom"), [(Ends(16), None), (Ids(16), ends)])
def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch(
    data: Any, custom: Any, workers: int
) -> None:
    """The batches after it would be left out, and ranks would get out of step."""
    source = feed(data, 0, 1, shuffle=False, workers=workers)
    source.collate = custom
    with pytest.raises(RuntimeError, match="raised StopIteration: samples 4, 5, 6, 7"):
        list(chain.from_iterable(step.micro_batches for step in source.steps(1, epochs=1)))


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        ({"x": [1, 2, 3], "y": 1}, "sample 1 is {x: [int, int, int], y: int}"),
        ({"x": None, "y": 1}, "sample 1 is {x: NoneType, y: int}"),
        ({"x": torch.zeros(4)}, "sample 1 is {x: float32 (4,)}"),
    ],
)
def test_a_sample_without_a_value_or_a_key_is_named(odd: Any, shown: str) -> None:
    """Beside the first one, so that what differs can be seen."""
    made = collate([{"x": torch.zeros(4), "y": 1}, odd], [0, 1])
    assert isinstance(made, BatchFault)
    first = "sample 0 is {x: float32 (4,), y: int}"
    assert made.problem == f"samples do not fit into one batch: {first}, {shown}"


def test_synthetic_tokens_are_for_the_transformer(tmp_path: Path) -> None:
    """The target of each is the next one, as in text."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "model: {transformer: {vocabulary: 5, context: 8, width: 4, heads: 1, layers: 1}}\n"
        "data: {synthetic: {samples: 3, shape: [8], dtype: int64, classes: 5}}\noptimizer: sgd\n"
    )
    loaded = load(path)
    assert loaded.warnings == ()
    train, _ = build_datasets(loaded)
    assert len(train) == 3
    tokens, targets = default_collate([*train])
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens[:, 1:].equal(targets[:, :-1])
    loss = torch.nn.functional.cross_entropy(build_model(loaded)(tokens), targets)
    assert loss.isfinite()


def test_too_little_text_is_told_without_what_is_held_out(tmp_path: Path) -> None:
    """The file is long enough for a window; what is left for training is not."""
    (tmp_path / "a.txt").write_text("x" * 100)
    path = tmp_path / "p.yaml"
    path.write_text("model: a.b\ndata: {text: {files: a.txt, context: 95}}\noptimizer: sgd\n")
    told = r"90 bytes to train on are too few for a window of 95 \(context\) .*; 10 of 100 bytes are held out"
    with pytest.raises(PipelineError, match=told):
        build_datasets(load(path))


@pytest.mark.parametrize("files", ["*.txt", "{here}/*.txt"])
def test_text_is_found_in_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path, files: str) -> None:
    """The patterns are those of the file alone."""
    folder = tmp_path / "run[1]"
    folder.mkdir()
    (folder / "a.txt").write_bytes(bytes(33))
    found = text(files=[files.replace("{here}", str(folder))], context=16, held_out=None, folder=folder)
    assert len(found.train) == 2  # type: ignore[arg-type]
