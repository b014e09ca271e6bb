"""Processes that end with their parent, and only with it."""

import os
import signal
import time

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


def child_that_answers() -> tuple[int, bool]:
    """A child's process id, and whether it still answers."""
    pid, ask, answer = start_child()
    os.write(ask, b"1")
    return pid, os.read(answer, 1) == b"1"


def test_a_child_ends_with_its_parent() -> None:
    """And no earlier."""
    [(child, answers)] = as_processes(1, child_that_answers)
    try:
        assert answers
        end = time.monotonic() + 30
        while is_running(child):
            assert time.monotonic() < end, "its parent has ended"
            time.sleep(0.05)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)
