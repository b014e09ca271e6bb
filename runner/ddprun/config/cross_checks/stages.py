"""What stages say for themselves, and the order in which they stand."""

from collections.abc import Iterator

from ddprun.config.cross_checks.rule import CrossCheck, place, reads
from ddprun.config.resolved import plain
from ddprun.config.schema import OVERRIDABLE, Forward, Pipeline, Save, Train
from ddprun.config.tree import KeyPath

_OF_UPDATES = ("optimizer", "schedule", "warmup_steps", "clip_norm")
"""What a stage uses only if it updates the weights."""


def _updates(stage: Train | Forward) -> bool:
    return isinstance(stage, Train) or stage.update is not None


@reads("warmup_steps", "stages")
def _warmup_longer_than_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in filter(_updates, pipeline.step_stages()):
        settings = stage.effective(pipeline)
        if settings.steps is not None and settings.warmup_steps >= settings.steps:
            own = "warmup_steps" in stage.model_fields_set
            path: KeyPath = ("stages", stage.index, stage.name, "warmup_steps" if own else "steps")
            yield CrossCheck(
                path,
                f'"warmup_steps: {settings.warmup_steps}" is not shorter than "steps: {settings.steps}" of '
                f"{stage.path}: the full learning rate would never be used",
                "shorten the warm-up or lengthen the stage",
            )


@reads("optimizer", "stages")
def _another_optimizer(pipeline: Pipeline) -> Iterator[CrossCheck]:
    above = pipeline.optimizer
    for stage in pipeline.step_stages():
        own = stage.optimizer
        if own is not None and (own.name, own.source) != (above.name, above.source):
            text = f'"optimizer: {own.name}" of {stage.path} clashes with "optimizer: {above.name}": a stage '
            text += "changes the optimizer's settings, not the optimizer, whose state would be lost"
            yield CrossCheck(place(stage, "optimizer"), text, f"write {above.name}: {{…}}")


@reads("stages")
def _nothing_is_updated(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        for key in _OF_UPDATES if not _updates(stage) else ():
            if key in stage.model_fields_set and getattr(stage, key):
                text = f'"{key}" clashes with "forward" without "update": nothing is updated'
                yield CrossCheck(place(stage, key), text, "remove it, or name an update")


@reads("stages")
def _saves(pipeline: Pipeline) -> Iterator[CrossCheck]:
    changed = False
    written: dict[str, int] = {}
    for stage in pipeline.stages:
        changed = changed or (
            isinstance(stage, (Train, Forward)) and (_updates(stage) or stage.mutate is not None)
        )
        if not isinstance(stage, Save):
            continue
        if stage.to in written:
            text = f'{stage.path} writes "{stage.to}", as stages[{written[stage.to]}].save does'
            yield CrossCheck(("stages", stage.index, "save", "to"), text, "name another file")
        written.setdefault(stage.to, stage.index)
        if not changed:
            text = '"save" stands before every "train": it saves the initial weights'
            yield CrossCheck(("stages", stage.index), text, None, "warning")


@reads("stages", *OVERRIDABLE)
def _overridden_everywhere(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for key in OVERRIDABLE:
        users = [stage for stage in pipeline.step_stages() if _uses(stage, key)]
        overridden = bool(users) and all(key in stage.model_fields_set for stage in users)
        if not overridden or not _says_something(pipeline, key):
            continue
        names = " and ".join(dict.fromkeys(stage.name for stage in users))
        text = f'"{key}" has no effect: every {names} stage of "stages" has its own "{key}"'
        hint = "remove it here or there"
        if key == "optimizer":
            text = f"the options of {text.replace('has no effect', 'have no effect')}"
            hint = "remove them here or there"
        yield CrossCheck((key,), text, hint, "warning")


def _uses(stage: Train | Forward, key: str) -> bool:
    """Whether a stage has a use for a key of the pipeline."""
    return key in type(stage).model_fields and (key not in _OF_UPDATES or _updates(stage))


def _says_something(pipeline: Pipeline, key: str) -> bool:
    """Whether the file gives a key another value than its default; of the optimizer, which must be given, its
    options.
    """
    if key == "optimizer":
        return bool(pipeline.optimizer.options)
    said, default = plain(getattr(pipeline, key)), plain(Pipeline.model_fields[key].default)
    return bool(said != default)


RULES = (
    _warmup_longer_than_stage,
    _another_optimizer,
    _nothing_is_updated,
    _saves,
    _overridden_everywhere,
)
