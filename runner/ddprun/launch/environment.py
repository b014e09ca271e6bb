"""What a launcher tells its ranks by environment variables."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_OVERRIDE = "DDPRUN_OVERRIDE_"


def warning() -> str | None:
    """What to tell a user whose torchrun is to start ranks of several hosts again, and most often cannot."""
    told = os.environ.get
    several, shared = told("GROUP_WORLD_SIZE", "1") != "1", told("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if told("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or not (several and shared):
        return None
    return (
        "ddprun: warning: torchrun may start ranks again, which mostly fails on several hosts, where the "
        "ranks' store keeps old addresses: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


@contextmanager
def handed_on(overrides: Sequence[str]) -> Iterator[None]:
    """Hand `--set` options to the processes that are started in this block.

    On their command lines everybody who may list processes would read them.
    """
    names = [f"{_OVERRIDE}{number}" for number in range(len(overrides))]
    os.environ.update(zip(names, overrides, strict=True))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def handed_down() -> tuple[str, ...]:
    """The `--set` options that this process's launcher has handed on; what it starts will not see them."""
    found: list[str] = []
    while (text := os.environ.pop(f"{_OVERRIDE}{len(found)}", None)) is not None:
        found.append(text)
    return tuple(found)
