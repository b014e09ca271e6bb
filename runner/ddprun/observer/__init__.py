"""Records, hooks, straggler lines and hang reports of a run, for a training script of your own.

`observe` (in `run.py`, and as `ddprun.observe`) puts the engine's own recorder, watchdog and reporter beside
the script; `step_marker.py` finds out where the script's steps begin and end.
"""

import random

_random_state = random.getstate()
import rich.style  # noqa: E402, F401  # draws a number as it is imported, which would be the script's

random.setstate(_random_state)
