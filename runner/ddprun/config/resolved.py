"""A pipeline as it will run: every default filled in, each value's origin in a comment."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from ddprun.config.choices import Choice
from ddprun.config.scalars import write
from ddprun.config.schema import OVERRIDABLE, Buffers, Pipeline, Stage, StepStage
from ddprun.config.secrets import Secrets
from ddprun.config.tree import KeyPath, Node, find, is_choice


def plain(value: Any) -> Any:
    """The value as a file would hold it: mappings, lists and scalars, names in their canonical spelling."""
    if isinstance(value, (Choice, Buffers)):
        return plain(value.plain())
    if isinstance(value, Stage):
        keys = _keys(value)
        return {value.name: {key: plain(getattr(value, key)) for key in keys}} if keys else value.name
    if isinstance(value, BaseModel):
        return {key: plain(getattr(value, key)) for key in type(value).model_fields}
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

    `root` tells where values come from.
    """
    lines: list[str] = []
    _write_mapping(lines, secrets.hidden(plain(pipeline)), (), "", root)
    return "\n".join(lines) + "\n"


def _write_mapping(lines: list[str], value: dict[str, Any], path: KeyPath, indent: str, root: Node) -> None:
    for key, item in value.items():
        _write_item(lines, f"{indent}{write(key)}:", item, (*path, key), indent + "  ", root)


def _write_item(lines: list[str], head: str, value: Any, path: KeyPath, indent: str, root: Node) -> None:
    """Write a value after its key or dash, on the same line if it holds nothing nested."""
    if isinstance(value, dict) and value:
        lines.append(head + (_origin(path, root) if is_choice(path[:-1]) else ""))
        _write_mapping(lines, value, path, indent, root)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        lines.append(head)
        for index, item in enumerate(value):
            _write_list_item(lines, item, (*path, index), indent, root)
    else:
        lines.append(f"{head} {_flow(value)}{_origin(path, root)}")


def _write_list_item(lines: list[str], item: Any, path: KeyPath, indent: str, root: Node) -> None:
    if isinstance(item, dict) and item:
        start = len(lines)
        _write_mapping(lines, item, path, indent + "  ", root)
        lines[start] = f"{indent}- {lines[start].lstrip()}"
    elif isinstance(item, list) and item:
        lines.append(f"{indent}-")
        for index, inner in enumerate(item):
            _write_list_item(lines, inner, (*path, index), indent + "  ", root)
    else:
        lines.append(f"{indent}- {_flow(item)}{_origin(path, root)}")


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{}"
    return write(value)


def _origin(path: KeyPath, root: Node) -> str:
    """Comment that says where a value comes from."""
    found = find(root, path)
    exact = not found.rest
    bare_name = len(found.rest) == 1 and is_choice(path[:-1]) and isinstance(found.node.value, str)
    if not exact and not bare_name:
        return "  # default"
    place = found.key if exact and isinstance(found.node.value, dict) else found.node.place
    return f"  # line {place.line}" if place.source.order == 0 else f"  # {place.source.name}"
