"""Made-up steps, each by itself, and the page on which steps stand one behind another."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ddprun.telemetry.step import Page, Step, Traffic
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


def page_of(steps: Iterable[Made]) -> Page:
    """As a ledger would have filled it."""
    page = Page()
    for made in steps:
        step = Step(made.number, made.stage, synchronised=made.synchronised, wishes=made.wishes)
        step.gradients, step.sync = made.gradients, made.sync
        first = len(page.marks)
        page.parts += made.parts
        page.marks += made.marks
        if made.backward_end is not None:
            step.backward_end = page.marks.index(made.backward_end, first)
        page.traces += made.traces
        page.losses += [float(loss) for loss in made.losses]
        page.samples += made.samples
        page.close(step)
    return page
