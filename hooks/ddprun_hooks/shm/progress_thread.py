"""Runs operations on shared memory: none waits for one of another group, and no caller waits."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence

from torch.futures import Future

from ddprun_hooks.errors import ExchangeError, fail_future
from ddprun_hooks.shm.group import PeerSocket, ShmGroup, ShmOperation

SPIN_S = 50e-6  # how long to look out for a peer first: about what it takes to wake a thread


class ProgressThread:
    """Runs operations: those of one group in the order in which they are submitted, others independently.

    An operation whose peers are there is done on the caller's thread, which is faster than to wake another.
    When a peer keeps it waiting, the operation is handed to a thread that sleeps until there is news.
    """

    def __init__(self) -> None:
        # Guards the three below and `ShmGroup.pending`; never held while anything else is called.
        self._lock = threading.Lock()
        self._handed_over: list[ShmGroup] = []
        self._thread: threading.Thread | None = None
        self._wake = -1

    def submit(self, group: ShmGroup, operation: ShmOperation) -> "Future[None]":
        """Run `operation`, a new one of `group`.

        The future is set on whatever thread finishes the operation. Its callbacks may submit, but must not
        wait for another operation of this group. It fails with an `ExchangeError` when a peer is gone or
        late, and so does every later operation of the group.
        """
        future: Future[None] = Future()
        with self._lock:
            group.pending.append((operation, future))
            if len(group.pending) > 1:
                return future
        phase, until = -1, 0.0
        while True:
            began = time.perf_counter()
            if self._run_until_blocked(group) is None:
                return future
            now = time.perf_counter()
            if group.phase != phase:
                phase, until = group.phase, now + SPIN_S + (now - began)  # peers had as much to do
            elif now > until:
                self._hand_over_to_thread(group)
                return future

    def _run_until_blocked(self, group: ShmGroup) -> Sequence[PeerSocket] | None:
        """Run a group's operations, on the one thread that does, until one has to wait. Gives the peers it
        waits for, or None when there are no more operations, and the group is free.
        """
        while True:
            operation, future = group.pending[0]
            failure: BaseException | None = group.error
            try:
                if failure is None:
                    return next(operation)
            except StopIteration:
                pass
            except BaseException as error:  # whatever it is, the group is out of step and someone waits
                failure = error
                if group.error is None:
                    group.error = ExchangeError(f"an operation has failed before: {error!r}")
                    group.error.__cause__ = error
            # Before the next begins, to keep their order, and without the lock: callbacks submit.
            if failure is None:
                future.set_result(None)
            else:
                fail_future(future, failure)
            with self._lock:
                group.pending.popleft()
                if not group.pending:
                    return None

    def _hand_over_to_thread(self, group: ShmGroup) -> None:
        with self._lock:
            self._handed_over.append(group)
            if self._thread is None or not self._thread.is_alive():  # a forked child has none
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._thread_main, name="ddprun-progress", daemon=True)
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    def _thread_main(self) -> None:
        waiting: dict[ShmGroup, Sequence[PeerSocket]] = {}
        since = time.perf_counter()
        while True:
            now = time.perf_counter()
            if self._advance_all(waiting):
                since = now
            elif not waiting or now - since > SPIN_S:
                self._sleep_until_event(waiting)
                since = time.perf_counter()

    def _advance_all(self, waiting: dict[ShmGroup, Sequence[PeerSocket]]) -> bool:
        """Advance every group left to the thread and note what each waits for; whether any advanced."""
        with self._lock:
            handed_over, self._handed_over = self._handed_over, []
        waiting.update((group, ()) for group in handed_over)
        any_advanced = False
        for group in list(waiting):
            phase, peers = group.phase, self._run_until_blocked(group)
            if peers is None:
                del waiting[group]
            else:
                waiting[group] = peers
            any_advanced |= peers is None or group.phase != phase
        return any_advanced

    def _sleep_until_event(self, waiting: dict[ShmGroup, Sequence[PeerSocket]]) -> None:
        """Sleep until a peer is heard or gone, a deadline has passed, or there is something new."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        until = time.monotonic() + 3600  # poll takes no number of milliseconds beyond 32 bits
        for group, peers in waiting.items():
            until = min(until, group.deadline)
            # Not peers that have arrived: one that is ahead would not let it sleep, and one that has finished
            # and closed its socket is not lost.
            for peer in peers:
                poll.register(peer, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1e3 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


progress_thread = ProgressThread()
"""The one of this process."""
