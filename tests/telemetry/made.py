"""Made-up steps, each by itself, and the page on which steps stand one behind another."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ddprun.telemetry.step import MarkBuffer, Step, Traffic
from ddprun_hooks.comm.trace import BucketTrace


@dataclass(slots=True)
class Made:
    """What one step leaves behind."""

    number: int
    stage: int
    parts: list[str]
    marks: list[int]
    """Nanoseconds."""

    traces: list[BucketTrace[int]] = field(default_factory=list)
    gradients: Mapping[str, int] | None = None
    sync: Traffic | None = None
    backward_end: int | None = None
    """One of the marks."""

    losses: list[torch.Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    synchronised: bool = True
    wishes: int = 0


def buffer_of(steps: Iterable[Made]) -> MarkBuffer:
    """As a recorder would have filled it."""
    buffer = MarkBuffer()
    for made in steps:
        step = Step(made.number, made.stage, synchronised=made.synchronised, wishes=made.wishes)
        step.gradients, step.sync = made.gradients, made.sync
        first = len(buffer.marks)
        buffer.parts += made.parts
        buffer.marks += made.marks
        if made.backward_end is not None:
            step.backward_end = buffer.marks.index(made.backward_end, first)
        buffer.traces += made.traces
        buffer.losses += [float(loss) for loss in made.losses]
        buffer.samples += made.samples
        buffer.close(step)
    return buffer
