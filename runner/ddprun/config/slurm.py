"""`slurm`: what `ddprun submit --to slurm` asks for."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from ddprun.config import patterns
from ddprun.config.fields import Validated
from ddprun.config.options import NonNegativeInt, Options, PositiveInt
from ddprun.config.problems import all_within, mismatch, problem

TIME = r"^([0-9]+-)?[0-9]{1,9}(:[0-9]{1,2}){0,2}$"
OPTION = r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$"
"""A long option of sbatch's, without its dashes."""
_PRINTABLE = r"[^\x00-\x1f\x7f\"\\]*"

OWN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "account": "write slurm.account",
        "array": "submit each run by itself",
        "chdir": "paths are those of where submit is called",
        "container": "write slurm.image",
        "cpus-per-task": "write slurm.cpus",
        "error": "both streams are in the job's one output file",
        "gpus": "write slurm.gpus, which counts those of one host",
        "gpus-per-node": "write slurm.gpus",
        "gres": "write slurm.gpus",
        "job-name": "write name",
        "nodes": "write slurm.nodes",
        "no-requeue": "write slurm.warn_s: 0",
        "ntasks": "there is one task on each host; write launch.nproc_per_node",
        "ntasks-per-node": "there is one task on each host; write launch.nproc_per_node",
        "open-mode": "a job that is queued again goes on writing to its output file",
        "output": "the job's output is beside the run's folder",
        "parsable": "submit prints the job's id",
        "partition": "write slurm.partition",
        "requeue": "write slurm.warn_s",
        "signal": "write slurm.warn_s",
        "test-only": "use submit --dry-run",
        "time": "write slurm.time",
        "wait": "use submit --follow",
        "wrap": "submit writes the script",
    }
)
"""Options of sbatch's that are ddprun's to set, and what to do instead."""


def _read_time(value: Any) -> str | int | None:
    """Slurm's own ways to write a time.

    Raises:
        PydanticCustomError: it is none of them.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and re.fullmatch(TIME, value):
        return value
    if isinstance(value, str):
        raise problem(f'"{value}" is no time', 'minutes, "HH:MM:SS", "D-HH" or "D-HH:MM:SS"')
    raise mismatch("a time", 'minutes, "HH:MM:SS", "D-HH" or "D-HH:MM:SS"')


def _read_options(value: Any) -> dict[str, str | int | float | bool]:
    """Raises:
    PydanticCustomError: an option that sbatch cannot have, or that is ddprun's own.
    """
    if not isinstance(value, dict):
        raise mismatch("a mapping of sbatch's options", "write {mem: 64G, exclusive: true}")
    faults = []
    for name, item in value.items():
        if not isinstance(name, str) or not re.fullmatch(OPTION, name):
            faults.append(
                (
                    problem(f'"{name}" is no long option of sbatch', "as in mem-per-cpu", where="key"),
                    str(name),
                )
            )
        elif name in OWN_OPTIONS:
            faults.append((problem(f'"{name}" is set by ddprun', OWN_OPTIONS[name], where="key"), name))
        elif not isinstance(item, (str, int, float)):
            faults.append((problem("expected a string, a number, or true for a flag without a value"), name))
        elif isinstance(item, str) and not re.fullmatch(_PRINTABLE, item):
            faults.append((problem("a line of a script cannot hold quotes, backslashes or line ends"), name))
    if faults:
        raise all_within(faults)
    return dict(value)


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=patterns.SLURM_NAME)]
"""As partitions, accounts and images have."""


class Slurm(Options):
    """What `ddprun submit --to slurm` asks for."""

    nodes: PositiveInt | None = None
    """Hosts; null is `launch.nnodes`, of a range the largest."""

    gpus: NonNegativeInt | None = None
    """GPUs of each host; null asks for none."""

    cpus: PositiveInt | None = None
    """Processors of each host, for all of its ranks; null is what the cluster gives."""

    time: Annotated[str | int | None, Validated(_read_time, "slurm_time")] = None
    """How long the job may take: minutes, "HH:MM:SS" or "D-HH:MM:SS"; null is the partition's limit."""

    partition: Name | None = None
    """Where the job is queued; null is the cluster's default."""

    account: Name | None = None
    """On whose account; null is the user's."""

    image: Name | None = None
    """Container image, for clusters with Pyxis (`srun --container-image`); null runs without one."""

    warn_s: NonNegativeInt = 120
    """Seconds before time is up in which a checkpoint is taken and the job is queued again; 0 lets it end."""

    options: Annotated[dict[str, str | int | float | bool], Validated(_read_options, "slurm_options")] = (
        Field(default={})
    )
    """Any other long options of sbatch, as in {mem: 64G, exclusive: true}."""
