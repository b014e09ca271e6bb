"""What the trusted package takes from another one of its modules."""

import os

star_shell = os.system


def star_net() -> object:
    """One of the package's own."""
    return None
