"""The built-in trackers: a module for each, whose name is the tracker's."""
