"""Types of keys that several parts of a pipeline share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, InitErrorDetails, ValidationError, core_schema

from ddprun.config.choices import Choice, OneOf
from ddprun.options import problem
from ddprun_hooks.config import grammar


def _check_stack(hooks: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Refuse stacks that make no sense, each hook that is out of place with its reason."""
    found = grammar.problems([grammar.entry(hook.name, hook.options) for hook in hooks])
    details = [
        InitErrorDetails(type=problem(wrong.text), loc=wrong.path, input=None)
        for wrong in found
        if wrong.severity == "error"
    ]
    if details:
        raise ValidationError.from_exception_data("hooks", details)
    return hooks


ModelChoice = Annotated[Choice, OneOf("model")]
LossChoice = Annotated[Choice, OneOf("loss")]
OptimizerChoice = Annotated[Choice, OneOf("optimizer")]
ScheduleChoice = Annotated[Choice, OneOf("schedule")]
SyncChoice = Annotated[Choice, OneOf("sync")]
MutateChoice = Annotated[Choice, OneOf("mutate")]
UpdateChoice = Annotated[Choice, OneOf("update")]
HookStack = Annotated[
    tuple[Annotated[Choice, OneOf("hook")], ...], Field(strict=False), AfterValidator(_check_stack)
]
Metrics = Annotated[tuple[Annotated[Choice, OneOf("metric")], ...], Field(strict=False)]

Trackers = Annotated[tuple[Annotated[Choice, OneOf("tracker")], ...], Field(strict=False)]


@dataclass(frozen=True)
class Validated:
    """Marks a type that a function of ours reads."""

    read: Callable[[Any], Any]
    schema: str | dict[str, Any]
    """Its JSON Schema, or the name of one of the definitions that `json_schema` writes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"definition": self.schema} if isinstance(self.schema, str) else self.schema
