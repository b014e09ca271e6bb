"""Types read from torch's annotations, as far as a file can hold their values."""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ddprun.options import mismatch, problem, unknown, within

_SCALARS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string"}


@dataclass(frozen=True)
class ParamType:
    """What a parameter accepts. Nothing set at all: anything."""

    scalars: tuple[str, ...] = ()
    """Of `float`, `int`, `bool`, `str`, `null`."""

    literals: tuple[str, ...] = ()
    items: "tuple[ParamType, ...] | None" = None
    """A list: one type for each item, or one type for all of them if `fixed` is false."""

    fixed: bool = False
    tensor: bool = False
    """The list becomes a tensor."""

    writable: bool = True
    """False: only Python objects (functions) fit, so a file cannot name it."""

    @property
    def anything(self) -> bool:
        return self.writable and not (self.scalars or self.literals or self.items is not None)

    def words(self) -> str:
        """The type as a reader knows it: `a number or null`."""
        if self.anything:
            return "anything"
        said = [f'"{literal}"' for literal in self.literals]
        said += [_SCALARS[name] for name in self.scalars if name != "null"]
        if self.items is not None:
            inner = " and ".join(item.words() for item in self.items) if not self.fixed else ""
            said.append(f"a list of {len(self.items)} values" if self.fixed else f"a list ({inner} each)")
        if "null" in self.scalars:
            said.append("null")
        return " or ".join(said)

    def check(self, value: Any) -> Any:
        """The value, lists as the Python type that torch expects; raises a problem if it does not fit."""
        if self.anything or (value is None and "null" in self.scalars):
            return value
        if isinstance(value, (list, tuple)) and self.items is not None:
            return self._check_list(value)
        if isinstance(value, str) and value in self.literals:
            return value
        name = type(value).__name__
        if name not in self.scalars and not (name == "int" and "float" in self.scalars):
            if isinstance(value, str) and self.literals:
                raise unknown("value", value, self.literals)
            raise mismatch(self.words())
        if isinstance(value, float) and not math.isfinite(value):
            raise mismatch("a finite number")
        return value

    def _check_list(self, value: "list[Any] | tuple[Any, ...]") -> Any:
        assert self.items is not None
        if self.fixed and len(value) != len(self.items):
            raise problem(f"expected a list of {len(self.items)} values, got a list of {len(value)}")
        checked = []
        for index, item in enumerate(value):
            kind = self.items[index] if self.fixed else self.items[0]
            try:
                checked.append(kind.check(item))
            except PydanticCustomError as error:
                raise within(error, index) from None
        return tuple(checked) if self.fixed else checked

    def json_schema(self) -> dict[str, Any]:
        """The same as JSON Schema."""
        if self.anything:
            return {}
        names = {"float": "number", "int": "integer", "bool": "boolean", "str": "string", "null": "null"}
        options: list[dict[str, Any]] = [{"type": names[name]} for name in self.scalars]
        if self.literals:
            options.append({"enum": list(self.literals)})
        if self.items is not None:
            items, count = [item.json_schema() for item in self.items], len(self.items)
            fixed = {"prefixItems": items, "minItems": count, "maxItems": count}
            options.append({"type": "array", **(fixed if self.fixed else {"items": items[0]})})
        return options[0] if len(options) == 1 else {"anyOf": options}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let a pydantic model check a field by this type."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe such a field in JSON Schema."""
        return self.json_schema()
