"""Which checkpoint a run resumes from, agreed by all ranks: the newest that is whole and finite.

It may be in memory or on disk. Every rank checks a share of the files in the folder that it sees. A
checkpoint is whole if every file is intact in some folder; a host that lacks a file gets it from another
host. If a checkpoint is not whole, or its weights are not finite, it is named and left alone, and the one
before it is tried.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError, UnreadableError
from ddprun.checkpoint.folder import Checkpoint, rank_part_name
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers, run_transfers
from ddprun.config import StepStage
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import hook_state_partitioning, raise_damaged_on_error


@dataclass(slots=True)
class FoundCheckpoint:
    """A checkpoint whose files are all intact, each in some folder of its location."""

    location: CheckpointLocation
    checkpoint: Checkpoint  # where this rank sees it, or would
    held: dict[int, list[str]]  # for each leader, the intact files in its folder
    moves_state: bool = False  # other ranks, buckets, hosts or hooks: each rank reads the state of all


@dataclass(frozen=True, slots=True)
class _Skipped:
    """A checkpoint that is not used."""

    location: CheckpointLocation
    step: int
    why: str  # in one word
    reason: str  # in a sentence


def newest_checkpoint(session: Session) -> FoundCheckpoint | None:
    """The newest checkpoint that is whole, and whose weights and optimizer state are finite unless `on_nan`
    of the stage is `continue`; each rank sees what it needs of it. A RunFolderError: there are some, but they
    cannot be read here or now.
    """
    skipped: list[_Skipped] = []
    found = None
    for step, location in _list_checkpoints(session):
        assessed = _assess_checkpoint(session, location, step)
        if isinstance(assessed, FoundCheckpoint):
            problem = _bring_all_files(session, assessed)
            if problem is None:
                found = assessed
                break
            if not location.in_memory:
                raise RunFolderError(f"cannot resume from the checkpoint of step {step}: {problem}")
            assessed = _Skipped(location, step, "incomplete", problem)
        skipped.append(assessed)
    absent = [one for one in skipped if one.why in ("unused", "incomplete") and not one.location.in_memory]
    if absent and found is None:
        where = f"no checkpoint in {absent[0].location.root} can be used by all ranks"
        raise RunFolderError(f"{where}; that of step {absent[0].step}: {absent[0].reason}")
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
                    f"{leader} on {ranks.hosts[leader]} sees none: start rank {leader} on a host that sees "
                    "them"
                )
        steps = {step for leader in location.folders for step in of_ranks[leader]}
        found += [(step, location) for step in steps]
    return sorted(found, key=lambda one: one[0], reverse=True)


def _assess_checkpoint(
    session: Session, location: CheckpointLocation, step: int
) -> FoundCheckpoint | _Skipped:
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
            reasons.append(f"no host has an intact copy of its {missing[0]}")
            continue
        found = FoundCheckpoint(location, checkpoint, held)
        if checkpoint.nonfinite not in (None, folder.NONFINITE_LOSS):
            problem = f"{checkpoint.nonfinite} is not finite in it"
            if _on_nan_setting(session, _read_cursor(session, found)) != "continue":
                return _Skipped(location, step, "nonfinite", problem)
            session.reporter.note(f"using the checkpoint of step {step}, though {problem}")
        return found
    if not any(share.problems for share in of_ranks):
        why = "incomplete"
    elif len(location.folders) > 1:
        why = "damaged"
    else:
        why = ranks.from_rank_0(f"{key}/why", partial(_why_unusable, location, step))
    return _Skipped(location, step, why, next(iter(reasons), "ranks see different manifests"))


def _why_unusable(location: CheckpointLocation, step: int) -> str:
    """On rank 0, of a checkpoint that some rank does not find intact: `damaged`, if rank 0 sees damage, too.
    What only others see may be a network disk's delay: `unused`.
    """
    try:
        folder.verify(folder.open_checkpoint(location.root, step))
    except DamagedError as error:
        if not isinstance(error, UnreadableError) or isinstance(error.__context__, FileNotFoundError):
            return "damaged"
    return "unused"


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank has found of a checkpoint, in its share of the files of a folder."""

    digest: str = ""  # of its manifest; empty: there is none that can be read
    manifest: dict[str, Any] | None = None  # of a leader: what `Checkpoint` takes besides a path
    intact: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _verify_share(location: CheckpointLocation, step: int) -> _Share:
    members = location.members(location.leaders[location.rank])
    share = members.index(location.rank)
    path = location.root / folder.checkpoint_name(step)
    try:
        checkpoint = folder.open_checkpoint(location.root, step)
    except DamagedError as error:
        elsewhere = len(location.folders) > 1 and not os.path.lexists(path)
        return _Share(problems=[] if elsewhere else [str(error)])
    intact, problems = list[str](), list[str]()
    for name in folder.file_names(folder.part_names(checkpoint.world_size)[share :: len(members)]):
        try:
            folder.verify(checkpoint, [name])
            intact.append(name)
        except DamagedError as error:
            if checkpoint.folders == 1 or os.path.lexists(path / name):  # else another host may have it
                problems.append(str(error))
    manifest = checkpoint.described() if location.leads else None
    return _Share(checkpoint.digest, manifest, intact, problems)


