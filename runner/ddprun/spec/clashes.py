"""Rules across keys: what has no effect, or breaks, together with the rest of the file."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddprun.spec.choices import Choice
from ddprun.spec.faults import Severity
from ddprun.spec.options import Cnn, Mlp, Synthetic, Text, Transformer
from ddprun.spec.schema import OVERRIDABLE, DataPair, Evaluate, Pipeline, Save, Train
from ddprun.spec.tree import KeyPath
from ddprun_hooks import grammar


@dataclass(frozen=True)
class Clash:
    """Two keys that do not go together."""

    path: KeyPath
    """The key at which it is shown; the message names the other."""

    problem: str
    allowed: str | None = None
    severity: Severity = "error"


Rule = Callable[[Pipeline], Iterator[Clash]]
_RULES: list[tuple[frozenset[str], Rule]] = []


def reads(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule and the top-level keys that it reads: it is left out if one of them is faulty."""

    def register(rule: Rule) -> Rule:
        _RULES.append((frozenset(keys), rule))
        return rule

    return register


def clashes(pipeline: Pipeline, faulty: frozenset[str] = frozenset()) -> Iterator[Clash]:
    """Every clash of a pipeline whose `faulty` top-level keys hold placeholders."""
    for keys, rule in _RULES:
        if not keys & faulty:
            yield from rule(pipeline)


@reads("ddp", "accumulate")
def _accumulate_with_ddp(pipeline: Pipeline) -> Iterator[Clash]:
    yield from _no_sync_clashes(pipeline, "accumulate", pipeline.accumulate)


@reads("ddp", "stages")
def _stage_accumulate_with_ddp(pipeline: Pipeline) -> Iterator[Clash]:
    for stage in pipeline.train_stages():
        if "accumulate" in stage.model_fields_set:
            yield from _no_sync_clashes(pipeline, f"{stage.path}.accumulate", stage.accumulate)


def _no_sync_clashes(pipeline: Pipeline, key: str, accumulate: int) -> Iterator[Clash]:
    if accumulate > 1 and pipeline.ddp.static_graph:
        yield Clash(
            ("ddp", "static_graph"),
            f'"static_graph: true" clashes with "{key}: {accumulate}": DDP crashes or stops reducing',
            "remove one of the two",
        )
    if accumulate > 1 and pipeline.ddp.find_unused_parameters:
        yield Clash(
            ("ddp", "find_unused_parameters"),
            f'"find_unused_parameters: true" clashes with "{key}: {accumulate}": '
            "DDP reduces only what the last micro-step used",
            "remove one of the two",
        )


@reads("ddp")
def _static_with_unused(pipeline: Pipeline) -> Iterator[Clash]:
    if pipeline.ddp.static_graph and pipeline.ddp.find_unused_parameters:
        yield Clash(
            ("ddp", "find_unused_parameters"),
            '"find_unused_parameters: true" has no effect with "static_graph: true", which finds them once',
            "remove one of the two",
        )


@reads("launch")
def _nccl_on_cpu(pipeline: Pipeline) -> Iterator[Clash]:
    if pipeline.launch.backend == "nccl" and pipeline.launch.device == "cpu":
        yield Clash(
            ("launch", "backend"),
            '"backend: nccl" clashes with "device: cpu": NCCL carries GPU tensors only',
            "use gloo, or device: cuda",
        )


@reads("hooks", "stages", "launch")
def _hooks(pipeline: Pipeline) -> Iterator[Clash]:
    yield from _stack_clashes(pipeline, pipeline.hooks, ("hooks",))
    for stage in pipeline.train_stages():
        if "hooks" in stage.model_fields_set:
            yield from _stack_clashes(pipeline, stage.hooks, ("stages", stage.index, "train", "hooks"))


