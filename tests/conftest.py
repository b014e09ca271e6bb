"""Fixtures for all tests: ranks as threads, ranks as processes, and real `ddprun` processes."""

import os
import signal

# Before torch is imported anywhere: with more threads than cores per rank, times and bits are anyone's guess.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores SIGINT, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
