"""Checkpoints on disk: written atomically with hashes; nothing in one is ever executed. What they hold is in
`engine/checkpoint_state.py`.
"""
