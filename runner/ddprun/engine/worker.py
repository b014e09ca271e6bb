"""What each rank runs: join the others, build everything, run the stages, report the outcome."""

import gc
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from ddprun import LAUNCHED, __version__, screen
from ddprun.config import (
    AverageStage,
    BroadcastStage,
    Evaluate,
    Forward,
    Loaded,
    PipelineError,
    Save,
    Train,
)
from ddprun.config.secrets import Secrets
from ddprun.engine.checkpoints import close_checkpoints, take_checkpoint
from ddprun.engine.evaluate import evaluate
from ddprun.engine.finish import LostError, Status, finish_run, write_summary
from ddprun.engine.forward import forward
from ddprun.engine.hang import note_failure, open_watchdog, prepare_nccl
from ddprun.engine.loop import train
from ddprun.engine.replicas import average, broadcast
from ddprun.engine.resume import resume
from ddprun.engine.run_folder import RunFolderError, agree_on_folder
from ddprun.engine.save import save
from ddprun.engine.session import Session
from ddprun.engine.setup import open_session
from ddprun.engine.stop import StopRequest
from ddprun.engine.time_slices import TimeSliceClient
from ddprun.host import rank_files
from ddprun.host.device import place_of
from ddprun.host.network import NetworkError
from ddprun.host.processes import die_with_parent
from ddprun.parallel.ranks import Environment, Ranks
from ddprun.run_files import Resuming
from ddprun.sync.audit import DriftError
from ddprun.watchdog.rank_watchdog import GROUPS_LATER_S, RankWatchdog
from ddprun_hooks.errors import DisagreementError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_CODES: dict[Status, int] = {"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED}

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "remote process exited",
    "read error",
    "left the exchange",
)
"""Gloo raises plain RuntimeErrors, whatever has gone wrong."""

_NETWORK_ERRORS = (dist.DistBackendError, dist.DistNetworkError)
_EXCHANGING = (
    "ddprun_hooks.",
    "ddprun.parallel.ranks.",
    "torch.distributed.",
    "torch.futures.",
    "torch.nn.parallel.distributed.",
    "torch.autograd.graph.",  # an exchange that breaks in backward's own code, which has no frames
)
"""Where collectives and the store are called from."""

_GLOO_GUESSES = ". This is typically caused by"
_LAUNCHER_NOTICES_S = 3.0
_OTHERS_LOOK_S = 1.0
_WATCH_ENDS_S = 10.0
_DEFAULTS = (700, 2000)
_YOUNG_THRESHOLD = 5_000
"""Allocations before a collection of the youngest generation; Python's default is 700, or 2000 since 3.13.
Telemetry keeps a few thousand objects for steps whose control messages are under way.
"""


@dataclass(slots=True)
class _Known:
    """How far the run has come, for messages when something fails."""

    run_dir: Path | None = None
    session: Session | None = None


def work(loaded: Loaded, run_dir: Path | None, *, resuming: Resuming = "no") -> int:
    """Run this rank's share of the pipeline; gives the exit code.

    Args:
        loaded: the checked pipeline.
        run_dir: where the run's files go; None makes a new folder under `runs/<name>/`.
        resuming: `run_dir` is the folder of a run that is to go on.
    """
    die_with_parent()
    stop = StopRequest()
    rank_files.keep_pid()
    prepare_nccl()
    known = _Known()
    environment, timeout_s = Environment.read(), loaded.pipeline.launch.timeout_s
    watchdog = open_watchdog(environment, timeout_s, known, lambda: ranks)
    ranks = Ranks(environment, timedelta(seconds=timeout_s + GROUPS_LATER_S), watchdog, watchdog.page.path)
    watchdog.start()
    try:
        ranks.connect()
        code = _run(loaded, run_dir, ranks, stop, known, resuming=resuming)
    except BaseException as error:
        _wait_for_diagnosis(watchdog)
        code = _report_failure(error, ranks, known, loaded.secrets)
        screen.flush()
        os._exit(code)  # threads may hang in collectives whose peers are gone
    # Process groups have threads of their own. One that outlives this function would be taken down with the
    # interpreter, and abort it if a thread is just then on its way back into Python.
    known.session = None
    gc.unfreeze()
    gc.collect()
    ranks.leave()
    watchdog.close()
    if LAUNCHED not in os.environ:
        watchdog.page.remove()
    return rank_files.keep_outcome(code)


