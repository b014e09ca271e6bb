"""Builds what the stages of one run share, once, in an order that all ranks follow."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger as BoundLogger
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddprun.config import DataPair, Loaded, PipelineError, StepStage
from ddprun.engine import build, seeding
from ddprun.engine.checkpoints import check_state, open_checkpoints
from ddprun.engine.clocks import ClockOffsets
from ddprun.engine.data import Feed
from ddprun.engine.finite import FiniteCheck
from ddprun.engine.objective import Objective
from ddprun.engine.precision import Precision
from ddprun.engine.reporter import Reporter
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.samples import HeldOut, differing, shards_itself
from ddprun.engine.session import RunState, Runtime, Session
from ddprun.engine.stacks import Stacks, open_stacks
from ddprun.engine.stop import StopRequest
from ddprun.engine.tracking import check_trackers, fail_when_ended, open_trackers, pass_on
from ddprun.engine.warmup import freeze_layout, look_at_buffers
from ddprun.host import shared_memory
from ddprun.host.device import Place
from ddprun.host.import_path import make_folder_importable
from ddprun.parallel.ddp import DdpReplica
from ddprun.parallel.ranks import Ranks
from ddprun.screen import say
from ddprun.sync.buffers import BufferSync, agree
from ddprun.sync.exchanger import ParameterExchanger
from ddprun.sync.groups import QueueRequirements, requirements
from ddprun.telemetry.clock import GradientTimes, clock_for
from ddprun.telemetry.profile import Profiler
from ddprun.telemetry.progress import Screen, screen_for
from ddprun.telemetry.recorder import StepRecorder
from ddprun.telemetry.stragglers import Stragglers
from ddprun.telemetry.writer import RecordFiles, event_log
from ddprun_hooks.comm.control import Control, open_control
from ddprun_hooks.comm.exchange import Exchange
from ddprun_hooks.errors import HookSetupError


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
    ranks.watchdog.turn(b"building")
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
    build.check_sync(loaded, model, ranks.size)

    timeout = ranks.timeout
    control = open_control(timeout, ranks.watchdog)
    control.agree("the pipeline", loaded.digest())
    control.agree(
        "the model", repr([(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()])
    )
    exchange = _open_exchange(loaded, control, ranks, place, stacks, timeout)
    exchange.broadcast([*model.parameters(), *model.buffers()], source=0)

    try:
        records = RecordFiles(run_dir, control, ranks.tell_all)
    except OSError as error:
        raise RunFolderError(f"cannot write into the run folder {run_dir}: {error.strerror}") from None
    screen = screen_for(ranks.rank, loaded.secrets.redact)
    events = event_log(
        records.writer if ranks.rank == 0 else None, loaded.secrets.redact_all, rank=ranks.rank
    )
    clock = clock_for(device)
    timings = pipeline.timings
    recorder = StepRecorder(
        clock=clock,
        control=control,
        writer=records.writer,
        every=timings.every,
        stragglers=Stragglers(timings.straggler_window, timings.straggler_over)
        if control.rank == 0
        else None,
    )
    exchanger = ParameterExchanger(exchange, recorder, pipeline.ddp.bucket_cap_mb * 2**20)
    wanted = [pipeline.buffers, *(stage.effective(pipeline).buffers for stage in pipeline.step_stages())]
    automatic = any(setting.when == "auto" for setting in wanted)
    ranks.watchdog.turn(b"warm-up passes")
    _compare_data(feed, control, screen, events)
    verdict = look_at_buffers(model, objective, precision, feed, automatic=automatic)
    buffers = BufferSync(model, exchanger, agree(verdict, model, control), pipeline.buffers)
    replica = None
    if any(stage.effective(pipeline).gradients for stage in pipeline.train_stages()):
        replica = DdpReplica(model, pipeline.ddp, device, exchange.gradients, stacks.first)
        meet = partial(control.barrier, "freezing the bucket layout")
        freeze_layout(replica, objective, precision, feed, meet)
        if not clock.lag:  # else marks of the step before would have to be waited for
            replica.dispatcher.meanwhile = recorder.deferred.do_some
    _check_room(loaded, feed, ranks, place.backend)
    seeding.seed_everything(pipeline.seed + ranks.rank)
    finite = FiniteCheck(model)
    clock_offsets = ClockOffsets(clock, control, recorder, events)
    reporter = Reporter(screen, events, recorder)
    runtime = Runtime(
        loaded=loaded,
        run_dir=run_dir,
        ranks=ranks,
        device=device,
        backend=place.backend,
        stop=stop,
        exchange=exchange,
        exchanger=exchanger,
        records=records,
        clock=clock,
        clock_offsets=clock_offsets,
        recorder=recorder,
        model=model,
        replica=replica,
        stacks=stacks,
        buffers=buffers,
        optimizer=optimizer,
        optimizer_settings=optimizer_settings,
        precision=precision,
        objective=objective,
        feed=feed,
        held_out=HeldOut(data.evaluate),
        checkpoints=open_checkpoints(loaded, run_dir, ranks, records, token, finite.infinite_at_first),
        finite=finite,
        gradients=GradientTimes(model, clock.mark) if timings.gradients else None,
        profiler=Profiler(timings.profile, records.writer, ranks.rank) if timings.profile else None,
    )
    session = Session(runtime, RunState(), reporter)
    check_state(session)
    clock_offsets.measure()
    if ranks.rank == 0 and pipeline.track:  # last, so that whatever fails before leaves none open
        reporter.trackers = open_trackers(loaded, run_dir, screen, events)
        fail_when_ended(reporter.trackers)
        recorder.observe = partial(pass_on, reporter.trackers)
    return session


def _check_room(loaded: Loaded, feed: Feed, ranks: Ranks, backend: str) -> None:
    """Whether loading processes and NCCL have room in `/dev/shm` for what they hand over.

    Raises:
        PipelineError: loading processes cannot even be started.
    """
    workers, here = loaded.pipeline.loader.workers, ranks.environment
    missing = (
        shared_memory.nccl_shortage(here.local_world_size, shared_memory.room())
        if backend == "nccl"
        else None
    )
    if workers:
        sizes = [leaf.nbytes for leaf in tree_leaves(feed.first_batch()) if isinstance(leaf, Tensor)]
        missing = (
            shared_memory.shortage(here.local_world_size, workers, sizes, shared_memory.room()) or missing
        )
    if missing is None:
        return
    told = f"{ranks.host}: {missing.told}"
    if missing.certain:
        raise PipelineError([loaded.fault("loader.workers", told, f"workers: 0, or {shared_memory.REMEDY}")])
    if here.local_rank == 0:
        say(f"ddprun: warning: {told}: {shared_memory.REMEDY}")


def _open_exchange(
    loaded: Loaded, control: Control, ranks: Ranks, place: Place, stacks: Stacks, timeout: timedelta
) -> Exchange:
    """Make the process groups that the stages need."""
    needed = QueueRequirements.of_stages(
        requirements(
            stage.effective(loaded.pipeline).plan,
            stacks.all_ranks[stage.index],
            stacks.within_hosts[stage.index],
            ranks.size,
        )
        for stage in loaded.pipeline.step_stages()
    )
    try:
        return Exchange.open(
            control=control,
            device=place.device,
            backend=place.backend,
            hosts=ranks.hosts,
            local_sizes=ranks.local_sizes,
            gradients=needed.gradients,
            deltas=needed.deltas,
            plain=needed.plain,
            timeout=timeout,
            observer=ranks.watchdog,
        )
    except HookSetupError as error:
        at = "sync" if "two levels" in str(error) and not _has_hierarchical_hook(loaded) else "hooks"
        raise PipelineError([loaded.fault(at, str(error))]) from None


def _has_hierarchical_hook(loaded: Loaded) -> bool:
    stages = loaded.pipeline.step_stages()
    return any(hook.name == "hierarchical" for s in stages for hook in s.effective(loaded.pipeline).hooks)


def _open_feed(loaded: Loaded, dataset: Any, ranks: Ranks, pin: bool) -> Feed:
    loader, name = loaded.pipeline.loader, loaded.pipeline.train_data().name

    def refuse(problem: str, allowed: str | None) -> PipelineError:
        return PipelineError([loaded.fault(_path_of_data(loaded), f'"{name}": {problem}', allowed)])

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
            sharded=loader.sharded,
            refuse=refuse,
        )
    except ValueError as error:
        raise PipelineError([loaded.fault("data", str(error))]) from None


def _path_of_data(loaded: Loaded) -> str:
    return "data.train" if isinstance(loaded.pipeline.data, DataPair) else "data"


def _compare_data(feed: Feed, control: Control, screen: Screen, events: BoundLogger) -> None:
    """Say if ranks read different samples, though each takes its share of them; or if they read the same ones
    from a data set that is said to shard itself.
    """

    def tell(text: str) -> None:
        events.warning("data_lost")
        screen.note(f"data: {text}")

    feed.tell = tell
    odd = feed.meet(control)
    if feed.ranks == 1:
        return
    if feed.sharded and not odd:
        events.warning("data_not_sharded")
        screen.note(
            "data: loader.sharded is true, but all ranks read the same first samples. If the data set does "
            f"not shard itself, each sample is used {feed.ranks} times in an epoch: remove loader.sharded"
        )
    if feed.sharded or not odd:
        return
    how = shards_itself(feed.dataset)
    events.warning("data_differs", ranks=odd, sharded_by=how)
    screen.note(f"data: {differing(odd, feed.ranks, how)}")
