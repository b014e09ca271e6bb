"""Starting this host's ranks with torchelastic: what torchrun does, with torchrun's flags."""

import logging
import os
import shutil
import signal
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from ddprun import LAUNCHED, ON_USR1, QUEUE_AGAIN
from ddprun.checkpoint.folder import steps_in
from ddprun.config import Loaded
from ddprun.host.device import default_ranks, place_of
from ddprun.host.network import LOOPBACK, address_towards, choose_loopback, host_of, is_address, is_own
from ddprun.host.orphans import LAUNCHER
from ddprun.host.rank_files import SCRATCH, outcome, pids, prepare_outcome, run_dir_of
from ddprun.host.signals import handle
from ddprun.launch import endpoint
from ddprun.launch.agent import BAD_INPUT, Agent, ended_by_itself, make_agent, prepare
from ddprun.launch.agent import run as run_agent
from ddprun.launch.environment import handed_on
from ddprun.launch.scratch import scratch
from ddprun.run_files import Resuming, resume_command
from ddprun.screen import say
from ddprun.watchdog.launcher_watchdog import LauncherWatchdog

FAILED, SIGNALLED = 1, 128
INTERRUPTED = SIGNALLED + signal.SIGINT
_OTHERS_LOOK_S = 4.0
"""The store may end with this process; the other hosts' ranks still look there for who failed first."""

_SHUTDOWN_TIMEOUT_S = "10"


def launch(
    loaded: Loaded,
    flags: Mapping[str, str | bool],
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    resuming: Resuming,
) -> int:
    """Start this host's ranks, wait for them, give the exit code of the run.

    A rank's own error is on the screen when this returns: the rank that failed first printed it, the others
    kept silent. Only a rank that was killed cannot speak; then this says so.

    Raises:
        PipelineError: more ranks than GPUs with NCCL, CUDA without a GPU.
    """
    flags = {**_from_file(loaded, flags), **flags}
    if (ranks := str(flags.get("nproc_per_node", ""))).isdigit():
        place_of(loaded, 0, int(ranks))
    _prepare_environment()
    command = [
        "-m",
        "ddprun",
        *(["resume", str(run_dir)] if resuming == "yes" else ["run", str(loaded.path)]),
    ]
    if run_dir is not None and resuming != "yes":
        command += ["--run-dir", str(run_dir), *(["--or-resume"] if resuming == "if begun" else [])]
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch())  # torchelastic would leave its own behind
        except OSError as error:
            say(f"ddprun: cannot make a temporary folder: {error}")
            return FAILED
        flags["log_dir"] = str(folder)
        prepare_outcome(folder)
        os.environ[SCRATCH], os.environ[LAUNCHER] = str(folder), str(os.getpid())
        try:
            try:
                config, program, arguments = torchrun.config_from_args(torchrun_arguments(flags, command))
                assert isinstance(program, str)
                if told := endpoint.warning(config.rdzv_endpoint):
                    say(told)
                keeps = loaded.pipeline.checkpoint.keep > 0
                agent = make_agent(config, program, arguments, folder, keeps=keeps)
            except (DistError, RendezvousError):
                raise
            except (ValueError, RuntimeError, AssertionError) as error:  # torchrun's ways to refuse flags
                say(loaded.secrets.redact(f"ddprun: {error}"))
                return BAD_INPUT
            return _run(loaded, agent, config, folder, overrides)
        except (DistError, RendezvousError) as error:
            closed = isinstance(error, RendezvousClosedError)
            told = "the run has ended on another host" if closed else f"cannot meet the other hosts: {error}"
            say(loaded.secrets.redact(f"ddprun: {told} ({flags.get('rdzv_endpoint', '')})"))
            return FAILED
        except OSError as error:
            say(loaded.secrets.redact(f"ddprun: the ranks cannot be started: {error}"))
            return FAILED


