"""What `ddprun catalog` and the JSON Schema say of a class: its docstrings, and its types in words.

The docstrings under its fields are read from its source, since Python drops them.
Pydantic's `use_attribute_docstrings` would read them at each start of `ddprun`, which takes 30 ms.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema


def model_schema(model: type[BaseModel]) -> dict[str, Any]:
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
    found = {key: f"As `{key}` above." for key in getattr(model, "keys_from_above", ())}
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


_DEFINITIONS = {
    "data": "a data set",
    "optimizer": "an optimizer",
    "mutate": "a mutation",
    "update": "an update",
    "weight": "samples or targets or an import path",
    **dict.fromkeys(("transform", "collate", "sampler"), "an import path"),
}  # definitions of the pipeline's schema, in words; others are `a` and their name
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "null": "null",
    "object": "a mapping",
}
_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}


def type_words(schema: dict[str, Any], definitions: Mapping[str, Any]) -> str:
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
        return _DEFINITIONS.get(name, f"a {name}")
    if "anyOf" in schema:
        options = list(dict.fromkeys(type_words(item, definitions) for item in schema["anyOf"]))
        return (", or " if "," in options[0] else " or ").join(options)
    if "enum" in schema:
        return " or ".join(str(item) for item in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        count = schema.get("minItems") if schema.get("minItems") == schema.get("maxItems") else None
        if "prefixItems" in schema:
            return f"a list of {count} values"
        items = type_words(schema["items"], definitions) if "items" in schema else "anything"
        return f"a list of {count} (each {items})" if count else f"a list (each {items})"
    bounds = [f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema]
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        bounds[0] = f"at least {schema['exclusiveMinimum'] + 1}"
    words = _TYPES.get(str(schema.get("type")), "anything")
    return f"{words}, {' and '.join(bounds)}" if bounds else words
