"""`buffers` with what the model has of them, and with what reads them."""

from collections.abc import Iterator

from ddprun.config.cross_checks.rule import CrossCheck, place, reads, shown
from ddprun.config.options import Cnn, Mlp, Transformer
from ddprun.config.schema import Buffers, Evaluate, Forward, Pipeline, Train
from ddprun.config.tree import KeyPath


@reads("buffers", "model", "stages")
def _no_buffers_to_send(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if not isinstance(pipeline.model.settings, (Mlp, Transformer)):
        return
    found: list[tuple[KeyPath, Buffers]] = [(("buffers",), pipeline.buffers)]
    own = [stage for stage in pipeline.step_stages() if "buffers" in stage.model_fields_set]
    found += [(place(stage, "buffers"), stage.buffers) for stage in own]
    for path, buffers in found:
        if buffers.when not in ("auto", "never"):
            said = f"{{every: {buffers.every}}}" if buffers.when == "every" else buffers.when
            text = (
                f'"buffers: {said}" has no effect with "model: {pipeline.model.name}", which has no buffers'
            )
            yield CrossCheck(path, text, "remove it", "warning")


@reads("buffers", "model", "stages")
def _evaluates_with_own_buffers(pipeline: Pipeline) -> Iterator[CrossCheck]:
    if not isinstance(pipeline.model.settings, Cnn):
        return
    last: Train | Forward | None = None
    for stage in pipeline.stages:
        if isinstance(stage, (Train, Forward)):
            last = stage
        elif isinstance(stage, Evaluate) and last and last.effective(pipeline).buffers.when == "never":
            text = (
                f"{shown(last, 'buffers', 'never')} clashes with {stage.path}: each rank evaluates with its "
            )
            text += f'own running statistics of "model: {pipeline.model.name}"'
            yield CrossCheck(place(last, "buffers"), text, "use before_evaluate", "warning")


RULES = (_no_buffers_to_send, _evaluates_with_own_buffers)
