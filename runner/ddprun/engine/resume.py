"""Going on from a checkpoint: which one, on which all ranks agree, and what becomes of it.

The newest checkpoint that is whole and finite counts. Every rank checks a share of its files; one that is
damaged, or whose weights are not finite, is named and left alone, and the one before it is looked at. Ranks
that do not see the run's folder get their files from rank 0.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ddprun.checkpoint import folder
from ddprun.checkpoint.folder import FOLDER, Checkpoint, rank_name
from ddprun.checkpoint.tensors import DamagedError, UnreadableError
from ddprun.config import AverageStage, BroadcastStage, PipelineError, StepStage
from ddprun.config.changes import changes, schedule_changed
from ddprun.engine import seeding
from ddprun.engine.checkpoints import layout_of
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import StateError, bring_back, check_fields, reading
from ddprun.parallel.ranks import Ranks
from ddprun.run_files import open_file
from ddprun.sync.optimizer_state import has_mean, mean_of, mean_state
from ddprun.telemetry.control_message import NOTHING_ADDED
from ddprun.telemetry.steps import Totals
from ddprun.telemetry.writer import truncate_records

_CHUNK_BYTES = 64 << 20


def resume(session: Session) -> Checkpoint | None:
    """Bring a session to where its run's newest whole checkpoint was taken; called by all ranks together.

    Records of steps that are undone are cut off. Without a checkpoint the run starts anew.

    Raises:
        PipelineError: the pipeline was changed in a way that cannot go on from there.
        RunFolderError: no checkpoint can be read, though there are some.
    """
    runtime, reporter = session.runtime, session.reporter
    root = runtime.run_dir / FOLDER
    found = _newest_whole(session, root)
    if runtime.ranks.rank == 0:
        try:
            truncate_records(runtime.run_dir, 0 if found is None else found.step)
        except OSError as error:
            raise RunFolderError(
                f"cannot go on in the run folder {runtime.run_dir}: {error.strerror}"
            ) from None
    if found is None:
        reporter.note("there is no whole checkpoint: the run starts anew")
        return None
    with TemporaryDirectory(prefix="ddprun-") as scratch, agreed(session, found, "state"):
        state = _state(session, found, Path(scratch))
        before, cursor = state["pipeline"], state["position"]
        with reading("pipeline"):
            _reopen(session, before, cursor)
    notes = changes(runtime.loaded, before, next_stage=cursor["next"], begun=cursor["stage"])
    with agreed(session, found, "session"):
        bring_back(session, state)
    if session.state.cursor.mid_stage:
        new_rates = schedule_changed(runtime.loaded, before, cursor["next"])
        session.state.mid_stage = {**state, "new_rates": new_rates, "checkpoint": found}
    for note in notes:
        reporter.note(note)
    reporter.events.info(
        "resumed",
        step=session.state.step,
        stage=session.state.cursor.next,
        checkpoint=str(found.path),
        world_size_before=found.world_size,
        changed=notes,
    )
    nothing = session.state.cursor.next >= len(runtime.loaded.pipeline.stages)
    left = "; nothing is left to do: every stage is done" if nothing else ""
    reporter.note(f"goes on after step {session.state.step}, from {found.path}{left}")
    return found


@contextmanager
def agreed(session: Session, found: Checkpoint, part: str) -> Iterator[None]:
    """Around what reads a checkpoint's state: if one rank cannot, all end, for the same reason.

    Args:
        session: of the run.
        found: the checkpoint.
        part: what is read; another word each time.

    Raises:
        PipelineError: the state does not fit the model.
        RunFolderError: it is no state.
    """
    runtime = session.runtime
    problem = ["", ""]
    try:
        yield
    except StateError as error:
        problem = ["unfit", str(error)]
    except DamagedError as error:
        problem = ["damaged", str(error)]
    told = map(json.loads, runtime.ranks.gather(f"resume/{part}", json.dumps(problem)))
    kind, text = next((one for one in told if one[0]), problem)
    if kind == "unfit":
        raise PipelineError([runtime.loaded.fault("model", f"{text} ({found.path})")])
    if kind:
        raise RunFolderError(f"the checkpoint of step {found.step} is damaged: {text} ({found.path})")


def _reopen(session: Session, before: Mapping[str, Any], cursor: dict[str, Any]) -> None:
    """Go back into the last stage that took steps, if it is longer now and nothing has changed the weights
    since it ended.
    """
    last = cursor["stage"]
    if last is None or last >= cursor["next"]:
        return
    stages = session.runtime.loaded.pipeline.stages
    since = stages[last + 1 : cursor["next"]]
    stage = stages[last] if last < len(stages) else None
    if isinstance(stage, StepStage) and not any(isinstance(s, AverageStage | BroadcastStage) for s in since):
        had = before["stages"][last].get(stage.name) or {}  # another kind of stage is told by `changes`
        done, epochs = cursor["entries"][last]["steps"], had.get("epochs")
        longer = stage.steps is not None and stage.steps > done
        if longer or (stage.epochs is not None and stage.epochs > (epochs or 0)):
            cursor["next"] = last
            cursor["seconds"] = cursor["entries"][last]["seconds"]
            cursor["entries"] = cursor["entries"][:last]


def _newest_whole(session: Session, root: Path) -> Checkpoint | None:
    """The newest checkpoint that every rank finds whole, and whose weights and optimizer state are finite
    unless `on_nan` of the stage is `continue`; each rank looks at a share of the files.

    Raises:
        RunFolderError: there are some, which can only not be read, here or now.
    """
    ranks = session.runtime.ranks
    steps = _listed(session, root)
    passed: list[tuple[int, str, str]] = []
    for step in steps:
        reason = _problem(session, root, step)
        if reason is None:
            lost = ranks.tell_all(f"resume/{step}/finite", partial(_lost, session, root, step))
            if not lost:
                break
            passed.append((step, "nonfinite", f"{lost} is not finite in it"))
            continue
        passed.append((step, ranks.tell_all(f"resume/{step}/why", partial(_why, root, step)), reason))
    unreadable = [reason for _, why, reason in passed if why == "unused"]
    if unreadable and len(passed) == len(steps):
        raise RunFolderError(f"no checkpoint in {root} can be read by all ranks: {unreadable[0]}")
    for step, why, reason in passed:
        if ranks.rank == 0:
            _pass_by(session, root, step, why, reason)
    return None if len(passed) == len(steps) else _told(ranks, root, steps[len(passed)])


def _lost(session: Session, root: Path, step: int) -> str:
    """On rank 0: what a whole checkpoint has that is not finite and cannot become so; empty: nothing."""
    found = folder.opened(root, step)
    name = found.nonfinite
    if name in (None, folder.LOSS):
        return ""
    if _on_nan(session, _outline(found, 0)["position"]) == "continue":
        session.reporter.note(f"the checkpoint of step {step} is used though {name} is not finite in it")
        return ""
    return str(name)


def _on_nan(session: Session, cursor: Mapping[str, Any]) -> str:
    """What the resumed file says of the stage that comes next, or else of the last one that took steps."""
    pipeline = session.runtime.loaded.pipeline
    for place in (cursor["next"], cursor["stage"]):
        stage = pipeline.stages[place] if place is not None and place < len(pipeline.stages) else None
        if isinstance(stage, StepStage):
            return stage.effective(pipeline).on_nan
    return pipeline.on_nan


def _outline(found: Checkpoint, rank: int) -> dict[str, Any]:
    """What a rank had, with tensors that have no data."""
    parts = [folder.read(found, name, outline=True) for name in ("shared", rank_name(rank))]
    return {**parts[0], **parts[1]}


def _listed(session: Session, root: Path) -> list[int]:
    """The steps of the checkpoints that rank 0 sees."""
    ranks = session.runtime.ranks
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
    runtime = session.runtime
    ranks = runtime.ranks
    looking = [rank for rank in range(ranks.size) if rank not in runtime.records.away]
    problem = ""
    if ranks.rank in looking:
        try:
            found = folder.opened(root, step)
            names = ["shared", *map(rank_name, range(found.world_size))]
            place = looking.index(ranks.rank)
            folder.verify(found, names[place :: len(looking)])
            for rank in range(found.world_size)[place :: len(looking)]:
                _check(found, rank)
        except DamagedError as error:
            problem = str(error)
    return next(filter(None, ranks.gather(f"resume/{step}", problem)), None)


def _check(found: Checkpoint, rank: int) -> None:
    """Make sure that what a rank had is the state of a run.

    Raises:
        DamagedError: it is not.
    """
    state = _outline(found, rank)
    try:
        check_fields(state)
        if not 0 <= state["step"] <= found.step:  # ranks that never meet stop each for itself
            raise ValueError(f"its step is {state['step']}")
    except ValueError as error:
        raise DamagedError(f"{found.path / rank_name(rank)}.json: {error}") from None


def _why(root: Path, step: int) -> str:
    """On rank 0: whether a checkpoint itself is damaged, or some rank does not see it as it is."""
    try:
        found = folder.opened(root, step)
        folder.verify(found)
        for rank in range(found.world_size):
            _check(found, rank)
    except UnreadableError as error:
        return "damaged" if isinstance(error.__context__, FileNotFoundError) else "unused"
    except DamagedError:
        return "damaged"
    return "unused"


def _pass_by(session: Session, root: Path, step: int, why: str, reason: str) -> None:
    """On rank 0: tell that a checkpoint is not gone on from, and see that it is not counted any more."""
    reporter = session.reporter
    reporter.events.warning("checkpoint_passed_by", step=step, why=why, reason=reason)
    told = {
        "damaged": "is damaged and",
        "nonfinite": "is not finite and",
        "unused": "cannot be read by all ranks and is",
    }[why]
    try:
        now = f"and now {root.name}/{folder.set_aside(root, step, why).name}"
    except OSError as error:
        now = f"and stays where it is ({error.strerror})"
    reporter.note(f"the checkpoint of step {step} {told} not used, {now}: {reason}")


def _told(ranks: Ranks, root: Path, step: int) -> Checkpoint:
    """What rank 0 reads in the manifest."""

    def described() -> str:
        found = folder.opened(root, step)
        return json.dumps([found.world_size, found.files])

    world_size, files = json.loads(ranks.tell_all(f"resume/{step}/manifest", described))
    return Checkpoint(root / folder.name_of(step), step, world_size, files)


def _state(session: Session, found: Checkpoint, scratch: Path) -> dict[str, Any]:
    """This rank's state: what all had alike, and its own."""
    runtime = session.runtime
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    merging = found.world_size != ranks or _is_laid_out_anew(session, found)
    everybody = list(range(found.world_size))
    wanted = {
        reader: ["shared", *map(rank_name, everybody if merging else [reader])]
        for reader in [*runtime.records.away, rank]
    }
    source = _fetch(session, found, wanted, scratch)
    shared = folder.read(source, "shared")
    own = [folder.read(source, rank_name(old)) for old in (everybody if merging else [rank])]
    if found.world_size == ranks:
        mine = own[rank if merging else 0]
        state = {**shared, **mine}
        if merging:
            with reading("hooks"):
                state["hooks"] = runtime.stacks.merge([one["hooks"] for one in own])
        return state
    with reading("state of other ranks"):
        return _for_another_world(session, shared, own)


