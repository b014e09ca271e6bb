"""Generators of random numbers: reading their state waits for nobody, whatever else runs in the process."""

import gc
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from ddprun.engine import seeding
from ddprun_hooks.testing import run_ranks
from tests.ranks import as_processes

CPU = torch.device("cpu")
READS = 400


class Pausing:
    """Garbage that only a collection finds, and whose end lets other threads run."""

    pauses = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Pausing.pauses += 1
        time.sleep(1e-4)


def read_all() -> None:
    """Read all generators, as a checkpoint does."""
    seeding.generator_state(CPU)


def repeatable_rng() -> None:
    """Save and restore torch's generators, as a closure does that is called several times."""
    with seeding.RepeatableRng(CPU)():
        pass


def read_amid_garbage(read: Callable[[], object]) -> int:
    """Read generators while another thread seeds one, and garbage comes at every few allocations; gives how
    often a collection has let that thread run.
    """
    done = threading.Event()
    sys.setswitchinterval(1e-4)

    def seed_on() -> None:
        while not done.is_set():
            torch.default_generator.manual_seed(0)  # holds Python's lock while it waits for the generator's

    other = threading.Thread(target=seed_on)
    other.start()
    try:
        for number in range(READS):
            gc.set_threshold(1 + number // 5 % 20)
            garbage = [Pausing() for _ in range(number % 5)]
            del garbage
            read()
    finally:
        gc.set_threshold(700)
        done.set()
        other.join()
    assert gc.isenabled()
    return Pausing.pauses


@pytest.mark.parametrize("read", [read_all, repeatable_rng])
def test_garbage_does_not_hang_a_rank_that_reads_its_generators(read: Callable[[], object]) -> None:
    """An object's end may let a thread run that waits for the same lock (seen with Python 3.11)."""
    (pauses,) = as_processes(1, read_amid_garbage, read)
    assert pauses > READS


def test_ranks_that_are_threads_draw_what_they_have_seeded() -> None:
    """They share a process's generators, so one after the other."""

    def draw(seed: int) -> list[float]:
        with seeding.preserve_rng_state(CPU):
            seeding.seed_cpu_generators(seed)
            drawn = []
            for _ in range(3):
                drawn.append(torch.rand(()).item())
                time.sleep(1e-4)
            return drawn

    alone = [draw(seed) for seed in range(4)]
    assert run_ranks(4, lambda group: [draw(group.rank) for _ in range(5)]) == [[one] * 5 for one in alone]
