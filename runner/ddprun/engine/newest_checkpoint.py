"""Which checkpoint a run resumes from, agreed by all ranks: the newest that is whole and finite.

It may be in memory or on disk. Every rank checks a share of the files in the folder that it sees. A
checkpoint is whole if every file is intact in some folder; a host that lacks a file gets it from another
host. If a checkpoint is not whole, or its weights are not finite, it is named and left alone, and the one
before it is tried.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError
from ddprun.checkpoint.folder import Checkpoint
from ddprun.checkpoint.location import CheckpointLocation, plan_transfers, run_transfers
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import hook_state_partitioning


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose files are all intact, each in some folder of its location."""

    location: CheckpointLocation
    checkpoint: Checkpoint  # where this rank sees it, or would
    held: dict[int, list[str]]  # for each leader, the intact files in its folder
    moves_state: bool  # other ranks, buckets, hosts or hooks: each rank reads the state of all


def newest_checkpoint(session: Session) -> FoundCheckpoint | None:
    """The newest checkpoint that is whole, and whose weights and optimizer state are finite unless some
    stage's `on_nan` is `continue`; each rank sees what it needs of it. A RunFolderError: there are some on
    disk, but none can be used, or its files cannot be written here.
    """
    skipped = list[tuple[CheckpointLocation, int, str]]()  # with the reason
    found = None
    for step, location in _list_checkpoints(session):
        assessed = _assess_checkpoint(session, location, step)
        if isinstance(assessed, FoundCheckpoint):
            problem = _bring_files(session, assessed)
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


def _assess_checkpoint(session: Session, location: CheckpointLocation, step: int) -> FoundCheckpoint | str:
    """Find out together whether a checkpoint is whole and finite; gives why it is not."""
    runtime = session.runtime
    mine = _verify_share(location, step)
    of_ranks = [_Share(**one) for one in runtime.ranks.gather(f"resume/{location.name}/{step}", asdict(mine))]
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
        if checkpoint.nonfinite not in (None, folder.NONFINITE_LOSS):
            problem = f"{checkpoint.nonfinite} is not finite in it"
            stages = runtime.loaded.pipeline.stages_and_settings()
            if all(settings.on_nan == "stop" for _, settings in stages):
                return problem
            session.reporter.note(f"using the checkpoint of step {step}, though {problem}")
        as_now = runtime.ranks.size, hook_state_partitioning(runtime)
        moves_state = (checkpoint.world_size, checkpoint.layout) != as_now
        return FoundCheckpoint(location, checkpoint, held, moves_state)
    return next(iter(reasons), "ranks see different manifests")


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


def _bring_files(session: Session, found: FoundCheckpoint) -> str | None:
    """Have each host get the files that its ranks read from hosts that have them; gives on all ranks why some
    cannot be written, None if all are there.
    """
    ranks, checkpoint, held = session.runtime.ranks, found.checkpoint, found.held
    needed: Any = found.location.files_needed(checkpoint.world_size)
    if found.moves_state:
        needed = dict.fromkeys(found.location.folders, checkpoint.files.keys())
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
    key = f"resume/{found.location.name}/{checkpoint.step}/fetched"
    return next(filter(None, ranks.gather(key, problem)), None)
