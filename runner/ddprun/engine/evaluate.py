"""The evaluate stage: the held-out data, each sample once, summed over ranks."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ddprun.engine import build
from ddprun.engine.common import make_buffers_equal
from ddprun.engine.data import is_iterable, tie_to_rank
from ddprun.engine.objective import Outcome
from ddprun.engine.session import Session
from ddprun.spec import Evaluate

Measure = Callable[[Outcome, int], tuple[Tensor | float, int]]
"""From an outcome and its number of samples to (sum of values, number of values)."""


def evaluate(session: Session, stage: Evaluate) -> dict[str, Any]:
    """Run an evaluate stage; gives its entry in the summary.

    The bare module is called, so no rank waits for another in a forward pass, and ranks may have different
    numbers of batches. Sums are kept in fp64 and added over ranks in rank order; accuracy is a quotient of
    whole numbers.
    """
    session.where = stage.path
    make_buffers_equal(session, stage)
    measures = _measures(session, stage)
    sums = [torch.zeros((), dtype=torch.float64, device=session.place.device) for _ in measures]
    counts = [0] * len(measures)
    session.model.eval()
    with torch.no_grad():
        for content, samples in _batches(session):
            with session.precision.computing():
                outcome = session.objective(session.model, session.precision.admit(content))
            for place, measure in enumerate(measures.values()):
                value, count = measure(outcome, samples)
                sums[place] += value
                counts[place] += count
    mine = [*(float(total) for total in sums), *counts]
    words = session.exchange.control.gather(mine, "sums of the evaluation").sum(0).tolist()
    metrics = {
        name: words[place] / words[len(measures) + place] if words[len(measures) + place] else math.nan
        for place, name in enumerate(measures)
    }
    if "perplexity" in metrics:
        metrics["perplexity"] = math.exp(min(metrics["perplexity"], 700.0))
    session.metrics = metrics
    session.trackers.metrics(session.step, metrics)
    session.events.info("evaluated", stage=stage.index, step=session.step, **metrics)
    told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    session.screen.note(f"{stage.name}: held-out {told}")
    return {"metrics": metrics, "samples": int(words[len(measures)])}


def _measures(session: Session, stage: Evaluate) -> dict[str, Measure]:
    measures: dict[str, Measure] = {"loss": _loss(summed=session.objective.summed)}
    for place, choice in enumerate(stage.metrics):
        if choice.name == "accuracy":
            measures["accuracy"] = _accuracy
        elif choice.name == "perplexity":
            measures["perplexity"] = _loss(summed=session.objective.summed)
        else:
            metric = build.build_metric(session.loaded, f"{stage.path}.metrics[{place}]", choice)
            measures[choice.name.rpartition(".")[2]] = _dotted(metric)
    return measures


def _loss(*, summed: bool) -> Measure:
    def measure(outcome: Outcome, samples: int) -> tuple[Tensor | float, int]:
        loss = outcome.loss.double()
        return (loss if summed else loss * samples), samples

    return measure


def _accuracy(outcome: Outcome, samples: int) -> tuple[Tensor | float, int]:
    """Classes lie on dimension 1 of the output, as for torch's cross_entropy."""
    right = outcome.output.argmax(1) == outcome.target
    return right.sum(), right.numel()


def _dotted(metric: Callable[[Any, Any], Any]) -> Measure:
    def measure(outcome: Outcome, samples: int) -> tuple[Tensor | float, int]:
        return float(metric(outcome.output, outcome.target)) * samples, samples

    return measure


def _batches(session: Session) -> Iterator[tuple[Any, int]]:
    """This rank's share as (collated batch, samples): sample i goes to rank i modulo ranks."""
    loader, rank, ranks = session.loaded.pipeline.loader, session.ranks.rank, session.ranks.size
    dataset, size = session.held_out, loader.batch_size
    if not is_iterable(dataset):
        mine = range(rank, len(dataset), ranks)
        shares = [list(mine[start : start + size]) for start in range(0, len(mine), size)]
        batches: Iterable[Any] = DataLoader(
            dataset,
            batch_sampler=shares,
            num_workers=loader.workers,
            generator=torch.Generator(),
            worker_init_fn=tie_to_rank,
        )
        yield from zip(batches, map(len, shares), strict=True)
        return
    row = islice(iter(dataset), rank, None, ranks)
    while items := list(islice(row, size)):
        yield default_collate(items), len(items)
