"""What a run works with: RunComponents (what stays), RunState (what changes), Reporter (what you see)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddprun.checkpoint.location import CheckpointLocation
from ddprun.checkpoint.writer import CheckpointWriter
from ddprun.config import LoadedPipeline
from ddprun.engine.balance import ShareBalancers
from ddprun.engine.build import HeldOutData
from ddprun.engine.compiling import GraphCompiler
from ddprun.engine.feeds import Feeds
from ddprun.engine.fingerprints import DatasetFingerprints
from ddprun.engine.hook_stacks import HookStacksByStage
from ddprun.engine.interrupts import ComparisonSliceClient, SignalRequests
from ddprun.engine.nonfinite import FiniteCheck
from ddprun.engine.objective import Objective, Precision
from ddprun.engine.reporter import Reporter
from ddprun.engine.turns import Turns
from ddprun.engine.weights import WeightEma
from ddprun.parallel.ranks import Ranks
from ddprun.sync.audit import AuditResult
from ddprun.sync.buffers import BufferSync, FrozenParameterSync
from ddprun.sync.exchanger import TensorExchanger
from ddprun.sync.plan import ReplicaConsistency, is_due
from ddprun.sync.synchronizer import Synchronizer
from ddprun.telemetry.clock import Clock, GradientTimes
from ddprun.telemetry.profile import Profiler
from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun.telemetry.writer import RecordCollector
from ddprun_hooks.comm_context import CommContext


@dataclass(slots=True)
class RunComponents:
    """What `engine/setup.py` builds once for all stages; checkpoints have what it learns (`state_dict`)."""

    loaded: LoadedPipeline
    run_dir: Path  # absolute, as is every path of a run: the user's code may change the working directory
    shown_dir: Path  # the same as it was given, for messages
    ranks: Ranks
    device: torch.device
    backend: str  # `gloo` or `nccl`
    signals: SignalRequests
    exchange: CommContext
    exchanger: TensorExchanger
    records: RecordCollector
    clock: Clock
    recorder: StepRecorder
    model: nn.Module  # what is trained: the bare model, or with its loss (`ModelWithLoss`)
    turns: Turns  # what the steps of each stage train, with the model under DDP
    stacks: HookStacksByStage  # the hooks of each stage
    buffers: BufferSync
    frozen: FrozenParameterSync
    optimizer: Optimizer
    optimizer_settings: dict[int, list[dict[str, Any]]]  # of each parameter group, by stage
    ema: WeightEma | None  # None: the pipeline does not ask for it
    precision: Precision
    objective: Objective
    feeds: Feeds
    share_balancers: ShareBalancers  # of the ranks' shares of samples
    fingerprints: DatasetFingerprints  # of all data
    held_out: HeldOutData  # what `data` holds out
    stage_held_out: dict[int, HeldOutData]  # of stages that name data to evaluate on, by index in `stages`
    finite_check: FiniteCheck
    gradient_times: GradientTimes | None  # None: the pipeline does not ask for them (`timings.gradients`)
    profiler: Profiler  # torch's; of no step if the pipeline does not ask for it (`timings.profile`)
    compiler: GraphCompiler | None = None  # None: the model is not compiled
    locations: Sequence[CheckpointLocation] = ()  # of checkpoints; those in memory come first
    checkpoints: CheckpointWriter | None = None  # on disk; None: none are taken (`keep: 0`)
    memory_checkpoints: CheckpointWriter | None = None  # None: none are taken
    time_slices: ComparisonSliceClient = field(default_factory=ComparisonSliceClient)

    def set_timing_detail(self, *, detailed: bool) -> None:
        """A step begins; `detailed`: it gets a record, so GPU marks and gradient times are taken in it."""
        if self.clock.lag_steps:  # a GPU's
            self.exchange.set_detailed_timing(detailed)
        if self.gradient_times is not None:
            self.gradient_times.enabled = detailed

    def display_path(self, path: Path) -> Path:
        """A path as messages have it: in the run's folder, if it is there, as that was given."""
        inside = path.is_relative_to(self.run_dir)
        return self.shown_dir / path.relative_to(self.run_dir) if inside else path


