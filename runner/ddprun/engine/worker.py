"""What each rank runs: join the others, build everything, run the stages, report the outcome."""

import gc
import importlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddprun import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_SUCCESS,
    LAUNCHED_BY_DDPRUN_VARIABLE,
    __version__,
    standard_streams,
)
from ddprun.config import LoadedPipeline
from ddprun.engine.checkpoint_state import close_checkpoint_writers, take_checkpoint
from ddprun.engine.compiling import as_compile_error
from ddprun.engine.evaluate import discard_stale_best, run_evaluate_stage, try_evaluations
from ddprun.engine.failures import FailureContext, make_ranks_and_watchdog, report_failure
from ddprun.engine.interrupts import ComparisonSliceClient, SignalRequests
from ddprun.engine.loop import run_step_stage
from ddprun.engine.outcome import RunStatus, finish_run, summarize_failure
from ddprun.engine.resume import resume_from_checkpoint
from ddprun.engine.run_folder import agree_on_folder, find_folder_leaders, prepare_resumed_folder
from ddprun.engine.save import check_saved_dtypes, run_save_stage
from ddprun.engine.session import Session
from ddprun.engine.setup import build_session
from ddprun.engine.stage_run import run_averaging_stage
from ddprun.engine.turns import parameter_group_names
from ddprun.host import rank_files
from ddprun.host.device import choose_backend, gpu_identifier, rank_device
from ddprun.host.processes import die_with_parent
from ddprun.parallel.ddp import as_backward_error
from ddprun.parallel.ranks import RankEnvironment, Ranks
from ddprun.run_files import ResumeMode
from ddprun.telemetry.records import BufferUsage
from ddprun.telemetry.writer import log_event
from ddprun_hooks.errors import DisagreementError, format_ranks

_EXIT_CODES = {"done": EXIT_SUCCESS, "failed": EXIT_FAILURE, "interrupted": EXIT_INTERRUPTED}

_STAGE_RUNNERS: dict[str, Callable[[Session, Any], dict[str, Any]]] = {
    "train": run_step_stage,
    "forward": run_step_stage,
    "average": run_averaging_stage,
    "broadcast": run_averaging_stage,
    "evaluate": run_evaluate_stage,
    "save": run_save_stage,
}

_DEFAULT_GC_THRESHOLDS = (700, 2000)  # of the youngest generation; the second since Python 3.13
_GC_YOUNG_THRESHOLD = 5_000  # telemetry keeps a few thousand objects for steps with messages in flight
_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # with CUDA's 8, the clock's stream waits behind those of buckets
}  # ranks' watchdogs report before torch's, and nothing waits for another on a GPU (docs/reliability.md)

_HEARTBEAT_S = 480  # torch's: its monitor ends a process whose NCCL watchdog has been stuck for so long
_HEARTBEAT_MARGIN_S = 60  # later than a rank's own watchdog, whose report says more


def run_worker(loaded: LoadedPipeline, run_dir: Path | None, *, resuming: ResumeMode = "no") -> int:
    """Run this rank's share of the pipeline in `run_dir`, None: a new one in `runs/`; gives the exit code."""
    die_with_parent()
    _tune_garbage_collector()
    signals = SignalRequests()
    rank_files.register_pid()
    set_nccl_environment(loaded.pipeline.launch.timeout_s)
    failure_context = FailureContext()
    ranks = make_ranks_and_watchdog(RankEnvironment.read(), loaded.pipeline.launch.timeout_s, failure_context)
    ranks.watchdog.start()
    try:
        met = signals.call_unless_stopped(partial(_connect_ranks, loaded, ranks))
        if met is None:
            standard_streams.say(f"rank {ranks.rank} stops before all ranks have met")
            code = EXIT_INTERRUPTED
        else:
            code = _run_pipeline(loaded, run_dir, ranks, *met, signals, failure_context, resuming)
    except BaseException as error:
        error = as_compile_error(loaded, error) or as_backward_error(loaded, error) or error
        code = report_failure(error, ranks, failure_context, loaded.secrets)
        standard_streams.flush_standard_streams()
        os._exit(code)  # threads may hang in collectives whose peers are gone
    # Process groups have threads of their own. One that outlives this function would be taken down with the
    # interpreter, and abort it if a thread is just then on its way back into Python.
    failure_context.reporter, failure_context.step, failure_context.summary = None, int, None
    gc.collect()
    ranks.destroy_process_group()
    ranks.watchdog.close()
    if LAUNCHED_BY_DDPRUN_VARIABLE not in os.environ:
        ranks.watchdog.status_page.remove()
    return rank_files.report_outcome_and_exit_code(code)


def _connect_ranks(loaded: LoadedPipeline, ranks: Ranks) -> tuple[torch.device, str]:
    """Wait for the other ranks; gives this rank's device and the backend."""
    ranks.connect_store()
    ranks.watchdog.set_phase(b"joining")
    device = rank_device(loaded, ranks.environment.local_rank)
    facts = ranks.gather("device", [ranks.host, gpu_identifier(device), loaded.digest()])
    if odd := [rank for rank, (_, _, digest) in enumerate(facts) if digest != facts[0][2]]:
        raise DisagreementError(f"{format_ranks(odd)} and rank 0 were given different pipelines")
    return device, choose_backend(loaded, [(host, gpu) for host, gpu, _ in facts])


