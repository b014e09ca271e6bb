"""Checkpoints on disk: written atomically with hashes; nothing in one is ever executed."""
