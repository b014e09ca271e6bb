"""What a resumed run may have changed in its pipeline since the checkpoint was taken."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ddprun.config.choices import RunSchedule
from ddprun.config.faults import Fault, PipelineError
from ddprun.config.load import Loaded
from ddprun.config.resolved import flow, plain
from ddprun.config.schema import OVERRIDABLE, Pipeline, StepStage, pipeline_model
from ddprun.config.tree import show

_FIXED = {
    "seed": "it decides the order of samples",
    "model": "the weights are those of the model",
    "data": "the position in the data would be another",
    "loss": "the optimizer's state belongs to it",
    "precision": "weights and loss scale belong to it",
    "freeze": "the optimizer's state belongs to it",
    "groups": "the optimizer's state belongs to them",
    "optimizer": "the checkpoint holds no state for it",
    "loader.shuffle": "samples would be seen twice, others not at all",
    "batch": "the optimizer's state belongs to the loss",
    "weight_by": "the optimizer's state belongs to the loss",
    "loader.sampler": "samples would be seen twice, others not at all",
    "loader.sharded": "samples would be seen twice, others not at all",
}
"""What cannot change, and why."""

_STATE = ("sync", "mutate", "update", "data")
"""What decides the state of a stage that has begun."""


def changes(loaded: Loaded, before: dict[str, Any], *, next_stage: int, begun: int | None) -> list[str]:
    """Compare a pipeline with that of a checkpoint, key by key.

    Args:
        loaded: the pipeline of the resumed run.
        before: that of the checkpoint (`Loaded.plain`).
        next_stage: the stage that comes next, or runs.
        begun: the last stage that takes steps that has begun.

    Returns:
        What has changed and can, a line each.

    Raises:
        PipelineError: what has changed and cannot, with both values.
    """
    try:
        old = pipeline_model().model_validate(before)
    except ValidationError as error:
        text = f"this version of ddprun cannot read the checkpoint's pipeline: {error.error_count()} faults"
        raise loaded.error("", text) from None
    if faults := [*_fixed(loaded, old), *_stages(loaded, old, next_stage, begun)]:
        raise PipelineError(faults)
    return [
        f"{show(path)}: {flow(was)} in the checkpoint, {flow(now)} now"
        for path, was, now in _differences(before, loaded.plain(), ())
    ]


def schedule_changed(loaded: Loaded, before: dict[str, Any], stage: int) -> bool:
    """Whether learning rates of a stage are others than they were: its optimizer's settings, its schedule, or
    the length of the stage; of a schedule over the run, that of any stage.
    """
    sides = []
    for pipeline in (pipeline_model().model_validate(before), loaded.pipeline):
        taken = pipeline.stages[stage]
        assert isinstance(taken, StepStage)
        settings = taken.effective(pipeline)
        spanned = pipeline.step_stages() if isinstance(settings.schedule, RunSchedule) else [taken]
        lengths = [(stage.steps, stage.epochs) for stage in spanned]
        groups = plain(pipeline.groups)
        sides.append((groups, plain(settings.optimizer), plain(settings.schedule), lengths))
    return bool(sides[0] != sides[1])


def _fixed(loaded: Loaded, old: Pipeline) -> Iterator[Fault]:
    was: Any = plain(old) | _fixed_parts(old)
    now: Any = loaded.plain() | _fixed_parts(loaded.pipeline)
    for path, why in _FIXED.items():
        section, _, key = path.rpartition(".")
        before, here = (side[section][key] if section else side[key] for side in (was, now))
        if before != here:
            yield _refused(loaded, path, before, here, why)


def _fixed_parts(pipeline: Pipeline) -> dict[str, Any]:
    """Of the optimizer its name, and which parameters are in which group: options may change."""
    return {
        "optimizer": pipeline.optimizer.name,
        "groups": [list(group.match) for group in pipeline.groups],
    }


def _stages(loaded: Loaded, old: Pipeline, next_stage: int, begun: int | None) -> Iterator[Fault]:
    """Stages that are done, or have begun, are what they were; a stage's end may move."""
    new = loaded.pipeline
    touched = max(next_stage, -1 if begun is None else begun + 1)
    kinds = [[stage.name for stage in side.stages[:touched]] for side in (old, new)]
    if kinds[0] != kinds[1]:
        yield _refused(loaded, "stages", kinds[0], kinds[1], "these stages are done, or have begun")
        return
    if begun is not None and begun == next_stage:
        stages = old.stages[begun], new.stages[begun]
        assert isinstance(stages[0], StepStage)
        assert isinstance(stages[1], StepStage)
        before, now = stages[0].effective(old), stages[1].effective(new)
        for key in _STATE:
            was, is_now = plain(getattr(before, key)), plain(getattr(now, key))
            if was != is_now:
                own = key in OVERRIDABLE and key not in stages[1].model_fields_set
                path = key if own else f"{stages[1].path}.{key}"
                yield _refused(loaded, path, was, is_now, "the stage has begun with it")


def _refused(loaded: Loaded, path: str, was: Any, now: Any, why: str) -> Fault:
    text = f"{flow(now)} here, and {flow(was)} in the checkpoint: {why}"
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
