"""Checks of the model, the data, the loss, the optimizer, what is measured, and what is compiled."""

import math
from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath
from typing import Any

from pydantic import ValidationError

from ddprun.config import torch_signatures
from ddprun.config.built_in_options import (
    CnnOptions,
    DigitsOptions,
    MlpOptions,
    SyntheticDataOptions,
    TextDataOptions,
    TransformerOptions,
    WeightByTargetsOptions,
)
from ddprun.config.checks.registry import (
    KeyConflict,
    accumulation_text,
    register_check,
    setting_text,
    warning,
)
from ddprun.config.choices import Choice, metric_name
from ddprun.config.schema import Pipeline
from ddprun.config.sections import DataPair, Loader
from ddprun.config.stages import BEST_FILE, EvaluateStage, SaveStage, StageEvaluation, StepStage
from ddprun.config.tree import format_path
from ddprun_hooks.config.messages import describe_value, error_message_parts, unknown_option_parts

_LINEAR_LOSS = "LinearCrossEntropyLoss"


@register_check("model", "data", "loader", "batch", "precision", "stages")
def _model_unfit_for_data(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.loader.collate or pipeline.batch.transform:
        return  # either may change what the model gets
    for data in _train_data_of_all_stages(pipeline):
        yield from _model_unfit_for_samples(pipeline, data)


def _train_data_of_all_stages(pipeline: Pipeline) -> list[Choice]:
    return [pipeline.train_data(), *(stage.data for stage in pipeline.stages_with_steps() if stage.data)]


def _model_unfit_for_samples(pipeline: Pipeline, data: Choice) -> Iterator[KeyConflict]:
    shape, tokens = _sample_shape_and_is_tokens(data)
    model = pipeline.model.settings
    if shape is None or model is None:
        return
    at = f"model.{pipeline.model.name}"
    what = f'"data: {data.name}"'
    if isinstance(model, TransformerOptions) != tokens:
        text = f'"{pipeline.model.name}" clashes with {what}: it takes '
        text += "tokens, and these are numbers" if not tokens else "numbers, and these are tokens"
        yield KeyConflict(at, text, "allowed: " + ("mlp, cnn" if not tokens else "transformer"))
    elif data.options.get("dtype") == "float64" and not pipeline.precision.startswith("pure_"):
        text = f'"{pipeline.model.name}" clashes with "dtype: float64" of {what}: its weights are float32'
        yield KeyConflict(at, text, "write dtype: float32")
    elif isinstance(model, MlpOptions) and model.inputs != math.prod(shape):
        text = f'"inputs: {model.inputs}" clashes with {what}, whose samples hold {math.prod(shape)} values'
        yield KeyConflict(f"{at}.inputs", text, f"write inputs: {math.prod(shape)}")
    elif isinstance(model, CnnOptions) and model.inputs != shape:
        text = f'"inputs: {list(model.inputs)}" clashes with {what}, whose samples have the shape '
        hint = f"write inputs: {list(shape)}" if len(shape) == 3 else "a cnn takes [C, H, W]"
        yield KeyConflict(f"{at}.inputs", f"{text}{list(shape)}", hint)
    elif isinstance(model, TransformerOptions) and shape[-1] > model.context:
        text = f'"context: {model.context}" clashes with {what}, whose samples hold {shape[-1]} tokens'
        yield KeyConflict(f"{at}.context", text, f"write context: {shape[-1]}, or shorten the samples")
    elif isinstance(model, TransformerOptions) and shape[-1] < model.context:
        text = f'of "context: {model.context}" only {shape[-1]} are ever used: samples of {what} are shorter'
        yield warning(f"{at}.context", text, f"write context: {shape[-1]}")


def _sample_shape_and_is_tokens(data: Choice) -> tuple[tuple[int, ...] | None, bool]:
    """Shape of a built-in's samples and whether they are tokens; no shape for what is not built in."""
    if isinstance(data.settings, DigitsOptions):
        return (1, 8, 8), False
    if isinstance(data.settings, TextDataOptions):
        return (data.settings.context,), True
    if isinstance(data.settings, SyntheticDataOptions):
        return data.settings.shape, data.settings.dtype == "int64"
    return None, False


@register_check("model", "data", "loss")
def _fewer_outputs_than_classes(pipeline: Pipeline) -> Iterator[KeyConflict]:
    model, data = pipeline.model.settings, pipeline.train_data()
    classes = 10 if isinstance(data.settings, DigitsOptions) else None
    if isinstance(data.settings, SyntheticDataOptions) and data.settings.dtype != "int64":
        classes = data.settings.classes
    by_class = pipeline.loss.name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")
    if isinstance(model, (MlpOptions, CnnOptions)) and classes and model.outputs < classes and by_class:
        text = f'"outputs: {model.outputs}" clashes with "data: {data.name}", which has {classes} classes'
        yield KeyConflict(f"model.{pipeline.model.name}.outputs", text, f"at least {classes}")
    tokens = 256 if isinstance(data.settings, TextDataOptions) else 0
    if isinstance(data.settings, SyntheticDataOptions) and data.settings.dtype == "int64":
        tokens = data.settings.classes
    if isinstance(model, TransformerOptions) and model.vocabulary < tokens:
        text = f'"vocabulary: {model.vocabulary}" clashes with "data: {data.name}", '
        text += f"which has {tokens} different tokens"
        yield KeyConflict("model.transformer.vocabulary", text, f"at least {tokens}")


@register_check("optimizer", "groups")
def _invalid_group_options(pipeline: Pipeline) -> Iterator[KeyConflict]:
    """Each option of a group is one of the optimizer, and of its type."""
    for index, group in enumerate(pipeline.groups):
        second = pipeline.optimizer.sibling_keys.get("others")
        optimizer = second if group.optimizer == "others" else pipeline.optimizer
        if group.optimizer and second is None:
            text = f'"optimizer: {group.optimizer}" needs a second optimizer'
            hint = f"write optimizer: {{{pipeline.optimizer.name}: {{…}}, others: {{adamw: {{…}}}}}}"
            yield KeyConflict(f"groups[{index}].optimizer", text, hint)
        if optimizer is None or optimizer.source != "torch":
            continue
        model = torch_signatures.torch_options_model("optimizer", optimizer.name)
        try:
            model.model_validate({**optimizer.options, **group.options})
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key = str(item["loc"][0])
                text, allowed, near = error_message_parts(item, describe_value(group.options.get(key)))
                if item["type"] == "extra_forbidden":
                    text, allowed, near = unknown_option_parts(optimizer.name, key, list(model.model_fields))
                    if "others" in optimizer.sibling_keys:
                        allowed = f"{allowed}; a group with optimizer: others takes those of the other one"
                path = format_path(("groups", index, *item["loc"]))
                yield KeyConflict(path, text, allowed, suggestion=near)


@register_check("optimizer")
def _lbfgs_with_second_optimizer(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if "LBFGS" in (names := pipeline.optimizer.optimizers()) and len(names) > 1:
        text = '"LBFGS", which takes a closure, clashes with a second optimizer'
        yield KeyConflict("optimizer.others", text, "choose another, or remove others")


@register_check("batch", "loss")
def _batch_keys_unfit_for_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    batch, loss = pipeline.batch, pipeline.loss
    own = loss.name == "model"
    if batch.target is not None and own:
        text = '"target" clashes with "loss: model": the model returns its loss'
        yield KeyConflict("batch.target", text, "list all of the model's arguments in inputs")
    elif batch.target is not None and batch.inputs is None:
        text = '"target" needs "inputs", which are the model\'s arguments'
        yield KeyConflict("batch.target", text, "write batch: {inputs: …, target: …}")
    elif batch.inputs is not None and batch.target is None and not own:
        text = f'"inputs" needs "target", with which "loss: {loss.name}" compares the output'
        yield KeyConflict("batch.inputs", text, "write batch: {inputs: …, target: …}, or loss: model")


@register_check("loss")
def _loss_that_is_a_sum(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.loss.options.get("reduction") == "sum":
        yield KeyConflict("loss", '"reduction: sum" gives no mean over the batch', "write reduction: mean")


@register_check("loss", "weight_by")
def _weight_by_with_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    settings = pipeline.weight_by.settings if pipeline.weight_by else None
    own = settings.ignore_index if isinstance(settings, WeightByTargetsOptions) else None
    ignored = pipeline.loss.options.get("ignore_index")
    if None not in (own, ignored) and own != ignored:
        text = f'"ignore_index: {own}" clashes with "ignore_index: {ignored}" of "loss"'
        yield KeyConflict("weight_by.targets.ignore_index", text, "remove it")


@register_check("loader")
def _sampler_with_shuffle(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.loader.sampler is not None and pipeline.loader.shuffle:
        text = '"shuffle: true" clashes with "sampler", which decides the order'
        yield KeyConflict("loader.shuffle", text, "remove one of the two")


@register_check("batch", "loss", "stages", "weight_by")
def _metrics_unfit_for_loss(pipeline: Pipeline) -> Iterator[KeyConflict]:
    loss = pipeline.loss
    metrics = (
        (f"{path}.metrics[{number}]", metric)
        for path, evaluation in find_evaluations(pipeline)
        for number, metric in enumerate(evaluation.metrics)
    )
    for path, metric in metrics:
        if metric.source != "built-in":
            continue
        clash = f'"{metric.name}" clashes with "loss: {loss.name}"'
        own = loss.name == "model"
        if own and metric.name == "accuracy" and "output" not in metric.sibling_keys:
            text = f"{clash}: what the model returns besides its loss is not known"
            hint = "write the keys of its class scores and of the labels, as output: logits, target: labels"
            yield KeyConflict(path, text, hint)
        elif own and metric.name == "perplexity" and pipeline.weight_by is None:
            text = f'{clash} without "weight_by": the loss is averaged over samples, not over targets'
            inputs = pipeline.batch.inputs
            key = inputs.get("labels", "labels") if isinstance(inputs, Mapping) else "labels"
            hint = f"write weight_by: {{targets: {{of: {key}, shift: 1}}}}"
            yield warning(path, text, f"{hint}, without shift for an encoder-decoder")
        elif own:
            continue
        elif metric.name == "perplexity" and loss.name not in ("CrossEntropyLoss", "NLLLoss", _LINEAR_LOSS):
            text = f"{clash}: it is the exponential of a cross-entropy"
            yield KeyConflict(path, text, "use the loss cross_entropy or nll_loss, or model")
        elif metric.name == "accuracy" and loss.name == _LINEAR_LOSS:
            text = f"{clash}: only the loss turns the model's output into classes"
            yield KeyConflict(path, text, "use the loss cross_entropy, and a model that returns class scores")


@register_check("stages")
def _metrics_twice(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for path, evaluation in find_evaluations(pipeline):
        names = [metric_name(metric) for metric in evaluation.metrics]
        for number, name in enumerate(names):
            if name in names[:number]:
                text = f'"{name}" is in the list twice, and metrics need different names'
                hint = "remove one, or write name: beside the other"
                yield KeyConflict(f"{path}.metrics[{number}]", text, hint)


@register_check("track")
def _trackers_twice(pipeline: Pipeline) -> Iterator[KeyConflict]:
    return find_equal_trackers(pipeline.track)


def find_equal_trackers(track: Sequence[Choice]) -> Iterator[KeyConflict]:
    """Two trackers of one kind have to differ in more than how often they take a point."""
    seen: list[tuple[str, dict[str, Any]]] = []
    for index, tracker in enumerate(track):
        target = tracker.name, {key: value for key, value in tracker.options.items() if key != "every"}
        if target in seen:
            text = f'"{tracker.name}" is in the list twice, and both write to the same place'
            yield KeyConflict(f"track[{index}]", text, "remove one, or give it other options")
        seen.append(target)


def find_evaluations(pipeline: Pipeline) -> Iterator[tuple[str, EvaluateStage | StageEvaluation]]:
    """Every evaluate stage, and the evaluations inside other stages, with their places."""
    for stage in pipeline.stages:
        if isinstance(stage, EvaluateStage):
            yield stage.path, stage
        elif isinstance(stage, StepStage) and stage.evaluate is not None:
            yield f"{stage.path}.evaluate", stage.evaluate


@register_check("data", "loader", "stages")
def _evaluate_without_data(pipeline: Pipeline) -> Iterator[KeyConflict]:
    evaluations = [path for path, one in find_evaluations(pipeline) if not getattr(one, "data", None)]
    if reason := _why_nothing_held_out(pipeline.data):
        for path in evaluations:
            text = f'"evaluate" has no data: {reason}'
            yield KeyConflict(path, text, "give data: {train: …, evaluate: …}")
    if isinstance(pipeline.data, DataPair) and pipeline.data.evaluate is not None and not evaluations:
        text = '"data.evaluate" has no effect: no evaluation of "stages" reads it'
        yield warning("data.evaluate", text, "add an evaluate stage")
    if pipeline.loader.evaluate_collate is not None and not [*find_evaluations(pipeline)]:
        text = '"evaluate_collate" has no effect: no evaluation of "stages" uses it'
        yield warning("loader.evaluate_collate", text, "add an evaluate stage")


@register_check("sync", "schedule", "stages")
def _invalid_keep_best_or_stop(pipeline: Pipeline) -> Iterator[KeyConflict]:
    for stage, settings in pipeline.stages_and_settings():
        evaluation = stage.evaluate
        monitors = {"keep_best": stage.keep_best, "stop": stage.stop}
        metrics: dict[str, tuple[str, str | None]]
        metrics = {key: (one.metric, one.mode) for key, one in monitors.items() if one is not None}
        if settings.schedule is not None and settings.schedule_metric is not None:
            mode = settings.schedule.options.get("mode") if settings.schedule.source == "torch" else "its own"
            metrics["schedule"] = settings.schedule_metric, mode
        if evaluation is None:
            for key in metrics:
                text = f'"{key}" needs "evaluate" in {stage.path}: it compares what that measures'
                yield KeyConflict(stage.key_path(key), text, "write evaluate: {every: N}")
            continue
        measured = {metric_name(metric): metric for metric in evaluation.metrics}
        for key, (metric, mode) in metrics.items():
            choice = measured.get(metric)
            if metric != "loss" and choice is None:
                text = f'"{metric}" is no metric of "evaluate" of {stage.path}'
                allowed = f"allowed: {', '.join(['loss', *measured])}"
                yield KeyConflict(f"{stage.key_path(key)}.metric", text, allowed)
            elif choice and mode is None and (choice.source != "built-in" or choice.name != metric):
                text = f'it is not known which values of "{metric}" are better'
                yield KeyConflict(stage.key_path(key), text, "write mode: min, or mode: max")
        if settings.plan.keeps_apart:
            text = f'"evaluate" clashes with {setting_text(stage, "sync", settings.sync)}: each rank '
            text += "trains a model of its own, so there is no model to measure"
            yield KeyConflict(f"{stage.path}.evaluate", text, "use an evaluate stage after an average stage")
        if settings.steps and isinstance(evaluation.every, int) and evaluation.every > settings.steps:
            text = f'"every: {evaluation.every}" is longer than "steps: {settings.steps}" of {stage.path}: '
            text += "it is evaluated only at the stage's end"
            yield warning(f"{stage.path}.evaluate.every", text, "shorten it")


@register_check("stages")
def _conflicting_keep_best_files(pipeline: Pipeline) -> Iterator[KeyConflict]:
    keeping = [stage for stage in pipeline.stages_with_steps() if stage.keep_best is not None]
    for stage in keeping[1:]:
        if stage.keep_best != keeping[0].keep_best:
            text = f'"keep_best" clashes with that of {keeping[0].path}: a run keeps one {BEST_FILE}, '
            text += "the best by one metric"
            yield KeyConflict(f"{stage.path}.keep_best", text, "write the same in both, or remove one")
    for save in pipeline.stages:
        if keeping and isinstance(save, SaveStage) and normpath(save.to) == BEST_FILE:
            text = f'"to: {save.to}" clashes with "keep_best" of {keeping[0].path}, which writes that file'
            yield KeyConflict(f"{save.path}.to", text, "name another file")


@register_check("data", "loader", "stages")
def _sharded_built_in_data(pipeline: Pipeline) -> Iterator[KeyConflict]:
    built_in = next((data for data in _train_data_of_all_stages(pipeline) if data.source == "built-in"), None)
    if pipeline.loader.sharded and built_in is not None:
        text = f'"sharded: true" clashes with "data: {built_in.name}": each rank would train on every sample'
        yield KeyConflict("loader.sharded", text, "remove it")


@register_check("loader", "weight_by", "sync_batchnorm")
def _balance_with_unmeasurable_speed(pipeline: Pipeline) -> Iterator[KeyConflict]:
    loader = pipeline.loader
    reasons = {
        f"workers: {loader.workers}": loader.workers
        and "loading processes hide how long a rank's data takes",
        "weight_by": pipeline.weight_by and "ranks wait for each other while they load",
        "sync_batchnorm": pipeline.sync_batchnorm and "ranks wait for each other in each forward pass",
    }
    waits = any(settings.plan.round is None for _, settings in pipeline.stages_and_settings())
    for key, reason in reasons.items() if waits else ():  # in a round, no rank waits for another
        if loader.balance == "speed" and reason:
            text = f'"balance: speed" clashes with "{key}": {reason}'
            yield KeyConflict("loader.balance", text, "name fixed weights, or remove one of the two")


@register_check("loader", "sync", "accumulate", "stages")
def _misused_balance_or_global_batch(pipeline: Pipeline) -> Iterator[KeyConflict]:
    loader, size = pipeline.loader, f'"global_batch: {pipeline.loader.global_batch}"'
    named = {"balance": '"balance"', "global_batch": size}
    named = {key: text for key, text in named.items() if getattr(loader, key) is not None}
    for key, text in named.items() if loader.sharded else ():
        text += ' clashes with "sharded: true": each rank has samples of its own'
        yield KeyConflict(f"loader.{key}", text, "remove one of the two")
    if loader.balance != "speed" and loader.max_share != Loader().max_share:
        text = '"max_share" has no effect without "balance: speed": it limits the shares that are measured'
        yield warning("loader.max_share", text, "remove it")
    for stage, settings in pipeline.stages_and_settings():
        sync = setting_text(stage, "sync", settings.sync)
        if "balance" in named and settings.plan.gradients != "all" and settings.plan.round is None:
            what = sync if settings.has_backward else stage.path
            text = f'"balance" clashes with {what}: ranks have to average gradients in every step'
            allowed = "allowed: train stages with sync: every_step, or with rounds, every: {samples: N}"
            yield KeyConflict("loader.balance", text, allowed)
        if "global_batch" in named and not settings.has_backward:
            text = f"{size} clashes with {stage.path}, whose step is one batch of each rank"
            yield KeyConflict("loader.global_batch", text, "remove one of the two")
        if "global_batch" in named and settings.accumulate > 1:
            accumulate = setting_text(stage, "accumulate", settings.accumulate)
            text = f"{size} clashes with {accumulate}: it decides how many micro-steps there are"
            yield KeyConflict("loader.global_batch", text, "remove one of the two")


@register_check("loader", "sync", "accumulate", "buffers", "sync_batchnorm", "weight_by", "stages")
def _keys_incompatible_with_rounds(pipeline: Pipeline) -> Iterator[KeyConflict]:
    loader = pipeline.loader
    for stage, settings in pipeline.stages_and_settings():
        if (one_round := settings.plan.round) is None:
            continue
        every, sync_path = f'"every: {one_round}"', stage.key_path("sync")
        here = f"{sync_path}.{settings.sync.name}.every"
        if not settings.has_backward:
            text = f"{every} clashes with {stage.path}, whose step is one batch of each rank"
            yield KeyConflict(here, text, "write a number of steps")
        if settings.epochs is not None:
            text = f'{every} clashes with "epochs: {settings.epochs}" of {stage.path}: rounds are counted'
            yield KeyConflict(f"{stage.path}.epochs", text, "write steps: N; a step is one round")
        if stage.evaluate is not None and stage.evaluate.every == "epoch":
            text = f'{every} clashes with "every: epoch" of {stage.path}: rounds are counted'
            yield KeyConflict(f"{stage.path}.evaluate.every", text, "write a number of rounds")
        if settings.accumulate > 1:
            accumulate = setting_text(stage, "accumulate", settings.accumulate)
            text = f"{every} clashes with {accumulate}: each rank updates its weights after every batch"
            yield KeyConflict(here, text, "raise batch_size, or write a number of steps")
        if settings.buffers.when == "every_forward":
            text = f'{every} clashes with "buffers: every_forward": ranks take different numbers of updates'
            yield KeyConflict(stage.key_path("buffers"), text, "write buffers: {every: 1}")
        if pipeline.sync_batchnorm:
            text = f'{every} clashes with "sync_batchnorm: true": ranks take different numbers of updates'
            yield KeyConflict("sync_batchnorm", text, "remove one of the two")
        if pipeline.has_batch_weights and (loader.balance is None or loader.balance == "speed"):
            text = f'{every} clashes with "weight_by": ranks wait for each other while they load, so that '
            text += "their speed cannot be measured"
            hint = "name fixed weights in loader.balance, or remove one of the two"
            yield KeyConflict("weight_by", text, hint if one_round.samples else "remove one of the two")
        for key in ("global_batch", "sharded"):
            if getattr(loader, key):
                text = f'{every} clashes with "{key}" of "loader": ranks share the samples of a round'
                yield KeyConflict(f"loader.{key}", text, "remove one of the two")
        if one_round.samples is not None and one_round.samples % loader.batch_size:
            size = loader.batch_size
            text = f'{every} is not a multiple of "batch_size: {size}"'
            nearest = max(1, round(one_round.samples / size)) * size
            yield KeyConflict(f"{here}.samples", text, f"such as {nearest}")
        if one_round.seconds is not None and isinstance(loader.balance, dict):
            text = f'"balance" with fixed weights clashes with {every}, whose shares are measured'
            yield KeyConflict("loader.balance", text, "write every: {samples: N}, or remove balance")


def _why_nothing_held_out(data: Choice | DataPair) -> str | None:
    """Why there is nothing to evaluate on; None if there is."""
    if isinstance(data, DataPair):
        return '"data" gives "train" only' if data.evaluate is None else None
    if data.settings is None:
        return f'"data: {data.name}" holds nothing out'
    return None if data.options["held_out"] else f'"held_out" of "{data.name}" keeps nothing'


@register_check("sync_batchnorm", "launch")
def _sync_batchnorm_on_cpus(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.sync_batchnorm and pipeline.launch.device == "cpu":
        text = '"sync_batchnorm: true" clashes with "device: cpu" of "launch": torch has it on GPUs only'
        yield KeyConflict("sync_batchnorm", text, "remove one of the two")


@register_check("compile", "launch", "accumulate", "loader", "stages")
def _cuda_graphs_with_accumulate(pipeline: Pipeline) -> Iterator[KeyConflict]:
    """CUDA graphs keep the first micro-step's gradients, which the next overwrite (H200, torch 2.11)."""
    mode = pipeline.compile.mode if pipeline.compile else ""
    if mode not in ("reduce-overhead", "max-autotune") or pipeline.launch.device == "cpu":
        return
    for stage, settings in pipeline.stages_and_settings():
        clash = ""
        if accumulate := accumulation_text(pipeline, stage):
            clash = f"{accumulate}: CUDA graphs overwrite gradients that accumulate, without an error"
        elif settings.turns:
            clash = f'"turns" of {stage.path}: CUDA graphs overwrite the loss of the turn before'
        if clash:
            hint = "write max-autotune-no-cudagraphs, or default"
            yield KeyConflict("compile.mode", f'"mode: {mode}" clashes with {clash}', hint)
            return


@register_check("compile", "launch", "deterministic")
def _unfit_compile_mode(pipeline: Pipeline) -> Iterator[KeyConflict]:
    if pipeline.compile is None:
        return
    mode = pipeline.compile.mode
    if mode == "reduce-overhead" and pipeline.launch.device == "cpu":
        text = f'"mode: {mode}" has no effect with "device: cpu" of "launch": it uses CUDA graphs'
        yield warning("compile.mode", text, "remove it")
    if mode.startswith("max-autotune") and pipeline.deterministic:
        text = f'"mode: {mode}" clashes with "deterministic: true": each process picks the '
        text += "kernels that are fastest when it times them, and these may change"
        yield KeyConflict("compile.mode", text, "use another mode")
