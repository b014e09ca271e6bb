"""ddprun: a declarative pipeline runner for PyTorch DistributedDataParallel.

`ddprun.observe` is for training scripts of your own. Importing this package imports nothing else:
`ddprun.__main__` has to mend `sys.path` before anything of the working directory could shadow an installed
package.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddprun.observer.run import ObservedRun as ObservedRun
    from ddprun.observer.run import observe as observe

__version__ = "0.1.0"

LAUNCHED_BY_DDPRUN_VARIABLE = "DDPRUN_LAUNCHED"
"""Name of the environment variable that ddprun's own launcher sets for the ranks it starts. The launcher has
then already printed the warnings of the pipeline file."""

COMPARE_TURNS_VARIABLE = "DDPRUN_TURNS"
"""Name of the environment variable that tells each run of a comparison its turns (`engine.interrupts`)."""

ON_USR1_VARIABLE = "DDPRUN_ON_USR1"
"""Name of an environment variable of the launcher. If it is `stop`, SIGUSR1 makes the run stop after its next
checkpoint, and the launcher exits with `EXIT_REQUEUE`. Otherwise the run continues."""

EXIT_SUCCESS, EXIT_FAILURE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130  # exit codes
EXIT_REPEATED_FAILURE = 79
"""Exit code of a rank, for its launcher: it has failed as one has before, so starting again is no help. No
other program has it: those of sysexits.h end at 78, and a shell's begin at 125."""

EXIT_REQUEUE = 138  # exit code of a run that has stopped to be queued again: 128 + SIGUSR1


def exit_unless_linux() -> None:
    """End the process where ddprun cannot run, in one line, before what only Linux has is imported."""
    import sys

    if sys.platform != "linux":
        where = "in a container, or on Windows in WSL 2"
        print(f"ddprun needs Linux, and this is {sys.platform}: run it {where}", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_BAD_INPUT)


class InputError(Exception):
    """What the user has given cannot be used; the message says why. It ends a command: `EXIT_BAD_INPUT`."""


def __getattr__(name: str) -> object:
    if name in ("observe", "ObservedRun"):
        exit_unless_linux()
        from ddprun.observer import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
