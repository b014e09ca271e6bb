"""How gradients travel: DDP's settings, hooks, fidelity, with what stages exchange at all."""

from collections.abc import Iterator

from ddprun.config.choices import Choice
from ddprun.config.cross_checks.rule import CrossCheck, known_ranks, place, reads, shown
from ddprun.config.schema import Ddp, Pipeline
from ddprun.config.tree import KeyPath
from ddprun_hooks.config import grammar

_NO_HOOKS = {"independent": "sends nothing", "broadcast": "sends parameters as they are"}
"""Policies that use no hooks, and why."""


@reads("ddp", "accumulate", "sync", "stages")
def _accumulate_with_ddp(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.train_stages():
        settings = stage.effective(pipeline)
        if settings.accumulate == 1 or settings.gradients is None:
            continue
        clashes_with = f"clashes with {shown(stage, 'accumulate', settings.accumulate)}"
        if pipeline.ddp.static_graph:
            yield CrossCheck(
                ("ddp", "static_graph"),
                f'"static_graph: true" {clashes_with}: DDP crashes or stops reducing',
                "remove one of the two",
            )
        if pipeline.ddp.find_unused_parameters:
            yield CrossCheck(
                ("ddp", "find_unused_parameters"),
                f'"find_unused_parameters: true" {clashes_with}: '
                "DDP reduces only what the last micro-step used",
                "remove one of the two",
            )


@reads("ddp")
def _static_with_unused(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.ddp.static_graph and pipeline.ddp.find_unused_parameters:
        yield CrossCheck(
            ("ddp", "find_unused_parameters"),
            '"find_unused_parameters: true" has no effect with "static_graph: true", which finds them once',
            "remove one of the two",
        )


@reads("ddp", "sync", "stages")
def _unused_parameters_inside_hosts(pipeline: Pipeline) -> Iterator[CrossCheck]:
    inside = any(stage.effective(pipeline).gradients == "host" for stage in pipeline.train_stages())
    if pipeline.ddp.find_unused_parameters and inside:
        text = (
            '"find_unused_parameters: true" slows "hierarchical_sgd" with "within: 1": at every step DDP '
            "tells all ranks which parameters were used, so hosts wait for each other"
        )
        yield CrossCheck(
            ("ddp", "find_unused_parameters"), text, "remove it if every parameter is used", "warning"
        )


@reads("ddp", "sync", "stages")
def _ddp_without_gradients(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if any(stage.effective(pipeline).gradients for stage in pipeline.train_stages()):
        return
    for key in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        value = getattr(pipeline.ddp, key)
        if value != getattr(Ddp(), key):
            text = (
                f'"{key}: {str(value).lower()}" has no effect: by "sync", no train stage exchanges gradients'
            )
            yield CrossCheck(("ddp", key), text, "remove it", "warning")


@reads("timings", "sync", "stages")
def _fidelity_without_gradients(pipeline: Pipeline) -> Iterator[CrossCheck]:
    every = pipeline.timings.fidelity_every
    if every and all(stage.effective(pipeline).gradients != "all" for stage in pipeline.train_stages()):
        text = f'"fidelity_every: {every}" has no effect: no train stage has "sync: every_step", '
        text += "so gradients are not exchanged among all ranks"
        yield CrossCheck(("timings", "fidelity_every"), text, "remove it", "warning")


@reads("launch")
def _nccl_on_cpu(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.launch.backend == "nccl" and pipeline.launch.device == "cpu":
        yield CrossCheck(
            ("launch", "backend"),
            '"backend: nccl" clashes with "device: cpu": NCCL carries GPU tensors only',
            "use gloo, or device: cuda",
        )


@reads("launch", "checkpoint")
def _restarts(pipeline: Pipeline) -> Iterator[CrossCheck]:
    least, most = pipeline.launch.hosts
    restarts = pipeline.launch.max_restarts
    if least < most and not restarts:
        text = f'"nnodes: {pipeline.launch.nnodes}" has little effect with "max_restarts: 0": '
        text += "a host that is lost ends the run"
        yield CrossCheck(("launch", "nnodes"), text, "write max_restarts: 3", "warning")
    if restarts and not pipeline.checkpoint.keep:
        text = f'"max_restarts: {restarts}" clashes with "checkpoint" and its "keep: 0": '
        text += "after a failure the run would start anew"
        yield CrossCheck(("launch", "max_restarts"), text, "keep at least 1", "warning")


@reads("hooks", "stages", "launch")
def _hooks(pipeline: Pipeline) -> Iterator[CrossCheck]:
    yield from _stack_clashes(pipeline, pipeline.hooks, ("hooks",))
    for stage in pipeline.step_stages():
        if "hooks" in stage.model_fields_set:
            yield from _stack_clashes(pipeline, stage.hooks, place(stage, "hooks"))


def _stack_clashes(pipeline: Pipeline, hooks: tuple[Choice, ...], path: KeyPath) -> Iterator[CrossCheck]:
    for wrong in grammar.problems([grammar.entry(hook.name, hook.options) for hook in hooks]):
        if wrong.severity == "warning":
            yield CrossCheck((*path, *wrong.path), wrong.text, None, "warning")
    launch = pipeline.launch
    for number, hook in enumerate(hooks):
        here = (*path, number)
        within = hook.options.get("within", ()) if hook.name == "hierarchical" else ()
        if launch.device == "cuda" and (hook.name == "shared_memory" or "shared_memory" in within):
            text = '"shared_memory" clashes with "device: cuda" of "launch": it sums tensors on the CPU'
            at = here if hook.name == "shared_memory" else (*here, "hierarchical", "within")
            yield CrossCheck(at, text, "remove it: NCCL uses shared memory by itself")
        hosts = hook.options.get("hosts") if hook.name == "hierarchical" else None
        ranks = known_ranks(pipeline)
        if hosts and ranks and ranks % hosts:
            text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
            yield CrossCheck((*here, "hierarchical", "hosts"), text, "hosts that hold equally many ranks")


@reads("hooks", "sync", "stages")
def _hooks_that_nothing_uses(pipeline: Pipeline) -> Iterator[CrossCheck]:
    inherit = [stage for stage in pipeline.step_stages() if "hooks" not in stage.model_fields_set]
    policies = {stage.effective(pipeline).sync.name for stage in inherit}
    if pipeline.hooks and policies and policies <= _NO_HOOKS.keys():
        by = " and ".join(f'"sync: {name}" {_NO_HOOKS[name]}' for name in sorted(policies))
        yield CrossCheck(("hooks",), f'"hooks" has no effect: {by}', "remove it", "warning")
    for stage in pipeline.step_stages():
        sync = stage.effective(pipeline).sync
        if stage.hooks and sync.name in _NO_HOOKS:
            text = f'"hooks" clashes with {shown(stage, "sync", sync)}, which {_NO_HOOKS[sync.name]}'
            yield CrossCheck(place(stage, "hooks"), text, "remove one of the two")


RULES = (
    _accumulate_with_ddp,
    _static_with_unused,
    _unused_parameters_inside_hosts,
    _ddp_without_gradients,
    _fidelity_without_gradients,
    _nccl_on_cpu,
    _restarts,
    _hooks,
    _hooks_that_nothing_uses,
)
