"""What a pipeline will send, without a run."""
