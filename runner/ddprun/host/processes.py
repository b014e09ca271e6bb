"""Processes, signals and threads of one host: nothing outlives its parent, nothing holds up a signal."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

LAUNCHER_PID_VARIABLE = "DDPRUN_LAUNCHER"
"""Environment variable of ranks: their launcher's process id. What a rank starts will not see it."""

SIGNAL_EXIT_BASE = 128
"""Exit codes of processes that a signal ended: this and its number."""

_PARENT_TICK_S = 1.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_T = TypeVar("_T")


def die_with_launcher() -> None:
    """For a rank of ddprun's launcher, before anything that takes time: to import torch takes seconds."""
    launcher = os.environ.pop(LAUNCHER_PID_VARIABLE, None)
    if launcher is not None:
        die_with_parent(int(launcher))
        # Slurm signals all processes of a step at once; to one that has no handler yet that would be the end.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent dies, however that dies (Linux).

    To the kernel the parent is the thread that has forked, and threads may end earlier than their process:
    where it is not the main one, a thread of this process looks for the parent instead.

    `parent` is needed if that may have happened by now; None takes the parent that there is.
    """
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid() if parent is None else parent
    if _is_child_of_main_thread(parent):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_end_with, args=(parent,), name="ddprun-parent", daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def _is_child_of_main_thread(parent: int) -> bool:
    """Whether the parent's main thread has forked this process; true where the kernel does not say."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii")
    except OSError:
        return True
    return str(os.getpid()) in children.split()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_TICK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def state_and_parent(pid: int) -> tuple[str, int]:
    """State and parent of a process (Linux): a letter as in `ps`, `gone`, or `?` if nobody can say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ("gone" if Path("/proc/self").exists() else "?"), 0
    state, parent, *_ = stat.rpartition(")")[2].split()
    return state, int(parent)


def set_signal_handler(
    number: int, handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> None:
    """Put a handler over a signal, unless this process was started with the signal ignored.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT in what a script starts in the background: both want
    the process to live on.
    """
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def exit_at_signals(*numbers: int) -> None:
    """End this process at once when one of these signals comes, with the exit code that a shell gives it."""
    for number in numbers:
        set_signal_handler(number, lambda number, _: os._exit(SIGNAL_EXIT_BASE + number))


def in_background(call: Callable[[], _T]) -> "Future[_T]":
    """Call on a daemon thread.

    Whoever waits for the result may set a limit. In the main thread handlers of signals run meanwhile: if it
    made the call itself, they would wait until torch's C++ code, which waits for other hosts, comes back.
    """
    from concurrent.futures import Future  # it imports logging, and every command imports this file

    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="ddprun-background", daemon=True).start()
    return future


def cores() -> float:
    """Processor cores that this process may use: by affinity and by the container's quota."""
    count: float = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text("ascii").split()
        return min(count, round(int(quota) / int(period), 1))
    except (OSError, ValueError):
        return count
