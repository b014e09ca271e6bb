"""Starting this host's ranks with torchelastic: what torchrun does, with torchrun's flags."""

import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from ddprun import LAUNCHED, ON_USR1, QUEUE_AGAIN
from ddprun.engine.network import LOOPBACK, address_towards, host_of, is_own
from ddprun.engine.notes import SCRATCH, outcome, pids
from ddprun.engine.place import default_ranks, place_of
from ddprun.engine.run_folder import Resuming
from ddprun.launch import endpoint
from ddprun.launch.agent import BAD_INPUT, Agent, killed, make_agent, prepare
from ddprun.launch.agent import run as run_agent
from ddprun.launch.environment import handed_on
from ddprun.launch.scratch import scratch
from ddprun.orphans import LAUNCHER
from ddprun.spec import Loaded
from ddprun.watch.keeper import Keeper

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
            _say(f"cannot make a temporary folder: {error}")
            return FAILED
        flags["log_dir"] = str(folder)
        os.environ[SCRATCH], os.environ[LAUNCHER] = str(folder), str(os.getpid())
        try:
            try:
                config, program, arguments = torchrun.config_from_args(torchrun_arguments(flags, command))
                assert isinstance(program, str)
                if told := endpoint.warning(config.rdzv_endpoint):
                    print(told, file=sys.stderr, flush=True)
                keeps = loaded.pipeline.checkpoint.keep > 0
                agent = make_agent(config, program, arguments, folder, keeps=keeps)
            except (DistError, RendezvousError):
                raise
            except (ValueError, RuntimeError, AssertionError) as error:  # torchrun's ways to refuse flags
                _say(loaded.secrets.redact(str(error)))
                return BAD_INPUT
            return _run(loaded, agent, config, folder, overrides)
        except (DistError, RendezvousError) as error:
            closed = isinstance(error, RendezvousClosedError)
            told = "the run has ended on another host" if closed else f"cannot meet the other hosts: {error}"
            _say(loaded.secrets.redact(f"{told} ({flags.get('rdzv_endpoint', '')})"))
            return FAILED
        except OSError as error:
            _say(loaded.secrets.redact(f"the ranks cannot be started: {error}"))
            return FAILED


def _run(loaded: Loaded, agent: Agent, config: LaunchConfig, folder: Path, overrides: Sequence[str]) -> int:
    several, elastic = config.max_nodes > 1, config.max_restarts > 0 or config.min_nodes < config.max_nodes
    _pass_signals_on(agent, folder, config)
    keeper = Keeper(
        folder,
        loaded.pipeline.launch.timeout_s,
        address_towards(config.rdzv_endpoint) if several else None,
        partial(_end_without_the_others, folder) if several else None,
        partial(endpoint.answers, config.rdzv_endpoint) if elastic else None,
    )
    try:
        with keeper, handed_on(overrides):
            try:
                run_agent(agent)
            except ChildFailedError:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, lambda number, _: os._exit(SIGNALLED + number))
                if several:
                    keeper.linger(_OTHERS_LOOK_S)
                raise
    except ChildFailedError as error:
        return _exit_code(*error.get_first_failure(), keeper.ended)
    except SignalException as caught:
        print(f"ddprun: stopped by {signal.Signals(caught.sigval).name}", file=sys.stderr)
        return SIGNALLED + int(caught.sigval)
    code = outcome(folder) or 0
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
            raise SignalException(f"ended by {which.name}", which)
        asked = True
        if which is signal.SIGTERM and not alone:
            _say(f"{which.name}: this host leaves after a checkpoint; once more ends it at once")
            agent.leaving = which
            return
        agent.stopping = which
        _say(f"{which.name}: stops at the end of a step; once more ends it at once")
        for pid in found:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGCONT)  # one that is stopped could not stop after its step

    def checkpoint(number: int, _: FrameType | None) -> None:
        found = pids(scratch)
        if not found:
            _say("SIGUSR1: no checkpoint, since no rank is there yet")
        for pid in found:
            os.kill(pid, number)

    # Ranks end by themselves when they are asked to; torchelastic would end them.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, stop if os.environ.get(ON_USR1) == "stop" else checkpoint)


def torchrun_arguments(flags: Mapping[str, str | bool], command: Sequence[str]) -> object:
    """Torchrun's own reading of its flags, with what its `main` adds for a single host."""
    given: list[str] = []
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        given += [option] if value is True else [option, str(value)]
    arguments = torchrun.parse_args([*given, *command])  # type: ignore[no-untyped-call]
    elastic = prepare(arguments)
    one_host = torchrun.parse_min_max_nnodes(arguments.nnodes)[1] == 1
    meeting_point = arguments.rdzv_endpoint or arguments.master_port is not None
    if arguments.standalone or (one_host and arguments.rdzv_backend == "static" and not meeting_point):
        arguments.rdzv_backend = "c10d"
        arguments.rdzv_endpoint = "localhost:0"
        arguments.rdzv_id = str(uuid.uuid4())
        # The host's own name need not resolve (a container without a network, a laptop in a strange one).
        arguments.local_addr = arguments.local_addr or LOOPBACK
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif elastic and arguments.local_addr is None:
        # Where the ranks' own store may be; the host's own name need not be known to the others, but they
        # all know the one at which they meet.
        meeting = host_of(arguments.rdzv_endpoint)
        here = meeting if is_own(meeting) else address_towards(meeting)
        arguments.local_addr = None if here == LOOPBACK else here
    if arguments.master_port is None:
        arguments.master_port = 29500
    return arguments


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


def _say(text: str) -> None:
    print(f"ddprun: {text}", file=sys.stderr, flush=True)


def _end_without_the_others(folder: Path) -> None:
    """End this process from beside torchelastic, which is waiting for hosts that it cannot reach."""
    code = outcome(folder)
    if code is None:
        _say("cannot meet the other hosts: they cannot be reached; this is the end of the run here")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(FAILED if code is None else code)


def _exit_code(rank: int, failure: ProcessFailure, ended: Mapping[int, str]) -> int:
    if rank in ended:
        _say(
            f"rank {rank} was stopped in {ended[rank]} and did not go on, and has been ended; "
            "the run has failed"
        )
        return FAILED
    if told := killed({rank: failure}):
        _say(f"{told}; the run has failed")
        return FAILED
    # A rank ends with 130 by itself when a rank of another host was interrupted.
    return failure.exitcode if failure.exitcode in (BAD_INPUT, INTERRUPTED) else FAILED
