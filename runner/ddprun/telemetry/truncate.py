"""Records of a run that goes back: those of steps that are undone, and a line that was torn, are cut off."""

from contextlib import suppress
from pathlib import Path
from typing import IO

from ddprun.run_files import open_file, parse
from ddprun.telemetry.events import FILE
from ddprun.telemetry.gather import FOLDERS
from ddprun.telemetry.records import file_of, ranks_in

_BLOCK_BYTES = 1 << 20


def truncate_records(run_dir: Path, step: int) -> None:
    """Cut the records of all steps after `step`.

    Records stand in the order of their steps as far as a checkpoint is concerned: what belongs to steps up to
    it was written before what belongs to later ones.
    """
    for name in FOLDERS:
        for rank in ranks_in(run_dir, name):
            _cut(run_dir, file_of(name, rank), step)


def truncate_torn_event(run_dir: Path) -> None:
    """Cut a torn last line off the events, which are history and stay; before more are appended."""
    with suppress(FileNotFoundError):
        _cut(run_dir, FILE, None)


def _cut(run_dir: Path, name: str, step: int | None) -> None:
    with open_file(run_dir, name, "r+b") as file:
        size = file.seek(0, 2)
        if (end := _end_of(file, size, step)) < size:
            file.truncate(end)


def _end_of(file: IO[bytes], end: int, step: int | None) -> int:
    """Where the last whole line that is to stay ends, in bytes; found from the file's end."""
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start) + rest
        # The first line of the block may have begun before it.
        first = block.find(b"\n") + 1 if start else 0
        lines = block[first:].splitlines(keepends=True) if first or not start else []
        place = start + len(block)
        for line in reversed(lines):
            if line.endswith(b"\n") and _stays(line, step):
                return place
            place -= len(line)
        rest = block[:first] if first else block
        end = start
    return 0


def _stays(line: bytes, step: int | None) -> bool:
    try:
        return step is None or parse(line, finite=False)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
