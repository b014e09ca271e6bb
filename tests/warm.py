"""`ddprun` processes, forked from one that has torch imported already: they start in milliseconds.

Such a process has its own process group, environment, working directory, streams and signal handlers, as if
it had been executed, and so have the runs of a comparison, forked in place of its `Popen`. What differs is
how they came to be, so what happens in a process before `ddprun` has its first say (imports, locale,
Python's own flags) is tested with fresh ones.
"""

import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.util import _finalizer_registry as finalizers  # type: ignore[attr-defined]
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from ddprun.launch.fork_server import ForkedProcess, run_main_and_exit

_TICK_S = 0.005


def fork_server() -> ForkServerContext:
    """Where forked processes come from: a process of its own, without threads, that has made no tensor."""
    context = multiprocessing.get_context("forkserver")
    # Every optimizer of torch imports torch._dynamo when it is made: a second of each rank's time.
    context.set_forkserver_preload(
        [
            "ddprun.engine.worker",
            "ddprun.launch.host_ranks",
            "ddprun.compare.runs",
            "tests.ranks",
            "torch._dynamo",
            "tests.frozen",
        ]
    )
    with mock.patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR"):  # as ddprun sets it, and once for all
        forkserver.ensure_running()
    return context


class WarmProcess:
    """A forked `ddprun`, with what `subprocess.Popen` offers of a process.

    Args:
        arguments: of the command line.
        cwd: where.
        environment: all variables.
        namespaces: descriptors of those that it enters.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], namespaces: Sequence[int]
    ) -> None:
        context = fork_server()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        self.stdout, self.stderr = (
            os.fdopen(os.dup(ours.fileno()), encoding="utf-8", errors="replace") for ours, _ in pipes
        )
        self._process = context.Process(
            target=_start,
            args=(
                [theirs for _, theirs in pipes],
                [Connection(os.dup(descriptor)) for descriptor in namespaces],
                list(arguments),
                cwd,
                dict(environment),
            ),
        )
        self._read: dict[IO[str], str] = {}
        self._readers: list[threading.Thread] = []
        self._process.start()
        for pair in pipes:
            for end in pair:
                end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("ddprun", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends, close them, and wait for its own end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self._readers:  # else a call before this one began to read
            streams = self.stdout, self.stderr
            self._readers = [
                threading.Thread(target=self._read_to_end, args=(stream,), daemon=True) for stream in streams
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if end is None else max(end - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("ddprun", timeout or 0)
        self.wait(None if end is None else max(end - time.monotonic(), 0.1))
        return self._read[self.stdout], self._read[self.stderr]

    def _read_to_end(self, stream: IO[str]) -> None:
        self._read[stream] = "" if stream.closed else stream.read()
        stream.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Child(ForkedProcess):
    """A forked child of this process, with what a comparison asks of a `Popen`, too."""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start(
    streams: Sequence[Connection],
    namespaces: Sequence[Connection],
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
) -> NoReturn:
    """What the fork server's child does: become `ddprun`."""
    from ddprun.compare import runs as compare

    added = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [*added, *installed_path()]
    sys.path[:] = path
    known = frozenset(sys.modules)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir(cwd)

    def of_a_comparison(
        command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any
    ) -> _Child:
        gc.collect()  # what is garbage here is not to be closed there
        if pid := os.fork():
            return _Child(pid)
        with open(os.devnull, "rb") as nothing:
            for number, descriptor in enumerate((nothing.fileno(), stdout.fileno(), stdout.fileno())):
                os.dup2(descriptor, number)
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in known and _is_users(name)]:
            del sys.modules[name]
        _become(command[command.index("ddprun") + 1 :], env)

    setattr(compare, "Popen", of_a_comparison)  # noqa: B010
    _become(arguments, environment)


def installed_path() -> list[str]:
    """`sys.path` without the folders of pipelines that a test has run in its own process: the fork server's
    children inherit them, and would find modules there.
    """
    return [entry for entry in sys.path if _is_installed(Path(entry))]


def _is_users(module: str) -> bool:
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and not _is_installed(Path(file))


def _is_installed(path: Path) -> bool:
    places = (sys.prefix, sys.base_prefix, Path(__file__).parents[1])
    return any(path.is_relative_to(place) for place in places)


def _become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do in a forked process what `execve` and the start of Python do, then be `python -m ddprun`."""
    os.setsid()
    for handled in signal.valid_signals():
        if callable(signal.getsignal(handled)):
            signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:  # objects that are left would close what gets the same number
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if descriptor > 2 and os.stat(descriptor):
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)
    # What they would look after belongs to the process that this one comes from.
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    finalizers.clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    tempfile.tempdir = None  # what TMPDIR says counts again
    multiprocessing.set_start_method(None, force=True)
    sys.argv = ["ddprun", *arguments]
    warnings.resetwarnings()
    warnings.simplefilter("default")
    gc.freeze()
    run_main_and_exit(_main)


def _main() -> int:
    from ddprun.cli import main
    from ddprun.host.processes import die_with_launcher

    die_with_launcher()
    return main()