def _stack_clashes(pipeline: Pipeline, hooks: tuple[Choice, ...], path: KeyPath) -> Iterator[Clash]:
    for wrong in grammar.problems([grammar.entry(hook.name, hook.options) for hook in hooks]):
        if wrong.severity == "warning":
            yield Clash((*path, *wrong.path), wrong.text, None, "warning")
    launch = pipeline.launch
    for place, hook in enumerate(hooks):
        here = (*path, place)
        within = hook.options.get("within", ()) if hook.name == "hierarchical" else ()
        if launch.device == "cuda" and (hook.name == "shared_memory" or "shared_memory" in within):
            text = '"shared_memory" clashes with "device: cuda" of "launch": it sums tensors on the CPU'
            at = here if hook.name == "shared_memory" else (*here, "hierarchical", "within")
            yield Clash(at, text, "remove it: NCCL uses shared memory by itself")
        hosts = hook.options.get("hosts") if hook.name == "hierarchical" else None
        ranks = (launch.nproc_per_node or 1) * launch.nnodes
        if hosts and launch.nproc_per_node and ranks % hosts:
            text = f'"hosts: {hosts}" clashes with "launch": it does not divide {ranks} ranks'
            yield Clash((*here, "hierarchical", "hosts"), text, "hosts that hold equally many ranks")


@reads("warmup_steps", "stages")
def _warmup_longer_than_stage(pipeline: Pipeline) -> Iterator[Clash]:
    for stage in pipeline.train_stages():
        settings = stage.effective(pipeline)
        if settings.steps is not None and settings.warmup_steps >= settings.steps:
            own = "warmup_steps" in stage.model_fields_set
            path: KeyPath = ("stages", stage.index, "train", "warmup_steps" if own else "steps")
            yield Clash(
                path,
                f'"warmup_steps: {settings.warmup_steps}" is not shorter than "steps: {settings.steps}" of '
                f"{stage.path}: "
                "the full learning rate would never be used",
                "shorten the warm-up or lengthen the stage",
            )


@reads("model", "data")
def _model_fits_data(pipeline: Pipeline) -> Iterator[Clash]:
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
        yield Clash(at, text, "allowed: " + ("mlp, cnn" if not tokens else "transformer"))
    elif isinstance(model, Mlp) and model.inputs != math.prod(shape):
        text = f'"inputs: {model.inputs}" clashes with {what}, whose samples hold {math.prod(shape)} values'
        yield Clash((*at, "inputs"), text, f"write inputs: {math.prod(shape)}")
    elif isinstance(model, Cnn) and model.inputs != _image(shape):
        image = _image(shape)
        text = (
            f'"inputs: {list(model.inputs)}" clashes with {what}, whose samples have the shape {list(shape)}'
        )
        yield Clash(
            (*at, "inputs"), text, f"write inputs: {list(image)}" if image else "a cnn takes [C, H, W]"
        )
    elif isinstance(model, Transformer) and shape[-1] > model.context:
        text = f'"context: {model.context}" clashes with {what}, whose samples hold {shape[-1]} tokens'
        yield Clash((*at, "context"), text, f"write context: {shape[-1]}, or shorten the samples")
    elif isinstance(model, Transformer) and shape[-1] < model.context:
        text = f'of "context: {model.context}" only {shape[-1]} are ever used: {what} gives no more'
        yield Clash((*at, "context"), text, f"write context: {shape[-1]}", "warning")


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
def _outputs_for_every_class(pipeline: Pipeline) -> Iterator[Clash]:
    model, data = pipeline.model.settings, pipeline.train_data()
    classes = 10 if data.name == "digits" and data.settings else None
    if isinstance(data.settings, Synthetic) and data.settings.dtype != "int64":
        classes = data.settings.classes
    if isinstance(model, (Mlp, Cnn)) and classes and model.outputs < classes and _counts_classes(pipeline):
        text = f'"outputs: {model.outputs}" clashes with "data: {data.name}", which has {classes} classes'
        yield Clash(("model", pipeline.model.name, "outputs"), text, f"at least {classes}")
    if isinstance(model, Transformer) and data.name == "text" and data.settings and model.vocabulary < 256:
        text = f'"vocabulary: {model.vocabulary}" clashes with "data: text", whose tokens are bytes'
        yield Clash(("model", "transformer", "vocabulary"), text, "at least 256")


