"""What the engines have in common: a job that can be shown, sent and followed."""

import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ddprun.config import Loaded
from ddprun_hooks.config.trust import VARIABLE

PORT = 29400
"""Where the hosts of a job with a network of its own meet: torchelastic's own default."""

RUNS = "/workspace/runs"
"""The image's folder for what runs leave."""

_MOST = 40
"""Characters of a job's name, to which engines append some."""

Show = Callable[[str], None]


class ClusterError(RuntimeError):
    """The engine is not there, or has refused the job; says so in its own words."""


class Outcome(NamedTuple):
    """How a job has ended."""

    state: str
    """As its engine calls it."""

    good: bool


class Job(Protocol):
    """What is handed to an engine."""

    @property
    def text(self) -> str:
        """All that is sent."""

    def send(self) -> str:
        """Hand it over; gives its id.

        Raises:
            ClusterError: the engine is not there, or refuses it.
        """

    def follow(self, number: str, show: Show) -> Outcome:
        """Show the output of the job with this id as it comes, until it is over.

        Raises:
            ClusterError: the engine does not answer.
        """


def new_name(loaded: Loaded) -> str:
    """A name for a job that no other has: lower-case letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", loaded.pipeline.name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".strip("-")
    return f"{plain[:_MOST].strip('-')}-{secrets.token_hex(4)}"


def limits() -> dict[str, str]:
    """Environment variables that limit what a run may do, as they are here: they hold for the job, too."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def nodes_of(loaded: Loaded, asked: int | None) -> int:
    """How many hosts a job has; `asked`: the engine's own key."""
    return asked or loaded.pipeline.launch.hosts[1]


def arguments(
    loaded: Loaded, file: str, run_dir: str, overrides: Sequence[str], *, nodes: int, meeting: str, name: str
) -> list[str]:
    """Ddprun's arguments on each of a job's hosts; a host that is started again gets the same.

    Args:
        loaded: the checked pipeline.
        file: the pipeline's file there.
        run_dir: the folder of the run there.
        overrides: the `--set` options; what they say of engines has been heeded.
        nodes: hosts of the job.
        meeting: HOST:PORT of the rendezvous.
        name: the job's.
    """
    # The file has another name there, and with it the pipeline had.
    found = [
        "run",
        file,
        "--run-dir",
        run_dir,
        "--or-resume",
        "--set",
        f"name={json.dumps(loaded.pipeline.name)}",
    ]
    for override in overrides:
        if not override.startswith(("slurm.", "docker.", "kubernetes.")):
            found += ["--set", override]
    least, most = loaded.pipeline.launch.hosts
    hosts = f"{least}:{nodes}" if least < min(most, nodes) else str(nodes)
    if hosts != str(loaded.pipeline.launch.nnodes):
        found += ["--set", f"launch.nnodes={hosts if hosts.isdigit() else json.dumps(hosts)}"]
    if nodes > 1:  # also as a flag, which goes before what an engine's variables say
        found += ["--nnodes", hosts, "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", name]
    return found
