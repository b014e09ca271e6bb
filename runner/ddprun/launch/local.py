"""Starting this host's ranks with torchelastic: what torchrun does, with torchrun's flags.

`Agent` is torchelastic's own, that says what it does and loses no steps where it need not.
"""

import inspect
import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from ddprun import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_REPEATED,
    EXIT_REQUEUE,
    LAUNCHED_VARIABLE,
    ON_USR1_VARIABLE,
)
from ddprun.checkpoint.folder import steps_in
from ddprun.config import LoadedPipeline
from ddprun.host import network, rank_files
from ddprun.host.code_folders import ForeignFolderError, own_code_folders
from ddprun.host.device import check_launch, default_rank_count
from ddprun.host.processes import (
    LAUNCHER_PID_VARIABLE,
    SIGNAL_EXIT_BASE,
    end_leftovers,
    exit_at_signals,
    file_limit_hint,
    in_background,
    set_signal_handler,
)
from ddprun.launch.launcher import export_overrides, flag_or_variable
from ddprun.launch.rendezvous import make_handler
from ddprun.run_files import ResumeMode, resume_command
from ddprun.standard_streams import print_stderr
from ddprun.watchdog.launcher_watchdog import LauncherWatchdog, connecting_ranks
from ddprun_hooks.errors import format_ranks

_STORE_LINGER_S = 4.0
"""The store may end with this process; the other hosts' ranks still ask it who failed first."""

_SHUTDOWN_TIMEOUT_S = "10"
_CHECKPOINT_S = 30.0
"""Longest wait for a checkpoint before ranks are ended that have not failed."""

_EXIT_BARRIER_S = 30.0
"""Hosts wait so long for each other at the end, which all ranks reach at about the same time."""

_NO_DETAILS = " See inner exception for details."
"""Torchelastic's end of some messages, which is not shown: nor is the exception."""

_FORCED_KILL_S = 1
"""From SIGTERM to SIGKILL where somebody has asked twice."""

_TICK_S = 0.05

_ASK_EVERY_S = 1.0
_CONNECTING_S = 5.0
"""For so long ranks may wait to be connected, after the run has ended on another host."""

CheckpointResult = Literal["new", "old", "none", "failing"]
"""Whether a checkpoint was taken: it was; it could not be, in time; none ever is; ranks fail, too."""

_RESTART_MESSAGES: dict[CheckpointResult, str] = {
    "new": "another host has joined: restarting from a new checkpoint",
    "old": "another host has joined: restarting; no new checkpoint could be taken",
    "none": "another host has joined: restarting from the beginning",
    "failing": "restarting, as the other hosts do",
}

_ELASTIC_CONF = {
    "last_call_timeout": "3",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "read_timeout": "15",
}
"""For runs whose ranks may be started again: seconds for which hosts wait for more of them once there are
enough; between two signs of life; how many of these may be missing; seconds until the store has to answer.
With torchelastic's own 30, 5, 3 and 60 the others resume 45 s after a host is lost."""


