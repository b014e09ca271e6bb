"""No word of the validation library reaches the reader."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ddprun import options
from ddprun.config import schema, torch_signatures
from ddprun.config.choices import CHOICE_KINDS, HOOK_VALIDATION_CONTEXT, parse_choice
from ddprun_hooks.config.messages import BOUND_ERROR_TYPES, EXPECTED_BY_ERROR_TYPE, OWN_ERROR_TYPE
from ddprun_hooks.config.options import HookOptions

WORDED_ERROR_TYPES = {
    *(OWN_ERROR_TYPE, *EXPECTED_BY_ERROR_TYPE, *BOUND_ERROR_TYPES),
    *("too_short", "too_long", "literal_error", "missing"),
    *("string_pattern_mismatch", "string_too_short", "string_too_long"),
}
"""Types of pydantic errors that `config.errors` words."""

ODD: list[Any] = [
    None, True, 0, -1, 1, 7, 10**30, 0.5, 1.5, -1.5, math.nan, math.inf, -math.inf, "", "x", "a.b", "fp16",
    [], {}, ["x"], [1], [0], [1] * 50, [None], [[]], {"x": 1}, {"fp16": None}, {"train": {}},
    {"train": {"steps": 0}}, {"a": 1, "b": 2}, b"x", object(),
]  # fmt: skip


def models() -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    queue: list[type[BaseModel]] = [options.Options, HookOptions]
    while queue:
        model = queue.pop()
        found.append(model)
        queue += model.__subclasses__()
    return found


def test_every_error_has_a_sentence() -> None:
    """Each type of error that any value of any key can raise is told in words of our own."""
    for kind in ("optimizer", "schedule", "loss"):
        for name in torch_signatures.offered_class_names(kind):
            torch_signatures.torch_options_model(kind, name)
    seen: set[str] = set()
    for model in models():
        for odd in ODD:
            seen |= errors_of(model.model_validate, odd)
            for key in [*model.model_fields, "unknown"]:
                validate = functools.partial(model.model_validate, context=HOOK_VALIDATION_CONTEXT)
                seen |= errors_of(validate, {key: odd})
    assert schema.Pipeline in models()
    assert len(seen) > 10
    # `extra_forbidden` becomes a sentence of its own on the way, see `errors.add_key_hints`.
    assert seen - {"extra_forbidden"} <= WORDED_ERROR_TYPES


@pytest.mark.parametrize("kind", CHOICE_KINDS)
def test_any_value_for_a_choice_is_told(kind: str) -> None:
    """A choice refuses odd values by errors that have sentences, and by nothing else; all but names."""
    errors = [errors_of(lambda value: parse_choice(kind, value), odd) for odd in ODD]
    taken = [odd for odd, found in zip(ODD, errors, strict=True) if not found]
    dotted = ["a.b"] if CHOICE_KINDS[kind].dotted_description else []
    assert taken == [*dotted, *(["fp16", {"fp16": None}] if kind == "hook" else [])]
    assert set().union(*errors) <= WORDED_ERROR_TYPES


def errors_of(validate: Callable[[Any], Any], value: Any) -> set[str]:
    """Types of the errors that validating a value raises."""
    try:
        validate(value)
    except ValidationError as error:
        return {item["type"] for item in error.errors()}
    return set()