def _is_laid_out_anew(session: Session, found: Checkpoint) -> bool:
    """Whether buckets, hosts or hooks are others than before, so that what hooks keep moves between ranks."""
    tree = session.runtime.ranks.tell_all(
        "resume/layout", lambda: json.dumps(folder.read_json(found, found.path / "shared.json")["layout"])
    )
    return bool(json.loads(tree) != layout_of(session))


def _fetch(
    session: Session, found: Checkpoint, wanted: Mapping[int, Sequence[str]], scratch: Path
) -> Checkpoint:
    """Where this rank can read its files: from rank 0 if it does not see the run's folder."""
    runtime = session.runtime
    control, rank = runtime.exchange.control, runtime.ranks.rank
    for reader in runtime.records.away:
        names = [path.name for name in wanted.get(reader, ()) for path in folder.paths(found.path, name)]
        if rank == 0:
            for name in names:
                with open_file(found.below, (found.path / name).relative_to(found.below)) as file:
                    while data := file.read(_CHUNK_BYTES):
                        control.send_bytes(data, reader)
        elif rank == reader:
            for name in names:
                left = found.files[name]["bytes"]
                with open_file(scratch, name, "xb") as file:
                    while left:
                        data = control.receive_bytes(0)
                        file.write(data)
                        left -= len(data)
    if rank not in runtime.records.away:
        return found
    return Checkpoint(scratch, found.step, found.world_size, found.files, own=True)


