"""The order in which samples reach the ranks: each once per epoch, known in advance, resumable.

An epoch's order is `torch.randperm(samples, generator=seeded with seed + epoch)`, or the data's own order
without `shuffle`, or what a sampler gives that is made under that seed. A global micro-batch is the next
`batch_size x ranks` of it, and rank r takes every ranks-th from the r-th on: what torch's
`DistributedSampler` does, except that nothing is repeated to fill the last micro-batch, which is smaller
instead and counts for what it holds. With `global_batch`, a step is so many samples, cut into micro-batches
as equal as possible. Ranks of different speed may have unequal shares of a micro-batch (`balance.py`). In a
round, a rank's share of a micro-batch are batches, and each rank updates its weights by each of its own.

A data set that shards itself by rank (`loader: {sharded: true}`) is taken as it is: a global micro-batch is
the next `batch_size` of each rank's own samples, and a rank that has none left computes along.
"""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice, starmap
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ddprun.config import Loader
from ddprun.engine.samples import CollateFunction, SampleShard, batch_or_raise, collate, digest_samples
from ddprun.engine.seeding import SeparateRng, seed_for_batch
from ddprun.engine.streams import PeekableStream, RankShareDataset
from ddprun.host.processes import die_with_parent, ignore_signals
from ddprun_hooks.comm.control_channel import ControlChannel


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward."""

    content: Any  # collated samples: tensors with a leading batch dimension
    samples: int
    """Samples that count; 0: this rank's data is used up, and it computes along only so that collectives
    match."""

    effective_weight: float  # of its mean loss in means over batches: its samples, or by `weight_by`


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one rank computes in one optimizer step."""

    micro_batches: Iterable[MicroBatch]
    micro_batch_count: int
    total_weight: float
    """Samples, or weights, of all micro-batches of the ranks that average gradients, scaled to all ranks."""


def transform_step(step: StepBatches, transform: Callable[[Any], Any]) -> StepBatches:
    """The step with the content of each micro-batch changed by `transform`, when its turn comes."""
    batches = (replace(micro, content=transform(micro.content)) for micro in step.micro_batches)
    return replace(step, micro_batches=batches)


def weight_micro_batches(
    step: StepBatches, batch_weight: Callable[[Any], float], total_over_ranks: Callable[[float], float]
) -> StepBatches:
    """The step with each micro-batch weighted by `batch_weight` of its content, for which all of them are
    loaded. `total_over_ranks` turns this rank's weight into the step's total.
    """
    batches = [
        replace(micro, effective_weight=batch_weight(micro.content) if micro.samples else 0.0)
        for micro in step.micro_batches
    ]
    own_weight = math.fsum(micro.effective_weight for micro in batches)
    return StepBatches(batches, step.micro_batch_count, total_over_ranks(own_weight))


_FEWER_RANKS = "use fewer ranks, a smaller batch_size, drop_last: false, or more data"
ErrorFactory = Callable[[str, str | None], Exception]  # makes an error of what is wrong and what is allowed


