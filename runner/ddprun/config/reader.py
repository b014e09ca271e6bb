"""Strict YAML: text to a tree with positions, every fault of the text collected on the way.

PyYAML's scanner and parser give the events; what they mean is decided here, by the YAML 1.2 core schema.
Nothing recurses and no tag constructs anything, so no text can run code or exhaust the stack.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from ddprun.config.faults import Fault, suggest
from ddprun.config.scalars import resolve
from ddprun.config.tree import Entry, KeyPath, Node, Place, Source, show

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000
_MAX_CONTROL_FAULTS = 20

_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]|[\u2028\u2029]"
)
_DAMAGED = "\ufffd"
"""Stands for a character that has been reported, so that what holds it is not reported again."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_REWORDED = (
    (r"found character '\\t' that cannot start any token", "a tab cannot stand here", "indent with spaces"),
    (
        r"found character '(.)' that cannot start any token",
        r'a value cannot start with "\1"',
        "put it in quotes",
    ),
    (
        r"mapping values are not allowed here",
        '": " cannot stand here',
        "check the indentation, or quote the text",
    ),
    (r"could not find expected ':'", 'a key without ":"', "write `key: value`"),
    (r"expected ',' or '(.)', but got .*", r'expected "," or "\1"', "close the bracket"),
    (r"expected <block end>, but found '-'", "a list item cannot stand here", "check the indentation"),
    (
        r"expected <block end>, but found .*",
        "this does not fit in here",
        "check the indentation and the quotes",
    ),
    (r"did not find expected <document start>", "more text after the document's end", None),
    (r"found unexpected end of stream", "a quote is opened and never closed", "close it"),
    (
        r"found unknown escape character '(.)'",
        r'"\\\1" is no escape sequence',
        "use single quotes, or double the backslash",
    ),
    (r"expected the node content, but found .*", "a value is missing or malformed here", "put it in quotes"),
    (
        r"block sequence entries are not allowed here",
        "a list cannot start here",
        "start it on a line of its own",
    ),
    (r"sequence entries are not allowed here", "a list cannot start here", "start it on a line of its own"),
)


@dataclass
class Tree:
    """What reading a text gave: the root if there is one, and the faults so far."""

    source: Source
    root: Node | None = None
    faults: list[Fault] = field(default_factory=list)


