"""Going on from a checkpoint: which one, on which all ranks agree, and what becomes of it.

The newest checkpoint that is whole counts. Every rank checks a share of its files; a damaged one is named and
left alone, and the one before it is looked at. Ranks that do not see the run's folder get their files from
rank 0.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import Checkpoint, rank_name
from ddprun.checkpoint.tensors import DamagedError, UnreadableError
from ddprun.engine import seeding
from ddprun.engine.checkpoints import FOLDER, layout_of
from ddprun.engine.ranks import Ranks
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import StateError, bring_back
from ddprun.spec import AverageStage, BroadcastStage, PipelineError, StepStage
from ddprun.spec.changes import changes, schedule_changed
from ddprun.telemetry.cut import cut_records
from ddprun.telemetry.records import Totals
from ddprun.telemetry.round import NOTHING_ADDED

_CHUNK_BYTES = 64 << 20


def resume(session: Session) -> Checkpoint | None:
    """Bring a session to where its run's newest whole checkpoint was taken; called by all ranks together.

    Records of steps that are undone are cut off. Without a checkpoint the run starts anew.

    Raises:
        PipelineError: the pipeline was changed in a way that cannot go on from there.
        RunFolderError: no checkpoint can be read, though there are some.
    """
    root = session.run_dir / FOLDER
    found = _newest_whole(session, root)
    if session.ranks.rank == 0:
        cut_records(session.run_dir, 0 if found is None else found.step)
    if found is None:
        session.screen.note("there is no whole checkpoint: the run starts anew")
        return None
    with TemporaryDirectory(prefix="ddprun-") as scratch:
        state = _state(session, found, Path(scratch))
    before, position = state["pipeline"], state["position"]
    _reopen(session, before, position)
    notes = changes(session.loaded, before, next_stage=position["next"], begun=position["stage"])
    try:
        bring_back(session, state)
    except StateError as error:
        raise PipelineError([session.loaded.fault("model", f"{error} ({found.path})")]) from None
    if session.position.mid_stage:
        session.mid_stage = {**state, "new_rates": schedule_changed(session.loaded, before, position["next"])}
    for note in notes:
        session.screen.note(note)
    session.events.info(
        "resumed",
        step=session.step,
        stage=session.position.next,
        checkpoint=str(found.path),
        world_size_before=found.world_size,
        changed=notes,
    )
    nothing = session.position.next >= len(session.loaded.pipeline.stages)
    left = "; nothing is left to do: every stage is done" if nothing else ""
    session.screen.note(f"goes on after step {session.step}, from {found.path}{left}")
    return found


def _reopen(session: Session, before: Mapping[str, Any], position: dict[str, Any]) -> None:
    """Go back into the last stage that took steps, if it is longer now and nothing has changed the weights
    since it ended.
    """
    last = position["stage"]
    if last is None or last >= position["next"]:
        return
    stages = session.loaded.pipeline.stages
    since = stages[last + 1 : position["next"]]
    stage = stages[last] if last < len(stages) else None
    if isinstance(stage, StepStage) and not any(isinstance(s, AverageStage | BroadcastStage) for s in since):
        had = before["stages"][last].get(stage.name) or {}  # another kind of stage is told by `changes`
        done, epochs = position["entries"][last]["steps"], had.get("epochs")
        longer = stage.steps is not None and stage.steps > done
        if longer or (stage.epochs is not None and stage.epochs > (epochs or 0)):
            position["next"] = last
            position["seconds"] = position["entries"][last]["seconds"]
            position["entries"] = position["entries"][:last]


def _newest_whole(session: Session, root: Path) -> Checkpoint | None:
    """The newest checkpoint that every rank finds whole; each looks at a share of the files.

    Raises:
        RunFolderError: there are some, which can only not be read, here or now.
    """
    ranks = session.ranks
    steps = _listed(session, root)
    passed: list[tuple[int, str, str]] = []
    for step in steps:
        reason = _problem(session, root, step)
        if reason is None:
            break
        passed.append((step, ranks.tell_all(f"resume/{step}/why", partial(_why, root, step)), reason))
    unreadable = [reason for _, why, reason in passed if why == "unused"]
    if unreadable and len(passed) == len(steps):
        raise RunFolderError(f"no checkpoint in {root} can be read by all ranks: {unreadable[0]}")
    for step, why, reason in passed:
        if ranks.rank == 0:
            _pass_by(session, root, step, why, reason)
    return None if len(passed) == len(steps) else _told(ranks, root, steps[len(passed)])


def _listed(session: Session, root: Path) -> list[int]:
    """The steps of the checkpoints that rank 0 sees."""
    ranks = session.ranks
    if ranks.rank == 0:
        folder.clear_unfinished(root)
    seen = [json.loads(text) for text in ranks.gather("resume/steps", json.dumps(folder.steps_in(root)))]
    steps: list[int] = seen[0]
    for rank, others in enumerate(seen):
        if others and not steps:
            raise RunFolderError(
                f"rank {rank} on {ranks.hosts[rank]} sees checkpoints in {root}, and rank 0 on "
                f"{ranks.hosts[0]} sees none: rank 0 has to be where they are"
            )
    return steps


def _problem(session: Session, root: Path, step: int) -> str | None:
    """Why not all ranks can use a checkpoint; None if they can."""
    ranks = session.ranks
    looking = [rank for rank in range(ranks.size) if rank not in session.records.away]
    problem = ""
    if ranks.rank in looking:
        try:
            found = folder.opened(root, step)
            names = sorted(found.files)
            folder.verify(found, names[looking.index(ranks.rank) :: len(looking)])
        except DamagedError as error:
            problem = str(error)
    return next(filter(None, ranks.gather(f"resume/{step}", problem)), None)


def _why(root: Path, step: int) -> str:
    """On rank 0: whether a checkpoint itself is damaged, or some rank does not see it as it is."""
    try:
        folder.verify(folder.opened(root, step))
    except UnreadableError as error:
        return "damaged" if isinstance(error.__context__, FileNotFoundError) else "unused"
    except DamagedError:
        return "damaged"
    return "unused"


def _pass_by(session: Session, root: Path, step: int, why: str, reason: str) -> None:
    """On rank 0: tell that a checkpoint is not gone on from, and see that it is not counted any more."""
    session.events.warning("checkpoint_passed_by", step=step, why=why, reason=reason)
    told = "is damaged and" if why == "damaged" else "cannot be read by all ranks and is"
    try:
        now = f"and now {root.name}/{folder.set_aside(root, step, why).name}"
    except OSError as error:
        now = f"and stays where it is ({error.strerror})"
    session.screen.note(f"the checkpoint of step {step} {told} not used, {now}: {reason}")


def _told(ranks: Ranks, root: Path, step: int) -> Checkpoint:
    """What rank 0 reads in the manifest."""

    def described() -> str:
        found = folder.opened(root, step)
        return json.dumps([found.world_size, found.files])

    world_size, files = json.loads(ranks.tell_all(f"resume/{step}/manifest", described))
    return Checkpoint(root / folder.name_of(step), step, world_size, files)


def _state(session: Session, found: Checkpoint, scratch: Path) -> dict[str, Any]:
    """This rank's state: what all had alike, and its own."""
    rank, ranks = session.ranks.rank, session.ranks.size
    merging = found.world_size != ranks or _is_laid_out_anew(session, found)
    everybody = list(range(found.world_size))
    wanted = {
        reader: ["shared", *map(rank_name, everybody if merging else [reader])]
        for reader in [*session.records.away, rank]
    }
    source = _fetch(session, found, wanted, scratch)
    shared = folder.read(source, "shared")
    own = [folder.read(source, rank_name(old)) for old in (everybody if merging else [rank])]
    if found.world_size == ranks:
        mine = own[rank if merging else 0]
        state = {**shared, **mine}
        if merging:
            state["hooks"] = session.stacks.merge([one["hooks"] for one in own])
        return state
    return _for_another_world(session, shared, own)


