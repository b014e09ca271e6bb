"""What every part of a pipeline file is made of: the base of all options, their types and their errors.

Sync policies, trackers and cluster backends describe their options with this, here and in other packages
(`docs/extending.md`). A validator raises `problem(…)`, with `at="key"` if it is about one key.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from ddprun_hooks.config.messages import listing, suggest

OWN = "ddprun"
"""Type of an error that brings its own sentence; every other type is pydantic's."""

KeyPath = tuple[str | int, ...]
"""Keys and list indices, such as `("stages", 2, "train", "steps")`."""


class Options(BaseModel):
    """Base of every part of a pipeline: strict, frozen, nothing unknown, finite numbers only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that are likely looked for here and stand elsewhere, and what to do about each."""


class NoOptions(Options):
    """Base of everything that takes no options."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Sizes = Annotated[tuple[PositiveInt, ...], Field(strict=False)]
"""A list of sizes, each at least 1."""

Share = Annotated[float, Field(gt=0, lt=1)]

FORMS: dict[str, str] = {}
"""What `matching` says of each pattern."""


def matching(pattern: str, words: str) -> Any:
    """For `Annotated[str, …]`: a string of this form; `words` say in a message which one it is."""
    FORMS[pattern] = words
    return Field(pattern=pattern)


@dataclass(frozen=True)
class Validated:
    """For `Annotated[…]`: a type that a function reads, which raises `problem`, `expected` or `unknown`."""

    read: Callable[[Any], Any]
    schema: str | dict[str, Any]
    """Its JSON Schema, or the name of a definition in that of the pipeline."""

    allowed: Callable[[], Iterable[str]] | None = None
    """What a message lists where the key is missing."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"definition": self.schema} if isinstance(self.schema, str) else self.schema


def problem(
    text: str,
    allowed: str | None = None,
    suggestion: str | None = None,
    *,
    at: str | KeyPath = (),
    on_key: bool = False,
) -> ValidationError:
    """An error that says `text; allowed (did you mean suggestion?)`.

    Args:
        text: what is wrong.
        allowed: what is allowed, or what to do.
        suggestion: the word that was probably meant.
        at: where it is, below the value that is being validated.
        on_key: show it at the key there, not at the value.
    """
    context = {"problem": text, "allowed": allowed, "suggestion": suggestion, "on_key": on_key}
    return _error(PydanticCustomError(OWN, "{problem}", context), at)


def expected(wanted: str, allowed: str | None = None, *, at: str | KeyPath = ()) -> ValidationError:
    """An error that says `expected …, got …`; what was got is shown as the file has it."""
    context = {"wanted": wanted, "allowed": allowed}
    return _error(PydanticCustomError(OWN, "expected {wanted}", context), at)


def unknown(
    what: str, word: str, known: Iterable[str], *, at: str | KeyPath = (), on_key: bool = False
) -> ValidationError:
    """An error for a word that is not among the known ones."""
    known = list(known)
    text = f'unknown {what} "{word}"'
    return problem(text, listing(known), suggest(word, known), at=at, on_key=on_key)


def combine(errors: Iterable[ValidationError], *, at: KeyPath = ()) -> ValidationError:
    """Several errors as one, further down in what is being validated."""
    return repeat((item for error in errors for item in error.errors(include_url=False)), at)


def repeat(items: Iterable[ErrorDetails], at: KeyPath = ()) -> ValidationError:
    """The error that holds these items, further down in what is being validated."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError(
                item["type"], "{message}", {"message": item["msg"], **item.get("ctx", {})}
            ),
            loc=(*at, *item["loc"]),
            input=item["input"],
        )
        for item in items
    ]
    return ValidationError.from_exception_data("pipeline", details)


def _error(error: PydanticCustomError, at: str | KeyPath) -> ValidationError:
    place = (at,) if isinstance(at, str) else at
    return ValidationError.from_exception_data(
        "pipeline", [InitErrorDetails(type=error, loc=place, input=None)]
    )
