"""Torchelastic's agent for this host's ranks, that says what it does and loses no steps where it need not."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port

from ddprun import EXIT_BAD_INPUT, EXIT_REPEATED_FAILURE
from ddprun.config import LoadedPipeline
from ddprun.host import network, rank_files
from ddprun.host.processes import END_RANK_SIGNAL, end_leftovers, run_in_daemon_thread, send_signal
from ddprun.launch.flags import SHUTDOWN_VARIABLE, rendezvous_parameters
from ddprun.launch.fork_server import ForkServer
from ddprun.launch.host_keepalive import HostKeepalive
from ddprun.launch.rendezvous import make_rendezvous_handler
from ddprun.standard_streams import say
from ddprun.watchdog.launcher_watchdog import connecting_ranks
from ddprun_hooks.errors import format_ranks

_SHUTDOWN_TIMEOUT_S = 10
_CHECKPOINT_S = 30.0  # longest wait for a checkpoint before ranks are ended that have not failed

_EXIT_BARRIER_S = 30.0  # hosts wait so long for each other at the end, to which all come at about one time
_LEFT_KEY = "ddprun/left"
_FORCED_KILL_S = 1  # from END_RANK_SIGNAL to SIGKILL where somebody has asked twice
_TICK_S = 0.05

_ASK_EVERY_S = 1.0
_CONNECTING_S = 5.0  # for so long ranks may wait to be connected, after the run has ended on another host


class _RankHandler(SubprocessHandler):
    """Torchelastic's handler of one rank; forks the rank from the server if the server can do so."""

    def __init__(self, server: ForkServer | None, **options: Any) -> None:
        self._server = server
        super().__init__(**options)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        forked, redirected = None, self._stdout is not None or self._stderr is not None
        # The program may also be a tool that binds a rank to cores.
        if self._server is not None and args[0] == sys.executable and not redirected:
            forked = self._server.fork_process(args[args.index("ddprun") + 1 :], env)
        return forked or super()._popen(args, env)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """End the rank. What it has started gets SIGTERM, with its whole process group, and can clear up."""
        if death_sig is END_RANK_SIGNAL:
            send_signal([self.proc.pid], END_RANK_SIGNAL)
            death_sig = signal.SIGTERM
        super().close(death_sig)


