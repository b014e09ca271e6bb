"""What every part of a pipeline file is made of: the base of all options, and errors that name their place.

Sync policies, trackers and cluster backends describe their options with this, here and in other packages
(`docs/extending.md`). A validator raises `problem(…)`, `within(problem(…), "key")` if it is about one key.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ddprun_hooks.config.messages import listing, suggest

OWN = "ddprun"
"""Type of an error that brings its own sentence; every other type is pydantic's."""

Where = Literal["value", "key"]


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


def problem(
    text: str, allowed: str | None = None, suggestion: str | None = None, where: Where = "value"
) -> PydanticCustomError:
    """An error that says `text; allowed (did you mean suggestion?)` at the value or at its key."""
    context = {"problem": text, "allowed": allowed, "suggestion": suggestion, "where": where}
    return PydanticCustomError(OWN, "{problem}", context)


def mismatch(wanted: str, allowed: str | None = None) -> PydanticCustomError:
    """An error that says `expected …, got …`; what was got is shown as the file has it."""
    return PydanticCustomError(OWN, "expected {wanted}", {"wanted": wanted, "allowed": allowed})


def unknown(what: str, word: str, known: Iterable[str], where: Where = "value") -> PydanticCustomError:
    """An error for a word that is not among the known ones."""
    known = list(known)
    return problem(f'unknown {what} "{word}"', listing(known), suggest(word, known), where)


def within(error: PydanticCustomError, *path: str | int) -> ValidationError:
    """The error one or more steps below the value that is being validated."""
    return all_within([(error, path)])


def all_within(errors: Iterable[tuple[PydanticCustomError, Sequence[str | int]]]) -> ValidationError:
    """Several errors, each some steps below the value that is being validated."""
    details = [InitErrorDetails(type=error, loc=tuple(path), input=None) for error, path in errors]
    return ValidationError.from_exception_data("pipeline", details)
