"""All trackers of a run: fed from rank 0, each on a thread of its own, which cannot hold or end the run."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddprun.track import RunInfo, StepInfo, Tracker, finite_only

_ENDS_S = 20.0
"""How long the end of a run waits for all trackers together."""

_FAILS_S, _HOLDS_S = 5.0, 10.0
_QUEUE_LIMIT = 10_000

Make = Callable[[RunInfo], Tracker]


class _Feed:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, make: Make, run: RunInfo, failed: Callable[[str, str], None]) -> None:
        self.name, self.dropped = name, 0
        self._make, self._run, self._failed = make, run, failed
        self._queue: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"ddprun-{name}", daemon=True)
        self.thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        if self.thread.is_alive() and self._queue.qsize() < _QUEUE_LIMIT:
            self._queue.put(call)
        else:
            self.dropped += 1

    def end(self, summary: Mapping[str, Any]) -> None:
        """Close it once the queue is empty, however full that is."""
        self._queue.put(lambda tracker: tracker.close(summary))
        self._queue.put(None)

    def _work(self) -> None:
        try:
            tracker = self._make(self._run)
            while call := self._queue.get():
                call(tracker)
        except Exception as error:  # a tracker may raise anything, and the run continues
            self._failed(self.name, f"{type(error).__name__}: {error}")
            self._queue = queue.SimpleQueue()  # frees what is left in the queue


class Trackers:
    """All trackers of a run, each made by one of the `makers` on a thread of its own.

    `failed` is called there with a tracker's name and why it failed; the tracker gets nothing more then.
    """

    def __init__(self, makers: Mapping[str, Make], run: RunInfo, failed: Callable[[str, str], None]) -> None:
        self._feeds = [_Feed(name, make, run, failed) for name, make in makers.items()]
        self._may_fail = threading.Event()
        self._may_fail.set()
        self._closed, self._failing = False, threading.Lock()

    @property
    def dropped(self) -> dict[str, int]:
        """How many calls each tracker was too slow for."""
        return {feed.name: feed.dropped for feed in self._feeds}

    def step(self, step: StepInfo) -> None:
        """Pass on a step."""
        for feed in self._feeds:
            feed.put(lambda tracker: tracker.step(step))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on what an evaluate stage has measured, as far as it is finite."""
        values = finite_only(values)
        for feed in self._feeds:
            feed.put(lambda tracker: tracker.metrics(step, values))

    def close(self, summary: Mapping[str, Any], within_s: float | None = None) -> list[str]:
        """Let them flush; gives those that did not end in time."""
        self._closed = True
        until = time.monotonic() + (_ENDS_S if within_s is None else within_s)
        for feed in self._feeds:
            feed.end(summary)
        for feed in self._feeds:
            feed.thread.join(max(0.0, until - time.monotonic()))
        return [feed.name for feed in self._feeds if feed.thread.is_alive()]

    def hold(self) -> None:
        """`fail` waits on any other thread until it has been called on this one."""
        self._may_fail.clear()

    def fail(self, within_s: float | None = None) -> None:
        """Close them as failed, within seconds, since other ranks wait for this one."""
        if threading.current_thread() is threading.main_thread():
            self._may_fail.set()
        self._may_fail.wait(_HOLDS_S)
        with self._failing:
            if not self._closed:
                self.close({"status": "failed"}, _FAILS_S if within_s is None else within_s)


def nobody() -> Trackers:
    """No trackers."""
    return Trackers({}, RunInfo("", Path(), {}), lambda name, why: None)