def _run_pipeline(
    loaded: LoadedPipeline,
    run_dir: Path | None,
    ranks: Ranks,
    device: torch.device,
    backend: str,
    signals: SignalRequests,
    failure_context: FailureContext,
    resuming: ResumeMode,
) -> int:
    ranks.join(device, backend)
    known = rank_files.read_run_dir()
    folder = agree_on_folder(loaded, run_dir, ranks, resuming=resuming, known=known)
    leaders = find_folder_leaders(loaded, folder, ranks)
    failure_context.run_dir, failure_context.may_write_summary = folder.path.absolute(), not folder.begun
    rank_files.report_run_dir(folder.path)
    session = build_session(
        loaded, folder.path, ranks, device, backend, signals, folder.token, leaders, begun=folder.begun
    )
    failure_context.reporter, failure_context.step = session.reporter, lambda: session.state.step
    check_saved_dtypes(session)
    try_evaluations(session)
    _announce(session)
    if folder.begun:

        def prepare_folder() -> None:
            if leaders[ranks.rank] == ranks.rank:
                changed = bool(loaded.overrides) or resuming != "yes"
                prepare_resumed_folder(session.runtime.run_dir, folder.run_id, loaded, changed=changed)
            discard_stale_best(session)
            failure_context.may_write_summary = True

        resume_from_checkpoint(session, prepare_folder)
    local_ranks = ranks.environment.local_world_size
    session.runtime.time_slices = ComparisonSliceClient.from_environment(local_ranks)
    signals.reinstall_handlers()
    gc.collect()  # now, and not in the middle of a step
    cursor = session.state.cursor
    cursor.record_world_size(session.state.step + 1, ranks.size)
    cursor.ticked_at = time.monotonic()
    failure_context.summary = partial(summarize_failure, session)
    status = _run_stages(session)
    cursor.count_time(in_stage=False)
    close_checkpoint_writers(session)
    unwritten = finish_run(session, status)
    session.runtime.exchange.control.barrier("the end of the run")
    return EXIT_FAILURE if unwritten and status == "done" else _EXIT_CODES[status]


def _tune_garbage_collector() -> None:
    """Exempt what is imported: collecting it takes a rank 0.2 s, each rank in another step, and all others
    wait. Collect young objects less often, too, unless the pipeline's own code has set how often.
    """
    importlib.import_module("torch._dynamo")  # DDP and optimizers would do it when they are made
    gc.freeze()
    gc.enable()
    young, *older = gc.get_threshold()
    if young in _DEFAULT_GC_THRESHOLDS:
        gc.set_threshold(_GC_YOUNG_THRESHOLD, *older)


def set_nccl_environment(timeout_s: float) -> None:
    """Set variables of torch and NCCL that the user has not, before any process group is made."""
    heartbeat_s = max(_HEARTBEAT_S, math.ceil(timeout_s) + _HEARTBEAT_MARGIN_S)
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(heartbeat_s))
    # Torchelastic sets 1 where nothing is set: an error then waits for NCCL to clean up, which may hang, too.
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in _NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)


def _run_stages(session: Session) -> RunStatus:
    runtime, cursor = session.runtime, session.state.cursor
    stages, watchdog = runtime.loaded.pipeline.stages, runtime.ranks.watchdog
    while cursor.next < len(stages):
        stage = stages[cursor.next]
        session.reporter.location = stage.path
        watchdog.set_phase(stage.name.encode(), 0, stage.path)
        entry = {"kind": stage.name, "index": stage.index, **_STAGE_RUNNERS[stage.name](session, stage)}
        runtime.recorder.record_between_step_exchanges(stage.index, session.state.step)
        if runtime.compiler is not None:
            session.reporter.report_recompiles(runtime.compiler, session.state.step)
        entry = runtime.loaded.secrets.redact_all(entry)  # checkpoints hold it
        watchdog.set_phase(b"collecting records")
        runtime.records.collect()
        cursor.entries.append(entry)
        if entry.get("interrupted"):
            return "failed" if runtime.finite_check.failed else "interrupted"
        cursor.next += 1
    take_checkpoint(session, at_end=True)
    return "done"


def _announce(session: Session) -> None:
    runtime, reporter = session.runtime, session.reporter
    pipeline, ranks = runtime.loaded.pipeline, runtime.ranks
    reporter.note(
        f"ddprun {__version__}: {pipeline.name}, {ranks.size} rank{'s' if ranks.size > 1 else ''} on "
        f"{runtime.device.type} over {runtime.backend}, in {runtime.shown_dir}"
    )
    if pipeline.checkpoint.keep and runtime.records.remote_ranks:
        reporter.note(
            "hosts do not share the run folder: of each checkpoint, each host keeps the state of its own "
            "ranks and a copy of the state of another host's ranks"
        )
    reporter.log_start(
        ranks,
        runtime.device,
        runtime.backend,
        pipeline=pipeline.name,
        buckets=runtime.turns.buckets,
        digest=runtime.loaded.digest(),
        groups=parameter_group_names(runtime.loaded, runtime.turns, runtime.optimizer, runtime.model),
    )
    # What the model's buffers do, and what follows from that under the file's settings.
    use = runtime.buffers.use
    automatic = pipeline.has_automatic_buffers
    in_step, later = "sent before the first forward pass of a step", "sent before evaluate and save"
    when = in_step if use.read_in_training else later
    verdict = f"{use.describe()}: {when if use.changing else 'nothing is sent'}"
    facts = asdict(use)
    facts["bytes"] = facts.pop("changing_bytes")
    log_event(reporter.events, BufferUsage(found=automatic, verdict=verdict if automatic else None, **facts))
    if automatic and (use.changing or use.constant):
        reporter.note(f"buffers: {verdict}")
