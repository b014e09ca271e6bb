"""The built-in cluster backends: a module for each, whose name is the backend's and its key in a pipeline."""
