"""What a comparison compares: pipelines, or one pipeline with several settings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ddprun.config import load

_NOOP = "hooks=[noop]"


@dataclass(frozen=True, slots=True)
class Variant:
    """One pipeline with its overrides."""

    name: str
    pipeline: Path
    overrides: tuple[str, ...] = ()
    twin: bool = False  # the first variant once more: what differs between the two is noise


def variants(
    pipelines: Sequence[Path],
    overrides: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    *,
    noop: bool,
    twin: bool,
) -> list[Variant]:
    """All variants, in the order of the table: all combinations of the values, as YAML, that keys `vary` by.

    `noop` adds the first one with nothing sent, `twin` the first one once more. `overrides` are for all.
    """
    found = []
    settings = list(product(*([f"{key}={value}" for value in values] for key, values in vary)))
    for pipeline, chosen in product(pipelines, settings):
        name = ", ".join([pipeline.stem] * (len(pipelines) > 1 or not chosen) + list(chosen))
        found.append(Variant(name, pipeline, (*overrides, *chosen)))
    first = found[0]
    if noop:
        found.append(Variant("nothing sent (noop)", first.pipeline, (*first.overrides, _NOOP)))
    if twin:
        found.insert(1, Variant(f"{first.name} once more", first.pipeline, first.overrides, twin=True))
    return found


def fitted(variant: Variant, steps: int | None) -> Variant:
    """The variant with `steps` in its one stage that takes any; a `noop` one also has it in every stage.

    Raises:
        PipelineError: faults of the pipeline, or several of its stages take steps.
    """
    noop = variant.overrides[-1:] == (_NOOP,)
    if steps is None and not noop:
        return variant
    loaded = load(variant.pipeline, variant.overrides)
    stages = loaded.pipeline.step_stages()
    more: list[str] = []
    if steps is not None:
        if len(stages) != 1:
            text = f"{len(stages)} stages take steps: --steps needs a pipeline with one"
            raise loaded.error("stages", text, "leave --steps out, or name one stage")
        more.append(_with_steps(stages[0], loaded.root.data().get("stages"), steps))
    if noop:
        own = [stage for stage in stages if "hooks" in stage.model_fields_set]
        more += [f"stages[{stage.index}].{stage.name}.hooks=[noop]" for stage in own]
    return replace(variant, overrides=(*variant.overrides, *more))


def _with_steps(stage: Any, written: Any, steps: int) -> str:
    """The override that gives a stage so many steps; `written`: `stages` as the file has it."""
    if written is None:
        return f"stages=[{{{stage.name}: {{steps: {steps}}}}}]"
    item = written[stage.index]
    options = dict((item.get(stage.name) or {}) if isinstance(item, dict) else {})
    options.pop("epochs", None)
    value = {stage.name: {**options, "steps": steps}}
    return f"stages[{stage.index}]={json.dumps(value, ensure_ascii=False)}"