class _Events(Reader, Scanner, Parser):
    """PyYAML's pure-Python parser without its composer, resolver and constructor."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


def read_file(path: Path) -> Tree:
    """Read a pipeline file. A file that cannot be read is a fault like any other."""
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        return Tree(Source.of(name, 0, ""), None, [_unreadable(path, error)])
    except ValueError:
        return Tree(Source.of(name, 0, ""), None, [_whole(name, "a path cannot hold a NUL character")])
    if len(raw) > MAX_BYTES:
        size = f"{MAX_BYTES // 1024} KiB"
        return Tree(
            Source.of(name, 0, ""), None, [_whole(name, f"the file is longer than {size}", f"at most {size}")]
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        source = Source.of(name, 0, raw.decode("utf-8-sig", errors="replace"))
        before = raw[: error.start].decode("utf-8-sig", errors="replace")
        where = Source.of(name, 0, before).lines
        place = Place(source, len(where), len(where[-1]) + 1)
        problem = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        return Tree(source, None, [place.fault("", problem, "save the file as UTF-8")])
    tree = read_text(text, Source.of(name, 0, text))
    if tree.root is not None and not isinstance(tree.root.value, dict):
        tree.faults.append(_not_a_mapping(tree.root))
        tree.root = None
    elif tree.root is None and not tree.faults:
        tree.faults.append(_whole(name, "the file is empty", "`ddprun init` writes one to start from"))
    return tree


def read_text(text: str, source: Source, line: int = 1, column: int = 1, path: KeyPath = ()) -> Tree:
    """Read one YAML value of any kind.

    Args:
        text: the value.
        source: what faults quote.
        line: where `text` starts in the source.
        column: likewise.
        path: where the value goes in the pipeline.
    """
    builder = _Builder(source, line, column, path)
    found = 0
    for match in _FORBIDDEN.finditer(text):
        found += 1
        if found <= _MAX_CONTROL_FAULTS:
            before = Source.of("", 0, text[: match.start()]).lines
            place = builder.place_of(len(before) - 1, len(before[-1]))
            problem = f"the invisible character U+{ord(match.group()):04X} cannot stand in a pipeline"
            builder.faults.append(place.fault("", problem, "remove it"))
    builder.damaged = found > 0
    events = _Events(_FORBIDDEN.sub(_DAMAGED, text) if found else text)
    try:
        builder.build(events)
    except _FatalError:
        builder.root = None
    except (ValueError, OverflowError):  # the scanner calls chr() on "\UFFFFFFFF"
        builder.root = None
        place = builder.place_of(events.line, events.column)
        builder.faults.append(
            place.fault("", "not valid YAML: an escape sequence that stands for no character")
        )
    except yaml.MarkedYAMLError as error:
        builder.root = None
        builder.faults.append(_syntax(builder, error))
    return Tree(source, builder.root, builder.faults)


class _FatalError(Exception):
    """The text is not worth reading on; its fault is recorded."""


@dataclass
class _Frame:
    """A list or mapping that is being read."""

    node: Node
    anchor: str | None
    key: str | None = None
    key_place: Place | None = None
    """Set between a key and its value. `key` is None there if the key is faulty; the value is dropped."""


class _Builder:
    """Turns events into nodes with an explicit stack."""

    def __init__(self, source: Source, line: int, column: int, at: KeyPath) -> None:
        self.source = source
        self.at = at
        self.damaged = False
        self.line = line
        self.column = column
        self.root: Node | None = None
        self.faults: list[Fault] = []
        self.stack: list[_Frame] = []
        self.anchors: dict[str, Node] = {}
        self.nodes = 0

    def place_of(self, line: int, column: int) -> Place:
        """Place of a mark, whose line and column count from 0 at the start of the text."""
        return Place(self.source, self.line + line, column + (self.column if line == 0 else 1))

    def place(self, event: Any) -> Place:
        return self.place_of(event.start_mark.line, event.start_mark.column)

    def path(self) -> KeyPath:
        """Path of the value that comes next."""
        path = list(self.at)
        for frame in self.stack:
            if isinstance(frame.node.value, list):
                path.append(len(frame.node.value))
            elif frame.key is not None:
                path.append(frame.key)
        return tuple(path)

    def fault(self, place: Place, problem: str, allowed: str | None = None) -> None:
        self.faults.append(place.fault(show(self.path()), problem, allowed))

    def build(self, events: Any) -> None:
        while events.check_event():
            event = events.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                if self.root is not None:
                    problem = "a second document starts here"
                    self.fault(
                        self.place(event), problem, "a pipeline file holds one document; remove the ---"
                    )
                    return
                if event.tags or event.version not in (None, (1, 2)):
                    self.fault(self.place(event), "a pipeline is read as YAML 1.2", "remove the % directives")
            elif isinstance(event, yaml.NodeEvent):
                self.start(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                frame = self.stack.pop()
                if frame.anchor is not None:
                    self.anchors[frame.anchor] = frame.node
                self.attach(frame.node)

    def start(self, event: Any) -> None:
        """A scalar, an alias, or the start of a list or mapping."""
        place = self.place(event)
        if isinstance(event, yaml.AliasEvent):
            self.attach(self.alias(str(event.anchor), place))
            return
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.fault(place, f'the tag "{tag}" is not allowed', "tags construct nothing here; remove it")
        self.count(place, 1)
        if isinstance(event, yaml.ScalarEvent):
            node = self.scalar(event, place)
            node.broken = node.broken or event.tag is not None or (self.damaged and _DAMAGED in event.value)
            if event.anchor is not None:
                self.anchors[event.anchor] = node
            self.attach(node)
            return
        if len(self.stack) >= MAX_DEPTH:
            self.too_deep(place)
        value: list[Node] | dict[str, Entry] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        if event.anchor is not None:
            self.anchors.pop(event.anchor, None)
        self.stack.append(_Frame(Node(place, value, broken=event.tag is not None), event.anchor))

    def scalar(self, event: Any, place: Place) -> Node:
        text: str = event.value
        quoted = event.style is not None
        if _SURROGATE.search(text):
            self.fault(
                place,
                "an escape here stands for half a character (a surrogate)",
                "write the character itself",
            )
            return Node(place, None, text, quoted, broken=True)
        if quoted:
            return Node(place, text, text, quoted)
        try:
            return Node(place, resolve(text), text)
        except OverflowError as error:
            shown = text if len(text) <= 24 else f"{text[:20]}…"
            problem, _, allowed = str(error).partition("; ")
            self.fault(place, f"{shown} {problem}", allowed)
            return Node(place, None, text, broken=True)

    def alias(self, anchor: str, place: Place) -> Node:
        if any(frame.anchor == anchor for frame in self.stack) and anchor not in self.anchors:
            self.fault(
                place, f'the alias "*{anchor}" stands inside what it stands for', "write the value out"
            )
            return Node(place, None, broken=True)
        node = self.anchors.get(anchor)
        if node is None:
            self.fault(place, f'no anchor "&{anchor}" stands before this alias', "write the value out")
            return Node(place, None, broken=True)
        self.count(place, node.size)
        if len(self.stack) + node.height > MAX_DEPTH:
            self.too_deep(place)
        return node

    def count(self, place: Place, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.fault(
                place,
                f"the file holds more than {MAX_NODES:,} values",
                "aliases count as what they stand for",
            )
            raise _FatalError

    def too_deep(self, place: Place) -> None:
        self.faults.append(
            place.fault("", f"nested more than {MAX_DEPTH} levels deep", f"at most {MAX_DEPTH} levels")
        )
        raise _FatalError

    def attach(self, node: Node) -> None:
        """Put a finished node where it belongs: into the list, as a key, as a key's value, or as the root."""
        if not self.stack:
            self.root = node
            return
        frame = self.stack[-1]
        parent = frame.node
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif isinstance(parent.value, dict):
            if frame.key_place is None:
                frame.key, frame.key_place = self.checked_key(node, parent.value), node.place
            else:
                if frame.key is not None:
                    parent.value[frame.key] = Entry(frame.key_place, node)
                frame.key = frame.key_place = None

    def checked_key(self, node: Node, siblings: dict[str, Entry]) -> str | None:
        """The key, or None with a fault recorded."""
        if node.broken:
            return None
        key = node.value
        if not isinstance(key, str):
            shown = f'quote it: "{node.text}"' if node.text else "write `key: value`"
            what = (
                "a list"
                if isinstance(key, list)
                else "a mapping"
                if isinstance(key, dict)
                else node.text or "nothing"
            )
            self.fault(node.place, f"a key must be a string, got {what}", shown)
            return None
        if key == "<<" and not node.quoted:
            self.fault(node.place, 'the merge key "<<" is not part of YAML 1.2', "write the keys out")
            return None
        if key in siblings:
            path = show((*self.path(), key))
            first = siblings[key].key.line
            self.faults.append(
                node.place.fault(
                    path,
                    f'the key "{key}" stands here twice',
                    f"it stands in line {first} already; remove one",
                )
            )
            return None
        return key


