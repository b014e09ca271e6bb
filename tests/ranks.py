"""Three speeds of ranks: threads over raw process groups, forked processes, real `ddprun` processes."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddprun_hooks.comm.groups import GroupFactory, Placement, RankGroup
from ddprun_hooks.hook import GroupRequirement, GroupRequirements
from ddprun_hooks.shm.progress import ProgressThread

TIMEOUT_S = 60

# A group must not be freed by a thread of its own, which would then wait for itself and abort: groups stay
# here until nothing else, such as a callback that is just being forgotten, refers to them.
_kept: list[dist.ProcessGroup] = []
_ONLY_KEPT = 2  # references: the list, and the argument of `getrefcount`


def as_threads(
    size: int,
    body: Callable[[RankGroup], Any],
    *,
    rounds: int = 1,
    hosts: Sequence[str] = (),
    needs: GroupRequirements | None = None,
) -> list[Any]:
    """Run `body(group)` on `size` threads, each a rank with Gloo groups of its own; gives what they return.

    Args:
        size: number of ranks.
        body: what each does with the group of all ranks.
        rounds: collectives among all ranks that one payload may need.
        hosts: name of each rank's host; all are on one host if left out.
        needs: groups to make instead of that of all ranks.
    """
    wanted = {GroupRequirement("world"): rounds} if needs is None else needs
    _let_go()
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    all_groups: list[list[dist.ProcessGroup]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        names = tuple(hosts or ["here"] * size)
        placement = Placement(rank, names, tuple(names.count(name) for name in names))
        calls = itertools.count()

        def make_group(name: str, ranks: list[int]) -> Any:
            if rank not in ranks:
                return None
            prefix = dist.PrefixStore(name, store)
            made: Any = dist.ProcessGroupGloo(
                prefix, ranks.index(rank), len(ranks), timedelta(seconds=TIMEOUT_S)
            )
            all_groups[rank].append(made)
            return made

        def gather(data: bytes) -> list[bytes]:
            call = next(calls)
            store.set(f"told {call} {rank}", data.hex())
            return [bytes.fromhex(store.get(f"told {call} {peer}").decode()) for peer in range(size)]

        progress = ProgressThread()
        try:
            results[rank] = body(
                GroupFactory(make_group, gather, TIMEOUT_S, progress).open("world", placement, wanted)
            )
        except BaseException as error:  # told by the caller's thread
            errors.append(error)
        else:
            progress.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    for groups in all_groups:
        _kept.extend(groups)
        groups.clear()
    if errors:
        raise errors[0]
    return results


def _let_go() -> None:
    """Free the groups of earlier calls that nobody uses any more."""
    deadline = time.monotonic() + 0.5
    while any(sys.getrefcount(_kept[i]) > _ONLY_KEPT for i in range(len(_kept))):
        gc.collect()
        if time.monotonic() > deadline:
            break
        time.sleep(1e-3)
    _kept[:] = [_kept[i] for i in range(len(_kept)) if sys.getrefcount(_kept[i]) > _ONLY_KEPT]


# Below the ports that the kernel gives to outgoing connections, and others for each process of the tests: a
# port that is given here stays free until somebody listens there.
_PORTS = itertools.cycle(range(10_000 + os.getpid() % 200 * 100, 10_100 + os.getpid() % 200 * 100))


def free_port() -> int:
    """A TCP port on loopback that nobody uses now."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports have no end")


def as_processes(
    size: int, body: Callable[..., Any], *arguments: Any, cwd: Path | None = None, may_die: bool = False
) -> list[Any]:
    """Run `body(*arguments)` in `size` processes with torchrun's environment; gives what they return.

    The processes come from a fork server that has torch imported already, so that they start in milliseconds.

    Args:
        size: number of ranks.
        body: what each does.
        arguments: of `body`.
        cwd: where.
        may_die: a process may end without a word; it returns None.
    """
    context = multiprocessing.get_context("forkserver")
    # Every optimizer of torch imports torch._dynamo when it is made: a second of each rank's time.
    context.set_forkserver_preload(["ddprun.engine.worker", "tests.ranks", "torch._dynamo"])
    port = free_port()
    pipes, processes = [], []
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
            target=_child, args=(theirs, environment, cwd, body, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} says nothing for {TIMEOUT_S} s"
            try:
                outcomes.append(pipe.recv())
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
    environment: Mapping[str, str],
    cwd: Path | None,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    outcome: tuple[Any, str | None]
    try:
        outcome = (body(*arguments), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    pipe.send(outcome)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


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
) -> Finished:
    """Run a real `ddprun`, or with `module` a `python -m` of it, to its end."""
    with Running(*arguments, cwd=cwd, module=module, environment=environment) as running:
        return running.wait(timeout_s)


class Running:
    """A real `ddprun` process that is ended, with its ranks, when the block is left."""

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        module: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        program = [sys.executable, *module] if module else [str(Path(sys.executable).parent / "ddprun")]
        self.process = subprocess.Popen(
            [*prefix, *program, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONWARNINGS": "default", "COLUMNS": "120", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Running":
        return self

    def wait(self, timeout_s: float = 120) -> Finished:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Finished(self.process.returncode, out, err)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in listed.stdout.split()]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
