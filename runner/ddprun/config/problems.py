"""Faults on their way through pydantic: raised by validators, told by `sentences`."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ddprun.config.faults import listing, suggest
from ddprun_hooks.config.messages import unknown_option

TOLD = "ddprun"
"""Type of an error that brings its own sentence; every other type is pydantic's."""

Where = Literal["value", "key"]
Model = TypeVar("Model", bound=BaseModel)


def problem(
    text: str, allowed: str | None = None, suggestion: str | None = None, where: Where = "value"
) -> PydanticCustomError:
    """An error that says `text; allowed (did you mean suggestion?)` at the value or at its key."""
    context = {"problem": text, "allowed": allowed, "suggestion": suggestion, "where": where}
    return PydanticCustomError(TOLD, "{problem}", context)


def mismatch(wanted: str, allowed: str | None = None) -> PydanticCustomError:
    """An error that says `expected …, got …`; what was got is told from the file's own text."""
    return PydanticCustomError(TOLD, "expected {wanted}", {"wanted": wanted, "allowed": allowed})


def unknown(what: str, word: str, known: Iterable[str], where: Where = "value") -> PydanticCustomError:
    """An error for a word that is not among the known ones."""
    known = list(known)
    return problem(f'unknown {what} "{word}"', listing(known), suggest(word, known), where)


def within(error: PydanticCustomError, *path: str | int) -> ValidationError:
    """The error one or more steps below the value that is being validated."""
    return ValidationError.from_exception_data(
        "pipeline", [InitErrorDetails(type=error, loc=path, input=None)]
    )


def all_within(errors: Iterable[tuple[PydanticCustomError, str | int]]) -> ValidationError:
    """Several errors, each one step below the value that is being validated."""
    return all_below((error, (step,)) for error, step in errors)


def all_below(errors: Iterable[tuple[PydanticCustomError, Sequence[str | int]]]) -> ValidationError:
    """Several errors, each some steps below the value that is being validated."""
    details = [InitErrorDetails(type=error, loc=tuple(path), input=None) for error, path in errors]
    return ValidationError.from_exception_data("pipeline", details)


def validate(
    model: type[Model],
    value: Any,
    *path: str | int,
    owner: str = "",
    context: dict[str, Any] | None = None,
) -> Model:
    """Validate a part of the file that stands `path` below the value that is being validated.

    Args:
        model: what the part must be.
        value: its plain data.
        path: prefixed to the location of each error.
        owner: the name of a choice whose options these are; its unknown keys are told as options.
        context: what the model's own validators ask for.
    """
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise told(error, model, path, owner) from None


def located(error: ValidationError, *path: str | int) -> list[InitErrorDetails]:
    """Every error of a validation that was told already, `path` further down."""
    return [
        InitErrorDetails(
            type=_again(item),
            loc=(*path, *item["loc"]),
            input=item["input"],
        )
        for item in error.errors(include_url=False)
    ]


def told(
    error: ValidationError, model: type[BaseModel], path: Sequence[str | int] = (), owner: str = ""
) -> ValidationError:
    """The same errors below `path`, with those about unknown keys saying which keys there are."""
    details = []
    for item in error.errors(include_url=False):
        kind = item["type"]
        location = item["loc"]
        if kind == "extra_forbidden":
            custom = _unknown_key(str(location[-1]), _model_at(model, location[:-1]), owner)
        elif kind == "missing" and len(location) == 1 and owner:
            custom = problem(f'{owner} needs "{location[0]}"', f"write {owner}: {{{location[0]}: …}}")
        else:
            custom = _again(item)
        details.append(InitErrorDetails(type=custom, loc=(*path, *location), input=item["input"]))
    return ValidationError.from_exception_data("pipeline", details)


def _again(item: Any) -> PydanticCustomError:
    """An error of a finished validation as one that can be raised anew."""
    return PydanticCustomError(item["type"], "{message}", {"message": item["msg"], **item.get("ctx", {})})


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """The model that a path of nested sections leads to."""
    for segment in location:
        field = model.model_fields.get(str(segment))
        if (
            field is None
            or not isinstance(field.annotation, type)
            or not issubclass(field.annotation, BaseModel)
        ):
            break
        model = field.annotation
    return model


def _unknown_key(key: str, model: type[BaseModel], owner: str) -> PydanticCustomError:
    known = list(model.model_fields)
    if owner and not known:
        return problem(*unknown_option(owner, key, known), where="key")
    if ":" in key and suggest(key.partition(":")[0], known) == key.partition(":")[0]:
        name, _, value = key.partition(":")
        return problem(f'unknown key "{key}"', f'put a space after the colon: "{name}: {value}"', where="key")
    what, allowed, near = unknown_option(owner, key, known)
    if not owner:
        what, near = f'unknown key "{key}"', near or _in_a_section(key, model)
    if hint := getattr(model, "elsewhere", {}).get(key):
        return problem(what, hint, where="key")
    return problem(what, allowed, near, where="key")


def _in_a_section(key: str, model: type[BaseModel]) -> str | None:
    """The full path of a key that was written one level too high."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel) and key in section.model_fields:
            return f"{name}.{key}"
    return None
