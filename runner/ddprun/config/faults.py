"""Faults of a pipeline file, worded so that the reader can correct the file without a manual."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddprun_hooks.config.messages import allowed_values as allowed_values
from ddprun_hooks.config.messages import closest_match as closest_match
from ddprun_hooks.config.messages import format_message

Severity = Literal["error", "warning"]
RedactFunction = Callable[[str], str]  # a text without the secrets in it

_MAX_QUOTED_COLUMNS = 110  # columns of a quoted line; a longer line is cut around the fault
_BREAK = re.compile(r"\r\n|\n|\r")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that move a terminal's cursor, change its colors or end a line."""


@dataclass(frozen=True)
class Source:
    """A text that values come from: the file, or one override."""

    name: str  # the file as the user named it, or `--set 2` for the second override
    override_number: int = 0  # 0 for the file, n for the n-th override: faults are shown in this order
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)  # with any secrets in them

    @classmethod
    def from_text(cls, name: str, order: int, text: str) -> "Source":
        """A source of the given text; lines end as YAML ends them."""
        return cls(name, order, tuple(_BREAK.split(text)))


@dataclass(frozen=True)
class Place:
    """A position in a source."""

    source: Source
    line: int = 0  # from 1; 0 for the whole source (it does not exist, say)
    column: int = 0  # in characters, from 1; 0 where `line` is 0

    @property
    def source_line(self) -> str:
        """The line itself, without its line break; empty if the source does not have it."""
        lines = self.source.lines
        return lines[self.line - 1] if 0 < self.line <= len(lines) else ""


@dataclass(frozen=True)
class PipelineFault:
    """One fault of a pipeline file or of an override."""

    place: Place
    path: str  # key path such as `stages[2].train.steps`; empty for the whole file
    problem: str  # what is wrong, naming the value
    allowed: str | None = None  # what is allowed instead, or what to do
    suggestion: str | None = None  # the word that was probably meant
    severity: Severity = "error"

    @property
    def message(self) -> str:
        """`what is wrong; what is allowed (did you mean "…"?)`, on one line."""
        return _escaped(format_message(self.problem, self.allowed, self.suggestion))

    @property
    def headline(self) -> str:
        """`file:line:column: key.path: message`; a warning says so before the path."""
        name, line = self.place.source.name, self.place.line
        where = f"{name}:{line}:{self.place.column}" if line else name
        kind = "warning: " if self.severity == "warning" else ""
        path = f"{self.path}: " if self.path else ""
        return _escaped(f"{where}: {kind}{path}{self.message}")

    def redacted(self, redact_text: RedactFunction, redact_line: RedactFunction) -> "PipelineFault":
        """The fault with its words redacted, and without its line if that has anything to redact."""
        source, line = self.place.source, self.place.source_line
        lines = source.lines if redact_line(line) == line else ()
        given = {key: getattr(self, key) for key in ("path", "problem", "allowed", "suggestion")}
        words: dict[str, Any] = {key: redact_text(value) for key, value in given.items() if value}
        # What is taken for the name of a file may be KEY=VALUE that lacks its --set.
        source = replace(source, name=redact_line(source.name), lines=lines)
        return replace(self, place=replace(self.place, source=source), **words)

    def __str__(self) -> str:
        """The headline, and under it the quoted line with a caret at the column."""
        line = self.place.source_line
        if not line.strip():
            return self.headline
        return f"{self.headline}\n{_quote_with_caret(line, self.place.column)}"


def _quote_with_caret(line: str, column: int) -> str:
    """The line and a caret under `column`, both cut to a window if the line is long."""
    line = _CONTROL.sub("\ufffd", line)
    start = max(0, column - 1 - _MAX_QUOTED_COLUMNS // 2) if len(line) > _MAX_QUOTED_COLUMNS else 0
    shown = line[start : start + _MAX_QUOTED_COLUMNS]
    before = shown[: column - 1 - start]
    head = "… " if start else ""
    tail = " …" if start + _MAX_QUOTED_COLUMNS < len(line) else ""
    pad = "".join("\t" if char == "\t" else " " for char in before)
    return f"    {head}{shown}{tail}\n    {' ' * len(head)}{pad}^"


def _escaped(text: str) -> str:
    """The text on one line, and harmless to a terminal whatever a file or a file's name holds."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


class PipelineError(Exception):
    """Faults of a pipeline that cannot run, warnings too, in the file's order; `str()` is for a terminal."""

    def __init__(self, faults: Iterable[PipelineFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))
