"""`--set optimizer.sgd.lr=0.2`: one value of the file replaced, and every fault located in the override."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddprun.config.faults import Fault
from ddprun.config.reader import MAX_BYTES, MAX_DEPTH, read_text
from ddprun.config.tree import (
    Entry,
    KeyPath,
    Node,
    Place,
    Source,
    is_choice,
    parse_path,
    part_of_pair,
    show,
    spelling,
)

_PATH = re.compile(r'(?:[^="]|"[^"]*")*')


@dataclass(frozen=True)
class _Step:
    """One segment of an override's path and where it stands."""

    segment: str | int
    place: Place


class _RefusedError(Exception):
    """The override does not fit the file; `args[0]` is the fault."""


def apply(root: Node, overrides: Sequence[str]) -> tuple[Node, list[Fault]]:
    """The tree with each override applied in turn, and the faults of those that were not."""
    faults: list[Fault] = []
    for number, text in enumerate(overrides, start=1):
        try:
            steps, value = _read(text, Source.of(f"--set {number}", number, text))
            root = _set(root, (), _joined(root, steps), value)
        except _RefusedError as refused:
            faults += refused.args
    return root, faults


def alternatives(text: str, name: str, number: int) -> tuple[str, list[Any]] | Fault:
    """Read `KEY=[A, B, C]`: the key as it is written, and the values.

    Args:
        text: what was given.
        name: of the option, for faults.
        number: how manieth of its kind it is, from 1.
    """
    source = Source.of(f"{name} {number}", number, text)
    try:
        steps, value = _read(text, source)
    except _RefusedError as refused:
        fault: Fault = refused.args[0]
        return fault
    if not isinstance(value.value, list) or not value.value:
        path = ".".join(str(step.segment) for step in steps)
        return value.place.fault(path, "is no list of values", "write KEY=[A, B], as in hooks=[[], [fp16]]")
    match = _PATH.match(text)
    return match[0] if match else "", [child.data() for child in value.value]


def _read(text: str, source: Source) -> tuple[list[_Step], Node]:
    """The path and the value of an override."""
    start = Place(source, 1, 1)
    match = _PATH.match(text)
    end = match.end() if match else 0
    if text[end : end + 1] != "=":
        raise _RefusedError(
            start.fault("", "an override has no =", "write key.path=value, as in optimizer.sgd.lr=0.2")
        )
    if len(text) > MAX_BYTES:
        raise _RefusedError(start.fault("", f"an override is longer than {MAX_BYTES // 1024} KiB"))
    try:
        segments = parse_path(text[:end])
    except ValueError as error:
        message, offset = error.args
        problem, _, allowed = message.partition("; ")
        raise _RefusedError(Place(source, 1, offset + 1).fault("", problem, allowed)) from None
    if len(segments) > MAX_DEPTH:
        raise _RefusedError(
            start.fault("", f"nested more than {MAX_DEPTH} levels deep", f"at most {MAX_DEPTH} levels")
        )
    steps = [_Step(segment, Place(source, 1, offset + 1)) for segment, offset in segments]
    path = tuple(segment for segment, _ in segments)
    tree = read_text(text[end + 1 :], source, 1, end + 2, path)
    if tree.faults:
        raise _RefusedError(*tree.faults)
    return steps, tree.root or Node(Place(source, 1, end + 2), None)


def _joined(root: Node, steps: list[_Step]) -> list[_Step]:
    """The steps with the parts of a dotted name that the file holds put together again."""
    joined: list[_Step] = []
    node: Node | None = root
    while steps:
        taken = 1
        names = _names(node)
        for count in range(len(steps), 1, -1):
            if ".".join(str(step.segment) for step in steps[:count]) in names:
                taken = count
                break
        segment = steps[0].segment if taken == 1 else ".".join(str(step.segment) for step in steps[:taken])
        joined.append(_Step(segment, steps[0].place))
        steps = steps[taken:]
        node = _child(node, segment)
    return joined


def _names(node: Node | None) -> frozenset[str]:
    if node is None:
        return frozenset()
    if isinstance(node.value, dict):
        return frozenset(node.value)
    return frozenset({node.value}) if isinstance(node.value, str) else frozenset()


def _child(node: Node | None, segment: str | int) -> Node | None:
    if node is not None and isinstance(node.value, dict) and isinstance(segment, str):
        entry = node.value.get(segment)
        return entry.node if entry else None
    if (
        node is not None
        and isinstance(node.value, list)
        and isinstance(segment, int)
        and segment < len(node.value)
    ):
        return node.value[segment]
    return None


def _set(node: Node | None, path: KeyPath, steps: list[_Step], value: Node) -> Node:
    """A node with the value set below it; `path` leads to the node."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if isinstance(step.segment, int):
        return _set_item(node, path, step, step.segment, rest, value)
    mapping = _mapping(node, path, step, step.segment)
    key = step.segment
    if is_choice(path) and len(mapping) == 1 and key not in mapping and not part_of_pair(path, key):
        (chosen,) = mapping
        if spelling(chosen) != spelling(key):
            raise _two_choices(path, step, chosen)
        key = chosen
    entry = mapping.get(key)
    child = _set(entry.node if entry else None, (*path, key), rest, value)
    key_place = entry.key if entry and rest else step.place
    return Node(node.place if node else step.place, {**mapping, key: Entry(key_place, child)})


def _set_item(
    node: Node | None, path: KeyPath, step: _Step, index: int, rest: list[_Step], value: Node
) -> Node:
    if node is None or not isinstance(node.value, list):
        problem = "is no list in the file" if node else "is not in the file"
        raise _RefusedError(step.place.fault(show(path), problem, f"set {show(path)} itself"))
    if index >= len(node.value):
        count = len(node.value)
        held = f"allowed: 0 to {count - 1}" if count else "the list is empty; set the whole list"
        raise _RefusedError(step.place.fault(show((*path, index)), f"there is no item {index}", held))
    items = list(node.value)
    items[index] = _set(items[index], (*path, index), rest, value)
    return Node(node.place, items)


def _mapping(node: Node | None, path: KeyPath, step: _Step, key: str) -> dict[str, Entry]:
    """The mapping to set a key in; a bare name becomes one."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    if isinstance(node.value, list):
        example = f"{show(path)}[0].{key}"
        raise _RefusedError(
            step.place.fault(show(path), "is a list in the file", f"name an item, as in {example}")
        )
    if is_choice(path) and isinstance(node.value, str):
        if part_of_pair(path, key):
            return {}
        return {node.value: Entry(node.place, Node(node.place, None))}
    problem = f"is {node.text} in the file, which holds no keys"
    raise _RefusedError(step.place.fault(show(path), problem, "set the key itself"))


def _two_choices(path: KeyPath, step: _Step, chosen: str) -> _RefusedError:
    problem = f'the file chooses "{chosen}" here, and "{step.segment}" would be a second choice'
    allowed = f"set {show(path)} itself, as in '{show(path)}={{{step.segment}: {{…}}}}'"
    return _RefusedError(step.place.fault(show((*path, step.segment)), problem, allowed))
