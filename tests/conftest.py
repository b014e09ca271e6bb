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

# The folders whose files take longest. What waits most (an image that is built) comes before what computes.
_SLOWEST_FIRST = ("cluster", "launch", "doctor", "checkpoint", "engine", "sync", "hooks", "compare", "track")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers take a file at a time: the slowest folders' first."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _SLOWEST_FIRST.index(folder) if folder in _SLOWEST_FIRST else len(_SLOWEST_FIRST)

    items.sort(key=place)