class Agent(LocalElasticAgent):
    """Starts this host's ranks, and again after a failure, or when hosts have come or gone.

    Ranks of the pipeline `loaded` leave notes in `scratch`, this launcher's folder.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, scratch: Path, loaded: LoadedPipeline) -> None:
        assert config.logs_specs is not None
        timeouts: dict[str, Any] = {"exit_barrier_timeout": _EXIT_BARRIER_S}
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:  # older torch has none
            timeouts["shutdown_timeout"] = config.shutdown_timeout
        super().__init__(spec, config.logs_specs, **timeouts)
        self._close_s = int(timeouts.get("shutdown_timeout", _SHUTDOWN_TIMEOUT_S))
        self._scratch, self._loaded, self._min_nodes = scratch, loaded, config.min_nodes
        self._failures = 0
        self._next_question_at = 0.0  # whether the run has ended on another host
        self._ended_elsewhere_at: float | None = None
        self.kill_at_once = False
        """Set by a signal handler: ranks that do not end when asked to are killed."""

        self.leaving_signal: signal.Signals | None = None
        """Set by a signal handler: this host leaves the run, after a checkpoint."""

        self.stop_signal: signal.Signals | None = None
        """Set by a signal handler: ranks were asked to stop, and so are not started again if they fail."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other hosts.

        Raises:
            RendezvousError: hosts whose clocks are far apart consider each other lost, and torchelastic would
                continue with too few.
        """
        in_background(partial(super()._rendezvous, worker_group)).result()
        present = worker_group.group_world_size or 0
        if present < self._min_nodes:
            raise RendezvousError(
                f"{present} of at least {self._min_nodes} hosts; the others were considered lost, as when "
                "clocks are seconds apart: `ddprun doctor` compares them"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks. What starting them again would not change is the end of the run."""
        if self.leaving_signal is not None:
            self._take_checkpoint()
            raise SignalException(f"left by {self.leaving_signal.name}", self.leaving_signal)
        result: RunResult = super()._monitor_workers(worker_group)
        going_well = result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED)
        if going_well and (early := self._ended_early(worker_group)):
            result = RunResult(state=WorkerState.FAILED, failures=early)
        if result.state == WorkerState.HEALTHY:
            self._check_other_hosts(worker_group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        if rank_files.read_outcome(self._scratch) is not None:  # a rank went down after the run had ended
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        if self.stop_signal is not None:
            raise SignalException(f"ended by {self.stop_signal.name}", self.stop_signal)
        failures: dict[int, ProcessFailure] = result.failures
        codes = {failure.exitcode for failure in failures.values()}
        if EXIT_REPEATED in codes:
            print_stderr(
                "ddprun: not starting the ranks again: they have failed alike before, at the same step, "
                "and no checkpoint has come since"
            )
        if codes & {EXIT_BAD_INPUT, EXIT_REPEATED}:
            raise ChildFailedError("ddprun", failures)
        self._failures += 1
        if self._failures <= (most := worker_group.spec.max_restarts):
            cause = f"{found}; " if (found := _unexplained_exits(failures)) else ""
            print_stderr(f"ddprun: {cause}starting the ranks again (restart {self._failures} of {most})")
        return result

    def _check_other_hosts(self, worker_group: WorkerGroup) -> None:
        """End ranks that wait to be connected to those of a host on which the run has ended. One that was
        killed there could not tell them.

        Raises:
            RendezvousClosedError: there are such ranks.
        """
        hosts, now = worker_group.group_world_size or 1, time.monotonic()
        if hosts == 1 or now < self._next_question_at:
            return
        self._next_question_at = now + _ASK_EVERY_S
        if not (connecting_ranks(self._scratch) and worker_group.spec.rdzv_handler.is_closed()):
            self._ended_elsewhere_at = None
            return
        self._ended_elsewhere_at = self._ended_elsewhere_at or now
        if now - self._ended_elsewhere_at > _CONNECTING_S:
            raise RendezvousClosedError

    def _ended_early(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Ranks that have ended with exit code 0 although the run is not over: to torchelastic a success."""

        def ended_with_0(pid: int) -> bool:
            try:  # torchelastic has asked before, and found no other exit code
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            return found is not None and found.si_code == os.CLD_EXITED and found.si_status == 0

        ended = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, 0, "")
            for worker in worker_group.workers
            if worker.id is not None and ended_with_0(worker.id)
        }
        # Asked in this order: a rank leaves the outcome before it ends.
        return ended if ended and rank_files.read_outcome(self._scratch) is None else {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks. When one fails, torchelastic would give the others 30 s, whatever is set."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        close = self._pcontext.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
            # Torch 2.11 hands no timeout on, and newer torch 30 s where a rank fails.
            close(death_sig or signal.SIGTERM, _FORCED_KILL_S if self.kill_at_once else self._close_s)
            end_leftovers(started.values(), self._loaded.secrets.redact)

        setattr(self._pcontext, "close", close_in_time)  # noqa: B010 (a method, to mypy)
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # here; but hosts have come, or ranks of others failed
            print_stderr(f"ddprun: {_RESTART_MESSAGES[self._take_checkpoint()]}")
        super()._restart_workers(worker_group)

    def _take_checkpoint(self) -> CheckpointResult:
        """Have the ranks take a checkpoint, and wait for it unless they fail."""
        if not self._loaded.pipeline.checkpoint.keep:
            return "none"
        since, pids = time.monotonic_ns(), rank_files.signal_ranks(self._scratch, signal.SIGUSR1)
        while time.monotonic_ns() - since < _CHECKPOINT_S * 1e9:
            enqueued_ns, written = rank_files.read_checkpoint_report(self._scratch)
            if enqueued_ns > since:
                return "new" if written else "old"
            if len(rank_files.live_rank_pids(self._scratch)) < max(len(pids), 1):
                return "failing"
            time.sleep(_TICK_S)
        return "old"


def launch(
    loaded: LoadedPipeline,
    flags: Mapping[str, str | bool],
    overrides: Sequence[str],
    run_dir: Path | None,
    *,
    resuming: ResumeMode,
) -> int:
    """Start this host's ranks, wait for them, give the exit code of the run.

    A rank's own error is on the screen when this returns: the rank that failed first printed it, the others
    kept silent. Only a rank that was killed cannot speak; then this says so.

    Raises:
        PipelineError: more ranks than GPUs with NCCL, CUDA without a GPU.
    """
    flags = {**_flags_from_file(loaded, flags), **flags}
    if (ranks := str(flags.get("nproc_per_node", ""))).isdecimal():
        check_launch(loaded, int(ranks))
    _prepare_environment()
    if resuming == "yes":
        command = ["resume", str(run_dir)]
    else:
        command = ["run", str(loaded.path), *(["--run-dir", str(run_dir)] if run_dir is not None else [])]
        command += ["--or-resume"] if resuming == "if begun" else []
    with ExitStack() as stack:
        try:  # torchelastic would leave its own folder behind
            folder = stack.enter_context(rank_files.launcher_folder())
            stack.enter_context(own_code_folders(folder))
        except ForeignFolderError as error:
            print_stderr(f"ddprun: {error}")
            return EXIT_BAD_INPUT
        except OSError as error:
            print_stderr(f"ddprun: cannot make a temporary folder: {error}{file_limit_hint(error)}")
            return EXIT_FAILURE
        flags["log_dir"] = str(folder)
        os.environ[rank_files.SCRATCH_VARIABLE] = str(folder)
        os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
        try:
            try:
                read = torchrun_arguments(flags, ["-m", "ddprun", *command])
                config, program, arguments = torchrun.config_from_args(read)
                assert isinstance(program, str)
                if warning := network.public_warning(config.rdzv_endpoint):
                    print_stderr(warning)
                agent = _make_agent(config, program, arguments, folder, loaded)
            except (DistError, RendezvousError):
                raise
            except (ValueError, RuntimeError, AssertionError) as error:  # torchrun's ways to refuse flags
                print_stderr(loaded.secrets.redact(f"ddprun: {error}"))
                return EXIT_BAD_INPUT
            return _run_with_watchdog(loaded, agent, config, folder, overrides)
        except RendezvousClosedError:
            print_stderr("ddprun: the run has ended on another host")
        except (DistError, RendezvousError) as error:
            where = flag_or_variable(flags, "rdzv_endpoint") or flag_or_variable(flags, "master_addr")
            why = str(error).removesuffix(_NO_DETAILS)
            print_stderr(loaded.secrets.redact(f"ddprun: cannot reach the other hosts at {where}: {why}"))
        except OSError as error:
            hint = file_limit_hint(error)
            print_stderr(loaded.secrets.redact(f"ddprun: cannot start the ranks: {error}{hint}"))
        return EXIT_FAILURE


def _run_with_watchdog(
    loaded: LoadedPipeline, agent: Agent, config: LaunchConfig, folder: Path, overrides: Sequence[str]
) -> int:
    multi_host = config.max_nodes > 1
    _forward_signals(agent, folder, config)
    watchdog = LauncherWatchdog(
        folder,
        loaded.pipeline.launch.timeout_s,
        network.address_towards(config.rdzv_endpoint) if multi_host else None,
        partial(_exit_without_other_hosts, folder) if multi_host else None,
        partial(network.endpoint_answers, config.rdzv_endpoint)
        if multi_host and _is_elastic(config)
        else None,
    )
    try:
        with watchdog, export_overrides(overrides):
            try:
                _run_agent(agent, elastic=_is_elastic(config))
            except ChildFailedError:
                exit_at_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if multi_host:
                    watchdog.linger(_STORE_LINGER_S)
                raise
    except ChildFailedError as error:
        return _exit_code(*error.get_first_failure(), watchdog.killed_ranks)
    except SignalException as caught:
        if rank_files.read_outcome(folder) is None:  # else only what ranks do after the run was cut short
            found = rank_files.read_run_dir(folder)
            hint = ""
            if found is not None and steps_in(found / "checkpoints"):
                hint = f"; to resume: {resume_command(found)}"
            print_stderr(f"ddprun: stopped by {signal.Signals(caught.sigval).name}{hint}")
            return SIGNAL_EXIT_BASE + int(caught.sigval)
    code = rank_files.read_outcome(folder)
    if code is None:
        print_stderr("ddprun: the ranks of this host ended before the run was over; the run has failed")
        return EXIT_FAILURE
    return EXIT_REQUEUE if code == EXIT_INTERRUPTED and agent.stop_signal is signal.SIGUSR1 else code


def _flags_from_file(loaded: LoadedPipeline, flags: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """What the file says where neither a flag nor torchrun's own environment variable does."""
    settings = loaded.pipeline.launch
    found = {"nnodes": settings.nnodes, "max_restarts": settings.max_restarts}
    if not flag_or_variable(flags, "nproc_per_node"):
        found["nproc_per_node"] = settings.nproc_per_node or default_rank_count(loaded)
    return {name: str(value) for name, value in found.items() if not flag_or_variable(flags, name)}


def _forward_signals(agent: Agent, scratch: Path, config: LaunchConfig) -> None:
    """SIGUSR1 goes to the ranks, and the first SIGINT, SIGTERM or SIGHUP: they take a checkpoint, and for the
    latter three stop after it, and for SIGUSR1 if `ON_USR1_VARIABLE` says so. The second one, or one that
    comes before all ranks are there or after the run is over, ends them.

    Where hosts may leave, SIGTERM is this host's own: its ranks end after a checkpoint, the others continue.
    """

    def stop(number: int, _: FrameType | None) -> None:
        which, asked = signal.Signals(number), agent.leaving_signal or agent.stop_signal
        is_over = rank_files.read_outcome(scratch) is not None
        if asked or is_over or len(rank_files.live_rank_pids(scratch)) < config.nproc_per_node:
            agent.kill_at_once = True
            raise SignalException(f"ended by {which.name}", which)
        if which is signal.SIGTERM and config.min_nodes < config.max_nodes:
            agent.leaving_signal = which
            print_stderr(
                f"ddprun: {which.name}: this host leaves after a checkpoint; a second signal ends it at once"
            )
            return
        agent.stop_signal = which
        # One that is stopped could not stop after its step.
        rank_files.signal_ranks(scratch, signal.SIGINT, signal.SIGCONT)
        print_stderr(
            f"ddprun: {which.name}: stopping at the end of the step; a second signal ends it at once"
        )

    def checkpoint(number: int, _: FrameType | None) -> None:
        if not rank_files.signal_ranks(scratch, number):
            print_stderr("ddprun: SIGUSR1: no checkpoint: no rank has started yet")

    # Ranks end by themselves when they are asked to; torchelastic would end them.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        set_signal_handler(number, stop)
    signal.signal(signal.SIGUSR1, stop if os.environ.get(ON_USR1_VARIABLE) == "stop" else checkpoint)


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
    elastic = _prepare_restarts(arguments)
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
        here = rendezvous if network.is_this_host(rendezvous) else network.address_towards(rendezvous)
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
    given = partial(flag_or_variable, flags)
    hosts, where = f"--nnodes {arguments.nnodes}", arguments.rdzv_endpoint or arguments.master_addr
    host, static = network.host_of(where), arguments.rdzv_backend == "static"
    if static and given("node_rank"):
        return
    if not (given("rdzv_endpoint") or (static and given("master_addr"))):
        raise ValueError(
            f"{hosts} needs a rendezvous: add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on "
            "every host, HOST being one of them"
        )
    if not static:
        return
    if given("rdzv_endpoint") and not given("rdzv_backend"):
        raise ValueError(
            f"{hosts} --rdzv-endpoint {where} does not say which host this is: add --rdzv-backend c10d on "
            f"every host, or --node-rank 0 on {host} and --node-rank 1 and so on elsewhere"
        )
    if not network.is_this_host(host):
        raise ValueError(
            f"this host is not {host}, where the rendezvous is, so it needs a --node-rank of its "
            "own, from 1 on; --rdzv-backend c10d --rdzv-endpoint HOST:PORT needs none"
        )


def _prepare_environment() -> None:
    """What the ranks inherit, and how much torchelastic says about itself."""
    os.environ[LAUNCHED_VARIABLE] = "1"
    # As `python -P`: nothing in the working directory shadows an installed package.
    os.environ["PYTHONSAFEPATH"] = "1"
    # As torchrun sets it, for one rank too: the same number of threads gives the same bits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_TIMEOUT_S)
    silence_torchelastic()


def silence_torchelastic() -> None:
    """Silence torchelastic's loggers: this program reports what matters."""
    # Each of them sets a level of its own, so silencing their parent is not enough.
    for name in logging.root.manager.loggerDict:
        if name.startswith(
            ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _exit_without_other_hosts(folder: Path) -> None:
    """End this process, while torchelastic waits for hosts that it cannot reach."""
    code = rank_files.read_outcome(folder)
    if code is None:
        print_stderr("ddprun: cannot reach the other hosts; the run ends on this host")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_FAILURE if code is None else code)


def _exit_code(rank: int, failure: ProcessFailure, killed_ranks: Mapping[int, str]) -> int:
    if rank in killed_ranks:
        print_stderr(
            f"ddprun: rank {rank} was stopped in {killed_ranks[rank]}, did not continue and was killed; "
            "the run has failed"
        )
        return EXIT_FAILURE
    if cause := _unexplained_exits({rank: failure}):
        print_stderr(f"ddprun: {cause}; the run has failed")
        return EXIT_FAILURE
    # A rank ends with 130 by itself when a rank of another host was interrupted.
    return failure.exitcode if failure.exitcode in (EXIT_BAD_INPUT, EXIT_INTERRUPTED) else EXIT_FAILURE


def _prepare_restarts(arguments: Any) -> bool:
    """Set what torchelastic needs to start ranks again; whether torchrun's arguments may come to that.

    Raises:
        ValueError: it may come to that, and could not work.
    """
    least, most = torchrun.parse_min_max_nnodes(arguments.nnodes)
    if most > 1 and arguments.max_restarts and arguments.rdzv_backend == "static":
        raise ValueError(
            "the static rendezvous cannot restart the ranks of several hosts: "
            "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or leave --max-restarts out"
        )
    if least < most and not arguments.max_restarts:
        print_stderr(
            f"ddprun: warning: --nnodes {arguments.nnodes} without --max-restarts: a host that is lost ends "
            "the run"
        )
    if not arguments.max_restarts and least == most:
        return False
    # With a store that outlives the ranks, those of the next start find the addresses of the last one there,
    # and most restarts fail (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return True


def _is_elastic(config: LaunchConfig) -> bool:
    """Whether ranks may be started again."""
    return config.max_restarts > 0 or config.min_nodes < config.max_nodes


def rendezvous_parameters(config: LaunchConfig, **overrides: Any) -> RendezvousParameters:
    """As torch.distributed.launcher.api.launch_agent has them, with other values of `--rdzv-conf`."""
    defaults = _ELASTIC_CONF if _is_elastic(config) and config.rdzv_backend != "static" else {}
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{**defaults, **config.rdzv_configs, **overrides},
    )


def _make_agent(
    config: LaunchConfig, program: str, arguments: Sequence[str], scratch: Path, loaded: LoadedPipeline
) -> Agent:
    """The agent that torch.distributed.launcher.api.launch_agent makes for such a config, as ours."""
    static = config.rdzv_backend == "static" and config.max_nodes > 1
    host, _, port = config.rdzv_endpoint.rpartition(":")
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=in_background(partial(make_handler, rendezvous_parameters(config))).result(),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=host if static else None,
        master_port=int(port) if static else None,
        local_addr=config.local_addr,
    )
    return Agent(spec, config, scratch, loaded)


