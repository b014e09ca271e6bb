"""Faults as text for a terminal or a log, as JSON, and as GitHub's workflow commands; progress."""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import click

from ddprun import EXIT_FAILURE
from ddprun.config.faults import PipelineFault
from ddprun.config.secrets import Secrets
from ddprun.standard_streams import is_terminal, say

_PROGRESS_EVERY_S = 5.0


def use_color(stream: IO[str]) -> bool:
    """Whether to color what goes to the stream: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def print_faults(faults: Iterable[PipelineFault], stream: IO[str] | None = None) -> None:
    """Print faults for a reader, one below the other; by default on stderr."""
    stream = stream or sys.stderr
    for fault in faults:
        click.echo(_style_fault(fault), file=stream, color=use_color(stream))


def _style_fault(fault: PipelineFault) -> str:
    head, _, quoted = str(fault).partition("\n")
    where, _, message = head.partition(": ")
    tone = "yellow" if fault.severity == "warning" else "red"
    lines = [f"{click.style(where, bold=True)}: {message}"]
    if quoted:
        line, _, caret = quoted.rpartition("\n")
        lines += [line, click.style(caret, fg=tone, bold=True)]
    return "\n".join(lines)


def write_error(target: Path, error: OSError) -> click.ClickException:
    """The error of a command that could not write a file or folder."""
    why = error.strerror or str(error)
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not target.parent.is_dir():
        why = f"there is no folder {target.parent}"
    return click.ClickException(f"cannot write {target}: {why}")


def say_failure(error: Exception, expected: tuple[type[Exception], ...], secrets: Secrets) -> int:
    """Say what ended a command; of what is not expected, so of the pipeline's own code, such as a model's
    forward, also where it comes from. Gives the exit code.
    """
    text = str(error)
    if not isinstance(error, expected):
        text = f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}"
    say(secrets.redact(text))
    return EXIT_FAILURE


def fault_to_json_data(fault: PipelineFault) -> dict[str, Any]:
    """A fault for `--format json`."""
    words = ("path", "severity", "message", "problem", "allowed", "suggestion")
    return {
        "file": fault.place.source.name,
        "line": fault.place.line,
        "column": fault.place.column,
        **{key: getattr(fault, key) for key in words},
        "source_line": fault.place.source_line,
    }


def github_annotation(fault: PipelineFault) -> str:
    """A fault as a workflow command, which GitHub shows beside the line."""
    place, source, properties = fault.place, fault.place.source, {"title": "ddprun"}
    message = f"{fault.path}: {fault.message}" if fault.path else fault.message
    if source.override_number:
        message = f"{source.name}: {message}"
    else:
        properties["file"] = source.name
        if place.line:
            properties |= {"line": str(place.line), "col": str(place.column)}
    escaped = {
        key: _escape_workflow_data(value).replace(":", "%3A").replace(",", "%2C")
        for key, value in properties.items()
    }
    shown = ",".join(f"{key}={value}" for key, value in escaped.items())
    return f"::{fault.severity} {shown}::{_escape_workflow_data(message)}"


def _escape_workflow_data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def make_progress_printer() -> Callable[[str], None]:
    """A function that says what is going on now, but only every few seconds."""
    last_s = -math.inf

    def say_now_and_then(text: str) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) >= last_s + _PROGRESS_EVERY_S:
            last_s = now_s
            say(text)

    return say_now_and_then
