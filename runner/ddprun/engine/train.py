"""The train stage.

```
for each optimizer step:
    for each micro-batch:                       (accumulate)
        fetch, move to the device               data_us
        buffers, if forward passes want them    sync_us
        forward, loss                           forward_us
        backward; in the last micro-batch the   backward_us, exposed_*_us
          hooks reduce each bucket as it fills
    look for non-finite gradients, clip,        optimizer_us
      optimizer step, schedule
    every n-th step: compare with the exact   sync_us
      mean gradient
```

A stage whose gradients stay on their rank never enters DDP: it calls the bare model.
"""

from contextlib import nullcontext
from typing import Any

import torch

from ddprun.config import Train
from ddprun.engine.data import StepBatches
from ddprun.engine.layout import without_gradient
from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun, run
from ddprun.engine.steps import take_step, weight
from ddprun_hooks.dispatcher import Dispatcher


def train(session: Session, stage: Train) -> dict[str, Any]:
    """Run a train stage; gives its entry in the summary."""
    return run(session, stage, compute)


def compute(course: StageRun, batches: StepBatches, step: int) -> None:
    """One optimizer step."""
    session = course.session
    recorder, precision, watchdog = session.recorder, session.precision, session.ranks.watchdog
    ddp = session.ddp if course.settings.gradients else None
    dispatcher = session.dispatcher if ddp is not None else None
    scale = precision.loss_scale()
    look = _looks(course)
    if dispatcher is not None:
        dispatcher.begin_step(scale, fidelity=look)
    for place, micro in enumerate(batches.micro_batches, start=1):
        last = place == batches.count
        content = precision.admit(micro.content)
        recorder.lap("data_us")
        if session.buffers.before_forward():
            recorder.lap("sync_us")
        watchdog.turn(b"forward")
        with nullcontext() if last or ddp is None else ddp.no_sync():  # what counts is where the forward runs
            with precision.computing():
                loss = session.objective(session.model if ddp is None else ddp, content).loss
            weighted = loss * weight(session, micro.samples, batches.total)
            if scale is not None:
                weighted = weighted * scale
            recorder.lap("forward_us")
            if dispatcher is not None:
                dispatcher.traces = recorder.traces
            watchdog.turn(b"backward")
            _backward(dispatcher, weighted)
            if last and dispatcher is not None and (missing := dispatcher.missing):
                unused = [name for name in without_gradient(session.model) if name in missing]
                where = f"the loss of rank {session.ranks.rank} in step {session.step + 1}"
                raise session.objective.unused(unused or missing, where)
            watchdog.turn(b"data")
            if last and session.gradients is not None:
                recorder.current.gradients = session.gradients.take()
        if last and dispatcher is not None:
            recorder.end_backward()
        else:
            recorder.lap("backward_us")
        mean = loss.detach() / micro.samples if session.objective.summed and micro.samples else loss.detach()
        recorder.note_loss(mean, micro.samples)
    if dispatcher is None:
        precision.unscale(session.model.parameters())
    else:
        dispatcher.traces = None
        if look:
            dispatcher.measure_fidelity(session.exchange.exact_sum)
            recorder.lap("sync_us")
    watchdog.turn(b"optimizer")
    applied = take_step(course, step)
    if dispatcher is not None:
        dispatcher.end_step(applied=applied)
    recorder.lap("optimizer_us")


def _looks(course: StageRun) -> bool:
    """Whether this step's gradients are compared with the exact mean."""
    every = course.session.loaded.pipeline.timings.fidelity_every
    number = course.session.recorder.current.number
    return bool(every) and number % every == 0 and course.settings.gradients == "all"


def _backward(dispatcher: Dispatcher | None, loss: torch.Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        # DDP passes on no more than the text of what a hook or a collective raised.
        cause = dispatcher.error if dispatcher is not None else None
        if cause is not None and cause is not error:
            raise cause from None
        raise
