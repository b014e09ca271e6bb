"""MLflow, by its own package; no global state of MLflow's is touched."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddprun.track import CurveTracker, RunInfo

_MAX_VALUE_LENGTH = 500  # what every MLflow server takes
_LOCAL_URIS = ("sqlite:///", "file:")


class Mlflow(CurveTracker):
    """MLflow. Needs the package mlflow."""

    class Options(CurveTracker.Options):
        tracking_uri: str | None = None
        """The server; null: what `MLFLOW_TRACKING_URI` says, or MLflow's default."""

        experiment: str = "ddprun"
        """Where the run appears."""

    needs = "mlflow"

    def __init__(self, options: Options, run: RunInfo) -> None:
        from mlflow.tracking import MlflowClient, get_tracking_uri

        super().__init__(options, run)
        uri = _absolute_uri(options.tracking_uri or get_tracking_uri(), run.started_in)
        client = self._client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(options.experiment)
        experiment = known.experiment_id if known else client.create_experiment(options.experiment)
        self._id = client.create_run(experiment, run_name=run.folder.name).info.run_id
        for key, value in _flat(run.pipeline):
            client.log_param(self._id, key, str(value)[:_MAX_VALUE_LENGTH])

    def close(self, summary: Mapping[str, Any]) -> None:
        states = {"done": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, states.get(str(summary.get("status")), "FAILED"))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, points)


def _absolute_uri(uri: str, folder: Path) -> str:
    """A URI of MLflow's; one of a local file or folder by its absolute path."""
    start = next((one for one in _LOCAL_URIS if uri.startswith(one)), "")
    path = uri.removeprefix(start)
    remote = not start and (":" in uri or uri.startswith("databricks"))
    return uri if remote or path.startswith("/") else f"{start}{folder / path}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
