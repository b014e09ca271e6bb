"""What each rank runs: join the others, build everything, run the stages, report the outcome."""

import gc
import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddprun import DONE, FAILED, INTERRUPTED, LAUNCHED, __version__, screen
from ddprun.config import AverageStage, BroadcastStage, Evaluate, Forward, Loaded, Save, Stage, Train
from ddprun.engine.compiling import as_fault
from ddprun.engine.evaluate import check_best, evaluate
from ddprun.engine.interrupts import StopRequest, TimeSliceClient
from ddprun.engine.loop import run_stage
from ddprun.engine.outcome import (
    Progress,
    Status,
    finish_run,
    open_watchdog,
    prepare_nccl,
    report_failure,
)
from ddprun.engine.resume import resume
from ddprun.engine.run_folder import agree_on_folder
from ddprun.engine.save import save
from ddprun.engine.session import Session
from ddprun.engine.setup import open_session
from ddprun.engine.stage_run import equalize
from ddprun.engine.state import close_checkpoints, take_checkpoint
from ddprun.host import rank_files
from ddprun.host.device import LaunchFacts, Place, agree_on_backend, device_of, launch_facts
from ddprun.host.processes import cores, die_with_parent
from ddprun.parallel.ranks import Environment, Ranks
from ddprun.run_files import Resuming
from ddprun.watchdog.rank_watchdog import GROUPS_LATER_S

_CODES: dict[Status, int] = {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}

_STAGES: dict[type[Stage], Callable[[Session, Any], dict[str, Any]]] = {
    Train: run_stage,
    Forward: run_stage,
    AverageStage: equalize,
    BroadcastStage: equalize,
    Evaluate: evaluate,
    Save: save,
}

_WATCH_ENDS_S = 10.0
_DEFAULTS = (700, 2000)
_YOUNG_THRESHOLD = 5_000
"""Allocations before a collection of the youngest generation; Python's default is 700, or 2000 since 3.13.
Telemetry keeps a few thousand objects for steps whose control messages are under way.
"""


def work(loaded: Loaded, run_dir: Path | None, *, resuming: Resuming = "no") -> int:
    """Run this rank's share of the pipeline; gives the exit code.

    The run's files go to `run_dir`; None makes a new folder under `runs/<name>/`.
    """
    die_with_parent()
    _tune_garbage_collector()
    stop = StopRequest()
    rank_files.keep_pid()
    prepare_nccl(loaded.pipeline.launch.timeout_s)
    progress = Progress()
    environment, timeout_s = Environment.read(), loaded.pipeline.launch.timeout_s
    watchdog = open_watchdog(environment, timeout_s, progress, lambda: ranks)
    ranks = Ranks(environment, timedelta(seconds=timeout_s + GROUPS_LATER_S), watchdog, watchdog.page.path)
    watchdog.start()
    try:
        ranks.connect()
        code = _run(loaded, run_dir, ranks, stop, progress, resuming)
    except BaseException as error:
        # A broken collective only shows that others have ended: the watchdog says why.
        if watchdog.hang_found:
            time.sleep(_WATCH_ENDS_S)
        code = report_failure(as_fault(loaded, error) or error, ranks, progress, loaded.secrets)
        screen.flush()
        os._exit(code)  # threads may hang in collectives whose peers are gone
    # Process groups have threads of their own. One that outlives this function would be taken down with the
    # interpreter, and abort it if a thread is just then on its way back into Python.
    progress.session = None
    gc.collect()
    ranks.leave()
    watchdog.close()
    if LAUNCHED not in os.environ:
        watchdog.page.remove()
    return rank_files.keep_outcome(code)


def _run(
    loaded: Loaded,
    run_dir: Path | None,
    ranks: Ranks,
    stop: StopRequest,
    progress: Progress,
    resuming: Resuming,
) -> int:
    environment = ranks.environment
    ranks.watchdog.set_phase(b"joining")
    device = device_of(loaded, environment.local_rank)
    facts = [LaunchFacts(*one) for one in ranks.gather("device", launch_facts(loaded, ranks.host, device))]
    place = Place(device, agree_on_backend(loaded, facts))
    ranks.join(place)
    folder = agree_on_folder(loaded, run_dir, ranks, resuming=resuming, known=rank_files.run_dir())
    progress.run_dir = folder.path
    rank_files.keep_run_dir(folder.path)
    session = progress.session = open_session(loaded, folder.path, ranks, place, stop, folder.token)
    _announce(session)
    if folder.resumed:
        resume(session)
        check_best(session)
    session.runtime.time_slices = TimeSliceClient.of(ranks.rank, ranks.environment.local_world_size)
    gc.collect()  # now, and not in the middle of a step
    cursor = session.state.cursor
    cursor.ticked_at = time.monotonic()
    status = _run_stages(session)
    cursor.tick(in_stage=False)
    close_checkpoints(session)
    lost = finish_run(session, status)
    session.runtime.exchange.control.barrier("the end of the run")
    return FAILED if lost and status == "done" else _CODES[status]


