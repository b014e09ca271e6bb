"""Checks across keys: what has no effect, or breaks, together with the rest of the file."""

# Imported, so that they register their checks.
from ddprun.config.checks import exchange as exchange
from ddprun.config.checks import model_and_data as model_and_data
from ddprun.config.checks import stages as stages
from ddprun.config.checks.model_and_data import find_equal_trackers as find_equal_trackers
from ddprun.config.checks.registry import KeyConflict as KeyConflict
from ddprun.config.checks.registry import find_conflicts as find_conflicts
