"""Resuming from a checkpoint: which one, agreed by all ranks, and how its state is restored.

The newest checkpoint that is whole and finite counts, in memory or on disk. Every rank checks a share of the
files in the folder that it sees. A checkpoint is whole if every file is intact in some folder; what a host
lacks of it, another host sends. One that is not whole, or whose weights are not finite, is named and left
alone, and the one before it is tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError, UnreadableError
from ddprun.checkpoint.folder import Checkpoint, rank_part_name
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers, run_transfers
from ddprun.config import AverageStage, BroadcastStage, StepStage
from ddprun.config.changes import check_and_list_changes, learning_rates_changed
from ddprun.engine import seeding
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import StateError, hook_state_partitioning, raise_damaged_on_error, restore
from ddprun.sync.exchanger import can_be_averaged, mean_of, mean_optimizer_state
from ddprun.telemetry.control_message import Accumulator
from ddprun.telemetry.steps import Totals
from ddprun.telemetry.writer import ranks_with_records, truncate_records


def resume(session: Session) -> None:
    """Bring a session to where its run's newest whole checkpoint was taken; called by all ranks.

    Records of later steps are cut off. Without a checkpoint the run starts from the beginning. Raises
    PipelineError for a change that cannot be resumed, RunFolderError if no checkpoint can be read.
    """
    runtime, reporter, state = session.runtime, session.reporter, session.state
    found = _newest_valid_checkpoint(session)
    checkpoint = None if found is None else found.checkpoint
    if runtime.ranks.rank == 0:
        if (
            checkpoint is not None
            and runtime.records.remote_ranks
            and not ranks_with_records(runtime.run_dir, "steps")
        ):
            reporter.note("the records of earlier steps are on the host where rank 0 was before")
        try:
            truncate_records(runtime.run_dir, 0 if checkpoint is None else checkpoint.step)
        except OSError as error:
            problem = f"cannot resume in the run folder {runtime.shown_dir}: {error.strerror}"
            raise RunFolderError(problem) from None
    if found is None or checkpoint is None:
        reporter.note("no intact checkpoint: the run starts from the beginning")
        return
    with fail_on_all_ranks(session, checkpoint, "state"), raise_damaged_on_error("state"):
        saved = _read_state(session, found)
        before, cursor = saved["pipeline"], saved["position"]
        _reopen_longer_stage(session, before, cursor)
    notes = check_and_list_changes(
        runtime.loaded, before, next_stage=cursor["next"], begun_stage=cursor["stage"]
    )
    changed_data = _check_data(session, saved)
    with fail_on_all_ranks(session, checkpoint, "session"):
        restore(session, saved)
    for name, text, mid_epoch in changed_data:
        if not mid_epoch:
            runtime.fingerprints.skip_rest_of_epoch(name)
        reporter.events.warning("data_changed", name=name, how=text, mid_epoch=mid_epoch)
        reporter.note(f"{name} has changed: {text}")
    if state.cursor.mid_stage:
        new_rates = learning_rates_changed(runtime.loaded, before, cursor["next"])
        state.resume_state = {**saved, "new_rates": new_rates, "checkpoint": checkpoint}
    for note in notes:
        reporter.note(note)
    shown = "memory" if found.location.in_memory else runtime.display_path(checkpoint.path)
    state.cursor.note_world_size(state.step + 1, runtime.ranks.size)
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


def _check_data(session: Session, saved: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Data that has changed since the checkpoint; a PipelineError in mid-epoch, if the file says `stop`."""
    runtime = session.runtime
    pipeline, fingerprints = runtime.loaded.pipeline, runtime.fingerprints
    saved_data = saved.get("data", {})
    if pipeline.loader.sharded and saved["world_size"] != runtime.ranks.size:
        saved_data = {}  # rank 0 has another share of it
    changes = runtime.ranks.from_rank_0("resume/data", lambda: fingerprints.changes(saved_data))
    steps_left = any(isinstance(stage, StepStage) for stage in pipeline.stages[saved["position"]["next"] :])
    for name, text, mid_epoch in changes:
        if mid_epoch and steps_left and pipeline.checkpoint.on_changed_data == "stop":
            problem = f"{name}: {text}, in the middle of an epoch"
            allowed = "restore the data, or accept the change with --set checkpoint.on_changed_data=continue"
            raise fingerprints.error(name, problem, allowed)
    return [(name, text, mid_epoch) for name, text, mid_epoch in changes]


