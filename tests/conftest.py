"""Fixtures for all tests: ranks as threads, ranks as processes, and real `ddprun` processes."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: with more threads than cores per rank, times and bits are anyone's guess.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests fork ranks from a process that has counted GPUs: by CUDA's own count, a child could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for `nohup make test`: a process that is started inherits what is ignored, but no handler.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# The files that take longest, a quarter of a minute and more: those that mostly wait (for time-outs, for an
# image) in turns with those that compute, so that both are under way all the time.
_FIRST = (
    "cluster/test_docker.py",
    "checkpoint/test_places.py",
    "launch/test_hosts.py",
    "observer/test_scripts.py",
    "checkpoint/test_resume.py",
    "compare/test_hosts.py",
    "engine/test_compile.py",
    "launch/test_elastic.py",
    "launch/test_processes.py",
    "doctor/test_two_hosts.py",
    "engine/test_balance.py",
    "launch/test_hangs.py",
    "hooks/test_testing.py",
    "observer/test_two_hosts.py",
    "sync/test_equalities.py",
    "launch/test_signals.py",
    "engine/test_schedule_and_average.py",
    "tune/test_command.py",
    "hooks/test_stacks.py",
    "engine/test_turns.py",
    "tests/test_extending.py",
    "engine/test_evaluate_in_stage.py",
    "engine/test_stages.py",
    "engine/test_rounds.py",
    "launch/test_restarts.py",
    "tests/test_docs.py",
    "sync/test_matrix.py",
    "integrations/test_integrations.py",
    "launch/test_slurm.py",
    "explain/test_explain.py",
    "launch/test_leftovers.py",
    "engine/test_session.py",
    "launch/test_fork_server.py",
    "engine/test_before_step_1.py",
    "predict/test_command.py",
    "security/test_received_runs.py",
    "tests/test_benchmarks.py",
    "checkpoint/test_damage.py",
    "checkpoint/test_changed_data.py",
    "hooks/test_kernels.py",
    "security/test_canary.py",
    "compare/test_compare.py",
    "security/test_code_folders.py",
    "track/test_trackers.py",
)
_THEN = ("engine", "sync", "hooks")


@pytest.fixture(autouse=True)
def keep_environment() -> Iterator[None]:
    """What code under test sets in the environment, such as an interface for Gloo, or adds to `sys.path`,
    such as a pipeline's folder, ends with the test.
    """
    before, path = dict(os.environ), [*sys.path]
    yield
    sys.path[:] = path
    for name in os.environ.keys() | before.keys():
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers take a file at a time: the slowest first, so that no long one is left at the end."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        if (file := f"{folder}/{item.path.name}") in _FIRST:
            return _FIRST.index(file)
        return len(_FIRST) + (_THEN.index(folder) if folder in _THEN else len(_THEN))

    items.sort(key=place)
