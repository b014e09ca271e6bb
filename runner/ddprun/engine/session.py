"""Everything that the stages of one run share, built once, in an order that all ranks follow."""

import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddprun.engine import build, seeding
from ddprun.engine.data import Feed
from ddprun.engine.objective import Objective
from ddprun.engine.place import Place
from ddprun.engine.precision import Precision
from ddprun.engine.ranks import Ranks
from ddprun.spec import Loaded, PipelineError, Train
from ddprun.telemetry.clock import Clock, StreamClock, clock_for
from ddprun.telemetry.events import event_log
from ddprun.telemetry.gather import Records
from ddprun.telemetry.ledger import Ledger
from ddprun.telemetry.progress import Screen, screen_for
from ddprun_hooks.dispatcher import Dispatcher
from ddprun_hooks.errors import HookSetupError
from ddprun_hooks.exchange import Exchange, open_control
from ddprun_hooks.stack import Stack

_COMPARE_CLOCKS_EVERY_S = 60.0


class StopRequest:
    """Notes SIGINT; the training loop lets all ranks stop after the same step."""

    def __init__(self) -> None:
        self.wanted = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


@dataclass(slots=True)
class Session:
    """What a stage works on."""

    loaded: Loaded
    run_dir: Path
    ranks: Ranks
    place: Place
    stop: StopRequest
    exchange: Exchange
    records: Records
    clock: Clock
    ledger: Ledger
    screen: Screen
    events: structlog.typing.FilteringBoundLogger
    model: nn.Module
    """The bare model."""

    ddp: DistributedDataParallel
    dispatcher: Dispatcher
    stacks: dict[int, Stack]
    """The hooks of each train stage, by its place in `stages`."""

    optimizer: Optimizer
    optimizer_settings: list[dict[str, Any]]
    """The optimizer's settings as the file has them, for each parameter group."""

    precision: Precision
    objective: Objective
    feed: Feed
    held_out: Any
    """The dataset to evaluate on; None if there is none."""

    step: int = 0
    """Optimizer steps done."""

    loss: float | None = None
    """Mean over ranks of the newest step whose loss is known."""

    metrics: dict[str, float] | None = None
    """What the last evaluate stage measured."""

    where: str = "before the first stage"
    """For an error's message."""

    clocks_compared_s: float = 0.0

    def compare_clocks(self) -> None:
        """Measure each rank's clock against rank 0's; called by all ranks together."""
        if isinstance(self.clock, StreamClock):
            self.clock.tie()
        offset, bound = self.exchange.control.clock_offset()
        self.ledger.offset_us = offset
        measured = self.exchange.control.gather([offset, bound])
        self.events.info(
            "clock_offsets",
            offset_us=[round(value, 1) for value in measured[:, 0].tolist()],
            error_us=[round(value, 1) for value in measured[:, 1].tolist()],
        )
        self.clocks_compared_s = time.monotonic()

    @property
    def clocks_are_old(self) -> bool:
        """The offsets were measured a while ago."""
        return time.monotonic() - self.clocks_compared_s > _COMPARE_CLOCKS_EVERY_S

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers (BatchNorm's running statistics, say), as DDP does in forward."""
        buffers = list(self.model.buffers())
        if buffers:
            self.exchange.broadcast(buffers, source=0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next step on this rank."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "feed": self.feed.state_dict(),
            "hooks": {str(index): stack.state_dict() for index, stack in self.stacks.items()},
            "generators": seeding.generator_state(self.place.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        self.feed.load_state_dict(state["feed"])
        for index, hooks in state["hooks"].items():
            self.stacks[int(index)].load_state_dict(hooks)
        seeding.restore_generators(state["generators"], self.place.device)


def open_session(loaded: Loaded, run_dir: Path, ranks: Ranks, place: Place, stop: StopRequest) -> Session:
    """Build everything, then freeze the bucket layout.

    1. seed; model, data, loss, optimizer, hooks: what cannot be had is told before anything is exchanged
    2. process groups, all of them
    3. DDP around the model, the dispatcher in it
    4. throw-away backward passes until DDP's buckets are as they stay
    5. seed again, each rank apart

    Raises:
        PipelineError: something in the file that only a run can see.
    """
    pipeline, device = loaded.pipeline, place.device
    build.make_folder_importable(loaded.path)
    seeding.make_deterministic(device)
    seeding.seed_everything(pipeline.seed)
    precision = Precision(pipeline.precision, device)
    model = build.build_model(loaded).to(device=device, dtype=precision.parameter_dtype)
    data = build.build_data(loaded)
    objective = Objective(loaded, build.build_loss(loaded, device))
    optimizer = build.build_optimizer(loaded, model)
    stacks = {
        stage.index: build.build_stack(loaded, _hooks_path(stage), stage.effective(pipeline).hooks)
        for stage in pipeline.stages
        if isinstance(stage, Train)
    }
    feed = _open_feed(loaded, data.train, ranks, device.type == "cuda")

    timeout = timedelta(seconds=pipeline.launch.timeout_s)
    control = open_control(timeout)
    control.agree("the pipeline", loaded.digest())
    try:
        exchange = Exchange.open(
            control=control,
            device=device,
            backend=place.backend,
            hosts=ranks.hosts,
            local_sizes=ranks.local_sizes,
            stacks=list(stacks.values()) or [Stack([])],
            timeout=timeout,
        )
    except HookSetupError as error:
        raise PipelineError([loaded.fault("hooks", str(error))]) from None
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=pipeline.ddp.bucket_cap_mb,
        gradient_as_bucket_view=pipeline.ddp.gradient_as_bucket_view,
        static_graph=pipeline.ddp.static_graph,
        find_unused_parameters=pipeline.ddp.find_unused_parameters,
    )
    dispatcher = Dispatcher(ddp, exchange.gradients, next(iter(stacks.values()), Stack([])))
    freeze_layout(ddp, dispatcher, objective, precision, feed, static_graph=pipeline.ddp.static_graph)
    seeding.seed_everything(pipeline.seed + ranks.rank)

    records = Records(run_dir, exchange.control, ranks.store)
    clock = clock_for(device)
    ledger = Ledger(
        clock=clock, control=exchange.control, writer=records.writer, every=pipeline.timings.every
    )
    ledger.bucket_params = {b.index: [param.name for param in b.params] for b in dispatcher.layout}
    session = Session(
        loaded=loaded,
        run_dir=run_dir,
        ranks=ranks,
        place=place,
        stop=stop,
        exchange=exchange,
        records=records,
        clock=clock,
        ledger=ledger,
        screen=screen_for(ranks.rank),
        events=event_log(records.writer if ranks.rank == 0 else None, rank=ranks.rank),
        model=model,
        ddp=ddp,
        dispatcher=dispatcher,
        stacks=stacks,
        optimizer=optimizer,
        optimizer_settings=[
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        precision=precision,
        objective=objective,
        feed=feed,
        held_out=data.evaluate,
    )
    session.compare_clocks()
    return session


def freeze_layout(
    ddp: DistributedDataParallel,
    dispatcher: Dispatcher,
    objective: Objective,
    precision: Precision,
    feed: Feed,
    *,
    static_graph: bool,
) -> None:
    """Run backward passes that leave no trace until DDP's buckets are as they stay.

    DDP starts with one layout and rebuilds it after its first backward pass, with `static_graph` one pass
    later. Were step 1 to run in the first layout, a resumed run would sum its first step in another order
    than the unbroken run did, and end with other bits.
    """
    module = ddp.module
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with seeding.generators_kept(precision.device), dispatcher.learning_layout():
        content = precision.admit(feed.first_batch())
        module.train()
        for _ in range(3 if static_graph else 2):
            with precision.computing():
                loss = objective(ddp, content).loss
            loss.backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
    for buffer, before in buffers:
        buffer.copy_(before)


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


def _hooks_path(stage: Train) -> str:
    return f"{stage.path}.hooks" if "hooks" in stage.model_fields_set else "hooks"
