"""Iterable datasets: read ahead without losing a sample, and divided among ranks and loading processes."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loading_process

from ddprun.engine.samples import CollateFunction, SampleShard, collate
from ddprun.engine.seeding import SeparateRng, seed_for_batch


class PeekableStream:
    """An iterable dataset's samples, of which none is lost by reading ahead.

    `iter` is called once in an epoch at most. A dataset may be its own iterator, or read from one source each
    time: then what a second iterator gives begins where the first one was left.
    """

    def __init__(self, dataset: Any, rng: SeparateRng) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._peeked: deque[Any] = deque()
        self.rng = rng  # what it draws from in the epoch that is read
        self._epoch: int | None = None  # which is read, or was read ahead; None: none yet
        self._yielded_samples = 0  # samples of it

    @property
    def one_shot(self) -> bool:
        """Whether the dataset is its own iterator."""
        return self._iterator is self._dataset

    def peek(self, epoch: int, count: int, rng: SeparateRng, then: SeparateRng) -> list[Any]:
        """Read the first samples, before all else; they are handed out again when this epoch begins. They
        draw from `rng`, and what is read after them draws from `then`.
        """
        with rng():
            self._iterator = iter(self._dataset)
            ahead = list(islice(self._iterator, count))
        self._peeked, self._epoch, self.rng = deque(ahead), epoch, then
        return ahead

    def iterate_epoch_from(self, epoch: int, skip: int, rng: SeparateRng) -> tuple[Iterator[Any], int]:
        """The samples of an epoch in this process, of which the first `skip` are not wanted; and how many of
        these are not in it any more. If it is begun anew, it draws from `rng`.
        """
        if self._iterator is None or self._epoch != epoch or self._yielded_samples > skip:
            self.rng, self._epoch, self._peeked, self._yielded_samples = rng, epoch, deque(), 0
            with rng():
                self._iterator = iter(self._dataset)
        return self._iterate_samples(self._iterator), self._yielded_samples

    def _iterate_samples(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while self._peeked:
            self._yielded_samples += 1
            yield self._peeked.popleft()
        with suppress(StopIteration):
            while True:  # `iter` is not called again, which may begin again
                sample = next(iterator)
                self._yielded_samples += 1
                yield sample


@dataclass(eq=False)
class RankShareDataset(IterableDataset[tuple[list[tuple[Any, int]], int]]):
    """A rank's share of a stream, by micro-batches: its batches, each with its samples (0 when used up), and
    the samples of all ranks.
    """

    samples: Iterable[Any]
    rng: SeparateRng  # for what `samples` draws
    seed: int  # with the batch's position, for what `collate` draws in a loading process
    sizes: Sequence[int]  # samples that are read for each micro-batch, in turn
    share: SampleShard
    skip: int  # leave out so many samples of the epoch
    already_read: int  # so many of these are not in `samples` any more
    drop_last: bool
    collate: CollateFunction | None

    def __iter__(self) -> Iterator[tuple[list[tuple[Any, int]], int]]:
        worker = get_worker_info()
        process, processes = (worker.id, worker.num_workers) if worker else (0, 1)
        # Batches are divided among the loading processes here. A dataset that divides its samples among them,
        # too, as torch's documentation shows, would lose most of them: it is to see one process.
        if worker is not None:
            loading_process._worker_info = None
        with self.rng():
            samples = islice(self.samples, self.skip - self.already_read, None)
        at = self.skip
        for micro, size in enumerate(cycle(self.sizes)):
            with self.rng():
                items = list(islice(samples, size))
            too_few = len(items) < (1 if self.share.sharded else self.share.ranks)
            if not items or (too_few and micro == self.skip == 0):
                return  # the end, or too few for every rank to have had a batch at all
            least = self.share.local_batch or size
            if self.drop_last:
                del items[len(items) // least * least :]
            if not items:
                return
            # The loader takes batches from its processes in turn.
            if micro % processes == process:
                if worker is not None:
                    seed_for_batch(self.seed, at)
                batches = list[tuple[Any, int]]()
                for mine in self.share.own_batches([*enumerate(items, start=at)]):
                    # A rank without a sample computes along on another one's.
                    numbers, samples_of_batch = zip(*(mine or [(at, items[0])]), strict=True)
                    batches.append((collate(samples_of_batch, numbers, self.collate), len(mine)))
                yield batches, len(items)
            at += len(items)
