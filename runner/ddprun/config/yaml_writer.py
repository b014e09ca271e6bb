"""A pipeline as YAML: as it will run, every default filled in, or only what was written."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel

from ddprun.config.choices import Choice
from ddprun.config.scalars import format_scalar
from ddprun.config.stages import OVERRIDABLE_KEYS, Stage, StepStage
from ddprun.config.tree import KeyPath, Node, find_nearest, is_choice_path
from ddprun.sync.plan import BufferSettings


def to_plain_data(value: Any) -> Any:
    """The value as a file would hold it: mappings, lists and scalars, names in their canonical spelling."""
    if isinstance(value, (Choice, BufferSettings)):
        return to_plain_data(value.to_plain_data())
    if isinstance(value, Stage):
        keys = _keys_to_show(value)
        return {value.name: {key: to_plain_data(getattr(value, key)) for key in keys}} if keys else value.name
    if isinstance(value, BaseModel):
        found = {key: getattr(value, key) for key in type(value).model_fields} | (value.model_extra or {})
        fields = type(value).model_fields.items()
        hidden = {key for key, field in fields if field.exclude and found[key] is None}
        return {key: to_plain_data(item) for key, item in found.items() if key not in hidden}
    if isinstance(value, dict):
        return {key: to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_data(item) for item in value]
    return value


def _keys_to_show(stage: Stage) -> list[str]:
    """The keys of a stage that say something: what it does not override it takes from the pipeline."""
    keys = list(type(stage).model_fields)
    if not isinstance(stage, StepStage):
        return keys
    return [
        key
        for key in keys
        if (key in stage.model_fields_set if key in OVERRIDABLE_KEYS else getattr(stage, key) is not None)
    ]


def resolved_yaml(data: dict[str, Any], root: Node) -> str:
    """A whole pipeline as YAML, each value's origin, from `root`, in a comment; it loads to the same, unless
    it holds a secret.
    """
    return "\n".join(_block_yaml_lines(data, (), partial(_origin_comment, root))) + "\n"


def written_yaml(root: Node) -> str:
    """The keys of a file and its overrides, without defaults; it loads to the same, so a password in a URL
    stays as it is written.
    """
    return "\n".join(_block_yaml_lines(root.data(), (), lambda _: "")) + "\n"


def _block_yaml_lines(
    value: dict[str, Any] | list[Any], path: KeyPath, comment: Callable[[KeyPath], str]
) -> list[str]:
    """A mapping or a list in lines. What holds nothing nested is on one line with its key or dash."""
    in_list = isinstance(value, list)
    lines: list[str] = []
    for key, item in enumerate(value) if isinstance(value, list) else value.items():
        head, at = "-" if in_list else f"{format_scalar(key)}:", (*path, key)
        holds_nested = isinstance(item, list) and any(isinstance(inner, (dict, list)) for inner in item)
        if not item or not (isinstance(item, dict) or holds_nested or (in_list and isinstance(item, list))):
            lines.append(f"{head} {flow_yaml(item)}{comment(at)}")
            continue
        nested = [f"  {line}" for line in _block_yaml_lines(item, at, comment)]
        if in_list and isinstance(item, dict):
            nested[0] = f"- {nested[0].lstrip()}"
        else:
            chosen = isinstance(item, dict) and is_choice_path(path)
            lines.append(head + (comment(at) if chosen else ""))
        lines += nested
    return lines


def flow_yaml(value: Any) -> str:
    """Plain data as YAML on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    if isinstance(value, dict):
        items = (f"{format_scalar(key)}: {flow_yaml(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    return format_scalar(value)


def _origin_comment(root: Node, path: KeyPath) -> str:
    found = find_nearest(root, path)
    missing = found.missing_path
    bare_name = len(missing) == 1 and is_choice_path(path[:-1]) and isinstance(found.node.value, str)
    if missing and not bare_name:
        return "  # default"
    place = found.key_place if isinstance(found.node.value, dict) else found.node.place
    return f"  # line {place.line}" if place.source.override_number == 0 else f"  # {place.source.name}"
