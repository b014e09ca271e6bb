"""Steps: what they leave behind while they run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddprun_hooks.comm.trace import BucketTrace


@dataclass(slots=True)
class Traffic:
    """What is exchanged beside backward: in a step that runs, or between steps."""

    sent: list[BucketTrace[Any]] = field(default_factory=list)
    """What set out; it may not have landed yet."""

    landed: list[BucketTrace[Any]] = field(default_factory=list)
    """What was waited for; it may have set out in an earlier step."""

    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """When the training thread had nothing to do but wait: marks, from and to."""


@dataclass(slots=True)
class Step:
    """One step; what it left behind is on a `MarkBuffer`."""

    number: int
    stage: int
    marks_end: int = 0
    """Where its marks end on the page; they begin where those of the step before end."""

    traces_end: int = 0
    losses_end: int = 0
    backward_end: int | None = None
    """The place of the mark at which the backward pass ended, if it exchanged gradients."""

    gradients: Mapping[str, Any] | None = None
    """When the gradients were complete, by parameter; None: nobody has looked."""

    sync: Traffic | None = None
    """What else was exchanged: changes of parameters, buffers."""

    synchronised: bool = True
    wishes: int = 0
    """Of this rank (`word.STOP` …)."""


@dataclass(slots=True)
class MarkBuffer:
    """What steps leave behind, one behind another: as few objects as can be, for they are kept for a while.

    Behind that of the steps which are over is that of the one which runs.
    """

    steps: list[Step] = field(default_factory=list)
    """That are over."""

    parts: list[str] = field(default_factory=list)
    """What ended at each mark (one of `records.PARTS`); a step's first, which is "", only starts its time."""

    marks: list[Any] = field(default_factory=list)
    traces: list[BucketTrace[Any]] = field(default_factory=list)
    """Gradient buckets of the backward passes."""

    losses: list[Any] = field(default_factory=list)
    """Of this rank: the mean loss of each micro-batch, as `Clock.on_host` gives it."""

    samples: list[int] = field(default_factory=list)
    """Of each micro-batch."""

    def close(self, step: Step) -> None:
        """The step that ran is over."""
        step.marks_end, step.traces_end = len(self.marks), len(self.traces)
        step.losses_end = len(self.losses)
        self.steps.append(step)

    def forget(self) -> None:
        """Forget the step that runs."""
        self._cut(self.steps[-1] if self.steps else Step(0, 0))

    def split_off(self, count: int) -> "MarkBuffer":
        """Leave so many steps here; gives a page with all that is behind them."""
        rest = MarkBuffer()
        last = self.steps[count - 1] if count else Step(0, 0)
        rest.steps, self.steps = self.steps[count:], self.steps[:count]
        marks, traces, losses = last.marks_end, last.traces_end, last.losses_end
        rest.parts, rest.marks = self.parts[marks:], self.marks[marks:]
        rest.traces = self.traces[traces:]
        rest.losses, rest.samples = self.losses[losses:], self.samples[losses:]
        for step in rest.steps:
            step.marks_end -= marks
            step.traces_end -= traces
            step.losses_end -= losses
            if step.backward_end is not None:
                step.backward_end -= marks
        self._cut(last)
        return rest

    def _cut(self, last: Step) -> None:
        """Nothing comes behind this step."""
        del self.parts[last.marks_end :], self.marks[last.marks_end :]
        del self.traces[last.traces_end :]
        del self.losses[last.losses_end :], self.samples[last.losses_end :]