@contextmanager
def fail_on_all_ranks(session: Session, checkpoint: Checkpoint, part: str) -> Iterator[None]:
    """Context around reading a part of a checkpoint: if it fails on one rank, it fails on all with the same
    error, a PipelineError if the state does not fit the model, a RunFolderError if it is damaged. `part` must
    differ at each use.
    """
    runtime = session.runtime
    kind = problem = ""
    try:
        yield
    except StateError as error:
        kind, problem = "model", str(error)
    except DamagedError as error:
        kind, problem = "damaged", str(error)
    of_ranks = runtime.ranks.gather(f"resume/{part}", [kind, problem])
    kind, problem = next((one for one in of_ranks if one[0]), ("", ""))
    problem += f" ({runtime.display_path(checkpoint.path)})"
    if kind == "damaged":
        raise RunFolderError(f"the checkpoint of step {checkpoint.step} is damaged: {problem}")
    if kind:
        raise runtime.loaded.error(kind, problem)


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


# Which checkpoint.


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint whose files are all intact, each in some folder of its location."""

    location: CheckpointLocation
    checkpoint: Checkpoint  # where this rank sees it, or would
    held: dict[int, list[str]]  # for each leader, the intact files in its folder


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A checkpoint that is not used."""

    location: CheckpointLocation
    step: int
    why: str  # in one word
    reason: str  # in a sentence


def _newest_valid_checkpoint(session: Session) -> _Found | None:
    """The newest checkpoint that is whole, and whose weights and optimizer state are finite unless `on_nan`
    of the stage is `continue`. A RunFolderError: there are some, but they cannot be read here or now.
    """
    skipped: list[_Skipped] = []
    found = None
    for step, location in _list_checkpoints(session):
        assessed = _assess_checkpoint(session, location, step)
        if isinstance(assessed, _Found):
            found = assessed
            break
        skipped.append(assessed)
    unreadable = [one.reason for one in skipped if one.why == "unused"]
    if unreadable and found is None:
        root = session.runtime.locations[-1].root
        raise RunFolderError(f"no checkpoint in {root} can be read by all ranks: {unreadable[0]}")
    for one in skipped:
        _set_aside(session, one)
    return found


def _list_checkpoints(session: Session) -> list[tuple[int, CheckpointLocation]]:
    """The checkpoints of all folders, newest first, of one step those in memory first."""
    ranks, found = session.runtime.ranks, list[tuple[int, CheckpointLocation]]()
    for location in session.runtime.locations:
        if location.leads:
            folder.recover_interrupted_writes(location.root)
        of_ranks = ranks.gather(f"resume/steps/{location.name}", folder.steps_in(location.root))
        for rank, leader in enumerate(location.leaders):
            if of_ranks[rank] and not of_ranks[leader]:
                raise RunFolderError(
                    f"rank {rank} on {ranks.hosts[rank]} sees checkpoints in {location.root}, but rank "
                    f"{leader} on {ranks.hosts[leader]} sees none: start rank {leader} where they are"
                )
        steps = {step for leader in location.folders for step in of_ranks[leader]}
        found += [(step, location) for step in steps]
    return sorted(found, key=lambda one: one[0], reverse=True)


