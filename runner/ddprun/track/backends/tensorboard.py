"""TensorBoard event files, by its own package."""

import time
from collections.abc import Mapping
from typing import Any

from ddprun.options import PositiveInt
from ddprun.track import CurveTracker, RunInfo, StepInfo


class Tensorboard(CurveTracker):
    """TensorBoard event files in the run's folder. Needs the package tensorboard."""

    class Options(CurveTracker.Options):
        every: PositiveInt = 1
        """Steps from one point of a curve to the next."""

    needs = "tensorboard"

    def __init__(self, options: Options, run: RunInfo) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        super().__init__(options, run)
        self._writer = EventFileWriter(str(run.own_folder("tensorboard")))
        self._begun = False

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()

    def log_step(self, step: StepInfo) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # Readers drop what an attempt before has written of this step and later ones. An evaluation that
        # comes first, of the step before, is not to drop that step.
        if not self._begun:
            self._begun, start = True, SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=step.record.step, wall_time=time.time(), session_log=start))
        super().log_step(step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=found)))
