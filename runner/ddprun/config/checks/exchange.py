"""Checks of DDP, the launch, hooks, sync policies, and buffers."""

from collections.abc import Iterator

from ddprun.config.built_in_options import CnnOptions, MlpOptions, TransformerOptions
from ddprun.config.checks.registry import (
    KeyConflict,
    accumulation_text,
    register_check,
    setting_text,
    values_of_key,
    warning,
)
from ddprun.config.schema import Pipeline
from ddprun.config.sections import Ddp
from ddprun.config.stages import AverageStage, BroadcastStage, EvaluateStage, ForwardStage, StepStage
from ddprun.config.tree import format_path
from ddprun.sync.plan import SyncPlan, SyncPolicy
from ddprun_hooks.config import grammar


@register_check("ddp", "accumulate", "loader", "sync", "stages")
def _accumulate_with_static_graph(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        accumulate = accumulation_text(pipeline, stage)
        if pipeline.ddp.static_graph and accumulate and settings.plan.gradients is not None:
            text = f'"static_graph: true" clashes with {accumulate}: DDP crashes or stops reducing'
            yield KeyConflict("ddp.static_graph", text, "remove one of the two")


@register_check("ddp")
def _static_graph_with_find_unused(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.ddp.static_graph and pipeline.ddp.find_unused_parameters:
        text = '"find_unused_parameters: true" has no effect with "static_graph: true", which finds them once'
        yield KeyConflict("ddp.find_unused_parameters", text, "remove one of the two")


@register_check("ddp", "sync", "stages")
def _ddp_options_without_averaging(pipeline: Pipeline) -> Iterator[KeyConflict]:
    averaged = any(settings.plan.gradients for _, settings in pipeline.stages_and_settings())
    for key in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        value = getattr(pipeline.ddp, key)
        if not averaged and value != getattr(Ddp(), key):
            text = f'"{key}: {str(value).lower()}" has no effect: no train stage averages gradients'
            yield warning(f"ddp.{key}", text, "remove it")


@register_check("ddp", "sync", "stages")
def _find_unused_with_host_averages(pipeline: Pipeline) -> Iterator[KeyConflict]:
    inside = any(settings.plan.gradients == "host" for _, settings in pipeline.stages_and_settings())
    if inside and pipeline.ddp.find_unused_parameters:
        text = '"find_unused_parameters: true" has hosts wait for each other in each step: DDP asks all ranks'
        hint = "freeze what is not used, or write within: 2 or more"
        yield warning("ddp.find_unused_parameters", text, hint)


@register_check("timings", "sync", "stages")
def _fidelity_without_gradients(pipeline: Pipeline) -> Iterator[KeyConflict]:
    every = pipeline.timings.fidelity_every
    if every and all(settings.plan.gradients != "all" for _, settings in pipeline.stages_and_settings()):
        text = f'"fidelity_every: {every}" has no effect: no train stage averages gradients of all ranks'
        yield warning("timings.fidelity_every", text, "remove it")


@register_check("audit", "stages")
def _audit_longer_than_stages(pipeline: Pipeline) -> Iterator[KeyConflict]:
    every, lengths = pipeline.audit.every, [one.steps for _, one in pipeline.stages_and_settings()]
    if lengths and every > max(length or every for length in lengths):
        text = f'"every: {every}" has no effect: no stage has so many steps'
        yield warning("audit.every", text, "shorten it")


@register_check("timings", "stages")
def _profile_after_the_end(pipeline: Pipeline) -> Iterator[KeyConflict]:
    profile = pipeline.timings.profile
    lengths = [settings.steps for _, settings in pipeline.stages_and_settings()]
    if profile is None or not lengths or None in lengths:
        return
    steps = sum(length or 0 for length in lengths)
    if profile[0] > steps:
        text = f'"profile: {list(profile)}" has no effect: the run has {steps} steps'
        yield warning("timings.profile", text, "name earlier steps")


@register_check("launch")
def _nccl_on_cpu(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.launch.backend == "nccl" and pipeline.launch.device == "cpu":
        text = '"backend: nccl" clashes with "device: cpu": NCCL carries GPU tensors only'
        yield KeyConflict("launch.backend", text, "use gloo, or device: cuda")


@register_check("launch", "checkpoint")
def _restarts_without_checkpoints(pipeline: Pipeline) -> Iterator[KeyConflict]:
    restarts = pipeline.launch.max_restarts
    if restarts and not pipeline.checkpoint.keep:
        text = f'"max_restarts: {restarts}" needs checkpoints, and "keep" is 0: the run would start over'
        yield warning("launch.max_restarts", text, "keep at least 1")
    if (every := pipeline.checkpoint.memory_every) and not pipeline.checkpoint.keep:
        text = f'"memory_every: {every}" has no effect: "keep: 0" takes no checkpoints'
        yield warning("checkpoint.memory_every", text, "keep at least 1")


@register_check()
def _invalid_hook_stacks(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in values_of_key(pipeline, "hooks"):
        entries = [grammar.make_stack_entry(hook.name, hook.options) for hook in hooks]
        for wrong in grammar.stack_problems(entries):
            yield KeyConflict(path + format_path(wrong.path), wrong.text, None, wrong.severity)


@register_check("hooks", "stages", "launch")
def _hooks_clash_with_launch(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in values_of_key(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            here = f"{path}[{number}]"
            options = hook.options if hook.name == "hierarchical" else {}
            in_leg = "shared_memory" in options.get("within", ())
            if pipeline.launch.device == "cuda" and (hook.name == "shared_memory" or in_leg):
                text = '"shared_memory" clashes with "device: cuda" of "launch": it sums tensors on the CPU'
                at = f"{here}.hierarchical.within" if in_leg else here
                yield KeyConflict(at, text, "remove it: NCCL uses shared memory by itself")


@register_check("hooks", "precision", "stages")
def _redundant_casts(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in values_of_key(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            if pipeline.precision == f"pure_{hook.name}" and not hook.options.get("accumulate"):
                setting = f'"precision: {pipeline.precision}"'
                text = f'"{hook.name}" has no effect: with {setting} everything is sent in that type'
                hint = f"remove it, or write {hook.name}: {{accumulate: fp32}}"
                yield warning(f"{path}[{number}]", text, hint)


@register_check("hooks", "sync", "stages")
def _hooks_ignored_by_sync(pipeline: Pipeline) -> Iterator[KeyConflict]:
    unused = {
        settings.sync.name: _why_hooks_unused(settings.plan)
        for stage, settings in pipeline.stages_and_settings()
        if "hooks" not in stage.model_fields_set
    }
    if pipeline.hooks and unused and all(unused.values()):
        by = " and ".join(f'"sync: {name}" {why}' for name, why in sorted(unused.items()))
        yield warning("hooks", f'"hooks" has no effect: {by}', "remove it")
    for stage, settings in pipeline.stages_and_settings():
        if stage.hooks and (why := _why_hooks_unused(settings.plan)):
            text = f'"hooks" clashes with {setting_text(stage, "sync", settings.sync)}, which {why}'
            yield KeyConflict(stage.key_path("hooks"), text, "remove one of the two")


def _why_hooks_unused(plan: SyncPlan) -> str:
    """Why a policy uses no hooks; empty if it does, or if nothing in its stage could use them."""
    if plan.uses_hooks or not plan.changes_weights:
        return ""
    return "sends parameters as they are" if plan.transfers else "sends nothing"


# Sync policies, and the lengths of stages


@register_check("sync", "stages")
def _equal_within_and_across_periods(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, sync in values_of_key(pipeline, "sync"):
        within, across = (sync.options.get(key) for key in ("within", "across"))
        if within is not None and within == across:
            text = f'"within: {within}" has no effect with "across: {across}": all average equally often'
            yield warning(f"{path}.{sync.name}.within", text, "lengthen across, or use local_sgd")


@register_check("sync", "stages")
def _period_longer_than_stage(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        policy, period = settings.sync.settings, settings.plan.exchange_period
        assert isinstance(policy, SyncPolicy)
        if settings.steps is None or period <= settings.steps:
            continue
        key = policy.period_key
        text = f'"{key}: {period}" is longer than "steps: {settings.steps}" of {stage.path}'
        own = f"sync.{settings.sync.name}.{key}" if "sync" in stage.model_fields_set else "steps"
        yield warning(f"{stage.path}.{own}", text, "shorten the period or lengthen the stage")


@register_check("sync", "hooks", "stages")
def _redundant_average_or_broadcast(pipeline: Pipeline) -> Iterator[KeyConflict]:
    equal, why = True, "all ranks start with the same parameters"
    for stage in pipeline.stages:
        if isinstance(stage, (AverageStage, BroadcastStage)):
            if equal:
                yield warning(f"stages[{stage.index}]", f'"{stage.name}" has no effect: {why}')
            equal = True
        elif isinstance(stage, StepStage):
            equal = _parameters_equal_after(pipeline, stage, before=equal)
        else:
            continue
        why = f"{stage.path} leaves all ranks with the same parameters"


def _parameters_equal_after(pipeline: Pipeline, stage: StepStage, *, before: bool) -> bool:
    """Whether all ranks surely hold the same parameters after a stage."""
    settings = stage.effective_settings(pipeline)
    if pipeline.averages_at_end_of(stage):
        return True
    if not settings.updates_weights and settings.mutate is None:
        return before
    sent = settings.plan.period == 1 and not settings.uses_noop
    return sent and (settings.mutate is None or isinstance(stage, ForwardStage))


# Buffers


@register_check("buffers", "model", "stages")
def _buffers_without_effect(pipeline: Pipeline) -> Iterator[KeyConflict]:
    own_loss = pipeline.loss.source not in ("built-in", "torch")  # which may have buffers
    if not isinstance(pipeline.model.settings, (MlpOptions, TransformerOptions)) or own_loss:
        return
    for path, buffers in values_of_key(pipeline, "buffers"):
        if buffers.when not in ("auto", "never"):
            when = f"{{every: {buffers.every}}}" if buffers.when == "every" else buffers.when
            text = f'"buffers: {when}" has no effect: "model: {pipeline.model.name}" has no buffers'
            yield warning(path, text, "remove it")


@register_check("buffers", "model", "stages")
def _evaluates_with_own_buffers(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if not isinstance(pipeline.model.settings, CnnOptions):
        return
    last: StepStage | None = None
    for stage in pipeline.stages:
        if isinstance(stage, StepStage):
            last = stage
        measures = isinstance(stage, EvaluateStage) or (stage is last and last.evaluate is not None)
        if measures and last and last.effective_settings(pipeline).buffers.when == "never":
            text = f"{setting_text(last, 'buffers', 'never')} clashes with {stage.path}: each rank evaluates "
            text += f'with its own running statistics of "model: {pipeline.model.name}"'
            yield warning(last.key_path("buffers"), text, "use before_evaluate")