def _wait_for_diagnosis(watchdog: RankWatchdog) -> None:
    """If the run hangs, a broken collective only shows that other ranks have ended: the watchdog says why."""
    if watchdog.hang_found:
        time.sleep(_WATCH_ENDS_S)


def _run(
    loaded: Loaded,
    run_dir: Path | None,
    ranks: Ranks,
    stop: StopRequest,
    known: _Known,
    *,
    resuming: Resuming,
) -> int:
    environment = ranks.environment
    ranks.watchdog.turn(b"joining")
    place = place_of(loaded, environment.local_rank, environment.local_world_size)
    ranks.join(place)
    folder = agree_on_folder(loaded, run_dir, ranks, resuming=resuming, known=rank_files.run_dir())
    known.run_dir = folder.path
    rank_files.keep_run_dir(folder.path)
    session = known.session = open_session(loaded, folder.path, ranks, place, stop, folder.token)
    _announce(session)
    if folder.goes_on:
        resume(session)
    session.runtime.time_slices = TimeSliceClient.of(ranks.rank, ranks.size)
    _tune_garbage_collector()
    session.state.cursor.start_run_clock()
    status = _run_stages(session)
    seconds = session.state.cursor.run_elapsed_s()
    close_checkpoints(session)
    lost = finish_run(session, status=status, seconds=seconds)
    session.runtime.exchange.control.barrier("the end of the run")
    return FAILED if lost and status == "done" else _CODES[status]


def _tune_garbage_collector() -> None:
    """Keep the garbage collector off what was imported and built: walking it takes a rank 0.2 s, each rank in
    another step, and all others wait. Collect young objects less often, too, unless the pipeline's own code
    has set how often.
    """
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    if young in _DEFAULTS:
        gc.set_threshold(_YOUNG_THRESHOLD, *older)


def _run_stages(session: Session) -> Literal["done", "interrupted", "failed"]:
    """Run the stages that are left."""
    runtime = session.runtime
    cursor = session.state.cursor
    while cursor.next < len(runtime.loaded.pipeline.stages):
        stage = runtime.loaded.pipeline.stages[cursor.next]
        entry = {"kind": stage.name, "index": stage.index, **_run_stage(session, stage)}
        entry = runtime.loaded.secrets.redact_all(entry)  # checkpoints hold it
        runtime.ranks.watchdog.turn(b"collecting records")
        runtime.records.collect()
        if entry.get("interrupted"):
            cursor.entries.append(entry)
            return "failed" if runtime.finite.failed else "interrupted"
        cursor.end(entry)
    take_checkpoint(session, at_end=True)
    return "done"


def _run_stage(session: Session, stage: Any) -> dict[str, Any]:
    watchdog = session.runtime.ranks.watchdog
    watchdog.stage(stage.path)
    watchdog.step(0)
    watchdog.turn(stage.name.encode())
    match stage:
        case Train():
            return train(session, stage)
        case Forward():
            return forward(session, stage)
        case AverageStage():
            return average(session, stage)
        case BroadcastStage():
            return broadcast(session, stage)
        case Evaluate():
            return evaluate(session, stage)
        case Save():
            return save(session, stage)
    raise AssertionError(f"a stage without an engine: {stage!r}")


def _announce(session: Session) -> None:
    runtime, reporter = session.runtime, session.reporter
    launch, environment = runtime.loaded.pipeline.launch, runtime.ranks.environment
    world = runtime.ranks.size
    reporter.note(
        f"ddprun {__version__}: {runtime.loaded.pipeline.name}, {world} rank{'s' if world > 1 else ''} on "
        f"{runtime.device.type} over {runtime.backend}, in {runtime.run_dir}"
    )
    if launch.nproc_per_node not in (None, environment.local_world_size):
        reporter.note(
            f"launched with {environment.local_world_size} ranks per host; "
            f"the file's launch.nproc_per_node: {launch.nproc_per_node} is not used"
        )
    least, most = launch.hosts
    if not least <= environment.hosts <= most:
        reporter.note(
            f"launched on {environment.hosts} hosts; the file's launch.nnodes: {launch.nnodes} is not used"
        )
    queues = runtime.exchange.gradients, runtime.exchange.deltas
    as_launched = [queue.world.splits[None] for queue in queues if None in queue.world.splits]
    if any(across.size == 1 for _, across in as_launched):
        reporter.note(
            "hierarchical: all ranks are on one host, so nothing goes between hosts; "
            "hosts: n splits one machine for trials"
        )
    reporter.events.info(
        "started",
        version=__version__,
        pipeline=runtime.loaded.pipeline.name,
        digest=runtime.loaded.digest(),
        world_size=world,
        hosts=list(runtime.ranks.hosts),
        device=runtime.device.type,
        backend=runtime.backend,
        buckets=[
            {"bucket": b.index, "dtype": b.dtype, "numel": b.numel, "params": [p.name for p in b.params]}
            for b in (runtime.replica.layout if runtime.replica is not None else ())
        ],
    )
    _announce_buffers(session)


def _announce_buffers(session: Session) -> None:
    """What the model's buffers do, and what follows from that under the file's settings."""
    runtime, reporter = session.runtime, session.reporter
    use = runtime.buffers.use
    pipeline = runtime.loaded.pipeline
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


def _report_failure(error: BaseException, ranks: Ranks, known: _Known, secrets: Secrets) -> int:
    """Say what went wrong, unless another rank failed first; gives the exit code."""
    rank_files.drop_pid()
    bad_input = isinstance(error, PipelineError | RunFolderError | NetworkError)
    if not bad_input and _is_lost_peer(error):
        # The cause is another rank. If that was killed it cannot tell; its launcher can, and ends this rank.
        time.sleep(_LAUNCHER_NOTICES_S)
    first, code = ranks.first_to_fail(BAD_INPUT if bad_input else FAILED)
    if known.session is not None:
        known.session.reporter.screen.end()
        known.session.reporter.trackers.hold()  # what has failed is told first
    if not first:
        note_failure(known.run_dir, ranks.rank, f"after another rank had failed: {_headline(error, secrets)}")
        _end_trackers(known)
        time.sleep(_LAUNCHER_NOTICES_S)
        return code
    if isinstance(error, LostError):
        told = secrets.redact(f"ddprun: {error}")
        screen.say(told)
        note_failure(known.run_dir, ranks.rank, told)
    elif bad_input:
        told = str(error) if isinstance(error, PipelineError) else secrets.redact(f"ddprun: {error}")
        screen.say(told)
    else:
        where = known.session.reporter.where if known.session else "before the first stage"
        head = f"ddprun: rank {ranks.rank} failed ({where}): {_headline(error, secrets)}"
        if isinstance(error, DriftError | DisagreementError):
            detail = str(error)  # all ranks found it together; where in the code says nothing
            head = f"ddprun: the run failed ({where}):"
        elif _is_lost_peer(error):
            head = head.partition(_GLOO_GUESSES)[0]
            detail = "another rank is gone; its own message, if it left one, is in its launcher's output"
        else:
            detail = "".join(traceback.format_exception(error)).rstrip()
        told = secrets.redact(f"{head}\n{detail}")
        screen.say(told)
        note_failure(known.run_dir, ranks.rank, told)
    _keep_failure(error, ranks, known, secrets)
    _end_trackers(known)
    if ranks.holds_store:
        time.sleep(_OTHERS_LOOK_S)  # so that the others can still read whose failure was first
    return code


def _end_trackers(known: _Known) -> None:
    if known.session is not None:
        known.session.reporter.trackers.fail()


def _keep_failure(error: BaseException, ranks: Ranks, known: _Known, secrets: Secrets) -> None:
    """Write the failure into the run's folder, if this host sees it."""
    if known.session is not None:
        with suppress(Exception):  # what has failed may have left a step that cannot be read
            known.session.runtime.recorder.salvage()
        known.session.runtime.records.writer.flush()
    if known.run_dir is not None and known.run_dir.is_dir():
        failure = {"rank": ranks.rank, "message": _headline(error, secrets)}
        step = known.session.state.step if known.session else 0
        try:
            write_summary(known.run_dir, {"status": "failed", "steps": step, "error": failure})
        except OSError:
            return


def _headline(error: BaseException, secrets: Secrets) -> str:
    text = secrets.redact(str(error)).strip().splitlines()  # before a secret of several lines is cut
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange broke because another rank is gone. Any code may raise an error with such a text, a
    dataset that reads over the network for one: what counts first is where it was raised.
    """
    if not isinstance(error, RuntimeError | OSError) or not _raised_in(error, _EXCHANGING):
        return False
    return isinstance(error, _NETWORK_ERRORS) or any(sign in str(error).lower() for sign in _LOST_PEER)


def _raised_in(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether the innermost frame of an error's traceback is in one of these modules, or below one."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    name = "" if innermost is None else f"{innermost.f_globals.get('__name__', '')}."
    return name.startswith(modules)