def _run(loaded: Loaded, agent: Agent, config: LaunchConfig, folder: Path, overrides: Sequence[str]) -> int:
    several, elastic = config.max_nodes > 1, config.max_restarts > 0 or config.min_nodes < config.max_nodes
    _pass_signals_on(agent, folder, config)
    watchdog = LauncherWatchdog(
        folder,
        loaded.pipeline.launch.timeout_s,
        address_towards(config.rdzv_endpoint) if several else None,
        partial(_end_without_the_others, folder) if several else None,
        partial(endpoint.answers, config.rdzv_endpoint) if several and elastic else None,
    )
    try:
        with watchdog, handed_on(overrides):
            try:
                run_agent(agent)
            except ChildFailedError:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    handle(number, lambda number, _: os._exit(SIGNALLED + number))
                if several:
                    watchdog.linger(_OTHERS_LOOK_S)
                raise
    except ChildFailedError as error:
        return _exit_code(*error.get_first_failure(), watchdog.ended)
    except SignalException as caught:
        say(f"ddprun: stopped by {signal.Signals(caught.sigval).name}{_way_on(folder)}")
        return SIGNALLED + int(caught.sigval)
    code = outcome(folder)
    if code is None:
        say("ddprun: the ranks of this host ended before the run was over; the run has failed")
        return FAILED
    return QUEUE_AGAIN if code == INTERRUPTED and agent.stopping is signal.SIGUSR1 else code


def _from_file(loaded: Loaded, flags: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """What the file says where neither a flag nor torchrun's own environment variable does."""
    asked = loaded.pipeline.launch
    said: dict[str, str | bool] = {
        "nnodes": str(asked.nnodes),
        "max_restarts": str(asked.max_restarts),
        "nproc_per_node": str(asked.nproc_per_node or ""),
    }
    found = {name: value for name, value in said.items() if f"PET_{name.upper()}" not in os.environ}
    if found.get("nproc_per_node") == "" and "nproc_per_node" not in flags:
        found["nproc_per_node"] = str(default_ranks(loaded))
    return found


def _pass_signals_on(agent: Agent, scratch: Path, config: LaunchConfig) -> None:
    """SIGUSR1 goes to the ranks, and the first SIGINT, SIGTERM or SIGHUP: they take a checkpoint, and for the
    latter three stop after it, and for SIGUSR1 if `ON_USR1` says so. The second one, or one that comes before
    all ranks are there, ends them.

    Where hosts may leave, SIGTERM is this host's own: its ranks end after a checkpoint, and the others go on.
    """
    asked, alone = False, config.min_nodes == config.max_nodes

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal asked
        found, which = pids(scratch), signal.Signals(number)
        if asked or len(found) < config.nproc_per_node:
            agent.at_once = True
            raise SignalException(f"ended by {which.name}", which)
        asked = True
        if which is signal.SIGTERM and not alone:
            agent.leaving = which
            say(f"ddprun: {which.name}: this host leaves after a checkpoint; once more ends it at once")
            return
        agent.stopping = which
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGCONT)  # one that is stopped could not stop after its step
        say(f"ddprun: {which.name}: stops at the end of a step; once more ends it at once")

    def checkpoint(number: int, _: FrameType | None) -> None:
        found = pids(scratch)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if not found:
            say("ddprun: SIGUSR1: no checkpoint, since no rank is there yet")

    # Ranks end by themselves when they are asked to; torchelastic would end them.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handle(number, stop)
    signal.signal(signal.SIGUSR1, stop if os.environ.get(ON_USR1) == "stop" else checkpoint)


