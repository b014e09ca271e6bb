"""Starting this host's ranks with torchelastic: what torchrun does, with torchrun's flags."""

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from ddprun import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_REQUEUE, ON_USR1_VARIABLE
from ddprun.checkpoint.folder import steps_in
from ddprun.config import LoadedPipeline
from ddprun.host import network, processes, rank_files
from ddprun.launch.agent import Agent, describe_unexplained_exits, make_agent
from ddprun.launch.flags import flags_from_file, may_restart, parse_torchrun_flags, silence_torchelastic
from ddprun.launch.fork_server import ForkServer
from ddprun.launch.launcher import Flags, flag_or_variable, overrides_variable
from ddprun.run_files import ResumeMode, resume_command
from ddprun.standard_streams import say
from ddprun.watchdog.launcher_watchdog import LauncherWatchdog

_STORE_LINGER_S = 4.0  # the store may end with this process; other hosts still ask it who failed first

_NO_DETAILS = " See inner exception for details."  # torchelastic's, with an exception that is not shown


def launch_host_ranks(
    loaded: LoadedPipeline,
    flags: Flags,
    run_dir: Path | None,
    folder: Path,
    server: ForkServer | None,
    *,
    resuming: ResumeMode,
) -> int:
    """Start this host's ranks, wait for them, give the run's exit code. `folder` is this launcher's own.

    A rank's own error is on the screen when this returns: the rank that failed first printed it, the others
    kept silent. Only a rank that was killed cannot speak; then this says so. Raises OSError.
    """
    flags = {**flags_from_file(loaded, flags), **flags}
    silence_torchelastic()
    if resuming == "yes":
        command = ["resume", str(run_dir)]
    else:
        command = ["run", str(loaded.path), *(["--run-dir", str(run_dir)] if run_dir is not None else [])]
        command += ["--or-resume"] if resuming == "if begun" else []
    with ExitStack() as stack:
        flags["log_dir"] = str(folder)  # torchelastic would leave its own folder behind
        os.environ[rank_files.SCRATCH_VARIABLE] = str(folder)
        os.environ[processes.LAUNCHER_PID_VARIABLE] = str(os.getpid())
        os.environ |= overrides_variable(loaded.overrides)
        try:
            try:
                read = parse_torchrun_flags(flags, ["-m", "ddprun", *command])
                config, program, arguments = torchrun.config_from_args(read)
                assert isinstance(program, str)
                if warning := network.public_address_warning(config.rdzv_endpoint):
                    say(warning)
                os.environ.pop(rank_files.MEMORY_VARIABLE, None)  # of a launcher that started this one
                if loaded.pipeline.checkpoint.memory_every and config.max_restarts:
                    memory = stack.enter_context(rank_files.temporary_memory_folder())
                    os.environ |= {} if memory is None else {rank_files.MEMORY_VARIABLE: str(memory)}
                agent = make_agent(config, program, arguments, folder, loaded, server)
            except (DistError, RendezvousError):
                raise
            except (ValueError, RuntimeError, AssertionError) as error:  # torchrun's ways to refuse flags
                say(loaded.secrets.redact(str(error)))
                return EXIT_BAD_INPUT
            return _run_with_watchdog(agent, config, folder)
        except RendezvousClosedError:
            say("the run has ended on another host")
        except (DistError, RendezvousError) as error:
            where = flag_or_variable(flags, "rdzv_endpoint") or flag_or_variable(flags, "master_addr")
            why = str(error).removesuffix(_NO_DETAILS).rstrip(".")
            text = loaded.secrets.redact(f"cannot reach the other hosts at {where}: {why}")
            say(f"{text}{_resume_hint(folder)}")
    return EXIT_FAILURE


