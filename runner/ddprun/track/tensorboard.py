"""TensorBoard event files, by its own package."""

from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ddprun.config.options import Tensorboard
from ddprun.track.trackers import About, StepTold, curves


class TensorboardTracker:
    """Writes into `tensorboard/` of the run's folder."""

    def __init__(self, settings: Tensorboard, about: About) -> None:
        self._every = settings.every
        self._writer = EventFileWriter(str(about.folder / "tensorboard"))

    def step(self, told: StepTold) -> None:
        """One point of every curve."""
        step = told.record["step"]
        if step % self._every == 0:
            self._add(step, curves(told))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One point of every metric."""
        self._add(step, {f"evaluate/{name}": value for name, value in values.items()})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Bring everything to disk."""
        self._writer.close()

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        import time

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=found)))


def open_tracker(settings: Tensorboard, about: About) -> TensorboardTracker:
    """The tracker of a run."""
    return TensorboardTracker(settings, about)
