"""Finding out whether a launcher has started this process as a rank."""

import os

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LAUNCHED = "DDPRUN_LAUNCHED"
"""Set for ranks that this program's own launcher has started: it has told the file's warnings already."""


def speaks_first() -> bool:
    """Whether this process tells the file's warnings: the launcher, or rank 0 of another launcher."""
    return os.environ.get("RANK", "0") == "0" and LAUNCHED not in os.environ


def is_worker() -> bool:
    """Whether torchrun, or a launcher that speaks its variables, started this process as one rank of many."""
    return all(name in os.environ for name in _VARIABLES)
