"""What the steps of train and forward stages share: the weight of a batch, and the optimizer's step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddprun.engine.session import Session
from ddprun.engine.stage_run import StageRun


def weight(session: Session, samples: int, total: int) -> float:
    """What a micro-batch's mean loss counts, so that the mean over ranks is the mean over samples.

    1 where all ranks hold equally many samples and there is one micro-batch.
    """
    if session.objective.summed:
        return 1.0 if samples else 0.0
    return samples * session.ranks.size / total


def take_step(course: StageRun, step: int, *, scaled: bool = True) -> bool:
    """Clip, step, follow the schedule; whether the step was taken.

    Args:
        course: the stage.
        step: counts from 1 in the stage.
        scaled: gradients come from a backward pass, whose loss may have been scaled.
    """
    session, settings = course.session, course.settings
    precision, optimizer = session.precision, session.optimizer
    if scaled:
        precision.check_gradients(optimizer)
    if settings.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(session.model.parameters(), settings.clip_norm)
    with warmed_up(optimizer, step - 1, settings.warmup_steps):
        if scaled:
            stepped = precision.step(optimizer)
        else:
            stepped = precision.scaler is None or _finite(session)
            if stepped:
                optimizer.step()
    if not stepped:
        session.events.warning(
            "step_skipped", step=session.step + 1, reason="a gradient is not finite", rank=session.ranks.rank
        )
    if stepped:
        follow_schedule(course)
    optimizer.zero_grad(set_to_none=True)
    return stepped


def follow_schedule(course: StageRun) -> None:
    """The schedule's next step."""
    if course.session.schedule is not None:
        course.session.schedule.step()


def _finite(session: Session) -> bool:
    """Whether every gradient is: in half precision a score overflows sooner than a loss that is scaled."""
    gradients = [param.grad for param in session.model.parameters() if param.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


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
