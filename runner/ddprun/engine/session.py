"""Everything that the stages of one run share, built once, in an order that all ranks follow."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddprun import LAUNCHED
from ddprun.engine import build, policies, seeding
from ddprun.engine.beside import make_folder_importable
from ddprun.engine.checkpoints import Checkpoints
from ddprun.engine.data import Feed
from ddprun.engine.layout import freeze_layout, look_at_buffers, wrap
from ddprun.engine.objective import Objective
from ddprun.engine.place import Place
from ddprun.engine.position import Position
from ddprun.engine.precision import Precision
from ddprun.engine.ranks import Ranks
from ddprun.engine.stacks import Stacks, open_stacks
from ddprun.engine.tracking import check_trackers, open_trackers, pass_on
from ddprun.engine.turns import Turns
from ddprun.spec import Loaded, PipelineError, StepStage
from ddprun.sync.audit import Finding
from ddprun.sync.buffers import BufferSync, agree
from ddprun.sync.carrier import Carrier
from ddprun.sync.policy import Policy, Together
from ddprun.telemetry.clock import Clock, StreamClock, clock_for
from ddprun.telemetry.events import event_log
from ddprun.telemetry.gather import Records
from ddprun.telemetry.ledger import Ledger
from ddprun.telemetry.progress import Screen, screen_for
from ddprun.telemetry.stragglers import Stragglers
from ddprun.track.trackers import Trackers
from ddprun_hooks.dispatcher import Dispatcher
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.exchange import Control, Exchange, open_control
from ddprun_hooks.hook import Need
from ddprun_hooks.teams import all_of

_COMPARE_CLOCKS_EVERY_S = 60.0
_STOP, _ASK_EVERY_S = "stop", 1.0


class StopRequest:
    """Notes SIGINT and SIGTERM, after which all ranks stop after the same step, and SIGUSR1, after which all
    take a checkpoint and go on.

    Under a launcher of ddprun's a wish to stop comes as SIGINT; SIGTERM is how torchelastic ends a rank when
    another one has failed, and is left to do so at once.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._checkpoint_wanted = False
        signal.signal(signal.SIGINT, self._note)
        if LAUNCHED not in os.environ:
            signal.signal(signal.SIGTERM, self._note)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._note_checkpoint)

    def take_checkpoint_wish(self) -> bool:
        """Whether a checkpoint was asked for since this was asked last."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint_wanted = True


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
    ledger: Ledger
    screen: Screen
    trackers: Trackers
    events: structlog.typing.FilteringBoundLogger
    model: nn.Module
    """The bare model."""

    ddp: DistributedDataParallel | None
    """The model as backward wants it where gradients are exchanged; None if no stage exchanges any."""

    dispatcher: Dispatcher | None
    """DDP's hook; there if `ddp` is."""

    stacks: Stacks
    """The hooks of each stage."""

    carrier: Carrier
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

    position: Position = field(default_factory=Position)

    mid_stage: Mapping[str, Any] | None = None
    """State from which the stage that runs next goes on."""

    policy: Policy | None = None
    """Of the stage that is running."""

    schedule: LRScheduler | None = None
    """Of the last stage that has begun and takes steps."""

    turns: Turns | None = None
    """With other runs that this one is compared with."""

    clocks_compared_s: float = 0.0
    asked_s: float = 0.0

    def compare_clocks(self) -> None:
        """Measure each rank's clock against rank 0's; called by all ranks together."""
        if isinstance(self.clock, StreamClock):
            self.clock.tie()
        offset, bound = self.exchange.control.clock_offset()
        self.ledger.offset_us = offset
        measured = self.exchange.control.gather([offset, bound], "clock offsets")
        self.events.info(
            "clock_offsets",
            offset_us=[round(value, 1) for value in measured[:, 0].tolist()],
            error_us=[round(value, 1) for value in measured[:, 1].tolist()],
        )
        self.clocks_compared_s = time.monotonic()

    def stop_is_known(self) -> bool:
        """Whether this rank is to stop, or has heard within the last second that another one is: for ranks
        that exchange nothing else.
        """
        if self.stop.wanted:
            with self.ranks.asking():
                self.ranks.store.set(_STOP, "")
            return True
        if time.monotonic() - self.asked_s < _ASK_EVERY_S:
            return False
        self.asked_s = time.monotonic()
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


