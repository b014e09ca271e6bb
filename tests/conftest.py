"""Fixtures for all tests: ranks as threads, ranks as processes, and real `ddprun` processes."""

import os

# Before torch is imported anywhere: with more threads than cores per rank, times and bits are anyone's guess.
os.environ.setdefault("OMP_NUM_THREADS", "1")
