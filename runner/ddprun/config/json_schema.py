"""JSON Schema (draft 2020-12) of the pipeline file, for editors: from the same models that `check` uses."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from ddprun import __version__
from ddprun.config import docs, signatures
from ddprun.config.choices import CHOICE_KINDS, ChoiceKind
from ddprun.config.schema import Pipeline
from ddprun.config.stages import OVERRIDABLE_KEYS, STAGES, Stage, StepStage
from ddprun.plugins import CLUSTERS

Schema = dict[str, Any]

_KEY_SCHEMA: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}
DOTTED_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$"


def json_schema() -> Schema:
    """The whole schema. Torch's names are in some spellings; `check` takes other mixtures of case, too."""
    definitions: dict[str, Schema] = {}
    schema = _model_schema(Pipeline, definitions)
    definitions |= {kind.name: _kind_schema(kind, definitions) for kind in CHOICE_KINDS.values()}
    over: Schema = {"enum": ["stage", "run"], "description": "What it spans: each stage, or the whole run."}
    metric: Schema = {"type": "string", "minLength": 1}
    metric["description"] = "The metric by which it steps, after evaluations."
    for name, beside in (("stage", {"metric": metric}), ("any", {"over": over, "metric": metric})):
        definitions[f"{name}_schedule"] = _with_keys_beside("schedule", definitions, beside)
    others: dict[str, Schema] = {"others": {"$ref": "#/$defs/optimizer"}}
    for name, beside in (("stage", others), ("any", {"closure": {"const": True}, **others})):
        definitions[f"{name}_optimizer"] = _with_keys_beside("optimizer", definitions, beside)
    parts = {"name": {"type": "string", "minLength": 1}, "output": _KEY_SCHEMA, "target": _KEY_SCHEMA}
    definitions["any_metric"] = _with_keys_beside("metric", definitions, parts)
    stages = {name: _stage_schema(stage, definitions) for name, stage in STAGES.items()}
    definitions["stage"] = _choice_schema(stages)
    for name, cluster in CLUSTERS.load_available().items():
        definitions[f"cluster.{name}"] = _model_schema(cluster.Options, definitions)
        text = f"What `ddprun submit --to {name}` asks for."
        schema["properties"][name] = {"$ref": f"#/$defs/cluster.{name}", "description": text}
    del schema["properties"]["name"]["default"]
    torch_release = version("torch").partition("+")[0]  # without the suffix of a build
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Written by ddprun {__version__} for torch {torch_release}.",
        "title": "ddprun pipeline",
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


def _model_schema(model: type[BaseModel], definitions: dict[str, Schema]) -> Schema:
    """Schema of one model; its sections go to the definitions."""
    schema: Schema = _with_references(docs.model_schema(model))
    definitions.update(schema.pop("$defs", {}))
    return schema


def _with_references(schema: Any) -> Any:
    """References for what has a definition of ours."""
    if isinstance(schema, list):
        return [_with_references(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "definition" in schema and isinstance(schema["definition"], str):
        rest = {key: value for key, value in schema.items() if key != "definition"}
        return {"$ref": f"#/$defs/{schema['definition']}", **rest}
    return {key: _with_references(value) for key, value in schema.items()}


def _stage_schema(stage: type[Stage], definitions: dict[str, Schema]) -> Schema:
    schema = _model_schema(stage, definitions)
    if issubclass(stage, StepStage):
        for key in OVERRIDABLE_KEYS:  # what a stage does not name holds from above: no default of its own
            schema["properties"].get(key, {}).pop("default", None)
        schema["oneOf"] = [
            {"required": [key], "properties": {key: {"type": "integer"}}} for key in ("steps", "epochs")
        ]
    return schema


def _kind_schema(kind: ChoiceKind, definitions: dict[str, Schema]) -> Schema:
    options: dict[str, Schema] = {}
    for name, model, source in kind.models():
        schema: Schema = _model_schema(model, definitions) if model else {"type": "object"}
        if kind.torch_kind and source == "torch":
            for option in schema["properties"].values():
                option.pop("default", None)  # it may be an expression, in words
            definitions[f"{kind.name}.{name}"] = schema
            reference = {"$ref": f"#/$defs/{kind.name}.{name}"}
            if "required" in schema:
                reference["required"] = schema["required"]
            options |= dict.fromkeys(signatures.spellings(kind.torch_kind, name), reference)
        else:
            options[name] = schema
    return _choice_schema(options, dotted=bool(kind.dotted_description))


def _with_keys_beside(kind: str, definitions: Mapping[str, Schema], keys: Mapping[str, Schema]) -> Schema:
    """A choice, or one with some of these keys beside its name."""
    *_, mapping = definitions[kind]["anyOf"]
    beside = {**mapping, "properties": {**mapping["properties"], **keys}, "minProperties": 2}
    beside["maxProperties"] = 1 + len(keys)
    return {"anyOf": [{"$ref": f"#/$defs/{kind}"}, beside]}


def _choice_schema(options: dict[str, Schema], dotted: bool = False) -> Schema:
    """`name` or `name: {options}`; a name that needs options does not stand alone."""
    bare = [name for name, schema in options.items() if not {"required", "oneOf"} & schema.keys()]
    mapping: Schema = {
        "type": "object",
        "properties": {
            name: {"anyOf": [schema, {"type": "null"}]} if name in bare else schema
            for name, schema in options.items()
        },
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    if dotted:
        mapping["patternProperties"] = {DOTTED_NAME_PATTERN: {"type": ["object", "null"]}}
    alternatives: list[Schema] = [{"enum": bare}] if bare else []
    if dotted:
        alternatives.append({"type": "string", "pattern": DOTTED_NAME_PATTERN})
    return {"anyOf": [*alternatives, mapping]}
