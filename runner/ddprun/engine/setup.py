"""Builds what the stages of one run share, once, in an order that all ranks follow."""

import time
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ddprun.config import LoadedPipeline
from ddprun.engine import build, compiling, seeding
from ddprun.engine.balance import batchnorm_warning, build_share_balancers
from ddprun.engine.checkpoint_state import (
    check_state_storable,
    find_checkpoint_locations,
    open_checkpoint_writer,
)
from ddprun.engine.data import Feed
from ddprun.engine.feeds import Feeds, build_training_feeds, check_epoch_end_evaluations, check_warmups
from ddprun.engine.fingerprints import DatasetFingerprints
from ddprun.engine.hook_stacks import HookStacksByStage, build_hook_stacks
from ddprun.engine.interrupts import SignalRequests
from ddprun.engine.nonfinite import FiniteCheck
from ddprun.engine.objective import (
    Objective,
    Precision,
    check_last_batch,
    find_buffer_use,
    freeze_bucket_layout,
    initialize_lazy_parameters,
    map_tensors,
    warmup_pass,
)
from ddprun.engine.optimizers import build_optimizer, check_closure, settings_of_stages, try_schedules
from ddprun.engine.reporter import Reporter, check_tracker_packages, open_trackers
from ddprun.engine.run_folder import check_writable
from ddprun.engine.session import RunComponents, RunState, Session
from ddprun.engine.turns import Turns, build_turns
from ddprun.engine.weights import WeightEma, load_initial_weights, optimizer_has_train_eval
from ddprun.host import dev_shm, rank_files
from ddprun.host.code_folders import add_import_folder
from ddprun.parallel.ddp import DdpReplica
from ddprun.parallel.ranks import Ranks
from ddprun.standard_streams import print_stderr
from ddprun.sync.buffers import BufferSync, FrozenParameterSync, merge_buffer_use
from ddprun.sync.exchanger import TensorExchanger
from ddprun.sync.plan import ReplicaConsistency
from ddprun.sync.synchronizer import GroupsByQueue, queue_requirements
from ddprun.telemetry.clock import GradientTimes, clock_for
from ddprun.telemetry.profile import Profiler
from ddprun.telemetry.progress import screen_for
from ddprun.telemetry.recorder import StepRecorder
from ddprun.telemetry.stragglers import StragglerDetector
from ddprun.telemetry.writer import RecordCollector, log_event
from ddprun.track import RunInfo
from ddprun_hooks.comm.control_channel import ControlChannel, open_control_channel
from ddprun_hooks.comm.groups import check_placement, check_shared_memory_device
from ddprun_hooks.comm_context import CommContext
from ddprun_hooks.errors import HookSetupError, format_ranks

_BLOCKS_HINT = "write compile: false, or name other modules in blocks"


