"""The order in which samples reach the ranks: each once per epoch, known in advance, resumable.

An epoch's order is `torch.randperm(samples, generator=seeded with seed + epoch)`, or the data's own order
without `shuffle`. A global micro-batch is the next `batch_size x ranks` of it, and rank r takes every
ranks-th from the r-th on: what torch's `DistributedSampler` does, except that nothing is repeated to fill the
last micro-batch, which is smaller instead and counts for what it holds.

A data set that shards itself by rank (`loader: {sharded: true}`) is taken as it is: a global micro-batch is
the next `batch_size` of each rank's own samples, and a rank that has none left computes along.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loading_process

from ddprun.engine.samples import BatchError, collate, digest_of
from ddprun.engine.seeding import generators_kept, seed_everything
from ddprun.host.processes import die_with_parent
from ddprun_hooks.comm.control import Control


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one rank computes in one forward and backward."""

    content: Any
    """Collated samples: tensors with a leading batch dimension."""

    samples: int
    """Samples that count. 0: this rank has none left and computes along on a batch that counts nothing."""


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one rank computes in one optimizer step."""

    micro_batches: Iterable[MicroBatch]
    count: int
    """Micro-batches in the step."""

    total: int
    """Samples of all ranks and micro-batches together."""


Refuse = Callable[[str, str | None], Exception]
"""Makes an error of what is wrong and what is allowed."""


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset is a row of samples to walk along, rather than one to pick from by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _refused(problem: str, allowed: str | None) -> Exception:
    return ValueError(problem if allowed is None else f"{problem}; {allowed}")


class Feed:
    """An endless row of optimizer steps, epoch after epoch, that knows where it is.

    Args:
        dataset: map-style, or iterable; the same on every rank, unless it is `sharded`.
        batch_size: samples per rank and micro-batch.
        shuffle: draw a new order in each epoch (map-style only).
        drop_last: leave out an epoch's last, smaller micro-batch.
        workers: processes that load.
        seed, rank, ranks: as in the module's text.
        pin: put batches into page-locked memory, for a GPU.
        sharded: the dataset gives each rank samples of its own.
        refuse: makes the error for samples that are no batch.
        tell: told once if samples that were read before step 1 are lost.

    Raises:
        ValueError: too few samples for one step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        workers: int,
        seed: int,
        rank: int,
        ranks: int,
        pin: bool,
        sharded: bool = False,
        refuse: Refuse = _refused,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.dataset = dataset
        self.iterable = is_iterable(dataset)
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed
        self.sharded, self.refuse = sharded, refuse
        self._loading: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin,
            "worker_init_fn": tie_to_rank,
        }
        self.epoch = 0
        """From 0; an epoch that is used up is left when the next step is asked for."""

        self.tell = tell
        self._told_of_loss = False
        self.odd_ranks: list[int] = []
        """The ranks that read other first samples than rank 0, once they have met."""

        self._used = 0  # samples of the epoch, of all ranks together, as if every rank's batches were full
        self._first: tuple[list[Any], list[int]] | None = None  # this rank's first samples, and their numbers
        self._stream = _Stream(dataset)
        self._control: Control | None = None
        self._lengths = [] if self.iterable else [len(dataset)] * ranks  # samples of each rank's dataset
        if self.iterable and shuffle:
            raise ValueError("an iterable dataset has an order of its own: loader.shuffle must be false")
        if not self.iterable:
            self._check_length()

    def meet(self, control: Control) -> list[int]:
        """Compare with the other ranks what the dataset gives; called by all ranks together before step 1.

        Under equal random generators every rank reads the same samples, or its first ones if it is `sharded`.

        Returns:
            The ranks that read other samples than rank 0.

        Raises:
            Exception: as `refuse` makes it: map-style datasets of different lengths that are not `sharded`.
        """
        self._control = control
        with generators_kept(torch.device("cpu")):
            seed_everything(self.seed)
            length = -1 if self.iterable else len(self.dataset)
            read = self._look_ahead() if self.iterable else self._at(self._order()[0])
        if not self.iterable:
            lengths = control.all_gather([float(length)], "the data sets' lengths")[:, 0].tolist()
            self._lengths = [int(one) for one in lengths]
            self._refuse_lengths()
        digests = control.all_gather_bytes(read, "a digest of the first samples")
        self.odd_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        return self.odd_ranks

    def _at(self, index: int) -> bytes:
        return digest_of([self.dataset[index]])

    def _refuse_lengths(self) -> None:
        if self.sharded:
            try:
                self._check_length()
            except ValueError as error:
                raise self.refuse(str(error), None) from None
            return
        odd = next((rank for rank, one in enumerate(self._lengths) if one != self._lengths[0]), None)
        if odd is not None:
            raise self.refuse(
                f"the data set has {self._lengths[0]} samples on rank 0 and {self._lengths[odd]} on rank "
                f"{odd}",
                "give every rank the same data set, or write loader: {sharded: true} if it shards itself",
            )

    @property
    def micro_batches_per_epoch(self) -> int | None:
        """None for an iterable dataset, whose length nobody knows."""
        if self.iterable:
            return None
        return self._micro_batches(0)

    def _micro_batches(self, used: int) -> int:
        """How many an epoch has from a place on."""
        whole, rest = divmod(self._nominal - used, self.batch_size * self.ranks)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def _nominal(self) -> int:
        """Samples of an epoch; of a sharded one, as if all ranks had as many as the one that counts."""
        if not self.sharded:
            return self._lengths[0]
        return (min if self.drop_last else max)(self._lengths) * self.ranks

    def steps_per_epoch(self, accumulate: int) -> int | None:
        """Optimizer steps in an epoch; an epoch's last step may have fewer micro-batches."""
        micro = self.micro_batches_per_epoch
        return None if micro is None else -(-micro // accumulate)

    def steps_left(self, accumulate: int, epochs: int) -> int | None:
        """Optimizer steps from here to the end of so many epochs, the current one included."""
        if self.iterable:
            return None
        if epochs <= 0:
            return 0
        later = self.steps_per_epoch(accumulate)
        assert later is not None
        return -(-self._micro_batches(self._used) // accumulate) + max(0, epochs - 1) * later

    def first_batch(self, most: int | None = None) -> Any:
        """A batch of the coming epoch that leaves no trace: for shapes, not for learning.

        Its samples are read once, and those of an iterable dataset are handed out again in the first epoch.

        Args:
            most: samples in it; None: a whole batch.
        """
        if self._first is None and self.iterable:
            self._look_ahead()
        elif self._first is None:
            indices = self._share(self._order(), 0)
            self._first = [self.dataset[index] for index in indices], indices
        assert self._first is not None
        samples, numbers = self._first
        return self._whole(collate(samples[:most], numbers[:most]))

    def _look_ahead(self) -> bytes:
        """Read an iterable dataset's first samples; gives their digest."""
        part = 1 if self.sharded else self.ranks
        place = 0 if self.sharded else self.rank
        digest, ahead = self._stream.look_ahead(self.batch_size * part)
        mine = ahead[place::part]
        if not mine:
            raise self.refuse(f"the dataset yields too few samples for {self.ranks} ranks", None)
        self._first = mine, list(range(place, place + part * len(mine), part))
        return digest

    def start_epoch(self) -> None:
        """Go to the start of an epoch: a begun one is left where it is."""
        if self._used:
            self.epoch, self._used = self.epoch + 1, 0

    def steps(self, accumulate: int, *, epochs: int | None = None) -> Iterator[StepBatches]:
        """Optimizer steps of `accumulate` micro-batches, from where the feed is.

        A step never reaches over an epoch's end. A step's micro-batches have to be used up before the next.

        Args:
            accumulate: micro-batches per step.
            epochs: stop at the end of so many epochs, the current one included; None goes on for ever.
        """
        while epochs is None or epochs > 0:
            yield from self._epoch_steps(accumulate)
            if self._used == 0:
                if self._stream.one_shot and self.epoch:
                    raise self.refuse(
                        f"the data set is its own iterator and has nothing left for epoch {self.epoch + 1}: "
                        "it can be read only once",
                        "train for fewer steps or one epoch, or have its __iter__ start anew",
                    )
                raise ValueError(f"the dataset yields too few samples for one step of {self.ranks} ranks")
            self.epoch, self._used = self.epoch + 1, 0
            epochs = None if epochs is None else epochs - 1

    def _epoch_steps(self, accumulate: int) -> Iterator[StepBatches]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if not self.iterable:
            self._first = None  # not needed any more
            return self._row_map(accumulate)
        return self._row_sharded(accumulate) if self.sharded else self._row_iterable(accumulate)

    def _whole(self, content: Any) -> Any:
        """A batch that is one."""
        if isinstance(content, BatchError):
            raise self.refuse(content.problem, content.allowed)
        return content

    # Map-style: the whole epoch is arithmetic, so a step's total is known before a sample is loaded.

    def _row_map(self, accumulate: int) -> Iterator[StepBatches]:
        order, world = self._order(), self.batch_size * self.ranks
        starts = [self._used + micro * world for micro in range(self._micro_batches(self._used))]
        shares = [self._share(order, start) for start in starts]
        totals = [self._total(start) for start in starts]
        seed = self._loading_seed() if self._loading["num_workers"] else None
        loader = DataLoader(
            Batches(self.dataset, seed),
            batch_size=None,
            sampler=[share or self._spare(order, start) for share, start in zip(shares, starts, strict=True)],
            collate_fn=as_it_is,
            generator=self._loading_generator(),
            **self._loading,
        )
        loaded = iter(loader)
        for first in range(0, len(shares), accumulate):
            group = shares[first : first + accumulate]
            end = min(starts[first] + len(group) * world, self._nominal)
            yield StepBatches(
                self._taken(loaded, group, end), len(group), sum(totals[first : first + accumulate])
            )

    def _taken(self, loaded: Iterator[Any], shares: list[list[int]], end: int) -> Iterator[MicroBatch]:
        for share in shares:
            content = self._whole(next(loaded))
            self._used = min(self._used + self.batch_size * self.ranks, end)
            yield MicroBatch(content, len(share))

    def _order(self) -> list[int]:
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
        """Samples of all ranks in the micro-batch at a place."""
        if not self.sharded:
            return min(self.batch_size * self.ranks, self._lengths[0] - start)
        own = start // self.ranks
        return sum(min(self.batch_size, max(0, length - own)) for length in self._lengths)

    def _spare(self, order: list[int], start: int) -> list[int]:
        """What a rank without a sample computes along on: of its own first batch of the epoch as many as the
        largest share of the micro-batch at a place has.
        """
        largest = 1  # where not every rank has a sample
        if self.sharded:
            largest = min(self.batch_size, max(self._lengths) - start // self.ranks)
        return self._share(order, 0)[:largest]

    def _check_length(self) -> None:
        size, world = self._nominal, self.batch_size * self.ranks
        least = min(self._lengths)
        if self.sharded and not least:
            raise ValueError(f"rank {self._lengths.index(0)}'s part of the data has no sample")
        if self.drop_last and size < world:
            raise ValueError(
                f"{size} samples are fewer than one step needs: {world} (batch_size {self.batch_size} x "
                f"{self.ranks} ranks), and drop_last leaves out what is less"
            )
        if size < self.ranks:
            raise ValueError(f"{size} samples are too few for {self.ranks} ranks: each needs at least one")

    # Iterable: every rank reads the whole row and takes its share, so all know alike when it ends.

    def _row_iterable(self, accumulate: int) -> Iterator[StepBatches]:
        loaded = self._compared(self._load(self.rank, self.ranks, self._used))
        while True:
            group, total = [], 0
            for content, samples, world_samples in islice(loaded, accumulate):
                group.append(MicroBatch(self._whole(content), samples))
                total += world_samples
            if not group:
                return
            self._used += total
            yield StepBatches(group, len(group), total)

    # Iterable and sharded: nobody knows how many samples another rank has left, so ranks tell each other.

    def _row_sharded(self, accumulate: int) -> Iterator[StepBatches]:
        loaded = self._compared(self._load(0, 1, self._used // self.ranks))
        while True:
            mine = [(self._whole(content), samples) for content, samples, _ in islice(loaded, accumulate)]
            mine += [(None, 0)] * (accumulate - len(mine))
            counts = self._of_all([samples for _, samples in mine])
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

    def _of_all(self, samples: list[int]) -> list[list[int]]:
        """The numbers of all ranks."""
        if self._control is None:
            return [samples]
        told = self._control.all_gather([float(one) for one in samples], "samples of every rank")
        return [[int(one) for one in row] for row in told.tolist()]

    def _load(self, rank: int, ranks: int, skip: int) -> Iterator[Any]:
        """A rank's share of the epoch from a sample on, as `_Shares` gives it."""
        row: Iterable[Any]
        if self._loading["num_workers"]:
            row, done = self._stream.in_processes(), 0
        else:
            row, done = self._stream.go_on(self.epoch, skip)
        loader = DataLoader(
            _Shares(row, self.batch_size, rank, ranks, skip, done, self.drop_last and not self.sharded),
            batch_size=None,
            collate_fn=as_it_is,
            generator=self._loading_generator(),
            **self._loading,
        )
        return iter(loader)

    def _compared(self, loaded: Iterator[Any]) -> Iterator[Any]:
        """The same; says so if loading processes do not begin where the data set was read ahead.

        A data set that reads one source begins after it. One that draws at random gives other samples, too,
        so that only where the first batch differs is the data set read a second time: a sample of it, under
        the seeds of the first look.
        """
        if not self._loading["num_workers"] or self._first is None or self.epoch or self._used:
            return loaded
        if self._told_of_loss or self._stream.one_shot:
            return loaded
        first = next(loaded, None)
        if first is None:
            return loaded
        if digest_of([first[0]]) != digest_of([collate(*self._first)]) and self._reads_one_source():
            self._told_of_loss = True
            self.tell(
                "read again, it begins with other samples; if it reads one source, the first ones are lost\n"
                "  write loader: {workers: 0} then; if it draws at random, use seeded torch, NumPy or random"
            )
        return chain([first], loaded)

    def _reads_one_source(self) -> bool:
        """Whether a second look at an iterable dataset shows another first sample, under equal generators."""
        with generators_kept(torch.device("cpu")):
            seed_everything(self.seed)
            again = digest_of(islice(iter(self.dataset), 1))
        return again != self._stream.first_digest

    def _loading_generator(self) -> torch.Generator:
        """Seeds the loading processes, so that iterating draws nothing from torch's own generator."""
        return torch.Generator().manual_seed(self._loading_seed())

    def _loading_seed(self) -> int:
        return (self.seed + self.epoch) * self.ranks + self.rank

    def state_dict(self) -> dict[str, Any]:
        """Where in the data the feed is."""
        return {"epoch": self.epoch, "samples": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; the place is global, so another number of ranks can go on."""
        self.epoch, self._used = state["epoch"], state["samples"]


class _Stream:
    """An iterable dataset's samples, none of which is lost to a look ahead.

    `iter` is called once in an epoch at most. A dataset may be its own iterator, or read from one source each
    time: then what a second iterator gives begins where the first one was left.

    Args:
        dataset: iterable.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        self.first_digest = b""  # of the first sample that was read ahead
        self._epoch: int | None = None  # which is read; None: nothing but a look ahead
        self._given = 0  # samples of it

    @property
    def one_shot(self) -> bool:
        """Whether the dataset is its own iterator."""
        return self._iterator is self._dataset

    def look_ahead(self, count: int) -> tuple[bytes, list[Any]]:
        """Read the first samples, which are handed out again if no epoch has begun.

        Args:
            count: how many.

        Returns:
            Their digest, and they themselves.
        """
        iterator = iter(self._dataset)
        ahead = list(islice(iterator, count))
        self.first_digest = digest_of(ahead[:1])
        if self._epoch is None:
            self._iterator, self._ahead = iterator, deque(ahead)
        return digest_of(ahead), ahead

    def go_on(self, epoch: int, wanted: int) -> tuple[Iterator[Any], int]:
        """The samples of an epoch in this process, and how many of it are behind.

        Args:
            epoch: from 0.
            wanted: samples of the epoch that are to be left out.
        """
        anew = self._epoch not in (None, epoch) or self._given > wanted
        if self._epoch is None and epoch and hasattr(self._dataset, "set_epoch"):
            anew = True  # what was read ahead was of another epoch
        if anew or self._iterator is None:
            self._iterator, self._ahead, self._given = iter(self._dataset), deque(), 0
        self._epoch = epoch
        return self._read(), self._given

    def _read(self) -> Iterator[Any]:
        while self._ahead:
            self._given += 1
            yield self._ahead.popleft()
        assert self._iterator is not None
        for sample in _rest_of(self._iterator):
            self._given += 1
            yield sample

    def in_processes(self) -> Iterable[Any]:
        """The samples of an epoch in loading processes, each of which reads all of them."""
        return _FromHere(self._ahead, self._iterator) if self.one_shot else self._dataset


def _rest_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """What is left; `iter` is not called again, which may start anew."""
    while True:
        try:
            sample = next(iterator)
        except StopIteration:
            return
        yield sample


class _FromHere:
    """What was read ahead of an iterator, and what comes after it; in a process of its own."""

    def __init__(self, ahead: Iterable[Any], iterator: Any) -> None:
        self._ahead, self._iterator = list(ahead), iterator

    def __iter__(self) -> Iterator[Any]:
        return chain(self._ahead, _rest_of(self._iterator))


class Batches(Dataset[Any]):
    """Batches of a map-style dataset, by their lists of indices; a `BatchError` where samples are no batch.

    What a loading process draws for a batch depends on the batch alone: not on how many processes there are,
    nor on where in the epoch they started.

    Args:
        dataset: the samples.
        seed: of what loading processes draw; None: it is loaded in the training process.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, indices: list[int]) -> Any:
        if self.seed is not None:
            seed_everything((self.seed * len(self.dataset) + indices[0]) % 2**63)
        if hasattr(self.dataset, "__getitems__"):
            return collate(list(self.dataset.__getitems__(indices)), indices)
        return collate([self.dataset[index] for index in indices], indices)


class _Shares(IterableDataset[tuple[Any, int, int]]):
    """One rank's share of a row of samples, as (collated batch, its samples, samples of all ranks).

    A rank that has none left gets a batch of 0 samples that count.

    Args:
        row: the samples.
        batch_size: samples per rank.
        rank, ranks: it takes every ranks-th sample.
        skip: leave out so many samples of the epoch.
        done: so many of it are behind already.
        drop_last: leave out the last, smaller batch.
    """

    def __init__(
        self,
        row: Iterable[Any],
        batch_size: int,
        rank: int,
        ranks: int,
        skip: int,
        done: int,
        drop_last: bool,
    ) -> None:
        self.row = row
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        self.skip, self.done, self.drop_last = skip, done, drop_last

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # Batches are divided among the loading processes here. A dataset that divides its samples among them,
        # too, as torch's documentation shows, would lose most of them: it is to see one process.
        if worker is not None:
            loading_process._worker_info = None
        row, world = islice(self.row, self.skip - self.done, None), self.batch_size * self.ranks
        at = self.skip
        for micro in range(2**62):
            items = list(islice(row, world))
            if not items or (len(items) < self.ranks and micro == self.skip == 0):
                return  # the end, or too few for every rank to have had a batch at all
            if len(items) < world and self.drop_last:
                return
            # The loader takes batches from its processes in turn: every workers-th is this one's.
            if micro % workers == mine:
                share = items[self.rank :: self.ranks]
                numbers = range(at + self.rank, at + len(items), self.ranks)
                # A rank without a sample computes along on another one's, as not every rank has one.
                content = collate(share, numbers) if share else collate(items[:1], [at])
                yield content, len(share), len(items)
            at += len(items)


def as_it_is(batch: Any) -> Any:
    """For a loader whose dataset makes batches."""
    return batch


def tie_to_rank(worker: int) -> None:
    """Have a loading process end with its rank; by itself it would notice seconds later."""
    die_with_parent()
