"""Parts of a pipeline validated by their models: which errors are raised anew, at which place of the file."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ddprun.config.faults import suggest
from ddprun.options import problem
from ddprun_hooks.config.messages import unknown_option

Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model],
    value: Any,
    *path: str | int,
    owner: str = "",
    context: dict[str, Any] | None = None,
) -> Model:
    """Validate a part of the file, `path` below the value that is being validated.

    Args:
        model: what the part must be.
        value: its plain data.
        path: prefixed to the location of each error.
        owner: the name of a choice whose options these are; messages call its unknown keys options.
        context: what the model's own validators ask for.
    """
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise with_known_keys(error, model, path, owner) from None


def with_known_keys(
    error: ValidationError, model: type[BaseModel], path: Sequence[str | int] = (), owner: str = ""
) -> ValidationError:
    """The same errors below `path`; those about unknown keys say which keys there are."""
    details = located(error, *path)
    for item, detail in zip(error.errors(include_url=False), details, strict=True):
        location = item["loc"]
        if item["type"] == "extra_forbidden":
            detail["type"] = _unknown_key(str(location[-1]), _model_at(model, location[:-1]), owner)
        elif item["type"] == "missing" and len(location) == 1 and owner:
            hint = f"write {owner}: {{{location[0]}: …}}"
            detail["type"] = problem(f'{owner} needs "{location[0]}"', hint)
    return ValidationError.from_exception_data("pipeline", details)


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


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """The model that a path of nested sections leads to."""
    for segment in location:
        section = section_of(model.model_fields.get(str(segment)))
        if section is None:
            break
        model = section
    return model


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that is a section of the file; None for any other field."""
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _unknown_key(key: str, model: type[BaseModel], owner: str) -> PydanticCustomError:
    known = list(model.model_fields)
    text, allowed, near = unknown_option(owner, key, known)
    if owner and not known:
        return problem(text, allowed, near, where="key")
    name, colon, value = key.partition(":")
    if colon and suggest(name, known) == name:
        return problem(f'unknown key "{key}"', f'put a space after the colon: "{name}: {value}"', where="key")
    if not owner:
        text = f'unknown key "{key}"'
        sections = ((name, section_of(field)) for name, field in model.model_fields.items())
        inside = (f"{name}.{key}" for name, section in sections if section and key in section.model_fields)
        near = near or next(inside, None)
    if hint := getattr(model, "elsewhere", {}).get(key):
        return problem(text, hint, where="key")
    return problem(text, allowed, near, where="key")
