"""Pydantic's errors in plain sentences, each at its place in the file."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ddprun.config.choices import KINDS, names
from ddprun.config.faults import Fault, listing, suggest
from ddprun.config.patterns import WORDS
from ddprun.config.scalars import bool_hint, number_hint
from ddprun.config.tree import KeyPath, Nearest, Node, find, show
from ddprun.options import OWN
from ddprun_hooks.config.messages import BOUNDS, WANTED, Sentence, described, out_of_bounds

_REASONS: dict[KeyPath, str] = {
    ("ddp", "bucket_cap_mb"): "DDP's first bucket is 1 MiB and must not be larger than the others",
}
"""Of a bound, why it is one."""

MAPPED = frozenset(
    {
        *(OWN, *WANTED, *BOUNDS),
        *("too_short", "too_long", "literal_error", "missing"),
        *("string_pattern_mismatch", "string_too_short", "string_too_long"),
    }
)
"""Every type of error that has a sentence of its own; a test holds this against what the schema can raise."""


def faults(error: ValidationError, root: Node, redact: Callable[[str], str]) -> list[Fault]:
    """Every error of a validation as a fault of the file; mere consequences of another are left out.

    `redact` is given each value before it is cut to the length that a message shows.
    """
    made = []
    for item in error.errors(include_url=False):
        path: KeyPath = item["loc"]
        of_key = path[-1:] == ("[key]",)
        if of_key:
            path = path[:-1]
        found = find(root, path)
        if not found.broken and not _counts_faulty_items(item, found):
            made.append(_fault(item, path, found, redact, of_key=of_key))
    return made


def _counts_faulty_items(item: Any, found: Nearest) -> bool:
    """Pydantic finds a list too short if its items are faulty; those have faults of their own already."""
    return (
        item["type"] == "too_short"
        and isinstance(found.node.value, list)
        and not found.missing
        and len(found.node.value) >= item["ctx"]["min_length"]
    )


def _fault(item: Any, path: KeyPath, found: Nearest, redact: Callable[[str], str], *, of_key: bool) -> Fault:
    """Of the value at a path, or of the last key in it, where keys are the user's own."""
    exact = not found.missing
    node = found.node if exact and not of_key else None
    value = path[-1] if of_key else found.node.data() if exact else item["input"]
    at_key = of_key or item["type"] == "missing" or item.get("ctx", {}).get("where") == "key"
    if at_key and (exact or isinstance(found.node.value, dict) or found.node.value is None):
        place = found.key
    else:
        place = found.node.place
    return place.fault(show(path), *_sentence(item, path, node, value, redact))


def _sentence(
    item: Any, path: KeyPath, node: Node | None, value: Any, redact: Callable[[str], str]
) -> Sentence:
    """What is wrong with a value.

    Args:
        item: the error, of `ValidationError.errors`.
        path: of the value.
        node: of the value; None if the file does not have it.
        value: plain data.
        redact: takes secrets out of a text.
    """
    kind, context = item["type"], item.get("ctx", {})
    if kind == OWN and "problem" in context:
        return context["problem"], context["allowed"], context["suggestion"]
    got = _described(node, value, redact)
    word = got.removesuffix(" (a string)")
    if kind == OWN or kind in WANTED:
        wanted = context["wanted"] if kind == OWN else WANTED[kind]
        hint = _hint(wanted, node, value) or context.get("allowed")
        return f"expected {wanted}, got {got}", hint, None
    if kind in BOUNDS:
        return out_of_bounds(kind, context, got), _REASONS.get(path[-2:]), None
    match kind:
        case "too_short" | "too_long":
            key, bound = ("min_length", "at least") if kind == "too_short" else ("max_length", "at most")
            items = f"{context[key]} item{'' if context[key] == 1 else 's'}"
            return f"must hold {bound} {items}, got {context['actual_length']}", None, None
        case "literal_error":
            known = re.findall(r"'([^']*)'", context["expected"])
            return f"unknown value {word}", listing(known), suggest(word.strip('"'), known)
        case "missing":
            choice = KINDS.get(str(path[-1]))
            allowed = [*names(choice), "or a dotted name such as package.module.name"] if choice else None
            return "is required", listing(allowed) if allowed else None, None
        case "string_pattern_mismatch":
            return f"cannot be {word}", WORDS.get(context["pattern"], context["pattern"]), None
        case "string_too_short":
            return "must not be empty", None, None
        case "string_too_long":
            return f"is longer than {context['max_length']} characters", None, None
    message: str = item["msg"]
    return message[:1].lower() + message[1:], None, None


def _described(node: Node | None, value: Any, redact: Callable[[str], str]) -> str:
    """A value as a message shows it, in the file's own words where there are any."""
    if value is None and node:
        return node.text or "nothing"
    if isinstance(value, str):
        return described(redact(value))
    if node and node.text:
        return f"{node.text} (a boolean)" if isinstance(value, bool) else node.text
    return described(value)


def _hint(wanted: str, node: Node | None, value: Any) -> str | None:
    """What to write where the value almost is what was wanted."""
    if wanted == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    text = node.text if node else None
    if not node or not text or value is None:
        return None
    if wanted == "a string" and not isinstance(value, str):
        return f'quote it: "{text}"'
    if wanted == "a list":
        return f"write [{text}]"
    hint = None
    if isinstance(value, str) and "number" in wanted:
        hint = number_hint(text, quoted=node.quoted)
    if isinstance(value, str) and "true or false" in wanted:
        hint = bool_hint(text, quoted=node.quoted) or hint
    return hint
