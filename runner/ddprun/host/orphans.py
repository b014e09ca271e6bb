"""No process outlives the one that started it."""

import os
import signal
import sys

LAUNCHER = "DDPRUN_LAUNCHER"
"""Environment variable of ranks: their launcher's process id. What a rank starts will not see it."""


def die_with_launcher() -> None:
    """For a rank of ddprun's launcher, before anything that takes time: to import torch takes seconds."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is not None:
        die_with_parent(int(launcher))
        # Slurm signals all processes of a step at once; to one that has no handler yet that would be the end.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent dies, however that dies (Linux).

    Args:
        parent: its process id, if it may be gone by now; None takes the one there is.
    """
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)
