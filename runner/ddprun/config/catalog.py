"""What a pipeline may say, as plain data for `ddprun catalog`, and as JSON Schema for editors; both are read
from the models that `check` uses.

The docstrings under their fields are read from their source, since Python drops them. Pydantic's
`use_attribute_docstrings` would read them at each start of `ddprun`, which takes 30 ms.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from ddprun import __version__
from ddprun.config import torch_signatures
from ddprun.config.choices import CHOICE_KINDS, ChoiceKind
from ddprun.config.schema import Pipeline
from ddprun.config.stages import OVERRIDABLE_KEYS, STAGES, Stage, StepStage
from ddprun.options import NoOptions
from ddprun.plugins import CLUSTERS

CatalogEntry = dict[str, Any]
Schema = dict[str, Any]

CATALOG_KINDS = {
    **CHOICE_KINDS,
    "stage": ChoiceKind("stage", built_in_option_models=STAGES),
    "cluster": ChoiceKind("cluster", plugins=CLUSTERS),
}  # what is chosen by a name, whatever a file writes around it


def entries_of_kind(kind: str) -> list[CatalogEntry]:
    """Entries of a kind: kind, name, source, description and options, each with name, type, required, default
    and description. Of what would have to be imported, a hook or what is not trusted, there is the name.
    """
    return [entry_from_model(kind, *named) for named in CATALOG_KINDS[kind].named_option_models()]


def entries_named(name: str) -> list[CatalogEntry]:
    """The entries of every kind that a file may call so; torch's names in any spelling."""
    found = []
    for kind, known in CATALOG_KINDS.items():
        wanted = {name}
        if (
            known.torch_kind
            and (torch_name := torch_signatures.find_class_name(known.torch_kind, name)) is not None
        ):
            wanted.add(torch_name)
        if not wanted.isdisjoint(known.names()):
            found += [entry for entry in entries_of_kind(kind) if entry["name"] in wanted]
    return found


def entry_from_model(
    kind: str, name: str, model: type[BaseModel] | None, source: str = "built-in"
) -> CatalogEntry:
    """What is named so; `model` is None if it may not be imported here."""
    schema = _model_schema(model or NoOptions)
    options = [
        {
            "name": key,
            "type": _describe_type(item, schema.get("$defs", {})),
            "required": key in schema.get("required", ()),
            "default": item.get("default"),
            "description": item.get("description", ""),
        }
        for key, item in schema.get("properties", {}).items()
    ]
    description = schema.get("description", "") if model else "Added by an installed package."
    return {"kind": kind, "name": name, "source": source, "description": description, "options": options}


_DEFINITION_WORDS = {
    "data": "a data set",
    "optimizer": "an optimizer",
    "mutate": "a mutation",
    "update": "an update",
    "weight": "samples or targets or an import path",
    **dict.fromkeys(("transform", "collate", "sampler"), "an import path"),
}  # definitions of the pipeline's schema, in words; others are `a` and their name
_TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "null": "null",
    "object": "a mapping",
}
_BOUND_WORDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}


def _describe_type(schema: Schema, definitions: Mapping[str, Schema]) -> str:
    """Describe the JSON Schema of an option in words: `a whole number, at least 1`."""
    if "$ref" in schema:
        found = definitions.get(schema["$ref"].rpartition("/")[2], {})
        keys = [*found.get("properties", ())]
        if found.get("maxProperties") == 1:
            return " or ".join(f"{{{key}}}" for key in keys)
        if found.get("additionalProperties"):
            keys.append("…")
        return f"{{{', '.join(keys)}}}" if keys else "anything"
    if "definition" in schema:
        name = schema["definition"].removeprefix("any_").removeprefix("stage_")
        return _DEFINITION_WORDS.get(name, f"a {name}")
    if "anyOf" in schema:
        options = list(dict.fromkeys(_describe_type(item, definitions) for item in schema["anyOf"]))
        return (", or " if "," in options[0] else " or ").join(options)
    if "enum" in schema:
        return " or ".join(str(item) for item in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        count = schema.get("minItems") if schema.get("minItems") == schema.get("maxItems") else None
        if "prefixItems" in schema:
            return f"a list of {count} values"
        items = _describe_type(schema["items"], definitions) if "items" in schema else "anything"
        return f"a list of {count} (each {items})" if count else f"a list (each {items})"
    bounds = [f"{words} {schema[key]:g}" for key, words in _BOUND_WORDS.items() if key in schema]
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        bounds[0] = f"at least {schema['exclusiveMinimum'] + 1}"
    words = _TYPE_WORDS.get(str(schema.get("type")), "anything")
    return f"{words}, {' and '.join(bounds)}" if bounds else words


_BATCH_KEY_SCHEMA: Schema = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]}
_DOTTED_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$"


