"""torchelastic's agent, as torchrun runs it, that says what it does and loses no steps where it need not."""

import inspect
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_min_max_nnodes

from ddprun.host import rank_files
from ddprun.host.processes import in_background
from ddprun.launch.rendezvous import make_handler
from ddprun.screen import say

BAD_INPUT = 2
_CHECKPOINT_S = 30.0
"""Longest wait for a checkpoint before ranks are ended that have not failed."""

_OTHERS_END_S = 30.0
"""Hosts wait so long for each other at the end, which all ranks reach at about the same time."""

_AT_ONCE_S = 1
"""From SIGTERM to SIGKILL where somebody has asked twice."""

_TICK_S = 0.05

Taken = Literal["new", "old", "none", "failing"]
"""Whether a checkpoint was taken: it was; it could not be, in time; none ever is; ranks fail, too."""

_RESTARTS: dict[Taken, str] = {
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

    Ranks leave notes in `scratch`, this launcher's folder; `keeps` says whether they take checkpoints.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, scratch: Path, *, keeps: bool) -> None:
        assert config.logs_specs is not None
        timeouts: dict[str, Any] = {"exit_barrier_timeout": _OTHERS_END_S}
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:  # older torch has none
            timeouts["shutdown_timeout"] = config.shutdown_timeout
        super().__init__(spec, config.logs_specs, **timeouts)
        self._scratch, self._keeps, self._least = scratch, keeps, config.min_nodes
        self._failures = 0
        self.at_once = False
        """Set by a signal handler: ranks that do not end when asked to are killed."""

        self.leaving: signal.Signals | None = None
        """Set by a signal handler: this host leaves the run, after a checkpoint."""

        self.stopping: signal.Signals | None = None
        """Set by a signal handler: ranks were asked to stop, and so are not started again if they fail."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the other hosts.

        Raises:
            RendezvousError: hosts whose clocks are far apart take each other for lost, and torchelastic would
                continue with too few.
        """
        in_background(partial(super()._rendezvous, worker_group)).result()
        present = worker_group.group_world_size or 0
        if present < self._least:
            raise RendezvousError(
                f"{present} of at least {self._least} hosts; the others were taken for lost, as when clocks "
                "are seconds apart: `ddprun doctor` compares them"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks. What starting them again would not change is the end of the run."""
        if self.leaving is not None:
            self._checkpoint()
            raise SignalException(f"left by {self.leaving.name}", self.leaving)
        result: RunResult = super()._monitor_workers(worker_group)
        going_well = result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED)
        if going_well and (early := self._ended_early(worker_group)):
            result = RunResult(state=WorkerState.FAILED, failures=early)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        if rank_files.outcome(self._scratch) is not None:  # a rank went down after the run had ended
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        if self.stopping is not None:
            raise SignalException(f"ended by {self.stopping.name}", self.stopping)
        failures: dict[int, ProcessFailure] = result.failures
        if any(failure.exitcode == BAD_INPUT for failure in failures.values()):
            raise ChildFailedError("ddprun", failures)
        self._failures += 1
        if self._failures <= (most := worker_group.spec.max_restarts):
            cause = f"{found}; " if (found := ended_by_itself(failures)) else ""
            say(f"ddprun: {cause}starting the ranks again (restart {self._failures} of {most})")
        return result

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
        return ended if ended and rank_files.outcome(self._scratch) is None else {}

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks: the signal goes to all of them, and SIGKILL after the timeout in seconds."""
        if self.at_once:
            death_sig, timeout = signal.SIGTERM, _AT_ONCE_S
        super()._shutdown(death_sig, timeout)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # here; but hosts have come, or ranks of others failed
            say(f"ddprun: {_RESTARTS[self._checkpoint()]}")
        super()._restart_workers(worker_group)

    def _checkpoint(self) -> Taken:
        """Have the ranks take a checkpoint, and wait for it unless they fail."""
        if not self._keeps:
            return "none"
        since, pids = time.monotonic_ns(), rank_files.pids(self._scratch)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        while time.monotonic_ns() - since < _CHECKPOINT_S * 1e9:
            put_ns, written = rank_files.checkpoint(self._scratch)
            if put_ns > since:
                return "new" if written else "old"
            if len(rank_files.pids(self._scratch)) < max(len(pids), 1):
                return "failing"
            time.sleep(_TICK_S)
        return "old"


def prepare(arguments: Any) -> bool:
    """Set what torchelastic needs to start ranks again; whether torchrun's arguments may come to that.

    Raises:
        ValueError: it may come to that, and could not work.
    """
    least, most = parse_min_max_nnodes(arguments.nnodes)
    if most > 1 and arguments.max_restarts and arguments.rdzv_backend == "static":
        raise ValueError(
            "the static rendezvous cannot restart the ranks of several hosts: "
            "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or leave --max-restarts out"
        )
    if least < most and not arguments.max_restarts:
        say(
            f"ddprun: warning: --nnodes {arguments.nnodes} without --max-restarts: a host that is lost ends "
            "the run"
        )
    if not arguments.max_restarts and least == most:
        return False
    # With a store that outlives the ranks, those of the next start find the addresses of the last one there,
    # and most restarts fail (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return True


def is_elastic(config: LaunchConfig) -> bool:
    """Whether ranks may be started again."""
    return config.max_restarts > 0 or config.min_nodes < config.max_nodes


def rendezvous_parameters(config: LaunchConfig, **changed: Any) -> RendezvousParameters:
    """As torch.distributed.launcher.api.launch_agent has them, with other values of `--rdzv-conf`."""
    defaults = _ELASTIC_CONF if is_elastic(config) and config.rdzv_backend != "static" else {}
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **{**defaults, **config.rdzv_configs, **changed},
    )


def make_agent(
    config: LaunchConfig, program: str, arguments: Sequence[str], scratch: Path, *, keeps: bool
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
    return Agent(spec, config, scratch, keeps=keeps)


def run(agent: Agent) -> None:
    """Run the ranks of this host to their end.

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
        leaving = True  # the others continue without this host
        raise
    finally:
        if not leaving:
            agent.get_worker_group().spec.rdzv_handler.shutdown()  # ends the run on the other hosts, too


def ended_by_itself(failures: Mapping[int, ProcessFailure]) -> str:
    """Which ranks have ended without a message of their own: killed, or with exit code 0 before the run was
    over; nothing if none has.

    When one has failed torchelastic ends the others with SIGTERM.
    """
    early = [rank for rank, one in sorted(failures.items()) if one.exitcode == 0]
    if early:
        who = f"rank {early[0]}" if len(early) == 1 else f"ranks {', '.join(map(str, early))}"
        return f"{who} ended with exit code 0 before the run was over, as os._exit in its own code does"
    by = {rank: signal.Signals(-one.exitcode) for rank, one in sorted(failures.items()) if one.exitcode < 0}
    others = {rank: number for rank, number in by.items() if number is not signal.SIGTERM}
    if not others and len(failures) > len(by):
        return ""
    found = []
    for rank, number in (others or by).items():
        hint = " (out of memory is the usual cause)" if number is signal.SIGKILL else ""
        found.append(f"rank {rank} was killed by {number.name}{hint}")
    return ", ".join(found)
