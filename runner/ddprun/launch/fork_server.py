"""A process that has imported torch and ddprun once, and from which all ranks of a host are forked.

Importing torch takes seconds, in each rank and again after each failure; a fork takes milliseconds. The
server is forked from a launcher that has not imported torch yet. The server has neither threads nor a CUDA
context, because neither survives a fork. It waits for requests in lines of JSON. A rank is a child of the
launcher, as if the launcher had started it: its parent, itself forked from the server, ends at once, and the
launcher adopts the rank (`man 2const PR_SET_CHILD_SUBREAPER`).
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ddprun.host.code_folders import add_import_folder
from ddprun.host.processes import (
    adopting_orphans,
    close_inherited_files,
    die_with_launcher,
    die_with_parent,
)
from ddprun.standard_streams import flush_standard_streams, print_stderr, say

_PRELOADED_MODULES = ("ddprun.engine.worker", "torch._dynamo")  # DDP and optimizers would import the second
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # by a terminal, or Slurm
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")
_PID_BYTES = 32
_PR_SET_NAME, _IONBF = 15, 2  # of Linux, and of its C libraries
_Handlers = Mapping[signal.Signals, Any]  # what `signal.signal` takes
_TICK_S = 0.001


class ForkServer:
    """The server of this launcher, from its start to `close`.

    Args:
        modules: what it imports besides torch and ddprun, in this order. If an import fails, the server
            names the module once, and leaves it to the ranks.
        folder: of the pipeline file; modules can be imported from it, too.
        redact: takes secrets out of a message.
    """

    def __init__(self, modules: Sequence[str], folder: Path, redact: Callable[[str], str] = str) -> None:
        ours, theirs = socket.socketpair()
        flush_standard_streams()
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(theirs, launcher, partial(_import_and_check_forkable, modules, folder, redact))
        theirs.close()
        self._socket = ours
        self._replies = ours.makefile("r", encoding="utf-8")

    def fork_process(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> "ForkedProcess | None":
        """Fork a process that is `ddprun` with these arguments and variables. Gives None if the server cannot
        fork, or has ended.
        """
        request = {"arguments": arguments, "environment": dict(environment)}
        try:
            with adopting_orphans():
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                pid = json.loads(self._replies.readline() or "null")
        except OSError:
            return None
        return None if pid is None else ForkedProcess(pid)

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        self._replies.close()
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class ForkedProcess(psutil.Process):
    """A child of this process, with what torchelastic asks of a `subprocess.Popen`."""

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        with suppress(psutil.TimeoutExpired):
            return super().wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        try:
            return super().wait(timeout)
        except psutil.TimeoutExpired:
            raise subprocess.TimeoutExpired("ddprun", timeout or 0) from None


def _serve(requests: socket.socket, launcher: int, import_all: Callable[[], bool]) -> NoReturn:
    """What the server does; it never returns to the launcher's frames."""
    try:
        handlers = {number: signal.getsignal(number) for number in _GROUP_SIGNALS}
        for number in _GROUP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent(launcher)
        close_inherited_files(keep=requests.fileno())
        # Ranks are started as by `python -P`: nothing is imported from the folder of the script `ddprun`.
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script and not sys.flags.safe_path and sys.path[0] == os.path.dirname(os.path.realpath(script)):
            del sys.path[0]
        can_fork = import_all()
        with requests.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                pid = None
                if can_fork:
                    with suppress(OSError):  # too many processes: torchelastic fails, too, and says so
                        pid = _fork_rank(json.loads(line), requests, handlers)
                requests.sendall(json.dumps(pid).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _import_and_check_forkable(modules: Sequence[str], folder: Path, redact: Callable[[str], str]) -> bool:
    """Import all modules; whether the process can be forked after that."""
    gc.disable()  # collections would take a fifth of the time, and free little
    try:
        for name in _PRELOADED_MODULES:
            importlib.import_module(name)
    except Exception:
        return False  # a rank that starts as a fresh process says why
    add_import_folder(folder)
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            say(redact(f'cannot preload "{name}": {type(error).__name__}: {error}'))
    gc.freeze()
    _flush_python_and_c_streams()
    if not (trial := os.fork()):
        os._exit(0)
    os.waitpid(trial, 0)  # libraries that end their threads for a fork have done so
    found = []
    if len(os.listdir("/proc/self/task")) > 1:
        found.append("starts threads")
    if any(_descriptor_target(name).startswith(_GPU_FILES) for name in os.listdir("/proc/self/fd")):
        found.append("opens a GPU")
    if found:
        names = ", ".join(modules) or "torch"
        say(f"ranks are started afresh, not forked: importing {names} {' and '.join(found)}")
    return not found


def _descriptor_target(descriptor: str) -> str:
    with suppress(OSError):  # the one of the listing is gone
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _fork_rank(request: Mapping[str, Any], requests: socket.socket, handlers: _Handlers) -> int | None:
    """Fork a rank from a process that ends at once, so that the launcher adopts it; gives its process id,
    None if that could not fork. Raises OSError if there can be no more processes.
    """
    reader, writer = os.pipe()
    if parent := os.fork():
        os.close(writer)
        pid = os.read(reader, _PID_BYTES)
        os.close(reader)
        os.waitpid(parent, 0)
        return int(pid) if pid else None
    try:
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # As in a rank that is executed by a launcher, which has a handler of its own for it.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        while os.getppid() == parent:
            time.sleep(_TICK_S)
        os.write(writer, str(os.getpid()).encode())
        for descriptor in (reader, writer, requests.fileno()):
            os.close(descriptor)
        _become_rank(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_rank(request: Mapping[str, Any]) -> NoReturn:
    """Do what `execve` and the start of Python do, then be `python -u -m ddprun`."""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # what TMPDIR says counts
    sys.argv[1:] = request["arguments"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"python")  # `pkill ddprun` is for the launcher
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IONBF, ctypes.c_size_t(0))
    run_main_and_exit(_run_cli)


def _run_cli() -> int:
    from ddprun.cli import main

    die_with_launcher()
    return main()


def run_main_and_exit(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end this forked process with its exit code, after the clean-up that Python does."""
    code: Any = 1
    try:
        try:
            code = main()
        except SystemExit as error:
            code = error.code or 0
            if not isinstance(code, int):
                print_stderr(str(code))
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_python_and_c_streams()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _flush_python_and_c_streams() -> None:
    """Write what waits in the buffers of Python's and C's streams."""
    flush_standard_streams()
    ctypes.CDLL(None).fflush(None)
