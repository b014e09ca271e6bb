"""Trackers of a run: fed from rank 0 on a thread of their own, never able to hold the run or to end it."""

import importlib
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ENDS_S = 20.0
"""For all trackers together to bring out what they have at the end of a run."""

_FAILS_S, _HOLDS_S = 5.0, 10.0
_QUEUE_LIMIT = 10_000
_LOOK_EVERY_S = 0.2

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


class _Fed:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, make: Make, about: About, told: Callable[[str, str], None]) -> None:
        self.name, self.dropped = name, 0
        self._make, self._about, self._told = make, about, told
        self._queue: queue.Queue[Callable[[Tracker], None]] = queue.Queue(_QUEUE_LIMIT)
        self._summary: Mapping[str, Any] | None = None
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"ddprun-{name}", daemon=True)
        self.thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.dropped += 1

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close it once it has had what is in the queue, however full that is."""
        self._summary = summary
        self._end.set()

    def _work(self) -> None:
        try:
            tracker = self._make(self._about)
            while not (self._end.is_set() and self._queue.empty()):
                try:
                    call = self._queue.get(timeout=_LOOK_EVERY_S)
                except queue.Empty:
                    continue
                call(tracker)
            tracker.close(self._summary or {})
        except Exception as error:  # a tracker may raise anything, and the run goes on
            self._told(self.name, f"{type(error).__name__}: {error}")
            self._queue = queue.Queue(1)  # what is left is let go


class Trackers:
    """All trackers of a run, each on a thread of its own.

    Args:
        makers: each by name; called on its thread.
        about: the run.
        told: is told, on its thread, which tracker has failed and why; it gets nothing more then.
    """

    def __init__(self, makers: Mapping[str, Make], about: About, told: Callable[[str, str], None]) -> None:
        self._fed = [_Fed(name, make, about, told) for name, make in makers.items()]
        self._may_fail = threading.Event()
        self._may_fail.set()
        self._closed, self._failing = False, threading.Lock()

    @property
    def dropped(self) -> dict[str, int]:
        """What came while a tracker was too slow, and went nowhere."""
        return {one.name: one.dropped for one in self._fed}

    def step(self, told: StepTold) -> None:
        """Pass on a step."""
        for one in self._fed:
            one.put(lambda tracker: tracker.step(told))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on what an evaluate stage has measured, as far as it is finite."""
        values = finite_only(values)
        for one in self._fed:
            one.put(lambda tracker: tracker.metrics(step, values))

    def close(self, summary: Mapping[str, Any], within_s: float | None = None) -> list[str]:
        """Let them bring out what they have; gives those that did not come to an end in time."""
        self._closed = True
        until = time.monotonic() + (_ENDS_S if within_s is None else within_s)
        for one in self._fed:
            one.end(summary)
        for one in self._fed:
            one.thread.join(max(0.0, until - time.monotonic()))
        return [one.name for one in self._fed if one.thread.is_alive()]

    def hold(self) -> None:
        """`fail` waits on any other thread until it has been called on this one."""
        self._may_fail.clear()

    def fail(self, within_s: float | None = None) -> None:
        """The run has failed: they are told so, and given little time, since other ranks wait for this one.

        Args:
            within_s: seconds at most.
        """
        if threading.current_thread() is threading.main_thread():
            self._may_fail.set()
        self._may_fail.wait(_HOLDS_S)
        with self._failing:
            if not self._closed:
                self.close({"status": "failed"}, _FAILS_S if within_s is None else within_s)


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


def nobody() -> Trackers:
    """No trackers."""
    return Trackers({}, About("", Path(), {}), lambda name, why: None)


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
    return finite_only(found)


def finite_only(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers: a curve has no point at NaN or an infinity."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
