"""The evaluate stage: the held-out data, each sample once, summed over ranks."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddprun.config import Choice, Evaluate, PipelineError
from ddprun.engine import build, seeding
from ddprun.engine.data import Batches, as_it_is, is_iterable, tie_to_rank
from ddprun.engine.objective import Outcome
from ddprun.engine.replicas import make_buffers_equal
from ddprun.engine.samples import BatchError, collate, differing, digest_of, shards_itself
from ddprun.engine.session import Session

_FIELDS = frozenset(
    ("event", "level", "time", "monotonic_us", "rank", "stage", "step", "loss", "self", "method_name")
)
"""What the event `evaluated` has beside metrics, and what structlog calls its own arguments."""

Measure = Callable[[Outcome, int], tuple[Tensor | float, Tensor | float]]
"""From an outcome and its number of samples to (sum of values, number of values)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A mean over the held-out data, and what is made of it."""

    measure: Measure
    finish: Callable[[float], float] = float


def evaluate(session: Session, stage: Evaluate) -> dict[str, Any]:
    """Run an evaluate stage; gives its entry in the summary.

    The bare module is called, as often on every rank and each time on batches of one size, so that a model
    may call collectives itself. Sums are kept in fp64 and added over ranks in rank order; accuracy is a
    quotient of whole numbers.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    reporter.where = stage.path
    make_buffers_equal(session, stage)
    metrics = _metrics(session, stage)
    sums = torch.zeros((len(metrics), 2), dtype=torch.float64, device=runtime.device)
    counted = 0
    runtime.model.eval()
    with torch.no_grad():
        for content, samples in _batches(session):
            with runtime.precision.computing():
                outcome = runtime.objective(runtime.model, runtime.precision.admit(content))
            if not samples:
                continue
            counted += samples
            for place, metric in enumerate(metrics.values()):
                value, count = metric.measure(outcome, samples)
                sums[place, 0] += value
                sums[place, 1] += count
    mine = [*sums.flatten().tolist(), counted]
    *words, samples = runtime.exchange.control.all_gather(mine, "sums of the evaluation").sum(0).tolist()
    found = {
        name: metric.finish(words[2 * place] / words[2 * place + 1]) if words[2 * place + 1] else math.nan
        for place, (name, metric) in enumerate(metrics.items())
    }
    state.metrics = found
    reporter.trackers.metrics(state.step, found)
    reporter.events.info("evaluated", stage=stage.index, step=state.step, **found)
    told = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    reporter.note(f"{stage.name}: held-out {told}")
    return {"metrics": found, "samples": int(samples)}


def _metrics(session: Session, stage: Evaluate) -> dict[str, Metric]:
    runtime = session.runtime
    objective = runtime.objective
    found = {"loss": Metric(_summed_loss if objective.summed else _mean_loss(session))}
    for place, (name, choice) in enumerate(zip(names_of(stage.metrics), stage.metrics, strict=True)):
        if choice.source != "built-in":
            metric = build.build_metric(runtime.loaded, f"{stage.path}.metrics[{place}]", choice)
            found[name] = Metric(_dotted(metric))
        elif choice.name == "accuracy":
            found[name] = Metric(_accuracy(session))
        else:
            found[name] = Metric(_mean_loss(session), lambda mean: math.exp(min(mean, 700.0)))
    return found


def names_of(metrics: Sequence[Choice]) -> list[str]:
    """What metrics are called: by the last part of a dotted name; by all of it where the last part is taken
    by another metric or by a field of the event.
    """
    last = [choice.name.rpartition(".")[2] for choice in metrics]
    often = Counter(last)
    return [
        choice.name if short in _FIELDS or often[short] > 1 else short
        for choice, short in zip(metrics, last, strict=True)
    ]


def _summed_loss(outcome: Outcome, samples: int) -> tuple[Tensor | float, Tensor | float]:
    return outcome.loss.double(), samples


def _mean_loss(session: Session) -> Measure:
    """Of a cross-entropy, the mean over the targets that count; of another loss, over samples."""
    objective = session.runtime.objective

    def measure(outcome: Outcome, samples: int) -> tuple[Tensor | float, Tensor | float]:
        loss, count = outcome.loss.double(), objective.weight_of_mean(outcome, samples)
        if objective.summed:
            return loss, count
        # The mean over no target at all is not a number.
        return (
            torch.where(count > 0, loss * count, 0.0) if isinstance(count, Tensor) else loss * count
        ), count

    return measure


