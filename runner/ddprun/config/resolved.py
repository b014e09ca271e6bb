"""A pipeline as it will run: every default filled in, each value's origin in a comment."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from ddprun.config.choices import Choice
from ddprun.config.scalars import write
from ddprun.config.schema import OVERRIDABLE, Group, Pipeline, Stage, StepStage
from ddprun.config.secrets import Secrets
from ddprun.config.tree import KeyPath, Node, find, is_choice
from ddprun.sync.plan import Buffers


def plain(value: Any) -> Any:
    """The value as a file would hold it: mappings, lists and scalars, names in their canonical spelling."""
    if isinstance(value, (Choice, Buffers, Group)):
        return plain(value.plain())
    if isinstance(value, Stage):
        keys = _keys(value)
        return {value.name: {key: plain(getattr(value, key)) for key in keys}} if keys else value.name
    if isinstance(value, BaseModel):
        found = {key: getattr(value, key) for key in type(value).model_fields}
        # The key of an installed cluster backend is left out where the file does not have it.
        hidden = {key for key, field in type(value).model_fields.items() if field.exclude}
        return {key: plain(item) for key, item in found.items() if item is not None or key not in hidden}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _keys(stage: Stage) -> list[str]:
    """The keys of a stage that say something: what it does not override it takes from the pipeline."""
    keys = list(type(stage).model_fields)
    if not isinstance(stage, StepStage):
        return keys
    return [
        key
        for key in keys
        if (key in stage.model_fields_set if key in OVERRIDABLE else getattr(stage, key) is not None)
    ]


def digest(pipeline: Pipeline) -> str:
    """SHA-256 of everything the pipeline says, in hexadecimal; spelling, order and comments do not matter.

    Secrets do not count, so that nobody can guess at them by their hash. The environment has no say: it may
    differ between ranks.
    """
    text = json.dumps(Secrets({}).hidden(plain(pipeline)), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def resolved(pipeline: Pipeline, root: Node, secrets: Secrets) -> str:
    """The whole pipeline as YAML, which loads to the same pipeline unless it holds a secret as it is.

    Values' origins are looked up in `root`.
    """
    return "\n".join(_lines(secrets.hidden(plain(pipeline)), (), root)) + "\n"


def _lines(value: dict[str, Any] | list[Any], path: KeyPath, root: Node) -> list[str]:
    """A mapping or a list in lines. What holds nothing nested is on one line with its key or dash."""
    in_list = isinstance(value, list)
    lines: list[str] = []
    for key, item in enumerate(value) if isinstance(value, list) else value.items():
        head, at = "-" if in_list else f"{write(key)}:", (*path, key)
        holds_nested = isinstance(item, list) and any(isinstance(inner, (dict, list)) for inner in item)
        if not item or not (isinstance(item, dict) or holds_nested or (in_list and isinstance(item, list))):
            lines.append(f"{head} {flow(item)}{_origin(at, root)}")
            continue
        nested = [f"  {line}" for line in _lines(item, at, root)]
        if in_list and isinstance(item, dict):
            nested[0] = f"- {nested[0].lstrip()}"
        else:
            chosen = isinstance(item, dict) and is_choice(path)
            lines.append(head + (_origin(at, root) if chosen else ""))
        lines += nested
    return lines


def flow(value: Any) -> str:
    """Plain data as YAML on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write(key)}: {flow(item)}" for key, item in value.items()) + "}"
    return write(value)


def _origin(path: KeyPath, root: Node) -> str:
    """Comment that says where a value comes from."""
    found = find(root, path)
    exact = not found.missing
    bare_name = len(found.missing) == 1 and is_choice(path[:-1]) and isinstance(found.node.value, str)
    if not exact and not bare_name:
        return "  # default"
    place = found.key if exact and isinstance(found.node.value, dict) else found.node.place
    return f"  # line {place.line}" if place.source.order == 0 else f"  # {place.source.name}"
