"""Checks of stages: what they name for themselves, and their order."""

from collections.abc import Callable, Iterator
from posixpath import normpath

from ddprun.config.checks.model_and_data import find_evaluations
from ddprun.config.checks.registry import KeyConflict, register_check, warning
from ddprun.config.schema import Pipeline
from ddprun.config.stages import OVERRIDABLE_KEYS, SaveStage, StepStage, StepStageSettings
from ddprun.config.yaml_writer import to_plain_data

_UPDATE_KEYS = ("optimizer", "schedule", "warmup_steps", "clip_norm", "clip_value", "freeze")  # for updates


@register_check("schedule", "warmup_steps", "stages")
def _stage_keys_with_run_schedule(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.schedule is None or "over" not in pipeline.schedule.sibling_keys:
        return
    stages = [stage for stage, settings in pipeline.stages_and_settings() if settings.updates_weights]
    for stage in stages:
        for key in ("schedule", "warmup_steps", "optimizer"):
            if key in stage.model_fields_set:
                text = f'"{key}" of {stage.path} clashes with "schedule: {{…, over: run}}", with which one '
                text += "schedule and one warm-up span all stages"
                yield KeyConflict(f"{stage.path}.{key}", text, "remove one of the two")


@register_check("schedule", "warmup_steps", "stages")
def _warmup_longer_than_steps(pipeline: Pipeline) -> Iterator[KeyConflict]:
    yield from find_long_warmups(pipeline, lambda _, settings: settings.steps)


def find_long_warmups(
    pipeline: Pipeline, steps_of: Callable[[int, StepStageSettings], int | None]
) -> Iterator[KeyConflict]:
    """Warm-ups that are not shorter than their stage, or than the run; `steps_of`: how many steps the stage
    of an index has, None where that is not known.
    """
    never = "the full learning rate would never be used"
    lengths: list[int | None] = []
    for stage, settings in pipeline.stages_and_settings():
        if not settings.updates_weights:
            continue
        lengths.append(steps := steps_of(stage.index, settings))
        if steps is not None and not settings.has_run_schedule and settings.warmup_steps >= max(1, steps):
            text = f'"warmup_steps: {settings.warmup_steps}" is not less than the {steps} steps of '
            key = "steps" if settings.epochs is None else "epochs"
            key = "warmup_steps" if "warmup_steps" in stage.model_fields_set else key
            hint = "shorten the warm-up or lengthen the stage"
            yield KeyConflict(f"{stage.path}.{key}", f"{text}{stage.path}: {never}", hint)
    if pipeline.schedule is None or "over" not in pipeline.schedule.sibling_keys or None in lengths:
        return
    total = sum(length or 0 for length in lengths)
    if pipeline.warmup_steps >= max(1, total):
        text = f'"warmup_steps: {pipeline.warmup_steps}" is not less than the {total} steps of the run: '
        yield KeyConflict("warmup_steps", f"{text}{never}", "shorten the warm-up or lengthen a stage")


@register_check("optimizer", "stages")
def _stage_with_another_optimizer_class(pipeline: Pipeline) -> Iterator[KeyConflict]:
    above = pipeline.optimizer
    for stage in pipeline.stages_with_steps():
        own = stage.optimizer
        if own is not None and own.optimizers() != above.optimizers():
            shown, wanted = (" and others: ".join(one.optimizers()) for one in (own, above))
            text = f'"optimizer: {shown}" of {stage.path} clashes with "optimizer: {wanted}": a stage '
            text += "changes the optimizer's settings, not the optimizer, whose state would be lost"
            hint = ", others: ".join(f"{name}: {{…}}" for name in above.optimizers())
            yield KeyConflict(stage.key_path("optimizer"), text, f"write {hint}")


@register_check("stages")
def _update_keys_without_update(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        for key in _UPDATE_KEYS if not settings.updates_weights else ():
            if key in stage.model_fields_set and getattr(stage, key):
                text = f'"{key}" clashes with "forward" without "update": nothing is updated'
                yield KeyConflict(stage.key_path(key), text, "remove it, or name an update")


@register_check("freeze", "optimizer", "stages")
def _lbfgs_over_other_parameters(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.optimizer.name == "LBFGS" and len(set(pipeline.frozen_patterns().values())) > 1:
        text = '"optimizer: LBFGS" clashes with stages that freeze different parameters: what it keeps of '
        text += "earlier steps would change frozen ones"
        yield KeyConflict("optimizer", text, "choose another optimizer, or freeze the same in all stages")


@register_check("loss", "optimizer", "stages")
def _turns_without_own_losses(pipeline: Pipeline) -> Iterator[KeyConflict]:
    optimizer, loss = pipeline.optimizer, pipeline.loss
    for stage in pipeline.train_stages():
        clash = f'"turns" of {stage.path} clashes with'
        if stage.turns and ("closure" in optimizer.sibling_keys or optimizer.name == "LBFGS"):
            text = f'{clash} "optimizer: {optimizer.name}", which takes a closure: that is of one loss'
            yield KeyConflict(f"{stage.path}.turns", text, "choose another optimizer")
        if stage.turns and loss.name != "model":
            text = f'{clash} "loss: {loss.name}": each turn has its own, which the model\'s forward returns'
            yield KeyConflict(f"{stage.path}.turns", text, "write loss: model")


@register_check("ema", "stages")
def _ema_never_used(pipeline: Pipeline) -> Iterator[KeyConflict]:
    saves = any(isinstance(stage, SaveStage) for stage in pipeline.stages)
    if pipeline.ema is not None and not saves and not [*find_evaluations(pipeline)]:
        text = '"ema" has no effect: nothing evaluates or saves the average'
        yield warning("ema", text, "add an evaluate or a save stage")


@register_check("stages")
def _repeated_or_early_saves(pipeline: Pipeline) -> Iterator[KeyConflict]:
    changed = False
    written: dict[str, int] = {}
    for stage in pipeline.stages:
        if isinstance(stage, StepStage):
            updates = stage.effective_settings(pipeline).updates_weights
            changed = changed or updates or stage.mutate is not None
        if not isinstance(stage, SaveStage):
            continue
        file = normpath(stage.to)
        if file in written:
            text = f'{stage.path} writes "{stage.to}", as stages[{written[file]}].save does'
            yield KeyConflict(f"{stage.path}.to", text, "name another file")
        written.setdefault(file, stage.index)
        if not changed:
            text = '"save" comes before every "train": it saves the initial weights'
            yield warning(f"stages[{stage.index}]", text)


@register_check("stages", *OVERRIDABLE_KEYS)
def _overridden_everywhere(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for key in OVERRIDABLE_KEYS:
        users = [
            stage
            for stage, settings in pipeline.stages_and_settings()
            if key in type(stage).model_fields and (key not in _UPDATE_KEYS or settings.updates_weights)
        ]
        overridden = all(key in stage.model_fields_set for stage in users)
        if not (overridden and pipeline.stages_with_steps()) or not _differs_from_default(pipeline, key):
            continue
        if not users:
            if key not in ("optimizer", "freeze"):  # every file has an optimizer; saves may leave out frozen
                what = "accumulates gradients" if key == "accumulate" else "updates the weights"
                yield warning(key, f'"{key}" has no effect: no stage of "stages" {what}', "remove it")
            continue
        names = " and ".join(dict.fromkeys(stage.name for stage in users))
        what, it = (f'the options of "{key}" have', "them") if key == "optimizer" else (f'"{key}" has', "it")
        text = f'{what} no effect: every {names} stage of "stages" has its own "{key}"'
        yield warning(key, text, f"remove {it} here or there")


def _differs_from_default(pipeline: Pipeline, key: str) -> bool:
    """Whether the file gives a key another value than its default; for the optimizer, any option."""
    if key == "optimizer":
        others = pipeline.optimizer.sibling_keys.get("others")
        return bool(pipeline.optimizer.options or (others and others.options))
    said, default = to_plain_data(getattr(pipeline, key)), to_plain_data(Pipeline.model_fields[key].default)
    return bool(said != default)
