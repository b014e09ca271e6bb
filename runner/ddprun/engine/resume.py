"""Resuming from a checkpoint: from which one, agreed by all ranks, and how its state is restored, on as many
ranks or on another number.

It is the newest that is whole and finite. It may be in memory or on disk. Every rank checks a share of the
files in the folder that it sees. A checkpoint is whole if every file is intact in some folder; a host that
lacks a file gets it from another host. If a checkpoint is not whole, or its weights are not finite, it is
named and left alone, and the one before it is tried.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError
from ddprun.checkpoint.folder import Checkpoint, rank_part_name
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers, run_transfers
from ddprun.config import AverageStage, BroadcastStage, StepStage
from ddprun.config.resume_changes import check_and_list_changes, learning_rates_changed
from ddprun.engine import seeding
from ddprun.engine.checkpoint_state import StateMismatchError, hook_state_partitioning_key, restore_state
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.sync.exchanger import can_be_averaged, mean_of, merge_optimizer_states
from ddprun.sync.plan import SyncPlan
from ddprun.sync.synchronizer import Synchronizer
from ddprun.telemetry.control_message import MessageAccumulator
from ddprun.telemetry.step_timing import totals_after_rank_change
from ddprun.telemetry.writer import truncate_records

# What reading something other than expected ends in.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def resume_from_checkpoint(session: Session, prepare_folder: Callable[[], None]) -> None:
    """Bring a session to where its run's newest whole checkpoint was taken; called by all ranks.

    Without a checkpoint the run starts from the beginning. Raises PipelineError for a change that cannot be
    resumed, RunFolderError if no checkpoint can be read. Once nothing can refuse to resume, which in the
    middle of a stage `begin_stage` finds out, records of later steps are cut off, and the folder is prepared.
    """
    runtime, state = session.runtime, session.state
    found = _newest_checkpoint(session)
    if found is None:
        _commit_resume(session, prepare_folder)
        session.reporter.note("no intact checkpoint: the run starts from the beginning")
        return
    with translate_checkpoint_errors(session, found.checkpoint):
        saved = _read_state(session, found)
        before, cursor = saved["pipeline"], saved["position"]
        _reopen_longer_stage(session, before, cursor)
        old_pipeline, notes = check_and_list_changes(
            runtime.loaded, before, next_stage=cursor["next"], begun_stage=cursor["stage"]
        )
        changed_data = _check_changed_data(session, saved)
        restore_state(session, saved)
    for name, _, mid_epoch in changed_data:
        if not mid_epoch and name in runtime.fingerprints.feeds:
            runtime.fingerprints.feeds[name].skip_rest_of_epoch()

    def accept() -> None:
        _commit_resume(session, prepare_folder)
        _report_resumed(session, found, changed_data, notes)

    if not state.cursor.mid_stage:
        accept()
        return
    new_rates = learning_rates_changed(old_pipeline, runtime.loaded.pipeline, cursor["next"])
    more = {"new_rates": new_rates, "checkpoint": found.checkpoint, "accept": accept}
    state.resume_state = {**saved, **more}


def _commit_resume(session: Session, prepare_folder: Callable[[], None]) -> None:
    """Cut off the records of later steps than those that are done, and prepare the folder, once no rank has
    refused to resume.
    """
    runtime = session.runtime
    runtime.ranks.gather("resume/accepted", None)
    if runtime.ranks.rank == 0:
        try:
            truncate_records(runtime.run_dir, session.state.step)
        except OSError as error:
            problem = f"cannot resume in the run folder {runtime.shown_dir}: {error.strerror}"
            raise RunFolderError(problem) from None
    prepare_folder()


def _report_resumed(
    session: Session, found: "_FoundCheckpoint", changed_data: Sequence[Any], notes: Sequence[str]
) -> None:
    """Report the checkpoint from which the run continues, and what has changed since."""
    runtime, reporter, state = session.runtime, session.reporter, session.state
    for name, text, mid_epoch in changed_data:
        reporter.events.warning("data_changed", name=name, how=text, mid_epoch=mid_epoch)
        reporter.note(f"{name} has changed: {text}")
    for note in notes:
        reporter.note(note)
    checkpoint = found.checkpoint
    shown = "memory" if found.location.in_memory else runtime.display_path(checkpoint.path)
    state.cursor.record_world_size(state.step + 1, runtime.ranks.size)
    reporter.events.info(
        "resumed",
        step=state.step,
        stage=state.cursor.next,
        checkpoint=str(shown),
        world_size_before=checkpoint.world_size,
        world_sizes=state.cursor.world_sizes,
        changed=notes,
    )
    done = state.cursor.next >= len(runtime.loaded.pipeline.stages)
    left = "; every stage is done, so nothing is left to do" if done else ""
    reporter.note(f"resuming after step {state.step} from {shown}{left}")


def _check_changed_data(session: Session, saved: Mapping[str, Any]) -> list[Any]:
    """Changed data, as fingerprints describe it; a PipelineError in mid-epoch, if the file says `stop`."""
    runtime = session.runtime
    pipeline, fingerprints = runtime.loaded.pipeline, runtime.fingerprints
    saved_data = saved.get("data", {})
    if pipeline.loader.sharded and saved["world_size"] != runtime.ranks.size:
        saved_data = {}  # rank 0 has another share of it
    changes: list[Any] = runtime.ranks.from_rank_0(
        "resume/data", lambda: fingerprints.find_changes(saved_data)
    )
    steps_left = any(isinstance(stage, StepStage) for stage in pipeline.stages[saved["position"]["next"] :])
    for name, text, mid_epoch in changes:
        if mid_epoch and steps_left and pipeline.checkpoint.on_changed_data == "stop":
            problem = f"{name}: {text}, in the middle of an epoch"
            allowed = "restore the data, or accept the change with --set checkpoint.on_changed_data=continue"
            raise fingerprints.sources[name].make_error(problem, allowed)
    return changes


@contextmanager
def translate_checkpoint_errors(session: Session, checkpoint: Checkpoint) -> Iterator[None]:
    """Context around reading a checkpoint, which may hold anything: a PipelineError if its state does not fit
    the model, a RunFolderError if it is damaged. Other ranks learn that this one has failed, and end, too.
    """
    where = session.runtime.display_path(checkpoint.path)
    try:
        yield
    except StateMismatchError as error:
        raise session.runtime.loaded.error("model", f"{error} ({where})") from None
    except (torch.OutOfMemoryError, dist.DistError):  # too little memory here; another rank has ended
        raise
    except _ERRORS as error:  # a DamagedError is one of these
        text = str(error)
        if not isinstance(error, DamagedError):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            text = f"its state cannot be read ({text:.200})"
        problem = f"the checkpoint of step {checkpoint.step} is damaged: {text} ({where})"
        raise RunFolderError(problem) from None


def _reopen_longer_stage(session: Session, before: Mapping[str, Any], cursor: dict[str, Any]) -> None:
    """Go back into the last stage with steps, if it is longer now and nothing has changed the weights."""
    last = cursor["stage"]
    stages = session.runtime.loaded.pipeline.stages
    if last is None or not last < min(cursor["next"], len(stages)):
        return
    stage, since = stages[last], stages[last + 1 : cursor["next"]]
    if isinstance(stage, StepStage) and not any(isinstance(s, AverageStage | BroadcastStage) for s in since):
        had = before["stages"][last].get(stage.name) or {}  # `changes` reports another kind of stage
        entry, epochs = cursor["entries"][last], had.get("epochs")
        had_steps = had.get("steps") if entry.get("stopped_early") else entry["steps"]
        longer = stage.steps is not None and stage.steps > (had_steps or 0)
        if longer or (stage.epochs is not None and stage.epochs > (epochs or 0)):
            cursor["next"], cursor["seconds"] = last, entry["seconds"]
            cursor["entries"] = cursor["entries"][:last]


# The newest checkpoint.


@dataclass(frozen=True, slots=True)
class _FoundCheckpoint:
    """A checkpoint whose files are all intact, each in some folder of its location."""

    location: CheckpointLocation
    checkpoint: Checkpoint  # where this rank sees it, or would
    held: dict[int, list[str]]  # for each leader, the intact files in its folder
    moves_state: bool  # other ranks, buckets, hosts or hooks: each rank reads the state of all


def _newest_checkpoint(session: Session) -> _FoundCheckpoint | None:
    """The newest checkpoint that is whole, and whose weights and optimizer state are finite unless some
    stage's `on_nan` is `continue`; each rank sees what it needs of it. A RunFolderError: there are some on
    disk, but none can be used, or its files cannot be written here.
    """
    skipped = list[tuple[CheckpointLocation, int, str]]()  # with the reason
    found = None
    for step, location in _list_checkpoints(session):
        assessed = _assess_checkpoint(session, location, step)
        if isinstance(assessed, _FoundCheckpoint):
            problem = _transfer_missing_files(session, assessed)
            if problem is None:
                found = assessed
                break
            if not location.in_memory:
                raise RunFolderError(f"cannot resume from the checkpoint of step {step}: {problem}")
            assessed = problem
        skipped.append((location, step, assessed))
    if found is None:
        for location, step, reason in skipped:
            if not location.in_memory:
                where = f"no checkpoint in {location.root} can be used by all ranks"
                raise RunFolderError(f"{where}; that of step {step}: {reason}")
    for location, step, reason in skipped:
        _set_aside(session, location, step, reason)
    return found


def _list_checkpoints(session: Session) -> list[tuple[int, CheckpointLocation]]:
    """The checkpoints of all folders, newest first, of one step those in memory first."""
    ranks, found = session.runtime.ranks, list[tuple[int, CheckpointLocation]]()
    for location in session.runtime.locations:
        if location.leads:
            folder.recover_interrupted_writes(location.root)
        of_ranks = ranks.gather(f"resume/steps/{location.name}", folder.steps_in(location.root))
        found += [(step, location) for step in set().union(*of_ranks)]
    return sorted(found, key=lambda one: one[0], reverse=True)


def _assess_checkpoint(session: Session, location: CheckpointLocation, step: int) -> _FoundCheckpoint | str:
    """Find out together whether a checkpoint is whole and finite; gives why it is not."""
    runtime = session.runtime
    mine = _verify_share_of_files(location, step)
    gathered = runtime.ranks.gather(f"resume/{location.name}/{step}", asdict(mine))
    of_ranks = [_VerifiedFiles(**one) for one in gathered]
    by_digest: dict[str, list[int]] = {}
    for leader in location.folder_leaders:
        members = location.members(leader)
        if len({of_ranks[rank].digest for rank in members}) == 1 and of_ranks[leader].digest:
            by_digest.setdefault(of_ranks[leader].digest, []).append(leader)
    reasons = [problem for share in of_ranks for problem in share.problems]
    for leaders in by_digest.values():
        held = {leader: list[str]() for leader in location.folder_leaders}
        for leader in leaders:
            held[leader] = [name for rank in location.members(leader) for name in of_ranks[rank].intact]
        manifest = of_ranks[leaders[0]].manifest
        assert manifest is not None
        checkpoint = Checkpoint(path=location.root / folder.checkpoint_name(step), **manifest)
        intact = {name for names in held.values() for name in names}
        if missing := sorted(checkpoint.files.keys() - intact):
            reasons.append(f"no host has an intact copy of its {missing[0]}")
            continue
        if checkpoint.nonfinite is not None:
            problem = f"{checkpoint.nonfinite} is not finite in it"
            stages = runtime.loaded.pipeline.stages_and_settings()
            if all(settings.on_nan == "stop" for _, settings in stages):
                return problem
            session.reporter.note(f"using the checkpoint of step {step}, though {problem}")
        as_now = runtime.ranks.size, hook_state_partitioning_key(runtime)
        moves_state = (checkpoint.world_size, checkpoint.layout) != as_now
        return _FoundCheckpoint(location, checkpoint, held, moves_state)
    return next(iter(reasons), "not all ranks see the same manifest")


@dataclass(frozen=True, slots=True)
class _VerifiedFiles:
    """What one rank has found of a checkpoint, in its share of the files of a folder."""

    digest: str = ""  # of its manifest; empty: there is none that can be read
    manifest: dict[str, Any] | None = None  # of a leader: all of a `Checkpoint` but its path
    intact: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _verify_share_of_files(location: CheckpointLocation, step: int) -> _VerifiedFiles:
    members = location.members(location.leaders[location.rank])
    share = members.index(location.rank)
    path = location.root / folder.checkpoint_name(step)
    try:
        checkpoint = folder.open_checkpoint(location.root, step)
    except DamagedError as error:
        return _VerifiedFiles(problems=[str(error)] if os.path.lexists(path) else [])
    intact, problems = list[str](), list[str]()
    for name in folder.file_names(folder.part_names(checkpoint.world_size)[share :: len(members)]):
        try:
            folder.verify(checkpoint, [name])
            intact.append(name)
        except DamagedError as error:
            if os.path.lexists(path / name):  # else another host may have it
                problems.append(str(error))
    manifest = checkpoint.model_dump() if location.leads else None
    return _VerifiedFiles(checkpoint.digest, manifest, intact, problems)


def _set_aside(session: Session, location: CheckpointLocation, step: int, reason: str) -> None:
    """Report that a checkpoint is not used, and rename it so that it does not count any more; in memory it is
    deleted.
    """
    reporter = session.reporter
    if not location.leads:
        return
    if location.in_memory:
        folder.remove_tree(location.root / folder.checkpoint_name(step))
        now = "deleted"
    else:
        try:
            now = f"renamed to {location.root.name}/{folder.set_aside(location.root, step).name}"
        except FileNotFoundError:
            now = "of which this host has nothing"
        except OSError as error:
            now = f"not renamed: {error.strerror}"
    if location.rank == 0:
        reporter.events.warning("checkpoint_skipped", step=step, reason=reason)
        where = " in memory" if location.in_memory else ""
        reporter.note(f"skipping the checkpoint of step {step}{where}: {reason} ({now})")


def _transfer_missing_files(session: Session, found: _FoundCheckpoint) -> str | None:
    """Have each host get the files that its ranks read from hosts that have them; gives on all ranks why some
    cannot be written, None if all are there.
    """
    ranks, checkpoint, held = session.runtime.ranks, found.checkpoint, found.held
    needed: Any = found.location.files_needed(checkpoint.world_size)
    if found.moves_state:
        needed = dict.fromkeys(found.location.folder_leaders, checkpoint.files.keys())
    transfers = plan_transfers(needed, held)
    if not transfers:
        return None
    problem = ""
    try:
        if receives := any(target == ranks.rank for _, target, _ in transfers):
            with suppress(OSError):  # each file then fails, and is taken from its sender all the same
                folder.make_checkpoint_folder(checkpoint.path)
        control = session.runtime.exchange.control
        run_transfers(control, ranks.rank, checkpoint.path, transfers, checkpoint.files)
        if receives:
            folder.write_manifest(checkpoint)
    except OSError as error:
        problem = f"{ranks.host} cannot write the files that other hosts sent: {error.strerror or error}"
    key = f"resume/{found.location.name}/{checkpoint.step}/fetched"
    return next(filter(None, ranks.gather(key, problem)), None)


# Its state.


def _read_state(session: Session, found: _FoundCheckpoint) -> dict[str, Any]:
    """This rank's state: what all ranks share, and its own."""
    runtime, checkpoint = session.runtime, found.checkpoint
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    shared = folder.read_part(checkpoint, "shared")
    if not found.moves_state:
        return {**shared, **folder.read_part(checkpoint, rank_part_name(rank))}
    own = [folder.read_part(checkpoint, rank_part_name(old)) for old in range(checkpoint.world_size)]
    if checkpoint.world_size != ranks:
        return _reshard_state(session, shared, own)
    state = {**shared, **own[rank], "hooks": runtime.stacks.merge([one["hooks"] for one in own])}
    plan = _plan_of_begun_stage(session, state)
    if plan is not None and plan.has_host_legs:
        hosts = str(runtime.ranks.placement.ranks_by_host())
        if hosts not in checkpoint.layout:  # ranks that were on two hosts may be on one now
            state |= _merge_replica_states(shared, own)
    return state


