"""Where `ddprun submit` sends a pipeline: `Cluster` is the base, and a module of `backends` has one each.

Torch is not imported.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from ddprun import options
from ddprun.options import matching
from ddprun.plugins import CLUSTERS, Plugin
from ddprun_hooks.config.trust import VARIABLE

if TYPE_CHECKING:
    from ddprun.config import Loaded

_NAME_LENGTH = 40
"""Characters of a job's name, to which backends append some."""

_PORT = 29400
"""Of the rendezvous of a job's containers, on a network of its own: torchelastic's own default."""

RUNS = "/workspace/runs"
"""The folder of ddprun's image for what runs leave."""

USER = 1000
"""The image's user."""

Image = Annotated[
    str,
    Field(max_length=300),
    matching(
        r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$", 'letters, digits and "_.:/@-" only, a letter or a digit first'
    ),
]
Folder = Annotated[
    str, Field(max_length=1000), matching(r"^/[^:\x00-\x1f]+$", 'a path from "/" on, without ":"')
]

Show = Callable[[str], None]
"""Takes a piece of a job's output."""


class ClusterError(RuntimeError):
    """The cluster is not there, or has refused the job; the message has its own words."""


class Outcome(NamedTuple):
    """How a job has ended."""

    state: str
    """As its cluster calls it."""

    good: bool


class Flag(NamedTuple):
    """A flag of `ddprun submit` that takes a value."""

    metavar: str
    help: str


@dataclass(frozen=True)
class Submission:
    """What `ddprun submit` hands over."""

    loaded: "Loaded"
    """The checked pipeline."""

    overrides: Sequence[str] = ()
    """The `--set` options."""

    flags: Mapping[str, str] = field(default_factory=dict)
    """The backend's own flags that were given, without `--`."""

    modules: Mapping[str, bytes] = field(default_factory=dict)
    """Files to put beside the pipeline's: their content, by their path from there."""

    def new_name(self) -> str:
        """A name for a job that no other has: lower-case letters, digits and dashes, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.loaded.pipeline.name.lower()).strip("-")
        if not plain[:1].isalpha():
            plain = f"run-{plain}".strip("-")
        return f"{plain[:_NAME_LENGTH].strip('-')}-{secrets.token_hex(4)}"

    def hosts(self, asked: int | None = None) -> int:
        """How many hosts the job has: as `asked` by the backend's own key, or the most of `launch.nnodes`."""
        return asked or self.loaded.pipeline.launch.host_range[1]

    def arguments(
        self, file: str | Path, run_dir: str | Path, *, hosts: int = 1, endpoint: str = "", job: str = ""
    ) -> list[str]:
        """Ddprun's arguments on each host of the job; a host that is started again gets the same.

        Args:
            file: the pipeline's file there.
            run_dir: the folder of the run there.
            hosts: of the job.
            endpoint: HOST:PORT on the first of several hosts.
            job: its name, which separates several jobs at one address.
        """
        launch = self.loaded.pipeline.launch
        # The file may have another name there, and with it the pipeline had.
        name = f"name={json.dumps(self.loaded.pipeline.name)}"
        found = ["run", str(file), "--run-dir", str(run_dir), "--or-resume", "--set", name]
        for override in self.overrides:
            if re.split(r"[.\[=]", override, maxsplit=1)[0] not in CLUSTERS.names():  # applied already
                found += ["--set", override]
        least, most = launch.host_range
        count = f"{least}:{hosts}" if least < min(most, hosts) else str(hosts)
        if count != str(launch.nnodes):
            found += ["--set", f"launch.nnodes={count if count.isdigit() else json.dumps(count)}"]
        if hosts > 1:  # also as a flag, which goes before what a cluster's variables say
            found += ["--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            found += ["--rdzv-id", job]
        return found

    def container_arguments(self, job: str, file: str, hosts: int, first: str) -> list[str]:
        """Ddprun's arguments in each container of a job; `first` is the name of the first one's host."""
        run_dir = f"{RUNS}/{self.loaded.pipeline.name}/{job}"
        return self.arguments(file, run_dir, hosts=hosts, endpoint=f"{first}:{_PORT}", job=job)


class Cluster(Plugin):
    """One way to have a pipeline run elsewhere; an object of it is one job."""

    class Options(options.Options):
        """Base of what stands under a backend's key: nothing unknown, no other types, finite numbers only."""

        free_form: ClassVar[Mapping[str, frozenset[str]]] = {}
        """Options in another tool's format, which are searched for secrets in arguments (`--token=…`); of
        each the keys that are called like secrets and only name one."""

    shows_file: ClassVar[bool] = True
    """The job holds the text of the pipeline's file, so a file with a secret in it is refused."""

    takes_modules: ClassVar[int] = 0
    """So many bytes of `Submission.modules` at most the job can have beside the pipeline's file; 0: none."""

    variables: ClassVar[str] = ""
    """Where the job has its environment variables from, for messages; empty: from where it is submitted."""

    flags: ClassVar[Mapping[str, Flag]] = {}
    """Flags of `ddprun submit` for this backend alone, without `--`."""

    def __init__(self, options: Any, submission: Submission) -> None:
        """Prepare the job; nothing is sent, and the cluster need not be there."""

    @property
    def text(self) -> str:
        """All that is sent, for `--dry-run`."""
        raise NotImplementedError

    def send(self) -> str:
        """Hand it over; gives the job's id.

        Raises:
            ClusterError: the cluster is not there, or refuses it.
        """
        raise NotImplementedError

    def follow(self, job: str, show: Show) -> Outcome:
        """Show the output of the job with this id as it comes, until the job is over.

        Raises:
            ClusterError: the cluster does not answer.
        """
        raise NotImplementedError

    def lacks(self, variables: Iterable[str]) -> list[str]:
        """Which of these environment variables the job will not have, as far as is known."""
        return []


def limits() -> dict[str, str]:
    """Environment variables that limit what a run may do, as they are here: they hold for the job, too."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
