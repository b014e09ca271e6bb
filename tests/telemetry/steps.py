"""Made-up steps, and the buffer that a recorder would have filled with them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ddprun.telemetry.steps import MarkBuffer, NonBackwardExchanges, StepMarks
from ddprun_hooks.comm.trace import BucketTrace


@dataclass(slots=True)
class MadeStep:
    """What one step leaves behind."""

    number: int
    stage: int
    parts: list[str]
    marks: list[int]
    """Nanoseconds."""

    traces: list[BucketTrace[int]] = field(default_factory=list)
    gradients: Mapping[str, int] | None = None
    sync: NonBackwardExchanges | None = None
    backward_end: int | None = None
    """One of the marks."""

    earlier_passes: Sequence[tuple[int, int]] = ()
    """Of a step with several backward passes: marks that ended all but the last, and the traces so far."""

    losses: list[torch.Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    exchanged: bool = True
    requests: int = 0


def buffer_of(steps: Iterable[MadeStep]) -> MarkBuffer:
    """As a recorder would have filled it."""
    buffer = MarkBuffer()
    for made in steps:
        step = StepMarks(made.number, made.stage, exchanged=made.exchanged, requests=made.requests)
        step.gradient_marks, step.sync = made.gradients, made.sync
        first = len(buffer.marks)
        buffer.parts += made.parts
        buffer.marks += made.marks
        if made.backward_end is not None:
            passes = [*made.earlier_passes, (made.backward_end, len(made.traces))]
            step.backward_ends = [
                (buffer.marks.index(mark, first), len(buffer.traces) + traces) for mark, traces in passes
            ]
        buffer.traces += made.traces
        buffer.numbers += [[float(loss)] for loss in made.losses]
        buffer.samples += made.samples
        buffer.weights += made.samples
        buffer.end_step(step)
    return buffer
