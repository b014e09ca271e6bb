"""Where else curves and metrics go: `Tracker` is the base of each, and a module of `backends` has one."""

from ddprun.track.tracker import RunInfo, StepInfo, Tracker, curves, finite_only

__all__ = ["RunInfo", "StepInfo", "Tracker", "curves", "finite_only"]
