"""Which launcher has started this process, and as which rank, in torchrun's own variables.

| launcher | recognised by | this process |
|---|---|---|
| torchrun | `TORCHELASTIC_RUN_ID` | is a rank |
| Kubeflow Trainer | `PET_NODE_RANK`, `PET_MASTER_ADDR` …: torchrun's flags | starts its host's ranks |
| srun | `SLURM_STEP_ID`, `SLURM_PROCID` … | with one task on each host starts its ranks; else is a rank |
| anything else | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | is a rank |

srun's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES. torchrun's:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddprun import InputError
from ddprun.units import format_count

_PORTS = range(15_000, 30_000)  # below those that Linux gives to whoever asks for any
_OVERRIDES_VARIABLE = "DDPRUN_OVERRIDES"
# Flags that say how ranks are started, and so nothing to a process that is one.
_RANK_STARTING_FLAGS = ("nnodes", "nproc_per_node", "node_rank", "standalone", "max_restarts")


Flags = Mapping[str, str | bool]
"""Those of torchrun's flags that were given, spelled with `_`; True: one without a value."""


class LauncherError(InputError):
    """The variables that a launcher has set contradict each other, or the flags; says which and how."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """What launched this process, and what this process is to it: a rank, or what starts a host's ranks."""

    summary: str  # what was detected, in one line
    variables: Mapping[str, str] = field(default_factory=dict)  # torchrun's variables for this rank
    flags: Mapping[str, str] = field(default_factory=dict)  # torchrun's, for ranks that this process starts
    is_first: bool = True  # rank 0, or on the first host, and so the one that speaks

    @property
    def starts_ranks(self) -> bool:
        """Whether this process is to start its host's ranks, and is none itself."""
        return not self.variables


