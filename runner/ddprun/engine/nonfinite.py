"""Losses and parameters that are not finite: found on all ranks after the same step, and reported once.

Control messages bring every rank's losses, so all ranks learn of one that is NaN or infinite after the same
step, and no step waits for it. Only then are parameters checked. A parameter that is not finite never becomes
finite again, so with `on_nan: stop` the run ends there. A loss alone is no reason to end: a GradScaler skips
such a step, and a batch whose targets are all ignored has NaN for a mean and no gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun_hooks.comm.control import Control

OnNan = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """The first loss or parameter of a run that was not finite."""

    step: int
    rank: int  # whose loss, or parameter, it was
    value: str | None  # the loss: "nan", "inf" or "-inf"; None: every loss was finite
    parameter: str | None  # the first that is not finite, in the model's order; None: all were finite then

    def describe(self) -> str:
        """For the screen."""
        if self.value is None:
            lost = f"{self.parameter} is not finite on rank {self.rank}, though every loss was"
            return f"step {self.step}: {lost}"
        then = "all parameters are still finite"
        if self.parameter is not None:
            then = f"{self.parameter} is the first parameter that is not finite"
        return f"step {self.step}: the loss of rank {self.rank} is {self.value}; {then}"


class FiniteCheck:
    """Finds trained parameters that are no longer finite; those that are infinite at first may stay so.

    The recorder knows this rank's own losses, and `report` gets the first finding of the run.
    """

    def __init__(
        self, model: nn.Module, control: Control, recorder: StepRecorder, report: Callable[[Nonfinite], None]
    ) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.infinite_at_first = frozenset(_not_finite(named))
        self._params = {name: param for name, param in named.items() if name not in self.infinite_at_first}
        self._names = list(self._params)
        self._control, self._recorder, self._report = control, recorder, report
        self.found: Nonfinite | None = None
        self.lost_parameter: str | None = None  # that was not finite in the last check
        self.failed = False  # the run ends because weights are not finite any more

    def first_lost(self) -> int:
        """The number of the first parameter that is not finite, from 1; 0: all are. Waits for the device."""
        return next((1 + self._names.index(name) for name in _not_finite(self._params)), 0)

    def after_steps(self, agreed_steps: Iterable[AgreedSteps], on_nan: OnNan, step: int) -> bool:
        """Check the parameters if a loss is not finite in the steps that all ranks newly know of; whether the
        run fails. Called by all ranks, after so many steps of the run.
        """
        if not any(one.nonfinite for one in agreed_steps) or (self.found and on_nan == "continue"):
            return self.failed
        at, loss = self._recorder.nonfinite or (0, 0.0)
        rows = self._control.all_gather([at, loss, self.first_lost()], "losses that are not finite").tolist()
        lost = [int(row[2]) for row in rows]
        first_lost = next(filter(None, lost), 0)
        if self.found is None:
            own = [(int(row[0]), rank) for rank, row in enumerate(rows) if row[0]]
            # A resumed run may have got a sum of losses from the checkpoint, of which no rank knows the step.
            at, rank = min(own, default=(step, 0))
            self._note(at, rank, str(rows[rank][1]) if own else "nan", lost[rank] or first_lost)
        return self._fail_if_lost(first_lost, on_nan)

    def at_end(self, lost: Sequence[int], on_nan: OnNan, step: int) -> bool:
        """The same at a stage's end, by `first_lost` of every rank."""
        rank = next((rank for rank, number in enumerate(lost) if number), None)
        if rank is None:
            return self.failed
        if self.found is None:
            self._note(step, rank, None, lost[rank])
        return self._fail_if_lost(lost[rank], on_nan)

    def _note(self, step: int, rank: int, value: str | None, lost: int) -> None:
        self.found = Nonfinite(step, rank, value, self._names[lost - 1] if lost else None)
        self._report(self.found)

    def _fail_if_lost(self, lost: int, on_nan: OnNan) -> bool:
        self.lost_parameter = self._names[lost - 1] if lost else None
        self.failed = self.failed or (lost > 0 and on_nan == "stop")
        return self.failed


def _not_finite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of those that are not, in order."""
    if not named:
        return []
    flags = torch.stack([torch.isfinite(param.detach()).all().cpu() for param in named.values()]).tolist()
    return [name for name, finite in zip(named, flags, strict=True) if not finite]
