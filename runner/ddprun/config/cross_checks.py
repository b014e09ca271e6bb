"""Checks across keys: what has no effect, or breaks, together with the rest of the file."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ddprun.config import signatures
from ddprun.config.choices import Choice, RunSchedule
from ddprun.config.faults import Severity
from ddprun.config.options import Cnn, Mlp, Synthetic, TextData, Transformer, WeightByTargets
from ddprun.config.patterns import matches, unmatched
from ddprun.config.resolved import to_plain_data
from ddprun.config.schema import Pipeline
from ddprun.config.sections import DataPair, Ddp
from ddprun.config.stages import (
    BEST_FILE,
    OVERRIDABLE_KEYS,
    AverageStage,
    BroadcastStage,
    EvaluateStage,
    ForwardStage,
    SaveStage,
    Stage,
    StageEvaluation,
    StepStage,
    metric_names,
)
from ddprun.config.tree import KeyPath
from ddprun.sync.plan import SyncPlan, SyncPolicy
from ddprun_hooks.config import grammar
from ddprun_hooks.config.messages import describe_value, message_parts, unknown_option

_UPDATE_KEYS = ("optimizer", "schedule", "warmup_steps", "clip_norm", "clip_value")
"""What a stage uses only if it updates the weights."""

_MAX_COMPARED_NAMES = 100_000
"""Most names that are compared with patterns: `check` has to stay quick, whatever the file says."""


@dataclass(frozen=True)
class KeyConflict:
    """A conflict between two keys."""

    path: KeyPath
    """The key at which it is shown; the message names the other."""

    problem: str
    allowed: str | None = None
    severity: Severity = "error"
    suggestion: str | None = None


_Check = Callable[[Pipeline], Iterator[KeyConflict]]
_CHECKS: list[tuple[frozenset[str], _Check]] = []
"""Every check with the top-level keys that it reads."""


def _register_check(*keys: str) -> Callable[[_Check], _Check]:
    """Register a check that reads these top-level keys; it is skipped if one of them has faults.

    A check that reads nothing but one key, by `_values_of_key`, registers no keys and always runs: a
    faulty value has been replaced by a valid one.
    """

    def register(check: _Check) -> _Check:
        _CHECKS.append((frozenset(keys), check))
        return check

    return register


def find_conflicts(pipeline: Pipeline, faulty: frozenset[str] = frozenset()) -> Iterator[KeyConflict]:
    """What the checks find; those that read a `faulty` key, which holds a placeholder, are left out."""
    for keys, check in _CHECKS:
        if not keys & faulty:
            yield from check(pipeline)


def _known_ranks(pipeline: Pipeline) -> int | None:
    """How many ranks the file says there are; None if it leaves that to the machine."""
    launch = pipeline.launch
    least, most = launch.host_range
    return launch.nproc_per_node * most if launch.nproc_per_node and least == most else None


def _stage_key_path(stage: Stage, *keys: str | int) -> KeyPath:
    """The path of a key of the stage itself."""
    return ("stages", stage.index, stage.name, *keys)


def _setting_path(stage: StepStage, key: str) -> KeyPath:
    """Path of the key that sets this for the stage: in the stage itself, or at the top of the file."""
    return _stage_key_path(stage, key) if key in stage.model_fields_set else (key,)


def _setting_text(stage: StepStage, key: str, value: object) -> str:
    """The key, with the stage if it names the key, and the value, as a message shows them."""
    return f'"{stage.key_path(key)}: {value.name if isinstance(value, Choice) else value}"'


def _values_of_key(pipeline: Pipeline, key: str) -> Iterator[tuple[KeyPath, Any]]:
    """The value of a key at the top and in each stage that names it, with its place."""
    yield (key,), getattr(pipeline, key)
    for stage in pipeline.step_stages():
        if key in stage.model_fields_set:
            yield _stage_key_path(stage, key), getattr(stage, key)


def _sync_plans(pipeline: Pipeline) -> Iterator[tuple[KeyPath, SyncPlan]]:
    """The plan of each stage with steps, and the place of the policy that makes it."""
    for stage in pipeline.step_stages():
        settings = stage.effective_settings(pipeline)
        yield (*_setting_path(stage, "sync"), settings.sync.name), settings.plan


def _updates(pipeline: Pipeline, stage: StepStage) -> bool:
    return stage.effective_settings(pipeline).updates_weights


# Model, data, loss and optimizer


@_register_check("model", "data", "stages")
def _model_fits_data(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for data in _train_data(pipeline):
        yield from _check_model_fits(pipeline, data)


def _train_data(pipeline: Pipeline) -> list[Choice]:
    """What stages train on."""
    return [pipeline.train_data(), *(stage.data for stage in pipeline.step_stages() if stage.data)]


def _check_model_fits(pipeline: Pipeline, data: Choice) -> Iterator[KeyConflict]:
    shape, tokens = _sample_shape(data)
    model = pipeline.model.settings
    if shape is None or model is None:
        return
    at: KeyPath = ("model", pipeline.model.name)
    what = f'"data: {data.name}"'
    if isinstance(model, Transformer) != tokens:
        text = f'"{pipeline.model.name}" clashes with {what}: it takes '
        text += "tokens, and these are numbers" if not tokens else "numbers, and these are tokens"
        yield KeyConflict(at, text, "allowed: " + ("mlp, cnn" if not tokens else "transformer"))
    elif isinstance(model, Mlp) and model.inputs != math.prod(shape):
        text = f'"inputs: {model.inputs}" clashes with {what}, whose samples hold {math.prod(shape)} values'
        yield KeyConflict((*at, "inputs"), text, f"write inputs: {math.prod(shape)}")
    elif isinstance(model, Cnn) and model.inputs != shape:
        text = f'"inputs: {list(model.inputs)}" clashes with {what}, whose samples have the shape '
        hint = f"write inputs: {list(shape)}" if len(shape) == 3 else "a cnn takes [C, H, W]"
        yield KeyConflict((*at, "inputs"), f"{text}{list(shape)}", hint)
    elif isinstance(model, Transformer) and shape[-1] > model.context:
        text = f'"context: {model.context}" clashes with {what}, whose samples hold {shape[-1]} tokens'
        yield KeyConflict((*at, "context"), text, f"write context: {shape[-1]}, or shorten the samples")
    elif isinstance(model, Transformer) and shape[-1] < model.context:
        text = f'of "context: {model.context}" only {shape[-1]} are ever used: {what} gives no more'
        yield KeyConflict((*at, "context"), text, f"write context: {shape[-1]}", "warning")


def _sample_shape(data: Choice) -> tuple[tuple[int, ...] | None, bool]:
    """Shape of a built-in's samples and whether they are tokens; no shape for what is not built in."""
    if data.name == "digits" and data.settings:
        return (1, 8, 8), False
    if isinstance(data.settings, TextData):
        return (data.settings.context,), True
    if isinstance(data.settings, Synthetic):
        return data.settings.shape, data.settings.dtype == "int64"
    return None, False


