"""What runs on every rank: the worker's entry, the stages, the training loop, data, precision."""
