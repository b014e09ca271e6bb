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
from ddprun.engine.loop import follow_schedule, mean_loss, optimizer_step, run_stage, weight
from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun

Update = Callable[[nn.Module, Callable[[], Tensor]], Any]


def forward(session: Session, stage: Forward) -> dict[str, Any]:
    """Run a forward stage; gives its entry in the summary."""
    update: Update | None = None
    if stage.update is not None:
        update = build.build_update(session.runtime.loaded, f"{stage.path}.update", stage.update)
    return run_stage(session, stage, partial(forward_step, update))


def forward_step(update: Update | None, run: StageRun, batches: StepBatches, step: int) -> None:
    """A batch, forward passes on it, and whatever the update makes of their losses."""
    session, runtime = run.session, run.session.runtime
    recorder, precision = runtime.recorder, runtime.precision
    (micro,) = batches.micro_batches
    content = precision.admit(micro.content)
    recorder.lap("data_us")
    if runtime.buffers.before_forward():
        recorder.lap("sync_us")
    runtime.ranks.watchdog.turn(b"forward")
    if update is None:
        with torch.no_grad(), precision.computing():
            loss = runtime.objective(runtime.model, content).loss
        recorder.note_loss(mean_loss(session, loss, micro.samples), micro.samples)
        recorder.lap("forward_us")
        return

    same_draws = seeding.SameDraws(runtime.device)
    share = weight(session, micro.samples, batches.total)
    losses: list[Tensor] = []

    def score() -> Tensor:
        """The loss of the weights as they are, on this step's batch; all scores of a step draw alike."""
        with torch.no_grad(), same_draws(), precision.computing():
            loss = runtime.objective(runtime.model, content).loss
        losses.append(loss)
        return loss * share

    if micro.samples:  # a rank without samples has nothing to go by
        update(runtime.model, score)
    mean = torch.stack(losses).mean() if losses else torch.tensor(math.nan)
    recorder.note_loss(mean_loss(session, mean, micro.samples), micro.samples if losses else 0)
    recorder.lap("forward_us")
    if any(param.grad is not None for param in runtime.model.parameters()):
        optimizer_step(run, step, from_backward=False)
    else:
        follow_schedule(run)
    recorder.lap("optimizer_us")
