"""The wording of faults in options, the same for a pipeline file and for `register`.

Nothing here imports torch.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Sentence = tuple[str, str | None, str | None]
"""What is wrong, what is allowed, and what was probably meant."""

WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}
"""Pydantic's types of error that only say which type was wanted."""

BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Pydantic's types of error about a bound: its words, and where the error has it."""


def suggest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be, without regard to case; None if none is near."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def listing(words: Iterable[str]) -> str:
    """`allowed: a, b, c`, the one way in which every fault lists what is allowed."""
    return "allowed: " + ", ".join(words)


def sentence(problem: str, allowed: str | None = None, suggestion: str | None = None) -> str:
    """`what is wrong; what is allowed (did you mean "…"?)`."""
    text = f"{problem}; {allowed}" if allowed else problem
    return f'{text} (did you mean "{suggestion}"?)' if suggestion else text


def out_of_bounds(kind: str, context: Mapping[str, Any], got: str) -> str:
    """A number that is too large or too small; `kind` is one of `BOUNDS`."""
    words, key = BOUNDS[kind]
    bound = context[key]
    shown = int(bound) if isinstance(bound, float) and bound.is_integer() else bound
    return f"must be {words} {shown}, got {got}"


def unknown_option(owner: str, key: str, known: Sequence[str]) -> Sentence:
    """An option that `owner` does not have."""
    if not known:
        return f'{owner} takes no options, got "{key}"', "remove it", None
    return f'{owner} has no option "{key}"', listing(known), suggest(key, known)


def described(value: Any) -> str:
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


def located(error: ValidationError, *path: str | int) -> list[InitErrorDetails]:
    """The errors of a validation as ones that can be raised anew, `path` further down."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(
                item["type"], "{message}", {"message": item["msg"], **item.get("ctx", {})}
            ),
            loc=(*path, *item["loc"]),
            input=item["input"],
        )
        for item in error.errors(include_url=False)
    ]


def option_faults(error: ValidationError, at: str, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Pydantic's errors about options, each with its path: `hooks[0].topk.density: must be …`.

    Args:
        error: its paths begin with the name of a choice.
        at: the path of the choice.
        models: the options of each choice.
    """
    lines = []
    for item in error.errors(include_url=False):
        kind, path = item["type"], item["loc"]
        got, context = described(item["input"]), item.get("ctx", {})
        if kind == "extra_forbidden":
            known = list(models[str(path[-2])].model_fields)
            text = sentence(*unknown_option(str(path[-2]), str(path[-1]), known))
        elif kind in WANTED:
            text = f"expected {WANTED[kind]}, got {got}"
        elif kind in BOUNDS:
            text = out_of_bounds(kind, context, got)
        else:
            text = item["msg"]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        lines.append(f"{at}{where}: {text}")
    return lines
