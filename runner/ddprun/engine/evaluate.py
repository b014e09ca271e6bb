"""The held-out data, each sample once, summed over ranks: in an evaluate stage, and while a stage trains."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ddprun.config import BEST_FILE, Choice, EarlyStop, EvaluateStage, KeepBest, Stage, metric_name
from ddprun.config.checks.model_and_data import find_evaluations
from ddprun.config.choices import RESERVED_METRIC_NAMES
from ddprun.config.stages import StageEvaluation
from ddprun.engine import build, seeding
from ddprun.engine.build import HeldOutData
from ddprun.engine.checkpoint_state import take_checkpoint
from ddprun.engine.data import (
    BatchDataset,
    ErrorFactory,
    all_gather_number,
    is_iterable_dataset,
    load_batches,
)
from ddprun.engine.objective import ForwardResult
from ddprun.engine.samples import batch_or_raise, collate, describe_sample, describe_tensor, digest_samples
from ddprun.engine.save import read_saved_step, write_weights_and_pipeline
from ddprun.engine.session import BestMetric, Session
from ddprun.engine.stage_run import StageRun, evaluation_mode, make_buffers_equal
from ddprun.engine.stateful_metric import StatefulMetric, add_metric_notes, as_scalar
from ddprun_hooks.errors import format_ranks

_T = TypeVar("_T")

_LOOK_EVERY_S = 1.0
_HELD_OUT_SEED = 1 << 31  # added to the pipeline's seed for what held-out streams draw

SumAndCount = tuple[Tensor | float, Tensor | float]  # sum of values, number of values
MetricFunction = Callable[[ForwardResult, int, Tensor | float], SumAndCount]
"""From a forward pass, its number of samples, and the weight of its loss in the mean."""


@dataclass(frozen=True, slots=True)
class MeanMetric:
    """A mean over the held-out data, and what is made of it."""

    measure: MetricFunction
    finish: Callable[[float], float] = float
    select: Callable[[ForwardResult], ForwardResult] = lambda result: result  # what it is of


class _StopRequestedError(Exception):
    """A rank was asked to stop while ranks evaluate; raised on all of them after the same batch."""


def run_evaluate_stage(session: Session, stage: EvaluateStage) -> dict[str, Any]:
    make_buffers_equal(session, stage)
    held_out = session.runtime.stage_held_out.get(stage.index, session.runtime.held_out)
    try:
        with evaluation_mode(session):
            found, samples = evaluate_metrics(session, held_out, stage, stage.path)
    except _StopRequestedError:
        take_checkpoint(session, at_end=True)
        return {"interrupted": True}
    shown = _record_and_format_metrics(session, stage, found)
    session.reporter.note(f"{stage.name}: held-out {shown}")
    return {"metrics": found, "samples": samples}


def evaluate_in_stage(run: StageRun, *, at_end: bool = False) -> bool:
    """Measure the held-out data between two steps, or at the end; leaves no trace. Called by all ranks.
    False: a rank was asked to stop meanwhile, and nothing was measured; at the end all is.
    """
    session, stage, state = run.session, run.stage, run.session.state
    wanted = stage.evaluate
    assert wanted is not None, "the stage evaluates"
    with evaluation_mode(session):
        held_out, path = session.runtime.held_out, f"{stage.path}.evaluate"
        try:
            found, _ = evaluate_metrics(session, held_out, wanted, path, to_its_end=at_end)
        except _StopRequestedError:
            return False
        state.results.evaluated_step = state.step
        shown = _record_and_format_metrics(session, stage, found)
        session.reporter.note(f"{stage.name}: step {state.step}, held-out {shown}")
        if stage.keep_best is not None:
            _write_weights_if_best(session, stage.keep_best, found)
    session.runtime.recorder.record_between_step_exchanges(stage.index, state.step)
    if not run.is_evaluation_step:
        return True
    # At the end, too: a resumed run may lengthen the stage.
    if stage.stop is not None:
        _update_early_stop(session, stage.stop, found[stage.stop.metric])
    metric, schedule = run.settings.schedule_metric, cast(Any, state.schedule)
    if metric is not None:
        schedule.step(found[metric])
    return True


def summarize_evaluations(run: StageRun, stopped_early: bool) -> dict[str, Any]:
    """What a stage's entry in the summary says of its evaluations."""
    results, step = run.session.state.results, run.session.state.step
    best, at_end = results.best, results.evaluated_step == step
    found: dict[str, Any] = {"metrics": results.metrics if at_end else None}
    if run.stage.stop is not None:
        found |= {"stopped_early": stopped_early, "best": best and best.model_dump()}
    return found


