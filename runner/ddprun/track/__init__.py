"""Where else curves and metrics go: each tracker in a file of its own, imported only when asked for."""
