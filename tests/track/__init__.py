"""Tests of `ddprun.track`."""
