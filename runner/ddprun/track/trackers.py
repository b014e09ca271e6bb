"""All trackers of a run: fed from rank 0, each on a thread of its own, which cannot hold or end the run."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddprun.track import StepInfo, Tracker, finite_only

_CLOSE_TIMEOUT_S = 20.0  # how long the end of a run waits for all trackers together
_FAILED_CLOSE_TIMEOUT_S, _MAX_HOLD_S = 5.0, 10.0  # after a failure; another thread's wait for the main one
_QUEUE_LIMIT = 10_000

TrackerFactory = Callable[[], Tracker]


class _TrackerThread:
    def __init__(self, name: str, make: TrackerFactory, on_failure: Callable[[str, str], None]) -> None:
        self.name, self.dropped = name, 0
        self._make, self._on_failure = make, on_failure
        self._queue: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"ddprun-{name}", daemon=True)
        self.thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        if self.thread.is_alive() and self._queue.qsize() < _QUEUE_LIMIT:
            self._queue.put(call)
        else:
            self.dropped += 1

    def close_when_drained(self, summary: Mapping[str, Any]) -> None:
        """Close it once the queue is empty, however full that is."""
        self._queue.put(lambda tracker: tracker.close(summary))
        self._queue.put(None)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while call := self._queue.get():
                call(tracker)
        except BaseException as error:  # a tracker may raise anything, SystemExit too; the run continues
            self._on_failure(self.name, f"{type(error).__name__}: {error}")
            self._queue = queue.SimpleQueue()  # frees what is left in the queue


class Trackers:
    """All trackers of a run, each made by one of `makers`, with its name, on a thread of its own. One that
    fails gets no further calls, and `on_failure` is called on its thread with its name and the reason.
    """

    def __init__(
        self,
        makers: Iterable[tuple[str, TrackerFactory]] = (),
        on_failure: Callable[[str, str], None] = lambda name, why: None,
    ) -> None:
        self._threads = [_TrackerThread(name, make, on_failure) for name, make in makers]
        self._may_close_as_failed = threading.Event()
        self._may_close_as_failed.set()
        self._closed, self._close_lock = False, threading.Lock()

    @property
    def dropped(self) -> dict[str, int]:
        """How many calls the trackers of each name were too slow for, of those that were for any."""
        found = Counter[str]()
        for worker in self._threads:
            found[worker.name] += worker.dropped
        return dict(+found)

    def log_step(self, step: StepInfo) -> None:
        for worker in self._threads:
            worker.put(lambda tracker: tracker.log_step(step))

    def log_eval_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on what an evaluate stage has measured, as far as it is finite."""
        values = finite_only(values)
        for worker in self._threads:
            worker.put(lambda tracker: tracker.log_eval_metrics(step, values))

    def close(self, summary: Mapping[str, Any], within_s: float = _CLOSE_TIMEOUT_S) -> list[str]:
        """Let them flush; gives those that did not end in time."""
        self._closed = True
        until = time.monotonic() + within_s
        for worker in self._threads:
            worker.close_when_drained(summary)
        for worker in self._threads:
            worker.thread.join(max(0.0, until - time.monotonic()))
        return [worker.name for worker in self._threads if worker.thread.is_alive()]

    def close_as_failed_from_main_thread(self) -> None:
        """From now on `close_as_failed` elsewhere waits for the main thread's, `_MAX_HOLD_S` at most."""
        self._may_close_as_failed.clear()

    def close_as_failed(self, within_s: float = _FAILED_CLOSE_TIMEOUT_S) -> None:
        """Close all trackers as failed, within a few seconds, since other ranks wait for this one."""
        if threading.current_thread() is threading.main_thread():
            self._may_close_as_failed.set()
        self._may_close_as_failed.wait(_MAX_HOLD_S)
        with self._close_lock:
            if not self._closed:
                self.close({"status": "failed"}, within_s)
