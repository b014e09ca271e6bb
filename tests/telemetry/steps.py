"""Made-up steps, and what a recorder would have made of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ddprun.telemetry.step_timing import MicroBatchNumbers, NonBackwardExchanges, StepMarks
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


def steps_of(steps: Iterable[MadeStep]) -> list[StepMarks]:
    """As a recorder would have filled them."""
    found = []
    for made in steps:
        step = StepMarks(made.number, made.stage, [*made.parts], [*made.marks], [*made.traces])
        step.exchanged, step.requests = made.exchanged, made.requests
        step.gradient_marks, step.non_backward_exchanges = made.gradients, made.sync
        if made.backward_end is not None:
            passes = [*made.earlier_passes, (made.backward_end, len(made.traces))]
            step.backward_ends = [(made.marks.index(mark), traces) for mark, traces in passes]
        for loss, samples in zip(made.losses, made.samples, strict=True):
            step.micro_batches.append(MicroBatchNumbers([float(loss)], samples, samples))
        found.append(step)
    return found