def _write_weights_if_best(session: Session, wanted: KeepBest, found: Mapping[str, float]) -> None:
    """Write the weights, if they are the best so far. If that fails, the next that are better are written."""
    runtime, state, events = session.runtime, session.state, session.reporter.events
    value, kept = found[wanted.metric], state.results.kept
    before = kept.value if kept is not None and kept.metric == wanted.metric else None
    if not wanted.improves(value, before):
        return
    problem = None
    if runtime.ranks.rank == 0:
        try:
            write_weights_and_pipeline(session, runtime.run_dir / BEST_FILE, step=state.step)
        except OSError as error:
            problem = error.strerror or str(error)
    # Ranks wait here for rank 0, and not in its next step.
    written = runtime.exchange.control.all_gather([problem is None], "rank 0's file")[0, 0]
    about = {"step": state.step, "metric": wanted.metric, "value": value, "file": BEST_FILE}
    if written:
        state.results.kept = BestMetric(metric=wanted.metric, value=value, step=state.step)
        events.info("best_kept", **about)
    else:
        events.warning("best_not_kept", **about, reason=problem)
        session.reporter.note(f"step {state.step} has the best {wanted.metric}, but {BEST_FILE}: {problem}")


def discard_stale_best(session: Session) -> None:
    """In a resumed run, forget the best weights if their file is gone, or is of a step after the checkpoint:
    these steps are taken again, perhaps with other settings. Such a file is removed, as their records are.
    """
    runtime, results = session.runtime, session.state.results
    step = runtime.ranks.from_rank_0("resume/best", partial(read_saved_step, runtime.run_dir, BEST_FILE))
    if results.kept is not None and results.kept.step == step:
        return
    results.kept = None
    if step is not None:
        if runtime.ranks.rank == 0:
            for name in (BEST_FILE, f"{BEST_FILE}.yaml"):
                (runtime.run_dir / name).unlink(missing_ok=True)
        session.reporter.events.info("best_removed", step=step, file=BEST_FILE)
        session.reporter.note(f"{BEST_FILE} is from step {step}, which is repeated: removed")


def _update_early_stop(session: Session, wanted: EarlyStop, value: float) -> None:
    state, results = session.state, session.state.results
    if wanted.improves(value, None if results.best is None else results.best.value, by=wanted.min_delta):
        results.best, results.since_best = BestMetric(metric=wanted.metric, value=value, step=state.step), 0
    else:
        results.since_best += 1


def report_early_stop(run: StageRun, wanted: EarlyStop) -> None:
    """Say that the stage ends before its steps are over, and why."""
    reporter, step, best = run.session.reporter, run.session.state.step, run.session.state.results.best
    why = "was never a number"
    if best is not None:
        by = f" by more than {wanted.min_delta:g}" if wanted.min_delta else ""
        why = f"has not improved{by} since step {best.step} ({best.value:.4f})"
    about = {"metric": wanted.metric, "best": best and best.value, "best_step": best and best.step}
    reporter.events.info("stopped_early", stage=run.stage.index, step=step, **about)
    reporter.note(f"{run.stage.name}: stops after step {step}: {wanted.metric} {why}")


def _record_and_format_metrics(session: Session, stage: Stage, found: dict[str, float]) -> str:
    """Hand on what was measured; gives it as text."""
    state, reporter = session.state, session.reporter
    state.results.metrics = found
    reporter.trackers.log_eval_metrics(state.step, found)
    reporter.events.info("evaluated", stage=stage.index, step=state.step, **found)
    return ", ".join(f"{name} {value:.4f}" for name, value in found.items())