def _counts_classes(pipeline: Pipeline) -> bool:
    return pipeline.loss.name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss")


@reads("optimizer")
def _nesterov_without_momentum(pipeline: Pipeline) -> Iterator[Clash]:
    options = pipeline.optimizer.options
    if (
        pipeline.optimizer.name != "SGD"
        or pipeline.optimizer.source != "torch"
        or not options.get("nesterov")
    ):
        return
    if not options.get("momentum"):
        text = '"nesterov: true" needs "momentum", which is 0'
        yield Clash(("optimizer", "SGD", "nesterov"), text, "give a momentum such as 0.9")
    if options.get("dampening"):
        text = f'"nesterov: true" clashes with "dampening: {options["dampening"]}"'
        yield Clash(("optimizer", "SGD", "dampening"), text, "nesterov needs a dampening of 0")


@reads("model", "optimizer")
def _muon_with_biases(pipeline: Pipeline) -> Iterator[Clash]:
    if pipeline.optimizer.name == "Muon" and pipeline.optimizer.source == "torch" and pipeline.model.settings:
        text = f'"Muon" clashes with "model: {pipeline.model.name}": it takes matrices, no biases'
        yield Clash(("optimizer",), text, "use another optimizer, such as adamw")


@reads("loss", "stages")
def _metrics_with_loss(pipeline: Pipeline) -> Iterator[Clash]:
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
                yield Clash(path, text, "remove the metric, or name a loss")
            elif metric.name == "perplexity" and loss.name not in ("CrossEntropyLoss", "NLLLoss"):
                text = (
                    f'"perplexity" clashes with "loss: {loss.name}": it is the exponential of a cross-entropy'
                )
                yield Clash(path, text, "use the loss cross_entropy or nll_loss")


@reads("data", "stages")
def _evaluate_without_data(pipeline: Pipeline) -> Iterator[Clash]:
    reason = _nothing_held_out(pipeline.data)
    for stage in pipeline.stages:
        if isinstance(stage, Evaluate) and reason:
            yield Clash(
                ("stages", stage.index),
                f'"evaluate" has no data: {reason}',
                "give data: {train: …, evaluate: …}",
            )
    evaluates = any(isinstance(stage, Evaluate) for stage in pipeline.stages)
    if isinstance(pipeline.data, DataPair) and pipeline.data.evaluate is not None and not evaluates:
        text = '"data.evaluate" has no effect: no stage of "stages" is "evaluate"'
        yield Clash(("data", "evaluate"), text, "add an evaluate stage", "warning")


def _nothing_held_out(data: Choice | DataPair) -> str | None:
    """Why there is nothing to evaluate on; None if there is."""
    if isinstance(data, DataPair):
        return '"data" gives "train" only' if data.evaluate is None else None
    if data.settings is None:
        return f'"data: {data.name}" holds nothing out'
    return None if data.options["held_out"] else f'"held_out" of "{data.name}" keeps nothing'


@reads("stages")
def _saves(pipeline: Pipeline) -> Iterator[Clash]:
    trained = False
    written: dict[str, int] = {}
    for stage in pipeline.stages:
        trained = trained or isinstance(stage, Train)
        if not isinstance(stage, Save):
            continue
        if stage.to in written:
            text = f'{stage.path} writes "{stage.to}", as stages[{written[stage.to]}].save does'
            yield Clash(("stages", stage.index, "save", "to"), text, "name another file")
        written.setdefault(stage.to, stage.index)
        if not trained:
            text = '"save" stands before every "train": it saves the initial weights'
            yield Clash(("stages", stage.index), text, None, "warning")


@reads("stages", *OVERRIDABLE)
def _overridden_everywhere(pipeline: Pipeline) -> Iterator[Clash]:
    stages = pipeline.train_stages()
    for key in OVERRIDABLE:
        given = key in pipeline.model_fields_set
        if given and stages and all(key in stage.model_fields_set for stage in stages):
            text = f'"{key}" has no effect: every train stage of "stages" has its own "{key}"'
            yield Clash((key,), text, "remove it here or there", "warning")
