"""The tree of a pipeline file: plain values with their places, and key paths into them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddprun.config.faults import Place
from ddprun.config.scalars import Scalar
from ddprun.options import KeyPath as KeyPath

_UNQUOTED_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass
class Node:
    """One value and its place. An aliased node is shared, so nodes are replaced and never changed."""

    place: Place
    value: "Scalar | list[Node] | dict[str, Entry]"
    text: str | None = None  # a scalar as it is written
    quoted: bool = False
    has_fault: bool = False  # one has been reported already: what else is wrong is a consequence
    node_count: int = 1  # nodes in it, itself included, aliases expanded
    height: int = 1  # levels in it, itself included

    def data(self) -> Any:
        """The plain value: None, bool, int, float, str, list, dict."""
        if isinstance(self.value, list):
            return [child.data() for child in self.value]
        if isinstance(self.value, dict):
            return {key: entry.node.data() for key, entry in self.value.items()}
        return self.value


@dataclass(frozen=True)
class Entry:
    """A value of a mapping, and the place of its key."""

    key_place: Place
    node: Node


@dataclass(frozen=True)
class NearestNode:
    """The node at a path, or the nearest one above it that the file has."""

    node: Node
    key_place: Place  # place of the node's key; in a list and at the top, the node's own place
    missing_path: KeyPath = ()  # the end of the path that the file does not have
    has_fault: bool = False  # the node, or one above it, has a fault already


def find_nearest(root: Node, path: Sequence[str | int]) -> NearestNode:
    """Follow a path as far as the tree goes. A choice's name may be spelled otherwise."""
    node, key_place, has_fault = root, root.place, root.has_fault
    for depth, segment in enumerate(path):
        value, above = node.value, path[:depth]
        if isinstance(value, dict) and isinstance(segment, str):
            name = segment if segment in value else find_chosen_name(above, value, segment)
            if name is None:
                return NearestNode(node, key_place, tuple(path[depth:]), has_fault)
            node, key_place = value[name].node, value[name].key_place
        elif isinstance(value, list) and isinstance(segment, int) and segment < len(value):
            node = value[segment]
            key_place = node.place
        else:
            return NearestNode(node, key_place, tuple(path[depth:]), has_fault)
        has_fault = has_fault or node.has_fault
    return NearestNode(node, key_place, (), has_fault)


def find_chosen_name(path: Sequence[str | int], keys: Iterable[str], key: str) -> str | None:
    """The one name that a mapping with these keys chooses, where `key`, which it lacks, can only be that name
    in another spelling, or a second choice; None where `key` is something else.
    """
    beside = SIBLING_KEYS.get("metric" if "metrics" in path[-2:-1] else str(path[-1]) if path else "", ())
    named = [name for name in keys if name not in beside]
    if len(named) != 1 or not is_choice_path(path) or key in beside:
        return None
    return None if is_data_pair_key(path, key, named[0]) else named[0]


def normalize_name(name: str) -> str:
    """One spelling for all that mean the same name: `cross_entropy` and `CrossEntropyLoss` become equal."""
    return name.lower().replace("_", "").removesuffix("loss")


SIBLING_KEYS = {
    "optimizer": ("closure", "others"),
    "schedule": ("over", "metric"),
    "metric": ("name", "output", "target"),
}
"""What a choice may have beside its name: whether an optimizer's steps get a closure, and the optimizer of
what it leaves; what a schedule spans, or the metric by which it steps; what a metric is called, and the keys
of what it gets."""

_CHOICE_KEYS = frozenset({"model", "data", "loss", "optimizer", "schedule", "sync", "weight_by"})
_STAGE_CHOICE_KEYS = frozenset({"optimizer", "schedule", "sync", "mutate", "update", "data"})
_CHOICE_LIST_KEYS = frozenset({"hooks", "within", "across", "metrics", "stages"})


def is_choice_path(path: Sequence[str | int]) -> bool:
    """Whether `name` or `name: {options}` is written at this path."""
    match tuple(path):
        case (str(key),):
            return key in _CHOICE_KEYS
        case ("stages", int(), "train" | "forward", str(key)):
            return key in _STAGE_CHOICE_KEYS
        case ("data", "train" | "evaluate") | ("stages", int(), "evaluate", "data"):
            return True
        case ("optimizer", "others") | ("stages", int(), "train" | "forward", "optimizer", "others"):
            return True
        case ("loader", "collate" | "evaluate_collate" | "sampler") | ("batch", "transform"):
            return True
        case (*_, str(key), int()):
            return key in _CHOICE_LIST_KEYS
    return False


def is_data_pair_key(path: Sequence[str | int], *keys: str) -> bool:
    """Whether a key below the path is one of `data: {train: …, evaluate: …}` and no name of a choice."""
    return tuple(path) == ("data",) and not {"train", "evaluate"}.isdisjoint(keys)


def format_path(path: Sequence[str | int]) -> str:
    """A path as text: `stages[2].train.steps`; a key that holds dots is in double quotes."""
    text = ""
    for segment in path:
        if isinstance(segment, int):
            text += f"[{segment}]"
        else:
            plain = _UNQUOTED_KEY.fullmatch(segment)
            text += ("." if text else "") + (segment if plain else '"' + segment.replace('"', "'") + '"')
    return text


_SEGMENT = re.compile(r'(?:(?:^|(?!^)\.)(?P<key>"(?P<quoted>[^"]+)"|[^.\[\]="]+)|\[(?P<index>[0-9]{1,6})\])')


def parse_path(text: str) -> list[tuple[str | int, int]]:
    """Read a path as `format_path` writes it: segments and offsets. Raises ValueError(message, offset)."""
    segments: list[tuple[str | int, int]] = []
    offset = 0
    while offset < len(text):
        match = _SEGMENT.match(text, offset)
        if match is None or (match["index"] and not segments):
            raise ValueError("invalid key path from here on; write one such as stages[0].train.steps", offset)
        if match["index"]:
            segments.append((int(match["index"]), offset + 1))
        else:
            segments.append((match["quoted"] or match["key"].strip(), match.start("key")))
        offset = match.end()
    if not segments:
        raise ValueError("the key before the = is missing; write one such as optimizer.sgd.lr=0.2", 0)
    return segments


def map_strings(data: Any, text_of: Callable[[KeyPath, str], str], path: KeyPath = ()) -> Any:
    """Plain data with its strings replaced; keys stay."""
    if isinstance(data, str):
        return text_of(path, data)
    if isinstance(data, list | tuple):
        items = [map_strings(item, text_of, (*path, index)) for index, item in enumerate(data)]
        return tuple(items) if isinstance(data, tuple) else items
    if isinstance(data, dict):
        return {key: map_strings(item, text_of, (*path, key)) for key, item in data.items()}
    return data