def is_iterable_dataset(dataset: Any) -> bool:
    """Whether a dataset is a stream of samples, rather than one to pick from by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


@dataclass(eq=False)
class Feed:
    """An endless stream of optimizer steps, epoch after epoch, that knows its position."""

    dataset: Any  # map-style, or iterable; the same on every rank, unless it is `sharded`
    loader: Loader
    _: KW_ONLY
    seed: int
    rank: int
    world_size: int
    make_error: ErrorFactory  # makes the error for data that cannot be trained on
    collate: CollateFunction | None = None  # makes a batch; None: as torch does
    sampler_order: Callable[[int], list[int]] | None = None  # indices of an epoch, in place of `shuffle`
    pin: bool = False  # batches go into page-locked memory, for a GPU

    def __post_init__(self) -> None:
        loader = self.loader
        self.iterable = is_iterable_dataset(self.dataset)
        self.batch_size, self.shuffle, self.drop_last = loader.batch_size, loader.shuffle, loader.drop_last
        self.sharded, self._workers = loader.sharded, loader.workers
        self._share = SampleShard(self.rank, self.world_size, loader.sharded)
        self.set_shares(())
        self.epoch = 0  # an epoch that is used up is left when the next step is asked for
        self._announce_epoch()  # before anything is read, such as a first batch to learn shapes from
        self._consumed_samples = 0  # samples of the epoch, of all ranks, as if every rank's batches were full
        self._order: tuple[int, list[int]] | None = None  # an epoch, and the order of its samples
        # This rank's, and their numbers.
        self._first_samples: tuple[Sequence[Any], Sequence[int]] | None = None
        self._digest_of_first = self._digest_of_ahead = b""  # of what a stream yields first
        self._stream = PeekableStream(self.dataset, self._stream_rng())
        self._control: ControlChannel | None = None
        self._lengths: list[int] = []  # samples of each rank's dataset
        if not self.iterable:
            self._lengths = [self._own_epoch_samples()] * self.world_size
            self._check_enough_samples()
        elif loader.shuffle or self.sampler_order:
            key = "shuffle must be false" if loader.shuffle else "sampler must be left out"
            raise self.make_error(f"an iterable dataset has an order of its own: loader.{key}", None)

    def ranks_with_other_samples(self, control: ControlChannel) -> list[int]:
        """The ranks that read other samples than rank 0 does, under equal random generators; refuses
        map-style data of different lengths that is not `sharded`. Called by all ranks before step 1.
        """
        self._control = control
        if self.iterable:
            self._read_first_samples()
            first_digest = self._digest_of_ahead
            if self._workers and self._stream.one_shot and not self.repeats_first_sample():
                problem = "the data set is its own iterator, which loading processes cannot share"
                raise self.make_error(problem, "write loader: {workers: 0}, or have its __iter__ start over")
        else:
            with SeparateRng(self.seed)():
                first_digest = digest_samples([self.dataset[self._epoch_indices()[0]]])
            if self.sampler_order is not None and not self.sharded:
                # Each takes its share of one and the same order.
                own = digest_samples([torch.tensor(self._epoch_indices())])
                if differing := control.differing_ranks(own, "the sampler's order"):
                    problem = f"loader.sampler yields other indices on rank {differing[0]} than on rank 0"
                    allowed = "have it draw from torch, NumPy or random, which are seeded alike on all ranks"
                    raise self.make_error(problem, allowed)
            lengths = all_gather_number(control, self._own_epoch_samples(), "the data sets' lengths")
            self._lengths = lengths
            if self.sharded:
                self._check_enough_samples()
            elif min(lengths) != max(lengths):
                other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
                counts = f"{lengths[0]} samples on rank 0 and {lengths[other]} on rank {other}"
                allowed = "give every rank the same data set, or write loader: {sharded: true} if it shards"
                raise self.make_error(f"the data set has {counts}", f"{allowed} itself")
        return control.differing_ranks(first_digest, "a digest of the first samples")

    def repeats_first_sample(self) -> bool:
        """Whether an iterable dataset, read again under the same seed, yields the same first sample."""
        with SeparateRng(self.seed + self.epoch)():
            return digest_samples(islice(iter(self.dataset), 1)) == self._digest_of_first

    @property
    def first_unused_epoch(self) -> int:
        """The first epoch of which no sample has been used."""
        return self.epoch + (self._consumed_samples > 0)

    @property
    def mid_epoch(self) -> bool:
        """Whether an epoch of map-style data has begun and is not used up."""
        consumed = self._consumed_samples
        return not self.iterable and consumed > 0 and self._samples_left(consumed) > 0

    def set_shares(self, shares: Sequence[int], local_batch: int | None = None) -> None:
        """Have each rank take so many samples of a full micro-batch, from the next step on; none: as many
        each. `local_batch`: a micro-batch is a round, and each rank's share of it are batches of this size.
        """
        self._share = replace(self._share, shares=tuple(shares), local_batch=local_batch)
        in_round = local_batch is not None
        self._sizes = [sum(shares)] if in_round else global_micro_batch_sizes(self.loader, self.world_size)
        self._least = self.loader.global_batch or local_batch or self._sizes[0]  # `drop_last` drops less

    def _samples_left(self, consumed: int, least: int | None = None) -> int:
        """Samples that the epoch still uses after `consumed`; 0 if the data became shorter. `drop_last` drops
        fewer than `least`; None: than a step as it is now.
        """
        left = max(0, self._nominal_epoch_samples - consumed)
        return left - left % (least or self._least) if self.drop_last else left

    @property
    def _nominal_epoch_samples(self) -> int:
        """Samples of an epoch; if sharded, ranks times those of the longest (`drop_last`: shortest) rank."""
        if not self.sharded:
            return self._lengths[0]
        return (min if self.drop_last else max)(self._lengths) * self.world_size

    def steps_per_epoch(self, accumulate: int) -> int | None:
        """Optimizer steps in an epoch of a stage without rounds, whatever stage runs now; the last one may
        have fewer micro-batches. None: nobody knows.
        """
        return None if self.iterable else self._steps_left_after(0, accumulate)

    def _steps_left_after(self, consumed: int, accumulate: int) -> int:
        full = self.loader.global_batch or self.batch_size * self.world_size
        return -(-self._samples_left(consumed, full) // (full * accumulate))

    def steps_left(self, accumulate: int, epochs: int) -> int | None:
        """Optimizer steps from here to the end of so many epochs, the current one included."""
        per_epoch = self.steps_per_epoch(accumulate)
        if per_epoch is None or epochs <= 0:
            return None if per_epoch is None else 0
        return self._steps_left_after(self._consumed_samples, accumulate) + (epochs - 1) * per_epoch

    def last_batch_size(self) -> int:
        """Samples that this rank computes on in the last micro-batch of an epoch of map-style data."""
        order = self._epoch_indices()
        of_step = sum(self._sizes)
        *_, (start, size) = next(self._plan_steps((self._samples_left(0) - 1) // of_step * of_step, 1))
        return len(self._rank_indices(order, start, size) or self._padding_indices(order, start))

    def first_batch(self, max_samples: int | None = None) -> Any:
        """A batch of the coming epoch, to learn shapes from; the epoch still begins with its samples."""
        samples, numbers = self._read_first_samples()
        content = collate(samples[:max_samples], numbers[:max_samples], self.collate)
        return batch_or_raise(content, self.make_error)

    def _read_first_samples(self) -> tuple[Sequence[Any], Sequence[int]]:
        """This rank's first samples and their numbers; those of an iterable dataset are read once."""
        if self._first_samples is not None:
            return self._first_samples
        if self.iterable:
            rng = SeparateRng(self.seed + self.epoch)  # ranks compare what they read
            count = self._sizes[0] // (self.world_size if self.sharded else 1)
            then = self._stream_rng() if self.sharded else rng
            ahead = self._stream.peek(self.epoch, count, rng, then)
            self._digest_of_first, self._digest_of_ahead = digest_samples(ahead[:1]), digest_samples(ahead)
            if not (mine := self._share.own_samples(ahead)):
                problem = f"the dataset yields too few samples for {self.world_size} ranks"
                raise self.make_error(problem, _FEWER_RANKS)
            self._first_samples = mine, self._share.own_samples(range(len(ahead)))
        else:
            order = self._epoch_indices()
            indices = self._rank_indices(order, 0, self._sizes[0]) or order[:1]
            self._first_samples = [self.dataset[index] for index in indices], indices
        return self._first_samples

    def skip_rest_of_epoch(self) -> None:
        """Go to the start of an epoch: a begun one is left where it is."""
        if self._consumed_samples:
            self.epoch, self._consumed_samples = self.epoch + 1, 0

    def steps(
        self, accumulate: int, *, epochs: int | None = None, ranks: Sequence[int] | None = None
    ) -> Iterator[StepBatches]:
        """Optimizer steps of `accumulate` micro-batches, from where the feed is. `ranks` are those that
        average gradients with this one; None: all.

        A step never reaches over an epoch's end. A step's micro-batches have to be used up before the next.
        It stops at the end of so many epochs, the current one included; None: never.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        while epochs is None or epochs > 0:
            yield from self._epoch_steps(accumulate, ranks)
            if self._consumed_samples == 0:
                if self._stream.one_shot and self.epoch:
                    problem = "the data set is its own iterator and has nothing left for epoch "
                    allowed = "train for fewer steps or one epoch, or have its __iter__ start over"
                    raise self.make_error(f"{problem}{self.epoch + 1}: it can be read only once", allowed)
                problem = f"the dataset yields too few samples for one step of {self.world_size} ranks"
                raise self.make_error(problem, _FEWER_RANKS)
            self.epoch, self._consumed_samples = self.epoch + 1, 0
            epochs = None if epochs is None else epochs - 1

    def _epoch_steps(self, accumulate: int, ranks: Sequence[int]) -> Iterator[StepBatches]:
        self._announce_epoch()
        make_steps = self._sharded_iterable_steps if self.sharded else self._iterable_steps
        if not self.iterable:
            length, usual = self._own_epoch_samples(), self._lengths[self.rank]
            if length != usual:
                problem = f"there are {length} samples in epoch {self.epoch + 1}, but {usual} before"
                allowed = "keep the length of the data set, or of its sampler, the same in each epoch"
                raise self.make_error(problem, allowed)
            self._first_samples = None  # not needed any more
            make_steps = self._map_style_steps
        share = None
        while share != self._share:  # other shares: load anew from where the feed is
            share = self._share
            for step in make_steps(accumulate, ranks):
                yield step
                if share != self._share:
                    break

    def _announce_epoch(self) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

    def _micro_batch(self, content: Any, own: int) -> MicroBatch:
        return MicroBatch(batch_or_raise(content, self.make_error), own, own)

    def _step(
        self, micro_batches: Iterable[MicroBatch], count: int, samples: int, ranks: Sequence[int]
    ) -> StepBatches:
        """A step in which these ranks average gradients, over so many samples."""
        return StepBatches(micro_batches, count, samples * self.world_size / len(ranks))

    # Map-style: the whole epoch is arithmetic, so a step's total is known before a sample is loaded.

    def _map_style_steps(self, accumulate: int, ranks: Sequence[int]) -> Iterator[StepBatches]:
        consumed = self._consumed_samples
        if not self._samples_left(consumed):
            return
        order = self._epoch_indices()

        def indices_of_batches() -> Iterator[tuple[Sequence[int], int, int]]:
            for start, size in chain.from_iterable(self._plan_steps(consumed, accumulate)):
                for at, mine in enumerate(
                    self._share.own_batches(self._indices_to_read(order, start, size)), start
                ):
                    yield mine or self._padding_indices(order, start), len(mine), at

        seed = self._loading_seed() if self._workers else None
        batches = self._start_loading(BatchDataset(self.dataset, seed, self.collate), indices_of_batches())
        for step in self._plan_steps(consumed, accumulate):
            total = sum(self._count_samples_of_ranks(ranks, start, size) for start, size in step)
            count = sum(len(self._share.own_batches(range(size))) for _, size in step)
            self._consumed_samples = sum(step[-1])
            yield self._step(starmap(self._micro_batch, islice(batches, count)), count, total, ranks)

    def _plan_steps(self, consumed: int, accumulate: int) -> Iterator[list[tuple[int, int]]]:
        """The steps from there to the epoch's end, as micro-batches of all ranks: their starts and sizes."""
        end = consumed + self._samples_left(consumed)
        while consumed < end:
            step = []
            for size in self._sizes * accumulate:
                step.append((consumed, min(size, end - consumed)))
                consumed += size
                if consumed >= end:
                    break
            yield step

    def _own_epoch_samples(self) -> int:
        return len(self.dataset if self.sampler_order is None else self._epoch_indices())

    def _epoch_indices(self) -> list[int]:
        """The epoch's samples in order, kept while it lasts."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, self._make_epoch_order()
        return self._order[1]

    def _make_epoch_order(self) -> list[int]:
        if self.sampler_order is not None:
            with SeparateRng(self.seed + self.epoch)():
                return self.sampler_order(self.epoch)
        size = len(self.dataset)
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(size, generator=generator).tolist()

    def _rank_indices(self, order: list[int], start: int, size: int) -> Sequence[int]:
        return self._share.own_samples(self._indices_to_read(order, start, size))

    def _indices_to_read(self, order: list[int], start: int, size: int) -> list[int]:
        return order[self._samples_read(start) : self._samples_read(start + size)]

    def _samples_read(self, consumed: int) -> int:
        """How many samples this rank has read, of so many of all ranks."""
        return consumed // self.world_size if self.sharded else consumed

    def _count_samples_of_ranks(self, ranks: Sequence[int], start: int, size: int) -> int:
        """How many samples of a micro-batch of all ranks these have."""
        if self.sharded:
            first, last = self._samples_read(start), self._samples_read(start + size)
            return sum(max(0, min(last, self._lengths[rank]) - first) for rank in ranks)
        if len(ranks) == self.world_size:
            return size
        return sum(len(replace(self._share, rank=rank).own_samples(range(size))) for rank in ranks)

    def _padding_indices(self, order: list[int], start: int) -> Sequence[int]:
        """Indices for a rank with none left in a micro-batch: its first, as many as the largest share."""
        largest = min(self.batch_size, max(self._lengths) - start // self.world_size) if self.sharded else 1
        return self._rank_indices(order, 0, self._sizes[0])[:largest] or order[:1]

    def _check_enough_samples(self) -> None:
        size, least = self._nominal_epoch_samples, self.world_size
        if self.drop_last:
            least = max(least, self._least)
        if self.sharded and not min(self._lengths):
            problem = f"rank {self._lengths.index(0)}'s part of the data has no sample"
            raise self.make_error(problem, _FEWER_RANKS)
        if size < least:
            problem = f"{size} samples are fewer than one step of {self.world_size} ranks needs: {least}"
            raise self.make_error(problem, _FEWER_RANKS)

    # Iterable: every rank reads the whole stream and takes its share, so all know when it ends.

    def _iterable_steps(self, accumulate: int, ranks: Sequence[int]) -> Iterator[StepBatches]:
        batches = self._rank_share_batches()
        while read := list(islice(batches, accumulate * len(self._sizes))):
            own_batches = chain.from_iterable(of_micro_batch for of_micro_batch, _ in read)
            group = list(starmap(self._micro_batch, own_batches))
            total = sum(of_all_ranks for _, of_all_ranks in read)
            if self.drop_last and total < self._least:
                return
            self._consumed_samples += total
            counted = sum(self._count_samples_of_ranks(ranks, 0, of_all_ranks) for _, of_all_ranks in read)
            yield self._step(group, len(group), counted, ranks)

    # Iterable and sharded: no rank knows how many samples another one has left, so they exchange it.

    def _sharded_iterable_steps(self, accumulate: int, ranks: Sequence[int]) -> Iterator[StepBatches]:
        assert self._control is not None, "ranks compare their data before step 1"
        batches = self._rank_share_batches()
        least = self.batch_size * self.world_size if self.drop_last else 1
        while True:
            read = [batch for (batch,), _ in islice(batches, accumulate)]
            mine = [(batch_or_raise(content, self.make_error), samples) for content, samples in read]
            mine += [(None, 0)] * (accumulate - len(mine))
            of_ranks = self._control.all_gather([samples for _, samples in mine], "samples of every rank")
            used = int((of_ranks.sum(0) >= least).sum())  # of the micro-batches
            if not used:
                return
            of_ranks = of_ranks[:, :used].int()
            group = [
                MicroBatch(self.first_batch(largest) if content is None else content, samples, samples)
                for (content, samples), largest in zip(mine, of_ranks.amax(0).tolist(), strict=False)
            ]
            self._consumed_samples += used * self.batch_size * self.world_size
            yield self._step(group, used, int(of_ranks[list(ranks)].sum()), ranks)

    def _rank_share_batches(self) -> Iterator[Any]:
        """This rank's share of what is left of the epoch, as `RankShareDataset` gives it."""
        skip = self._samples_read(self._consumed_samples)
        samples, already_read, rng = self.dataset, 0, self._stream_rng()  # loading processes begin anew
        if not self._workers:
            samples, already_read = self._stream.iterate_epoch_from(self.epoch, skip, rng)
            rng = self._stream.rng
        sizes = [size // self.world_size for size in self._sizes] if self.sharded else self._sizes
        drop_last = self.drop_last and not self.sharded and len(sizes) == 1
        seed, share = self._loading_seed(), self._share
        batches = RankShareDataset(
            samples,
            rng,
            seed=seed,
            sizes=sizes,
            share=share,
            skip=skip,
            already_read=already_read,
            drop_last=drop_last,
            collate=self.collate,
        )
        return self._start_loading(batches, None)

    def _stream_rng(self) -> SeparateRng:
        """For what a stream draws in the epoch: the same numbers in each process that reads it, of all ranks;
        if it is sharded, of this rank.
        """
        return SeparateRng(self._loading_seed() if self.sharded else self.seed + self.epoch)

    def _start_loading(self, dataset: Dataset[Any], sampler: Iterable[Any] | None) -> Iterator[Any]:
        # A generator of its own, so that iterating draws nothing from torch's.
        generator = torch.Generator().manual_seed(self._loading_seed())
        return load_batches(dataset, sampler, self._workers, generator, pin=self.pin)

    def _loading_seed(self) -> int:
        return (self.seed + self.epoch) * self.world_size + self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "samples": self._consumed_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; the position is that of all ranks, however many there are."""
        self.epoch, self._consumed_samples = state["epoch"], state["samples"]


class BatchDataset(Dataset[Any]):
    """Batches of a map-style dataset, each with its samples that count; a `BatchFault` where they do not fit.

    What a loading process draws for a batch depends on its position in the epoch alone: not on how many
    processes there are, nor on where in the epoch they started. Without a seed it is loaded in the training
    process.
    """

    def __init__(self, dataset: Any, seed: int | None, collate: CollateFunction | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        # A class derived from it may read its samples in another way.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __getitem__(self, batch: tuple[Sequence[int], int, int]) -> tuple[Any, int]:
        indices, own, position = batch
        if self.seed is not None:
            seed_for_batch(self.seed, position)
        if self._tensors is not None:  # what `default_collate` makes, without an object for each sample
            at = torch.tensor(indices)
            return [tensor[at].contiguous() for tensor in self._tensors], own
        try:
            if hasattr(self.dataset, "__getitems__"):
                samples = list(self.dataset.__getitems__(indices))
            else:
                samples = [self.dataset[index] for index in indices]
            return collate(samples, indices, self.collate), own
        except StopIteration as error:  # would end the epoch here
            shown = ", ".join(map(str, indices))
            raise RuntimeError(f"the data set or collate raised StopIteration: samples {shown}") from error


def global_micro_batch_sizes(loader: Loader, ranks: int) -> list[int]:
    """Samples of all ranks in each micro-batch of a step with `global_batch`; without it, in any one."""
    most = loader.batch_size * ranks
    if loader.global_batch is None:
        return [most]
    count = -(-loader.global_batch // most)
    return [len(range(micro, loader.global_batch, count)) for micro in range(count)]


def load_batches(
    dataset: Dataset[Any],
    sampler: Iterable[Any] | None,
    workers: int,
    generator: torch.Generator,
    *,
    pin: bool,
) -> Iterator[Any]:
    """The batches that `dataset` makes of what `sampler` yields; those of an iterable one, without a sampler.
    `generator` seeds the `workers`, processes that make them; 0: this one does.
    """
    if not workers and not pin:  # as a DataLoader, without the 25 calls it makes for each batch
        return iter(dataset) if sampler is None else map(dataset.__getitem__, sampler)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=_identity_collate,
        worker_init_fn=_init_worker_signals,
        pin_memory=pin,
        generator=generator,
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in a worker until it can ignore it
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for worker in getattr(batches, "_workers", ()):  # so that whatever terminates it ends it
        worker._popen.terminate = worker.kill
    return batches


def _identity_collate(batch: Any) -> Any:
    return batch


def _init_worker_signals(worker: int) -> None:
    """Have a loading process end with its rank, and not at SIGTERM before: a rank that is to stop still takes
    steps. By itself the process would notice seconds later.
    """
    die_with_parent()
    ignore_signals(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def all_gather_number(control: ControlChannel, number: int, what: str) -> list[int]:
    """Every rank's number; `what` is for diagnoses."""
    return [int(one) for one in control.all_gather([float(number)], what)[:, 0].tolist()]
