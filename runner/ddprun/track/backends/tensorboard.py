"""TensorBoard event files, by its own package."""

import time
from collections.abc import Mapping
from typing import Any

from ddprun.options import PositiveInt
from ddprun.track import RunInfo, StepInfo, Tracker, curves


class Tensorboard(Tracker):
    """TensorBoard event files in the run's folder. Needs the package tensorboard."""

    class Options(Tracker.Options):
        every: PositiveInt = 1
        """Steps from one point of a curve to the next."""

    needs = "tensorboard"

    def __init__(self, options: Options, run: RunInfo) -> None:
        """Open a file in `tensorboard/` of the run's folder."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._every = options.every
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))

    def step(self, step: StepInfo) -> None:
        """Add a point to every curve."""
        number = step.record["step"]
        if number % self._every == 0:
            self._add(number, curves(step))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to every metric."""
        self._add(step, {f"evaluate/{name}": value for name, value in values.items()})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Bring everything to disk."""
        self._writer.close()

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=found)))