def try_evaluations(session: Session) -> None:
    """Try each evaluation of the pipeline on one batch, without a trace: what cannot work is told before
    step 1. Of a stream nothing is read, since it may not give the same samples again.
    """
    runtime, size = session.runtime, session.runtime.loaded.pipeline.loader.batch_size
    evaluations = list(find_evaluations(runtime.loaded.pipeline))
    if not evaluations:
        return
    with seeding.preserve_state(runtime.device, runtime.model, runtime.objective.loss):
        runtime.model.eval()
        for path, wanted in evaluations:
            held_out = runtime.held_out
            if isinstance(wanted, EvaluateStage):
                held_out = runtime.stage_held_out.get(wanted.index, held_out)
            metrics = _metrics(session, wanted.metrics, path)
            data = held_out.dataset
            if is_iterable_dataset(data):
                continue
            seeding.seed_everything(runtime.loaded.pipeline.seed)  # ranks compare what they read
            samples = [data[index] for index in range(min(size, len(data)))]
            _require_equal_data(session, held_out, len(data), samples)
            content = collate(samples, range(len(samples)), held_out.collate)
            content = batch_or_raise(content, held_out.make_error)
            try:
                _measure_batches(session, [(content, len(samples))], metrics, wanted.gradients)
            except RuntimeError as error:
                if wanted.gradients or "does not require grad" not in str(error):
                    raise
                text = "the model or the loss asks for gradients, which an evaluation does not record"
                raise runtime.loaded.error(path, text, "write evaluate: {gradients: true}") from error
            for metric in metrics.values():
                if isinstance(metric, StatefulMetric):
                    metric.check_compute(runtime.ranks.size)


def evaluate_metrics(
    session: Session,
    held_out: HeldOutData,
    wanted: EvaluateStage | StageEvaluation,
    path: str,
    *,
    to_its_end: bool = False,
) -> tuple[dict[str, float], int]:
    """The loss and the metrics of an evaluation, at `path` in the file, and how many samples they are of;
    equal on all ranks. `to_its_end`: whatever a rank is asked for meanwhile.

    The bare module is called, as often on every rank and each time on batches of one size, so that a model
    may call collectives itself. Sums are kept in fp64 and added over ranks in rank order; accuracy is a
    quotient of whole numbers. Metrics that accumulate merge the ranks' states (`stateful_metric.py`).
    """
    control, metrics = session.runtime.exchange.control, _metrics(session, wanted.metrics, path)
    read = _iterable_batches if is_iterable_dataset(held_out.dataset) else _map_style_batches
    batches: Iterable[tuple[Any, int]] = islice(read(session, held_out), wanted.steps)
    if not to_its_end:
        batches = _until_stop(session, batches)
    mine, samples = _measure_batches(session, batches, metrics, wanted.gradients)
    of_ranks = control.all_gather_bytes(json.dumps([*mine]).encode(), "names of numbers beside the loss")
    names = list(dict.fromkeys(chain.from_iterable(map(json.loads, of_ranks))))
    numbers = [*chain.from_iterable(mine.get(name, (0.0, 0.0)) for name in names), samples]
    *totals, samples = control.all_gather(numbers, "sums of the evaluation").sum(0).tolist()
    sums = dict(zip(names, zip(totals[::2], totals[1::2], strict=True), strict=True))
    beside = {name: metrics["loss"] for name in names if name not in metrics and sums[name][1]}
    values = dict[str, float]()
    for name, metric in {"loss": metrics["loss"], **beside, **metrics}.items():
        if isinstance(metric, MeanMetric):
            value, count = sums[name]
            values[name] = metric.finish(value / count) if count else math.nan
        else:
            values[name] = metric.compute(control)
    return values, int(samples)


def _measure_batches(
    session: Session,
    batches: Iterable[tuple[Any, int]],
    metrics: Mapping[str, MeanMetric | StatefulMetric],
    gradients: bool,
) -> tuple[dict[str, list[float]], int]:
    """Update the metrics with this rank's batches; gives, of each mean and each number beside the loss, by
    name, the sum of its values and how many they are, and the number of samples. Such a number is weighted
    as the loss is; a batch that lacks it does not count.
    """
    runtime, counted = session.runtime, 0
    means = {name: metric for name, metric in metrics.items() if isinstance(metric, MeanMetric)}
    beside = MeanMetric(_sum_weighted_loss)
    sums = {name: torch.zeros(2, dtype=torch.float64, device=runtime.device) for name in means}
    for content, samples in batches:
        with torch.set_grad_enabled(gradients):
            result = runtime.objective(runtime.model, runtime.precision.to_device(content))
        counted += samples
        result = result._replace(loss=result.loss.detach())
        with torch.no_grad():
            weight = runtime.objective.evaluation_weight(content, result, samples)
            measured = [(name, mean, mean.select(result)) for name, mean in means.items()]
            for name, value in result.values.items():
                if name not in metrics and name not in RESERVED_METRIC_NAMES:
                    measured.append((name, beside, result._replace(loss=value)))
                    sums.setdefault(name, torch.zeros_like(sums["loss"]))
            for name, mean, found in measured:
                total, count = mean.measure(found, samples, weight)  # in each pass: it may call collectives
                if samples:
                    sums[name][0] += total
                    sums[name][1] += count
            for metric in metrics.values():
                if samples and isinstance(metric, StatefulMetric):
                    metric.update(metric.select(result))
    return {name: one.tolist() for name, one in sums.items()}, counted