def _is_laid_out_anew(session: Session, found: Checkpoint) -> bool:
    """Whether buckets, hosts or hooks are others than before, so that what hooks keep moves between ranks."""
    tree = session.ranks.tell_all(
        "resume/layout", lambda: json.dumps(folder.read_json(found.path / "shared.json")["layout"])
    )
    return bool(json.loads(tree) != layout_of(session))


def _fetch(
    session: Session, found: Checkpoint, wanted: Mapping[int, Sequence[str]], scratch: Path
) -> Checkpoint:
    """Where this rank can read its files: from rank 0 if it does not see the run's folder."""
    control, rank = session.exchange.control, session.ranks.rank
    for reader in session.records.away:
        names = [path.name for name in wanted.get(reader, ()) for path in folder.paths(found.path, name)]
        if rank == 0:
            for name in names:
                with (found.path / name).open("rb") as file:
                    while data := file.read(_CHUNK_BYTES):
                        control.send_bytes(data, reader)
        elif rank == reader:
            for name in names:
                left = found.files[name]["bytes"]
                with (scratch / name).open("wb") as file:
                    while left:
                        data = control.receive_bytes(0)
                        file.write(data)
                        left -= len(data)
    if rank not in session.records.away:
        return found
    return Checkpoint(scratch, found.step, found.world_size, found.files)


