"""Checks across keys: what has no effect, or breaks, together with the rest of the file."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ddprun.config import signatures
from ddprun.config.choices import Choice, RunSchedule
from ddprun.config.faults import Severity
from ddprun.config.options import Cnn, Mlp, Synthetic, Targets, Text, Transformer
from ddprun.config.patterns import matches, unmatched
from ddprun.config.resolved import plain
from ddprun.config.schema import (
    BEST_FILE,
    OVERRIDABLE,
    AverageStage,
    BroadcastStage,
    DataPair,
    Ddp,
    Evaluate,
    Forward,
    Pipeline,
    Save,
    Stage,
    StageEvaluation,
    StepStage,
    Train,
    metric_names,
)
from ddprun.config.tree import KeyPath
from ddprun.sync.plan import SyncPlan, SyncPolicy
from ddprun_hooks.config import grammar
from ddprun_hooks.config.messages import described, unknown_option, worded

_OF_UPDATES = ("optimizer", "schedule", "warmup_steps", "clip_norm", "clip_value")
"""What a stage uses only if it updates the weights."""

_MOST_NAMES = 100_000
"""Names that are held against patterns, at most: `check` has to be quick, whatever the file says."""


@dataclass(frozen=True)
class CrossCheck:
    """Two keys that clash."""

    path: KeyPath
    """The key at which it is shown; the message names the other."""

    problem: str
    allowed: str | None = None
    severity: Severity = "error"


_Check = Callable[[Pipeline], Iterator[CrossCheck]]
_CHECKS: list[tuple[frozenset[str], _Check]] = []
"""Every check with the top-level keys that it reads."""


def _reads(*keys: str) -> Callable[[_Check], _Check]:
    """Register a check, which needs these top-level keys without faults.

    One that takes `_all_of` a single key needs none: what has faults is replaced by what has none.
    """

    def register(check: _Check) -> _Check:
        _CHECKS.append((frozenset(keys), check))
        return check

    return register


def cross_checks(pipeline: Pipeline, faulty: frozenset[str] = frozenset()) -> Iterator[CrossCheck]:
    """What the checks find; those that read a `faulty` key, which holds a placeholder, are left out."""
    for keys, check in _CHECKS:
        if not keys & faulty:
            yield from check(pipeline)


def _known_ranks(pipeline: Pipeline) -> int | None:
    """How many ranks the file says there are; None if it leaves that to the machine."""
    launch = pipeline.launch
    least, most = launch.host_range
    return launch.nproc_per_node * most if launch.nproc_per_node and least == most else None


def _own(stage: Stage, *keys: str | int) -> KeyPath:
    """The path of a key of the stage itself."""
    return ("stages", stage.index, stage.name, *keys)


def _place(stage: StepStage, key: str) -> KeyPath:
    """Where the value of a key comes from that applies to the stage: the stage, or the top of the file."""
    return _own(stage, key) if key in stage.model_fields_set else (key,)


def _shown(stage: StepStage, key: str, value: object) -> str:
    """The key, with the stage if it names the key, and the value, as a message shows them."""
    own = f"{stage.path}." if key in stage.model_fields_set else ""
    return f'"{own}{key}: {value.name if isinstance(value, Choice) else value}"'


def _all_of(pipeline: Pipeline, key: str) -> Iterator[tuple[KeyPath, Any]]:
    """The value of a key at the top and in each stage that names it, with its place."""
    yield (key,), getattr(pipeline, key)
    for stage in pipeline.step_stages():
        if key in stage.model_fields_set:
            yield _own(stage, key), getattr(stage, key)


def _updates(stage: Train | Forward) -> bool:
    """Whether a stage updates the weights, by gradients or by its `update`."""
    return isinstance(stage, Train) or stage.update is not None


# Model, data, loss and optimizer


@_reads("model", "data", "stages")
def _model_fits_data(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for data in _train_data(pipeline):
        yield from _model_fits(pipeline, data)


def _train_data(pipeline: Pipeline) -> list[Choice]:
    """What stages train on."""
    return [pipeline.train_data(), *(stage.data for stage in pipeline.step_stages() if stage.data)]


def _model_fits(pipeline: Pipeline, data: Choice) -> Iterator[CrossCheck]:
    shape, tokens = _samples(data)
    model = pipeline.model.settings
    if shape is None or model is None:
        return
    at: KeyPath = ("model", pipeline.model.name)
    what = f'"data: {data.name}"'
    if isinstance(model, Transformer) != tokens:
        text = f'"{pipeline.model.name}" clashes with {what}: it takes '
        text += "tokens, and these are numbers" if not tokens else "numbers, and these are tokens"
        yield CrossCheck(at, text, "allowed: " + ("mlp, cnn" if not tokens else "transformer"))
    elif isinstance(model, Mlp) and model.inputs != math.prod(shape):
        text = f'"inputs: {model.inputs}" clashes with {what}, whose samples hold {math.prod(shape)} values'
        yield CrossCheck((*at, "inputs"), text, f"write inputs: {math.prod(shape)}")
    elif isinstance(model, Cnn) and model.inputs != shape:
        text = f'"inputs: {list(model.inputs)}" clashes with {what}, whose samples have the shape '
        hint = f"write inputs: {list(shape)}" if len(shape) == 3 else "a cnn takes [C, H, W]"
        yield CrossCheck((*at, "inputs"), f"{text}{list(shape)}", hint)
    elif isinstance(model, Transformer) and shape[-1] > model.context:
        text = f'"context: {model.context}" clashes with {what}, whose samples hold {shape[-1]} tokens'
        yield CrossCheck((*at, "context"), text, f"write context: {shape[-1]}, or shorten the samples")
    elif isinstance(model, Transformer) and shape[-1] < model.context:
        text = f'of "context: {model.context}" only {shape[-1]} are ever used: {what} gives no more'
        yield CrossCheck((*at, "context"), text, f"write context: {shape[-1]}", "warning")


def _samples(data: Choice) -> tuple[tuple[int, ...] | None, bool]:
    """Shape of a built-in's samples and whether they are tokens; no shape for what is not built in."""
    if data.name == "digits" and data.settings:
        return (1, 8, 8), False
    if isinstance(data.settings, Text):
        return (data.settings.context,), True
    if isinstance(data.settings, Synthetic):
        return data.settings.shape, data.settings.dtype == "int64"
    return None, False


