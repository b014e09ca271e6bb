"""The command line: one file per command, each parses, calls and prints. Importing it imports no torch."""

from ddprun import exit_unless_linux

exit_unless_linux()

from ddprun.cli.main import main  # noqa: E402

__all__ = ["main"]
