"""Which stacks of hooks make sense: codecs first, then at most one reducer (torch-free)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddprun_hooks.config.options import BUILT_IN, Role, parse_spec

CASTS = frozenset({"fp16", "bf16"})
CODES = {"int8": 8, "int4": 4, "fp8": 8}  # bits of a code
WITHIN = CASTS | {"shared_memory"}
LEGS = ("within", "across")


@dataclass(frozen=True)
class Entry:
    """One hook of a stack, as far as the grammar looks at it."""

    name: str
    role: Role | None  # None for a dotted or installed hook, known once it is imported
    legs: Mapping[str, "tuple[Entry, ...]"] = field(default_factory=dict)  # the stacks of `hierarchical`


@dataclass(frozen=True)
class Problem:
    """A hook that is out of place."""

    path: tuple[int | str, ...]  # from the stack on, such as `(1, "hierarchical", "across", 0)`
    text: str  # what is wrong, and what to do about it
    severity: Literal["error", "warning"] = "error"  # a warning where the stack works all the same


def entry(name: str, options: Mapping[str, Any] | None = None) -> Entry:
    """The hook of a name and options, without importing anything."""
    built_in = BUILT_IN.get(name)
    legs: dict[str, tuple[Entry, ...]] = {}
    if name == "hierarchical":
        legs = {leg: tuple(entry(*parse_spec(spec)) for spec in (options or {}).get(leg, ())) for leg in LEGS}
    return Entry(name, built_in.role_with(options or {}) if built_in else None, legs)


def problems(stack: Sequence[Entry]) -> list[Problem]:
    """Everything that is out of place in a stack; a hook whose role is not known is taken for a codec."""
    return list(_problems(stack, (), ()))


def _problems(
    stack: Sequence[Entry], path: tuple[int | str, ...], before: tuple[str, ...], leg: str = ""
) -> Iterator[Problem]:
    """`before`: the codecs that the payload has passed on its way to this stack."""
    reducer: str | None = None
    for index, hook in enumerate(stack):
        here, name = (*path, index), hook.name
        casts = [other for other in before if other in CASTS]
        if wrong := _wrong_leg(leg, hook):
            yield Problem(here, f'"{name}" is not allowed in "{leg}"{wrong}')
            continue
        if hook.role == "alone" and len(stack) > 1:
            yield Problem(
                here, f'"{name}" must be alone in its stack; remove the other hooks or remove "{name}"'
            )
        elif name in before and hook.role == "codec":
            yield Problem(here, f'"{name}" is in this stack twice; the second has no effect; remove one')
        elif name in CASTS and casts:
            yield Problem(here, f'"{name}" comes after "{casts[0]}": one cast is enough; remove one')
        elif reducer in CASTS:
            hint = f'move "{name}" before it'
            if name == "hierarchical":
                hint = f'move "{reducer}" into "across" of "hierarchical"'
            elif hook.role == "reducer":
                hint = 'remove one of the two, or "accumulate"'
            yield Problem(
                here, f'"{name}" comes after "{reducer}", which with "accumulate" ends the stack; {hint}'
            )
        elif reducer is not None:
            yield Problem(
                here,
                f'"{name}" comes after "{reducer}", which ends the stack: '
                f'a stack is codecs first, then at most one reducer; move "{name}" before it',
            )
        elif name in CODES and casts:
            yield Problem(
                here,
                f'"{casts[0]}" saves nothing before "{name}", which sends {CODES[name]}-bit codes of '
                f'whatever it gets; remove "{casts[0]}"',
                "warning",
            )
        for below, hooks in hook.legs.items():
            yield from _problems(hooks, (*here, name, below), before, below)
        if hook.role == "reducer" and reducer is None:
            reducer = name
        before = (*before, name)


def _wrong_leg(leg: str, hook: Entry) -> str | None:
    """Why a hook is not allowed in a leg of `hierarchical`; None if it is."""
    name = hook.name
    if leg == "within" and name not in WITHIN:
        hint = "remove it" if name == "hierarchical" else 'move it to "across"'
        return f", which takes fp16, bf16 and shared_memory only; {hint}"
    if leg == "within" and name in CASTS and hook.role == "reducer":
        return ' with "accumulate": inside a host, sums of 16 bits are taken in fp32 as it is; remove it'
    if leg == "across" and name == "hierarchical":
        return ": there are two levels, inside hosts and between; remove it"
    if leg == "across" and name == "shared_memory":
        return ': ranks of different hosts share no memory; move it to "within"'
    return None