@dataclass(slots=True)
class Cursor:
    """Where in its pipeline the run is, and what has come of it so far: its time, and stages' entries."""

    next: int = 0  # the index in `stages` of the stage that runs, or that comes next
    stage: int | None = None  # the last stage that takes steps that has begun; it runs if it is `next`
    first_step: int = 0  # steps of the run when that stage began
    first_epoch: int = 0  # the first epoch of which no earlier stage has used a part
    first_update: int = 0  # updates of the run when that stage began
    updates: int = 0  # of the weights, in the run; a skipped one counts only where ranks update apart
    steps: list[int | None] = field(default_factory=list)
    """How many each stage has that takes steps and has begun, though `stop` may have ended it before; None
    where nobody can know."""

    length: int | None = None  # the steps that the schedule spans
    seconds: float = 0.0  # in that stage, in all attempts; of a broken one, up to its last checkpoint
    run_seconds: float = 0.0  # in all stages
    entries: list[dict[str, Any]] = field(default_factory=list)  # the summary's, of stages that are done
    world_sizes: list[list[int]] = field(default_factory=list)
    """How many ranks take the run's steps: the first step from which so many do, and the number."""

    ticked_at: float = 0.0  # when time was counted last, on this process's monotonic clock

    @property
    def mid_stage(self) -> bool:
        """A stage that takes steps has begun and not ended."""
        return self.stage == self.next

    def begin_stage(self, stage: int, step: int, epoch: int) -> None:
        self.stage, self.first_step, self.first_epoch, self.seconds = stage, step, epoch, 0.0
        self.first_update = self.updates
        self.steps.append(None)

    def record_world_size(self, next_step: int, ranks: int) -> None:
        """So many ranks take the steps from `next_step` on."""
        self.world_sizes = [one for one in self.world_sizes if one[0] < next_step]
        if not self.world_sizes or self.world_sizes[-1][1] != ranks:
            self.world_sizes.append([next_step, ranks])

    def count_time(self, *, in_stage: bool) -> None:
        """Count the time since the last call as the run's and, if it was spent `in_stage`, the stage's."""
        now = time.monotonic()
        spent, self.ticked_at = now - self.ticked_at, now
        self.run_seconds += spent
        if in_stage:
            self.seconds += spent

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        del state["ticked_at"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class BestMetric(BaseModel, strict=True, frozen=True):
    """The best evaluation so far."""

    metric: str
    value: float
    step: NonNegativeInt  # of the run, after which it was measured


class RunResults(BaseModel, strict=True):
    """What steps, evaluations and audits have come to; the same on all ranks. Checkpoints use these names."""

    loss: float | None = None  # mean over ranks in the newest step whose loss is known
    values: dict[str, float] | None = None  # the same of each number beside it; None: there are none
    metrics: dict[str, float] | None = None  # of the last evaluation
    evaluated_step: int = -1  # of the run, after which the last evaluation inside a stage was
    # Whose weights `keep_best` has written to the run folder's best.safetensors.
    kept: BestMetric | None = None
    stop_metric: str | None = None  # of `stop` of the stage that runs
    best: BestMetric | None = None  # of that stage, by this metric
    since_best: NonNegativeInt = 0  # evaluations of that stage since then
    last_audit: AuditResult | None = None
    farthest_apart: float = 0.0  # the largest difference between two ranks that an audit has seen


@dataclass(slots=True)
class RunState:
    """What changes in a run; a checkpoint holds all but `resume_state` (tests/engine/test_session.py)."""

    step: int = 0  # steps of the run that are done
    results: RunResults = field(default_factory=RunResults)
    cursor: Cursor = field(default_factory=Cursor)
    replicas: ReplicaConsistency = field(default_factory=ReplicaConsistency)
    outer_momentum: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # as in `Synchronizer`
    synchronizer: Synchronizer | None = None  # of the stage that is running
    schedule: LRScheduler | None = None  # of the last stage that has begun and takes steps
    loaded_schedule: dict[str, Any] | None = None  # the checkpoint's, until one is built
    resume_state: Mapping[str, Any] | None = None  # the checkpoint's state from which the next stage resumes

    @property
    def current_step(self) -> int:
        """The step that is under way, or that comes next; counts from 1 in the run, as in records."""
        return self.step + 1


@dataclass(slots=True)
class Session:
    """One run, as its stages see it."""

    runtime: RunComponents
    state: RunState
    reporter: Reporter

    def record_agreed_steps(self, agreed_steps: Sequence[AgreedSteps]) -> None:
        """Record and show what all ranks have just learned, oldest first."""
        if agreed_steps:
            newest, results = agreed_steps[-1], self.state.results
            results.loss = results.loss if newest.loss is None else newest.loss
            results.values = {**(results.values or {}), **newest.mean_values} or None
        self.reporter.show_progress(agreed_steps, self.state.step)

    def checkpoint_is_due(self, writer: CheckpointWriter | None) -> bool:
        """Whether `writer` takes a checkpoint after this step of the run; the same on all ranks."""
        return writer is not None and is_due(writer.every, self.state.step)
