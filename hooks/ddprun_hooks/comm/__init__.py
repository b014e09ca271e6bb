"""Who exchanges with whom, in which order, and what came of it."""
