"""Handing a pipeline to a cluster's own engine: Slurm. Torch is not imported."""
