"""Finding out whether a launcher has started this process as a rank."""

import os

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_worker() -> bool:
    """Whether torchrun, or a launcher that speaks its variables, started this process as one rank of many."""
    return all(name in os.environ for name in _VARIABLES)
