"""Pydantic's errors in plain sentences, each at its place in the file."""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ddprun.config.choices import KINDS, names
from ddprun.config.faults import Fault, listing, suggest
from ddprun.config.patterns import WORDS
from ddprun.config.problems import TOLD
from ddprun.config.scalars import bool_hint, number_hint, write
from ddprun.config.tree import Found, KeyPath, Node, find, show
from ddprun_hooks.config.messages import BOUNDS, WANTED, out_of_bounds

Sentence = tuple[str, str | None, str | None]
"""Problem, allowed, suggestion."""

_REASONS = {
    ("ddp", "bucket_cap_mb"): "DDP's first bucket is 1 MiB and must not be larger than the others",
}


def faults(error: ValidationError, root: Node, redact: Callable[[str], str]) -> list[Fault]:
    """Every error of a validation as a fault of the file; mere consequences of another are left out.

    `redact` is given each value before it is cut to the length that a message shows.
    """
    told = []
    for item in error.errors(include_url=False):
        path: KeyPath = item["loc"]
        of_key = path[-1:] == ("[key]",)
        if of_key:
            path = path[:-1]
        found = find(root, path)
        if not found.broken and not _counts_faulty_items(item, found):
            told.append(_fault(item, path, found, redact, of_key=of_key))
    return told


def _counts_faulty_items(item: Any, found: Found) -> bool:
    """Pydantic finds a list too short if its items are faulty; those are told already."""
    return (
        item["type"] == "too_short"
        and isinstance(found.node.value, list)
        and not found.rest
        and (len(found.node.value) >= item["ctx"]["min_length"])
    )


def describe(node: Node | None, value: Any, redact: Callable[[str], str]) -> str:
    """A value as a message shows it, in the file's own words where there are any."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return (node.text if node and node.text else "nothing") if node else "null"
    if isinstance(value, str):
        shown = redact(value)
        shown = shown if len(shown) <= 40 else f"{shown[:38]}…"
        return f'"{shown}" (a string)'
    text = node.text if node and node.text else write(value)
    return f"{text} (a boolean)" if isinstance(value, bool) else text


def _fault(item: Any, path: KeyPath, found: Found, redact: Callable[[str], str], *, of_key: bool) -> Fault:
    """Of the value at a path, or of the last key in it, where keys are the user's own."""
    kind: str = item["type"]
    context: dict[str, Any] = item.get("ctx", {})
    exact = not found.rest
    node = found.node if exact else None
    value = found.node.data() if exact else item["input"]
    at_key = kind == "missing" or context.get("where") == "key"
    if of_key:
        node, value, at_key = None, path[-1], True
    if at_key and (exact or isinstance(found.node.value, dict) or found.node.value is None):
        place = found.key
    else:
        place = found.node.place
    problem, allowed, suggestion = _sentence(kind, item["msg"], context, path, node, value, redact)
    return place.fault(show(path), problem, allowed, suggestion)


def _sentence(
    kind: str,
    message: str,
    context: dict[str, Any],
    path: KeyPath,
    node: Node | None,
    value: Any,
    redact: Callable[[str], str],
) -> Sentence:
    if kind == TOLD and "problem" in context:
        return context["problem"], context["allowed"], context["suggestion"]
    if kind == TOLD:
        return _expected(context["wanted"], node, value, redact, context["allowed"])
    if kind in WANTED:
        return _expected(WANTED[kind], node, value, redact)
    if kind in _TELLERS:
        return _TELLERS[kind](context, path, describe(node, value, redact))
    return message[:1].lower() + message[1:], None, None


def _expected(
    wanted: str,
    node: Node | None,
    value: Any,
    redact: Callable[[str], str],
    allowed: str | None = None,
) -> Sentence:
    """`expected …, got …`, with a hint where the value almost is what was wanted."""
    hint = allowed
    text = node.text if node else None
    if text is not None and isinstance(value, str) and node:
        if "number" in wanted:
            hint = number_hint(text, quoted=node.quoted) or hint
        if "true or false" in wanted:
            hint = bool_hint(text, quoted=node.quoted) or hint
    elif wanted == "a whole number" and isinstance(value, float) and value.is_integer():
        hint = f"write {int(value)}"
    elif wanted == "a string" and text and value is not None:
        hint = f'quote it: "{text}"'
    if wanted == "a list" and value is not None and text:
        hint = f"write [{text}]"
    return f"expected {wanted}, got {describe(node, value, redact)}", hint, None


def _bound(kind: str) -> Callable[[dict[str, Any], KeyPath, str], Sentence]:
    def tell(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
        reason = _REASONS.get((str(path[-2]), str(path[-1]))) if len(path) > 1 else None
        return out_of_bounds(kind, context, got), reason, None

    return tell


def _items(words: str, key: str) -> Callable[[dict[str, Any], KeyPath, str], Sentence]:
    def tell(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
        count = context[key]
        plural = "" if count == 1 else "s"
        return f"must hold {words} {count} item{plural}, got {context['actual_length']}", None, None

    return tell


def _literal(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
    known = re.findall(r"'([^']*)'", context["expected"])
    word = got.removesuffix(" (a string)").strip('"')
    return f"unknown value {got.removesuffix(' (a string)')}", listing(known), suggest(word, known)


def _missing(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
    kind = KINDS.get(str(path[-1]))
    if kind is None:
        return "is required", None, None
    return "is required", listing([*names(kind), "or a dotted name such as package.module.name"]), None


def _pattern(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
    return (
        f"cannot be {got.removesuffix(' (a string)')}",
        WORDS.get(context["pattern"], context["pattern"]),
        None,
    )


def _too_long(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
    return f"is longer than {context['max_length']} characters", None, None


def _empty(context: dict[str, Any], path: KeyPath, got: str) -> Sentence:
    return "must not be empty", None, None


_TELLERS: dict[str, Callable[[dict[str, Any], KeyPath, str], Sentence]] = {
    **{kind: _bound(kind) for kind in BOUNDS},
    "too_short": _items("at least", "min_length"),
    "too_long": _items("at most", "max_length"),
    "literal_error": _literal,
    "missing": _missing,
    "string_pattern_mismatch": _pattern,
    "string_too_short": _empty,
    "string_too_long": _too_long,
}

MAPPED = frozenset(WANTED) | frozenset(_TELLERS) | {TOLD}
"""Every type of error that has a sentence of its own; a test holds this against what the schema can raise."""
