"""Model, data, loss and optimizer that do not fit each other."""

import math
from collections.abc import Iterator

from ddprun.config.choices import Choice
from ddprun.config.cross_checks.rule import CrossCheck, reads
from ddprun.config.options import Cnn, Mlp, Synthetic, Text, Transformer
from ddprun.config.schema import DataPair, Evaluate, Pipeline
from ddprun.config.tree import KeyPath


@reads("model", "data")
def _model_fits_data(pipeline: Pipeline) -> Iterator[CrossCheck]:
    data = pipeline.train_data()
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
    elif isinstance(model, Cnn) and model.inputs != _image(shape):
        image = _image(shape)
        text = (
            f'"inputs: {list(model.inputs)}" clashes with {what}, whose samples have the shape {list(shape)}'
        )
        yield CrossCheck(
            (*at, "inputs"), text, f"write inputs: {list(image)}" if image else "a cnn takes [C, H, W]"
        )
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


def _image(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return shape if len(shape) == 3 else None


@reads("model", "data", "loss")
def _outputs_for_every_class(pipeline: Pipeline) -> Iterator[CrossCheck]:
    model, data = pipeline.model.settings, pipeline.train_data()
    classes = 10 if data.name == "digits" and data.settings else None
    if isinstance(data.settings, Synthetic) and data.settings.dtype != "int64":
        classes = data.settings.classes
    if isinstance(model, (Mlp, Cnn)) and classes and model.outputs < classes and _counts_classes(pipeline):
        text = f'"outputs: {model.outputs}" clashes with "data: {data.name}", which has {classes} classes'
        yield CrossCheck(("model", pipeline.model.name, "outputs"), text, f"at least {classes}")
    if isinstance(model, Transformer) and data.name == "text" and data.settings and model.vocabulary < 256:
        text = f'"vocabulary: {model.vocabulary}" clashes with "data: text", whose tokens are bytes'
        yield CrossCheck(("model", "transformer", "vocabulary"), text, "at least 256")


def _counts_classes(pipeline: Pipeline) -> bool:
    return pipeline.loss.name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")


@reads("optimizer")
def _nesterov_without_momentum(pipeline: Pipeline) -> Iterator[CrossCheck]:
    yield from _nesterov(pipeline.optimizer, ("optimizer",))


@reads("stages")
def _nesterov_without_momentum_in_a_stage(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.step_stages():
        if stage.optimizer is not None:
            yield from _nesterov(stage.optimizer, ("stages", stage.index, stage.name, "optimizer"))


def _nesterov(optimizer: Choice, at: KeyPath) -> Iterator[CrossCheck]:
    options = optimizer.options
    if optimizer.name != "SGD" or optimizer.source != "torch" or not options.get("nesterov"):
        return
    if not options.get("momentum"):
        text = '"nesterov: true" needs "momentum", which is 0'
        yield CrossCheck((*at, "SGD", "nesterov"), text, "give a momentum such as 0.9")
    if options.get("dampening"):
        text = f'"nesterov: true" clashes with "dampening: {options["dampening"]}"'
        yield CrossCheck((*at, "SGD", "dampening"), text, "nesterov needs a dampening of 0")


@reads("model", "optimizer")
def _muon_with_biases(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if pipeline.optimizer.name == "Muon" and pipeline.optimizer.source == "torch" and pipeline.model.settings:
        text = f'"Muon" clashes with "model: {pipeline.model.name}": it takes matrices, no biases'
        yield CrossCheck(("optimizer",), text, "use another optimizer, such as adamw")


@reads("loss", "stages")
def _metrics_with_loss(pipeline: Pipeline) -> Iterator[CrossCheck]:
    loss = pipeline.loss
    for stage in pipeline.stages:
        for place, metric in enumerate(stage.metrics if isinstance(stage, Evaluate) else ()):
            path: KeyPath = ("stages", stage.index, "evaluate", "metrics", place)
            if metric.source != "built-in":
                continue
            if loss.name == "model" and loss.source == "built-in":
                text = (
                    f'"{metric.name}" clashes with "loss: model": the model returns its loss, not its output'
                )
                yield CrossCheck(path, text, "remove the metric, or name a loss")
            elif metric.name == "perplexity" and loss.name not in ("CrossEntropyLoss", "NLLLoss"):
                text = (
                    f'"perplexity" clashes with "loss: {loss.name}": it is the exponential of a cross-entropy'
                )
                yield CrossCheck(path, text, "use the loss cross_entropy or nll_loss")


@reads("stages")
def _metrics_twice(pipeline: Pipeline) -> Iterator[CrossCheck]:
    for stage in pipeline.stages:
        seen = set[str]()
        for place, metric in enumerate(stage.metrics if isinstance(stage, Evaluate) else ()):
            if metric.name in seen:
                text = f'"{metric.name}" stands in the list twice, and a metric goes by its name'
                hint = "remove one, or give the other a function of its own name"
                yield CrossCheck(("stages", stage.index, "evaluate", "metrics", place), text, hint)
            seen.add(metric.name)


@reads("data", "stages")
def _evaluate_without_data(pipeline: Pipeline) -> Iterator[CrossCheck]:
    reason = _nothing_held_out(pipeline.data)
    for stage in pipeline.stages:
        if isinstance(stage, Evaluate) and reason:
            yield CrossCheck(
                ("stages", stage.index),
                f'"evaluate" has no data: {reason}',
                "give data: {train: …, evaluate: …}",
            )
    evaluates = any(isinstance(stage, Evaluate) for stage in pipeline.stages)
    if isinstance(pipeline.data, DataPair) and pipeline.data.evaluate is not None and not evaluates:
        text = '"data.evaluate" has no effect: no stage of "stages" is "evaluate"'
        yield CrossCheck(("data", "evaluate"), text, "add an evaluate stage", "warning")


@reads("data", "loader")
def _sharded_built_in(pipeline: Pipeline) -> Iterator[CrossCheck]:
    data = pipeline.train_data()
    if pipeline.loader.sharded and data.source == "built-in":
        text = (
            f'"sharded: true" clashes with "data: {data.name}", which is the same on every rank: each sample '
        )
        yield CrossCheck(("loader", "sharded"), text + "would count once for each rank", "remove it")


def _nothing_held_out(data: Choice | DataPair) -> str | None:
    """Why there is nothing to evaluate on; None if there is."""
    if isinstance(data, DataPair):
        return '"data" gives "train" only' if data.evaluate is None else None
    if data.settings is None:
        return f'"data: {data.name}" holds nothing out'
    return None if data.options["held_out"] else f'"held_out" of "{data.name}" keeps nothing'


RULES = (
    _model_fits_data,
    _outputs_for_every_class,
    _nesterov_without_momentum,
    _nesterov_without_momentum_in_a_stage,
    _muon_with_biases,
    _metrics_with_loss,
    _metrics_twice,
    _evaluate_without_data,
    _sharded_built_in,
)
