"""The offsets between the ranks' clocks, measured again and again: no clock runs like another."""

import time

from structlog.typing import FilteringBoundLogger

from ddprun.telemetry.clock import Clock, StreamClock
from ddprun.telemetry.recorder import StepRecorder
from ddprun_hooks.comm.control import Control

_EVERY_S = 60.0


class ClockOffsets:
    """Measures each rank's clock against rank 0's, by messages over `control`."""

    def __init__(
        self, clock: Clock, control: Control, recorder: StepRecorder, events: FilteringBoundLogger
    ) -> None:
        self._clock, self._control, self._recorder, self._events = clock, control, recorder, events
        self._measured_s = 0.0

    @property
    def are_old(self) -> bool:
        """The offsets were measured a while ago."""
        return time.monotonic() - self._measured_s > _EVERY_S

    def measure(self) -> None:
        """Called by all ranks together."""
        if isinstance(self._clock, StreamClock):
            self._clock.tie()
        offset, bound = self._control.clock_offset()
        self._recorder.offset_us = offset
        measured = self._control.all_gather([offset, bound], "clock offsets")
        self._events.info(
            "clock_offsets",
            offset_us=[round(value, 1) for value in measured[:, 0].tolist()],
            error_us=[round(value, 1) for value in measured[:, 1].tolist()],
        )
        self._measured_s = time.monotonic()
