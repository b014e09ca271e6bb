"""Trackers of a run: fed from rank 0 on a thread of their own, never able to hold the run or to end it."""

import importlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ENDS_S = 20.0
"""For all trackers together to bring out what they have at the end of a run."""

_QUEUE_LIMIT = 10_000

NEEDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}
"""The package that each needs; `pip install 'ddprun[NAME]'` has it."""


@dataclass(frozen=True, slots=True)
class StepTold:
    """What trackers hear of a step."""

    record: Mapping[str, Any]
    """As in `steps/rank-00000.jsonl` (`docs/records.md`)."""

    sent: Mapping[tuple[str, str], int]
    """Bytes that rank 0 sent, by kind and by the names of the hooks."""


@dataclass(frozen=True, slots=True)
class About:
    """What a tracker may know of the run; secrets are left out of it."""

    name: str
    folder: Path
    pipeline: Mapping[str, Any]


class Tracker(Protocol):
    """One of them. Its methods are called on the trackers' thread, and may raise anything."""

    def step(self, told: StepTold) -> None:
        """A step is known to its end."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluate stage has measured these after so many steps."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; what is left goes out."""


Make = Callable[[About], Tracker]


class Trackers:
    """All trackers of a run.

    Args:
        makers: each by name; called on the trackers' thread.
        about: the run.
        told: is told, on the trackers' thread, which tracker has failed and why; it is not called again then.
    """

    def __init__(self, makers: Mapping[str, Make], about: About, told: Callable[[str, str], None]) -> None:
        self._told = told
        self.dropped = 0
        """What came while the trackers were too slow, and went nowhere."""

        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        if makers:
            self._thread = threading.Thread(
                target=self._work, args=(makers, about), name="ddprun-trackers", daemon=True
            )
            self._thread.start()

    def step(self, told: StepTold) -> None:
        """Pass on a step."""
        self._put(lambda tracker: tracker.step(told))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on what an evaluate stage has measured."""
        self._put(lambda tracker: tracker.metrics(step, values))

    def close(self, summary: Mapping[str, Any]) -> bool:
        """Let them bring out what they have; whether they came to an end in time."""
        if self._thread is None:
            return True
        self._put(lambda tracker: tracker.close(summary))
        self._put(None)
        self._thread.join(_ENDS_S)
        return not self._thread.is_alive()

    def _put(self, call: Callable[[Tracker], None] | None) -> None:
        if self._thread is not None:
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self.dropped += 1

    def _work(self, makers: Mapping[str, Make], about: About) -> None:
        trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            try:
                trackers[name] = make(about)
            except Exception as error:  # a tracker may raise anything, and the run goes on
                self._told(name, f"{type(error).__name__}: {error}")
        while (call := self._queue.get()) is not None:
            for name in list(trackers):
                try:
                    call(trackers[name])
                except Exception as error:
                    del trackers[name]
                    self._told(name, f"{type(error).__name__}: {error}")


def maker(name: str, settings: Any) -> Make:
    """What makes a tracker by the options of the file.

    Args:
        name: of the tracker.
        settings: its options.
    """

    def make(about: About) -> Tracker:
        found: Tracker = importlib.import_module(f"ddprun.track.{name}").open_tracker(settings, about)
        return found

    return make


def missing(names: Sequence[str]) -> list[str]:
    """Which of these trackers need a package that is not installed."""
    return [name for name in names if importlib.util.find_spec(NEEDS[name]) is None]


def curves(told: StepTold) -> dict[str, float]:
    """A step's numbers, in seconds and bytes, by the names under which trackers show them."""
    record = told.record
    parts = {key[:-3]: value for key, value in record.items() if key.endswith("_us") and key != "start_us"}
    found = {f"time/{part}_seconds": us / 1e6 for part, us in parts.items()}
    found["loss/rank_0"] = record["loss"]
    if record["mean_loss"] is not None:
        found["loss/mean"] = record["mean_loss"]
    found["communication/bytes"] = float(sum(told.sent.values()))
    return {name: float(value) for name, value in found.items() if value == value}