def _syntax(builder: _Builder, error: yaml.MarkedYAMLError) -> Fault:
    """A syntax error in the reader's words instead of the scanner's."""
    mark = error.problem_mark or error.context_mark
    place = builder.place_of(mark.line, mark.column) if mark else builder.place_of(0, 0)
    problem = error.problem or error.context or "this is not YAML"
    allowed: str | None = None
    for pattern, words, hint in _REWORDED:
        if match := re.fullmatch(pattern, problem):
            problem, allowed = match.expand(words), hint
            break
    if error.context_mark and error.context and error.problem == "found unexpected end of stream":
        place = builder.place_of(error.context_mark.line, error.context_mark.column)
    if "${" in builder.source.line(place.line)[: place.column]:
        allowed = 'between { } and [ ], put "${env:NAME}" in quotes'
    return place.fault("", f"not valid YAML: {problem}", allowed)


def _whole(name: str, problem: str, allowed: str | None = None, suggestion: str | None = None) -> Fault:
    """A fault of the file as a whole."""
    return Fault(
        file=name, line=0, column=0, path="", problem=problem, allowed=allowed, suggestion=suggestion
    )


def _unreadable(path: Path, error: OSError) -> Fault:
    name = str(path)
    if isinstance(error, FileNotFoundError):
        folder = path.parent
        others = {entry.stem: entry for entry in folder.glob("*.y*ml")} if folder.is_dir() else {}
        near = suggest(path.stem, others)
        return _whole(name, "there is no such file", suggestion=str(others[near]) if near else None)
    if isinstance(error, IsADirectoryError):
        return _whole(name, "this is a directory", "name a pipeline file in it")
    reason = (error.strerror or str(error)).lower()
    return _whole(name, f"the file cannot be read: {reason}")


def _not_a_mapping(root: Node) -> Fault:
    if isinstance(root.value, list):
        return root.place.fault("", "expected `key: value` lines at the top, got a list")
    hint = "put a space after the colon" if root.text and ":" in root.text else None
    if root.value is None:
        return _whole(root.place.source.name, "the file is empty", "`ddprun init` writes one to start from")
    return root.place.fault("", "expected `key: value` lines at the top, got a single value", hint)
