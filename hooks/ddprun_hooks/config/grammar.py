"""Which stacks of hooks make sense: codecs first, then at most one reducer (torch-free)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ddprun_hooks.config.messages import allowed_values
from ddprun_hooks.config.options import BUILT_IN_HOOKS, Role, parse_hook_spec

CAST_HOOKS = frozenset({"fp16", "bf16"})
QUANTIZING_HOOKS = frozenset({"int8", "int4", "int2", "fp8", "auto_bits"})
ALLOWED_WITHIN = CAST_HOOKS | {"shared_memory"}  # hooks that "within" takes
HIERARCHICAL_LEVELS = ("within", "across")  # of `hierarchical`: inside a host, and between hosts


@dataclass(frozen=True)
class StackEntry:
    """One hook of a stack, as far as the grammar looks at it."""

    name: str
    role: Role | None  # None for a dotted or installed hook, known once it is imported
    # The stacks of `hierarchical`, by level.
    inner_stacks: Mapping[str, "tuple[StackEntry, ...]"] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sends_fixed_dtype(self) -> bool:
        """It sends the same type, whatever it gets."""
        return self.name in QUANTIZING_HOOKS or (self.name == "topk" and bool(self.options.get("values")))


@dataclass(frozen=True)
class StackProblem:
    """A hook that is out of place."""

    path: tuple[int | str, ...]  # from the stack on, such as `(1, "hierarchical", "across", 0)`
    text: str  # what is wrong, and what to do about it
    severity: Literal["error", "warning"] = "error"  # a warning where the stack works all the same


def make_stack_entry(name: str, options: Mapping[str, Any] | None = None) -> StackEntry:
    """The hook of a name and options, without importing anything."""
    built_in = BUILT_IN_HOOKS.get(name)
    inner_stacks: dict[str, tuple[StackEntry, ...]] = {}
    if name == "hierarchical":
        inner_stacks = {
            level: tuple(make_stack_entry(*parse_hook_spec(spec)) for spec in (options or {}).get(level, ()))
            for level in HIERARCHICAL_LEVELS
        }
    role = built_in.role_for_options(options or {}) if built_in else None
    return StackEntry(name, role, inner_stacks, options or {})


def stack_problems(stack: Sequence[StackEntry]) -> list[StackProblem]:
    """Everything that is out of place in a stack; a hook whose role is not known is taken for a codec."""
    return list(_problems(stack, (), ()))


def _problems(
    stack: Sequence[StackEntry], path: tuple[int | str, ...], previous_names: tuple[str, ...], level: str = ""
) -> Iterator[StackProblem]:
    """`previous_names`: hooks before this stack on the payload's way; `level`: its own in `hierarchical`."""
    reducer: str | None = None
    for index, hook in enumerate(stack):
        here, name = (*path, index), hook.name
        casts = [other for other in previous_names if other in CAST_HOOKS]
        if reason := _why_not_allowed_in_level(level, hook):
            yield StackProblem(here, f'"{name}" is not allowed in "{level}"{reason}')
            continue
        if hook.role not in (None, *get_args(Role)):
            text = f'the role of "{name}" is {hook.role!r}; {allowed_values(get_args(Role))}'
            yield StackProblem(here, text)
        elif hook.role == "alone" and len(stack) > 1:
            yield StackProblem(
                here, f'"{name}" must be alone in its stack; remove the other hooks or remove "{name}"'
            )
        elif name in previous_names and hook.role == "codec":
            why = "the second has no effect; remove one"
            if name not in BUILT_IN_HOOKS:
                why = "hooks keep their state by name; remove or rename one"
            yield StackProblem(here, f'"{name}" is in this stack twice; {why}')
        elif name in CAST_HOOKS and casts:
            yield StackProblem(here, f'"{name}" comes after "{casts[0]}": one cast is enough; remove one')
        elif reducer is not None:
            which = 'which with "accumulate"' if reducer in CAST_HOOKS else "which"
            text = f'"{name}" comes after "{reducer}", {which} ends the stack: a stack is codecs first, '
            yield StackProblem(here, f"{text}then at most one reducer; move or remove one of the two")
        elif hook.sends_fixed_dtype and casts:
            text = f'"{casts[0]}" saves nothing before "{name}", which sends its own type; remove the cast'
            yield StackProblem(here, text, "warning")
        elif name == "topk" and hook.options.get("decay", 1) != 1 and "powersgd" in previous_names:
            text = '"decay" has no effect after "powersgd", which keeps what is not sent; remove it'
            yield StackProblem((*here, name, "decay"), text, "warning")
        for inner_level, hooks in hook.inner_stacks.items():
            yield from _problems(hooks, (*here, name, inner_level), previous_names, inner_level)
        if hook.role == "reducer" and reducer is None:
            reducer = name
        previous_names = (*previous_names, name)


def _why_not_allowed_in_level(level: str, hook: StackEntry) -> str | None:
    """Why a hook is not allowed in a level of `hierarchical`; None if it is."""
    name = hook.name
    if level == "within" and name not in ALLOWED_WITHIN:
        hint = "remove it" if name in ("hierarchical", "noop") else 'move it to "across"'
        return f", which takes fp16, bf16 and shared_memory only; {hint}"
    if level == "within" and name in CAST_HOOKS and hook.role == "reducer":
        return ' with "accumulate": inside a host, 16-bit sums are computed in fp32 anyway; remove it'
    if level == "across" and name == "hierarchical":
        return ": there are only two levels, inside hosts and between them; remove it"
    if level == "across" and hook.role == "alone":
        return ": it must be alone in the whole stack; remove it"
    if level == "across" and name == "shared_memory":
        return ': ranks of different hosts share no memory; move it to "within"'
    return None