def json_schema() -> Schema:
    """The whole schema. Torch's names are in some spellings; `check` takes other mixtures of case, too."""
    definitions: dict[str, Schema] = {}
    schema = _schema_with_shared_definitions(Pipeline, definitions)
    definitions |= {kind.name: _kind_schema(kind, definitions) for kind in CHOICE_KINDS.values()}
    over: Schema = {"enum": ["stage", "run"], "description": "What it spans: each stage, or the whole run."}
    metric: Schema = {"type": "string", "minLength": 1}
    metric["description"] = "The metric by which it steps, after evaluations."
    for name, beside in (("stage", {"metric": metric}), ("any", {"over": over, "metric": metric})):
        definitions[f"{name}_schedule"] = _schema_with_sibling_keys("schedule", definitions, beside)
    others: dict[str, Schema] = {"others": {"$ref": "#/$defs/optimizer"}}
    for name, beside in (("stage", others), ("any", {"closure": {"const": True}, **others})):
        definitions[f"{name}_optimizer"] = _schema_with_sibling_keys("optimizer", definitions, beside)
    parts = {
        "name": {"type": "string", "minLength": 1},
        "output": _BATCH_KEY_SCHEMA,
        "target": _BATCH_KEY_SCHEMA,
    }
    definitions["any_metric"] = _schema_with_sibling_keys("metric", definitions, parts)
    stages = {name: _stage_schema(stage, definitions) for name, stage in STAGES.items()}
    definitions["stage"] = _choice_schema(stages)
    for name, cluster in CLUSTERS.load_available().items():
        definitions[f"cluster.{name}"] = _schema_with_shared_definitions(cluster.Options, definitions)
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


def _schema_with_shared_definitions(model: type[BaseModel], definitions: dict[str, Schema]) -> Schema:
    """Schema of one model; its sections go to the definitions, to which it refers."""
    schema: Schema = _replace_definitions_by_refs(_model_schema(model))
    definitions.update(schema.pop("$defs", {}))
    return schema


def _replace_definitions_by_refs(schema: Any) -> Any:
    """References for what has a definition of ours."""
    if isinstance(schema, list):
        return [_replace_definitions_by_refs(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "definition" in schema and isinstance(schema["definition"], str):
        rest = {key: value for key, value in schema.items() if key != "definition"}
        return {"$ref": f"#/$defs/{schema['definition']}", **rest}
    return {key: _replace_definitions_by_refs(value) for key, value in schema.items()}


def _stage_schema(stage: type[Stage], definitions: dict[str, Schema]) -> Schema:
    schema = _schema_with_shared_definitions(stage, definitions)
    if issubclass(stage, StepStage):
        for key in OVERRIDABLE_KEYS:  # what a stage does not name holds from above: no default of its own
            schema["properties"].get(key, {}).pop("default", None)
        schema["oneOf"] = [
            {"required": [key], "properties": {key: {"type": "integer"}}} for key in ("steps", "epochs")
        ]
    return schema


def _kind_schema(kind: ChoiceKind, definitions: dict[str, Schema]) -> Schema:
    options: dict[str, Schema] = {}
    for name, model, source in kind.named_option_models():
        schema: Schema = _schema_with_shared_definitions(model, definitions) if model else {"type": "object"}
        if kind.torch_kind and source == "torch":
            for option in schema["properties"].values():
                option.pop("default", None)  # it may be an expression, in words
            definitions[f"{kind.name}.{name}"] = schema
            reference = {"$ref": f"#/$defs/{kind.name}.{name}"}
            if "required" in schema:
                reference["required"] = schema["required"]
            options |= dict.fromkeys(torch_signatures.class_name_spellings(kind.torch_kind, name), reference)
        else:
            options[name] = schema
    return _choice_schema(options, dotted=bool(kind.dotted_description))


def _schema_with_sibling_keys(
    kind: str, definitions: Mapping[str, Schema], keys: Mapping[str, Schema]
) -> Schema:
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
        mapping["patternProperties"] = {_DOTTED_NAME_PATTERN: {"type": ["object", "null"]}}
    alternatives: list[Schema] = [{"enum": bare}] if bare else []
    if dotted:
        alternatives.append({"type": "string", "pattern": _DOTTED_NAME_PATTERN})
    return {"anyOf": [*alternatives, mapping]}


def _model_schema(model: type[BaseModel]) -> Schema:
    """JSON Schema of a model, described by docstrings; its sections are in `$defs`."""
    return model.model_json_schema(schema_generator=_SchemaGenerator)


class _SchemaGenerator(GenerateJsonSchema):
    """Pydantic's, without titles; the docstrings of classes and under fields are the descriptions."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        made, model = super().model_schema(schema), schema["cls"]
        made.pop("title", None)
        if model.__doc__:
            made["description"] = " ".join(model.__doc__.split())
        for name, text in _field_descriptions(model).items():
            if name in made.get("properties", {}):
                made["properties"][name]["description"] = text
        return made


def _field_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each documented field, inherited ones included, each as one line."""
    found = {key: f"As `{key}` above." for key in getattr(model, "inherited_keys", ())}
    for base in reversed(model.__mro__):
        if not base.__module__.startswith(("pydantic", "builtins")):
            found |= _field_docs_of_module(base.__module__).get(base.__qualname__, {})
    return found


@functools.cache
def _field_docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """The docstrings of a module's classes, by qualified name and field."""
    return dict(_field_docs_of_classes(ast.parse(inspect.getsource(sys.modules[name])).body))


def _field_docs_of_classes(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    for made in body:
        if isinstance(made, ast.ClassDef):
            found = {
                field.target.id: " ".join(str(text.value.value).split())
                for field, text in pairwise(made.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            }
            yield prefix + made.name, found
            yield from _field_docs_of_classes(made.body, f"{prefix}{made.name}.")