def detect_launcher(environment: Mapping[str, str], flags: Flags) -> Launcher | None:
    """The launcher in a process's environment; None: a user. Raises LauncherError for contradictions."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return _launcher_from_rank_variables("torchrun", environment, flags)
    if "PET_NODE_RANK" in environment or "PET_MASTER_ADDR" in environment:
        # Torchrun's own code reads these variables as its flags.
        nodes, node = environment.get("PET_NNODES", "1"), _read_number(environment, "PET_NODE_RANK", 0)
        if not (most := nodes.rpartition(":")[2]).isdecimal() or node >= int(most):
            raise LauncherError(f"PET_NODE_RANK is {node}, and PET_NNODES {nodes}; hosts count from 0")
        return Launcher(f"Kubeflow Trainer's variables (PET_…): host {node} of {nodes}", is_first=node == 0)
    by_srun = _srun_launcher(environment, flags)
    if "RANK" in environment or (by_srun is None and "WORLD_SIZE" in environment):
        plain = _launcher_from_rank_variables("a launcher that sets RANK and WORLD_SIZE", environment, flags)
        if by_srun is not None and not by_srun.starts_ranks:
            for ours, theirs in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
                if plain.variables[ours] != by_srun.variables[ours]:
                    raise LauncherError(
                        f"{ours} is {plain.variables[ours]}, but srun says {theirs}="
                        f"{by_srun.variables[ours]}; leave {ours} out, and ddprun takes srun's"
                    )
        return plain
    return by_srun


def _launcher_from_rank_variables(name: str, environment: Mapping[str, str], flags: Flags) -> Launcher:
    missing = [variable for variable in ("RANK", "WORLD_SIZE") if variable not in environment]
    rank, size = _read_number(environment, "RANK", 0), _read_number(environment, "WORLD_SIZE", 1)
    if size > 1 or "RANK" not in environment:
        missing += [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if variable not in environment]
    if missing:
        raise LauncherError(
            f"not set: {', '.join(missing)}; a rank needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and "
            "a process that starts ranks none of them"
        )
    if rank >= size:
        raise LauncherError(f"RANK is {rank} of WORLD_SIZE {size}; ranks count from 0")
    local, local_size = (
        _read_number(environment, "LOCAL_RANK", 0),
        _read_number(environment, "LOCAL_WORLD_SIZE", size),
    )
    if local >= local_size:
        raise LauncherError(f"LOCAL_RANK is {local} of LOCAL_WORLD_SIZE {local_size}; ranks count from 0")
    if local_size > size:
        raise LauncherError(f"LOCAL_WORLD_SIZE is {local_size}, but WORLD_SIZE {size}")
    _refuse_start_flags(name, flags)
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if size == 1:
        variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", "127.0.0.1")
        variables["MASTER_PORT"] = environment.get("MASTER_PORT", "0")
    return Launcher(f"{name}: rank {rank} of {size}", variables, is_first=rank == 0)


def _srun_launcher(environment: Mapping[str, str], flags: Flags) -> Launcher | None:
    """A task of a step; outside of srun, as in a batch script, there is no step."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= set(environment):
        return None
    task, tasks = _read_number(environment, "SLURM_PROCID"), _read_number(environment, "SLURM_STEP_NUM_TASKS")
    node, nodes = _read_number(environment, "SLURM_NODEID"), _read_number(environment, "SLURM_STEP_NUM_NODES")
    on_node = _parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(on_node) != nodes or sum(on_node) != tasks or task >= tasks or node >= nodes:
        raise LauncherError(
            f"srun's variables contradict each other: SLURM_PROCID={task} of SLURM_STEP_NUM_TASKS={tasks}, "
            f"SLURM_NODEID={node} of SLURM_STEP_NUM_NODES={nodes}, SLURM_STEP_TASKS_PER_NODE="
            f"{environment.get('SLURM_STEP_TASKS_PER_NODE', '')}"
        )
    job, step = environment.get("SLURM_JOB_ID", "0"), environment["SLURM_STEP_ID"]
    first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    port = str(_PORTS[zlib.crc32(f"{job}.{step}".encode()) % len(_PORTS)])
    if max(on_node) == 1:
        found = {"nnodes": str(nodes)}
        if nodes > 1:
            found |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{first}:{port}", "rdzv_id": f"{job}.{step}"}
        return Launcher(f"srun: host {node} of {nodes}, job {job}", flags=found, is_first=node == 0)
    _refuse_start_flags("srun", flags)
    variables = {
        "RANK": str(task),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(_read_number(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(on_node[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": first if nodes > 1 else "127.0.0.1",
        "MASTER_PORT": port,
    }
    summary = f"srun: rank {task} of {tasks} on {format_count(nodes, 'host')}, job {job}"
    return Launcher(summary, variables, is_first=task == 0)


def _refuse_start_flags(name: str, flags: Flags) -> None:
    for flag in flags:
        if flag in _RANK_STARTING_FLAGS or flag.startswith(("rdzv_", "master_")):
            raise LauncherError(
                f"{name} has started this process as one rank, so --{flag.replace('_', '-')} has no effect: "
                "leave it out, or start one process on each host, which then starts the ranks"
            )


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        found = "not set" if text is None else repr(text)
        raise LauncherError(f"{name} is {found}; it must be a number from 0 on")
    return int(text)


def _parse_tasks_per_node(text: str) -> list[int]:
    """Tasks on each host, of `2(x3),1`."""
    found: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)) is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts, such as `gpu[003-005,9],login`; raises LauncherError."""
    match = re.match(r"([^\[\],]+)(?:\[([0-9]+)[^\]]*\]([^\[\],]*))?(?:,|$)", nodes)
    if match is None:
        raise LauncherError(f"SLURM_STEP_NODELIST is {nodes!r}, in which no first host can be found")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def flag_or_variable(flags: Flags, name: str) -> str:
    """What a flag of torchrun's says, or the environment variable that torchrun reads; else nothing."""
    return str(flags.get(name) or os.environ.get(f"PET_{name.upper()}", ""))


def parse_host_range(nnodes: str) -> tuple[int, int]:
    """The smallest and the largest number of hosts, of `N` or `MIN:MAX`; raises LauncherError."""
    least, colon, most = nnodes.partition(":")
    found = [int(part) for part in (least, most if colon else least) if part.isdecimal()]
    if len(found) < 2 or not 1 <= found[0] <= found[1]:
        raise LauncherError(f"--nnodes is {nnodes!r}; it must be a number of hosts, or MIN:MAX")
    return found[0], found[1]


def parse_rank_count(nproc_per_node: str) -> int | None:
    """The number of ranks per host; None: torchrun is to find it. Raises LauncherError."""
    if nproc_per_node in ("auto", "gpu", "cpu"):
        return None
    if not nproc_per_node.isdecimal() or int(nproc_per_node) < 1:
        raise LauncherError(
            f"--nproc-per-node is {nproc_per_node!r}; it must be at least 1, or auto, gpu or cpu"
        )
    return int(nproc_per_node)


def overrides_variable(overrides: Sequence[str]) -> dict[str, str]:
    """The environment variable that passes `--set` options on, not on command lines, which all may read."""
    return {_OVERRIDES_VARIABLE: json.dumps(list(overrides))}


def take_inherited_overrides() -> tuple[str, ...]:
    """The `--set` options that this process's launcher has passed on; what it starts will not see them."""
    return tuple(json.loads(os.environ.pop(_OVERRIDES_VARIABLE, "[]")))
