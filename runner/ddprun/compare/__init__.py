"""Pipelines that run side by side, in time slices, and what differs between them."""
