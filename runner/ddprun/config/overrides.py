"""`--set optimizer.sgd.lr=0.2`: one value of the file replaced, and every fault located in the override."""

import re
from collections.abc import Sequence
from typing import Any

from ddprun.config.faults import PipelineError, PipelineFault, Place, Source
from ddprun.config.secrets import Secrets
from ddprun.config.tree import (
    Entry,
    KeyPath,
    Node,
    find_chosen_name,
    find_nearest,
    format_path,
    is_choice_path,
    is_data_pair_key,
    normalize_name,
    parse_path,
)
from ddprun.config.yaml_reader import MAX_BYTES, MAX_DEPTH, parse_yaml

_KEY_PATTERN = re.compile(r'(?:[^="]|"[^"]*")*')

_PathSegment = tuple[str | int, Place]  # one segment of an override's path, and its place


def _override_error(place: Place, path: KeyPath, problem: str, allowed: str | None = None) -> PipelineError:
    return PipelineError([PipelineFault(place, format_path(path), problem, allowed)])


def apply_overrides(root: Node, overrides: Sequence[str]) -> tuple[Node, list[PipelineFault]]:
    """The tree with each override applied in turn, and the faults of those that were not."""
    faults: list[PipelineFault] = []
    for number, text in enumerate(overrides, start=1):
        try:
            _, segments, value = _parse_override(text, Source.from_text(f"--set {number}", number, text))
            root = _set_value_at_path(root, (), _join_import_path_segments(root, segments), value)
        except PipelineError as refused:
            faults += refused.faults
    return root, faults


def key_of(text: str) -> str:
    """The key of an override, as it is written."""
    match = _KEY_PATTERN.match(text)
    return match[0] if match else ""


def parse_alternatives(texts: Sequence[str], name: str) -> list[tuple[str, list[Any]]]:
    """Read options `name`, each `KEY=[A, B, C]`: keys as written, and values; raises a PipelineError."""
    found: list[tuple[str, list[Any]]] = []
    faults: list[PipelineFault] = []
    for number, text in enumerate(texts, start=1):
        try:
            key, segments, value = _parse_override(text, Source.from_text(f"{name} {number}", number, text))
            if not isinstance(value.value, list) or not value.value:
                path = tuple(segment for segment, _ in segments)
                hint = "write KEY=[A, B], as in hooks=[[], [fp16]]"
                raise _override_error(value.place, path, "is not a list of values", hint)
            found.append((key, value.data()))
        except PipelineError as refused:
            faults += refused.faults
    if faults:
        raise PipelineError(Secrets().redact_faults(faults))
    return found


def _parse_override(text: str, source: Source) -> tuple[str, list[_PathSegment], Node]:
    """The key as it is written, its path, and the value of an override."""
    start = Place(source, 1, 1)
    key = key_of(text)
    end = len(key) + 1
    if text[end - 1 : end] != "=":
        hint = "write key.path=value, as in optimizer.sgd.lr=0.2"
        raise _override_error(start, (), "the override has no =", hint)
    if len(text) > MAX_BYTES:
        raise _override_error(start, (), f"the override is longer than {MAX_BYTES // 1024} KiB")
    try:
        segments = [(segment, Place(source, 1, offset + 1)) for segment, offset in parse_path(key)]
    except ValueError as error:
        message, offset = error.args
        problem, _, allowed = message.partition("; ")
        raise _override_error(Place(source, 1, offset + 1), (), problem, allowed) from None
    if len(segments) > MAX_DEPTH:
        problem = f"nested more than {MAX_DEPTH} levels deep"
        raise _override_error(start, (), problem, f"at most {MAX_DEPTH} levels")
    value, faults = parse_yaml(text[end:], source, end + 1, tuple(segment for segment, _ in segments))
    if faults:
        raise PipelineError(faults)
    return key, segments, value or Node(Place(source, 1, end + 1), None)


def _join_import_path_segments(root: Node, segments: list[_PathSegment]) -> list[_PathSegment]:
    """Join the segments that together are one import path in the file."""
    joined: list[_PathSegment] = []
    node: Node | None = root
    while segments:
        value = node.value if node else None
        known = value if isinstance(value, dict) else (value,)
        counts = range(len(segments), 1, -1)
        names = ((".".join(str(part) for part, _ in segments[:count]), count) for count in counts)
        name, taken = next((one for one in names if one[0] in known), (segments[0][0], 1))
        joined.append((name, segments[0][1]))
        segments = segments[taken:]
        found = find_nearest(node, (name,)) if node else None
        node = found.node if found and not found.missing_path else None
    return joined


def _set_value_at_path(node: Node | None, path: KeyPath, segments: list[_PathSegment], value: Node) -> Node:
    """A node with the value set below it; `path` leads to the node."""
    if not segments:
        return value
    (key, place), *rest = segments
    if isinstance(key, int):
        items = _list_items_for_index(node, path, place, key)
        items[key] = _set_value_at_path(items[key], (*path, key), rest, value)
        return Node(node.place if node else place, items)
    mapping = _mapping_for_key(node, path, place, key)
    if key not in mapping and (chosen := find_chosen_name(path, mapping, key)) is not None:
        if normalize_name(chosen) != normalize_name(key):
            problem = f'the file chooses "{chosen}" here, and "{key}" would be a second choice'
            hint = f"set {format_path(path)} itself, as in '{format_path(path)}={{{key}: {{…}}}}'"
            raise _override_error(place, (*path, key), problem, hint)
        key = chosen
    entry = mapping.get(key)
    child = _set_value_at_path(entry.node if entry else None, (*path, key), rest, value)
    key_place = entry.key_place if entry and rest else place
    return Node(node.place if node else place, {**mapping, key: Entry(key_place, child)})


def _list_items_for_index(node: Node | None, path: KeyPath, place: Place, index: int) -> list[Node]:
    if node is None or not isinstance(node.value, list):
        problem = "is not a list in the file" if node else "is not in the file"
        raise _override_error(place, path, problem, f"set {format_path(path)} itself")
    count = len(node.value)
    if index >= count:
        allowed = f"allowed: 0 to {count - 1}" if count else "the list is empty; set the whole list"
        raise _override_error(place, (*path, index), f"there is no item {index}", allowed)
    return list(node.value)


def _mapping_for_key(node: Node | None, path: KeyPath, place: Place, key: str) -> dict[str, Entry]:
    """The mapping in which a key is to be set; a bare name becomes one."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    if isinstance(node.value, list):
        hint = f"name an item, as in {format_path(path)}[0]" + ("" if key.isdigit() else f".{key}")
        raise _override_error(place, path, "is a list in the file", hint)
    if is_choice_path(path) and isinstance(node.value, str):
        return {} if is_data_pair_key(path, key) else {node.value: Entry(node.place, Node(node.place, None))}
    problem = f"is {node.text} in the file, which holds no keys"
    raise _override_error(place, path, problem, "set the key itself")