def _metrics(
    session: Session, metrics: Sequence[Choice], path: str
) -> dict[str, MeanMetric | StatefulMetric]:
    """The metrics of an evaluation at `path`, newly made, by name; the loss is the first."""
    loaded, objective = session.runtime.loaded, session.runtime.objective
    found: dict[str, MeanMetric | StatefulMetric] = {"loss": MeanMetric(_sum_weighted_loss)}
    for index, choice in enumerate(metrics):
        place, name = f"{path}.metrics[{index}]", metric_name(choice)
        select = partial(objective.select_metric_inputs, choice.sibling_keys, place)
        if choice.source != "built-in":
            metric = build.build_custom_metric(loaded, place, choice, session.runtime.device)
            if isinstance(metric, StatefulMetric):
                metric.select, found[name] = select, metric
            else:
                make_error = partial(loaded.error, place)
                by_weight = loaded.pipeline.has_batch_weights
                custom = partial(_sum_custom_metric, by_weight, metric, make_error)
                found[name] = MeanMetric(custom, select=select)
        elif choice.name == "accuracy":
            own = objective.loss is None  # the model's, which may have classes on its last dimension
            ignored, make_error = -100 if own else objective.ignore_index, partial(loaded.error, place)
            accuracy = partial(_count_correct, ignored, (1, -1) if own else (1,), make_error)
            found[name] = MeanMetric(accuracy, select=select)
        else:
            found[name] = MeanMetric(_sum_weighted_loss, lambda mean: math.exp(min(mean, 700.0)))
    return found


def _sum_weighted_loss(result: ForwardResult, samples: int, weight: Tensor | float) -> SumAndCount:
    """By `weight_by`; else of a cross-entropy over the targets that count, of another loss over samples."""
    loss = result.loss.double()
    if isinstance(weight, Tensor):  # the mean over no target at all is not a number
        return torch.where(weight > 0, loss * weight, 0.0), weight
    return loss * weight if weight else 0.0, weight


def _count_correct(
    ignored: int | None,
    dims: Sequence[int],
    make_error: ErrorFactory,
    result: ForwardResult,
    samples: int,
    weight: Tensor | float,
) -> SumAndCount:
    """Classes lie on dimension 1 of the output, as for torch's cross_entropy, or on another of `dims`."""
    output, target = result.output, result.target
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        text = f"accuracy compares tensors: the output is {describe_sample(output)}, the targets are "
        allowed = "write output: … and target: … beside the metric, or name a function of (output, target)"
        raise make_error(f"{text}{describe_sample(target)}", allowed)
    if target.is_floating_point():
        text = f"accuracy compares class numbers, and the targets are {describe_tensor(target)}"
        raise make_error(text, "evaluate on class numbers, or name a function of (output, target)")
    fitting = {
        dim % output.dim() for dim in dims if output.dim() > 1 and output.select(dim, 0).shape == target.shape
    }  # where the classes may be
    if len(fitting) != 1:
        text = f"the output is {describe_tensor(output)}, the targets {describe_tensor(target)}"
        several = "may be on either dimension" if fitting else "are on no dimension that fits the targets"
        raise make_error(f"the classes {several}: {text}", "name a function of (output, target)")
    (of_classes,) = fitting
    right = output.argmax(of_classes) == target
    if ignored is None:
        return right.sum(), right.numel()
    counts = target != ignored
    return (right & counts).sum(), counts.sum()


def _sum_custom_metric(
    by_weight: bool,
    metric: Callable[[Any, Any], Any],
    make_error: ErrorFactory,
    result: ForwardResult,
    samples: int,
    weight: Tensor | float,
) -> SumAndCount:
    count = float(weight) if by_weight else samples
    try:
        returned = metric(result.output, result.target)
    except Exception as error:
        add_metric_notes(error, "metric", result)
        raise
    value = as_scalar(returned, "the metric", make_error)
    return value * count if count else 0.0, count


