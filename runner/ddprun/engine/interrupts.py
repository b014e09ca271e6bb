"""What interrupts a run from outside: signals, and the time slices of a comparison."""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Self, TypeVar

from ddprun import COMPARE_TURNS_VARIABLE, LAUNCHED_BY_DDPRUN_VARIABLE
from ddprun.host.processes import handle_signal_unless_ignored, run_in_daemon_thread

_TICK_S = 0.1
_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SignalRequests:
    """Notes SIGINT and SIGTERM, after which all ranks stop after the same step, and SIGUSR1, after which all
    take a checkpoint and continue.

    Under a launcher of ddprun's a request to stop comes as SIGINT, and SIGTERM is the launcher's: batch
    systems send it to all processes of a run. What a rank forks takes SIGTERM as programs do.
    """

    def __init__(self) -> None:
        self.stop_requested = self._checkpoint_requested = False
        self._reinstalled_s = -math.inf
        if LAUNCHED_BY_DDPRUN_VARIABLE in os.environ:
            signal.signal(signal.SIGINT, self._on_stop_signal)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                handle_signal_unless_ignored(number, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_checkpoint_signal)
        take_sigterm = partial(handle_signal_unless_ignored, signal.SIGTERM, signal.SIG_DFL)
        os.register_at_fork(after_in_child=take_sigterm)
        self._handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}

    def reinstall_handlers(self, every_s: float = 0.0) -> None:
        """Put these handlers back where the pipeline's code, or C code unseen by Python, has set others; no
        more often than `every_s`, for it takes 20 us.
        """
        if time.monotonic() - self._reinstalled_s >= every_s:
            self._reinstalled_s = time.monotonic()
            for number, ours in self._handlers.items():
                signal.signal(number, ours)

    def call_unless_stopped(self, call: Callable[[], _T]) -> _T | None:
        """The result of a call on a background thread; None if a stop is requested first. For calls that wait
        for other ranks in torch's C++ code: on the main thread, a signal handler would run only after them.
        """
        future = run_in_daemon_thread(call)
        while not wait([future], _TICK_S).done:
            if self.stop_requested:
                return None
        return future.result()

    @property
    def any_requested(self) -> bool:
        return self.stop_requested or self._checkpoint_requested

    def pop_checkpoint_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        requested, self._checkpoint_requested = self._checkpoint_requested, False
        return requested

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def _on_checkpoint_signal(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint_requested = True


@dataclass(slots=True)
class ComparisonSliceClient:
    """Runs that are compared take turns on one machine, so that what disturbs it disturbs all alike.

    `ddprun compare` starts its runs at once. Each stops after every so many steps until it is its turn again;
    only one works at a time. Nothing of a run changes by that but when it happens.
    """

    steps_per_slice: int = 0  # 0: there is one slice, for this run is none of several
    _connection: socket.socket | None = None
    _slice_ended_at: int = -1

    @classmethod
    def from_environment(cls, local_world_size: int) -> Self:
        """The client that the environment names, if any. Raises OSError if the comparison has ended."""
        text = os.environ.get(COMPARE_TURNS_VARIABLE)
        if text is None:
            return cls()
        settings = json.loads(text)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(settings["address"])
        connection.sendall(f"{settings['run']} {local_world_size}\n".encode())
        return cls(settings["every"], connection)

    def ends_after(self, step: int) -> bool:
        in_turns = self.steps_per_slice > 0
        return in_turns and step % self.steps_per_slice == 0 and step != self._slice_ended_at

    def wait_for_next_slice(self, step: int) -> None:
        """End this time slice, and wait for the next one. A ConnectionError: the comparison has ended."""
        assert self._connection is not None, "another run works meanwhile"
        self._slice_ended_at = step
        self._connection.sendall(b"p")
        if self._connection.recv(1) != b"g":
            raise ConnectionError("the comparison that this run belongs to has ended")