def _run_with_watchdog(agent: Agent, config: LaunchConfig, folder: Path) -> int:
    multi_host, endpoint = config.max_nodes > 1, config.rdzv_endpoint

    def rendezvous_answers() -> bool:
        with suppress(ValueError):
            return not network.connection_problem(*network.host_and_port(endpoint))
        return False

    _forward_signals(agent, folder, config)
    watchdog = LauncherWatchdog(
        folder,
        network.address_towards(endpoint) if multi_host else None,
        partial(_exit_without_other_hosts, folder) if multi_host else None,
        rendezvous_answers if multi_host and may_restart(config) else None,
    )
    try:
        try:
            with watchdog:
                try:
                    _run_agent(agent, elastic=may_restart(config))
                except ChildFailedError:
                    processes.hard_exit_on_signals(folder)
                    if multi_host:
                        watchdog.linger(_STORE_LINGER_S)
                    raise
        finally:  # how the run has ended is known
            for number in (*processes.STOP_SIGNALS, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
    except ChildFailedError as error:
        return _report_failure(*error.get_first_failure(), watchdog.killed_ranks)
    except SignalException as caught:
        if rank_files.read_outcome(folder) is None:  # else only what ranks do after the run was cut short
            say(f"stopped by {signal.Signals(caught.sigval).name}{_resume_hint(folder)}")
            return processes.SIGNAL_EXIT_BASE + int(caught.sigval)
    code = rank_files.read_outcome(folder)
    if code is None:
        say("the ranks of this host ended before the run was over; the run has failed")
        return EXIT_FAILURE
    return EXIT_REQUEUE if code == EXIT_INTERRUPTED and agent.stop_signal is signal.SIGUSR1 else code


def _resume_hint(folder: Path) -> str:
    """The end of a message: how to resume the run of the ranks with this folder, if it has a checkpoint."""
    found = rank_files.read_run_dir(folder)
    if found is None or not steps_in(found / "checkpoints"):
        return ""
    return f"; to resume: {resume_command(found)}"


def _forward_signals(agent: Agent, scratch: Path, config: LaunchConfig) -> None:
    """SIGUSR1 goes to the ranks, and the first SIGINT, SIGTERM or SIGHUP: they take a checkpoint, and for the
    latter three stop after it, and for SIGUSR1 if `ON_USR1_VARIABLE` says so. The second one, or one that
    comes before all ranks are there or after the run is over, ends them; one within a second of the first is
    the same request: GNU `timeout` signals its child, and then the child's process group.

    Where hosts may leave, SIGTERM is this host's own: its ranks end after a checkpoint, the others continue.
    """
    first_at: float | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal first_at
        which, asked, now = signal.Signals(number), first_at is not None, time.monotonic()
        first_at = now if first_at is None else first_at
        if asked and now - first_at < processes.SAME_REQUEST_S:
            return
        is_over = rank_files.read_outcome(scratch) is not None
        if asked or is_over or len(rank_files.live_rank_pids(scratch)) < config.nproc_per_node:
            agent.kill_at_once = True
            raise SignalException(f"ended by {which.name}", which)
        if which is signal.SIGTERM and config.min_nodes < config.max_nodes:
            agent.leaving_signal = which
            say(f"{which.name}: this host leaves after a checkpoint; a second signal ends it at once")
            return
        agent.stop_signal = which
        # One that is stopped could not stop after its step.
        rank_files.signal_ranks(scratch, signal.SIGINT, signal.SIGCONT)
        say(f"{which.name}: stopping at the end of the step; a second signal ends it at once")

    def checkpoint(number: int, _: FrameType | None) -> None:
        if not rank_files.signal_ranks(scratch, number):
            say("SIGUSR1: no checkpoint: no rank has started yet")

    # Ranks end by themselves when they are asked to; torchelastic would end them.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for number in processes.STOP_SIGNALS:
        processes.handle_signal_unless_ignored(number, stop)
    signal.signal(signal.SIGUSR1, stop if os.environ.get(ON_USR1_VARIABLE) == "stop" else checkpoint)


def _exit_without_other_hosts(folder: Path) -> None:
    """End this process, while torchelastic waits for hosts that it cannot reach."""
    code = rank_files.read_outcome(folder)
    if code is None:
        say(f"cannot reach the other hosts; the run ends on this host{_resume_hint(folder)}")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_FAILURE if code is None else code)


def _report_failure(rank: int, failure: ProcessFailure, killed_ranks: Mapping[int, str]) -> int:
    if rank in killed_ranks:
        say(
            f"rank {rank} was stopped in {killed_ranks[rank]}, did not continue and was killed; "
            "the run has failed"
        )
        return EXIT_FAILURE
    if cause := describe_unexplained_exits({rank: failure}):
        say(f"{cause}; the run has failed")
        return EXIT_FAILURE
    # A rank ends with 130 by itself when a rank of another host was interrupted.
    return failure.exitcode if failure.exitcode in (EXIT_BAD_INPUT, EXIT_INTERRUPTED) else EXIT_FAILURE


def _run_agent(agent: Agent, *, elastic: bool) -> None:
    """Run the ranks of this host to their end; unless they are `elastic`, other hosts cannot go on after it.
    Raises ChildFailedError if ranks have failed for good, SignalException if this process was asked to end,
    DistError or RendezvousError if the other hosts cannot be reached.
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
        agent.close_keepalive()
        if not leaving:
            agent.get_worker_group().spec.rdzv_handler.shutdown()  # ends the run on the other hosts, too