def open_session(
    loaded: Loaded, run_dir: Path, ranks: Ranks, place: Place, stop: StopRequest, token: str = "0"
) -> Session:
    """Build everything, then freeze the bucket layout.

    1. seed; model, data, loss, optimizer, hooks: what cannot be had is told before anything is exchanged
    2. process groups, all of them; parameters and buffers of rank 0 for all
    3. forward passes that leave no trace, to see what buffers do
    4. if some stage exchanges gradients: DDP around the model, the dispatcher in it, and throw-away backward
       passes until DDP's buckets are as they stay
    5. seed again, each rank apart

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    pipeline, device = loaded.pipeline, place.device
    ranks.watch.turn(b"building")
    make_folder_importable(loaded.folder)
    seeding.make_deterministic(device)
    seeding.seed_everything(pipeline.seed)
    precision = Precision(pipeline.precision, device)
    model = build.build_model(loaded).to(device=device, dtype=precision.parameter_dtype)
    data = build.build_data(loaded)
    check_trackers(loaded)
    objective = Objective(loaded, build.build_loss(loaded, device))
    optimizer = build.build_optimizer(loaded, model)
    optimizer_settings = {
        stage.index: build.optimizer_settings(loaded, stage, model, optimizer)
        for stage in pipeline.stages
        if isinstance(stage, StepStage)
    }
    stacks = open_stacks(loaded)
    feed = _open_feed(loaded, data.train, ranks, device.type == "cuda")
    policies.check_policies(loaded, model, ranks.size)

    timeout = ranks.timeout
    control = open_control(timeout, ranks.watch)
    control.agree("the pipeline", loaded.digest())
    control.agree(
        "the model", repr([(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()])
    )
    exchange = _open_exchange(loaded, control, ranks, place, stacks, timeout)
    exchange.broadcast([*model.parameters(), *model.buffers()], source=0)

    records = Records(run_dir, control, ranks.tell_all)
    screen = screen_for(ranks.rank, loaded.secrets.redact)
    events = event_log(
        records.writer if ranks.rank == 0 else None, loaded.secrets.redact_all, rank=ranks.rank
    )
    trackers = open_trackers(loaded, run_dir, screen, events, rank=ranks.rank)
    clock = clock_for(device)
    timings = pipeline.timings
    ledger = Ledger(
        clock=clock,
        control=control,
        writer=records.writer,
        every=timings.every,
        stragglers=Stragglers(timings.straggler_window, timings.straggler_over)
        if control.rank == 0
        else None,
        observe=partial(pass_on, trackers) if control.rank == 0 and pipeline.track else None,
    )
    carrier = Carrier(exchange, ledger, pipeline.ddp.bucket_cap_mb * 2**20)
    wanted = [pipeline.buffers, *(stage.effective(pipeline).buffers for stage in pipeline.step_stages())]
    automatic = any(setting.when == "auto" for setting in wanted)
    ranks.watch.turn(b"warm-up passes")
    verdict = look_at_buffers(model, objective, precision, feed, automatic=automatic)
    buffers = BufferSync(model, carrier, agree(verdict, model, control), pipeline.buffers)
    ddp = dispatcher = None
    if any(stage.effective(pipeline).gradients for stage in pipeline.train_stages()):
        ddp = wrap(model, pipeline.ddp, device)
        dispatcher = Dispatcher(ddp, exchange.gradients, stacks.first)
        freeze_layout(
            ddp,
            dispatcher,
            objective,
            precision,
            feed,
            static_graph=pipeline.ddp.static_graph,
            meet=lambda: control.barrier("freezing the bucket layout"),
        )
    seeding.seed_everything(pipeline.seed + ranks.rank)

    session = Session(
        loaded=loaded,
        run_dir=run_dir,
        ranks=ranks,
        place=place,
        host_count=None,
        stop=stop,
        exchange=exchange,
        records=records,
        clock=clock,
        ledger=ledger,
        screen=screen,
        events=events,
        trackers=trackers,
        model=model,
        ddp=ddp,
        dispatcher=dispatcher,
        stacks=stacks,
        carrier=carrier,
        buffers=buffers,
        optimizer=optimizer,
        optimizer_settings=optimizer_settings,
        precision=precision,
        objective=objective,
        feed=feed,
        held_out=data.evaluate,
        checkpoints=Checkpoints(loaded, run_dir, ranks, records, token),
    )
    session.checkpoints.check(session)
    session.compare_clocks()
    return session


def _open_exchange(
    loaded: Loaded, control: Control, ranks: Ranks, place: Place, stacks: Stacks, timeout: timedelta
) -> Exchange:
    """Make the process groups that the stages need."""
    chosen = [
        (stage.effective(loaded.pipeline), stacks.all_ranks[stage.index], stacks.inside_hosts[stage.index])
        for stage in loaded.pipeline.step_stages()
    ]
    try:
        return Exchange.open(
            control=control,
            device=place.device,
            backend=place.backend,
            hosts=ranks.hosts,
            local_sizes=ranks.local_sizes,
            gradients=all_of(policies.gradient_needs(*one) for one in chosen),
            deltas=all_of(policies.delta_needs(*one) for one in chosen),
            plain=all_of([{Need("world"): 1}, *(policies.plain_needs(one[0]) for one in chosen)]),
            timeout=timeout,
            watch=ranks.watch,
        )
    except HookSetupError as error:
        at = "sync" if "two levels" in str(error) and not _has_hierarchical_hook(loaded) else "hooks"
        raise PipelineError([loaded.fault(at, str(error))]) from None


def _has_hierarchical_hook(loaded: Loaded) -> bool:
    stages = loaded.pipeline.step_stages()
    return any(hook.name == "hierarchical" for s in stages for hook in s.effective(loaded.pipeline).hooks)


def _open_feed(loaded: Loaded, dataset: Any, ranks: Ranks, pin: bool) -> Feed:
    loader = loaded.pipeline.loader
    try:
        return Feed(
            dataset,
            batch_size=loader.batch_size,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
            workers=loader.workers,
            seed=loaded.pipeline.seed,
            rank=ranks.rank,
            ranks=ranks.size,
            pin=pin,
        )
    except ValueError as error:
        raise PipelineError([loaded.fault("data", str(error))]) from None
