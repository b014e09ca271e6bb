"""The offsets between the ranks' clocks, measured again and again: no clock runs like another."""

import time
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from ddprun.telemetry.clock import Clock, StreamClock
from ddprun.telemetry.recorder import StepRecorder
from ddprun_hooks.comm.control import Control

_EVERY_S = 60.0


@dataclass(slots=True)
class ClockOffsets:
    """Measures each rank's clock against rank 0's, by messages over `control`."""

    clock: Clock
    control: Control
    recorder: StepRecorder
    events: FilteringBoundLogger
    measured_s: float = 0.0  # when that was done last, on this process's clock

    @property
    def are_old(self) -> bool:
        """The offsets were measured a while ago."""
        return time.monotonic() - self.measured_s > _EVERY_S

    def measure(self) -> None:
        """Called by all ranks at the same moment."""
        if isinstance(self.clock, StreamClock):
            self.clock.tie()
        offset, bound = self.control.clock_offset()
        self.recorder.offset_us = offset
        measured = self.control.all_gather([offset, bound], "clock offsets")
        self.events.info(
            "clock_offsets",
            offset_us=[round(value, 1) for value in measured[:, 0].tolist()],
            error_us=[round(value, 1) for value in measured[:, 1].tolist()],
        )
        self.measured_s = time.monotonic()
