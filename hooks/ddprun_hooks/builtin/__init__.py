"""The built-in hooks, one per file."""