# Another number of ranks.


def _for_another_world(
    session: Session, shared: dict[str, Any], own: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """State for ranks of another world: nothing that was learned is lost, and no sample is seen twice.

    Ranks that were apart become equal, as in a synchronisation. What hooks kept is divided among the ranks:
    its sum stays. Random generators start from a seed of the rank and the step.
    """
    rank, ranks = session.ranks.rank, session.ranks.size
    state = {**shared, **own[0]}
    _refuse_replicas(session, state["position"])
    if "parameters" not in shared:
        state["parameters"] = _mean_of([one["parameters"] for one in own])
    if "optimizer" not in shared:
        state["optimizer"] = _mean_of([one["optimizer"] for one in own])
    state["hooks"] = session.stacks.merge([one["hooks"] for one in own])
    state["sync_of_ranks"] = [one["sync"] for one in own if one["sync"]] or [{}]
    state["together"] = ["common", "common", None, state["together"][3]]
    state["ledger"] = _divided([one["ledger"] for one in own], rank, ranks)
    seeding.seed_everything(session.loaded.pipeline.seed + rank + ranks * (1 + state["step"]))
    state["generators"] = seeding.generator_state(session.place.device)
    return state


def _refuse_replicas(session: Session, position: Mapping[str, Any]) -> None:
    """A stage that keeps ranks apart on purpose has as many replicas as it had ranks."""
    stages = session.loaded.pipeline.stages
    begun = position["stage"] == position["next"] < len(stages)
    stage = stages[position["next"]] if begun else None
    if isinstance(stage, StepStage) and stage.effective(session.loaded.pipeline).sync.name == "independent":
        text = "its ranks train independently, so another number of ranks cannot go on with it"
        raise PipelineError([session.loaded.fault(stage.path, text, "resume on as many ranks as before")])


def _mean_of(values: Sequence[Any]) -> Any:
    """Floating-point tensors become their mean over ranks, counters the largest; the rest is rank 0's."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, Tensor):
        stacked = torch.stack(list(values))
        if first.is_floating_point() and first.numel() != 1:
            return stacked.double().mean(0).to(first.dtype)
        return stacked.amax(0) if not first.is_complex() else stacked.mean(0)
    return first


def _divided(ledgers: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """What old ranks had added up, each given to one new rank."""
    mine = [ledger["totals"] for place, ledger in enumerate(ledgers) if place % ranks == rank]
    return {
        "totals": [sum(column) for column in zip(*mine, strict=True)] if mine else Totals().numbers(),
        "round": NOTHING_ADDED,
        "own_loss": ledgers[0]["own_loss"],
        "stragglers": ledgers[0]["stragglers"] if rank == 0 else [],
    }