def _plan_of_begun_stage(session: Session, state: Mapping[str, Any]) -> SyncPlan | None:
    """That of the stage in whose middle the state was taken."""
    cursor, pipeline = state["position"], session.runtime.loaded.pipeline
    if cursor["stage"] != cursor["next"] or cursor["next"] >= len(pipeline.stages):
        return None
    stage = pipeline.stages[cursor["next"]]
    return stage.effective_settings(pipeline).plan if isinstance(stage, StepStage) else None


def _reshard_state(session: Session, shared: dict[str, Any], own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """State for another number of ranks: nothing that was learned is lost, and no sample is seen twice.

    Ranks whose parameters differed become equal, as in a synchronisation. What is in flight stays so. The
    hooks' residuals are divided among the ranks: their sum stays. Random generators start from a seed of the
    rank and the step.
    """
    runtime = session.runtime
    loaded, rank, ranks = runtime.loaded, runtime.ranks.rank, runtime.ranks.size
    # What is not merged below is rank 0's: equal on all ranks, or what `save` writes, too (buffers, extra).
    state = {**own[0], **shared}
    allowed, plan = "resume on as many ranks as before", _plan_of_begun_stage(session, state)
    if plan is not None and plan.keeps_apart:
        text = "its ranks train independently, so another number of ranks cannot resume it"
        raise loaded.error(loaded.pipeline.stages[state["position"]["next"]].path, text, allowed)
    if loaded.pipeline.loader.sharded and any(feed["samples"] for feed in state["feeds"].values()):
        text = "the data set shards itself by rank, so another number of ranks cannot resume mid-epoch"
        raise loaded.error("loader.sharded", text, allowed)
    state["hooks"] = runtime.stacks.merge([one["hooks"] for one in own])
    state |= _merge_replica_states(shared, own)
    totals = [one["telemetry"]["totals"] for one in own]
    state["telemetry"] = {
        **own[0]["telemetry"],
        "totals": totals_after_rank_change(totals, rank, ranks),
        "round": MessageAccumulator().state_dict([]),
    }
    seeding.seed_everything(loaded.pipeline.seed + rank + ranks * (1 + state["step"]))
    state["generators"] = seeding.rng_state(runtime.device)
    return state


def _merge_replica_states(shared: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of a state that make ranks equal, as a synchronisation does; what is in flight stays so."""
    state: dict[str, Any] = {
        "sync": Synchronizer.merge_states([one["sync"] for one in own]),
        "replicas": ["common", "common", own[0]["replicas"][2]],
    }
    if "parameters" not in shared:
        state["parameters"] = {  # what has no mean (quantised weights) is rank 0's
            name: mean_of([one["parameters"][name] for one in own]) if can_be_averaged(value) else value
            for name, value in own[0]["parameters"].items()
        }
    if "optimizer" not in shared:
        state["optimizer"] = merge_optimizer_states([one["optimizer"] for one in own])
    if "ema" not in shared:
        state["ema"] = ema = own[0]["ema"]
        if ema is not None:
            averages = [one["ema"]["tensors"] for one in own]
            merged = {name: mean_of([one[name] for one in averages]) for name in averages[0]}
            state["ema"] = {**ema, "tensors": merged, "apart": False}
    return state