def _assess_checkpoint(session: Session, location: CheckpointLocation, step: int) -> _Found | _Skipped:
    """Find out together whether a checkpoint is whole and finite."""
    ranks, key = session.runtime.ranks, f"resume/{location.name}/{step}"
    mine = _verify_share(location, step)
    of_ranks = [_Share(**one) for one in ranks.gather(key, asdict(mine))]
    by_digest: dict[str, list[int]] = {}
    for leader in location.folders:
        members = location.members(leader)
        if len({of_ranks[rank].digest for rank in members}) == 1 and of_ranks[leader].digest:
            by_digest.setdefault(of_ranks[leader].digest, []).append(leader)
    reasons = [problem for share in of_ranks for problem in share.problems]
    for leaders in by_digest.values():
        held = {leader: list[str]() for leader in location.folders}
        for leader in leaders:
            held[leader] = [name for rank in location.members(leader) for name in of_ranks[rank].intact]
        manifest = of_ranks[leaders[0]].manifest
        assert manifest is not None
        checkpoint = Checkpoint(location.root / folder.checkpoint_name(step), **manifest)
        intact = {name for names in held.values() for name in names}
        if missing := sorted(checkpoint.files.keys() - intact):
            reasons.append(f"no host has its {missing[0]}")
            continue
        found = _Found(location, checkpoint, held)
        if checkpoint.nonfinite not in (None, folder.NONFINITE_LOSS):
            problem = f"{checkpoint.nonfinite} is not finite in it"
            if _on_nan_setting(session, _read_cursor(session, found)) != "continue":
                return _Skipped(location, step, "nonfinite", problem)
            session.reporter.note(f"using the checkpoint of step {step}, though {problem}")
        return found
    # Damaged if the leader of some folder sees it, too; what only others see may be a disk's delay.
    why = ""
    if location.leads and mine.seen:
        why = "unused"
        try:
            folder.verify(folder.open_checkpoint(location.root, step))
        except DamagedError as error:
            unreadable = isinstance(error, UnreadableError)
            if not unreadable or isinstance(error.__context__, FileNotFoundError):
                why = "damaged"
    of_leaders = set(ranks.gather(f"{key}/why", why))
    why = next((word for word in ("damaged", "unused") if word in of_leaders), "damaged")
    return _Skipped(location, step, why, next(iter(reasons), "ranks see different manifests"))


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank has found of a checkpoint, in its share of the files of a folder."""

    seen: bool = False  # there is such a folder
    digest: str = ""  # of its manifest; empty: there is none that can be read
    manifest: dict[str, Any] | None = None  # of a leader: what `Checkpoint` takes besides a path
    intact: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _verify_share(location: CheckpointLocation, step: int) -> _Share:
    members = location.members(location.leaders[location.rank])
    share, apart = members.index(location.rank), len(location.folders) > 1
    try:
        checkpoint = folder.open_checkpoint(location.root, step)
        digest = folder.manifest_digest(checkpoint)
    except DamagedError as error:
        missing = isinstance(error.__context__, FileNotFoundError)
        seen = (location.root / folder.checkpoint_name(step)).is_dir()
        return _Share(seen=seen, problems=[] if missing and apart and not seen else [str(error)])
    intact, problems = list[str](), list[str]()
    for name in folder.file_names(folder.part_names(checkpoint.world_size)[share :: len(members)]):
        try:
            folder.verify(checkpoint, [name])
            intact.append(name)
        except DamagedError as error:
            if not (apart and isinstance(error.__context__, FileNotFoundError)):
                problems.append(str(error))
    manifest = None
    if location.leads:
        manifest = {name: getattr(checkpoint, name) for name in ("step", "world_size", "files", "nonfinite")}
    return _Share(True, digest, manifest, intact, problems)


def _read_cursor(session: Session, found: _Found) -> dict[str, Any]:
    """Where the run was when a checkpoint was taken, from the first folder that has rank 0's part."""
    name = f"{rank_part_name(0)}.json"
    reader = next(leader for leader, names in found.held.items() if name in names)
    ranks, checkpoint, cursor = session.runtime.ranks, found.checkpoint, None
    if ranks.rank == reader:
        cursor = folder.read_json(checkpoint, checkpoint.path / name)["position"]
    key = f"resume/{found.location.name}/{checkpoint.step}/cursor"
    read: dict[str, Any] = ranks.gather(key, cursor)[reader]
    return read


def _on_nan_setting(session: Session, cursor: Mapping[str, Any]) -> str:
    """What the resumed file says of the stage that comes next, or else of the last one that took steps."""
    pipeline = session.runtime.loaded.pipeline
    for index in (cursor["next"], cursor["stage"]):
        stage = pipeline.stages[index] if index is not None and index < len(pipeline.stages) else None
        if isinstance(stage, StepStage):
            return stage.effective_settings(pipeline).on_nan
    return pipeline.on_nan


def _set_aside(session: Session, skipped: _Skipped) -> None:
    """Report that a checkpoint is not used, and rename it so that it does not count any more; in memory it is
    deleted.
    """
    reporter, location, step, why = session.reporter, skipped.location, skipped.step, skipped.why
    now = "not in this folder"
    if location.leads and location.in_memory:
        folder.remove_tree(location.root / folder.checkpoint_name(step))
        now = "deleted"
    elif location.leads:
        try:
            now = f"renamed to {location.root.name}/{folder.set_aside(location.root, step, why).name}"
        except OSError as error:
            now = f"not renamed: {error.strerror}"
    if session.runtime.ranks.rank == 0:
        reporter.events.warning("checkpoint_skipped", step=step, why=why, reason=skipped.reason)
        which = {"damaged": ", which is damaged", "unused": ", which not all ranks can read"}.get(why, "")
        where = " in memory" if location.in_memory else ""
        reporter.note(f"skipping the checkpoint of step {step}{where}{which}: {skipped.reason} ({now})")


# Its state.


def _fetch(session: Session, found: _Found, needed: dict[int, set[str]], what: str) -> None:
    """Have the hosts that lack files of a checkpoint get them from others; raises DamagedError on all ranks
    if some cannot be written.
    """
    ranks, checkpoint = session.runtime.ranks, found.checkpoint
    transfers = plan_transfers(needed, found.held)
    if not transfers:
        return
    problem = ""
    try:
        if any(target == ranks.rank for _, target, _ in transfers):
            checkpoint.path.mkdir(parents=True, exist_ok=True)
        control = session.runtime.exchange.control
        run_transfers(control, ranks.rank, checkpoint.path, transfers, checkpoint.files)
        if any(target == ranks.rank for _, target, _ in transfers):
            folder.write_manifest(
                checkpoint.path,
                checkpoint.step,
                checkpoint.world_size,
                checkpoint.files,
                checkpoint.nonfinite,
            )
    except OSError as error:
        problem = f"{ranks.host} cannot write what other hosts sent: {error.strerror or error}"
    for _, target, names in transfers:
        found.held[target].extend(names)
    if failed := next(filter(None, ranks.gather(f"resume/{what}", problem)), None):
        raise DamagedError(failed)