def _accuracy(session: Session) -> Measure:
    """Classes lie on dimension 1 of the output, as for torch's cross_entropy."""
    ignored = session.runtime.objective.ignore_index

    def measure(outcome: Outcome, samples: int) -> tuple[Tensor | float, Tensor | float]:
        target = outcome.target
        if target.is_floating_point() and target.shape == outcome.output.shape:
            target = target.argmax(1)  # of probabilities
        right = outcome.output.argmax(1) == target
        if ignored is None:
            return right.sum(), right.numel()
        counts = target != ignored
        return (right & counts).sum(), counts.sum()

    return measure


def _dotted(metric: Callable[[Any, Any], Any]) -> Measure:
    def measure(outcome: Outcome, samples: int) -> tuple[Tensor | float, Tensor | float]:
        return float(metric(outcome.output, outcome.target)) * samples, samples

    return measure


def _batches(session: Session) -> Iterator[tuple[Any, int]]:
    """This rank's share as (collated batch, samples): sample i goes to rank i modulo ranks, or each rank has
    its own if the data shards itself. A rank that has none left for a call computes along on a batch of 0.
    """
    made = _picked(session) if not is_iterable(session.runtime.held_out.dataset) else _streamed(session)
    for content, samples in made:
        if isinstance(content, BatchError):
            raise _refused(session, content.problem, content.allowed)
        yield content, samples


def _picked(session: Session) -> Iterator[tuple[Any, int]]:
    """Of map-style data: all ranks know all lengths from the start."""
    runtime = session.runtime
    loader, rank, ranks = (
        runtime.loaded.pipeline.loader,
        runtime.ranks.rank,
        runtime.ranks.size,
    )
    dataset = runtime.held_out.dataset
    lengths = _of_all(session, len(dataset))
    mine: Sequence[int] = range(len(dataset))
    odd = next((one for one, length in enumerate(lengths) if length != lengths[0]), None)
    if odd is not None and not _may_be_sharded(session):
        raise _refused(
            session,
            f"it has {lengths[0]} samples on rank 0 and {lengths[odd]} on rank {odd}",
            "give every rank the same data, or write loader: {sharded: true} if it shards itself",
        )
    _refuse_nothing(session, lengths)
    looked_at = mine[: loader.batch_size if loader.sharded else 1]
    if odd is not None or _sharded(session, lambda: [dataset[place] for place in looked_at]):
        held = lengths
    else:
        held = [len(range(one, lengths[0], ranks)) for one in range(ranks)]
        mine = mine[rank::ranks]
    sizes, taken = call_sizes(held, loader.batch_size), 0
    calls, counts = list[list[int]](), list[int]()
    spare = mine or range(len(dataset))
    for size in sizes:
        own = list(mine[taken : taken + size])
        taken += len(own)
        calls.append(own or [spare[place % len(spare)] for place in range(size)])
        counts.append(len(own))
    batches = DataLoader(
        Batches(dataset, None),
        batch_size=None,
        sampler=calls,
        collate_fn=as_it_is,
        num_workers=loader.workers,
        generator=torch.Generator(),
        worker_init_fn=tie_to_rank,
    )
    yield from zip(batches, counts, strict=True)


def _streamed(session: Session) -> Iterator[tuple[Any, int]]:
    """Of iterable data: a batch of every rank at a time."""
    runtime = session.runtime
    size, rank, ranks = (
        runtime.loaded.pipeline.loader.batch_size,
        runtime.ranks.rank,
        runtime.ranks.size,
    )
    row, at = iter(runtime.held_out.dataset), 0
    first = list(islice(row, size * ranks))
    # If not all ranks read alike, they find out together.
    _refuse_nothing(session, _of_all(session, len(first)))
    sharded = _sharded(session, lambda: first)
    row = chain(first, row)
    spare: list[Any] = []
    while True:
        items = list(islice(row, size if sharded else size * ranks))
        if sharded:
            own, numbers, held = items, range(at, at + len(items)), _of_all(session, len(items))
        else:
            own, numbers = items[rank::ranks], range(at + rank, at + len(items), ranks)
            held = [len(range(one, len(items), ranks)) for one in range(ranks)]
        if not any(held):
            return
        spare = spare or own or items
        at, taken = at + len(items), 0
        for count in call_sizes(held, size):
            part = own[taken : taken + count]
            if part:
                yield collate(part, numbers[taken : taken + count]), len(part)
            else:
                again = [spare[place % len(spare)] for place in range(count)]
                yield collate(again, [0] * count), 0
            taken += len(part)


