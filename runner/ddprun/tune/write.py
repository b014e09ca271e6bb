"""The winner as a pipeline file: the user's own text with the changed keys, a comment at each."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddprun.config import LoadedPipeline, PipelineError, load
from ddprun.config.overrides import key_of, override_path
from ddprun.config.reader import MAX_BYTES
from ddprun.config.resolved import flow_yaml
from ddprun.config.scalars import format_scalar
from ddprun.config.tree import KeyPath, find_nearest, format_path, parse_path
from ddprun.run_files import replace_atomically


@dataclass(frozen=True, slots=True)
class Change:
    """A key with a new value, and what stands above it as a comment."""

    key: str  # as `--set` names it
    value: Any
    comment: str


def tuned_text(loaded: LoadedPipeline, changes: Sequence[Change], heading: Sequence[str]) -> str:
    """The file with these changes, its own comments kept where that is possible, else as `check --resolved`
    has it; with what `--set` has changed, unless it is a secret. `heading`: comment lines at the top.
    """
    kept = [text for text in loaded.overrides if loaded.secrets.redact(text) == text]
    paths = [override_path(loaded.root, text) for text in kept]
    by_user = [
        Change(format_path(path), find_nearest(loaded.root, path).node.data(), "by --set") for path in paths
    ]
    overrides = [f"{one.key}={flow_yaml(one.value)}" for one in changes]
    wanted = load(loaded.path, (*kept, *overrides), loaded.folder)
    head = "".join(f"# {line}".rstrip() + "\n" for line in heading)
    with open(loaded.path, "rb") as file:
        original = file.read(MAX_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    try:
        text = head + _apply_changes(original, [*by_user, *changes])
        if _is_equivalent(text, wanted):
            return text
    except _CannotEditError:
        pass
    notes = "".join(f"# {one.key}: {one.comment}\n" for one in changes)
    return head + notes + wanted.resolved_yaml()


def secret_override_keys(loaded: LoadedPipeline) -> list[str]:
    """Keys that `--set` has changed and that are not written to a file, for they hold secrets."""
    return [key_of(text) for text in loaded.overrides if loaded.secrets.redact(text) != text]


def save(text: str, path: Path, permissions_from: Path) -> None:
    """Write a file whole or not at all; others may read it if they may read `permissions_from`."""
    with replace_atomically(path.parent, path.name) as file:
        os.fchmod(file.fileno(), os.stat(permissions_from).st_mode & 0o666)
        file.write(text.encode())


def _is_equivalent(text: str, wanted: LoadedPipeline) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / wanted.path.name
        file.write_text(text, encoding="utf-8")
        try:
            found = load(file, (), wanted.folder)
        except PipelineError:
            return False
    return {**found.as_dict(), "name": ""} == {**wanted.as_dict(), "name": ""}


class _CannotEditError(Exception):
    """The text is laid out in a way that is not edited in place."""


_Edit = tuple[int, int, str]  # start, end, and what takes the place of the text between them


def _apply_changes(text: str, changes: Sequence[Change]) -> str:
    """The text with the changes applied one after the other, each with a comment line above."""
    for change in changes:
        path = tuple(segment for segment, _ in parse_path(change.key))
        for start, end, replacement in sorted(_edits(text, path, change), reverse=True):
            text = text[:start] + replacement + text[end:]
    return text


def _edits(text: str, path: KeyPath, change: Change) -> list[_Edit]:
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _CannotEditError from error
    node, parent_key = root, None
    for depth, segment in enumerate(path):
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == segment), None)
            if pair is None:
                value = change.value
                for key in reversed(path[depth + 1 :]):
                    if not isinstance(key, str):
                        raise _CannotEditError
                    value = {key: value}
                return _insert_key(
                    text, node, f"{format_scalar(str(segment))}: {flow_yaml(value)}", change.comment
                )
            parent_key, node = pair
        elif isinstance(node, yaml.SequenceNode) and isinstance(segment, int) and segment < len(node.value):
            parent_key, node = None, node.value[segment]
        else:
            raise _CannotEditError
    if parent_key is None:
        raise _CannotEditError
    start, end = parent_key.end_mark.index, _value_end(node)
    return [
        (start, end, f": {flow_yaml(change.value)}"),
        _insert_comment(text, parent_key.start_mark.index, change.comment),
    ]


def _value_end(node: Any) -> int:
    """Where a value's last item ends: a block's end mark lies behind comments that are not its own."""
    end: int = node.end_mark.index
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        end = _value_end(last[1] if isinstance(last, tuple) else last)
    return end


def _insert_key(text: str, mapping: yaml.MappingNode, entry: str, comment: str) -> list[_Edit]:
    if mapping.flow_style:
        before_brace = mapping.end_mark.index - 1
        comma = "" if not mapping.value or text[:before_brace].rstrip().endswith(",") else ", "
        line = mapping.start_mark.index
        return [(before_brace, before_brace, f"{comma}{entry}"), _insert_comment(text, line, comment)]
    first = mapping.value[0][0].start_mark.index
    start = text.rfind("\n", 0, first) + 1
    indent = text[start:first]
    if indent.strip():
        raise _CannotEditError
    if not indent:  # at the top: at the end of the file
        gap = "" if not text or text.endswith("\n") else "\n"
        return [(len(text), len(text), f"{gap}\n# {comment}\n{entry}\n")]
    return [(start, start, f"{indent}# {comment}\n{indent}{entry}\n")]


def _insert_comment(text: str, index: int, comment: str) -> _Edit:
    """A comment line above the line of a place, as far in as that."""
    start = text.rfind("\n", 0, index) + 1
    line = text[start:index]
    indent = line[: len(line) - len(line.lstrip())]
    return (start, start, f"{indent}# {comment}\n")
