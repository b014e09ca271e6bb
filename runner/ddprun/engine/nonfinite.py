"""Losses and parameters that are not finite: found on all ranks after the same step, and reported once.

Control messages bring every rank's losses, so all ranks learn of one that is NaN or infinite after the same
step, and no step waits for it. Only then are parameters checked. A parameter that is not finite never becomes
finite again, so with `on_nan: stop` the run ends there. A loss alone is no reason to end: a GradScaler skips
such a step, and a batch whose targets are all ignored has NaN for a mean and no gradient.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun_hooks.comm.control_channel import ControlChannel

OnNan = Literal["continue", "stop"]


@dataclass(frozen=True, slots=True)
class NonfiniteFinding:
    """The first loss or parameter of a run that was not finite."""

    step: int
    rank: int  # whose loss, or parameter, it was
    value: str | None  # the loss: "nan", "inf" or "-inf"; None: every loss was finite
    parameter: str | None  # the first that is not finite, in the model's order; None: all were finite then

    def describe(self) -> str:
        if self.value is None:
            what = f"{self.parameter} is not finite on rank {self.rank}, though every loss was"
            return f"step {self.step}: {what}"
        then = "all parameters are still finite"
        if self.parameter is not None:
            then = f"{self.parameter} is the first parameter that is not finite"
        return f"step {self.step}: the loss of rank {self.rank} is {self.value}; {then}"


class FiniteCheck:
    """Finds trained parameters that are no longer finite; `report` gets the first finding of the run."""

    def __init__(
        self,
        model: nn.Module,
        control: ControlChannel,
        recorder: StepRecorder,
        report: Callable[[NonfiniteFinding], None],
    ) -> None:
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.initially_nonfinite = frozenset(_nonfinite_names(named))
        self._params = {name: param for name, param in named.items() if name not in self.initially_nonfinite}
        self._names = list(self._params)
        self._control, self._recorder, self._report = control, recorder, report
        self.first_nonfinite: NonfiniteFinding | None = None
        self.nonfinite_parameter: str | None = None  # that was not finite in the last check
        self.failed = False  # the run ends because weights are not finite any more

    def check_after_steps(self, agreed_steps: Iterable[AgreedSteps], on_nan: OnNan, step: int) -> bool:
        """Check the parameters if a loss in `agreed_steps` was not finite; whether the run fails."""
        if not any(one.nonfinite for one in agreed_steps) or (self.first_nonfinite and on_nan == "continue"):
            return self.failed
        return self.check_parameters(on_nan, step)

    def check_parameters(self, on_nan: OnNan, step: int) -> bool:
        """Find and report the first loss or parameter of the ranks that is not finite; whether the run fails.
        Waits for the device.
        """
        loss = self._recorder.first_nonfinite_loss or (0, 0.0)  # step 0: each was finite
        # Counted from 1; 0: each is finite.
        number = next((1 + self._names.index(name) for name in _nonfinite_names(self._params)), 0)
        rows = self._control.all_gather([*loss, number], "what is not finite").tolist()
        numbers = [int(row[2]) for row in rows]
        number = next(filter(None, numbers), 0)
        self.nonfinite_parameter = self._names[number - 1] if number else None
        losses = [(int(row[0]), rank) for rank, row in enumerate(rows) if row[0]]
        if self.first_nonfinite is None and (losses or number):
            at, rank = min(losses, default=(step, numbers.index(number)))
            value = str(rows[rank][1]) if losses else None
            self.first_nonfinite = NonfiniteFinding(at, rank, value, self.nonfinite_parameter)
            self._report(self.first_nonfinite)
        self.failed = self.failed or (number > 0 and on_nan == "stop")
        return self.failed


def _nonfinite_names(named: Mapping[str, Tensor]) -> list[str]:
    if not named:
        return []
    flags = torch.stack([torch.isfinite(param.detach()).all().cpu() for param in named.values()]).tolist()
    return [name for name, finite in zip(named, flags, strict=True) if not finite]
