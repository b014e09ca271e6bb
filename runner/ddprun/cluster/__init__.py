"""Where `ddprun submit` sends a pipeline: `Cluster` is the base, `backends` has one each. Without torch."""

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
from ddprun.config.secrets import ALLOWED_ENV_VARIABLE
from ddprun.options import NonNegativeInt, PositiveFloat, PositiveInt, pattern_constraint
from ddprun.plugins import CLUSTERS, Plugin
from ddprun_hooks.config.trust import TRUST_VARIABLE

if TYPE_CHECKING:
    from ddprun.config import LoadedPipeline

_MAX_JOB_NAME_LENGTH = 40  # characters of a job's name, to which backends append some
_RENDEZVOUS_PORT = 29400  # of a job's containers, on a network of its own: torchelastic's own default
CONTAINER_RUNS_FOLDER = "/workspace/runs"  # path in ddprun's image below which runs write their folders
CONTAINER_USER_ID = 1000  # user and group of the image
ImageName = Annotated[
    str,
    Field(max_length=300),
    pattern_constraint(
        r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$", 'letters, digits and "_.:/@-" only, a letter or a digit first'
    ),
]
AbsoluteFolder = Annotated[
    str, Field(max_length=1000), pattern_constraint(r"^/[^:\x00-\x1f]+$", 'a path from "/" on, without ":"')
]
VariableName = Annotated[
    str,
    Field(max_length=200),
    pattern_constraint(r"^[A-Za-z_][A-Za-z0-9_]*$", 'letters, digits and "_" only, not a digit first'),
]

ShowOutput = Callable[[str], None]  # takes a piece of a job's output


class ClusterError(RuntimeError):
    """The cluster is not there, or has refused the job; the message has its own words."""


class Outcome(NamedTuple):
    """How a job has ended."""

    state: str  # as its cluster calls it
    succeeded: bool


class Flag(NamedTuple):
    """A flag of `ddprun submit` that takes a value."""

    metavar: str
    help: str


@dataclass(frozen=True)
class Submission:
    """What `ddprun submit` hands over."""

    loaded: "LoadedPipeline"  # the checked pipeline
    overrides: Sequence[str] = ()  # the `--set` options
    flags: Mapping[str, str] = field(default_factory=dict)  # the backend's own, without `--`
    modules: Mapping[str, bytes] = field(default_factory=dict)
    """Files to put beside the pipeline's: their content, by their path from there."""

    def new_name(self) -> str:
        """A name for a job that no other has: lower-case letters, digits and dashes, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.loaded.pipeline.name.lower()).strip("-")
        if not plain[:1].isalpha():
            plain = f"run-{plain}".strip("-")
        return f"{plain[:_MAX_JOB_NAME_LENGTH].strip('-')}-{secrets.token_hex(4)}"

    def host_count(self, asked: int | None = None) -> int:
        """Number of hosts: as `asked` by the backend's own key, or the most that `launch.nnodes` allows."""
        return asked or self.loaded.pipeline.launch.host_range[1]

    def arguments(
        self, file: str | Path, run_dir: str | Path, *, hosts: int = 1, endpoint: str = "", job: str = ""
    ) -> list[str]:
        """Ddprun's arguments on each host of the job; a host that is started again gets the same.

        `file` and `run_dir` are paths there. `endpoint` is HOST:PORT on the first of several hosts; `job`
        separates several jobs at one address.
        """
        launch = self.loaded.pipeline.launch
        # A pipeline without `name` is called after its file, which may be called otherwise there.
        name = f"name={json.dumps(self.loaded.pipeline.name)}"
        found = ["run", str(file), "--run-dir", str(run_dir), "--or-resume", "--set", name]
        for override in self.overrides:
            if re.split(r"[.\[=]", override, maxsplit=1)[0] not in CLUSTERS.names():
                found += ["--set", override]  # else the backend has taken these into its own options
        least, most = launch.host_range
        count = f"{least}:{hosts}" if least < min(most, hosts) else str(hosts)
        if count != str(launch.nnodes):
            found += ["--set", f"launch.nnodes={count if count.isdecimal() else json.dumps(count)}"]
        if hosts > 1:  # also as a flag, which goes before what a cluster's variables say
            found += ["--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            found += ["--rdzv-id", job]
        return found

    def container_arguments(self, job: str, file: str, hosts: int, first: str) -> list[str]:
        """Ddprun's arguments in each container of a job; `first` is the name of the first one's host."""
        run_dir = f"{CONTAINER_RUNS_FOLDER}/{self.loaded.pipeline.name}/{job}"
        return self.arguments(file, run_dir, hosts=hosts, endpoint=f"{first}:{_RENDEZVOUS_PORT}", job=job)


class Cluster(Plugin):
    """Base class of cluster backends, which run a pipeline elsewhere. An object of a subclass is one job."""

    class Options(options.Options):
        """Base of what stands under a backend's key: nothing unknown, no other types, finite numbers only."""

    job_contains_pipeline: ClassVar[bool] = True
    """Whether the job contains the pipeline file's text; a file with a secret in it is then refused."""

    max_modules_bytes: ClassVar[int] = 0
    """The largest size of `Submission.modules` that a job can contain; 0: a job contains no modules."""

    variables_source: ClassVar[str] = ""
    """Where the job's environment variables are set, for messages; empty: in the shell that submits it."""

    flags: ClassVar[Mapping[str, Flag]] = {}
    """Flags of `ddprun submit` for this backend alone, without `--`."""

    def __init__(self, options: Any, submission: Submission) -> None:
        """Prepare the job; nothing is sent, and the cluster need not be there."""

    @property
    def text(self) -> str:
        """All that is sent, for `--dry-run`."""
        raise NotImplementedError

    @property
    def warnings(self) -> Sequence[str]:
        """What to tell the user before the job is sent."""
        return ()

    def send(self) -> str:
        """Submit the job; returns its id. Raises ClusterError if the cluster is not there, or refuses it."""
        raise NotImplementedError

    def follow(self, job: str, show: ShowOutput) -> Outcome:
        """Show the output of the job with this id until it is over. Raises ClusterError."""
        raise NotImplementedError

    def unset_in_job(self, variables: Iterable[str]) -> list[str]:
        """Which of these environment variables will certainly not be set in the job."""
        return []


class ContainerOptions(Cluster.Options):
    """Base of the options of a backend whose hosts are containers."""

    image: ImageName = "ddprun"
    """An image with ddprun as its entrypoint, and with everything that the pipeline names."""

    nodes: PositiveInt | None = None
    """Hosts of the job, each a container; null is `launch.nnodes`, or the maximum if that is a range."""

    gpus: NonNegativeInt | None = None
    """NVIDIA GPUs of each host, which no two hosts share; null asks for none."""

    cpus: PositiveFloat | None = None
    """CPUs of each host; null leaves it to the engine or the cluster."""


def trust_environment() -> dict[str, str]:
    """The environment variables, of those set here, that restrict what the job may import and take."""
    return {name: os.environ[name] for name in (TRUST_VARIABLE, ALLOWED_ENV_VARIABLE) if name in os.environ}