@_reads("model", "data", "loss")
def _outputs_for_every_class(pipeline: Pipeline) -> Iterator[CrossCheck]:
    model, data = pipeline.model.settings, pipeline.train_data()
    classes = 10 if data.name == "digits" and data.settings else None
    if isinstance(data.settings, Synthetic) and data.settings.dtype != "int64":
        classes = data.settings.classes
    by_class = pipeline.loss.name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")
    if isinstance(model, (Mlp, Cnn)) and classes and model.outputs < classes and by_class:
        text = f'"outputs: {model.outputs}" clashes with "data: {data.name}", which has {classes} classes'
        yield CrossCheck(("model", pipeline.model.name, "outputs"), text, f"at least {classes}")
    if isinstance(model, Transformer) and data.name == "text" and data.settings and model.vocabulary < 256:
        text = f'"vocabulary: {model.vocabulary}" clashes with "data: text", whose tokens are bytes'
        yield CrossCheck(("model", "transformer", "vocabulary"), text, "at least 256")


@_reads()
def _nesterov(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for path, optimizer in _all_of(pipeline, "optimizer"):
        options, at = optimizer.options, (*path, "SGD")
        if optimizer.name != "SGD" or optimizer.source != "torch" or not options.get("nesterov"):
            continue
        if not options.get("momentum"):
            text = '"nesterov: true" needs "momentum", which is 0'
            yield CrossCheck((*at, "nesterov"), text, "give a momentum such as 0.9")
        if options.get("dampening"):
            text = f'"nesterov: true" clashes with "dampening: {options["dampening"]}"'
            yield CrossCheck((*at, "dampening"), text, "nesterov needs a dampening of 0")


@_reads("optimizer", "groups")
def _options_of_groups(pipeline: Pipeline) -> Iterator[CrossCheck]:
    """Each option of a group is one of the optimizer, and of its type."""
    optimizer = pipeline.optimizer
    if optimizer.source != "torch":
        return
    model = signatures.options_model("optimizer", optimizer.name)
    for index, group in enumerate(pipeline.groups):
        try:
            model.model_validate({**optimizer.options, **group.options})
        except ValidationError as error:
            for item in error.errors(include_url=False):
                text, allowed, near = worded(item, described(group.options.get(str(item["loc"][0]))))
                if item["type"] == "extra_forbidden":
                    known = list(model.model_fields)
                    text, allowed, near = unknown_option(optimizer.name, str(item["loc"][0]), known)
                hint = f'{allowed} (did you mean "{near}"?)' if near else allowed
                yield CrossCheck(("groups", index, *item["loc"]), text, hint)


@_reads("model", "freeze", "groups")
def _patterns_of_parameters(pipeline: Pipeline) -> Iterator[CrossCheck]:
    """Of built-in models the names are known without building them."""
    model = pipeline.model.settings
    places: list[tuple[KeyPath, tuple[str, ...]]] = [(("freeze",), pipeline.freeze)]
    places += [(("groups", index, "match"), group.match) for index, group in enumerate(pipeline.groups)]
    if not isinstance(model, Mlp | Cnn | Transformer) or not any(patterns for _, patterns in places):
        return
    if isinstance(model, Transformer) and 12 * model.layers > _MOST_NAMES:
        return
    names = model.parameter_names()
    if len(names) * sum(len(patterns) for _, patterns in places) > _MOST_NAMES:
        return  # the run will see
    for path, patterns in places:
        for index, text, allowed in unmatched(patterns, names):
            yield CrossCheck((*path, index), text, allowed)
    if all(matches(name, pipeline.freeze) for name in names):
        yield CrossCheck(("freeze",), "no parameter is left to train", "freeze fewer")


@_reads("model", "optimizer")
def _muon_with_biases(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.optimizer.name == "Muon" and pipeline.optimizer.source == "torch" and pipeline.model.settings:
        text = f'"Muon" clashes with "model: {pipeline.model.name}": it takes matrices, no biases'
        yield CrossCheck(("optimizer",), text, "use another optimizer, such as adamw")


@_reads("batch", "loss")
def _batch_and_loss(pipeline: Pipeline) -> Iterator[CrossCheck]:
    batch, loss = pipeline.batch, pipeline.loss
    own = loss.name == "model" and loss.source == "built-in"
    if batch.target is not None and own:
        text = '"target" clashes with "loss: model": the model returns its loss'
        yield CrossCheck(("batch", "target"), text, "name all that the model takes in inputs")
    elif batch.target is not None and batch.inputs is None:
        text = '"target" needs "inputs", which are the model\'s arguments'
        yield CrossCheck(("batch", "target"), text, "write batch: {inputs: …, target: …}")
    elif batch.inputs is not None and batch.target is None and not own:
        text = f'"inputs" needs "target", with which "loss: {loss.name}" compares the output'
        yield CrossCheck(("batch", "inputs"), text, "write batch: {inputs: …, target: …}, or loss: model")


@_reads("loss", "weight_by")
def _weight_of_loss(pipeline: Pipeline) -> Iterator[CrossCheck]:
    weight, loss = pipeline.weight_by, pipeline.loss
    if weight is None:
        return
    if loss.options.get("reduction") == "sum":
        text = f'"weight_by: {weight.name}" clashes with "reduction: sum": a sum counts as it is'
        yield CrossCheck(("weight_by",), text, "remove one of the two")
    settings, ignored = weight.settings, loss.options.get("ignore_index")
    own = settings.ignore_index if isinstance(settings, Targets) else None
    if None not in (own, ignored) and own != ignored:
        text = f'"ignore_index: {own}" clashes with "ignore_index: {ignored}" of "loss"'
        yield CrossCheck(("weight_by", weight.name, "ignore_index"), text, "remove it")


@_reads("loader")
def _sampler_and_shuffle(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.loader.sampler is not None and pipeline.loader.shuffle:
        text = '"shuffle: true" clashes with "sampler", which decides the order'
        yield CrossCheck(("loader", "shuffle"), text, "remove one of the two")


@_reads("batch", "loss", "stages", "weight_by")
def _metrics_with_loss(pipeline: Pipeline) -> Iterator[CrossCheck]:
    loss, warned = pipeline.loss, False
    for path, metric in _metrics(pipeline):
        if metric.source != "built-in":
            continue
        clash = f'"{metric.name}" clashes with "loss: {loss.name}"'
        own = loss.name == "model" and loss.source == "built-in"
        if own and metric.name == "accuracy":
            text = f"{clash}: what the model returns besides its loss is not known"
            yield CrossCheck(path, text, "write a dotted function of (output, batch), or name a loss")
        elif own and pipeline.weight_by is None and not warned:
            text = f'{clash} without "weight_by": it is of the mean over samples, not over targets'
            inputs = pipeline.batch.inputs
            key = inputs.get("labels", "labels") if isinstance(inputs, Mapping) else "labels"
            hint = f"write weight_by: {{targets: {{of: {key}, shift: 1}}}}, as the model counts"
            yield CrossCheck(path, text, hint, "warning")
            warned = True  # once, however many evaluations there are
        elif own:
            continue
        elif metric.name == "perplexity" and loss.name not in ("CrossEntropyLoss", "NLLLoss"):
            text = f"{clash}: it is the exponential of a cross-entropy"
            yield CrossCheck(path, text, "use the loss cross_entropy or nll_loss, or model")


@_reads("stages")
def _metrics_twice(pipeline: Pipeline) -> Iterator[CrossCheck]:
    seen = set[tuple[KeyPath, str]]()
    for path, metric in _metrics(pipeline):
        if (path[:-1], metric.name) in seen:
            text = f'"{metric.name}" is in the list twice, and metrics need different names'
            yield CrossCheck(path, text, "remove one, or give the other a function of its own name")
        seen.add((path[:-1], metric.name))


def _metrics(pipeline: Pipeline) -> Iterator[tuple[KeyPath, Choice]]:
    """Every metric of the evaluations, with its place."""
    for path, evaluation in _evaluations(pipeline):
        at = (*path, "evaluate") if isinstance(evaluation, Evaluate) else path
        for number, metric in enumerate(evaluation.metrics):
            yield (*at, "metrics", number), metric


def _evaluations(pipeline: Pipeline) -> Iterator[tuple[KeyPath, Evaluate | StageEvaluation]]:
    """Every evaluate stage, and the evaluations inside other stages, with their places."""
    for stage in pipeline.stages:
        if isinstance(stage, Evaluate):
            yield ("stages", stage.index), stage
        elif isinstance(stage, StepStage) and stage.evaluate is not None:
            yield _own(stage, "evaluate"), stage.evaluate


@_reads("data", "stages")
def _evaluate_without_data(pipeline: Pipeline) -> Iterator[CrossCheck]:
    evaluations = [
        (path, one) for path, one in _evaluations(pipeline) if not (isinstance(one, Evaluate) and one.data)
    ]
    if reason := _nothing_held_out(pipeline.data):
        for path, _ in evaluations:
            text = f'"evaluate" has no data: {reason}'
            yield CrossCheck(path, text, "give data: {train: …, evaluate: …}")
    if isinstance(pipeline.data, DataPair) and pipeline.data.evaluate is not None and not evaluations:
        text = '"data.evaluate" has no effect: no stage of "stages" is "evaluate", or has it'
        if any(isinstance(stage, Evaluate) for stage in pipeline.stages):
            text = '"data.evaluate" has no effect: every evaluate stage has "data" of its own'
        yield CrossCheck(("data", "evaluate"), text, "add an evaluate stage", "warning")


@_reads("sync", "stages")
def _evaluate_inside_a_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        settings, wanted = stage.effective(pipeline), stage.evaluate
        judging = {key: one for key in ("keep_best", "stop") if (one := getattr(stage, key)) is not None}
        if wanted is None:
            for key in judging:
                text = f'"{key}" needs "evaluate" in the same stage: it goes by what that measures'
                yield CrossCheck(_own(stage, key), text, "write evaluate: {every: N}")
            continue
        known = ["loss", *metric_names(wanted.metrics)]
        for key, judged in judging.items():
            if judged.metric not in known:
                text = f'"{judged.metric}" is not measured by "evaluate" of {stage.path}'
                yield CrossCheck(_own(stage, key, "metric"), text, f"allowed: {', '.join(known)}")
        if settings.plan.never or settings.plan.keeps_apart:
            text = f'"evaluate" clashes with {_shown(stage, "sync", settings.sync)}: ranks train models of '
            text += "their own and stop each for itself, so there is no model to measure"
            yield CrossCheck(_own(stage, "evaluate"), text, "use an evaluate stage after an average stage")
        if settings.steps is not None and wanted.every > settings.steps:
            text = f'"every: {wanted.every}" is longer than "steps: {settings.steps}" of {stage.path}: '
            text += "it is measured only at its end"
            yield CrossCheck(_own(stage, "evaluate", "every"), text, "shorten it", "warning")


@_reads("stages")
def _one_best_file(pipeline: Pipeline) -> Iterator[CrossCheck]:
    keeping = [stage for stage in pipeline.step_stages() if stage.keep_best is not None]
    for stage in keeping[1:]:
        if stage.keep_best != keeping[0].keep_best:
            text = f'"keep_best" clashes with that of {keeping[0].path}: a run keeps one {BEST_FILE}, '
            text += "the best by one metric"
            yield CrossCheck(_own(stage, "keep_best"), text, "write the same in both, or remove one")
    for save in pipeline.stages:
        if keeping and isinstance(save, Save) and save.to == BEST_FILE:
            text = f'"to: {BEST_FILE}" clashes with "keep_best" of {keeping[0].path}, which writes that file'
            yield CrossCheck(_own(save, "to"), text, "name another file")


@_reads("data", "loader", "stages")
def _sharded_built_in(pipeline: Pipeline) -> Iterator[CrossCheck]:
    built_in = next((data for data in _train_data(pipeline) if data.source == "built-in"), None)
    if pipeline.loader.sharded and built_in is not None:
        text = f'"sharded: true" clashes with "data: {built_in.name}": each rank would train on every sample'
        yield CrossCheck(("loader", "sharded"), text, "remove it")


def _nothing_held_out(data: Choice | DataPair) -> str | None:
    """Why there is nothing to evaluate on; None if there is."""
    if isinstance(data, DataPair):
        return '"data" gives "train" only' if data.evaluate is None else None
    if data.settings is None:
        return f'"data: {data.name}" holds nothing out'
    return None if data.options["held_out"] else f'"held_out" of "{data.name}" keeps nothing'


# What is compiled, DDP's settings, the launch, and hooks


@_reads("compile", "model")
def _blocks_of_built_in(pipeline: Pipeline) -> Iterator[CrossCheck]:
    """Which modules a built-in model has is known without building it, and which of them repeat."""
    wanted, model = pipeline.compile, pipeline.model
    if wanted is None or wanted.blocks != "auto" or not isinstance(model.settings, Mlp | Cnn):
        return
    text = f'"blocks: auto" clashes with "model: {model.name}", in which no block repeats'
    yield CrossCheck(("compile", "blocks"), text, "write compile: true, or name the modules")


@_reads("compile", "launch", "deterministic")
def _mode_of_compiling(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.compile is None:
        return
    mode = pipeline.compile.mode
    if mode == "reduce-overhead" and pipeline.launch.device == "cpu":
        text = f'"mode: {mode}" has no effect with "device: cpu" of "launch": it uses CUDA graphs'
        yield CrossCheck(("compile", "mode"), text, "remove it", "warning")
    if mode.startswith("max-autotune") and pipeline.deterministic:
        text = f'"mode: {mode}" clashes with "deterministic: true": each process takes the kernels that it '
        text += "has timed as the fastest, and another time others"
        yield CrossCheck(("compile", "mode"), text, "use another mode")


@_reads("ddp", "accumulate", "sync", "stages")
def _accumulate_with_ddp(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.train_stages():
        settings = stage.effective(pipeline)
        if settings.accumulate == 1 or settings.gradients is None:
            continue
        effects = {
            "static_graph": "DDP crashes or stops reducing",
            "find_unused_parameters": "DDP reduces only what the last micro-step used",
        }
        for key, effect in effects.items():
            if getattr(pipeline.ddp, key):
                accumulate = _shown(stage, "accumulate", settings.accumulate)
                text = f'"{key}: true" clashes with {accumulate}: {effect}'
                yield CrossCheck(("ddp", key), text, "remove one of the two")


@_reads("ddp")
def _static_with_unused(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.ddp.static_graph and pipeline.ddp.find_unused_parameters:
        text = '"find_unused_parameters: true" has no effect with "static_graph: true", which finds them once'
        yield CrossCheck(("ddp", "find_unused_parameters"), text, "remove one of the two")


@_reads("ddp", "sync", "stages")
def _ddp_and_gradients(pipeline: Pipeline) -> Iterator[CrossCheck]:
    gradients = {stage.effective(pipeline).gradients for stage in pipeline.train_stages()}
    if pipeline.ddp.find_unused_parameters and "host" in gradients:
        text = (
            '"find_unused_parameters: true" slows "hierarchical_sgd" with "within: 1": at every step DDP '
            "tells all ranks which parameters were used, so hosts wait for each other"
        )
        hint = "remove it if every parameter is used"
        yield CrossCheck(("ddp", "find_unused_parameters"), text, hint, "warning")
    for key in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters"):
        value = getattr(pipeline.ddp, key)
        if gradients <= {None} and value != getattr(Ddp(), key):
            text = f'"{key}: {str(value).lower()}" has no effect: no train stage averages gradients'
            yield CrossCheck(("ddp", key), text, "remove it", "warning")


@_reads("timings", "sync", "stages")
def _fidelity_without_gradients(pipeline: Pipeline) -> Iterator[CrossCheck]:
    every = pipeline.timings.fidelity_every
    if every and all(stage.effective(pipeline).gradients != "all" for stage in pipeline.train_stages()):
        text = f'"fidelity_every: {every}" has no effect: no train stage averages gradients of all ranks'
        yield CrossCheck(("timings", "fidelity_every"), text, "remove it", "warning")


@_reads("launch")
def _nccl_on_cpu(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.launch.backend == "nccl" and pipeline.launch.device == "cpu":
        text = '"backend: nccl" clashes with "device: cpu": NCCL carries GPU tensors only'
        yield CrossCheck(("launch", "backend"), text, "use gloo, or device: cuda")


@_reads("launch", "checkpoint")
def _restarts(pipeline: Pipeline) -> Iterator[CrossCheck]:
    least, most = pipeline.launch.host_range
    restarts = pipeline.launch.max_restarts
    if least < most and not restarts:
        text = f'"nnodes: {pipeline.launch.nnodes}" needs "max_restarts": losing a host would end the run'
        yield CrossCheck(("launch", "nnodes"), text, "write max_restarts: 3", "warning")
    if restarts and not pipeline.checkpoint.keep:
        text = f'"max_restarts: {restarts}" needs checkpoints, and "keep" is 0: the run would start over'
        yield CrossCheck(("launch", "max_restarts"), text, "keep at least 1", "warning")


@_reads()
def _stacks(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for path, hooks in _all_of(pipeline, "hooks"):
        for wrong in grammar.problems([grammar.entry(hook.name, hook.options) for hook in hooks]):
            yield CrossCheck((*path, *wrong.path), wrong.text, None, wrong.severity)


@_reads("hooks", "stages", "launch")
def _hooks(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for path, hooks in _all_of(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            here = (*path, number)
            options = hook.options if hook.name == "hierarchical" else {}
            in_leg = "shared_memory" in options.get("within", ())
            if pipeline.launch.device == "cuda" and (hook.name == "shared_memory" or in_leg):
                text = '"shared_memory" clashes with "device: cuda" of "launch": it sums tensors on the CPU'
                at = (*here, "hierarchical", "within") if in_leg else here
                yield CrossCheck(at, text, "remove it: NCCL uses shared memory by itself")
            yield from _hosts_divide_ranks(pipeline, options.get("hosts"), (*here, "hierarchical", "hosts"))


@_reads("hooks", "precision", "stages")
def _casts_of_what_is_half_already(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for path, hooks in _all_of(pipeline, "hooks"):
        for number, hook in enumerate(hooks):
            if pipeline.precision == f"pure_{hook.name}" and not hook.options.get("accumulate"):
                setting = f'"precision: {pipeline.precision}"'
                text = f'"{hook.name}" has no effect: with {setting} everything travels so'
                hint = f"remove it, or write {hook.name}: {{accumulate: fp32}}"
                yield CrossCheck((*path, number), text, hint, "warning")


def _hosts_divide_ranks(pipeline: Pipeline, hosts: int | None, path: KeyPath) -> Iterator[CrossCheck]:
    ranks = _known_ranks(pipeline)
    if hosts and ranks and ranks % hosts:
        text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
        yield CrossCheck(path, text, "each host needs the same number of ranks")


@_reads("hooks", "sync", "stages")
def _hooks_that_nothing_uses(pipeline: Pipeline) -> Iterator[CrossCheck]:
    inherit = [stage for stage in pipeline.step_stages() if "hooks" not in stage.model_fields_set]
    unused = {
        settings.sync.name: _without_hooks(settings.plan)
        for settings in (stage.effective(pipeline) for stage in inherit)
    }
    if pipeline.hooks and unused and all(unused.values()):
        by = " and ".join(f'"sync: {name}" {why}' for name, why in sorted(unused.items()))
        yield CrossCheck(("hooks",), f'"hooks" has no effect: {by}', "remove it", "warning")
    for stage in pipeline.step_stages():
        settings = stage.effective(pipeline)
        if stage.hooks and (why := _without_hooks(settings.plan)):
            text = f'"hooks" clashes with {_shown(stage, "sync", settings.sync)}, which {why}'
            yield CrossCheck(_place(stage, "hooks"), text, "remove one of the two")


def _without_hooks(plan: SyncPlan) -> str:
    """Why a policy uses no hooks; empty if it does, or if nothing in its stage could use them."""
    if plan.uses_hooks or not plan.changes_weights:
        return ""
    return "sends parameters as they are" if plan.transfers else "sends nothing"


# Sync policies, the ranks there are, and the lengths of stages


@_reads("sync", "stages", "launch")
def _source_is_a_rank(pipeline: Pipeline) -> Iterator[CrossCheck]:
    ranks = _known_ranks(pipeline)
    sources = [
        ((*path, sync.name, "source"), sync.options["source"])
        for path, sync in _all_of(pipeline, "sync")
        if "source" in sync.options
    ]
    sources += [
        (_own(stage, "source"), stage.source)
        for stage in pipeline.stages
        if isinstance(stage, BroadcastStage)
    ]
    for path, source in sources:
        if ranks and source >= ranks:
            there_are, allowed = (
                (f"are {ranks} ranks", f"0 to {ranks - 1}") if ranks > 1 else ("is 1 rank", "0")
            )
            text = f'"source: {source}" clashes with "launch": there {there_are}'
            yield CrossCheck(path, text, f"allowed: {allowed}")


@_reads("sync", "stages", "launch")
def _two_levels(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for path, sync in _all_of(pipeline, "sync"):
        hosts, within, across = (sync.options.get(key) for key in ("hosts", "within", "across"))
        yield from _hosts_divide_ranks(pipeline, hosts, (*path, sync.name, "hosts"))
        if within is not None and within == across:
            text = f'"within: {within}" has no effect with "across: {across}": all ranks average as often'
            hint = "lengthen across, or use local_sgd"
            yield CrossCheck((*path, sync.name, "within"), text, hint, "warning")


@_reads("sync", "stages")
def _period_longer_than_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        settings = stage.effective(pipeline)
        policy, period = settings.sync.settings, settings.plan.period
        assert isinstance(policy, SyncPolicy)
        key = policy.period_key
        if settings.steps is None or period <= settings.steps:
            continue
        effect = "ranks synchronise only at its end"
        if not pipeline.reconciles_after(stage):
            effect = "ranks do not synchronise in it"
        elif len({transfer.fragment for transfer in settings.plan.transfers}) > 1:
            effect = "some fragments are exchanged only at its end"
        text = f'"{key}: {period}" is longer than "steps: {settings.steps}" of {stage.path}: {effect}'
        own = ("sync", settings.sync.name, key) if "sync" in stage.model_fields_set else ("steps",)
        yield CrossCheck(_own(stage, *own), text, "shorten the period or lengthen the stage", "warning")


@_reads("sync", "hooks", "stages")
def _parameters_are_equal_already(pipeline: Pipeline) -> Iterator[CrossCheck]:
    equal, why = True, "all ranks start with the same parameters"
    for stage in pipeline.stages:
        if isinstance(stage, (AverageStage, BroadcastStage)):
            if equal:
                text = f'"{stage.name}" has no effect: {why}'
                yield CrossCheck(("stages", stage.index), text, None, "warning")
            equal = True
        elif isinstance(stage, (Train, Forward)):
            equal = _leaves_equal(pipeline, stage, before=equal)
        else:
            continue
        why = f"{stage.path} leaves all ranks with the same parameters"


def _leaves_equal(pipeline: Pipeline, stage: Train | Forward, *, before: bool) -> bool:
    """Whether all ranks surely hold the same parameters after a stage."""
    settings = stage.effective(pipeline)
    if pipeline.reconciles_after(stage):
        return True
    if not _updates(stage) and settings.mutate is None:
        return before
    sent = settings.plan.period == 1 and all(hook.name != "noop" for hook in settings.hooks)
    return sent and (settings.mutate is None or isinstance(stage, Forward))


# Buffers


@_reads("buffers", "model", "stages")
def _no_buffers_to_send(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if not isinstance(pipeline.model.settings, (Mlp, Transformer)):
        return
    for path, buffers in _all_of(pipeline, "buffers"):
        if buffers.when not in ("auto", "never"):
            when = f"{{every: {buffers.every}}}" if buffers.when == "every" else buffers.when
            text = f'"buffers: {when}" has no effect: "model: {pipeline.model.name}" has no buffers'
            yield CrossCheck(path, text, "remove it", "warning")


@_reads("buffers", "model", "stages")
def _evaluates_with_own_buffers(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if not isinstance(pipeline.model.settings, Cnn):
        return
    last: Train | Forward | None = None
    for stage in pipeline.stages:
        if isinstance(stage, (Train, Forward)):
            last = stage
        measures = isinstance(stage, Evaluate) or (stage is last and last.evaluate is not None)
        if measures and last and last.effective(pipeline).buffers.when == "never":
            text = f"{_shown(last, 'buffers', 'never')} clashes with {stage.path}: each rank evaluates with "
            text += f'its own running statistics of "model: {pipeline.model.name}"'
            yield CrossCheck(_place(last, "buffers"), text, "use before_evaluate", "warning")


# Stages: what they name for themselves, and their order


@_reads("schedule", "warmup_steps", "stages")
def _schedule_over_the_run(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if not isinstance(pipeline.schedule, RunSchedule):
        return
    stages = [stage for stage in pipeline.step_stages() if _updates(stage)]
    for stage in stages:
        for key in ("schedule", "warmup_steps", "optimizer"):
            if key in stage.model_fields_set:
                text = f'"{key}" of {stage.path} clashes with "schedule: {{…, over: run}}", by which one '
                text += "schedule and one warm-up span all stages"
                yield CrossCheck(_own(stage, key), text, "remove one of the two")
    lengths = [stage.steps for stage in stages]
    total = sum(length or 0 for length in lengths)
    if None not in lengths and pipeline.warmup_steps >= max(1, total):
        text = f'"warmup_steps: {pipeline.warmup_steps}" is not less than the {total} steps of the run: the '
        text += "full learning rate would never be used"
        yield CrossCheck(("warmup_steps",), text, "shorten the warm-up or lengthen a stage")


@_reads("schedule", "warmup_steps", "stages")
def _warmup_longer_than_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in filter(_updates, pipeline.step_stages()):
        settings = stage.effective(pipeline)
        if isinstance(settings.schedule, RunSchedule):
            continue
        if settings.steps is not None and settings.warmup_steps >= settings.steps:
            text = f'"warmup_steps: {settings.warmup_steps}" is not less than "steps: {settings.steps}" of '
            text += f"{stage.path}: the full learning rate would never be used"
            path = _own(stage, "warmup_steps" if "warmup_steps" in stage.model_fields_set else "steps")
            yield CrossCheck(path, text, "shorten the warm-up or lengthen the stage")


@_reads("optimizer", "stages")
def _another_optimizer(pipeline: Pipeline) -> Iterator[CrossCheck]:
    above = pipeline.optimizer
    for stage in pipeline.step_stages():
        own = stage.optimizer
        if own is not None and (own.name, own.source) != (above.name, above.source):
            text = f'"optimizer: {own.name}" of {stage.path} clashes with "optimizer: {above.name}": a stage '
            text += "changes the optimizer's settings, not the optimizer, whose state would be lost"
            yield CrossCheck(_place(stage, "optimizer"), text, f"write {above.name}: {{…}}")


@_reads("stages")
def _nothing_is_updated(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        for key in _OF_UPDATES if not _updates(stage) else ():
            if key in stage.model_fields_set and getattr(stage, key):
                text = f'"{key}" clashes with "forward" without "update": nothing is updated'
                yield CrossCheck(_place(stage, key), text, "remove it, or name an update")


@_reads("ema", "stages")
def _ema_of_nothing(pipeline: Pipeline) -> Iterator[CrossCheck]:
    read = [*_evaluations(pipeline), *(stage for stage in pipeline.stages if isinstance(stage, Save))]
    if pipeline.ema is not None and not read:
        text = '"ema" has no effect: nothing evaluates or saves the average'
        yield CrossCheck(("ema",), text, "add an evaluate or a save stage", "warning")


@_reads("stages")
def _saves(pipeline: Pipeline) -> Iterator[CrossCheck]:
    changed = False
    written: dict[str, int] = {}
    for stage in pipeline.stages:
        if isinstance(stage, (Train, Forward)):
            changed = changed or _updates(stage) or stage.mutate is not None
        if not isinstance(stage, Save):
            continue
        if stage.to in written:
            text = f'{stage.path} writes "{stage.to}", as stages[{written[stage.to]}].save does'
            yield CrossCheck(_own(stage, "to"), text, "name another file")
        written.setdefault(stage.to, stage.index)
        if not changed:
            text = '"save" comes before every "train": it saves the initial weights'
            yield CrossCheck(("stages", stage.index), text, None, "warning")


@_reads("stages", *OVERRIDABLE)
def _overridden_everywhere(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for key in OVERRIDABLE:
        users = [
            stage
            for stage in pipeline.step_stages()
            if key in type(stage).model_fields and (key not in _OF_UPDATES or _updates(stage))
        ]
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


def _says_something(pipeline: Pipeline, key: str) -> bool:
    """Whether the file gives a key another value than its default; of the optimizer, which must be given, its
    options.
    """
    if key == "optimizer":
        return bool(pipeline.optimizer.options)
    said, default = plain(getattr(pipeline, key)), plain(Pipeline.model_fields[key].default)
    return bool(said != default)
