"""Handlers of signals that respect what was asked for at the start, and that run at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")
_TICK_S = 0.05

Handler = Callable[[int, FrameType | None], Any]


def handle(number: int, handler: Handler | signal.Handlers) -> None:
    """Put a handler over a signal, unless this process was started with the signal ignored.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT in what a script starts in the background: both want
    the process to live on.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def interruptibly(call: Callable[[], _T]) -> _T:
    """Call in another thread, so that handlers of signals run at once: in this one they would wait until
    torch's C++ code, which waits for other hosts, comes back.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the caller's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="ddprun-interruptible", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_S)
    if failures:
        raise failures[0]
    return results[0]
