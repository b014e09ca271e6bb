"""Torchrun's flags: what the file and the environment add to them, and the rendezvous that they name."""

import logging
import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from ddprun.config import LoadedPipeline
from ddprun.host import network
from ddprun.host.device import default_rank_count
from ddprun.launch.launcher import Flags, flag_or_variable, parse_host_range, parse_rank_count
from ddprun.standard_streams import say

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds from END_RANK_SIGNAL to SIGKILL
# For runs whose ranks may be started again: seconds for which hosts wait for more of them once there are
# enough; between two signs of life; how many of these may be missing; seconds until the store has to answer.
# With torchelastic's own 30, 5, 3 and 60 the others resume 45 s after a host is lost.
_RESTART_RDZV_CONF = {
    "last_call_timeout": "3",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "read_timeout": "15",
}


def flags_from_file(loaded: LoadedPipeline, flags: Flags) -> dict[str, str | bool]:
    """What the file says where neither a flag nor torchrun's own environment variable does."""
    settings = loaded.pipeline.launch
    found = {"nnodes": settings.nnodes, "max_restarts": settings.max_restarts}
    if not flag_or_variable(flags, "nproc_per_node"):
        found["nproc_per_node"] = settings.nproc_per_node or default_rank_count(loaded)
    return {name: str(value) for name, value in found.items() if not flag_or_variable(flags, name)}


def parse_torchrun_flags(flags: Flags, command: Sequence[str]) -> object:
    """Torchrun's own reading of its flags, with what its `main` adds for a single host.

    Raises ValueError or LauncherError for flags, or a variable, that cannot be used.
    """
    if not (shutdown_s := os.environ.get(SHUTDOWN_VARIABLE, "0")).isdecimal():
        raise ValueError(f"{SHUTDOWN_VARIABLE} is {shutdown_s!r}; it must be a whole number of seconds")
    given: list[str] = []
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        given += [option] if value is True else [option, str(value)]
    arguments = torchrun.parse_args([*given, *command])  # type: ignore[no-untyped-call]
    least, most = parse_host_range(arguments.nnodes)
    parse_rank_count(arguments.nproc_per_node)
    if arguments.standalone:
        if least > 1:
            raise ValueError(
                f"--standalone starts a run on this host alone, but nnodes is {arguments.nnodes}: "
                "add --nnodes 1, or leave --standalone out"
            )
        arguments.nnodes, most = "1", 1
    if most > 1:
        _choose_rendezvous(arguments, flags, most)
    elastic = _prepare_restarts(arguments, least, most)
    if arguments.standalone or (most == 1 and arguments.rdzv_backend in ("static", "c10d")):
        arguments.rdzv_backend = "c10d"
        arguments.rdzv_endpoint = "localhost:0"
        arguments.rdzv_id = str(uuid.uuid4())
        # The host's own name need not resolve (a container without a network, a laptop in a strange one).
        arguments.local_addr = arguments.local_addr or network.LOOPBACK
        network.choose_loopback()
    elif arguments.local_addr is None and (
        elastic or network.is_address(network.host_of(arguments.rdzv_endpoint))
    ):
        # Where the ranks' own store may be; the host's own name need not be known to the others, but they
        # all know that of the rendezvous. Left to itself torchelastic takes the host's name.
        rendezvous = network.host_of(arguments.rdzv_endpoint)
        here = rendezvous if network.is_this_host(rendezvous) else network.address_towards(rendezvous)
        arguments.local_addr = None if here == network.LOOPBACK else here
    if arguments.master_port is None:
        arguments.master_port = 29500
    return arguments


def _choose_rendezvous(arguments: Any, flags: Flags, most: int) -> None:
    """For several hosts, take c10d where an endpoint is given, unless a backend or this host's number is.

    Torchrun takes a host without --node-rank for the first one: several such hosts would all listen, each for
    itself, and wait for the others in silence. Raises ValueError that names the missing or wrong flag.
    """
    given = partial(flag_or_variable, flags)
    hosts, static = f"--nnodes {arguments.nnodes}", arguments.rdzv_backend == "static"
    if static and given("node_rank"):
        if arguments.node_rank >= most:
            raise ValueError(f"--node-rank is {arguments.node_rank}, and --nnodes {most}; hosts count from 0")
    elif static and given("rdzv_endpoint") and not given("rdzv_backend"):
        arguments.rdzv_backend = "c10d"
    elif static and (given("rdzv_endpoint") or given("master_addr")):
        raise ValueError(
            f"{hosts} with the static rendezvous does not say which host this is: add --node-rank 0 on the "
            "first host, --node-rank 1 on the next, and so on; or give --rdzv-endpoint HOST:PORT instead"
        )
    elif not given("rdzv_endpoint"):
        raise ValueError(
            f"{hosts} needs a rendezvous: add --rdzv-endpoint HOST:PORT, the same on every host, HOST being "
            "one of them"
        )


def _prepare_restarts(arguments: Any, least: int, most: int) -> bool:
    """Set what torchelastic needs to restart ranks; whether that may come. Raises ValueError if it cannot."""
    if most > 1 and arguments.max_restarts and arguments.rdzv_backend == "static":
        raise ValueError(
            "the static rendezvous cannot restart the ranks of several hosts: "
            "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or leave --max-restarts out"
        )
    if least < most and not arguments.max_restarts:
        say(f"warning: --nnodes {arguments.nnodes} without --max-restarts: a host that is lost ends the run")
    if not arguments.max_restarts and least == most:
        return False
    # In a store that outlives ranks, the next ones find old addresses: most restarts fail (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return True


def may_restart(config: LaunchConfig) -> bool:
    """Whether ranks may be started again."""
    return config.max_restarts > 0 or config.min_nodes < config.max_nodes


def rendezvous_parameters(config: LaunchConfig, **overrides: Any) -> RendezvousParameters:
    """As torch.distributed.launcher.api.launch_agent has them, with other values of `--rdzv-conf`."""
    defaults = _RESTART_RDZV_CONF if may_restart(config) and config.rdzv_backend != "static" else {}
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{**defaults, **config.rdzv_configs, **overrides},
    )


def silence_torchelastic() -> None:
    """Silence torchelastic's loggers: this program reports what matters."""
    # Each of them sets a level of its own, so silencing their parent is not enough.
    packages = ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
    for name in logging.root.manager.loggerDict:
        if name.startswith(packages):
            logging.getLogger(name).setLevel(logging.CRITICAL)
