"""Processes that end with their parent, and only with it."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from ddprun.host.processes import die_with_parent
from tests.ranks import as_processes, is_running


def start_child() -> tuple[int, int, int]:
    """A child that is to end with this process: its id, where it answers, and what it answers."""
    (answer, told), (asked, ask) = os.pipe(), os.pipe()
    if not (pid := os.fork()):
        os.close(ask)
        os.close(answer)
        die_with_parent()
        os.write(told, b"ready")
        os.write(told, os.read(asked, 1))
        time.sleep(60)
        os._exit(0)
    os.close(told)
    assert os.read(answer, 5) == b"ready"
    return pid, ask, answer


def forked_by_main_thread() -> tuple[int, bool]:
    """A child's process id, and whether it still answers."""
    pid, ask, answer = start_child()
    os.write(ask, b"1")
    return pid, os.read(answer, 1) == b"1"


def forked_by_a_thread() -> tuple[int, bool]:
    """The same, once the thread has ended that forked it."""
    started: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=lambda: started.append(start_child()))
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # Python is done with it before the kernel
        time.sleep(0.001)
    [(pid, ask, answer)] = started
    os.write(ask, b"1")
    return pid, os.read(answer, 1) == b"1"


@pytest.mark.parametrize("start", [forked_by_main_thread, forked_by_a_thread])
def test_a_child_ends_with_its_parent_and_not_with_the_thread_that_forked_it(
    start: Callable[[], tuple[int, bool]],
) -> None:
    """The kernel's signal comes at the end of that thread."""
    [(child, answers)] = as_processes(1, start)
    try:
        assert answers
        end = time.monotonic() + 30
        while is_running(child):
            assert time.monotonic() < end, "its parent has ended"
            time.sleep(0.05)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)