def _run_agent(agent: Agent, *, elastic: bool) -> None:
    """Run the ranks of this host to their end. Unless they are `elastic`, the other hosts cannot go on after
    it.

    Raises:
        ChildFailedError: ranks have failed, and are not started again.
        SignalException: this process was asked to end.
        DistError, RendezvousError: the other hosts cannot be reached.
    """
    leaving = False
    try:
        result = agent.run()
        if result is not None and result.is_failed():
            raise ChildFailedError("ddprun", result.failures)
    except SignalException:
        leaving = elastic  # the others continue without this host, or with its next launcher
        raise
    finally:
        if not leaving:
            agent.get_worker_group().spec.rdzv_handler.shutdown()  # ends the run on the other hosts, too


def _unexplained_exits(failures: Mapping[int, ProcessFailure]) -> str:
    """Which ranks have ended without a message of their own: killed, or with exit code 0 before the run was
    over; nothing if none has.

    When one has failed torchelastic ends the others with SIGTERM.
    """
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    if early := [rank for rank, code in codes.items() if code == 0]:
        who = format_ranks(early)
        return f"{who} ended with exit code 0 before the run was over, as os._exit in its own code does"
    by = {rank: signal.Signals(-code) for rank, code in codes.items() if code < 0}
    others = {rank: number for rank, number in by.items() if number is not signal.SIGTERM}
    if not others and len(failures) > len(by):
        return ""
    found = []
    for rank, number in (others or by).items():
        hint = " (out of memory is the usual cause)" if number is signal.SIGKILL else ""
        found.append(f"rank {rank} was killed by {number.name}{hint}")
    return ", ".join(found)