def build_session(
    loaded: LoadedPipeline,
    run_dir: Path,
    ranks: Ranks,
    device: torch.device,
    backend: str,
    signals: SignalRequests,
    token: str = "0",
    leaders: tuple[int, ...] = (),
    *,
    begun: bool = False,
) -> Session:
    """Build everything, then freeze the bucket layout; raises PipelineError for what only a run can see.
    `token` and `leaders`: of `agree_on_folder` and `find_folder_leaders`. `begun`: the run was begun before,
    maybe on another number of ranks, with which its stages had other lengths.

    1. seed; model, data, loss, optimizer, hooks: what is missing is reported before anything is exchanged
    2. process groups, all of them; parameters and buffers of rank 0 for all
    3. forward passes that leave no trace, to see what buffers do; passes that compile the model
    4. if some stage exchanges gradients: DDP around the model, the dispatcher in it, and throw-away backward
       passes until DDP's buckets are as they stay
    5. seed again, each rank differently
    """
    pipeline, started_in = loaded.pipeline, Path.cwd()
    shown_dir, run_dir = run_dir, run_dir.absolute()
    ranks.watchdog.set_phase(b"building")
    add_import_folder(loaded.folder)
    seeding.make_deterministic(device, strict=pipeline.deterministic)
    seeding.seed_everything(pipeline.seed)
    if pipeline.sync_batchnorm and device.type == "cpu":
        text = "torch's SyncBatchNorm works on GPUs only, and the ranks run on CPUs"
        raise loaded.error("sync_batchnorm", text, "remove it, or run on GPUs")
    precision = Precision(pipeline.precision, device, channels_last=pipeline.channels_last)
    model = alone = build.move_and_convert_model(
        loaded, build.build_model(loaded), device, precision.parameter_dtype
    )
    train_data, held_out = build.build_datasets(loaded)
    stage_held_out = build.build_stage_held_out(loaded)
    check_tracker_packages(loaded, pipeline.track)
    compiling.check_dynamo_config(loaded)
    loss = build.build_loss(loaded)
    model = build.join_loss_and_freeze(loaded, model, loss, device, precision.parameter_dtype)
    weight, transform = build.build_batch_weight_function(loaded), build.build_transform(loaded)
    objective = Objective(loaded, loss, precision, weight, transform)
    pin = device.type == "cuda"
    feeds = build_training_feeds(loaded, train_data, rank=ranks.rank, world_size=ranks.size, pin=pin)
    check_epoch_end_evaluations(loaded, feeds)
    balances = build_share_balancers(loaded, feeds, ranks)
    feed = feeds.main
    turns = build_turns(loaded, model)
    initialize_lazy_parameters(model, objective, feed, turns)
    if ranks.rank == 0:
        load_initial_weights(loaded, alone)  # from which all others get them
    optimizer = build_optimizer(loaded, model, turns)
    optimizer_settings = settings_of_stages(loaded, model, turns, optimizer)
    check_closure(loaded, optimizer)
    stacks = build_hook_stacks(loaded)
    signals.reinstall_handlers()  # after the imports; again before step 1
    build.check_sync_fits_run(loaded, turns, ranks.size)

    control = open_control_channel(ranks.timeout, ranks.watchdog)
    shapes = [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    control.check_agreement("the model", repr(shapes))
    exchange = _open_exchange(loaded, control, ranks, device, backend, stacks)
    exchange.broadcast([*model.parameters(), *model.buffers()], source=0)

    if ranks.rank == 0:
        check_writable(run_dir)  # what was built may have filled the disk
    leaders = leaders or (0,) * ranks.size
    # A rank that fails has no time to clear up: what is there goes with the launch.
    remote = [rank for rank, leader in enumerate(leaders) if leader]
    records = RecordCollector(run_dir, control, remote, rank_files.attempt_folder())
    screen = screen_for(ranks.rank, loaded.secrets.redact)
    clock, timings = clock_for(device), pipeline.timings
    recorder = StepRecorder(
        clock=clock,
        control=control,
        writer=records.writer,
        every=timings.every,
        stragglers=StragglerDetector(timings.straggler_window, timings.straggler_over),
    )
    reporter = Reporter(screen, recorder, records.writer, loaded.secrets.redact_all)
    exchanger = TensorExchanger(exchange, recorder, pipeline.ddp.largest_cap_bytes)
    ranks.watchdog.set_phase(b"passes before step 1")
    for name, each in feeds.by_name().items():
        _report_data_differences(each, name, control, reporter)
    if not begun:
        check_warmups(loaded, feeds)
    schedules = try_schedules(loaded, feeds, optimizer, optimizer_settings, begun=begun)
    if balances[None].shares and (warning := batchnorm_warning(model)):
        reporter.note(warning)
    fingerprints = DatasetFingerprints(feeds, held_out, stage_held_out, rank=ranks.rank)
    buffer_use = find_buffer_use(model, objective, feed, turns, automatic=pipeline.has_automatic_buffers)
    buffers = BufferSync(model, exchanger, merge_buffer_use(buffer_use, model, control), pipeline.buffers)
    for exhausted, stages in feeds.reaching_epoch_end(pipeline):
        names = dict.fromkeys(turn.name for stage in stages for turn in turns.by_stage[stage])
        check_last_batch(loaded, model, objective, exhausted, names, control)
    compiler = None
    if pipeline.compile is not None:
        ranks.watchdog.set_phase(b"compiling")
        compiler = _compile_and_warm_up(loaded, model, objective, feeds, turns, ranks, reporter)
        ranks.watchdog.set_phase(b"warm-up passes")
    barrier = partial(control.barrier, "freezing the bucket layout")
    for turn in turns.iterate_with_trainable(turns.exchanging_turns(loaded)):
        first = len(turns.buckets)
        replica = DdpReplica(model, pipeline.ddp, device, exchange.gradient_queue, stacks.first_stack, first)
        freeze_bucket_layout(replica, objective, feed, turn.name, barrier)
        if not clock.lag_steps:  # else marks of the step before would have to be waited for
            replica.dispatcher.on_last_bucket_sent = recorder.do_some_deferred
        turn.replica = replica
    # No pass has called the model with these yet, so the numbers beside their losses are not known.
    if not_called := [name for name in turns.names if name not in objective.called]:
        with seeding.preserve_state(device, model, objective.loss), torch.enable_grad():
            model.train()
            for turn_name in not_called:
                objective(model, objective.prepare_batch(feed.first_batch()), turn_name)
    of_ranks = ranks.gather("numbers beside the loss", list(objective.value_names))
    recorder.value_names = tuple(dict.fromkeys(chain.from_iterable(of_ranks)))
    _check_shared_memory(loaded, feeds, ranks, backend)
    seeding.seed_everything(pipeline.seed + ranks.rank)
    runtime = RunComponents(
        loaded=loaded,
        run_dir=run_dir,
        shown_dir=shown_dir,
        ranks=ranks,
        device=device,
        backend=backend,
        signals=signals,
        exchange=exchange,
        exchanger=exchanger,
        records=records,
        clock=clock,
        recorder=recorder,
        model=model,
        turns=turns,
        stacks=stacks,
        buffers=buffers,
        frozen=FrozenParameterSync(model, exchanger, reporter.report_frozen_differ),
        optimizer=optimizer,
        optimizer_settings=optimizer_settings,
        ema=None if pipeline.ema is None else WeightEma(model, pipeline.ema),
        precision=precision,
        objective=objective,
        feeds=feeds,
        share_balancers=balances,
        fingerprints=fingerprints,
        held_out=held_out,
        stage_held_out=stage_held_out,
        finite_check=FiniteCheck(model, control, recorder, reporter.report_nonfinite),
        gradient_times=GradientTimes(model, clock.mark) if timings.gradients else None,
        profiler=Profiler(timings.profile or (0, -1), records.writer, ranks.rank),
        compiler=compiler,
    )
    runtime.locations = find_checkpoint_locations(runtime, leaders)
    for location in runtime.locations if pipeline.checkpoint.keep else ():
        writer = open_checkpoint_writer(runtime, location, token)
        if location.in_memory:
            runtime.memory_checkpoints = writer
        else:
            runtime.checkpoints = writer
    if pipeline.checkpoint.memory_every and pipeline.checkpoint.keep and runtime.memory_checkpoints is None:
        text = "it needs max_restarts, ddprun as the launcher, and /dev/shm on each host"
        reporter.note(f"checkpoint.memory_every is not used: {text}")
    replicas = ReplicaConsistency(optimizer_is_read=optimizer_has_train_eval(optimizer))
    session = Session(runtime, RunState(replicas=replicas), reporter)
    check_state_storable(session)
    for path, schedule in schedules.items() if runtime.checkpoints is not None else ():
        check_state_storable(session, {"schedule": schedule.state_dict()}, path)
    log_event(reporter.events, recorder.compare_clocks())
    if ranks.rank == 0 and pipeline.track:  # last, so that whatever fails before leaves none open
        run = RunInfo(pipeline.name, run_dir, loaded.as_dict(), started_in)
        open_trackers(loaded, pipeline.track, run, reporter, recorder)
    return session


def _compile_and_warm_up(
    loaded: LoadedPipeline,
    model: nn.Module,
    objective: Objective,
    feeds: Feeds,
    turns: Turns,
    ranks: Ranks,
    reporter: Reporter,
) -> compiling.GraphCompiler:
    """Compile the model, by passes as its stages take them, so that no step's time holds that."""
    stages_with_steps = loaded.pipeline.stages_with_steps()
    passes = dict.fromkeys(
        (feeds.for_stage(stage.index), turn, stage.name == "train")
        for stage in stages_with_steps
        for turn in turns.by_stage[stage.index]
    )

    def run_passes() -> None:
        for feed, turn, backward in passes:
            turns.set_trainable(turn.params)
            warmup_pass(model, objective, feed, turn.name, backward=backward)
        turns.set_trainable(None)

    run_passes()  # what fails here is the model's own
    started = time.monotonic()
    compiler, blocks = compiling.compile_model(loaded, model, ranks_here=ranks.environment.local_world_size)
    what = compiling.describe_blocks(blocks)
    reporter.note(f"compiling {what}: this may take minutes")
    try:
        run_passes()
    except Exception as error:
        if (compile_error := compiling.as_compile_error(loaded, error, compiling=True)) is not None:
            raise compile_error from error
        raise
    if passes and not compiler.graphs:
        why = "; ".join(one.reason for one in compiler.breaks) or "torch gives no reason"
        problem = f"torch.compile found nothing to compile in {what}: {why}"
        raise loaded.error("compile", problem, _BLOCKS_HINT)
    reporter.report_compilation(compiler, what, list(blocks), time.monotonic() - started)
    return compiler


def _check_shared_memory(loaded: LoadedPipeline, feeds: Feeds, ranks: Ranks, backend: str) -> None:
    """Warn of a `/dev/shm` too small for loading processes or NCCL; a PipelineError if none can start."""
    workers, here, sizes = loaded.pipeline.loader.workers, ranks.environment, list[int]()
    if workers:
        sizes = max(
            map(_batch_tensor_bytes, feeds.by_name().values()), key=sum
        )  # stages come one after the other
    shortage = dev_shm.find_shm_shortage(
        here.local_world_size, workers, sizes, dev_shm.shm_space(), nccl=backend == "nccl"
    )
    if shortage is None:
        return
    text = f"{ranks.host}: {shortage.message}"
    if shortage.is_fatal:
        raise loaded.error("loader.workers", text, f"workers: 0, or {dev_shm.SHM_ADVICE}")
    if here.local_rank == 0:
        print_stderr(f"ddprun: warning: {text}: {dev_shm.SHM_ADVICE}")


def _batch_tensor_bytes(feed: Feed) -> list[int]:
    sizes: list[int] = []

    def note_size(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(feed.first_batch(), note_size)
    return sizes


def _open_exchange(
    loaded: LoadedPipeline,
    control: ControlChannel,
    ranks: Ranks,
    device: torch.device,
    backend: str,
    stacks: HookStacksByStage,
) -> CommContext:
    stages = loaded.pipeline.stages_and_settings()
    all_ranks, in_hosts = stacks.all_ranks, stacks.within_hosts
    needed = GroupsByQueue.for_stages(
        queue_requirements(settings.plan, all_ranks[stage.index], in_hosts[stage.index], ranks.size)
        for stage, settings in stages
    )
    try:
        return CommContext.open(
            control=control,
            device=device,
            backend=backend,
            placement=ranks.placement,
            timeout=ranks.timeout,
            observer=ranks.watchdog,
            **needed._asdict(),
        )
    except HookSetupError as error:
        for stage, _ in stages:
            try:
                check_shared_memory_device(device, all_ranks[stage.index].requirements)
                check_placement(ranks.placement, all_ranks[stage.index].requirements)
            except HookSetupError as misfit:
                raise loaded.error(stage.key_path("hooks"), str(misfit)) from None
        raise loaded.error("sync", str(error)) from None


def _report_data_differences(feed: Feed, name: str, control: ControlChannel, reporter: Reporter) -> None:
    """Report ranks that read other samples of shared data, or the same of data that is to shard itself, and
    samples that loading processes do not get.
    """
    differing = feed.ranks_with_other_samples(control)
    if feed.iterable and feed.loader.workers and not feed.repeats_first_sample():
        reporter.events.warning("data_lost")
        reporter.note(
            f"{name}: read again, it begins with other samples; if it reads on from one source, the first "
            "ones are lost\n"
            "  then write loader: {workers: 0}; if it draws at random, use torch, NumPy or random, which are "
            "seeded"
        )
    if feed.world_size > 1 and feed.sharded and not differing:
        reporter.events.warning("data_not_sharded")
        reporter.note(
            f"{name}: loader.sharded is true, but all ranks read the same first samples. If the data set "
            f"does not shard itself, each sample is used {feed.world_size} times in an epoch: "
            "remove loader.sharded"
        )
    if differing and not feed.sharded:
        reporter.events.warning("data_differs", ranks=differing)
        lost = f"{feed.world_size - 1} of {feed.world_size} samples are never used"
        reporter.note(
            f"{name}: first samples of {format_ranks(differing)} differ from rank 0's\n"
            f"  if the data set shards itself by rank, {lost}: write loader: {{sharded: true}}\n"
            "  if it draws at random, draw from torch, NumPy or random, which are seeded"
        )
