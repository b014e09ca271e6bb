"""What every part of a pipeline file is made of: the base of all options, their types and their errors.

Sync policies, trackers and cluster backends describe their options with this, here and in other packages
(`docs/dev/extending.md`). A validator raises `problem(…)`, with `at="key"` if it is about one key.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from ddprun_hooks.config.messages import KeyPath as KeyPath
from ddprun_hooks.config.messages import allowed_values, closest_match
from ddprun_hooks.config.messages import combine as combine
from ddprun_hooks.config.messages import expected as expected
from ddprun_hooks.config.messages import problem as problem


class Options(BaseModel):
    """Base class of every section of a pipeline: strict types, immutable, no unknown keys, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class NoOptions(Options):
    """Base of everything that takes no options."""


PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInts = Annotated[tuple[PositiveInt, ...], Field(strict=False)]  # A list of sizes, each at least 1
FractionFloat = Annotated[float, Field(gt=0, lt=1)]

PATTERN_DESCRIPTIONS: dict[str, str] = {}  # description of each pattern of `pattern_constraint`, for messages


def pattern_constraint(pattern: str, words: str) -> Any:
    """For `Annotated[str, …]`: a string that matches the pattern; messages show `words` instead of it."""
    PATTERN_DESCRIPTIONS[pattern] = words
    return Field(pattern=pattern)


@dataclass(frozen=True)
class CustomValidator:
    """For `Annotated[…]`: a type whose values a function checks and converts. The function raises `problem`,
    `expected` or `unknown_name_error`.
    """

    validate: Callable[[Any], Any]
    schema: Any = None
    """What a file may hold, for its JSON Schema: a type, by default the annotated one; a schema; or the name
    of a definition in that of the pipeline."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = None
        if not isinstance(self.schema, str | dict):
            written = handler.generate_schema(source if self.schema is None else self.schema)
        return core_schema.no_info_plain_validator_function(self.validate, json_schema_input_schema=written)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if isinstance(self.schema, str):
            return {"definition": self.schema}
        return self.schema if isinstance(self.schema, dict) else handler(schema)


def unknown_name_error(
    what: str, word: str, known: Iterable[str], *, at: str | KeyPath = (), on_key: bool = False
) -> ValidationError:
    """An error for a word that is not among the known ones."""
    known = list(known)
    text = f'unknown {what} "{word}"'
    return problem(text, allowed_values(known), closest_match(word, known), at=at, on_key=on_key)
