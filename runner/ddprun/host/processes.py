"""Processes, signals and threads of one host: nothing outlives its parent, nothing holds up a signal."""

import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from ddprun import standard_streams

if TYPE_CHECKING:
    from concurrent.futures import Future

LAUNCHER_PID_VARIABLE = "DDPRUN_LAUNCHER"  # of ranks, which take it away from what they start
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # requests to stop a run
SAME_REQUEST_S = 1.0  # one within this time of the first is the same request
END_RANK_SIGNAL = (
    signal.SIGRTMAX
)  # with which a launcher ends ranks; SIGTERM may come to all processes of a run
SIGNAL_EXIT_BASE = 128  # exit codes of processes that a signal ended: this and its number
_EXIT_GRACE_S = 10.0
_LEFTOVER_S = 2.0  # how long processes that have outlived a rank may take to end by themselves
_TERMINATE_S = 1.0
_TICK_S = 0.05
_COMMAND_LENGTH = 80
# How EMFILE reads where torch or Python has wrapped it; the latter when a descriptor was sent along.
_TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")
_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_T = TypeVar("_T")

lock_descriptors = set[int]()
"""Descriptors that hold a lock. Processes that are forked close them: a lock is to end with this process."""


def _close_inherited_locks() -> None:
    while lock_descriptors:
        with suppress(OSError):  # the pipeline's code may have closed it
            os.close(lock_descriptors.pop())


os.register_at_fork(after_in_child=_close_inherited_locks)


def die_with_launcher() -> None:
    """For a rank of ddprun's launcher or torchrun, before what takes time: importing torch takes seconds."""
    launcher = os.environ.pop(LAUNCHER_PID_VARIABLE, None)
    if launcher is not None:
        die_with_parent(int(launcher))
        # Slurm signals all processes of a step at once; to one that has no handler yet that would be the end.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ignore_signals(signal.SIGTERM, signal.SIGHUP)  # the launcher says what to do
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent dies, however that dies.

    To the kernel the parent is the thread that has forked: a main one, wherever ddprun starts processes.
    `parent` is needed if that may have happened by now; None takes the parent that there is.
    """
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """In this context, descendants whose own parent ends become children of this process; raises OSError."""
    import ctypes

    pr_set_child_subreaper, libc = 36, ctypes.CDLL(None, use_errno=True)
    if libc.prctl(pr_set_child_subreaper, 1):
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        libc.prctl(pr_set_child_subreaper, 0)


def close_inherited_files(keep: int) -> None:
    """Close the descriptors that this process was started with, but for the standard streams and `keep`.

    Those that Python has opened are not inheritable, and belong to objects that would close them again.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the listing is gone
            if descriptor > 2 and descriptor != keep and os.get_inheritable(descriptor):
                os.close(descriptor)


def state_and_parent(pid: int) -> tuple[str, int]:
    """State and parent of a process: a letter as in `ps`, or `gone`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return "gone", 0
    state, parent, *_ = stat.rpartition(")")[2].split()
    return state, int(parent)


def _live_process_commands(*, parent: int | None = None, sessions: Collection[int] = ()) -> dict[int, str]:
    """Processes of a parent, or of some sessions but for their leaders, with their commands."""
    import psutil  # every command imports this file

    found = {}
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            session = os.getsid(one.pid)
            belongs = one.ppid() == parent or (session in sessions and session != one.pid)
            if belongs and one.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found[one.pid] = " ".join(one.cmdline()) or one.name()
    return found


def _describe_processes(found: Mapping[int, str], redact: Callable[[str], str]) -> str:
    """Processes and the beginnings of their commands, without secrets."""
    return ", ".join(f"process {pid} ({redact(command)[:_COMMAND_LENGTH]})" for pid, command in found.items())


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to those processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_leftovers(ranks: Collection[int], redact: Callable[[str], str]) -> None:
    """End what ranks, of these process ids, left behind in the sessions that they lead, and name it."""

    def left_after(limit_s: float) -> dict[int, str]:
        end = time.monotonic() + limit_s
        while (found := _live_process_commands(sessions=ranks)) and time.monotonic() < end:
            time.sleep(_TICK_S)
        return found

    if left := left_after(_LEFTOVER_S):
        standard_streams.say(f"ending what ranks have left behind: {_describe_processes(left, redact)}")
        send_signal(left, signal.SIGTERM)
        send_signal(left_after(_TERMINATE_S), signal.SIGKILL)


def force_exit_after_delay(code: int, rank: int, redact: Callable[[str], str]) -> None:
    """Have this process, whose rank is done, end within `_EXIT_GRACE_S` with this exit code, and say what
    holds it up.

    Python's own end waits for threads, child processes and exit functions of the pipeline's code, for ever.
    """

    def end() -> None:
        time.sleep(_EXIT_GRACE_S)
        others = {threading.main_thread(), threading.current_thread()}
        left = [f"thread {one.name}" for one in threading.enumerate() if not one.daemon and one not in others]
        children = _live_process_commands(parent=os.getpid())
        left += [_describe_processes(children, redact)] if children else []
        standard_streams.say(
            f"rank {rank} is done, and no longer waits for {', '.join(left) or 'an exit function'}"
        )
        if children:
            send_signal(children, signal.SIGTERM)
            time.sleep(_TERMINATE_S)
            send_signal(_live_process_commands(parent=os.getpid()), signal.SIGKILL)
        standard_streams.flush_standard_streams()
        os._exit(code)

    threading.Thread(target=end, name="ddprun-end", daemon=True).start()


def raise_file_limit() -> None:
    """Let this process, and what it starts, open as many files as the system lets it ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # not where the system calls no limit one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def file_limit_hint(error: BaseException) -> str:
    """What to do about an error that says that too many files are open; nothing for any other."""
    code, text = getattr(error, "errno", None), str(error)
    if code != errno.EMFILE and not any(sign in text for sign in _TOO_MANY_FILES):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"; this process may have {limit} files and connections open: raise the hard limit "
        "(ulimit -Hn, LimitNOFILE=), or use fewer loader.workers"
    )


def handle_signal_unless_ignored(
    number: int, handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> None:
    """Put a handler over a signal, unless it was ignored from the start (`nohup`, a shell's background)."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def ignore_signals(*numbers: int) -> None:
    """Do nothing at these signals. Unlike `SIG_IGN`, programs that this process starts do not inherit it."""
    for number in numbers:
        handle_signal_unless_ignored(number, lambda *_: None)


def hard_exit_on_signals(folder: Path) -> None:
    """End this process at once when a signal asks it to stop, with the exit code that a shell gives it, and
    without this folder.
    """

    def end(number: int, _: FrameType | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(SIGNAL_EXIT_BASE + number)

    for number in STOP_SIGNALS:
        handle_signal_unless_ignored(number, end)


def run_in_daemon_thread(call: Callable[[], _T]) -> "Future[_T]":
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
    count: float = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_MAX.read_text("ascii").split()
        return min(count, round(int(quota) / int(period), 1))
    except (OSError, ValueError):
        return count
