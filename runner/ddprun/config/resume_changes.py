"""What a resumed run may have changed in its pipeline since the checkpoint was taken."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ddprun.config.faults import PipelineError, PipelineFault
from ddprun.config.load import LoadedPipeline
from ddprun.config.schema import Pipeline, pipeline_with_cluster_keys
from ddprun.config.stages import OVERRIDABLE_KEYS, StepStage
from ddprun.config.tree import format_path
from ddprun.config.yaml_writer import flow_yaml, to_plain_data
from ddprun.run_files import describe_read_error

_UNCHANGEABLE_KEYS = (
    *("seed", "model", "data", "loss", "precision", "freeze", "groups", "stages", "optimizer"),
    *("loader.shuffle", "batch", "weight_by", "loader.sampler", "loader.sharded"),
)  # what a resumed run cannot change: weights, the optimizer's state or the order of samples belong to it
_STAGE_STATE_KEYS = ("sync", "mutate", "update", "data", "freeze", "turns")  # fixed once a stage has begun


def check_and_list_changes(
    loaded: LoadedPipeline, checkpoint_pipeline: dict[str, Any], *, next_stage: int, begun_stage: int | None
) -> tuple[Pipeline, list[str]]:
    """Compare a pipeline with that of a checkpoint, key by key: the latter, and a line for each change that
    is allowed.

    `checkpoint_pipeline` is from `LoadedPipeline.as_dict`. `next_stage` runs next; `begun_stage` is the last
    stage with steps that has begun, None if none has. A PipelineError: changes that are not allowed.
    """
    try:
        old = pipeline_with_cluster_keys(checkpoint_pipeline).model_validate(checkpoint_pipeline)
    except ValidationError as error:
        problem = "this version of ddprun cannot read the checkpoint's pipeline, for one its "
        problem += describe_read_error(error)
        raise loaded.error("", problem, "resume with the version that took the checkpoint") from None
    faults = [
        *_unchangeable_key_faults(loaded, old),
        *_changed_stage_faults(loaded, old, next_stage, begun_stage),
    ]
    if faults:
        raise PipelineError(faults)
    return old, [
        f"{format_path(path)}: {flow_yaml(was)} in the checkpoint, {flow_yaml(now)} now"
        for path, was, now in _differences(to_plain_data(old), loaded.as_dict(), ())
    ]


def learning_rates_changed(old: Pipeline, new: Pipeline, stage: int) -> bool:
    """Whether a stage's learning rates differ by optimizer or schedule; they may by lengths, too."""
    sides = []
    for pipeline in (old, new):
        taken = pipeline.stages[stage]
        assert isinstance(taken, StepStage)
        settings = taken.effective_settings(pipeline)
        sides.append([to_plain_data(one) for one in (pipeline.groups, settings.optimizer, settings.schedule)])
    return bool(sides[0] != sides[1])


def _unchangeable_key_faults(loaded: LoadedPipeline, old: Pipeline) -> Iterator[PipelineFault]:
    was: Any = to_plain_data(old) | _fixed_optimizer_parts(old)
    now: Any = loaded.as_dict() | _fixed_optimizer_parts(loaded.pipeline)
    for path in _UNCHANGEABLE_KEYS:
        section, _, key = path.rpartition(".")
        before, here = (side[section][key] if section else side[key] for side in (was, now))
        if before != here:
            yield _change_fault(loaded, path, before, here, "the checkpoint's state belongs to it")


def _fixed_optimizer_parts(pipeline: Pipeline) -> dict[str, Any]:
    """Of the optimizer its name, and which parameters it has in which group: options may change."""
    freezes = sorted(map(list, set(pipeline.frozen_patterns().values())))
    turns = {(turn.name, turn.match) for stage in pipeline.train_stages() for turn in stage.turns or ()}
    return {
        "optimizer": ", others: ".join(pipeline.optimizer.optimizers()),
        "groups": [[*group.match, *filter(None, [group.optimizer])] for group in pipeline.groups],
        "freeze": freezes if len(freezes) > 1 else freezes[0],
        "stages": [{"name": name, "match": list(match)} for name, match in sorted(turns)],
    }


def _changed_stage_faults(
    loaded: LoadedPipeline, old: Pipeline, next_stage: int, begun_stage: int | None
) -> Iterator[PipelineFault]:
    """Faults of changed stages that are done or have begun; only the length of one that runs may change."""
    new = loaded.pipeline
    touched = max(next_stage, -1 if begun_stage is None else begun_stage + 1)
    kinds = [[stage.name for stage in side.stages[:touched]] for side in (old, new)]
    if kinds[0] != kinds[1]:
        yield _change_fault(loaded, "stages", kinds[0], kinds[1], "these stages are done, or have begun")
        return
    if begun_stage is not None and begun_stage == next_stage:
        stages = old.stages[begun_stage], new.stages[begun_stage]
        assert isinstance(stages[0], StepStage)
        assert isinstance(stages[1], StepStage)
        before, now = stages[0].effective_settings(old), stages[1].effective_settings(new)
        for key in _STAGE_STATE_KEYS:
            was, is_now = to_plain_data(getattr(before, key)), to_plain_data(getattr(now, key))
            if was != is_now:
                own = key in OVERRIDABLE_KEYS and key not in stages[1].model_fields_set
                path = key if own else f"{stages[1].path}.{key}"
                yield _change_fault(loaded, path, was, is_now, "the stage has begun with it")
        was, is_now = (to_plain_data(side.ddp.bucket_cap_mb) for side in (old, new))
        if was != is_now and any(one.what == "change" for one in before.plan.transfers):
            why = f"until the stage's end {before.sync.name} keeps state by bucket"
            yield _change_fault(loaded, "ddp.bucket_cap_mb", was, is_now, why)


def _change_fault(loaded: LoadedPipeline, path: str, was: Any, now: Any, why: str) -> PipelineFault:
    text = f"{flow_yaml(now)} here, and {flow_yaml(was)} in the checkpoint: {why}"
    return loaded.fault(path, text, "leave it as it was, or start a new run")


def _differences(old: Any, new: Any, path: tuple[str | int, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """Where two pipelines differ: path, old value, new value; None where there is none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key), new.get(key), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(*pair, (*path, index))
    elif old != new:
        yield path, old, new