def _read_state(session: Session, found: _Found) -> dict[str, Any]:
    """This rank's state: what all ranks share, and its own."""
    runtime, checkpoint = session.runtime, found.checkpoint
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    _fetch(session, found, found.location.files_needed(checkpoint.world_size), "own files")
    layout = runtime.ranks.from_rank_0(
        "resume/layout", lambda: str(folder.read_json(checkpoint, checkpoint.path / "shared.json")["layout"])
    )
    # With other ranks, buckets, hosts or hooks, the hooks' state moves between ranks.
    merging = checkpoint.world_size != ranks or layout != hook_state_partitioning(session)
    shared = folder.read_part(checkpoint, "shared")
    if not merging:
        return {**shared, **folder.read_part(checkpoint, rank_part_name(rank))}
    everything = set(checkpoint.files)
    _fetch(session, found, dict.fromkeys(found.location.folders, everything), "all files")
    own = [folder.read_part(checkpoint, rank_part_name(old)) for old in range(checkpoint.world_size)]
    if checkpoint.world_size != ranks:
        with raise_damaged_on_error("state of other ranks"):
            return _reshard_state(session, shared, own)
    with raise_damaged_on_error("hooks"):
        return {**shared, **own[rank], "hooks": runtime.stacks.merge([one["hooks"] for one in own])}


_TAKEN_FROM_RANK_0 = {
    # The same on all ranks at a checkpoint.
    *("step", "position", "schedule", "precision", "feed", "stage_feeds", "buffers_seen", "evaluations"),
    *("balance", "outer_momentum", "frozen", "reported"),
    # These may differ between ranks; rank 0's are also what `save` writes.
    *("buffers", "extra"),
}  # what another number of ranks takes from rank 0, besides what is in `shared`


def _reshard_state(session: Session, shared: dict[str, Any], own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """State for another number of ranks: nothing that was learned is lost, and no sample is seen twice.

    Ranks whose parameters differed become equal, as in a synchronisation. The hooks' residuals are divided
    among the ranks: their sum stays. Random generators start from a seed of the rank and the step.
    """
    runtime = session.runtime
    loaded, rank, ranks = runtime.loaded, runtime.ranks.rank, runtime.ranks.size
    state = shared | {key: value for key, value in own[0].items() if key in _TAKEN_FROM_RANK_0}
    cursor, stages = state["position"], loaded.pipeline.stages
    stage = stages[cursor["next"]] if cursor["stage"] == cursor["next"] < len(stages) else None
    refused = None
    if isinstance(stage, StepStage) and stage.effective_settings(loaded.pipeline).plan.keeps_apart:
        refused = stage.path, "its ranks train independently, so another number of ranks cannot resume it"
    elif loaded.pipeline.loader.sharded and any(
        feed["samples"] for feed in (state["feed"], *state["stage_feeds"].values())
    ):
        text = "the data set shards itself by rank, so another number of ranks cannot resume mid-epoch"
        refused = "loader.sharded", text
    if refused is not None:
        raise loaded.error(*refused, "resume on as many ranks as before")
    if "parameters" not in shared:
        state["parameters"] = {  # what has no mean (quantised weights) is rank 0's
            name: mean_of([one["parameters"][name] for one in own]) if can_be_averaged(value) else value
            for name, value in own[0]["parameters"].items()
        }
    if "optimizer" not in shared:
        state["optimizer"] = mean_optimizer_state([one["optimizer"] for one in own])
    if "ema" not in shared:
        state["ema"] = ema = own[0]["ema"]
        if ema is not None:
            averages = [one["ema"]["tensors"] for one in own]
            merged = {name: mean_of([one[name] for one in averages]) for name in averages[0]}
            state["ema"] = {**ema, "tensors": merged, "apart": False}
    state["hooks"] = runtime.stacks.merge([one["hooks"] for one in own])
    state["sync_of_ranks"] = [one["sync"] for one in own if one["sync"]] or [{}]
    state["replicas"] = ["common", "common", None, own[0]["replicas"][3]]
    totals = [Totals.of(one["telemetry"]["totals"]) for one in own]
    state["telemetry"] = {
        "totals": Totals.of_other_ranks(totals, rank, ranks).numbers(),
        "round": Accumulator().state_dict([]),
        "own_loss": own[0]["telemetry"]["own_loss"],
        "stragglers": own[0]["telemetry"]["stragglers"] if rank == 0 else [],
    }
    seeding.seed_everything(loaded.pipeline.seed + rank + ranks * (1 + state["step"]))
    state["generators"] = seeding.generator_state(runtime.device)
    return state
