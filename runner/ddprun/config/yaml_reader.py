"""Strict YAML: text to a tree with positions, every fault of the text collected on the way.

PyYAML's scanner and parser give the events; what they mean is decided here, by the YAML 1.2 core schema.
No tag constructs anything and depth is limited, so no text can run code or exhaust the stack.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ddprun.config.faults import PipelineFault, Place, Source, closest_match
from ddprun.config.scalars import parse_scalar
from ddprun.config.tree import Entry, KeyPath, Node, format_path
from ddprun_hooks.config.messages import describe_value

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_NODES = 10_000

_FORBIDDEN_CHARACTERS = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]|[\u2028\u2029]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")

_SYNTAX_ERROR_WORDS = (
    (r"found character '\\t' that cannot start any token", "a tab is not allowed here", "indent with spaces"),
    (
        r"found character '(.)' that cannot start any token",
        r'a value cannot start with "\1"',
        "put it in quotes",
    ),
    (
        r"mapping values are not allowed here",
        '": " is not allowed here',
        "check the indentation, or quote the text",
    ),
    (r"could not find expected ':'", 'a key without ":"', "write `key: value`"),
    (r"expected ',' or '(.)', but got .*", r'expected "," or "\1"', "close the bracket"),
    (r"expected <block end>, but found '-'", "a list item is not allowed here", "check the indentation"),
    (
        r"expected <block end>, but found .*",
        "this does not belong here",
        "check the indentation and the quotes",
    ),
    (r"did not find expected <document start>", "more text after the document's end", None),
    (r"found unexpected end of stream", "a quote is opened and never closed", "close it"),
    (
        r"found unknown escape character '(.)'",
        r'"\\\1" is not an escape sequence',
        "use single quotes, or double the backslash",
    ),
    (r"expected the node content, but found .*", "a value is missing or malformed here", "put it in quotes"),
    (
        r"(block )?sequence entries are not allowed here",
        "a list cannot start here",
        "start it on a line of its own",
    ),
)


ReadResult = tuple[Node | None, list[PipelineFault]]  # the root node, if there is one, and faults so far


def read_pipeline_file(path: Path) -> ReadResult:
    """Read a pipeline file. A file that cannot be read is a fault like any other."""
    name = str(path)
    whole_file = Place(Source(name))
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        return None, [_unreadable_file_fault(path, error)]
    if len(raw) > MAX_BYTES:
        size = f"{MAX_BYTES // 1024} KiB"
        problem = f"the file is longer than {size}"
        return None, [PipelineFault(whole_file, "", problem, f"at most {size}")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        source = Source.from_text(name, 0, raw.decode("utf-8-sig", errors="replace"))
        before = Source.from_text(name, 0, raw[: error.start].decode("utf-8-sig", errors="replace")).lines
        place = Place(source, len(before), len(before[-1]) + 1)
        problem = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        return None, [PipelineFault(place, "", problem, "save the file as UTF-8")]
    root, faults = parse_yaml(text, Source.from_text(name, 0, text))
    if (root is None and not faults) or (root is not None and root.value is None):
        hint = "`ddprun init` writes one to start from"
        faults.append(PipelineFault(whole_file, "", "the file is empty", hint))
    elif root is not None and not isinstance(root.value, dict):
        got = "a list" if isinstance(root.value, list) else "a single value"
        colon = "put a space after the colon" if root.text and ":" in root.text else None
        problem = f"expected `key: value` lines at the top, got {got}"
        faults.append(PipelineFault(root.place, "", problem, colon))
    return (root if root is not None and isinstance(root.value, dict) else None), faults


def parse_yaml(text: str, source: Source, column: int = 1, path: KeyPath = ()) -> ReadResult:
    """Read one YAML value, which is at `path` in the pipeline and begins at this column of the source."""
    if forbidden := _FORBIDDEN_CHARACTERS.search(text):
        before = Source.from_text("", 0, text[: forbidden.start()]).lines
        place = Place(source, len(before), len(before[-1]) + (column if len(before) == 1 else 1))
        problem = f"the invisible character U+{ord(forbidden[0]):04X} is not allowed in a pipeline"
        return None, [PipelineFault(place, "", problem, "remove it")]
    builder = _NodeTreeBuilder(yaml.SafeLoader(text), source, column)
    root: Node | None = None
    try:
        root = builder.build_document(path)
    except _FatalError:
        pass
    except (ValueError, OverflowError):  # the scanner calls chr() on "\UFFFFFFFF"
        problem = "not valid YAML: an escape sequence for a character that does not exist"
        builder.add_fault(builder.place(builder.events.line, builder.events.column), (), problem)
    except yaml.MarkedYAMLError as error:
        builder.faults.append(_syntax_fault(builder, error))
    return root, builder.faults


class _FatalError(Exception):
    """The text is not worth reading on; its fault is recorded."""


@dataclass
class _NodeTreeBuilder:
    """Turns events into nodes. It recurses at most `MAX_DEPTH` levels deep."""

    events: Any  # PyYAML's loader in Python, asked for events only: its resolver and constructor are not used
    source: Source
    column: int  # of the source, at which the text starts, from 1
    faults: list[PipelineFault] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)  # None while an anchor's value is read
    nodes: int = 0

    def place(self, line: int, column: int) -> Place:
        """Place of a line and column of PyYAML's, which count from 0 at the start of the text."""
        return Place(self.source, 1 + line, column + (self.column if line == 0 else 1))

    def add_fault(self, place: Place, path: KeyPath, problem: str, allowed: str | None = None) -> None:
        self.faults.append(PipelineFault(place, format_path(path), problem, allowed))

    def build_document(self, path: KeyPath) -> Node | None:
        """The root; None if the text holds no value. `path` leads to the root."""
        root: Node | None = None
        while self.events.check_event():
            event: Any = self.events.get_event()
            place = self.place(event.start_mark.line, event.start_mark.column)
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    hint = "a pipeline file holds one document; remove the ---"
                    self.add_fault(place, path, "a second document starts here", hint)
                    break
                if event.tags or event.version not in (None, (1, 2)):
                    self.add_fault(place, path, "a pipeline is read as YAML 1.2", "remove the % directives")
            elif isinstance(event, yaml.NodeEvent):
                root = self.build_node(event, path, 0)
        return root

    def build_node(self, event: Any, path: KeyPath, depth: int) -> Node:
        """The node that starts with `event`, read to its end; `depth` lists and mappings are around it."""
        place = self.place(event.start_mark.line, event.start_mark.column)
        if isinstance(event, yaml.AliasEvent):
            return self.resolve_alias(str(event.anchor), place, path, depth)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            hint = "a pipeline may not have tags; remove it"
            self.add_fault(place, path, f'the tag "{tag}" is not allowed', hint)
        self.count_nodes(place, path, 1)
        if isinstance(event, yaml.ScalarEvent):
            node = self.build_scalar(event, place, path)
        elif depth == MAX_DEPTH:
            self.fail_too_deep(place)
        else:
            if event.anchor is not None:
                self.anchors[event.anchor] = None
            node = Node(place, [] if isinstance(event, yaml.SequenceStartEvent) else {})
            self.fill_collection(node, path, depth + 1)
        node.has_fault = node.has_fault or event.tag is not None
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def fill_collection(self, node: Node, path: KeyPath, depth: int) -> None:
        """Read what a list or a mapping holds, up to its end."""

        def read_child(event: Any, *step: str | int) -> Node:
            read = self.build_node(event, (*path, *step), depth)
            node.node_count += read.node_count
            node.height = max(node.height, read.height + 1)
            return read

        while not isinstance(event := self.events.get_event(), yaml.CollectionEndEvent):
            if isinstance(node.value, list):
                node.value.append(read_child(event, len(node.value)))
            elif isinstance(node.value, dict):
                key_node = read_child(event)
                key = self.check_key(key_node, node.value, path)
                value = read_child(self.events.get_event(), *(() if key is None else (key,)))
                if key is not None:
                    node.value[key] = Entry(key_node.place, value)

    def build_scalar(self, event: Any, place: Place, path: KeyPath) -> Node:
        text: str = event.value
        quoted = event.style is not None
        if _SURROGATE.search(text):
            problem = "this escape is half a character (a surrogate)"
            self.add_fault(place, path, problem, "write the character itself")
            return Node(place, None, text, quoted, has_fault=True)
        try:
            return Node(place, text if quoted else parse_scalar(text), text, quoted)
        except OverflowError as error:
            shown = text if len(text) <= 24 else f"{text[:20]}…"
            problem, _, allowed = str(error).partition("; ")
            self.add_fault(place, path, f"{shown} {problem}", allowed)
            return Node(place, None, text, has_fault=True)

    def resolve_alias(self, anchor: str, place: Place, path: KeyPath, depth: int) -> Node:
        node = self.anchors.get(anchor)
        if node is None:
            inside = f'the alias "*{anchor}" is inside the value that it refers to'
            unknown = f'no anchor "&{anchor}" comes before this alias'
            self.add_fault(place, path, inside if anchor in self.anchors else unknown, "write the value out")
            return Node(place, None, has_fault=True)
        self.count_nodes(place, path, node.node_count)
        if depth + node.height > MAX_DEPTH:
            self.fail_too_deep(place)
        return node

    def count_nodes(self, place: Place, path: KeyPath, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            problem = f"the file holds more than {MAX_NODES:,} values"
            self.add_fault(place, path, problem, "an alias counts as all the values of its anchor")
            raise _FatalError

    def fail_too_deep(self, place: Place) -> NoReturn:
        self.add_fault(place, (), f"nested more than {MAX_DEPTH} levels deep", f"at most {MAX_DEPTH} levels")
        raise _FatalError

    def check_key(self, node: Node, siblings: dict[str, Entry], path: KeyPath) -> str | None:
        """The key of a mapping at a path, or None with a fault recorded."""
        if node.has_fault:
            return None
        key = node.value
        if not isinstance(key, str):
            got = describe_value(key) if isinstance(key, (list, dict)) else node.text or "nothing"
            hint = f'quote it: "{node.text}"' if node.text else "write `key: value`"
            self.add_fault(node.place, path, f"a key must be a string, got {got}", hint)
        elif key == "<<" and not node.quoted:
            problem = 'the merge key "<<" is not part of YAML 1.2'
            self.add_fault(node.place, path, problem, "write the keys out")
        elif key in siblings:
            hint = f"it is already in line {siblings[key].key_place.line}; remove one"
            self.add_fault(node.place, (*path, key), f'duplicate key "{key}"', hint)
        else:
            return key
        return None


def _syntax_fault(builder: _NodeTreeBuilder, error: yaml.MarkedYAMLError) -> PipelineFault:
    """A syntax error in the reader's words instead of the scanner's."""
    mark = error.problem_mark or error.context_mark
    place = builder.place(mark.line, mark.column) if mark else builder.place(0, 0)
    problem = error.problem or error.context or "this is not YAML"
    allowed: str | None = None
    for pattern, words, hint in _SYNTAX_ERROR_WORDS:
        if match := re.fullmatch(pattern, problem):
            problem, allowed = match.expand(words), hint
            break
    if error.context_mark and error.context and error.problem == "found unexpected end of stream":
        place = builder.place(error.context_mark.line, error.context_mark.column)
    if "${" in place.source_line[: place.column]:
        allowed = 'inside { } and [ ], put "${env:NAME}" in quotes'
    return PipelineFault(place, "", f"not valid YAML: {problem}", allowed)


def _unreadable_file_fault(path: Path, error: OSError) -> PipelineFault:
    place = Place(Source(str(path)))
    if isinstance(error, FileNotFoundError):
        folder = path.parent
        others = {entry.stem: entry for entry in folder.glob("*.y*ml")} if folder.is_dir() else {}
        near = closest_match(path.stem, others)
        suggestion = str(others[near]) if near else None
        return PipelineFault(place, "", "there is no such file", suggestion=suggestion)
    if isinstance(error, IsADirectoryError):
        return PipelineFault(place, "", "this is a directory", "name a pipeline file in it")
    reason = (error.strerror or str(error)).lower()
    return PipelineFault(place, "", f"the file cannot be read: {reason}")
