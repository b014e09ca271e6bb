"""MLflow, by its own package."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from ddprun.config.options import Mlflow
from ddprun.track.trackers import About, StepTold, curves

_VALUE_CHARACTERS = 500  # what every MLflow server takes


class MlflowTracker:
    """One run there for a run here; no global state of MLflow's is touched."""

    def __init__(self, settings: Mlflow, about: About) -> None:
        self._every = settings.every
        self._client = MlflowClient(tracking_uri=settings.tracking_uri)
        known = self._client.get_experiment_by_name(settings.experiment)
        place = (
            known.experiment_id if known is not None else self._client.create_experiment(settings.experiment)
        )
        self._id = self._client.create_run(place, run_name=about.folder.name).info.run_id
        for key, value in _flat(about.pipeline):
            self._client.log_param(self._id, key, str(value)[:_VALUE_CHARACTERS])

    def step(self, told: StepTold) -> None:
        """One point of every curve."""
        step = told.record["step"]
        if step % self._every == 0:
            self._add(step, curves(told))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One point of every metric."""
        self._add(step, {f"evaluate/{name}": value for name, value in values.items()})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Say how it ended."""
        states = {"done": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, states.get(str(summary.get("status")), "FAILED"))

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(name, value, now_ms, step) for name, value in values.items()]
        )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def open_tracker(settings: Mlflow, about: About) -> MlflowTracker:
    """The tracker of a run."""
    return MlflowTracker(settings, about)