def torchrun_arguments(flags: Mapping[str, str | bool], command: Sequence[str]) -> object:
    """Torchrun's own reading of its flags, with what its `main` adds for a single host."""
    given: list[str] = []
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        given += [option] if value is True else [option, str(value)]
    arguments = torchrun.parse_args([*given, *command])  # type: ignore[no-untyped-call]
    one_host = torchrun.parse_min_max_nnodes(arguments.nnodes)[1] == 1
    if not (one_host or arguments.standalone):
        _check_meeting_point(arguments, flags)
    elastic = prepare(arguments)
    if arguments.standalone or (one_host and arguments.rdzv_backend in ("static", "c10d")):
        arguments.rdzv_backend = "c10d"
        arguments.rdzv_endpoint = "localhost:0"
        arguments.rdzv_id = str(uuid.uuid4())
        # The host's own name need not resolve (a container without a network, a laptop in a strange one).
        arguments.local_addr = arguments.local_addr or LOOPBACK
        choose_loopback()
    elif arguments.local_addr is None and (elastic or is_address(host_of(arguments.rdzv_endpoint))):
        # Where the ranks' own store may be; the host's own name need not be known to the others, but they
        # all know the one at which they meet. Left to itself torchelastic takes the host's name.
        meeting = host_of(arguments.rdzv_endpoint)
        here = meeting if is_own(meeting) else address_towards(meeting)
        arguments.local_addr = None if here == LOOPBACK else here
    if arguments.master_port is None:
        arguments.master_port = 29500
    return arguments


def _check_meeting_point(arguments: Any, flags: Mapping[str, str | bool]) -> None:
    """Torchrun takes a host without --node-rank for the first one: several such hosts would all listen, each
    for itself, and wait for the others in silence.

    Args:
        arguments: torchrun's own reading of its flags, for several hosts.
        flags: those that were given.

    Raises:
        ValueError: this host cannot tell where the others are, or which of them it is.
    """

    def given(name: str) -> bool:
        return name in flags or f"PET_{name.upper()}" in os.environ

    if arguments.rdzv_backend != "static" or given("node_rank"):
        return
    hosts, where = f"--nnodes {arguments.nnodes}", arguments.rdzv_endpoint or arguments.master_addr
    if not (given("rdzv_endpoint") or given("master_addr")):
        raise ValueError(
            f"{hosts} does not say where the hosts meet: add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, "
            "the same on every host, HOST being one of them"
        )
    if given("rdzv_endpoint") and not given("rdzv_backend"):
        raise ValueError(
            f"{hosts} --rdzv-endpoint {where} does not say which host this is: add --rdzv-backend c10d on "
            f"every host, or --node-rank 0 on {host_of(where)} and --node-rank 1 and so on elsewhere"
        )
    if not is_own(host_of(where)):
        raise ValueError(
            f"this host is not {host_of(where)}, where the hosts meet, so it needs a --node-rank of its own, "
            "from 1 on; --rdzv-backend c10d --rdzv-endpoint HOST:PORT needs none"
        )


def _prepare_environment() -> None:
    """What the ranks inherit, and how much torchelastic says about itself."""
    os.environ[LAUNCHED] = "1"
    # As `python -P`: nothing in the working directory shadows an installed package.
    os.environ["PYTHONSAFEPATH"] = "1"
    # As torchrun sets it, for one rank too: the same number of threads gives the same bits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S)
    quieten()


def quieten() -> None:
    """Let torchelastic's loggers say nothing: what matters is told in this program's words."""
    # Each of them sets a level of its own, so silencing their parent is not enough.
    for name in logging.root.manager.loggerDict:
        if name.startswith(
            ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _way_on(folder: Path) -> str:
    """How to go on with a run that was ended at once; nothing if it has no checkpoint."""
    found = run_dir_of(folder)
    if found is None or not steps_in(found / "checkpoints"):
        return ""
    return f"; go on: {resume_command(found)}"


def _end_without_the_others(folder: Path) -> None:
    """End this process from beside torchelastic, which is waiting for hosts that it cannot reach."""
    code = outcome(folder)
    if code is None:
        say("ddprun: cannot meet the other hosts: they cannot be reached; this is the end of the run here")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(FAILED if code is None else code)


def _exit_code(rank: int, failure: ProcessFailure, ended: Mapping[int, str]) -> int:
    if rank in ended:
        say(
            f"ddprun: rank {rank} was stopped in {ended[rank]} and did not go on, and has been ended; "
            "the run has failed"
        )
        return FAILED
    if told := ended_by_itself({rank: failure}):
        say(f"ddprun: {told}; the run has failed")
        return FAILED
    # A rank ends with 130 by itself when a rank of another host was interrupted.
    return failure.exitcode if failure.exitcode in (BAD_INPUT, INTERRUPTED) else FAILED
