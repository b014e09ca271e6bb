"""Fixtures for all tests: ranks as threads, ranks as processes, and real `ddprun` processes."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: with more threads than cores per rank, times and bits are anyone's guess.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for `nohup make test`: a process that is started inherits what is ignored, but no handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# The files that take longest: those that mostly wait (for time-outs, for an image) in turns with those that
# compute, so that both are under way all the time.
_FIRST = (
    "cluster/test_docker.py",
    "launch/test_processes.py",
    "launch/test_hosts.py",
    "checkpoint/test_resume.py",
    "launch/test_hangs.py",
    "hooks/test_kernels.py",
    "hooks/test_stacks.py",
    "doctor/test_two_hosts.py",
    "launch/test_slurm.py",
    "launch/test_elastic.py",
    "launch/test_signals.py",
    "cluster/test_kubernetes.py",
    "sync/test_equalities.py",
    "launch/test_restarts.py",
    "engine/test_stages.py",
    "compare/test_compare.py",
    "tune/test_command.py",
    "engine/test_session.py",
    "sync/test_matrix.py",
    "track/test_trackers.py",
)
_THEN = ("engine", "sync", "hooks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers take a file at a time: the slowest first, so that no long one is left at the end."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        if (file := f"{folder}/{item.path.name}") in _FIRST:
            return _FIRST.index(file)
        return len(_FIRST) + (_THEN.index(folder) if folder in _THEN else len(_THEN))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _import_path() -> Iterator[None]:
    """Take the folders of a test's pipelines out of `sys.path` again, and forget their modules: those of the
    next test may have the same names.
    """
    path, finders, modules = sys.path[:], sys.meta_path[:], set(sys.modules)
    yield
    added = tuple(f"{folder}{os.sep}" for folder in sys.path if folder not in path)
    for name in set(sys.modules) - modules:
        if added and (getattr(sys.modules[name], "__file__", None) or "").startswith(added):
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders
