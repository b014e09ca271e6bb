"""Everything that decides the next step: what a checkpoint holds and a resumed run continues from.

Rank 0 writes `shared`, which is the same on all ranks; every rank writes the rest for itself. Under plain DDP
parameters and optimizer state are shared. Between two averages of local SGD each rank has its own, and writes
it. Further down: when a checkpoint is taken, and what became of it.
"""

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ddprun import __version__
from ddprun.checkpoint.codec import EncodedState, UnstorableError, encode_state
from ddprun.checkpoint.folder import CHECKPOINTS_FOLDER, rank_part_name
from ddprun.checkpoint.location import CheckpointLocation
from ddprun.checkpoint.writer import CheckpointWriter
from ddprun.engine import seeding
from ddprun.engine.audit import audit_parameters
from ddprun.engine.nonfinite import NonfiniteFinding
from ddprun.engine.session import RunComponents, RunResults, Session
from ddprun.engine.weights import initial_ema_tensors
from ddprun.host import rank_files
from ddprun.telemetry.records import CheckpointWritten
from ddprun.telemetry.writer import log_event
from ddprun_hooks.comm.control_channel import open_control_channel
from ddprun_hooks.comm.gpu import GpuStreams, PinnedStaging

_MEMORY_WAIT_S = 10.0  # at most, for the checkpoint in memory before; a rank that is gone is found afterwards


class StateMismatchError(ValueError):
    """State that does not fit the pipeline's model."""


def collect_state(session: Session) -> dict[str, Any]:
    """This rank's part of a checkpoint. Tensors are those that training continues with, not copies. What was
    in flight is over then, and its records are written.

    What has a `state_dict` goes into `_stateful_parts`; any other new key here and into `restore_state`.
    `resume.py` says what becomes of it on another number of ranks; tests/engine/test_session.py looks for
    what is left out, but not for what a `state_dict` itself omits.
    """
    runtime, state, model = session.runtime, session.state, session.runtime.model
    ema, replicas = runtime.ema, state.replicas
    nonfinite = runtime.finite_check.first_nonfinite
    # First, because it waits for what is in flight: until then hooks may still change their residuals.
    sync = state.synchronizer.state_dict() if state.synchronizer is not None else {}
    runtime.recorder.record_between_step_exchanges(state.cursor.next, state.step)  # which the totals count
    optimizer = dict(runtime.optimizer.state_dict())
    return {
        "step": state.step,
        "schedule": state.loaded_schedule if state.schedule is None else state.schedule.state_dict(),
        "parameters": dict(model.named_parameters()),
        "groups": optimizer.pop("param_groups"),  # with each rank's own learning rates and other options
        "optimizer": optimizer,
        "frozen": {},  # parameters that are the same on all ranks although others are not (`take_checkpoint`)
        "buffers": dict(model.named_buffers()),
        # What modules have besides these (`get_extra_state`).
        "extra": {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")},
        "ema": None if ema is None else {**ema.state_dict(), "apart": replicas.averages_differ},
        "sync": sync,
        "replicas": [replicas.parameters, replicas.optimizer, replicas.mutated_at],
        "outer_momentum": dict(state.outer_momentum),
        "results": state.results.model_dump(),
        "nonfinite": None if nonfinite is None else asdict(nonfinite),
        "difference_reported": session.reporter.difference_reported,
        "generators": seeding.rng_state(runtime.device),
        **{name: part.state_dict() for name, part in _stateful_parts(session).items()},
    }


def _stateful_parts(session: Session) -> dict[str, Any]:
    """The parts of the state that have `state_dict` and `load_state_dict` themselves."""
    runtime = session.runtime
    return {
        "position": session.state.cursor,
        "precision": runtime.precision,
        "feeds": runtime.feeds,
        "balance": runtime.share_balancers,
        "hooks": runtime.stacks,
        "buffers_seen": runtime.buffers,
        "telemetry": runtime.recorder,
    }


def shared_keys(session: Session) -> frozenset[str]:
    """What is the same on all ranks at this moment."""
    replicas = session.state.replicas
    if replicas.parameters != "common":
        return frozenset()
    found = ["parameters"]
    if replicas.optimizer == "common":
        found.append("optimizer")
    if session.runtime.ema is not None and not replicas.averages_differ:
        found.append("ema")
    return frozenset(found)


# Restoring it.


def restore_state(session: Session, state: Mapping[str, Any]) -> None:
    """Restore all but what `restore_stage_state` does; called in `resume.translate_checkpoint_errors`."""
    runtime, run_state, model = session.runtime, session.state, session.runtime.model
    replicas, ema, saved_ema = run_state.replicas, runtime.ema, state["ema"]
    _copy_matching_tensors(
        dict(model.named_parameters()), "parameter", {**state["frozen"], **state["parameters"]}
    )
    _copy_matching_tensors(dict(model.named_buffers()), "buffer", state["buffers"])
    for name, module in model.named_modules():
        key = f"{name}._extra_state".removeprefix(".")
        if key in state["extra"] and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(state["extra"][key])
    run_state.step, run_state.loaded_schedule = state["step"], state["schedule"]
    run_state.results = RunResults.model_validate(state["results"])
    run_state.outer_momentum = dict(state["outer_momentum"])
    replicas.parameters, replicas.optimizer, replicas.mutated_at = state["replicas"]
    if ema is not None and saved_ema is None:  # new in the pipeline: it begins with the weights as they are
        ema.tensors = initial_ema_tensors(model)
    elif ema is not None:
        _copy_matching_tensors(ema.tensors, "average", saved_ema["tensors"])
        ema.updates, replicas.averages_differ = saved_ema["updates"], saved_ema["apart"]
    nonfinite = state["nonfinite"]
    runtime.finite_check.first_nonfinite = None if nonfinite is None else NonfiniteFinding(**nonfinite)
    session.reporter.difference_reported = state["difference_reported"]
    for name, part in _stateful_parts(session).items():
        part.load_state_dict(state[name])
    runtime.optimizer.load_state_dict({**state["optimizer"], "param_groups": state["groups"]})
    seeding.restore_rng_state(state["generators"], runtime.device)  # last: loading may draw


def restore_stage_state(session: Session, state: Mapping[str, Any], *, new_rates: bool) -> None:
    """Continue in the middle of a stage, whose policy has begun and whose schedule has been built. Called in
    `resume.translate_checkpoint_errors`, too.

    With `new_rates` learning rates are not what they were, or fall over another number of steps: those of the
    checkpoint, and its schedule, do not count.
    """
    synchronizer, schedule = session.state.synchronizer, session.state.schedule
    assert synchronizer is not None
    synchronizer.load_state_dict(state["sync"])
    if not new_rates:
        if schedule is not None:
            schedule.load_state_dict(state["schedule"])
        # The schedule, when it was built, has set the learning rates of a first step.
        session.runtime.optimizer.load_state_dict({**state["optimizer"], "param_groups": state["groups"]})


def replay_schedule(schedule: LRScheduler, steps: int) -> None:
    """Take so many steps of a schedule between which the optimizer takes none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of that
        for _ in range(steps):
            schedule.step()


def _copy_matching_tensors(targets: Mapping[str, Tensor], what: str, values: Mapping[str, Tensor]) -> None:
    if targets.keys() != values.keys():
        name = min(targets.keys() ^ values.keys())
        where = "the model" if name in targets else "the checkpoint"
        raise StateMismatchError(f'{what} "{name}" is only in {where}: the code has changed since')
    with torch.no_grad():
        for name, target in targets.items():
            value = values[name]
            if target.shape != value.shape or target.dtype != value.dtype:
                here, there = (f"{tuple(one.shape)} of {one.dtype}" for one in (target, value))
                raise StateMismatchError(f'{what} "{name}" is {here}, in the checkpoint {there}')
            target.copy_(value)


# Taking checkpoints.


def find_checkpoint_locations(runtime: RunComponents, leaders: tuple[int, ...]) -> list[CheckpointLocation]:
    """Where the run's checkpoints are: in memory, if the pipeline asks for that, and on disk, where `leaders`
    see the run's folder first.
    """
    ranks, memory = runtime.ranks, os.environ.get(rank_files.MEMORY_VARIABLE)
    first_of_host = {rank: here[0] for here in ranks.placement.ranks_by_host() for rank in here}
    of_hosts = tuple(first_of_host[rank] for rank in range(ranks.size))
    found = [CheckpointLocation(runtime.run_dir / CHECKPOINTS_FOLDER, ranks.rank, leaders)]
    wanted = runtime.loaded.pipeline.checkpoint.memory_every > 0
    if all(ranks.gather("memory", wanted and memory is not None)):
        assert memory is not None
        root = Path(memory) / CHECKPOINTS_FOLDER
        found.insert(0, CheckpointLocation(root, ranks.rank, of_hosts, in_memory=True))
    return found


def open_checkpoint_writer(
    runtime: RunComponents, location: CheckpointLocation, token: str
) -> CheckpointWriter:
    """What writes the run's checkpoints in a location; `token` is of this attempt, equal on all ranks."""
    initially_nonfinite, wanted = runtime.finite_check.initially_nonfinite, runtime.loaded.pipeline.checkpoint
    timeout_s, apart = runtime.loaded.pipeline.launch.timeout_s, len(location.folder_leaders) > 1
    return CheckpointWriter(
        location,
        runtime.ranks.store,
        token=token,
        layout=hook_state_partitioning_key(runtime),
        keep=1 if location.in_memory else wanted.keep,
        # In memory: a failure before the newest is complete costs the steps since the one before it.
        every=max(wanted.memory_every // 2, 1) if location.in_memory else wanted.every,
        control=open_control_channel(timedelta(seconds=timeout_s)) if apart else None,
        timeout_s=timeout_s,
        before_write=runtime.records.writer.flush,
        # Launchers wait for those on disk.
        after_write=(lambda _: None) if location.in_memory else rank_files.report_checkpoint,
        find_nonfinite=partial(_find_nonfinite, initially_nonfinite=initially_nonfinite),
        staging=PinnedStaging(GpuStreams(runtime.device)) if runtime.device.type == "cuda" else None,
    )


def _find_nonfinite(state: EncodedState, initially_nonfinite: frozenset[str]) -> str | None:
    """What of a checkpoint's part is not finite: a parameter or optimizer state; None: all is."""
    for name, tensor in state.tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in ("parameters", "optimizer", "groups") or rest in initially_nonfinite:
            continue
        if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
            return rest if kind == "parameters" else name
    return None


def check_state_storable(
    session: Session, state: Mapping[str, Any] | None = None, path: str = "checkpoint"
) -> None:
    """Raise a PipelineError, at this place, if a checkpoint cannot hold the state, or this part of it."""
    if session.runtime.checkpoints is None:
        return
    try:
        encode_state(collect_state(session) if state is None else state, copy=False)
    except UnstorableError as error:
        text, way_out = f"no checkpoint can be taken: {error}", "`checkpoint: {keep: 0}` takes none"
        if path != "checkpoint":
            way_out = f"give it a state_dict and a load_state_dict without that; {way_out}"
        raise session.runtime.loaded.error(path, text, way_out) from None


def take_checkpoint(
    session: Session, *, at_end: bool = False, requested: bool = False, in_memory: bool = False
) -> None:
    """Take a checkpoint of the state as it is now, on disk or `in_memory`; called by all ranks after the same
    step.

    At the run's end it waits until it is written; in memory, until the one before is. One that a signal has
    requested is answered on the screen.
    """
    runtime, state, reporter = session.runtime, session.state, session.reporter
    writer, step = runtime.memory_checkpoints if in_memory else runtime.checkpoints, state.step
    if requested:
        answer = "no checkpoint is taken, because of checkpoint.keep: 0"
        reporter.note(f"SIGUSR1: {answer if writer is None else f'checkpoint of step {step}'}")
    if writer is None:
        return
    started = time.monotonic()
    if in_memory:
        wait_for_memory = partial(writer.wait, _MEMORY_WAIT_S, lambda: runtime.signals.any_requested)
        runtime.ranks.watchdog.set_phase(b"checkpoint in memory")
        wait_for_memory()
    state.cursor.count_time(in_stage=state.cursor.mid_stage)
    full_state, shared = collect_state(session), shared_keys(session)
    check_state_storable(session, full_state)  # on all ranks, although rank 0 alone writes what they share
    if state.replicas.parameters != "apart":
        audit_parameters(session, f"before the checkpoint of step {step}", step, recorded=False)
    if "parameters" not in shared:
        differing = runtime.frozen.find_and_report_differing()
        parameters = full_state["parameters"]
        equal = [name for name in runtime.frozen.parameters if name not in differing]
        full_state["frozen"] = {name: parameters.pop(name) for name in equal}
        shared |= {"frozen"}
    own = {key: value for key, value in full_state.items() if key not in shared}
    staged = writer.staging if writer.staging is not None and writer.staging.try_acquire() else None
    parts = {rank_part_name(runtime.ranks.rank): encode_state(own, staged=staged)}
    if writer.location.leads:
        metadata = {
            "pipeline": runtime.loaded.as_dict(),
            "data": runtime.fingerprints.for_checkpoint(),
            "world_size": runtime.ranks.size,
            "ddprun": __version__,
        }
        common = {key: full_state[key] for key in sorted(shared)}
        parts["shared"] = encode_state({**common, **metadata}, staged=staged)
    if staged is not None:
        staged.block_current_stream()
    if runtime.records.remote_ranks:
        runtime.records.collect()
    if not in_memory:
        reporter.events.info("checkpoint_taken", step=step, seconds=time.monotonic() - started)
    writer.enqueue(step, parts, staged=staged, wait=at_end)
    if in_memory:
        if runtime.loaded.pipeline.checkpoint.memory_every == 1:
            wait_for_memory()
        runtime.ranks.watchdog.set_phase(b"sync")
    report_checkpoint_outcomes(session)


def report_checkpoint_outcomes(session: Session) -> None:
    """Report what became of those that were taken; of those in memory only why one was not."""
    reporter = session.reporter
    for writer in _checkpoint_writers(session):
        where, kept = (" in memory", "") if writer.location.in_memory else ("", " (older ones are kept)")
        outcomes = [writer.outcomes.get() for _ in range(writer.outcomes.qsize())]
        written_steps = {outcome.step for outcome in outcomes if outcome.checkpoint is not None}
        for outcome in outcomes:
            if outcome.skipped and outcome.step in written_steps:
                continue  # the last step's, which is taken again at the run's end
            step, seconds, written = outcome.step, round(outcome.seconds, 3), outcome.checkpoint
            if not outcome.skipped:
                last = f"the checkpoint of step {step}, the last one"
                writer.last_problem = outcome.problem and f"{last}: {outcome.problem}"
            if written is None:
                cause = "skipped" if outcome.skipped else "failed"
                if cause not in writer.reported_causes or not writer.location.in_memory:
                    reporter.events.warning(
                        "checkpoint_left_out", step=step, seconds=seconds, reason=outcome.problem
                    )
                if cause not in writer.reported_causes:
                    writer.reported_causes.add(cause)
                    reporter.note(f"no checkpoint{where} at step {step}: {outcome.problem}{kept}")
            elif not writer.location.in_memory:
                writer.reported_causes.clear()
                event = CheckpointWritten(
                    step=step,
                    seconds=seconds,
                    bytes=written.bytes,
                    folder=str(session.runtime.display_path(written.path)),
                    nonfinite=written.nonfinite,
                )
                log_event(reporter.events, event)


def close_checkpoint_writers(session: Session) -> None:
    for writer in _checkpoint_writers(session):
        writer.close()
    report_checkpoint_outcomes(session)


def _checkpoint_writers(session: Session) -> list[CheckpointWriter]:
    runtime = session.runtime
    return [writer for writer in (runtime.memory_checkpoints, runtime.checkpoints) if writer is not None]


def hook_state_partitioning_key(runtime: RunComponents) -> str:
    """What decides how hooks' state is divided among ranks; if it changes, state moves between ranks."""
    ddp, hooks = runtime.loaded.pipeline.ddp, sorted(runtime.stacks.by_description)
    buckets = ddp.model_dump(exclude={"gradient_as_bucket_view"})
    return repr((buckets, runtime.ranks.placement.ranks_by_host(), hooks))
