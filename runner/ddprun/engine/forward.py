"""The forward stage: forward passes only; what changes the weights, if anything, is the stage's `update`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddprun.config import Forward
from ddprun.engine import build, seeding
from ddprun.engine.data import StepBatches
from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun, run
from ddprun.engine.steps import follow_schedule, take_step, weight

Update = Callable[[nn.Module, Callable[[], Tensor]], Any]


def forward(session: Session, stage: Forward) -> dict[str, Any]:
    """Run a forward stage; gives its entry in the summary."""
    update: Update | None = None
    if stage.update is not None:
        update = build.build_update(session.loaded, f"{stage.path}.update", stage.update)
    return run(session, stage, partial(_compute, update))


def _compute(update: Update | None, course: StageRun, batches: StepBatches, step: int) -> None:
    """One step: a batch, forward passes on it, and whatever the update makes of their losses."""
    session = course.session
    recorder, precision = session.recorder, session.precision
    (micro,) = batches.micro_batches
    content = precision.admit(micro.content)
    recorder.lap("data_us")
    if session.buffers.before_forward():
        recorder.lap("sync_us")
    session.ranks.watchdog.turn(b"forward")
    if update is None:
        with torch.no_grad(), precision.computing():
            loss = session.objective(session.model, content).loss
        recorder.note_loss(_mean(session, loss, micro.samples), micro.samples)
        recorder.lap("forward_us")
        return

    same_draws = seeding.SameDraws(session.place.device)
    share = weight(session, micro.samples, batches.total)
    losses: list[Tensor] = []

    def score() -> Tensor:
        """The loss of the weights as they are, on this step's batch; all scores of a step draw alike."""
        with torch.no_grad(), same_draws(), precision.computing():
            loss = session.objective(session.model, content).loss
        losses.append(loss)
        return loss * share

    if micro.samples:  # a rank without samples has nothing to go by
        update(session.model, score)
    mean = torch.stack(losses).mean() if losses else torch.tensor(math.nan)
    recorder.note_loss(_mean(session, mean, micro.samples), micro.samples if losses else 0)
    recorder.lap("forward_us")
    if any(param.grad is not None for param in session.model.parameters()):
        take_step(course, step, scaled=False)
    else:
        follow_schedule(course)
    recorder.lap("optimizer_us")


def _mean(session: Session, loss: Tensor, samples: int) -> Tensor:
    return loss / samples if session.objective.summed and samples else loss
