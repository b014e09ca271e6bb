"""Fixtures for all tests: ranks as threads, ranks as processes, and real `ddprun` processes."""

import os
import signal

import pytest

# Before torch is imported anywhere: with more threads than cores per rank, times and bits are anyone's guess.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for `nohup make test`: a process that is started inherits what is ignored, but no handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Each of these keeps the machine busy with several hosts for minutes: one worker takes them all, and first.
_HOSTS = (
    "test_elastic",
    "test_hosts",
    "test_slurm",
    "test_soak",
    "test_two_hosts",
    "test_srun",
    "test_docker",
)
_SLOWEST_FIRST = (
    "launch",
    "cluster",
    "checkpoint",
    "engine",
    "sync",
    "hooks",
    "security",
    "report",
    "explain",
    "doctor",
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers (`make test WORKERS=2`) take a module at a time, the slowest folders' first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return

    def place(item: pytest.Item) -> int:
        if item.path.stem in _HOSTS:
            return -1
        folder = item.path.parent.name
        return _SLOWEST_FIRST.index(folder) if folder in _SLOWEST_FIRST else len(_SLOWEST_FIRST)

    for item in items:
        group = "hosts" if item.path.stem in _HOSTS else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=place)
