"""Pydantic's errors in plain sentences, each at its place in the file."""

import re
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ddprun.config.faults import PipelineFault, RedactFunction, allowed_values, closest_match
from ddprun.config.scalars import bool_hint
from ddprun.config.tree import Node, find_nearest, format_path
from ddprun.options import PATTERN_DESCRIPTIONS, CustomValidator, KeyPath, combine, problem
from ddprun.units import format_count
from ddprun_hooks.config import messages
from ddprun_hooks.config.messages import MessageParts

Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model], value: Any, *path: str, owner: str = "", context: dict[str, Any] | None = None
) -> Model:
    """Validate a section of the file that lies at `path` below the value that is being validated.

    `owner` is the name of the choice whose options these are; messages about unknown keys name it. `context`
    is passed to the model's validators.
    """
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise add_key_hints(error, model, path, owner) from None


def add_key_hints(
    error: ValidationError, model: type[BaseModel], path: tuple[str, ...] = (), owner: str = ""
) -> ValidationError:
    """The same errors below `path`; those about unknown keys, and missing options, say what belongs there."""
    items: list[ErrorDetails] = []
    for item in error.errors(include_url=False):
        *above, key = item["loc"] or ("",)
        section, name, wrong = model, str(key), None
        for segment in above:
            if (below := section_model_of(section.model_fields.get(str(segment)))) is None:
                break
            section = below
        if item["type"] == "extra_forbidden":
            wrong = _unknown_key_error(name, section, owner if section is model else "")
        elif item["type"] == "missing" and owner and not above:
            wrong = problem(f'{owner} needs "{name}"', f"write {owner}: {{{name}: …}}")
        items += combine([wrong], at=item["loc"]).errors(include_url=False) if wrong else [item]
    return messages.validation_error_from_items(items, path)


def section_model_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that is a section of the file, or a list of such; None for any other field."""
    if field is None or any(not isinstance(getattr(mark, "schema", {}), dict) for mark in field.metadata):
        return None  # a function of ours reads it, and takes more than the section
    kind: Any = field.annotation
    if get_origin(kind) in (UnionType, Union) and len(given := set(get_args(kind)) - {NoneType}) == 1:
        (kind,) = given  # a section that may be null
    while get_origin(kind) in (Annotated, tuple):
        kind, *marks = get_args(kind)
        if any(isinstance(mark, CustomValidator) for mark in marks):
            return None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown_key_error(key: str, model: type[BaseModel], owner: str) -> ValidationError:
    known = list(model.model_fields)
    text, allowed, near = messages.unknown_option_parts(owner, key, known)
    if not owner:
        text = f'unknown key "{key}"'
        sections = ((name, section_model_of(field)) for name, field in model.model_fields.items())
        inside = (f"{name}.{key}" for name, section in sections if section and key in section.model_fields)
        near = next(inside, None) or near
    name, colon, value = key.partition(":")
    if colon and name in known:
        hint = f'put a space after the colon: "{name}: {value}"'
        return problem(f'unknown key "{key}"', hint, on_key=True)
    return problem(text, allowed, near, on_key=True)


def validation_faults(error: ValidationError, root: Node, redact: RedactFunction) -> list[PipelineFault]:
    """Errors of a validation as faults, but mere consequences; `redact` gets values before they are cut."""
    made = []
    for item in error.errors(include_url=False):
        path: KeyPath = item["loc"]
        of_key = path[-1:] == ("[key]",)  # of the last key before it, where keys are the user's own
        path = path[:-1] if of_key else path
        found = find_nearest(root, path)
        exact, holds = not found.missing_path, found.node.value
        # Pydantic finds a list too short if its items are faulty; those have faults of their own already.
        enough = isinstance(holds, list) and exact and len(holds) >= item.get("ctx", {}).get("min_length", 0)
        if found.has_fault or (item["type"] == "too_short" and enough):
            continue
        node = found.node if exact and not of_key else None
        value = path[-1] if of_key else found.node.data() if exact else item["input"]
        at_key = of_key or item["type"] == "missing" or item.get("ctx", {}).get("on_key")
        at_key = at_key and (exact or isinstance(holds, dict) or holds is None)
        place = found.key_place if at_key else found.node.place
        made.append(PipelineFault(place, format_path(path), *_message_parts(item, node, value, redact)))
    return made


def _message_parts(item: Any, node: Node | None, value: Any, redact: RedactFunction) -> MessageParts:
    """What an error says of a value; `node` is None if the file does not have the value."""
    kind, context = item["type"], item.get("ctx", {})
    got = _shown_value(node, value, redact)
    word = got.removesuffix(" (a string)")
    match kind:
        case "too_short" | "too_long":
            key, bound = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
            items = format_count(context[key], "item")
            return f"must hold {bound} {items}, got {context['actual_length']}", None, None
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            return f"unknown value {word}", allowed_values(known), closest_match(word.strip('"'), known)
        case "missing":
            return "is required", None, None
        case "string_pattern_mismatch":
            return f"cannot be {word}", PATTERN_DESCRIPTIONS.get(context["pattern"], context["pattern"]), None
        case "string_too_short":
            return "must not be empty", None, None
        case "string_too_long":
            return f"is longer than {context['max_length']} characters", None, None
    text, allowed, near = messages.error_message_parts(item, got)
    if wanted := messages.EXPECTED_BY_ERROR_TYPE.get(kind) or context.get("wanted"):
        allowed = _correction_hint(wanted, node, value) or allowed
    return text, allowed, near


def _shown_value(node: Node | None, value: Any, redact: RedactFunction) -> str:
    """A value as a message shows it, in the file's own words where there are any."""
    if value is None and node:
        return node.text or "nothing"
    if isinstance(value, str):
        return messages.describe_value(redact(value))
    if node and node.text:
        return f"{node.text} (a boolean)" if isinstance(value, bool) else node.text
    return messages.describe_value(value)


def _correction_hint(wanted: str, node: Node | None, value: Any) -> str | None:
    """What to write where the value almost is what was wanted."""
    if wanted == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    text = node.text if node else None
    if not node or not text or value is None:
        return None
    if wanted == "a string" and not isinstance(value, str):
        return f'quote it: "{text}"'
    if wanted == "a list":
        return f"write [{text}]"
    if isinstance(value, str) and "true or false" in wanted:
        return bool_hint(text, quoted=node.quoted)
    return None
