"""Resuming from a checkpoint: how its state is restored, on as many ranks or on another number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ddprun.checkpoint import folder
from ddprun.checkpoint.codec import DamagedError
from ddprun.checkpoint.folder import Checkpoint, rank_part_name
from ddprun.config import AverageStage, BroadcastStage, StepStage
from ddprun.config.changes import check_and_list_changes, learning_rates_changed
from ddprun.engine import seeding
from ddprun.engine.newest_checkpoint import FoundCheckpoint, newest_checkpoint
from ddprun.engine.run_folder import RunFolderError
from ddprun.engine.session import Session
from ddprun.engine.state import StateError, restore
from ddprun.sync.exchanger import can_be_averaged, mean_of, mean_optimizer_state
from ddprun.telemetry.control_message import Accumulator
from ddprun.telemetry.steps import totals_of_other_ranks
from ddprun.telemetry.writer import truncate_records

# What reading something other than expected ends in.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def resume(session: Session) -> None:
    """Bring a session to where its run's newest whole checkpoint was taken; called by all ranks.

    Records of later steps are cut off. Without a checkpoint the run starts from the beginning. Raises
    PipelineError for a change that cannot be resumed, RunFolderError if no checkpoint can be read.
    """
    runtime, reporter, state = session.runtime, session.reporter, session.state
    found = newest_checkpoint(session)
    checkpoint = None if found is None else found.checkpoint
    if runtime.ranks.rank == 0:
        try:
            truncate_records(runtime.run_dir, 0 if checkpoint is None else checkpoint.step)
        except OSError as error:
            problem = f"cannot resume in the run folder {runtime.shown_dir}: {error.strerror}"
            raise RunFolderError(problem) from None
    if found is None or checkpoint is None:
        reporter.note("no intact checkpoint: the run starts from the beginning")
        return
    with errors_of_checkpoint(session, checkpoint):
        saved = _read_state(session, found)
        before, cursor = saved["pipeline"], saved["position"]
        _reopen_longer_stage(session, before, cursor)
    old_pipeline, notes = check_and_list_changes(
        runtime.loaded, before, next_stage=cursor["next"], begun_stage=cursor["stage"]
    )
    changed_data = _check_data(session, saved)
    with errors_of_checkpoint(session, checkpoint):
        restore(session, saved)
    for name, text, mid_epoch in changed_data:
        if not mid_epoch and name in runtime.fingerprints.feeds:
            runtime.fingerprints.feeds[name].skip_rest_of_epoch()
        reporter.events.warning("data_changed", name=name, how=text, mid_epoch=mid_epoch)
        reporter.note(f"{name} has changed: {text}")
    if state.cursor.mid_stage:
        new_rates = learning_rates_changed(old_pipeline, runtime.loaded.pipeline, cursor["next"])
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
            raise fingerprints.sources[name].make_error(problem, allowed)
    return [(name, text, mid_epoch) for name, text, mid_epoch in changes]


@contextmanager
def errors_of_checkpoint(session: Session, checkpoint: Checkpoint) -> Iterator[None]:
    """Context around reading a checkpoint, which may hold anything: a PipelineError if its state does not fit
    the model, a RunFolderError if it is damaged. Other ranks learn that this one has failed, and end, too.
    """
    where = session.runtime.display_path(checkpoint.path)
    try:
        yield
    except StateError as error:
        raise session.runtime.loaded.error("model", f"{error} ({where})") from None
    except torch.OutOfMemoryError:
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


# Its state.


def _read_state(session: Session, found: FoundCheckpoint) -> dict[str, Any]:
    """This rank's state: what all ranks share, and its own."""
    runtime, checkpoint = session.runtime, found.checkpoint
    rank, ranks = runtime.ranks.rank, runtime.ranks.size
    shared = folder.read_part(checkpoint, "shared")
    if not found.moves_state:
        return {**shared, **folder.read_part(checkpoint, rank_part_name(rank))}
    own = [folder.read_part(checkpoint, rank_part_name(old)) for old in range(checkpoint.world_size)]
    if checkpoint.world_size != ranks:
        return _reshard_state(session, shared, own)
    return {**shared, **own[rank], "hooks": runtime.stacks.merge([one["hooks"] for one in own])}


def _reshard_state(session: Session, shared: dict[str, Any], own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """State for another number of ranks: nothing that was learned is lost, and no sample is seen twice.

    Ranks whose parameters differed become equal, as in a synchronisation. The hooks' residuals are divided
    among the ranks: their sum stays. Random generators start from a seed of the rank and the step.
    """
    runtime = session.runtime
    loaded, rank, ranks = runtime.loaded, runtime.ranks.rank, runtime.ranks.size
    # What is not merged below is rank 0's: equal on all ranks, or what `save` writes, too (buffers, extra).
    state = {**own[0], **shared}
    cursor, stages = state["position"], loaded.pipeline.stages
    stage = stages[cursor["next"]] if cursor["stage"] == cursor["next"] < len(stages) else None
    refused = None
    if isinstance(stage, StepStage) and stage.effective_settings(loaded.pipeline).plan.keeps_apart:
        refused = stage.path, "its ranks train independently, so another number of ranks cannot resume it"
    elif loaded.pipeline.loader.sharded and any(feed["samples"] for feed in state["feeds"].values()):
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
    state["replicas"] = ["common", "common", own[0]["replicas"][2]]
    totals = [one["telemetry"]["totals"] for one in own]
    state["telemetry"] = {
        "totals": totals_of_other_ranks(totals, rank, ranks),
        "round": Accumulator().state_dict([]),
        "own_loss": own[0]["telemetry"]["own_loss"],
        "stragglers": own[0]["telemetry"]["stragglers"],
    }
    seeding.seed_everything(loaded.pipeline.seed + rank + ranks * (1 + state["step"]))
    state["generators"] = seeding.generator_state(runtime.device)
    return state