def _until_stop(session: Session, batches: Iterable[_T]) -> Iterator[_T]:
    """The batches, as many on every rank, until one of these was asked to stop: about once a second all look
    whether that is so, by the pace of the slowest.
    """
    control, signals = session.runtime.exchange.control, session.runtime.signals
    began, look_after = time.monotonic(), 1
    for count, batch in enumerate(batches, start=1):
        yield batch
        if count == look_after:
            mine = [float(signals.stop_requested), (time.monotonic() - began) / count]
            stop, seconds = control.all_gather(mine, "whether to stop").amax(0).tolist()
            if stop:
                raise _StopRequestedError
            look_after += max(1, int(_LOOK_EVERY_S / seconds))


def _map_style_batches(session: Session, held_out: HeldOutData) -> Iterator[tuple[Any, int]]:
    """This rank's share as (collated batch, samples that count): sample i goes to rank i modulo ranks."""
    runtime, dataset, loader = session.runtime, held_out.dataset, session.runtime.loaded.pipeline.loader
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    _require_equal_data(session, held_out, len(dataset), ())  # which may have grown
    passes = rank_batches(range(len(dataset)), loader.batch_size, rank, ranks)
    samples, sampler = BatchDataset(dataset, None, held_out.collate), ((list(one), n, 0) for one, n in passes)
    pin = runtime.device.type == "cuda"
    for content, count in load_batches(samples, sampler, loader.workers, torch.Generator(), pin=pin):
        yield batch_or_raise(content, held_out.make_error), count


def _iterable_batches(session: Session, held_out: HeldOutData) -> Iterator[tuple[Any, int]]:
    runtime = session.runtime
    rank, ranks, size = runtime.ranks.rank, runtime.ranks.size, runtime.loaded.pipeline.loader.batch_size
    # Alike on all ranks, whatever model and metrics draw, and other numbers than training data draws.
    rng = seeding.SeparateRng(runtime.loaded.pipeline.seed + _HELD_OUT_SEED)
    with rng():
        samples = iter(held_out.dataset)
        read = list(islice(samples, size * ranks))
    _require_equal_data(session, held_out, len(read), read)
    numbered = enumerate(chain(read, samples))
    while True:
        with rng():
            of_all_ranks = list(islice(numbered, size * ranks))
        counts = all_gather_number(runtime.exchange.control, len(of_all_ranks), "samples to evaluate on")
        if min(counts) != max(counts):
            problem = f"it ends earlier on rank {counts.index(min(counts))} than on others"
            raise held_out.make_error(problem, "have each rank read all of it")
        if not of_all_ranks:
            return
        for part, count in rank_batches(of_all_ranks, size, rank, ranks):
            numbers, items = zip(*part, strict=True)
            yield batch_or_raise(collate(items, numbers, held_out.collate), held_out.make_error), count


def rank_batches(
    samples: Sequence[_T], size: int, rank: int, ranks: int
) -> Iterator[tuple[Sequence[_T], int]]:
    """A rank's samples in each forward pass, and how many of them count. Passes are as many and as large on
    every rank: one that has no sample left computes along on another's.
    """
    at = 0
    while at < len(samples):
        of_each = min(size, (len(samples) - at) // ranks) or 1
        part = samples[at : at + of_each * ranks]
        at += len(part)
        own = part[rank::ranks]
        yield own or part[:1], len(own)


def _require_equal_data(session: Session, held_out: HeldOutData, length: int, samples: Sequence[Any]) -> None:
    """Refuse held-out data whose first sample or `length` differs between ranks, and data without samples: a
    stream was read before, as far as can be seen. Called by all ranks.
    """
    digest = digest_samples([length, *samples[:1]])
    if differing := session.runtime.exchange.control.differing_ranks(digest, "a digest of the held-out data"):
        problem = f"the first sample or the length of {format_ranks(differing)} differs from rank 0's"
        allowed = "have each rank read all of it, and draw from torch, NumPy or random, which are seeded"
        raise held_out.make_error(problem, allowed)
    if not length:
        allowed = "name other data to evaluate on, or raise held_out of built-in data"
        if is_iterable_dataset(held_out.dataset):
            allowed = "data that can be read only once lasts for one evaluation: have its __iter__ start over"
        raise held_out.make_error("it has no sample to evaluate on", allowed)