class Agent(LocalElasticAgent):
    """Starts this host's ranks, and again after a failure, or when hosts have come or gone. Ranks of the
    pipeline `loaded` leave notes in `scratch`, this launcher's folder.
    """

    _store: Any  # shared by all hosts; empty at each start of the ranks

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, scratch: Path, loaded: LoadedPipeline) -> None:
        assert config.logs_specs is not None
        super().__init__(spec, config.logs_specs, exit_barrier_timeout=_EXIT_BARRIER_S)
        self._close_s = int(os.environ.get(SHUTDOWN_VARIABLE, _SHUTDOWN_TIMEOUT_S))
        self._scratch, self._loaded, self._min_nodes = scratch, loaded, config.min_nodes
        self._lifeline: HostKeepalive | None = None  # to the other hosts, while restarts are left
        self._address: str | None = None  # of this host, which the others reach
        if config.max_restarts and config.max_nodes > 1:
            self._address = network.address_towards(config.rdzv_endpoint)
        self._next_question_at = 0.0  # whether the run has ended on another host
        self._ended_elsewhere_at: float | None = None
        self.kill_at_once = False  # set by a signal handler: ranks that do not end when asked to are killed
        self.leaving_signal: signal.Signals | None = None  # set by a handler: this host leaves
        # Set by a signal handler: ranks were asked to stop, and so are not started again if they fail.
        self.stop_signal: signal.Signals | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other hosts. Raises RendezvousError if they do not come, or where clocks that are far
        apart make hosts consider each other lost, and torchelastic would continue with too few.
        """
        try:
            run_in_daemon_thread(partial(super()._rendezvous, worker_group)).result()
        except RendezvousTimeoutError:  # it says nothing
            raise RendezvousError(
                f"fewer than {self._min_nodes} hosts came in time, or the others run without this one: start "
                "the same command on each of them, with the same --rdzv-id"
            ) from None
        present = worker_group.group_world_size or 0
        if present < self._min_nodes:
            raise RendezvousError(
                f"{present} of at least {self._min_nodes} hosts; the others were considered lost, as when "
                "clocks are seconds apart: `ddprun doctor` compares them"
            )
        self.close_keepalive()
        if self._address is not None and present > 1 and self._remaining_restarts:
            index = worker_group.group_rank or 0
            # They would wait for those of a host that is cut off; one that is being started is killed later.
            kill_ranks = partial(rank_files.signal_ranks, self._scratch, signal.SIGKILL)
            self._lifeline = HostKeepalive(self._store, index, present, self._address, kill_ranks)
        here = [worker.global_rank for worker in worker_group.workers]
        if 0 not in here:  # else its progress is on this screen
            size, address = worker_group.workers[0].world_size, worker_group.master_addr
            say(f"this host has {format_ranks(here)} of {size}; rank 0, at {address}, shows progress")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks. What starting them again would not change is the end of the run."""
        if self.leaving_signal is not None:
            self._take_checkpoint()
            with suppress(DistError):  # the host of the store may have left before
                self._store.set(_LEFT_KEY, "")  # before this host's ranks end, and the others' with them
            raise SignalException(f"left by {self.leaving_signal.name}", self.leaving_signal)
        result: RunResult = super()._monitor_workers(worker_group)
        going_well = result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED)
        if going_well and (early := self._find_early_exits(worker_group)):
            result = RunResult(state=WorkerState.FAILED, failures=early)
        if result.state == WorkerState.HEALTHY:
            self._raise_if_run_ended_elsewhere(worker_group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        if rank_files.read_outcome(self._scratch) is not None:  # a rank went down after the run had ended
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        if self.stop_signal is not None:
            raise SignalException(f"ended by {self.stop_signal.name}", self.stop_signal)
        failures: dict[int, ProcessFailure] = result.failures
        codes = {failure.exitcode for failure in failures.values()}
        if EXIT_REPEATED_FAILURE in codes:
            say(
                "not starting the ranks again: they failed the same way before, at the same step, "
                "and no checkpoint has come since"
            )
        if codes & {EXIT_BAD_INPUT, EXIT_REPEATED_FAILURE}:
            raise ChildFailedError("ddprun", failures)
        if run_in_daemon_thread(partial(self._store.check, [_LEFT_KEY])).result():
            say("a host has left: starting the ranks again")
            self._remaining_restarts += 1  # torchelastic takes one away
            return result
        if left := self._remaining_restarts:
            most = worker_group.spec.max_restarts
            cut_off = self._lifeline is not None and self._lifeline.lost_host is not None
            found = "" if cut_off else describe_unexplained_exits(failures)
            cause = f"{found}; " if found else ""
            say(f"{cause}starting the ranks again (restart {most - left + 1} of {most})")
        return result

    def close_keepalive(self) -> None:
        """No longer watch the other hosts."""
        if self._lifeline is not None:
            self._lifeline.close()
        self._lifeline = None

    def _raise_if_run_ended_elsewhere(self, worker_group: WorkerGroup) -> None:
        """Raise RendezvousClosedError if ranks wait for those of a host where the run has ended."""
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

    def _find_early_exits(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Ranks that have ended with exit code 0 although the run is not over: to torchelastic a success."""
        started: Any = self._pcontext
        ended = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, 0, "")
            for worker in worker_group.workers
            if started.subprocess_handlers[worker.local_rank].proc.poll() == 0
        }
        # Asked in this order: a rank leaves the outcome before it ends.
        return ended if ended and rank_files.read_outcome(self._scratch) is None else {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks. When one fails, torchelastic would give the others 30 s, whatever is set."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        close = self._pcontext.close

        def close_in_time(death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
            # Torch 2.11 hands no timeout on, and newer torch 30 s where a rank fails. `death_sig` may be a
            # signal that is no end to a rank.
            close(END_RANK_SIGNAL, _FORCED_KILL_S if self.kill_at_once else self._close_s)
            end_leftovers(started.values(), self._loaded.secrets.redact)

        setattr(self._pcontext, "close", close_in_time)  # noqa: B010 (a method, to mypy)
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # the other host is new, or its ranks have failed
            say("another host waits at the rendezvous: starting the ranks again")
            self._take_checkpoint()
        super()._restart_workers(worker_group)

    def _take_checkpoint(self) -> None:
        """Have the ranks take a checkpoint, if the run keeps any, and wait for it unless they fail."""
        if not self._loaded.pipeline.checkpoint.keep:
            return
        since, pids = time.monotonic_ns(), rank_files.signal_ranks(self._scratch, signal.SIGUSR1)
        while time.monotonic_ns() - since < _CHECKPOINT_S * 1e9:
            is_over = rank_files.last_checkpoint_ns(self._scratch) > since
            if is_over or len(rank_files.live_rank_pids(self._scratch)) < max(len(pids), 1):
                return
            time.sleep(_TICK_S)


def make_agent(
    config: LaunchConfig,
    program: str,
    arguments: Sequence[str],
    scratch: Path,
    loaded: LoadedPipeline,
    server: ForkServer | None,
) -> Agent:
    """The agent that torch.distributed.launcher.api.launch_agent makes for such a config, as ours."""
    # Where torchelastic itself chooses the class of handlers.
    multiprocessing.get_subprocess_handler = partial(_RankHandler, server)
    parameters = rendezvous_parameters(config)
    master_addr, master_port = _get_addr_and_port(parameters)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=run_in_daemon_thread(partial(make_rendezvous_handler, parameters)).result(),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
    )
    return Agent(spec, config, scratch, loaded)


def describe_unexplained_exits(failures: Mapping[int, ProcessFailure]) -> str:
    """Which ranks have ended without a message of their own: killed, or with exit code 0 too early; else
    nothing. When one has failed the others are ended with END_RANK_SIGNAL.
    """
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    if early := [rank for rank, code in codes.items() if code == 0]:
        who = format_ranks(early)
        return f"{who} ended with exit code 0 before the run was over, as os._exit in its own code does"
    by = {rank: signal.Signals(-code) for rank, code in codes.items() if code < 0}
    others = {rank: number for rank, number in by.items() if number is not END_RANK_SIGNAL}
    if not others and len(failures) > len(by):
        return ""
    found = []
    for rank, number in (others or by).items():
        hint = " (out of memory is the usual cause)" if number is signal.SIGKILL else ""
        found.append(f"rank {rank} was killed by {number.name}{hint}")
    return ", ".join(found)
