"""Checks of DDP, the launch, hooks, sync policies, and the ranks there are."""

from collections.abc import Iterator

from ddprun.config.checks.registry import (
    KeyConflict,
    accumulation_text,
    configured_world_size,
    register_check,
    setting_text,
    values_of_key,
    warning,
)
from ddprun.config.schema import Pipeline
from ddprun.config.tree import format_path
from ddprun.sync.plan import SyncPlan, SyncPolicy
from ddprun_hooks.config import grammar


@register_check
def _accumulate_with_static_graph(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        accumulate = accumulation_text(pipeline, stage)
        if pipeline.ddp.static_graph and accumulate and settings.plan.gradients is not None:
            text = f'"static_graph: true" clashes with {accumulate}: DDP crashes or stops reducing'
            yield KeyConflict("ddp.static_graph", text, "remove one of the two")


@register_check
def _restart_prerequisites(pipeline: Pipeline) -> Iterator[KeyConflict]:
    least, most = pipeline.launch.host_range
    restarts = pipeline.launch.max_restarts
    if least < most and not restarts:
        text = f'"nnodes: {pipeline.launch.nnodes}" needs "max_restarts": losing a host would end the run'
        yield warning("launch.nnodes", text, "write max_restarts: 3")
    if restarts and not pipeline.checkpoint.keep:
        text = f'"max_restarts: {restarts}" needs checkpoints, and "keep" is 0: the run would start over'
        yield warning("launch.max_restarts", text, "keep at least 1")
    if (every := pipeline.checkpoint.memory_every) and not pipeline.checkpoint.keep:
        text = f'"memory_every: {every}" has no effect: "keep: 0" takes no checkpoints'
        yield warning("checkpoint.memory_every", text, "keep at least 1")


@register_check
def _hook_stack_grammar(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in values_of_key(pipeline, "hooks"):
        entries = [grammar.make_stack_entry(hook.name, hook.options) for hook in hooks]
        for wrong in grammar.stack_problems(entries):
            yield KeyConflict(path + format_path(wrong.path), wrong.text)


@register_check
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
            yield from _hosts_divide_ranks(pipeline, options.get("hosts"), f"{here}.hierarchical.hosts")


def _hosts_divide_ranks(pipeline: Pipeline, hosts: int | None, path: str) -> Iterator[KeyConflict]:
    ranks = configured_world_size(pipeline)
    if hosts and ranks and ranks % hosts:
        text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
        yield KeyConflict(path, text, "each host needs the same number of ranks")


@register_check
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


# Sync policies, the ranks there are, and the lengths of stages


@register_check
def _hosts_of_sync_divide_ranks(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        path = f"{stage.key_path('sync')}.{settings.sync.name}.hosts"
        yield from _hosts_divide_ranks(pipeline, settings.plan.hosts, path)


@register_check
def _period_longer_than_stage(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        policy, period = settings.sync.settings, settings.plan.exchange_period
        assert isinstance(policy, SyncPolicy)
        if settings.steps is None or period <= settings.steps:
            continue
        effect = "ranks synchronise only at its end"
        if not pipeline.averages_at_end_of(stage):
            effect = "ranks do not synchronise in it"
        elif len({transfer.fragment for transfer in settings.plan.transfers}) > 1:
            effect = "some fragments are exchanged only at its end"
        key = policy.period_key
        text = f'"{key}: {period}" is longer than "steps: {settings.steps}" of {stage.path}: {effect}'
        own = f"sync.{settings.sync.name}.{key}" if "sync" in stage.model_fields_set else "steps"
        yield warning(f"{stage.path}.{own}", text, "shorten the period or lengthen the stage")
