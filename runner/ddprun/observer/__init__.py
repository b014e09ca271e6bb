"""Records, hooks, straggler lines and hang reports of a run, for a training script of your own.

`observe` (in `run.py`, and as `ddprun.observe`) puts the engine's own recorder, watchdog and reporter beside
the script; `marks.py` finds out where the script's steps begin and end.
"""
