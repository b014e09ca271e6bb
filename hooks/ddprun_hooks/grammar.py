"""Which stacks of hooks make sense: codecs first, then at most one reducer (torch-free)."""

from collections.abc import Sequence

from ddprun_hooks.options import BUILT_IN, Role


def role_of(name: str) -> Role | None:
    """Role of a built-in hook; None for a dotted or installed one, whose class tells only once imported."""
    options = BUILT_IN.get(name)
    return options.role if options else None


def faults(roles: Sequence[tuple[str, Role | None]]) -> list[tuple[int, str]]:
    """Check a stack given as (name, role) in order.

    Returns:
        (position in the stack, what is wrong and what is allowed), one for each fault; empty if the stack is
        fine. A hook whose role is not known yet (None) is taken for a codec.
    """
    found: list[tuple[int, str]] = []
    reducer: str | None = None
    seen: set[str] = set()
    for place, (name, role) in enumerate(roles):
        if role == "alone" and len(roles) > 1:
            found.append(
                (place, f'"{name}" stands alone in a stack; remove the other hooks or remove "{name}"')
            )
        elif reducer is not None:
            found.append(
                (
                    place,
                    f'"{name}" comes after "{reducer}", which ends the stack: '
                    f'a stack is codecs first, then at most one reducer; move "{name}" before it',
                )
            )
        elif name in seen and role == "codec":
            found.append(
                (place, f'"{name}" stands in this stack twice; the second has no effect; remove one')
            )
        if role == "reducer" and reducer is None:
            reducer = name
        seen.add(name)
    return found
