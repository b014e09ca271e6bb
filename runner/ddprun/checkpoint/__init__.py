"""Checkpoints on disk: written atomically with hashes; what is in a file is held to be hostile until it has
been checked, and nothing in it is ever executed.
"""
