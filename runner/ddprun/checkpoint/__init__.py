"""Checkpoints on disk: what is in a file is held to be hostile until it has been checked."""
