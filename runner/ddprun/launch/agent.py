"""torchelastic's agent, as torchrun runs it, that says what it does and loses no steps where it need not."""

import inspect
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_min_max_nnodes

from ddprun.engine import notes

BAD_INPUT = 2
_CHECKPOINT_S = 30.0
"""Longest wait for a checkpoint before ranks are ended that have not failed."""

_OTHERS_END_S = 30.0
"""Hosts wait so long for each other at the end, which their ranks come to together."""

_TICK_S = 0.05

Taken = Literal["new", "old", "none", "failing"]
"""Whether a checkpoint was taken: it was; it could not be, in time; none ever is; ranks fail, too."""

_RESTARTS: dict[Taken, str] = {
    "new": "another host has come: starting the ranks again, from a new checkpoint",
    "old": "another host has come: starting the ranks again; no new checkpoint could be taken for that",
    "none": "another host has come: starting the ranks again, from the beginning",
    "failing": "starting the ranks again, as the other hosts do",
}

_MEETING = {
    "last_call_timeout": "3",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "5",
    "read_timeout": "15",
}
"""For runs whose ranks may be started again: seconds for which hosts wait for more of them once there are
enough; between two signs of life; how many of these may be missing; seconds until the store has to answer.
With torchelastic's own 30, 5, 3 and 60 the others go on 45 s after a host is lost."""


class Agent(LocalElasticAgent):
    """Starts this host's ranks, and again after a failure, or when hosts have come or gone.

    Args:
        spec: what torchelastic is to run.
        config: torchrun's reading of its flags.
        scratch: this launcher's folder, in which ranks leave notes.
        keeps: whether ranks take checkpoints.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, scratch: Path, *, keeps: bool) -> None:
        assert config.logs_specs is not None
        super().__init__(
            spec, config.logs_specs, exit_barrier_timeout=_OTHERS_END_S, **_shutdown_timeout(config)
        )
        self._scratch, self._keeps, self._least = scratch, keeps, config.min_nodes
        self._failures, self._most = 0, spec.max_restarts
        self.leaving: signal.Signals | None = None
        """Set by a signal handler: this host leaves the run, after a checkpoint."""

        self.stopping: signal.Signals | None = None
        """Set by a signal handler: ranks were asked to stop, and so are not started again if they fail."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other hosts.

        Raises:
            RendezvousError: hosts whose clocks are far apart take each other for lost, and torchelastic would
                go on with fewer than there may be.
        """
        super()._rendezvous(worker_group)
        met = worker_group.group_world_size or 0
        if met < self._least:
            raise RendezvousError(
                f"{met} of at least {self._least} hosts; the others were taken for lost, as when clocks are "
                "seconds apart: `ddprun doctor` compares them"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks. What starting them again would not change is the end of the run."""
        if self.leaving is not None:
            self._checkpoint()
            raise SignalException(f"left by {self.leaving.name}", self.leaving)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        if notes.outcome(self._scratch) is not None:  # a rank went down after the run had ended
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        if self.stopping is not None:
            raise SignalException(f"ended by {self.stopping.name}", self.stopping)
        failures: dict[int, ProcessFailure] = result.failures
        if any(failure.exitcode == BAD_INPUT for failure in failures.values()):
            raise ChildFailedError("ddprun", failures)
        self._failures += 1
        if self._failures <= self._most:
            told = killed(failures)
            told += "; " if told else ""
            _tell(f"{told}starting the ranks again (restart {self._failures} of {self._most})")
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # here; but hosts have come, or ranks of others failed
            _tell(_RESTARTS[self._checkpoint()])
        super()._restart_workers(worker_group)

    def _checkpoint(self) -> Taken:
        """Have the ranks take a checkpoint, and wait for it unless they fail."""
        if not self._keeps:
            return "none"
        since, pids = time.monotonic_ns(), notes.pids(self._scratch)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        while time.monotonic_ns() - since < _CHECKPOINT_S * 1e9:
            put_ns, written = notes.checkpoint(self._scratch)
            if put_ns > since:
                return "new" if written else "old"
            if len(notes.pids(self._scratch)) < max(len(pids), 1):
                return "failing"
            time.sleep(_TICK_S)
        return "old"


def prepare(arguments: Any) -> bool:
    """Set what torchelastic needs to start ranks again; whether it may come to that.

    Args:
        arguments: torchrun's own reading of its flags; changed in place.

    Raises:
        ValueError: it may come to that, and could not work.
    """
    least, most = parse_min_max_nnodes(arguments.nnodes)
    if most > 1 and arguments.max_restarts and arguments.rdzv_backend == "static":
        raise ValueError(
            "the static rendezvous cannot start ranks of several hosts again: "
            "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or leave --max-restarts out"
        )
    if least < most and not arguments.max_restarts:
        _tell(
            f"warning: --nnodes {arguments.nnodes} without --max-restarts: a host that is lost ends the run"
        )
    if not arguments.max_restarts and least == most:
        return False
    # With a store that outlives the ranks, those of the next start find the addresses of the last one there,
    # and most restarts fail (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if arguments.rdzv_backend != "static":
        given = [pair for pair in arguments.rdzv_conf.split(",") if pair]
        named = {pair.partition("=")[0].strip() for pair in given}
        given += [f"{name}={value}" for name, value in _MEETING.items() if name not in named]
        arguments.rdzv_conf = ",".join(given)
    return True


def make_agent(
    config: LaunchConfig, program: str, arguments: Sequence[str], scratch: Path, *, keeps: bool
) -> Agent:
    """What torch.distributed.launcher.api.launch_agent makes for such a config."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    static = config.rdzv_backend == "static"
    host, _, port = config.rdzv_endpoint.rpartition(":")
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
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
    try:
        result = agent.run()
        if result is not None and result.is_failed():
            raise ChildFailedError("ddprun", result.failures)
    except SignalException:
        raise  # the others go on without this host
    except BaseException:
        _close(agent)
        raise
    _close(agent)


def _close(agent: Agent) -> None:
    """Tell the other hosts that this is the end."""
    agent.get_worker_group().spec.rdzv_handler.shutdown()


def killed(failures: Mapping[int, ProcessFailure]) -> str:
    """Which ranks were killed, since these cannot tell; nothing if none was.

    When one has failed torchelastic ends the others with SIGTERM.
    """
    by = {rank: signal.Signals(-one.exitcode) for rank, one in sorted(failures.items()) if one.exitcode < 0}
    others = {rank: number for rank, number in by.items() if number is not signal.SIGTERM}
    if not others and len(failures) > len(by):
        return ""
    found = []
    for rank, number in (others or by).items():
        hint = " (out of memory is the usual cause)" if number is signal.SIGKILL else ""
        found.append(f"rank {rank} was killed by {number.name}{hint}")
    return ", ".join(found)


def _shutdown_timeout(config: LaunchConfig) -> dict[str, Any]:
    """Seconds from SIGTERM to SIGKILL, where this torch takes them."""
    known = inspect.signature(LocalElasticAgent).parameters
    return {"shutdown_timeout": config.shutdown_timeout} if "shutdown_timeout" in known else {}


def _tell(text: str) -> None:
    print(f"ddprun: {text}", file=sys.stderr, flush=True)