def _read_cursor(session: Session, found: FoundCheckpoint) -> dict[str, Any]:
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
    if not location.leads:
        return
    if location.in_memory:
        folder.remove_tree(location.root / folder.checkpoint_name(step))
        now = "deleted"
    else:
        try:
            now = f"renamed to {location.root.name}/{folder.set_aside(location.root, step, why).name}"
        except FileNotFoundError:
            now = "of which this host has nothing"
        except OSError as error:
            now = f"not renamed: {error.strerror}"
    if location.rank == 0:
        reporter.events.warning("checkpoint_skipped", step=step, why=why, reason=skipped.reason)
        which = {"unused": ", which not all ranks can read", "nonfinite": ""}.get(why, f", which is {why}")
        where = " in memory" if location.in_memory else ""
        reporter.note(f"skipping the checkpoint of step {step}{where}{which}: {skipped.reason} ({now})")


def _bring_all_files(session: Session, found: FoundCheckpoint) -> str | None:
    """Have each host get the files that its ranks read, and find out which; gives on all ranks why some
    cannot be written, None if all are there. Raises RunFolderError if what its hash vouches for is no state.
    """
    runtime, checkpoint = session.runtime, found.checkpoint
    if problem := _fetch_files(session, found, found.location.files_needed(checkpoint.world_size)):
        return problem

    def read_layout() -> tuple[str, str]:
        try:
            with raise_damaged_on_error("state"):
                return str(folder.read_json(checkpoint, checkpoint.path / "shared.json")["layout"]), ""
        except DamagedError as error:
            return "", str(error)

    key = f"resume/{found.location.name}/{checkpoint.step}/layout"
    layout, damage = runtime.ranks.from_rank_0(key, read_layout)
    if damage:
        raise RunFolderError(f"the checkpoint of step {checkpoint.step} is damaged: {damage}")
    if checkpoint.world_size == runtime.ranks.size and layout == hook_state_partitioning(session):
        return None
    found.moves_state = True
    everything = dict.fromkeys(found.location.folders, checkpoint.files.keys())
    return _fetch_files(session, found, everything)


def _fetch_files(
    session: Session, found: FoundCheckpoint, needed: Mapping[int, Collection[str]]
) -> str | None:
    """Have the hosts that lack `needed` files of a checkpoint (by leader) get them from others; gives on all
    ranks why some cannot be written, None if all are there.
    """
    ranks, checkpoint, held = session.runtime.ranks, found.checkpoint, found.held
    transfers = plan_transfers(needed, held)
    if not transfers:
        return None
    problem = ""
    try:
        if receives := any(target == ranks.rank for _, target, _ in transfers):
            with suppress(OSError):  # each file then fails, and is taken from its sender all the same
                folder.make_folder(checkpoint.path)
        control = session.runtime.exchange.control
        run_transfers(control, ranks.rank, checkpoint.path, transfers, checkpoint.files)
        if receives:
            folder.write_manifest(checkpoint)
    except OSError as error:
        problem = f"{ranks.host} cannot write the files that other hosts sent: {error.strerror or error}"
    key = f"resume/{found.location.name}/{checkpoint.step}/fetched/{sum(map(len, held.values()))}"
    for _, target, names in transfers:
        held[target].extend(names)
    return next(filter(None, ranks.gather(key, problem)), None)