# Another number of ranks.


def _for_another_world(
    session: Session, shared: dict[str, Any], own: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """State for ranks of another world: nothing that was learned is lost, and no sample is seen twice.

    Ranks that were apart become equal, as in a synchronisation. What hooks kept is divided among the ranks:
    its sum stays. Random generators start from a seed of the rank and the step.
    """
    runtime = session.runtime
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    state = {**shared, **own[0]}
    _refuse_replicas(session, state["position"])
    _refuse_shards(session, state["feed"])
    if "parameters" not in shared:
        state["parameters"] = _mean_parameters([one["parameters"] for one in own])
    if "optimizer" not in shared:
        state["optimizer"] = mean_state([one["optimizer"] for one in own])
    state["hooks"] = runtime.stacks.merge([one["hooks"] for one in own])
    state["sync_of_ranks"] = [one["sync"] for one in own if one["sync"]] or [{}]
    state["together"] = ["common", "common", None, state["together"][3]]
    state["telemetry"] = _divided([one["telemetry"] for one in own], rank, ranks)
    seeding.seed_everything(runtime.loaded.pipeline.seed + rank + ranks * (1 + state["step"]))
    state["generators"] = seeding.generator_state(runtime.device)
    return state


def _refuse_replicas(session: Session, cursor: Mapping[str, Any]) -> None:
    """A stage that keeps ranks apart on purpose has as many replicas as it had ranks."""
    runtime = session.runtime
    stages = runtime.loaded.pipeline.stages
    begun = cursor["stage"] == cursor["next"] < len(stages)
    stage = stages[cursor["next"]] if begun else None
    if isinstance(stage, StepStage) and stage.effective(runtime.loaded.pipeline).plan.keeps_apart:
        text = "its ranks train independently, so another number of ranks cannot go on with it"
        raise PipelineError([runtime.loaded.fault(stage.path, text, "resume on as many ranks as before")])


def _refuse_shards(session: Session, feed: Mapping[str, Any]) -> None:
    """Data that shards itself is cut otherwise for another number of ranks."""
    runtime = session.runtime
    if runtime.loaded.pipeline.loader.sharded and feed["samples"]:
        text = "the data set shards itself by rank, so another number of ranks cannot go on in mid-epoch"
        raise PipelineError(
            [runtime.loaded.fault("loader.sharded", text, "resume on as many ranks as before")]
        )


def _mean_parameters(of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over ranks of every parameter that has one; the others (quantised weights) are rank 0's."""
    return {
        name: mean_of([one[name] for one in of_ranks]) if has_mean(value) else value
        for name, value in of_ranks[0].items()
    }


def _divided(recorders: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """What old ranks had added up, each given to one new rank."""
    mine = [recorder["totals"] for place, recorder in enumerate(recorders) if place % ranks == rank]
    return {
        "totals": [sum(column) for column in zip(*mine, strict=True)] if mine else Totals().numbers(),
        "round": NOTHING_ADDED,
        "own_loss": recorders[0]["own_loss"],
        "stragglers": recorders[0]["stragglers"] if rank == 0 else [],
    }
