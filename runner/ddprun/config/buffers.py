"""`buffers`: when ranks make their buffers equal, and how."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ddprun.config.faults import suggest
from ddprun.config.fields import Validated
from ddprun.config.options import NoOptions, Options, PositiveInt
from ddprun.config.problems import mismatch, problem, validate, within

Reduce = Literal["broadcast", "mean"]
_ALLOWED = "allowed: auto, every_forward, before_evaluate, never, {every: N}"


class Reducing(Options):
    """How buffers are made equal, for a time that goes by a name."""

    reduce: Reduce = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean."""


class Period(Options):
    """Buffers are made equal after every n-th step."""

    every: PositiveInt
    """Steps from one time to the next."""

    reduce: Reduce = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean."""


@dataclass(frozen=True)
class Buffers:
    """When ranks make their buffers equal, such as BatchNorm's running statistics, and how."""

    when: Literal["auto", "every_forward", "every", "before_evaluate", "never"] = "auto"
    """`auto` finds out by value what changes; `every` is after every n-th step. All but `never` also make
    them equal before evaluate and save."""

    every: int | None = None
    """Steps, with `when: every` only."""

    reduce: Reduce = "broadcast"
    """`broadcast`: all ranks take those of rank 0. `mean`: all ranks take their mean."""

    def plain(self) -> Any:
        """As a file would hold it."""
        if self.when == "every":
            return {"every": self.every, "reduce": self.reduce}
        return self.when if self.reduce == "broadcast" else {self.when: {"reduce": self.reduce}}


TIMES: dict[str, type[NoOptions] | type[Reducing]] = {
    "auto": Reducing,
    "every_forward": Reducing,
    "before_evaluate": Reducing,
    "never": NoOptions,
}
"""Times that go by a name, and what each takes. `{every: N, reduce: …}` is the other form."""


def read_buffers(value: Any) -> Buffers:
    """Read a time's name, `{name: {reduce: …}}` or `{every: N, reduce: …}`.

    Raises:
        PydanticCustomError, pydantic.ValidationError: what is wrong, for `sentences` to tell.
    """
    if isinstance(value, Buffers):
        return value
    if isinstance(value, str):
        return _named(value, None)
    if not isinstance(value, dict) or not value:
        raise mismatch("a time for buffers", _ALLOWED)
    times = [key for key in value if key in TIMES or key == "every"]
    if len(times) > 1:
        text = f'expected one time for buffers, got "{times[0]}" and "{times[1]}"'
        raise within(problem(text, "keep one", where="key"), times[1])
    if times == ["every"]:
        period = validate(Period, value)
        return Buffers("every", period.every, period.reduce)
    name, *others = value
    if others and times:
        stray = next(key for key in value if key not in TIMES)
        hint = f'indent reduce further, under "{times[0]}"' if stray == "reduce" else _ALLOWED
        raise within(problem(f'"{stray}" cannot stand beside "{times[0]}"', hint, where="key"), stray)
    return _named(name, value[name], name)


def _named(name: str, options: Any, *path: str) -> Buffers:
    """The time of that name; `path` is the name if it stands as a key."""
    where: Literal["key", "value"] = "key" if path else "value"
    if name in ("every", "reduce"):
        hint = (
            "write {every: N}"
            if name == "every"
            else "write {auto: {reduce: mean}} or {every: N, reduce: mean}"
        )
        raise within(problem(f'"{name}" alone does not say when buffers are sent', hint, where=where), *path)
    if name not in TIMES:
        text = f'unknown time "{name}" for buffers'
        raise within(problem(text, _ALLOWED, suggest(name, [*TIMES, "every"]), where), *path)
    read = validate(TIMES[name], {} if options is None else options, *path, owner=name)
    when: Any = name
    return Buffers(when, None, read.reduce if isinstance(read, Reducing) else "broadcast")


BuffersField = Annotated[Buffers, Validated(read_buffers, "buffers")]