@_register_check("model", "data", "loss")
def _outputs_for_every_class(pipeline: Pipeline) -> Iterator[KeyConflict]:
    model, data = pipeline.model.settings, pipeline.train_data()
    classes = 10 if data.name == "digits" and data.settings else None
    if isinstance(data.settings, Synthetic) and data.settings.dtype != "int64":
        classes = data.settings.classes
    by_class = pipeline.loss.name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")
    if isinstance(model, (Mlp, Cnn)) and classes and model.outputs < classes and by_class:
        text = f'"outputs: {model.outputs}" clashes with "data: {data.name}", which has {classes} classes'
        yield KeyConflict(("model", pipeline.model.name, "outputs"), text, f"at least {classes}")
    if isinstance(model, Transformer) and data.name == "text" and data.settings and model.vocabulary < 256:
        text = f'"vocabulary: {model.vocabulary}" clashes with "data: text", whose tokens are bytes'
        yield KeyConflict(("model", "transformer", "vocabulary"), text, "at least 256")


@_register_check()
def _nesterov(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, optimizer in _values_of_key(pipeline, "optimizer"):
        options, at = optimizer.options, (*path, "SGD")
        if optimizer.name != "SGD" or optimizer.source != "torch" or not options.get("nesterov"):
            continue
        if not options.get("momentum"):
            text = '"nesterov: true" needs "momentum", which is 0'
            yield KeyConflict((*at, "nesterov"), text, "give a momentum such as 0.9")
        if options.get("dampening"):
            text = f'"nesterov: true" clashes with "dampening: {options["dampening"]}"'
            yield KeyConflict((*at, "dampening"), text, "nesterov needs a dampening of 0")


@_register_check("optimizer", "groups")
def _options_of_groups(pipeline: Pipeline) -> Iterator[KeyConflict]:
    """Each option of a group is one of the optimizer, and of its type."""
    optimizer = pipeline.optimizer
    if optimizer.source != "torch":
        return
    model = signatures.torch_options_model("optimizer", optimizer.name)
    for index, group in enumerate(pipeline.groups):
        try:
            model.model_validate({**optimizer.options, **group.options})
        except ValidationError as error:
            for item in error.errors(include_url=False):
                text, allowed, near = message_parts(
                    item, describe_value(group.options.get(str(item["loc"][0])))
                )
                if item["type"] == "extra_forbidden":
                    known = list(model.model_fields)
                    text, allowed, near = unknown_option(optimizer.name, str(item["loc"][0]), known)
                yield KeyConflict(("groups", index, *item["loc"]), text, allowed, suggestion=near)


@_register_check("model", "freeze", "groups")
def _patterns_of_parameters(pipeline: Pipeline) -> Iterator[KeyConflict]:
    """Of built-in models the names are known without building them."""
    model = pipeline.model.settings
    places: list[tuple[KeyPath, tuple[str, ...]]] = [(("freeze",), pipeline.freeze)]
    places += [(("groups", index, "match"), group.match) for index, group in enumerate(pipeline.groups)]
    if not isinstance(model, Mlp | Cnn | Transformer) or not any(patterns for _, patterns in places):
        return
    if isinstance(model, Transformer) and 12 * model.layers > _MAX_COMPARED_NAMES:
        return
    names = model.parameter_names()
    if len(names) * sum(len(patterns) for _, patterns in places) > _MAX_COMPARED_NAMES:
        return  # the run will see
    for path, patterns in places:
        for index, text, allowed in unmatched(patterns, names):
            yield KeyConflict((*path, index), text, allowed)
    if all(matches(name, pipeline.freeze) for name in names):
        yield KeyConflict(("freeze",), "no parameter is left to train", "freeze fewer")


@_register_check("model", "optimizer")
def _muon_with_biases(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.optimizer.name == "Muon" and pipeline.optimizer.source == "torch" and pipeline.model.settings:
        text = f'"Muon" clashes with "model: {pipeline.model.name}": it takes matrices, no biases'
        yield KeyConflict(("optimizer",), text, "use another optimizer, such as adamw")


@_register_check("batch", "loss")
def _batch_and_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    batch, loss = pipeline.batch, pipeline.loss
    own = loss.name == "model" and loss.source == "built-in"
    if batch.target is not None and own:
        text = '"target" clashes with "loss: model": the model returns its loss'
        yield KeyConflict(("batch", "target"), text, "name all that the model takes in inputs")
    elif batch.target is not None and batch.inputs is None:
        text = '"target" needs "inputs", which are the model\'s arguments'
        yield KeyConflict(("batch", "target"), text, "write batch: {inputs: …, target: …}")
    elif batch.inputs is not None and batch.target is None and not own:
        text = f'"inputs" needs "target", with which "loss: {loss.name}" compares the output'
        yield KeyConflict(("batch", "inputs"), text, "write batch: {inputs: …, target: …}, or loss: model")


@_register_check("loss", "weight_by")
def _weight_of_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    weight, loss = pipeline.weight_by, pipeline.loss
    if weight is None:
        return
    if loss.options.get("reduction") == "sum":
        text = f'"weight_by: {weight.name}" clashes with "reduction: sum": a sum counts as it is'
        yield KeyConflict(("weight_by",), text, "remove one of the two")
    settings, ignored = weight.settings, loss.options.get("ignore_index")
    own = settings.ignore_index if isinstance(settings, WeightByTargets) else None
    if None not in (own, ignored) and own != ignored:
        text = f'"ignore_index: {own}" clashes with "ignore_index: {ignored}" of "loss"'
        yield KeyConflict(("weight_by", weight.name, "ignore_index"), text, "remove it")


@_register_check("loader")
def _sampler_and_shuffle(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.loader.sampler is not None and pipeline.loader.shuffle:
        text = '"shuffle: true" clashes with "sampler", which decides the order'
        yield KeyConflict(("loader", "shuffle"), text, "remove one of the two")


@_register_check("batch", "loss", "stages", "weight_by")
def _metrics_with_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    loss, warned = pipeline.loss, False
    for path, metric in _metrics(pipeline):
        if metric.source != "built-in":
            continue
        clash = f'"{metric.name}" clashes with "loss: {loss.name}"'
        own = loss.name == "model" and loss.source == "built-in"
        if own and metric.name == "accuracy":
            text = f"{clash}: what the model returns besides its loss is not known"
            yield KeyConflict(path, text, "write a dotted function of (output, batch), or name a loss")
        elif own and pipeline.weight_by is None and not warned:
            text = f'{clash} without "weight_by": it is of the mean over samples, not over targets'
            inputs = pipeline.batch.inputs
            key = inputs.get("labels", "labels") if isinstance(inputs, Mapping) else "labels"
            hint = f"write weight_by: {{targets: {{of: {key}, shift: 1}}}}, as the model counts"
            yield KeyConflict(path, text, hint, "warning")
            warned = True  # once, however many evaluations there are
        elif own:
            continue
        elif metric.name == "perplexity" and loss.name not in ("CrossEntropyLoss", "NLLLoss"):
            text = f"{clash}: it is the exponential of a cross-entropy"
            yield KeyConflict(path, text, "use the loss cross_entropy or nll_loss, or model")


@_register_check("stages")
def _metrics_twice(pipeline: Pipeline) -> Iterator[KeyConflict]:
    seen = set[tuple[KeyPath, str]]()
    for path, metric in _metrics(pipeline):
        if (path[:-1], metric.name) in seen:
            text = f'"{metric.name}" is in the list twice, and metrics need different names'
            yield KeyConflict(path, text, "remove one, or give the other a function of its own name")
        seen.add((path[:-1], metric.name))


def _metrics(pipeline: Pipeline) -> Iterator[tuple[KeyPath, Choice]]:
    """Every metric of the evaluations, with its place."""
    for path, evaluation in _evaluations(pipeline):
        at = (*path, "evaluate") if isinstance(evaluation, EvaluateStage) else path
        for number, metric in enumerate(evaluation.metrics):
            yield (*at, "metrics", number), metric


def _evaluations(pipeline: Pipeline) -> Iterator[tuple[KeyPath, EvaluateStage | StageEvaluation]]:
    """Every evaluate stage, and the evaluations inside other stages, with their places."""
    for stage in pipeline.stages:
        if isinstance(stage, EvaluateStage):
            yield ("stages", stage.index), stage
        elif isinstance(stage, StepStage) and stage.evaluate is not None:
            yield _stage_key_path(stage, "evaluate"), stage.evaluate


@_register_check("data", "stages")
def _evaluate_without_data(pipeline: Pipeline) -> Iterator[KeyConflict]:
    evaluations = [
        (path, one)
        for path, one in _evaluations(pipeline)
        if not (isinstance(one, EvaluateStage) and one.data)
    ]
    if reason := _why_nothing_held_out(pipeline.data):
        for path, _ in evaluations:
            text = f'"evaluate" has no data: {reason}'
            yield KeyConflict(path, text, "give data: {train: …, evaluate: …}")
    if isinstance(pipeline.data, DataPair) and pipeline.data.evaluate is not None and not evaluations:
        text = '"data.evaluate" has no effect: no stage of "stages" is "evaluate", or has it'
        if any(isinstance(stage, EvaluateStage) for stage in pipeline.stages):
            text = '"data.evaluate" has no effect: every evaluate stage has "data" of its own'
        yield KeyConflict(("data", "evaluate"), text, "add an evaluate stage", "warning")


@_register_check("sync", "stages")
def _evaluate_inside_a_stage(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage in pipeline.step_stages():
        settings, evaluation = stage.effective_settings(pipeline), stage.evaluate
        monitors = {key: one for key in ("keep_best", "stop") if (one := getattr(stage, key)) is not None}
        if evaluation is None:
            for key in monitors:
                text = f'"{key}" needs "evaluate" in the same stage: it goes by what that measures'
                yield KeyConflict(_stage_key_path(stage, key), text, "write evaluate: {every: N}")
            continue
        known = ["loss", *metric_names(evaluation.metrics)]
        for key, monitor in monitors.items():
            if monitor.metric not in known:
                text = f'"{monitor.metric}" is not measured by "evaluate" of {stage.path}'
                yield KeyConflict(_stage_key_path(stage, key, "metric"), text, f"allowed: {', '.join(known)}")
        if settings.plan.never_exchanges or settings.plan.keeps_apart:
            text = (
                f'"evaluate" clashes with {_setting_text(stage, "sync", settings.sync)}: ranks train models '
            )
            text += "of their own and stop each for itself, so there is no model to measure"
            hint = "use an evaluate stage after an average stage"
            yield KeyConflict(_stage_key_path(stage, "evaluate"), text, hint)
        if settings.steps is not None and evaluation.every > settings.steps:
            text = f'"every: {evaluation.every}" is longer than "steps: {settings.steps}" of {stage.path}: '
            text += "it is measured only at its end"
            yield KeyConflict(_stage_key_path(stage, "evaluate", "every"), text, "shorten it", "warning")


@_register_check("stages")
def _one_best_file(pipeline: Pipeline) -> Iterator[KeyConflict]:
    keeping = [stage for stage in pipeline.step_stages() if stage.keep_best is not None]
    for stage in keeping[1:]:
        if stage.keep_best != keeping[0].keep_best:
            text = f'"keep_best" clashes with that of {keeping[0].path}: a run keeps one {BEST_FILE}, '
            text += "the best by one metric"
            hint = "write the same in both, or remove one"
            yield KeyConflict(_stage_key_path(stage, "keep_best"), text, hint)
    for save in pipeline.stages:
        if keeping and isinstance(save, SaveStage) and save.to == BEST_FILE:
            text = f'"to: {BEST_FILE}" clashes with "keep_best" of {keeping[0].path}, which writes that file'
            yield KeyConflict(_stage_key_path(save, "to"), text, "name another file")


@_register_check("data", "loader", "stages")
def _sharded_built_in(pipeline: Pipeline) -> Iterator[KeyConflict]:
    built_in = next((data for data in _train_data(pipeline) if data.source == "built-in"), None)
    if pipeline.loader.sharded and built_in is not None:
        text = f'"sharded: true" clashes with "data: {built_in.name}": each rank would train on every sample'
        yield KeyConflict(("loader", "sharded"), text, "remove it")


def _why_nothing_held_out(data: Choice | DataPair) -> str | None:
    """Why there is nothing to evaluate on; None if there is."""
    if isinstance(data, DataPair):
        return '"data" gives "train" only' if data.evaluate is None else None
    if data.settings is None:
        return f'"data: {data.name}" holds nothing out'
    return None if data.options["held_out"] else f'"held_out" of "{data.name}" keeps nothing'


# What is compiled, DDP's settings, the launch, and hooks


@_register_check("compile", "model")
def _blocks_of_built_in(pipeline: Pipeline) -> Iterator[KeyConflict]:
    """Which modules a built-in model has is known without building it, and which of them repeat."""
    wanted, model = pipeline.compile, pipeline.model
    if wanted is None or wanted.blocks != "auto" or not isinstance(model.settings, Mlp | Cnn):
        return
    text = f'"blocks: auto" clashes with "model: {model.name}", in which no block repeats'
    yield KeyConflict(("compile", "blocks"), text, "write compile: true, or name the modules")


@_register_check("compile", "launch", "deterministic")
def _mode_of_compiling(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.compile is None:
        return
    mode = pipeline.compile.mode
    if mode == "reduce-overhead" and pipeline.launch.device == "cpu":
        text = f'"mode: {mode}" has no effect with "device: cpu" of "launch": it uses CUDA graphs'
        yield KeyConflict(("compile", "mode"), text, "remove it", "warning")
    if mode.startswith("max-autotune") and pipeline.deterministic:
        text = f'"mode: {mode}" clashes with "deterministic: true": each process takes the kernels that it '
        text += "has timed as the fastest, and another time others"
        yield KeyConflict(("compile", "mode"), text, "use another mode")


@_register_check("ddp", "accumulate", "sync", "stages")
def _accumulate_with_ddp(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage in pipeline.train_stages():
        settings = stage.effective_settings(pipeline)
        if settings.accumulate == 1 or settings.gradient_averaging is None:
            continue
        effects = {
            "static_graph": "DDP crashes or stops reducing",
            "find_unused_parameters": "DDP reduces only what the last micro-step used",
        }
        for key, effect in effects.items():
            if getattr(pipeline.ddp, key):
                accumulate = _setting_text(stage, "accumulate", settings.accumulate)
                text = f'"{key}: true" clashes with {accumulate}: {effect}'
                yield KeyConflict(("ddp", key), text, "remove one of the two")


@_register_check("ddp")
def _static_with_unused(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.ddp.static_graph and pipeline.ddp.find_unused_parameters:
        text = '"find_unused_parameters: true" has no effect with "static_graph: true", which finds them once'
        yield KeyConflict(("ddp", "find_unused_parameters"), text, "remove one of the two")


@_register_check("ddp", "sync", "stages")
def _ddp_and_gradients(pipeline: Pipeline) -> Iterator[KeyConflict]:
    stages = [(stage, stage.effective_settings(pipeline)) for stage in pipeline.train_stages()]
    gradients = {settings.gradient_averaging for _, settings in stages}
    by_host = [
        _setting_text(stage, "sync", settings.sync)
        for stage, settings in stages
        if settings.gradient_averaging == "host"
    ]
    if pipeline.ddp.find_unused_parameters and by_host:
        text = f'"find_unused_parameters: true" slows {by_host[0]}: at every step DDP tells all ranks which '
        text += "parameters were used, so hosts wait for each other"
        hint = "remove it if every parameter is used"
        yield KeyConflict(("ddp", "find_unused_parameters"), text, hint, "warning")
    for key in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        value = getattr(pipeline.ddp, key)
        if gradients <= {None} and value != getattr(Ddp(), key):
            text = f'"{key}: {str(value).lower()}" has no effect: no train stage averages gradients'
            yield KeyConflict(("ddp", key), text, "remove it", "warning")


@_register_check("timings", "sync", "stages")
def _fidelity_without_gradients(pipeline: Pipeline) -> Iterator[KeyConflict]:
    every = pipeline.timings.fidelity_every
    if every and all(
        stage.effective_settings(pipeline).gradient_averaging != "all" for stage in pipeline.train_stages()
    ):
        text = f'"fidelity_every: {every}" has no effect: no train stage averages gradients of all ranks'
        yield KeyConflict(("timings", "fidelity_every"), text, "remove it", "warning")


@_register_check("launch")
def _nccl_on_cpu(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.launch.backend == "nccl" and pipeline.launch.device == "cpu":
        text = '"backend: nccl" clashes with "device: cpu": NCCL carries GPU tensors only'
        yield KeyConflict(("launch", "backend"), text, "use gloo, or device: cuda")


@_register_check("launch", "checkpoint")
def _restarts(pipeline: Pipeline) -> Iterator[KeyConflict]:
    least, most = pipeline.launch.host_range
    restarts = pipeline.launch.max_restarts
    if least < most and not restarts:
        text = f'"nnodes: {pipeline.launch.nnodes}" needs "max_restarts": losing a host would end the run'
        yield KeyConflict(("launch", "nnodes"), text, "write max_restarts: 3", "warning")
    if restarts and not pipeline.checkpoint.keep:
        text = f'"max_restarts: {restarts}" needs checkpoints, and "keep" is 0: the run would start over'
        yield KeyConflict(("launch", "max_restarts"), text, "keep at least 1", "warning")


@_register_check()
def _hook_stack_grammar(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in _values_of_key(pipeline, "hooks"):
        for wrong in grammar.stack_problems([grammar.stack_entry(hook.name, hook.options) for hook in hooks]):
            yield KeyConflict((*path, *wrong.path), wrong.text, None, wrong.severity)


@_register_check("hooks", "stages", "launch")
def _hooks_and_launch(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in _values_of_key(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            here = (*path, number)
            options = hook.options if hook.name == "hierarchical" else {}
            in_leg = "shared_memory" in options.get("within", ())
            if pipeline.launch.device == "cuda" and (hook.name == "shared_memory" or in_leg):
                text = '"shared_memory" clashes with "device: cuda" of "launch": it sums tensors on the CPU'
                at = (*here, "hierarchical", "within") if in_leg else here
                yield KeyConflict(at, text, "remove it: NCCL uses shared memory by itself")
            yield from _hosts_divide_ranks(pipeline, options.get("hosts"), (*here, "hierarchical", "hosts"))


@_register_check("hooks", "precision", "stages")
def _redundant_casts(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, hooks in _values_of_key(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            if pipeline.precision == f"pure_{hook.name}" and not hook.options.get("accumulate"):
                setting = f'"precision: {pipeline.precision}"'
                text = f'"{hook.name}" has no effect: with {setting} everything travels so'
                hint = f"remove it, or write {hook.name}: {{accumulate: fp32}}"
                yield KeyConflict((*path, number), text, hint, "warning")


def _hosts_divide_ranks(pipeline: Pipeline, hosts: int | None, path: KeyPath) -> Iterator[KeyConflict]:
    ranks = _known_ranks(pipeline)
    if hosts and ranks and ranks % hosts:
        text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
        yield KeyConflict(path, text, "each host needs the same number of ranks")


@_register_check("hooks", "sync", "stages")
def _hooks_that_nothing_uses(pipeline: Pipeline) -> Iterator[KeyConflict]:
    inherit = [stage for stage in pipeline.step_stages() if "hooks" not in stage.model_fields_set]
    unused = {
        settings.sync.name: _why_hooks_unused(settings.plan)
        for settings in (stage.effective_settings(pipeline) for stage in inherit)
    }
    if pipeline.hooks and unused and all(unused.values()):
        by = " and ".join(f'"sync: {name}" {why}' for name, why in sorted(unused.items()))
        yield KeyConflict(("hooks",), f'"hooks" has no effect: {by}', "remove it", "warning")
    for stage in pipeline.step_stages():
        settings = stage.effective_settings(pipeline)
        if stage.hooks and (why := _why_hooks_unused(settings.plan)):
            text = f'"hooks" clashes with {_setting_text(stage, "sync", settings.sync)}, which {why}'
            yield KeyConflict(_setting_path(stage, "hooks"), text, "remove one of the two")


def _why_hooks_unused(plan: SyncPlan) -> str:
    """Why a policy uses no hooks; empty if it does, or if nothing in its stage could use them."""
    if plan.uses_hooks or not plan.changes_weights:
        return ""
    return "sends parameters as they are" if plan.transfers else "sends nothing"


# Sync policies, the ranks there are, and the lengths of stages


@_register_check("sync", "stages", "launch")
def _source_is_a_rank(pipeline: Pipeline) -> Iterator[KeyConflict]:
    ranks = _known_ranks(pipeline)
    sources = [
        ((*path, "source"), one.source)
        for path, plan in _sync_plans(pipeline)
        for one in plan.transfers
        if one.source is not None
    ]
    sources += [
        (_stage_key_path(stage, "source"), stage.source)
        for stage in pipeline.stages
        if isinstance(stage, BroadcastStage)
    ]
    for path, source in sources:
        if ranks and source >= ranks:
            there_are, allowed = (
                (f"are {ranks} ranks", f"0 to {ranks - 1}") if ranks > 1 else ("is 1 rank", "0")
            )
            text = f'"source: {source}" clashes with "launch": there {there_are}'
            yield KeyConflict(path, text, f"allowed: {allowed}")


@_register_check("sync", "stages", "launch")
def _two_levels(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, plan in _sync_plans(pipeline):
        yield from _hosts_divide_ranks(pipeline, plan.hosts, (*path, "hosts"))
    for path, sync in _values_of_key(pipeline, "sync"):
        within, across = (sync.options.get(key) for key in ("within", "across"))
        if within is not None and within == across:
            text = f'"within: {within}" has no effect with "across: {across}": all ranks average as often'
            hint = "lengthen across, or use local_sgd"
            yield KeyConflict((*path, sync.name, "within"), text, hint, "warning")


@_register_check("sync", "stages")
def _period_longer_than_stage(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage in pipeline.step_stages():
        settings = stage.effective_settings(pipeline)
        policy, period = settings.sync.settings, settings.plan.period
        assert isinstance(policy, SyncPolicy)
        key = policy.period_key
        if settings.steps is None or period <= settings.steps:
            continue
        effect = "ranks synchronise only at its end"
        if not pipeline.averages_after(stage):
            effect = "ranks do not synchronise in it"
        elif len({transfer.fragment for transfer in settings.plan.transfers}) > 1:
            effect = "some fragments are exchanged only at its end"
        text = f'"{key}: {period}" is longer than "steps: {settings.steps}" of {stage.path}: {effect}'
        own = ("sync", settings.sync.name, key) if "sync" in stage.model_fields_set else ("steps",)
        hint = "shorten the period or lengthen the stage"
        yield KeyConflict(_stage_key_path(stage, *own), text, hint, "warning")


@_register_check("sync", "hooks", "stages")
def _parameters_are_equal_already(pipeline: Pipeline) -> Iterator[KeyConflict]:
    equal, why = True, "all ranks start with the same parameters"
    for stage in pipeline.stages:
        if isinstance(stage, (AverageStage, BroadcastStage)):
            if equal:
                text = f'"{stage.name}" has no effect: {why}'
                yield KeyConflict(("stages", stage.index), text, None, "warning")
            equal = True
        elif isinstance(stage, StepStage):
            equal = _leaves_equal(pipeline, stage, before=equal)
        else:
            continue
        why = f"{stage.path} leaves all ranks with the same parameters"


def _leaves_equal(pipeline: Pipeline, stage: StepStage, *, before: bool) -> bool:
    """Whether all ranks surely hold the same parameters after a stage."""
    settings = stage.effective_settings(pipeline)
    if pipeline.averages_after(stage):
        return True
    if not settings.updates_weights and settings.mutate is None:
        return before
    sent = settings.plan.period == 1 and all(hook.name != "noop" for hook in settings.hooks)
    return sent and (settings.mutate is None or isinstance(stage, ForwardStage))


# Buffers


@_register_check("buffers", "model", "stages")
def _buffers_without_effect(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if not isinstance(pipeline.model.settings, (Mlp, Transformer)):
        return
    for path, buffers in _values_of_key(pipeline, "buffers"):
        if buffers.when not in ("auto", "never"):
            when = f"{{every: {buffers.every}}}" if buffers.when == "every" else buffers.when
            text = f'"buffers: {when}" has no effect: "model: {pipeline.model.name}" has no buffers'
            yield KeyConflict(path, text, "remove it", "warning")


@_register_check("buffers", "model", "stages")
def _evaluates_with_own_buffers(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if not isinstance(pipeline.model.settings, Cnn):
        return
    last: StepStage | None = None
    for stage in pipeline.stages:
        if isinstance(stage, StepStage):
            last = stage
        measures = isinstance(stage, EvaluateStage) or (stage is last and last.evaluate is not None)
        if measures and last and last.effective_settings(pipeline).buffers.when == "never":
            text = (
                f"{_setting_text(last, 'buffers', 'never')} clashes with {stage.path}: each rank evaluates "
            )
            text += f'with its own running statistics of "model: {pipeline.model.name}"'
            yield KeyConflict(_setting_path(last, "buffers"), text, "use before_evaluate", "warning")


# Stages: what they name for themselves, and their order


@_register_check("schedule", "warmup_steps", "stages")
def _schedule_over_the_run(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if not isinstance(pipeline.schedule, RunSchedule):
        return
    stages = [stage for stage in pipeline.step_stages() if _updates(pipeline, stage)]
    for stage in stages:
        for key in ("schedule", "warmup_steps", "optimizer"):
            if key in stage.model_fields_set:
                text = f'"{key}" of {stage.path} clashes with "schedule: {{…, over: run}}", by which one '
                text += "schedule and one warm-up span all stages"
                yield KeyConflict(_stage_key_path(stage, key), text, "remove one of the two")
    lengths = [stage.steps for stage in stages]
    total = sum(length or 0 for length in lengths)
    if None not in lengths and pipeline.warmup_steps >= max(1, total):
        text = f'"warmup_steps: {pipeline.warmup_steps}" is not less than the {total} steps of the run: the '
        text += "full learning rate would never be used"
        yield KeyConflict(("warmup_steps",), text, "shorten the warm-up or lengthen a stage")


@_register_check("schedule", "warmup_steps", "stages")
def _warmup_longer_than_stage(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage in pipeline.step_stages():
        settings = stage.effective_settings(pipeline)
        if not settings.updates_weights or isinstance(settings.schedule, RunSchedule):
            continue
        if settings.steps is not None and settings.warmup_steps >= settings.steps:
            text = f'"warmup_steps: {settings.warmup_steps}" is not less than "steps: {settings.steps}" of '
            text += f"{stage.path}: the full learning rate would never be used"
            key = "warmup_steps" if "warmup_steps" in stage.model_fields_set else "steps"
            hint = "shorten the warm-up or lengthen the stage"
            yield KeyConflict(_stage_key_path(stage, key), text, hint)


@_register_check("optimizer", "stages")
def _another_optimizer(pipeline: Pipeline) -> Iterator[KeyConflict]:
    above = pipeline.optimizer
    for stage in pipeline.step_stages():
        own = stage.optimizer
        if own is not None and (own.name, own.source) != (above.name, above.source):
            text = f'"optimizer: {own.name}" of {stage.path} clashes with "optimizer: {above.name}": a stage '
            text += "changes the optimizer's settings, not the optimizer, whose state would be lost"
            yield KeyConflict(_setting_path(stage, "optimizer"), text, f"write {above.name}: {{…}}")


@_register_check("stages")
def _nothing_is_updated(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage in pipeline.step_stages():
        for key in _UPDATE_KEYS if not _updates(pipeline, stage) else ():
            if key in stage.model_fields_set and getattr(stage, key):
                text = f'"{key}" clashes with "forward" without "update": nothing is updated'
                yield KeyConflict(_setting_path(stage, key), text, "remove it, or name an update")


@_register_check("ema", "stages")
def _ema_of_nothing(pipeline: Pipeline) -> Iterator[KeyConflict]:
    read = [*_evaluations(pipeline), *(stage for stage in pipeline.stages if isinstance(stage, SaveStage))]
    if pipeline.ema is not None and not read:
        text = '"ema" has no effect: nothing evaluates or saves the average'
        yield KeyConflict(("ema",), text, "add an evaluate or a save stage", "warning")


@_register_check("stages")
def _saves(pipeline: Pipeline) -> Iterator[KeyConflict]:
    changed = False
    written: dict[str, int] = {}
    for stage in pipeline.stages:
        if isinstance(stage, StepStage):
            changed = changed or _updates(pipeline, stage) or stage.mutate is not None
        if not isinstance(stage, SaveStage):
            continue
        if stage.to in written:
            text = f'{stage.path} writes "{stage.to}", as stages[{written[stage.to]}].save does'
            yield KeyConflict(_stage_key_path(stage, "to"), text, "name another file")
        written.setdefault(stage.to, stage.index)
        if not changed:
            text = '"save" comes before every "train": it saves the initial weights'
            yield KeyConflict(("stages", stage.index), text, None, "warning")


@_register_check("stages", *OVERRIDABLE_KEYS)
def _overridden_everywhere(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for key in OVERRIDABLE_KEYS:
        users = [
            stage
            for stage in pipeline.step_stages()
            if key in type(stage).model_fields and (key not in _UPDATE_KEYS or _updates(pipeline, stage))
        ]
        overridden = bool(users) and all(key in stage.model_fields_set for stage in users)
        if not overridden or not _differs_from_default(pipeline, key):
            continue
        names = " and ".join(dict.fromkeys(stage.name for stage in users))
        text = f'"{key}" has no effect: every {names} stage of "stages" has its own "{key}"'
        hint = "remove it here or there"
        if key == "optimizer":
            text = f"the options of {text.replace('has no effect', 'have no effect')}"
            hint = "remove them here or there"
        yield KeyConflict((key,), text, hint, "warning")


def _differs_from_default(pipeline: Pipeline, key: str) -> bool:
    """Whether the file gives a key another value than its default; of the optimizer, which must be given, its
    options.
    """
    if key == "optimizer":
        return bool(pipeline.optimizer.options)
    said, default = to_plain_data(getattr(pipeline, key)), to_plain_data(Pipeline.model_fields[key].default)
    return bool(said != default)