def _tune_garbage_collector() -> None:
    """Exempt what is imported: collecting it takes a rank 0.2 s, each rank in another step, and all others
    wait. Collect young objects less often, too, unless the pipeline's own code has set how often.
    """
    importlib.import_module("torch._dynamo")  # DDP and optimizers would do it when they are made
    gc.freeze()
    young, *older = gc.get_threshold()
    if young in _DEFAULTS:
        gc.set_threshold(_YOUNG_THRESHOLD, *older)


def _run_stages(session: Session) -> Status:
    """Run the stages that are left."""
    runtime, cursor = session.runtime, session.state.cursor
    stages, watchdog = runtime.loaded.pipeline.stages, runtime.ranks.watchdog
    while cursor.next < len(stages):
        stage = stages[cursor.next]
        session.reporter.where = stage.path
        watchdog.stage(stage.path)
        watchdog.step(0)
        watchdog.set_phase(stage.name.encode())
        entry = {"kind": stage.name, "index": stage.index, **_STAGES[type(stage)](session, stage)}
        if runtime.compiler is not None:
            session.reporter.report_recompiles(runtime.compiler, session.state.step)
        entry = runtime.loaded.secrets.redact_all(entry)  # checkpoints hold it
        watchdog.set_phase(b"collecting records")
        runtime.records.collect()
        if entry.get("interrupted"):
            cursor.entries.append(entry)
            return "failed" if runtime.finite.failed else "interrupted"
        cursor.end(entry)
    take_checkpoint(session, at_end=True)
    return "done"


def _announce(session: Session) -> None:
    runtime, reporter = session.runtime, session.reporter
    pipeline, ranks = runtime.loaded.pipeline, runtime.ranks
    launch, environment = pipeline.launch, ranks.environment
    reporter.note(
        f"ddprun {__version__}: {pipeline.name}, {ranks.size} rank{'s' if ranks.size > 1 else ''} on "
        f"{runtime.device.type} over {runtime.backend}, in {runtime.run_dir}"
    )
    if launch.nproc_per_node not in (None, environment.local_world_size):
        reporter.note(
            f"launched with {environment.local_world_size} ranks per host; "
            f"the file's launch.nproc_per_node: {launch.nproc_per_node} is not used"
        )
    least, most = launch.host_range
    if not least <= environment.hosts <= most:
        reporter.note(
            f"launched on {environment.hosts} hosts; the file's launch.nnodes: {launch.nnodes} is not used"
        )
    queues = runtime.exchange.gradients, runtime.exchange.deltas
    as_launched = [queue.world.splits[None] for queue in queues if None in queue.world.splits]
    if any(across.size == 1 for _, across in as_launched):
        reporter.note(
            "hierarchical: all ranks are on one host, so nothing is sent between hosts; "
            "to try it on one machine, split it with hosts: n"
        )
    reporter.events.info(
        "started",
        version=__version__,
        pipeline=pipeline.name,
        digest=runtime.loaded.digest(),
        world_size=ranks.size,
        hosts=list(ranks.hosts),
        device=runtime.device.type,
        backend=runtime.backend,
        cores=cores(),
        buckets=[
            {"bucket": b.index, "dtype": b.dtype, "numel": b.numel, "params": [p.name for p in b.params]}
            for b in (runtime.replica.layout if runtime.replica is not None else ())
        ],
        groups=[", ".join(group.match) for group in pipeline.groups],
    )
    # What the model's buffers do, and what follows from that under the file's settings.
    use = runtime.buffers.use
    settings = [pipeline.buffers, *(stage.effective(pipeline).buffers for stage in pipeline.step_stages())]
    automatic = any(setting.when == "auto" for setting in settings)
    reporter.events.info(
        "buffers",
        found=automatic,
        changing=list(use.changing),
        constant=list(use.constant),
        counters=list(use.counters),
        bytes=use.bytes,
        read_in_training=use.read,
        verdict=use.describe() if automatic else None,
    )
    if automatic and (use.changing or use.constant):
        reporter.note(f"buffers: {use.describe()}")
