"""ddprun: a declarative pipeline runner for PyTorch DistributedDataParallel.

Importing this package imports nothing else: `ddprun.__main__` has to mend `sys.path` before anything of
the working directory could shadow an installed package.
"""

__version__ = "0.1.0"

LAUNCHED = "DDPRUN_LAUNCHED"
"""Environment variable of ranks that this program's own launcher started: it has told the file's warnings."""

COMPARED = "DDPRUN_TURNS"
"""Environment variable of the runs of a comparison: how they take turns (`ddprun.engine.interrupts`)."""

ON_USR1 = "DDPRUN_ON_USR1"
"""Environment variable of a launcher: with `stop`, SIGUSR1 has the run stop after its checkpoint, and the
launcher end with `QUEUE_AGAIN`. Without it the run goes on.
"""

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""

QUEUE_AGAIN = 138
"""Exit code of a run that has stopped to be queued again: 128 + SIGUSR1."""
