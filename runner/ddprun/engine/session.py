"""What the stages of one run share."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddprun.config import Loaded
from ddprun.engine.checkpoints import Checkpoints
from ddprun.engine.cursor import Cursor
from ddprun.engine.data import Feed
from ddprun.engine.nonfinite import FiniteCheck, Nonfinite
from ddprun.engine.objective import Objective
from ddprun.engine.precision import Precision
from ddprun.engine.ranks import Ranks
from ddprun.engine.stacks import Stacks
from ddprun.engine.stop import StopRequest
from ddprun.engine.time_slices import TimeSliceClient
from ddprun.host.device import Place
from ddprun.sync.audit import Finding
from ddprun.sync.buffers import BufferSync
from ddprun.sync.exchanger import ParameterExchanger
from ddprun.sync.policy import Policy, Together
from ddprun.telemetry.clock import Clock, StreamClock
from ddprun.telemetry.gather import Records
from ddprun.telemetry.gradients import GradientTimes
from ddprun.telemetry.profile import Profiler
from ddprun.telemetry.progress import Screen
from ddprun.telemetry.recorder import StepRecorder
from ddprun.track.trackers import Trackers, nobody
from ddprun_hooks.comm.exchange import Exchange
from ddprun_hooks.dispatcher import Dispatcher

_COMPARE_CLOCKS_EVERY_S = 60.0
_STOP, _ASK_EVERY_S = "stop", 1.0


@dataclass(slots=True)
class Session:
    """What a stage works on."""

    loaded: Loaded
    run_dir: Path
    ranks: Ranks
    place: Place
    host_count: int | None
    """Into how many hosts the stage that is running splits the ranks; None: as they were launched."""

    stop: StopRequest
    exchange: Exchange
    records: Records
    clock: Clock
    recorder: StepRecorder
    screen: Screen
    events: structlog.typing.FilteringBoundLogger
    model: nn.Module
    """The bare model."""

    ddp: DistributedDataParallel | None
    """The model as backward wants it where gradients are exchanged; None if no stage exchanges any."""

    dispatcher: Dispatcher | None
    """DDP's hook; there if `ddp` is."""

    stacks: Stacks
    """The hooks of each stage."""

    exchanger: ParameterExchanger
    buffers: BufferSync
    optimizer: Optimizer
    optimizer_settings: dict[int, list[dict[str, Any]]]
    """The optimizer's settings in each stage that takes steps, for each parameter group."""

    precision: Precision
    objective: Objective
    feed: Feed
    held_out: Any
    """The dataset to evaluate on; None if there is none."""

    checkpoints: Checkpoints
    finite: FiniteCheck

    held_out_sharded: bool | None = None
    """Each rank has samples of its own of it; None: ranks have not compared what they read."""

    step: int = 0
    """Optimizer steps done."""

    loss: float | None = None
    """Mean over ranks of the newest step whose loss is known."""

    metrics: dict[str, float] | None = None
    """What the last evaluate stage measured."""

    where: str = "before the first stage"
    """For an error's message."""

    together: Together = "common"
    """Which ranks hold the same parameters."""

    state_together: Together = "common"
    """Which ranks hold the same optimizer state."""

    state_hosts: int | None = None
    """Into how many hosts the ranks were split where those of each host hold the same."""

    mutated_at: int = -1
    """After how many steps of the run weights were mutated last."""

    outer_momentum: dict[str, Tensor] = field(default_factory=dict)
    """What DiLoCo's outer optimizer keeps from stage to stage, by parameter name."""

    last_audit: Finding | None = None
    farthest_apart: float = 0.0
    """Largest difference between two ranks in one value that an audit has seen."""

    told_apart: bool = False
    """The screen has said that ranks are apart, and not yet that they are equal again."""

    cursor: Cursor = field(default_factory=Cursor)

    mid_stage: Mapping[str, Any] | None = None
    """State from which the stage that runs next goes on."""

    policy: Policy | None = None
    """Of the stage that is running."""

    schedule: LRScheduler | None = None
    """Of the last stage that has begun and takes steps."""

    nonfinite: Nonfinite | None = None
    """The first loss or parameter of the run that was not finite."""

    failed: bool = False
    """The run ends here because weights are not finite any more."""

    lost_weights: str | None = None
    """A parameter that was not finite when it was looked at last."""

    trackers: Trackers = field(default_factory=nobody)
    """Where else curves and metrics go; of rank 0."""

    gradients: GradientTimes | None = None
    """Notes when gradients are complete, if that was asked for."""

    profiler: Profiler | None = None
    """torch's, if it was asked for."""

    turns: TimeSliceClient | None = None
    """With other runs that this one is compared with."""

    clocks_compared_s: float = 0.0
    asked_s: float = 0.0

    def compare_clocks(self) -> None:
        """Measure each rank's clock against rank 0's; called by all ranks together."""
        if isinstance(self.clock, StreamClock):
            self.clock.tie()
        offset, bound = self.exchange.control.clock_offset()
        self.recorder.offset_us = offset
        measured = self.exchange.control.all_gather([offset, bound], "clock offsets")
        self.events.info(
            "clock_offsets",
            offset_us=[round(value, 1) for value in measured[:, 0].tolist()],
            error_us=[round(value, 1) for value in measured[:, 1].tolist()],
        )
        self.clocks_compared_s = time.monotonic()

    def stop_is_known(self, *, stop_if_lost: bool) -> bool:
        """Whether this rank is to stop, or has heard within the last second that another one is: for ranks
        that exchange nothing else.

        Args:
            stop_if_lost: weights that are not finite are a reason, too.
        """
        if self.stop.wanted:
            with self.ranks.asking():
                self.ranks.store.set(_STOP, "")
            return True
        if time.monotonic() - self.asked_s < _ASK_EVERY_S:
            return False
        self.asked_s = time.monotonic()
        if stop_if_lost and self.recorder.nonfinite is not None and self.finite.first():
            with self.ranks.asking():
                self.ranks.store.set(_STOP, "")
            return True
        with self.ranks.asking():
            return bool(self.ranks.store.check([_STOP]))

    @property
    def clocks_are_old(self) -> bool:
        """The offsets were measured a while ago."""
        return time.monotonic() - self.clocks_compared_s > _COMPARE_CLOCKS_EVERY_S

    def audited(self, finding: Finding, step: int, *, at_end: bool) -> None:
        """Remember what an audit found; say on the screen when ranks are first apart in a stage, and when a
        stage's end has made them equal again.
        """
        self.last_audit = finding
        self.farthest_apart = max(self.farthest_apart, finding.largest_distance)
        if finding.farthest and not self.told_apart:
            self.told_apart = True
            self.screen.note(
                f"audit, step {step}: the ranks are apart, by up to {finding.largest_distance:.3g} "
                f"(in {finding.farthest})"
            )
        elif at_end and not finding.farthest and self.told_apart:
            self.told_apart = False
            self.screen.note(f"audit, step {step}: the ranks hold the same parameters again")
