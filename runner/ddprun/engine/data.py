"""The order in which samples reach the ranks: each once per epoch, known in advance, resumable.

An epoch's order is `torch.randperm(samples, generator=seeded with seed + epoch)`, or the data's own order
without `shuffle`, or what a sampler gives that is made under that seed. A global micro-batch is the next
`batch_size x ranks` of it, and rank r takes every ranks-th from the r-th on: what torch's
`DistributedSampler` does, except that nothing is repeated to fill the last micro-batch, which is smaller
instead and counts for what it holds.

A data set that shards itself by rank (`loader: {sharded: true}`) is taken as it is: a global micro-batch is
the next `batch_size` of each rank's own samples, and a rank that has none left computes along.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as loading_process

from ddprun.config import Loader
from ddprun.engine.samples import BatchError, Collate, collate, digest_of
from ddprun.engine.seeding import preserve_rng_state, seed_everything, seed_host
from ddprun.host.processes import die_with_parent
from ddprun_hooks.comm.control import Control


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward."""

    content: Any  # collated samples: tensors with a leading batch dimension
    samples: int  # that count; 0: this rank has none left and computes along on a batch that counts nothing
    weight: float | None = None  # what its mean loss counts in means; None: its samples

    @property
    def counts(self) -> float:
        """What its mean loss counts."""
        return self.samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one rank computes in one optimizer step."""

    micro_batches: Iterable[MicroBatch]
    count: int  # micro-batches in the step
    total: float  # what counts, of all ranks and micro-batches: samples, or weights


def weighed(step: StepBatches, weigh: Callable[[Any], float], total: Callable[[float], float]) -> StepBatches:
    """A step whose micro-batches count by `weigh` of their content; all of them are loaded for it.

    `total` is given what this rank's count, and gives that of all ranks, as if it was of as many ranks as
    there are.
    """
    batches = [
        replace(micro, weight=weigh(micro.content) if micro.samples else 0.0) for micro in step.micro_batches
    ]
    return StepBatches(batches, step.count, total(math.fsum(micro.counts for micro in batches)))


Refuse = Callable[[str, str | None], Exception]  # makes an error of what is wrong and what is allowed


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset is a stream of samples, rather than one to pick from by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _value_error(problem: str, allowed: str | None) -> Exception:
    return ValueError(problem if allowed is None else f"{problem}; {allowed}")


@dataclass(eq=False)
class Feed:
    """An endless stream of optimizer steps, epoch after epoch, that knows its position."""

    dataset: Any  # map-style, or iterable; the same on every rank, unless it is `sharded`
    loader: Loader
    _: KW_ONLY
    seed: int
    rank: int
    ranks: int
    collate: Collate | None = None  # makes a batch; None: as torch does
    order: Callable[[int], list[int]] | None = None  # indices of an epoch, in place of `shuffle`
    pin: bool = False  # batches go into page-locked memory, for a GPU
    refuse: Refuse = _value_error  # makes the error for data that cannot be trained on
    on_samples_lost: Callable[[str], None] = lambda text: (
        None
    )  # is called if samples that were read early are lost

    def __post_init__(self) -> None:
        loader = self.loader
        self.iterable = is_iterable(self.dataset)
        self.batch_size, self.shuffle, self.drop_last = loader.batch_size, loader.shuffle, loader.drop_last
        self.sharded, self._workers = loader.sharded, loader.workers
        self._loading: dict[str, Any] = {"pin_memory": self.pin, **loading(loader.workers)}
        self.epoch = 0  # an epoch that is used up is left when the next step is asked for
        self.odd_ranks: list[int] = []  # that read other first samples than rank 0, once compared
        self._warned = False
        self._used = 0  # samples of the epoch, of all ranks, as if every rank's batches were full
        self._ordered: tuple[int, list[int]] | None = None  # an epoch, and the sampler's order of it
        self._first: tuple[list[Any], list[int]] | None = None  # this rank's first samples, and their numbers
        self._stream = _Stream(self.dataset)
        self._control: Control | None = None
        # Samples of each rank's dataset.
        self._lengths: list[int] = []
        if not self.iterable:
            self._lengths = [len(self._order())] * self.ranks
        if self.iterable and (loader.shuffle or self.order):
            key = "shuffle must be false" if loader.shuffle else "sampler must be left out"
            raise self.refuse(f"an iterable dataset has an order of its own: loader.{key}", None)
        if not self.iterable:
            self._check_length()

    def compare_ranks(self, control: Control) -> list[int]:
        """The ranks that read other samples than rank 0 does, under equal random generators; refuses
        map-style data of different lengths that is not `sharded`. Called by all ranks before step 1.
        """
        self._control = control
        with preserve_rng_state(torch.device("cpu")):
            seed_everything(self.seed)
            read = self._look_ahead() if self.iterable else digest_of([self.dataset[self._order()[0]]])
        if not self.iterable:
            if self.order is not None and not self.sharded:
                self._compare_orders(control)
            self._lengths = of_all(control, len(self._order()), "the data sets' lengths")
            if self.sharded:
                self._check_length()
            else:
                refuse_odd_lengths(self._lengths, self.refuse)
        digests = control.all_gather_bytes(read, "a digest of the first samples")
        self.odd_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        return self.odd_ranks

    def _compare_orders(self, control: Control) -> None:
        """Refuse a sampler that gives ranks other orders: each takes its share of one and the same."""
        digests = control.all_gather_bytes(digest_of([torch.tensor(self._order())]), "the sampler's order")
        odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if odd is not None:
            raise self.refuse(
                f"loader.sampler gives rank {odd} other indices than rank 0",
                "have it draw from torch, NumPy or random, which are seeded alike on all ranks",
            )

    def _micro_batches(self, used: int) -> int:
        """How many an epoch has after so many samples."""
        whole, rest = divmod(self._nominal - used, self.batch_size * self.ranks)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def _nominal(self) -> int:
        """Samples of an epoch; of a sharded one, as if all ranks had as many as the one that counts."""
        if not self.sharded:
            return self._lengths[0]
        return (min if self.drop_last else max)(self._lengths) * self.ranks

    def steps_per_epoch(self, accumulate: int) -> int | None:
        """Optimizer steps in an epoch, whose last one may have fewer micro-batches; None: nobody knows."""
        return None if self.iterable else -(-self._micro_batches(0) // accumulate)

    def steps_left(self, accumulate: int, epochs: int) -> int | None:
        """Optimizer steps from here to the end of so many epochs, the current one included."""
        per_epoch = self.steps_per_epoch(accumulate)
        if per_epoch is None or epochs <= 0:
            return None if per_epoch is None else 0
        return -(-self._micro_batches(self._used) // accumulate) + (epochs - 1) * per_epoch

    def first_batch(self, most: int | None = None) -> Any:
        """A batch of the coming epoch, of at most so many samples, that leaves no trace: for shapes alone.

        Its samples are read once, and those of an iterable dataset are handed out again in the first epoch.
        """
        if self._first is None and self.iterable:
            self._look_ahead()
        elif self._first is None:
            indices = self._share(self._order(), 0)
            self._first = [self.dataset[index] for index in indices], indices
        assert self._first is not None
        samples, numbers = self._first
        return self._whole(collate(samples[:most], numbers[:most], self.collate))

    def _look_ahead(self) -> bytes:
        """Read an iterable dataset's first samples; gives their digest."""
        rank, ranks = (0, 1) if self.sharded else (self.rank, self.ranks)
        digest, ahead = self._stream.look_ahead(self.batch_size * ranks)
        mine = ahead[rank::ranks]
        if not mine:
            raise self.refuse(f"the dataset yields too few samples for {self.ranks} ranks", None)
        self._first = mine, list(range(rank, rank + ranks * len(mine), ranks))
        return digest

    def start_epoch(self) -> None:
        """Go to the start of an epoch: a begun one is left where it is."""
        if self._used:
            self.epoch, self._used = self.epoch + 1, 0

    def steps(self, accumulate: int, *, epochs: int | None = None) -> Iterator[StepBatches]:
        """Optimizer steps of `accumulate` micro-batches, from where the feed is.

        A step never reaches over an epoch's end. A step's micro-batches have to be used up before the next.
        It stops at the end of so many epochs, the current one included; None: never.
        """
        while epochs is None or epochs > 0:
            yield from self._epoch_steps(accumulate)
            if self._used == 0:
                if self._stream.one_shot and self.epoch:
                    raise self.refuse(
                        f"the data set is its own iterator and has nothing left for epoch {self.epoch + 1}: "
                        "it can be read only once",
                        "train for fewer steps or one epoch, or have its __iter__ begin again",
                    )
                problem = f"the dataset yields too few samples for one step of {self.ranks} ranks"
                raise self.refuse(problem, None)
            self.epoch, self._used = self.epoch + 1, 0
            epochs = None if epochs is None else epochs - 1

    def _epoch_steps(self, accumulate: int) -> Iterator[StepBatches]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if not self.iterable:
            self._first = None  # not needed any more
            return self._map_steps(accumulate)
        return self._sharded_steps(accumulate) if self.sharded else self._iterable_steps(accumulate)

    def _whole(self, content: Any) -> Any:
        """A batch, unless its samples could not be put into one."""
        if isinstance(content, BatchError):
            raise self.refuse(content.problem, content.allowed)
        return content

    # Map-style: the whole epoch is arithmetic, so a step's total is known before a sample is loaded.

    def _map_steps(self, accumulate: int) -> Iterator[StepBatches]:
        order, world = self._order(), self.batch_size * self.ranks
        starts = [self._used + micro * world for micro in range(self._micro_batches(self._used))]
        shares = [self._share(order, start) for start in starts]
        loaded = iter(
            DataLoader(
                Batches(self.dataset, self._loading_seed() if self._workers else None, self.collate),
                sampler=[mine or self._spare(order, at) for mine, at in zip(shares, starts, strict=True)],
                generator=self._loading_generator(),
                **self._loading,
            )
        )
        for first in range(0, len(shares), accumulate):
            group = shares[first : first + accumulate]
            end = min(starts[first] + len(group) * world, self._nominal)
            total = sum(map(self._total, starts[first : first + accumulate]))
            yield StepBatches(self._take(loaded, group, end), len(group), total)

    def _take(self, loaded: Iterator[Any], shares: list[list[int]], end: int) -> Iterator[MicroBatch]:
        for share in shares:
            content = self._whole(next(loaded))
            self._used = min(self._used + self.batch_size * self.ranks, end)
            yield MicroBatch(content, len(share))

    def _order(self) -> list[int]:
        if self.order is not None:
            if self._ordered is None or self._ordered[0] != self.epoch:
                with preserve_rng_state(torch.device("cpu")):
                    seed_host(self.seed + self.epoch)
                    self._ordered = self.epoch, self.order(self.epoch)
                held = self._lengths[self.rank] if self._lengths else len(self._ordered[1])
                if len(self._ordered[1]) != held:
                    problem = (
                        f"loader.sampler gives {len(self._ordered[1])} indices in epoch {self.epoch + 1}"
                    )
                    raise self.refuse(f"{problem}, and gave {held} in the one before", "give equally many")
            return self._ordered[1]
        size = len(self.dataset)
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(size, generator=generator).tolist()

    def _share(self, order: list[int], start: int) -> list[int]:
        if self.sharded:
            return order[start // self.ranks : start // self.ranks + self.batch_size]
        return order[start : start + self.batch_size * self.ranks][self.rank :: self.ranks]

    def _total(self, start: int) -> int:
        """Samples of all ranks in the micro-batch that begins there."""
        if not self.sharded:
            return min(self.batch_size * self.ranks, self._lengths[0] - start)
        own = start // self.ranks
        return sum(min(self.batch_size, max(0, length - own)) for length in self._lengths)

    def _spare(self, order: list[int], start: int) -> list[int]:
        """What a rank without a sample computes along on: of its first batch in the epoch as many samples as
        the largest share of the micro-batch has; where data is not sharded that is 1.
        """
        largest = min(self.batch_size, max(self._lengths) - start // self.ranks) if self.sharded else 1
        return self._share(order, 0)[:largest]

    def _check_length(self) -> None:
        size, world, problem = self._nominal, self.batch_size * self.ranks, None
        if self.sharded and not min(self._lengths):
            problem = f"rank {self._lengths.index(0)}'s part of the data has no sample"
        elif self.drop_last and size < world:
            problem = (
                f"{size} samples are fewer than one step needs: {world} (batch_size {self.batch_size} x "
                f"{self.ranks} ranks), and drop_last leaves out what is less"
            )
        elif size < self.ranks:
            problem = f"{size} samples are too few for {self.ranks} ranks: each needs at least one"
        if problem is not None:
            raise self.refuse(problem, None)

    # Iterable: every rank reads the whole stream and takes its share, so all know when it ends.

    def _iterable_steps(self, accumulate: int) -> Iterator[StepBatches]:
        loaded = self._compared(self._load(self.rank, self.ranks, self._used))
        while read := list(islice(loaded, accumulate)):
            group = [MicroBatch(self._whole(content), samples) for content, samples, _ in read]
            total = sum(of_all_ranks for *_, of_all_ranks in read)
            self._used += total
            yield StepBatches(group, len(group), total)

    # Iterable and sharded: no rank knows how many samples another one has left, so they exchange it.

    def _sharded_steps(self, accumulate: int) -> Iterator[StepBatches]:
        loaded = self._compared(self._load(0, 1, self._used // self.ranks))
        while True:
            mine = [(self._whole(content), samples) for content, samples, _ in islice(loaded, accumulate)]
            mine += [(None, 0)] * (accumulate - len(mine))
            counts = [[samples for _, samples in mine]]  # of every rank
            if self._control is not None:
                gathered = self._control.all_gather(list(map(float, counts[0])), "samples of every rank")
                counts = [[int(one) for one in row] for row in gathered.tolist()]
            totals = [sum(column) for column in zip(*counts, strict=True)]
            if self.drop_last:
                totals = [total if total == self.batch_size * self.ranks else 0 for total in totals]
            count = sum(1 for total in totals if total)
            if not count:
                return
            group = [
                MicroBatch(self.first_batch(max(column)) if content is None else content, samples)
                for (content, samples), column in zip(mine[:count], zip(*counts, strict=True), strict=False)
            ]
            self._used += count * self.batch_size * self.ranks
            yield StepBatches(group, count, sum(totals))

    def _load(self, rank: int, ranks: int, skip: int) -> Iterator[Any]:
        """A rank's share of the epoch from a sample on, as `_Shares` gives it."""
        if self._workers:
            samples, done = self._stream.in_processes(), 0
        else:
            samples, done = self._stream.resume(self.epoch, skip)
        drop_last = self.drop_last and not self.sharded
        shares = _Shares(samples, self.batch_size, rank, ranks, skip, done, drop_last, self.collate)
        return iter(DataLoader(shares, generator=self._loading_generator(), **self._loading))

    def _compared(self, loaded: Iterator[Any]) -> Iterator[Any]:
        """The same; warns if loading processes do not begin where the data set was read ahead.

        A data set that reads one source begins after it. One that draws at random gives other samples, too,
        so that only where the first batch differs is the data set read a second time: a sample of it, under
        the seeds of the first time.
        """
        ahead = None if self.epoch or self._used or self._warned or self._stream.one_shot else self._first
        first = next(loaded, None) if self._workers and ahead is not None else None
        if first is None or ahead is None:
            return loaded
        if digest_of([first[0]]) != digest_of([collate(*ahead, self.collate)]) and self._reads_one_source():
            self._warned = True
            self.on_samples_lost(
                "read again, it begins with other samples; if it reads one source, the first ones are lost\n"
                "  write loader: {workers: 0} then; if it draws at random, use torch, NumPy or random, "
                "which are seeded"
            )
        return chain([first], loaded)

    def _reads_one_source(self) -> bool:
        """Whether an iterable dataset read again begins with another sample, under equal generators."""
        with preserve_rng_state(torch.device("cpu")):
            seed_everything(self.seed)
            again = digest_of(islice(iter(self.dataset), 1))
        return again != self._stream.first_digest

    def _loading_generator(self) -> torch.Generator:
        """Seeds the loading processes, so that iterating draws nothing from torch's own generator."""
        return torch.Generator().manual_seed(self._loading_seed())

    def _loading_seed(self) -> int:
        return (self.seed + self.epoch) * self.ranks + self.rank

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"epoch": self.epoch, "samples": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; the position is that of all ranks, however many there are."""
        self.epoch, self._used = state["epoch"], state["samples"]


class _Stream:
    """An iterable dataset's samples, of which none is lost by reading ahead.

    `iter` is called once in an epoch at most. A dataset may be its own iterator, or read from one source each
    time: then what a second iterator gives begins where the first one was left.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        self.first_digest = b""  # of the first sample that was read ahead
        self._epoch: int | None = None  # which is read; None: none yet
        self._given = 0  # samples of it

    @property
    def one_shot(self) -> bool:
        """Whether the dataset is its own iterator."""
        return self._iterator is self._dataset

    def look_ahead(self, count: int) -> tuple[bytes, list[Any]]:
        """Read the first samples, which are handed out again if no epoch has begun; and their digest."""
        iterator = iter(self._dataset)
        ahead = list(islice(iterator, count))
        self.first_digest = digest_of(ahead[:1])
        if self._epoch is None:
            self._iterator, self._ahead = iterator, deque(ahead)
        return digest_of(ahead), ahead

    def resume(self, epoch: int, skip: int) -> tuple[Iterator[Any], int]:
        """The samples of an epoch in this process, of which the first `skip` are not wanted; and how many of
        these are not in it any more.
        """
        again = self._epoch not in (None, epoch) or self._given > skip
        if self._epoch is None and epoch and hasattr(self._dataset, "set_epoch"):
            again = True  # what was read ahead was of another epoch
        if again or self._iterator is None:
            self._iterator, self._ahead, self._given = iter(self._dataset), deque(), 0
        self._epoch = epoch
        return self._read(self._iterator), self._given

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while self._ahead:
            self._given += 1
            yield self._ahead.popleft()
        for sample in _rest_of(iterator):
            self._given += 1
            yield sample

    def in_processes(self) -> Iterable[Any]:
        """The samples of an epoch in loading processes, each of which reads all of them."""
        return _FromHere(self._ahead, self._iterator) if self.one_shot else self._dataset


def _rest_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """What is left; `iter` is not called again, which may begin again."""
    with suppress(StopIteration):
        while True:
            yield next(iterator)


class _FromHere:
    """What was read ahead of an iterator, and what comes after it; in a process of its own."""

    def __init__(self, ahead: Iterable[Any], iterator: Any) -> None:
        self._ahead, self._iterator = list(ahead), iterator

    def __iter__(self) -> Iterator[Any]:
        return chain(self._ahead, _rest_of(self._iterator))


class Batches(Dataset[Any]):
    """Batches of a map-style dataset, by their lists of indices; a `BatchError` where samples do not fit.

    What a loading process draws for a batch depends on the batch alone: not on how many processes there are,
    nor on where in the epoch they started. Without a seed it is loaded in the training process.
    """

    def __init__(self, dataset: Any, seed: int | None, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        # A class derived from it may read its samples in another way.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __getitem__(self, indices: list[int]) -> Any:
        if self.seed is not None:
            seed_everything((self.seed * len(self.dataset) + indices[0]) % 2**63)
        if self._tensors is not None:  # what `default_collate` makes, without an object for each sample
            at = torch.tensor(indices)
            return [tensor[at].contiguous() for tensor in self._tensors]
        if hasattr(self.dataset, "__getitems__"):
            return collate(list(self.dataset.__getitems__(indices)), indices, self.collate)
        return collate([self.dataset[index] for index in indices], indices, self.collate)


@dataclass(eq=False)
class _Shares(IterableDataset[tuple[Any, int, int]]):
    """One rank's share of a stream of samples, as (collated batch, its samples, samples of all ranks).

    A rank that has none left gets a batch of 0 samples that count.
    """

    samples: Iterable[Any]
    batch_size: int
    rank: int  # it takes every ranks-th sample from this one on
    ranks: int
    skip: int  # leave out so many samples of the epoch
    done: int  # so many of it have been read already
    drop_last: bool
    collate: Collate | None

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # Batches are divided among the loading processes here. A dataset that divides its samples among them,
        # too, as torch's documentation shows, would lose most of them: it is to see one process.
        if worker is not None:
            loading_process._worker_info = None
        samples, world = islice(self.samples, self.skip - self.done, None), self.batch_size * self.ranks
        at = self.skip
        for micro in count():
            items = list(islice(samples, world))
            if not items or (len(items) < self.ranks and micro == self.skip == 0):
                return  # the end, or too few for every rank to have had a batch at all
            if len(items) < world and self.drop_last:
                return
            # The loader takes batches from its processes in turn: every workers-th is this one's.
            if micro % workers == mine:
                share = items[self.rank :: self.ranks]
                numbers = range(at + self.rank, at + len(items), self.ranks)
                if not share:  # a rank without a sample computes along on another one's
                    numbers = range(at, at + 1)
                yield collate(share or items[:1], numbers, self.collate), len(share), len(items)
            at += len(items)


def loading(workers: int) -> dict[str, Any]:
    """Settings of a DataLoader whose dataset makes batches itself, in so many processes."""
    return {
        "batch_size": None,
        "collate_fn": _as_it_is,
        "num_workers": workers,
        "worker_init_fn": _tie_to_rank,
    }


def _as_it_is(batch: Any) -> Any:
    return batch


def _tie_to_rank(worker: int) -> None:
    """Have a loading process end with its rank; by itself it would notice seconds later."""
    die_with_parent()


def of_all(control: Control, number: int, what: str) -> list[int]:
    """Every rank's number; `what` is for diagnoses."""
    return [int(one) for one in control.all_gather([float(number)], what)[:, 0].tolist()]


def refuse_odd_lengths(lengths: Sequence[int], refuse: Refuse) -> None:
    """Refuse data that ranks share and that is not equally long on all of them."""
    odd = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
    if odd is not None:
        raise refuse(
            f"the data set has {lengths[0]} samples on rank 0 and {lengths[odd]} on rank {odd}",
            "give every rank the same data set, or write loader: {sharded: true} if it shards itself",
        )