def call_sizes(held: Sequence[int], most: int) -> list[int]:
    """Sizes of the batches of all ranks, call by call: each rank that has samples left takes so many.

    Args:
        held: samples of each rank.
        most: samples in a batch.
    """
    left, sizes = list(held), list[int]()
    while any(left):
        least = min(count for count in left if count)
        size, calls = (most, least // most) if least >= most else (least, 1)
        sizes += [size] * calls
        left = [max(0, count - size * calls) for count in left]
    return sizes


def _of_all(session: Session, number: int) -> list[int]:
    """Every rank's number."""
    told = session.runtime.exchange.control.all_gather([float(number)], "samples to evaluate on")
    return [int(one) for one in told[:, 0].tolist()]


def _sharded(session: Session, first: Callable[[], Sequence[Any]]) -> bool:
    """Whether each rank has held-out samples of its own; else all have the same, and each takes its share.

    Ranks compare their first samples once in a run. Data that is said to shard itself, and that all ranks
    have alike, is one set. Said once: that, or that ranks read different samples though they share them.
    """
    runtime, reporter = session.runtime, session.reporter
    if runtime.held_out.sharded is not None:
        return runtime.held_out.sharded
    runtime.held_out.sharded = _may_be_sharded(session)
    with seeding.generators_kept(runtime.device):
        seeding.seed_everything(runtime.loaded.pipeline.seed)
        digest = digest_of(first())
    told = runtime.exchange.control.all_gather_bytes(digest, "a digest of the held-out samples")
    odd = [rank for rank, theirs in enumerate(told) if theirs != told[0]]
    if runtime.held_out.sharded:
        runtime.held_out.sharded = bool(odd)
        if not odd and runtime.ranks.size > 1:
            reporter.events.info("data_not_sharded", held_out=True)
            reporter.note(
                "held-out data: all ranks read the same samples, so each counts once, loader.sharded or not"
            )
    elif odd:
        how = shards_itself(runtime.held_out.dataset)
        reporter.events.warning("data_differs", ranks=odd, sharded_by=how, held_out=True)
        told_before = runtime.feed.odd_ranks == odd and shards_itself(runtime.feed.dataset) == how
        text = "the same holds as for data" if told_before else differing(odd, runtime.ranks.size, how)
        reporter.note(f"held-out data: {text}")
    return runtime.held_out.sharded


def _may_be_sharded(session: Session) -> bool:
    """Whether the file says that data shards itself; a built-in never does."""
    return session.runtime.loaded.pipeline.loader.sharded and _choice(session)[1].source != "built-in"


def _refuse_nothing(session: Session, held: Sequence[int]) -> None:
    """Data without any sample for a rank: of all that can be seen, it was read before, or is empty."""
    none = [rank for rank, count in enumerate(held) if not count]
    if none:
        whose = "" if len(none) == len(held) else f" for rank {none[0]}"
        raise _refused(
            session,
            f"it has no sample to evaluate on{whose}",
            "data that can be read only once serves one evaluate stage: have its __iter__ start anew",
        )


def _refused(session: Session, problem: str, allowed: str) -> PipelineError:
    path, choice = _choice(session)
    return PipelineError([session.runtime.loaded.fault(path, f'"{choice.name}": {problem}', allowed)])


def _choice(session: Session) -> tuple[str, Choice]:
    """The key of the held-out data, and what is chosen there."""
    data = session.runtime.loaded.pipeline.data
    if isinstance(data, Choice):
        return "data", data
    assert data.evaluate is not None, "check refuses an evaluate stage without data"
    return "data.evaluate", data.evaluate
