"""Ranks as forked processes, and `ddprun` processes; as threads: `ddprun_hooks.testing`."""

import contextlib
import io
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from ddprun.cli import main
from ddprun.parallel.ranks import Ranks
from tests.namespaces import Host
from tests.warm import WarmProcess, fork_server, installed_path

TIMEOUT_S = 60


def _is_early(variable: str) -> bool:
    """Whether a variable matters before a program has its first say."""
    return variable.startswith(("LD_", "LC_", "PYTHON", "OMP_")) and variable != "PYTHONPATH"


_HELD: deque[socket.socket] = deque()
_MAX_HELD = 100


def free_port() -> int:
    """A TCP port on loopback that nobody uses now.

    It stays bound, so that the kernel gives it neither to another process nor to an outgoing connection. Who
    sets SO_REUSEADDR, as servers do, may listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    if len(_HELD) > _MAX_HELD:  # the test that had it is over
        _HELD.popleft().close()
    port: int = held.getsockname()[1]
    return port


def as_processes(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    cwd: Path | None = None,
    may_die: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Run `body(*arguments)` in `size` processes with torchrun's environment; gives what they return.

    The processes come from a fork server that has torch imported already, so that they start in milliseconds.
    After a failure a rank waits for its launcher to end it, or until others need its store no more: here no
    launcher comes, and it waits until each of the others has come so far, too, or has ended.

    Args:
        size: number of ranks.
        body: what each does.
        arguments: of `body`.
        cwd: where.
        may_die: a process may end without a word; it returns None.
        timeout_s: how long they may take.
    """
    context = fork_server()
    port = free_port()
    pipes, processes = [], []
    at_work = context.Pipe(duplex=False)
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = context.Process(
            target=_child, args=(theirs, at_work, environment, cwd, body, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for end in at_work:
        end.close()
    try:
        outcomes = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} says nothing for {timeout_s:g} s"
            try:
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                if may_die:
                    outcomes.append((None, None))
                    continue
                raise AssertionError(f"rank {rank} ended without a word; see what it printed") from None
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, (value, error) in enumerate(outcomes):
        assert error is None, f"rank {rank}:\n{error}"
        del value
    return [value for value, _ in outcomes]


def _child(
    pipe: Connection,
    at_work: tuple[Connection, Connection],
    environment: Mapping[str, str],
    cwd: Path | None,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    sys.path[:] = installed_path()
    multiprocessing.set_start_method(None, force=True)  # loading processes start as they do elsewhere
    if cwd is not None:
        os.chdir(cwd)
    outcome: tuple[Any, str | None]
    try:
        with _waiting_for(*at_work):
            outcome = (body(*arguments), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    # As bytes: tensors would come as descriptors, which end with this process.
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _waiting_for(ended: Connection, at_work: Connection) -> Iterator[None]:
    """A long sleep after a failure ends once no rank has `at_work` open any more."""
    from ddprun.engine import failures  # which the fork server has

    def sleep(seconds: float) -> None:
        if seconds <= 1:
            time.sleep(seconds)
        else:
            at_work.close()
            ended.poll(seconds)

    with at_work, mock.patch.object(failures, "time", SimpleNamespace(**{**vars(time), "sleep": sleep})):
        yield


def end_together(ranks: Ranks) -> None:
    """Wait, on the rank that holds the store, until all have read what they still wanted of it."""
    ranks.store.set(f"ended/{ranks.rank}", "")
    if ranks.holds_store:
        ranks.store.wait([f"ended/{rank}" for rank in range(ranks.size)])


@dataclass(frozen=True)
class Finished:
    """What a real process left."""

    code: int
    stdout: str
    stderr: str

    @property
    def run_dir(self) -> Path:
        """The run's folder, which `ddprun run` prints to stdout, relative to where it ran."""
        return Path(self.stdout.strip().splitlines()[-1])


def ddprun(
    *arguments: str | Path,
    cwd: Path,
    module: Sequence[str] = (),
    timeout_s: float = 120,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Finished:
    """Run `ddprun` in a process of its own to its end; the arguments are those of `Running`."""
    with Running(*arguments, cwd=cwd, module=module, environment=environment, fresh=fresh) as running:
        return running.wait(timeout_s)


def ddprun_here(*arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Finished:
    """Run `ddprun` in this process: for bad input, which ends it before it starts ranks."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(arguments)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Finished(code, out.getvalue(), err.getvalue())


class Running:
    """A `ddprun` process that is ended, with its ranks, when the block is left.

    Args:
        arguments: of the command line.
        cwd: where.
        module: what Python runs in place of the `ddprun` script: `-m` and so on; the process is a fresh one.
        environment: more variables; with those that Python or the loader reads the process is a fresh one.
        host: where it runs; None: on this machine.
        setup: a shell command that runs on that host before.
        prefix: a command that takes the process's command line, such as `nice`; the process is a fresh one.
        fresh: it starts with a new Python, and so do its ranks; they are forked otherwise.
    """

    process: WarmProcess | subprocess.Popen[str]

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        module: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        host: Host | None = None,
        setup: str = "true",
        prefix: Sequence[str] = (),
        fresh: bool = False,
    ) -> None:
        words = [str(argument) for argument in arguments]
        variables = {**os.environ, "PYTHONWARNINGS": "default", "COLUMNS": "120", **(environment or {})}
        if fresh or module or prefix or any(map(_is_early, environment or ())):
            program = [sys.executable, *module] if module else [str(Path(sys.executable).parent / "ddprun")]
            self.process = subprocess.Popen(
                [*(host.prefix(setup) if host else ()), *prefix, *program, *words],
                cwd=cwd,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        elif host is None:
            self.process = WarmProcess(words, cwd, variables, ())
        else:
            with host.namespaces(setup, cwd) as namespaces:
                self.process = WarmProcess(words, cwd, variables, namespaces)

    def __enter__(self) -> "Running":
        return self

    def wait(self, timeout_s: float = 120) -> Finished:
        """Wait for the end. One that does not come fails the test, with what the process has printed."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            out, err = self.process.communicate()
            pytest.fail(f"no end within {timeout_s:g} s, after\n{out}\n{err}")
        return Finished(self.process.wait(), out, err)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self._kill()
            self.process.communicate()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _kill(self) -> None:
        for end in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                end(self.process.pid, signal.SIGKILL)

    def ranks(self) -> list[int]:
        """Process ids of the ranks: of the launcher's children, they lead sessions."""
        try:
            children = [child.pid for child in psutil.Process(self.process.pid).children()]
            return [pid for pid in children if os.getsid(pid) == pid]
        except (psutil.NoSuchProcess, ProcessLookupError):
            return []


def shared_memory_of(pids: Sequence[int]) -> list[Path]:
    """What has the name of one of the processes in /dev/shm, without libfaketime's, which others may use."""
    return [
        path
        for path in Path("/dev/shm").iterdir()
        if not path.name.startswith(("faketime_", "sem.faketime_"))
        and {str(pid) for pid in pids} & set(re.findall(r"\d+", path.name))
    ]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
