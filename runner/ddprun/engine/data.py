"""The order in which samples reach the ranks: each once per epoch, known in advance, resumable.

An epoch's order is `torch.randperm(samples, generator=seeded with seed + epoch)`, or the data's own order
without `shuffle`. A global micro-batch is the next `batch_size x ranks` of it, and rank r takes every
ranks-th from the r-th on: what torch's `DistributedSampler` does, except that nothing is repeated to fill the
last micro-batch, which is smaller instead and counts for what it holds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from ddprun.engine.seeding import seed_everything
from ddprun.orphans import die_with_parent


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


def is_iterable(dataset: Any) -> bool:
    """Whether a dataset is a row of samples to walk along, rather than one to pick from by index."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Feed:
    """An endless row of optimizer steps, epoch after epoch, that knows where it is.

    Args:
        dataset: map-style, or iterable and then the same row on every rank.
        batch_size: samples per rank and micro-batch.
        shuffle: draw a new order in each epoch (map-style only).
        drop_last: leave out an epoch's last, smaller micro-batch.
        workers: processes that load.
        seed, rank, ranks: as in the module's text.
        pin: put batches into page-locked memory, for a GPU.

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
    ) -> None:
        self.dataset = dataset
        self.iterable = is_iterable(dataset)
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.shuffle, self.drop_last, self.seed = batch_size, shuffle, drop_last, seed
        self._loading: dict[str, Any] = {
            "num_workers": workers,
            "pin_memory": pin,
            "worker_init_fn": tie_to_rank,
        }
        self.epoch = 0
        """From 0; an epoch that is used up is left when the next step is asked for."""

        self._used = 0  # samples of the epoch, of all ranks together
        if self.iterable and shuffle:
            raise ValueError("an iterable dataset has an order of its own: loader.shuffle must be false")
        if not self.iterable:
            self._check_length()

    @property
    def micro_batches_per_epoch(self) -> int | None:
        """None for an iterable dataset, whose length nobody knows."""
        if self.iterable:
            return None
        whole, rest = divmod(len(self.dataset), self.batch_size * self.ranks)
        return whole + (1 if rest and not self.drop_last else 0)

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
        whole, rest = divmod(len(self.dataset) - self._used, self.batch_size * self.ranks)
        micro = whole + (1 if rest and not self.drop_last else 0)
        later = self.steps_per_epoch(accumulate)
        assert later is not None
        return -(-micro // accumulate) + max(0, epochs - 1) * later

    def first_batch(self) -> Any:
        """A batch of the coming epoch that leaves no trace: for shapes, not for learning."""
        if not self.iterable:
            indices = self._share(self._order(), 0) or self._spare(self._order())
            return default_collate([self.dataset[index] for index in indices])
        items = list(islice(islice(iter(self.dataset), self.rank, None, self.ranks), self.batch_size))
        if not items:
            raise ValueError(f"the dataset yields too few samples for {self.ranks} ranks")
        return default_collate(items)

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
                raise ValueError(f"the dataset yields too few samples for one step of {self.ranks} ranks")
            self.epoch, self._used = self.epoch + 1, 0
            epochs = None if epochs is None else epochs - 1

    def _epoch_steps(self, accumulate: int) -> Iterator[StepBatches]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        return self._row_iterable(accumulate) if self.iterable else self._row_map(accumulate)

    # Map-style: the whole epoch is arithmetic, so a step's total is known before a sample is loaded.

    def _row_map(self, accumulate: int) -> Iterator[StepBatches]:
        order, world = self._order(), self.batch_size * self.ranks
        whole, rest = divmod(len(order) - self._used, world)
        starts = [
            self._used + micro * world for micro in range(whole + (1 if rest and not self.drop_last else 0))
        ]
        shares = [self._share(order, start) for start in starts]
        loader = DataLoader(
            _Seeded(self.dataset, self._loading_seed()) if self._loading["num_workers"] else self.dataset,
            batch_sampler=[share or self._spare(order) for share in shares],
            generator=self._loading_generator(),
            **self._loading,
        )
        loaded = iter(loader)
        for first in range(0, len(shares), accumulate):
            group = shares[first : first + accumulate]
            end = min(starts[first] + len(group) * world, len(order))
            yield StepBatches(self._taken(loaded, group, end), len(group), end - starts[first])

    def _taken(self, loaded: Iterator[Any], shares: list[list[int]], end: int) -> Iterator[MicroBatch]:
        for share in shares:
            content = next(loaded)
            self._used = min(self._used + self.batch_size * self.ranks, end)
            yield MicroBatch(content, len(share))

    def _order(self) -> list[int]:
        size = len(self.dataset)
        if not self.shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(size, generator=generator).tolist()

    def _share(self, order: list[int], start: int) -> list[int]:
        return order[start : start + self.batch_size * self.ranks][self.rank :: self.ranks]

    def _spare(self, order: list[int]) -> list[int]:
        """What a rank without a sample computes along on: its own first batch of the epoch."""
        return order[self.rank :: self.ranks][: self.batch_size]

    def _check_length(self) -> None:
        size, world = len(self.dataset), self.batch_size * self.ranks
        if self.drop_last and size < world:
            raise ValueError(
                f"{size} samples are fewer than one step needs: {world} (batch_size {self.batch_size} x "
                f"{self.ranks} ranks), and drop_last leaves out what is less"
            )
        if size < self.ranks:
            raise ValueError(f"{size} samples are too few for {self.ranks} ranks: each needs at least one")

    # Iterable: every rank reads the whole row and takes its share, so all know alike when it ends.

    def _row_iterable(self, accumulate: int) -> Iterator[StepBatches]:
        loader = DataLoader(
            _Shares(self.dataset, self.batch_size, self.rank, self.ranks, self._used, self.drop_last),
            batch_size=None,
            generator=self._loading_generator(),
            **self._loading,
        )
        loaded = iter(loader)
        spare: Any = None
        while True:
            group, total = [], 0
            for content, samples, world_samples in islice(loaded, accumulate):
                if not samples:
                    content = self.first_batch() if spare is None else spare
                spare = content if spare is None else spare
                group.append(MicroBatch(content, samples))
                total += world_samples
            if not group:
                return
            self._used += total
            yield StepBatches(group, len(group), total)

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


class _Seeded(Dataset[Any]):
    """What a loading process draws for a batch depends on the batch alone: not on how many processes there
    are, nor on where in the epoch they started.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, indices: list[int]) -> list[Any]:
        seed_everything((self.seed * len(self.dataset) + indices[0]) % 2**63)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


class _Shares(IterableDataset[tuple[Any, int, int]]):
    """One rank's share of a row of samples, as (collated batch, its samples, samples of all ranks)."""

    def __init__(
        self, row: Iterable[Any], batch_size: int, rank: int, ranks: int, skip: int, drop_last: bool
    ) -> None:
        self.row = row
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        self.skip, self.drop_last = skip, drop_last  # skip: samples

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        row, world = islice(self.row, self.skip, None), self.batch_size * self.ranks
        for micro in range(2**62):
            items = list(islice(row, world))
            if not items or (len(items) < self.ranks and micro == self.skip == 0):
                return  # the end, or too few for every rank to have had a batch at all
            if len(items) < world and self.drop_last:
                return
            # The loader takes batches from its processes in turn: every workers-th is this one's.
            if micro % workers == mine:
                share = items[self.rank :: self.ranks]
                yield default_collate(share) if share else None, len(share), len(items)


def tie_to_rank(worker: int) -> None:
    """Have a loading process end with its rank; by itself it would notice seconds later."""
    die_with_parent()
