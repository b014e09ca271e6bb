"""Errors in options and their wording, the same for a pipeline file and for `register`.

Nothing here imports torch.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

MessageParts = tuple[str, str | None, str | None]  # what is wrong, what is allowed, what was meant
KeyPath = tuple[str | int, ...]  # keys and list indices, such as `("stages", 2, "train", "steps")`
OWN_ERROR_TYPE = "ddprun"  # type of an error that brings its own message; every other type is pydantic's

# What was expected, by pydantic's type of error, where that only says which type a value must have.
EXPECTED_BY_ERROR_TYPE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}

# Pydantic's types of error about a bound: its words, and where the error has it.
BOUND_ERROR_TYPES = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "multiple_of": ("a multiple of", "multiple_of"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def closest_match(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, without regard to case; None if none is near."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def allowed_values(words: Iterable[str]) -> str:
    """`allowed: a, b, c`, the one way in which every fault lists what is allowed."""
    return "allowed: " + ", ".join(words)


def format_message(problem: str, allowed: str | None = None, suggestion: str | None = None) -> str:
    """`what is wrong; what is allowed (did you mean "…"?)`."""
    text = f"{problem}; {allowed}" if allowed else problem
    return f'{text} (did you mean "{suggestion}"?)' if suggestion else text


def unknown_option_parts(owner: str, key: str, known: Sequence[str]) -> MessageParts:
    if not known:
        return f'{owner} takes no options, got "{key}"', "remove it", None
    return f'{owner} has no option "{key}"', allowed_values(known), closest_match(key, known)


def describe_value(value: Any) -> str:
    """A value as a message shows it."""
    match value:
        case None:
            return "null"
        case bool():
            return f"{str(value).lower()} (a boolean)"
        case str():
            return f'"{value if len(value) <= 40 else f"{value[:38]}…"}" (a string)'
        case int() | float():
            return str(value)
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
    return f"{type(value).__name__} (an object)"


def problem(
    text: str,
    allowed: str | None = None,
    suggestion: str | None = None,
    *,
    at: str | KeyPath = (),
    on_key: bool = False,
) -> ValidationError:
    """An error that says `text; allowed (did you mean suggestion?)`; `allowed` may also say what to do. It is
    shown at the value that is being validated, or `at` a place below it; `on_key`: at the key there.
    """
    context = {"problem": text, "allowed": allowed, "suggestion": suggestion, "on_key": on_key}
    return _make_validation_error("{problem}", context, at)


def expected(
    wanted: str, allowed: str | None = None, *, at: str | KeyPath = (), got: Any = None
) -> ValidationError:
    """An error that says `expected …, got …`; of a pipeline, what was got is shown as the file has it."""
    return _make_validation_error("expected {wanted}", {"wanted": wanted, "allowed": allowed}, at, got)


def _make_validation_error(
    text: Any, context: dict[str, Any], at: str | KeyPath, got: Any = None
) -> ValidationError:
    loc: KeyPath = (at,) if isinstance(at, str) else at
    details = InitErrorDetails(type=PydanticCustomError(OWN_ERROR_TYPE, text, context), loc=loc, input=got)
    return ValidationError.from_exception_data("pipeline", [details])


def combine(errors: Iterable[ValidationError], *, at: KeyPath = ()) -> ValidationError:
    """Several errors as one, further down in what is being validated."""
    items = (item for error in errors for item in error.errors(include_url=False))
    return validation_error_from_items(items, at)


def validation_error_from_items(items: Iterable[ErrorDetails], at: KeyPath = ()) -> ValidationError:
    """The error that holds these items, further down in what is being validated."""
    details = []
    for item in items:
        context = {"message": item["msg"], **item.get("ctx", {})}
        kind = PydanticCustomError(item["type"], "{message}", context)
        details.append(InitErrorDetails(type=kind, loc=(*at, *item["loc"]), input=item["input"]))
    return ValidationError.from_exception_data("pipeline", details)


def error_message_parts(item: ErrorDetails, got: str) -> MessageParts:
    """What an error says of a value that a message shows as `got`."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == OWN_ERROR_TYPE and "problem" in context:
        return context["problem"], context["allowed"], context["suggestion"]
    if kind == OWN_ERROR_TYPE or kind in EXPECTED_BY_ERROR_TYPE:
        wanted = context["wanted"] if kind == OWN_ERROR_TYPE else EXPECTED_BY_ERROR_TYPE[kind]
        return f"expected {wanted}, got {got}", context.get("allowed"), None
    if kind in BOUND_ERROR_TYPES:
        words, key = BOUND_ERROR_TYPES[kind]
        bound = context[key]
        shown = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
        return f"must be {words} {shown}, got {got}", None, None
    return item["msg"][:1].lower() + item["msg"][1:], None, None


def format_option_errors(error: ValidationError, at: str, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Pydantic's errors about the options of a choice at a path: `hooks[0].topk.density: must be …`. The
    errors' own paths begin with the choice's name; `models` has the options of each choice.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = item["loc"]
        parts = error_message_parts(item, describe_value(item["input"]))
        if item["type"] == "extra_forbidden":
            owner, key = str(path[-2]), str(path[-1])
            parts = unknown_option_parts(owner, key, list(models[owner].model_fields))
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        lines.append(f"{at}{where}: {format_message(*parts)}")
    return lines
