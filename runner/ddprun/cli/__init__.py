"""The command line: one file per command, each parses, calls and prints. Importing it imports no torch."""

from ddprun.cli.main import main

__all__ = ["main"]
