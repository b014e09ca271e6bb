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
from ddprun.host import network, rank_files
from ddprun.host.device import default_ranks, place_of
from ddprun.host.processes import LAUNCHER, handle
from ddprun.launch.agent import BAD_INPUT, Agent, ended_by_itself, is_elastic, make_agent, prepare
from ddprun.launch.agent import run as run_agent
from ddprun.launch.launcher import flag_of, passing_on
from ddprun.run_files import Resuming, resume_command
from ddprun.screen import say
from ddprun.watchdog.launcher_watchdog import LauncherWatchdog

FAILED, SIGNALLED = 1, 128
INTERRUPTED = SIGNALLED + signal.SIGINT
_OTHERS_ASK_S = 4.0
"""The store may end with this process; the other hosts' ranks still ask it who failed first."""

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
    if resuming == "yes":
        command = ["resume", str(run_dir)]
    else:
        command = ["run", str(loaded.path), *(["--run-dir", str(run_dir)] if run_dir is not None else [])]
        command += ["--or-resume"] if resuming == "if begun" else []
    with ExitStack() as stack:
        try:  # torchelastic would leave its own folder behind
            folder = stack.enter_context(rank_files.launcher_folder())
        except OSError as error:
            say(f"ddprun: cannot make a temporary folder: {error}")
            return FAILED
        flags["log_dir"] = str(folder)
        os.environ[rank_files.SCRATCH], os.environ[LAUNCHER] = str(folder), str(os.getpid())
        try:
            try:
                read = torchrun_arguments(flags, ["-m", "ddprun", *command])
                config, program, arguments = torchrun.config_from_args(read)
                assert isinstance(program, str)
                if warning := network.public_warning(config.rdzv_endpoint):
                    say(warning)
                keeps = loaded.pipeline.checkpoint.keep > 0
                agent = make_agent(config, program, arguments, folder, keeps=keeps)
            except (DistError, RendezvousError):
                raise
            except (ValueError, RuntimeError, AssertionError) as error:  # torchrun's ways to refuse flags
                say(loaded.secrets.redact(f"ddprun: {error}"))
                return BAD_INPUT
            return _run(loaded, agent, config, folder, overrides)
        except RendezvousClosedError:
            say("ddprun: the run has ended on another host")
        except (DistError, RendezvousError) as error:
            where = flag_of(flags, "rdzv_endpoint") or flag_of(flags, "master_addr")
            say(loaded.secrets.redact(f"ddprun: cannot reach the other hosts at {where}: {error}"))
        except OSError as error:
            say(loaded.secrets.redact(f"ddprun: cannot start the ranks: {error}"))
        return FAILED


def _run(loaded: Loaded, agent: Agent, config: LaunchConfig, folder: Path, overrides: Sequence[str]) -> int:
    several = config.max_nodes > 1
    _pass_signals_on(agent, folder, config)
    watchdog = LauncherWatchdog(
        folder,
        loaded.pipeline.launch.timeout_s,
        network.address_towards(config.rdzv_endpoint) if several else None,
        partial(_end_without_the_others, folder) if several else None,
        partial(network.answers, config.rdzv_endpoint) if several and is_elastic(config) else None,
    )
    try:
        with watchdog, passing_on(overrides):
            try:
                run_agent(agent)
            except ChildFailedError:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    handle(number, lambda number, _: os._exit(SIGNALLED + number))
                if several:
                    watchdog.linger(_OTHERS_ASK_S)
                raise
    except ChildFailedError as error:
        return _exit_code(*error.get_first_failure(), watchdog.ended)
    except SignalException as caught:
        found = rank_files.run_dir(folder)
        hint = ""
        if found is not None and steps_in(found / "checkpoints"):
            hint = f"; to resume: {resume_command(found)}"
        say(f"ddprun: stopped by {signal.Signals(caught.sigval).name}{hint}")
        return SIGNALLED + int(caught.sigval)
    code = rank_files.outcome(folder)
    if code is None:
        say("ddprun: the ranks of this host ended before the run was over; the run has failed")
        return FAILED
    return QUEUE_AGAIN if code == INTERRUPTED and agent.stopping is signal.SIGUSR1 else code


