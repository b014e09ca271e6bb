"""What the stages of one run work with, in three drawers: what stays, what changes, what a person sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddprun.checkpoint.checkpoints import Checkpoints
from ddprun.config import Loaded
from ddprun.engine.clocks import ClockOffsets
from ddprun.engine.cursor import Cursor
from ddprun.engine.data import Feed
from ddprun.engine.finite import FiniteCheck
from ddprun.engine.objective import Objective
from ddprun.engine.precision import Precision
from ddprun.engine.reporter import Reporter
from ddprun.engine.samples import HeldOut
from ddprun.engine.stacks import Stacks
from ddprun.engine.stop import StopRequest
from ddprun.engine.time_slices import TimeSliceClient
from ddprun.parallel.ddp import DdpReplica
from ddprun.parallel.ranks import Ranks
from ddprun.sync.audit import Finding
from ddprun.sync.buffers import BufferSync
from ddprun.sync.exchanger import ParameterExchanger
from ddprun.sync.plan import ReplicaConsistency
from ddprun.sync.synchronizer import Synchronizer
from ddprun.telemetry.clock import Clock, GradientTimes
from ddprun.telemetry.profile import Profiler
from ddprun.telemetry.recorder import GlobalStep, StepRecorder
from ddprun.telemetry.writer import RecordFiles
from ddprun_hooks.comm.exchange import Exchange


@dataclass(slots=True)
class Runtime:
    """What `engine/setup.py` builds once. The same objects serve every stage of the run."""

    loaded: Loaded
    run_dir: Path
    ranks: Ranks
    device: torch.device
    backend: str
    """`gloo` or `nccl`."""

    stop: StopRequest
    exchange: Exchange
    exchanger: ParameterExchanger
    records: RecordFiles
    clock: Clock
    clock_offsets: ClockOffsets
    recorder: StepRecorder

    model: nn.Module
    """The bare model."""

    replica: DdpReplica | None
    """The model under DDP; None if no stage exchanges gradients."""

    stacks: Stacks
    """The hooks of each stage."""

    buffers: BufferSync
    optimizer: Optimizer
    optimizer_settings: dict[int, list[dict[str, Any]]]
    """By stage: the optimizer's settings of each parameter group."""

    precision: Precision
    objective: Objective
    feed: Feed
    held_out: HeldOut
    checkpoints: Checkpoints
    finite: FiniteCheck
    gradients: GradientTimes | None
    """None: the pipeline does not ask for them (`timings.gradients`)."""

    profiler: Profiler | None
    """torch's; None: the pipeline does not ask for it (`timings.profile`)."""

    time_slices: TimeSliceClient | None = None
    """None: this run is not one of several that `ddprun compare` runs."""


@dataclass(slots=True)
class RunState:
    """What changes while the run goes on. A checkpoint holds all of it (`engine/state.py`), but for what
    belongs to the stage that is running: that holds its own in `synchronizer` and `schedule`.
    """

    step: int = 0
    """Optimizer steps done."""

    loss: float | None = None
    """Mean over ranks in the newest step whose loss is known."""

    metrics: dict[str, float] | None = None
    """What the last evaluate stage measured."""

    cursor: Cursor = field(default_factory=Cursor)
    replicas: ReplicaConsistency = field(default_factory=ReplicaConsistency)
    outer_momentum: dict[str, Tensor] = field(default_factory=dict)
    """What DiLoCo's outer optimizer keeps from stage to stage, by parameter name."""

    last_audit: Finding | None = None
    farthest_apart: float = 0.0
    """The largest difference between two ranks in one value that an audit has seen."""

    synchronizer: Synchronizer | None = None
    """Of the stage that is running."""

    schedule: LRScheduler | None = None
    """Of the last stage that has begun and takes steps."""

    mid_stage: Mapping[str, Any] | None = None
    """The checkpoint's state, from which the next stage goes on; None: it starts afresh."""


@dataclass(slots=True)
class Session:
    """One run, as its stages see it."""

    runtime: Runtime
    state: RunState
    reporter: Reporter

    def learn(self, known: Sequence[GlobalStep]) -> None:
        """Take up what all ranks newly know alike, oldest first, and show it."""
        if known:
            self.state.loss = known[-1].mean_losses[-1]
        self.reporter.progress(known, self.state.step)
