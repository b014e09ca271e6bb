"""The train stage.

```
for each optimizer step:
    for each micro-batch:                       (accumulate)
        fetch, move to the device               data_us
        forward, loss                           forward_us
        backward; in the last micro-batch the   backward_us, exposed_*_us
          hooks reduce each bucket as it fills
    look for non-finite gradients, clip,        optimizer_us
      optimizer step, schedule
    every n-th step: compare with the exact   sync_us
      mean gradient
    post the control word, read an older one    sync_us
```
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ddprun.engine import build
from ddprun.engine.data import StepBatches
from ddprun.engine.session import Session
from ddprun.spec import Train, TrainSettings
from ddprun.telemetry.ledger import Agreed


def train(session: Session, stage: Train) -> dict[str, Any]:
    """Run a train stage; gives its entry in the summary.

    If any rank was asked to stop, all stop after the same step and the entry's `interrupted` is true.
    """
    pipeline = session.loaded.pipeline
    settings = stage.effective(pipeline)
    per_epoch = session.feed.steps_per_epoch(settings.accumulate)
    steps = settings.steps
    if settings.epochs is not None:
        session.feed.start_epoch()
        steps = None if per_epoch is None else settings.epochs * per_epoch
    restore_settings(session)
    schedule = build.build_schedule(
        session.loaded, _schedule_path(stage), settings.schedule, session.optimizer, steps
    )
    session.dispatcher.stack = session.stacks[stage.index]
    session.exchange.control.agree("the buckets and the hooks", session.dispatcher.signature)
    session.events.info(
        "stage_started",
        stage=stage.index,
        kind=stage.name,
        steps=steps,
        hooks=list(session.dispatcher.stack.names),
    )
    session.screen.begin(stage.name, steps)
    session.model.train()
    row = islice(session.feed.steps(settings.accumulate, epochs=settings.epochs), settings.steps)
    first, started = session.step, time.monotonic()
    try:
        interrupted = _run(session, stage, settings, schedule, row)
    finally:
        session.screen.end()
    return {
        "steps": session.step - first,
        "seconds": time.monotonic() - started,
        "hooks": list(session.dispatcher.stack.names),
        "loss": session.loss,
        "interrupted": interrupted,
    }


def _run(
    session: Session,
    stage: Train,
    settings: TrainSettings,
    schedule: LRScheduler | None,
    row: Iterator[StepBatches],
) -> bool:
    """Run the steps; whether they were interrupted, on which all ranks agree."""
    first, started = session.step, time.monotonic()
    ledger = session.ledger

    overflows = 0

    def tell(agreed: Agreed) -> None:
        nonlocal overflows
        session.loss = agreed.mean_loss
        if agreed.overflow is not None:
            overflows += 1
            _tell_overflow(session, agreed, first=overflows == 1)
        done = agreed.step - first
        session.screen.step(done, agreed, done / (time.monotonic() - started))

    while True:
        session.where = f"{stage.path}, step {session.step + 1}"
        ledger.start(session.step + 1, stage.index)
        batches = next(row, None)
        if batches is None:
            ledger.cancel()
            break
        run_step(session, settings, schedule, batches, session.step - first)
        session.step += 1
        agreed = ledger.end(stop=session.stop.wanted, compare_clocks=session.clocks_are_old)
        if agreed is None:
            continue
        tell(agreed)
        if agreed.stop:
            for late in ledger.flush():
                tell(late)
            return True
        if agreed.compare_clocks:
            session.compare_clocks()
    for agreed in ledger.flush():
        tell(agreed)
    return bool(session.exchange.control.gather([float(session.stop.wanted)]).any())


def _tell_overflow(session: Session, agreed: Agreed, *, first: bool) -> None:
    """A cast has made a mean gradient infinite: the event each time, a line on the screen the first time."""
    assert agreed.overflow is not None
    bucket, hook = agreed.overflow
    names = [param.name for param in session.dispatcher.layout[bucket].params]
    session.events.warning("overflow", step=agreed.step, hook=hook, bucket=bucket, params=names)
    if first:
        session.screen.note(
            f"step {agreed.step}: bucket {bucket} ({names[0]} … {names[-1]}) overflowed in {hook}: "
            "finite gradients came back as infinity; use bf16, or a smaller loss (clip_norm comes too late)"
        )


def run_step(
    session: Session, settings: TrainSettings, schedule: LRScheduler | None, batches: StepBatches, index: int
) -> None:
    """One optimizer step; `index` counts from 0 in the stage."""
    ledger, precision, dispatcher = session.ledger, session.precision, session.dispatcher
    ddp, optimizer = session.ddp, session.optimizer
    step = ledger.current
    scale = precision.loss_scale()
    fidelity_every = session.loaded.pipeline.timings.fidelity_every
    look = bool(fidelity_every) and step.number % fidelity_every == 0
    dispatcher.begin_step(scale, fidelity=look)
    for place, micro in enumerate(batches.micro_batches, start=1):
        last = place == batches.count
        content = precision.admit(micro.content)
        ledger.lap("data_us")
        with nullcontext() if last else ddp.no_sync():  # what counts is where the forward runs
            with precision.computing():
                loss = session.objective(ddp, content).loss
            weighted = loss * _weight(session, micro.samples, batches.total)
            if scale is not None:
                weighted = weighted * scale
            ledger.lap("forward_us")
            dispatcher.flights = step.flights
            _backward(session, weighted)
        if last:
            ledger.end_backward()
        else:
            ledger.lap("backward_us")
        mean = loss.detach() / micro.samples if session.objective.summed and micro.samples else loss.detach()
        ledger.note_loss(mean, micro.samples)
    dispatcher.flights = None
    if look:
        dispatcher.measure_fidelity(session.exchange.exact_sum)
        ledger.lap("sync_us")

    precision.check_gradients(optimizer)
    if settings.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(session.model.parameters(), settings.clip_norm)
    with warmed_up(optimizer, index, settings.warmup_steps):
        stepped = precision.step(optimizer)
    dispatcher.end_step(applied=stepped)
    if not stepped:
        session.events.warning("step_skipped", step=step.number, reason="a gradient is not finite")
    elif schedule is not None:
        schedule.step()
    optimizer.zero_grad(set_to_none=True)
    ledger.lap("optimizer_us")


def _weight(session: Session, samples: int, total: int) -> float:
    """What a micro-batch's mean loss counts, so that DDP's mean over ranks is the mean over samples.

    1 where all ranks hold equally many samples and there is one micro-batch.
    """
    if session.objective.summed:
        return 1.0 if samples else 0.0
    return samples * session.ranks.size / total


def _backward(session: Session, loss: torch.Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        # DDP passes on no more than the text of what a hook or a collective raised.
        cause = session.dispatcher.error
        if cause is not None and cause is not error:
            raise cause from None
        raise


@contextmanager
def warmed_up(optimizer: torch.optim.Optimizer, index: int, warmup_steps: int) -> Iterator[None]:
    """Inside, learning rates are (index + 1) / warmup_steps of what the schedule says, for the first steps.

    The schedule runs from the stage's first step on all the same, and never sees the lowered rates.
    """
    if index >= warmup_steps:
        yield
        return
    scheduled = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr * (index + 1) / warmup_steps
    yield
    for group, lr in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = lr


def restore_settings(session: Session) -> None:
    """Set the optimizer's settings (learning rate, momentum …) back to the file's: a schedule of an earlier
    stage has changed them. Its state stays.
    """
    for group, settings in zip(session.optimizer.param_groups, session.optimizer_settings, strict=True):
        group.pop("initial_lr", None)
        group.update(settings)


def _schedule_path(stage: Train) -> str:
    return f"{stage.path}.schedule" if "schedule" in stage.model_fields_set else "schedule"
