"""JSON Schema (draft 2020-12) of the pipeline file, for editors: from the same models that `check` uses."""

from typing import Any

from pydantic import BaseModel

from ddprun import __version__
from ddprun.config import docs, signatures
from ddprun.config.choices import KINDS, ChoiceKind
from ddprun.config.errors import section_of
from ddprun.config.schema import (
    OVERRIDABLE,
    STAGES,
    TIMES,
    Compile,
    DataPair,
    Init,
    Period,
    Pipeline,
    Stage,
    StepStage,
)
from ddprun.plugins import CLUSTERS

Schema = dict[str, Any]

HOSTS = r"^0*[1-9][0-9]*:0*[1-9][0-9]*$"
_KEY: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}
_PATTERNS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_KEYS: Schema = {"type": "object", "additionalProperties": _KEY}
DOTTED = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$"


def json_schema() -> Schema:
    """The whole schema. Names of torch are those of the installed torch, as torch, in lower case and as
    functions spell them; `check` takes other mixtures of case too.
    """
    definitions: dict[str, Schema] = {}
    schema = _model_schema(Pipeline, definitions)
    definitions |= {kind.name: _kind_schema(kind, definitions) for kind in KINDS.values()}
    definitions["any_schedule"] = _with_span(definitions["schedule"])
    stages = {name: _stage_schema(stage, definitions) for name, stage in STAGES.items()}
    times = _one_of_many({name: _model_schema(model, definitions) for name, model in TIMES.items()})
    count: Schema = {"type": "integer", "minimum": 1}
    definitions |= {
        "stage": _one_of_many(stages),
        "buffers": {"anyOf": [*times["anyOf"], _model_schema(Period, definitions)]},
        "data_or_pair": {"anyOf": [{"$ref": "#/$defs/data"}, _model_schema(DataPair, definitions)]},
        "key": _KEY,
        "init": {"anyOf": [{"type": "string"}, _model_schema(Init, definitions)]},
        "blocks": {"anyOf": [{"type": ["string", "null"], "minLength": 1}, _PATTERNS]},
        "compile": {"anyOf": [{"type": "boolean"}, _model_schema(Compile, definitions)]},
        "group": {
            "type": "object",
            "properties": {"match": {"anyOf": [{"type": "string"}, _PATTERNS]}},
            "required": ["match"],
            "minProperties": 2,
        },
        "parts": {"anyOf": [_KEY, {"type": "array", "items": _KEY}, _KEYS]},
        "nnodes": {"anyOf": [count, {"type": "string", "pattern": HOSTS}]},
    }
    for name, cluster in CLUSTERS.loadable().items():
        definitions[cluster.__name__] = _model_schema(cluster.Options, definitions)
        text = f"What `ddprun submit --to {name}` asks for."
        schema["properties"][name] = {"$ref": f"#/$defs/{cluster.__name__}", "description": text}
    del schema["properties"]["name"]["default"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Written by ddprun {__version__} for torch {signatures.torch_version()}.",
        "title": "ddprun pipeline",
        **schema,
        "$defs": dict(sorted(definitions.items())),
    }


def _model_schema(model: type[BaseModel], definitions: dict[str, Schema]) -> Schema:
    """Schema of one model; its sections go to the definitions, described by their docstrings."""
    schema = model.model_json_schema()
    sections = schema.pop("$defs", {})
    for field in model.model_fields.values():
        if section := section_of(field):
            name = section.__name__
            definitions[name] = _described(_linked(sections[name]), section)
    return _described(_linked(schema), model)


def _linked(schema: Any) -> Any:
    """References for the types that our own functions read, and no titles."""
    if isinstance(schema, list):
        return [_linked(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "definition" in schema and isinstance(schema["definition"], str):
        rest = {key: value for key, value in schema.items() if key not in ("definition", "title")}
        return {"$ref": f"#/$defs/{schema['definition']}", **rest}
    return {key: _linked(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)}


def _described(schema: Schema, model: type[BaseModel]) -> Schema:
    if summary := docs.summary(model):
        schema["description"] = summary
    for name, text in docs.fields(model).items():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    return schema


def _stage_schema(stage: type[Stage], definitions: dict[str, Schema]) -> Schema:
    schema = _model_schema(stage, definitions)
    if issubclass(stage, StepStage):
        for key in OVERRIDABLE:  # what a stage does not name holds from above: no default of its own
            schema["properties"].get(key, {}).pop("default", None)
        schema["oneOf"] = [
            {"required": [key], "properties": {key: {"type": "integer"}}} for key in ("steps", "epochs")
        ]
        schema["required"] = []  # for `_one_of_many`: the bare name is not enough
    return schema


def _kind_schema(kind: ChoiceKind, definitions: dict[str, Schema]) -> Schema:
    options: dict[str, Schema] = {
        name: _model_schema(model, definitions) for name, model in kind.built_in.items()
    }
    if kind.torch:
        for name in signatures.names(kind.torch):
            schema = _model_schema(signatures.options_model(kind.torch, name), definitions)
            for key in schema.get("properties", {}).values():
                key.pop("default", None)
            schema["description"] = signatures.signature(kind.torch, name).summary
            definitions[f"{kind.name}.{name}"] = schema
            reference = {"$ref": f"#/$defs/{kind.name}.{name}"}
            if "required" in schema:
                reference["required"] = schema["required"]
            spellings = [name, name.lower()]
            if kind.torch == "loss":
                spellings.append(signatures.functional_name(name))
            options |= dict.fromkeys(spellings, reference)
    installed = kind.plugins.options_of_installed() if kind.plugins else {}
    for name, options_model in installed.items():
        options[name] = (
            {"type": "object"} if options_model is None else _model_schema(options_model, definitions)
        )
    return _one_of_many(options, dotted=bool(kind.dotted))


def _with_span(schedule: Schema) -> Schema:
    """A schedule, or one with `over` beside its name."""
    *_, mapping = schedule["anyOf"]
    over = {"enum": ["stage", "run"], "description": "Whether each stage has one of its own."}
    spanning = {**mapping, "properties": {**mapping["properties"], "over": over}, "required": ["over"]}
    return {"anyOf": [{"$ref": "#/$defs/schedule"}, {**spanning, "minProperties": 2, "maxProperties": 2}]}


def _one_of_many(options: dict[str, Schema], dotted: bool = False) -> Schema:
    """`name` or `name: {options}`; a name whose options are required needs them."""
    bare = [name for name, schema in options.items() if "required" not in schema]
    mapping: Schema = {
        "type": "object",
        "properties": {
            name: schema if "required" in schema else {"anyOf": [schema, {"type": "null"}]}
            for name, schema in options.items()
        },
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    for schema in options.values():
        if schema.get("required") == []:
            del schema["required"]
    if dotted:
        mapping["patternProperties"] = {DOTTED: {"type": ["object", "null"]}}
    alternatives: list[Schema] = [{"enum": bare}] if bare else []
    if dotted:
        alternatives.append({"type": "string", "pattern": DOTTED})
    return {"anyOf": [*alternatives, mapping]}