def _from_file(loaded: Loaded, flags: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """What the file says where neither a flag nor torchrun's own environment variable does."""
    settings = loaded.pipeline.launch
    found = {"nnodes": settings.nnodes, "max_restarts": settings.max_restarts}
    if not flag_of(flags, "nproc_per_node"):
        found["nproc_per_node"] = settings.nproc_per_node or default_ranks(loaded)
    return {name: str(value) for name, value in found.items() if not flag_of(flags, name)}


def _pass_signals_on(agent: Agent, scratch: Path, config: LaunchConfig) -> None:
    """SIGUSR1 goes to the ranks, and the first SIGINT, SIGTERM or SIGHUP: they take a checkpoint, and for the
    latter three stop after it, and for SIGUSR1 if `ON_USR1` says so. The second one, or one that comes before
    all ranks are there, ends them.

    Where hosts may leave, SIGTERM is this host's own: its ranks end after a checkpoint, the others continue.
    """
    asked, alone = False, config.min_nodes == config.max_nodes

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal asked
        found, which = rank_files.pids(scratch), signal.Signals(number)
        if asked or len(found) < config.nproc_per_node:
            agent.at_once = True
            raise SignalException(f"ended by {which.name}", which)
        asked = True
        if which is signal.SIGTERM and not alone:
            agent.leaving = which
            say(f"ddprun: {which.name}: this host leaves after a checkpoint; a second signal ends it at once")
            return
        agent.stopping = which
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGCONT)  # one that is stopped could not stop after its step
        say(f"ddprun: {which.name}: stopping at the end of the step; a second signal ends it at once")

    def checkpoint(number: int, _: FrameType | None) -> None:
        found = rank_files.pids(scratch)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if not found:
            say("ddprun: SIGUSR1: no checkpoint: no rank has started yet")

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
        _check_rendezvous(arguments, flags)
    elastic = prepare(arguments)
    if arguments.standalone or (one_host and arguments.rdzv_backend in ("static", "c10d")):
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
        here = rendezvous if network.is_own(rendezvous) else network.address_towards(rendezvous)
        arguments.local_addr = None if here == network.LOOPBACK else here
    if arguments.master_port is None:
        arguments.master_port = 29500
    return arguments


def _check_rendezvous(arguments: Any, flags: Mapping[str, str | bool]) -> None:
    """Refuse flags for several hosts that do not say where the others are, or which of them this host is.

    Torchrun takes a host without --node-rank for the first one: several such hosts would all listen, each for
    itself, and wait for the others in silence.

    Raises:
        ValueError: which flag is missing.
    """

    def given(name: str) -> bool:
        return name in flags or f"PET_{name.upper()}" in os.environ

    if arguments.rdzv_backend != "static" or given("node_rank"):
        return
    hosts, where = f"--nnodes {arguments.nnodes}", arguments.rdzv_endpoint or arguments.master_addr
    host = network.host_of(where)
    if not (given("rdzv_endpoint") or given("master_addr")):
        raise ValueError(
            f"{hosts} needs a rendezvous: add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on "
            "every host, HOST being one of them"
        )
    if given("rdzv_endpoint") and not given("rdzv_backend"):
        raise ValueError(
            f"{hosts} --rdzv-endpoint {where} does not say which host this is: add --rdzv-backend c10d on "
            f"every host, or --node-rank 0 on {host} and --node-rank 1 and so on elsewhere"
        )
    if not network.is_own(host):
        raise ValueError(
            f"this host is not {host}, where the rendezvous is, so it needs a --node-rank of its "
            "own, from 1 on; --rdzv-backend c10d --rdzv-endpoint HOST:PORT needs none"
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
    """Silence torchelastic's loggers: this program reports what matters."""
    # Each of them sets a level of its own, so silencing their parent is not enough.
    for name in logging.root.manager.loggerDict:
        if name.startswith(
            ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _end_without_the_others(folder: Path) -> None:
    """End this process, while torchelastic waits for hosts that it cannot reach."""
    code = rank_files.outcome(folder)
    if code is None:
        say("ddprun: cannot reach the other hosts; the run ends on this host")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(FAILED if code is None else code)


def _exit_code(rank: int, failure: ProcessFailure, ended: Mapping[int, str]) -> int:
    if rank in ended:
        say(
            f"ddprun: rank {rank} was stopped in {ended[rank]}, did not continue and was killed; "
            "the run has failed"
        )
        return FAILED
    if cause := ended_by_itself({rank: failure}):
        say(f"ddprun: {cause}; the run has failed")
        return FAILED
    # A rank ends with 130 by itself when a rank of another host was interrupted.
    return failure.exitcode if failure.exitcode in (BAD_INPUT, INTERRUPTED) else FAILED
