"""The files of records: which there are, how rank 0 gets those of other hosts, what a resume cuts off.

Each rank appends to its own files by a `Writer`. On a host that does not share the run's disk, they lie in a
temporary folder, and `RecordFiles.collect` sends what is new in them to rank 0 at stage ends and checkpoints.
"""

import re
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from ddprun.run_files import names_in, open_file, parse, replacing
from ddprun.telemetry.writer import EVENTS, PROFILE, Writer, file_of
from ddprun_hooks.comm.control import Control

FOLDERS = ("steps", "buckets", PROFILE)

_FILE = re.compile(r"rank-(\d{5,9})\.jsonl")
_TOKEN = ".rank-0"
_BLOCK_BYTES = 1 << 20


def ranks_in(run_dir: Path, kind: str) -> list[int]:
    """The ranks with a file of records in the folder `kind`; files of other names are ignored.

    Raises:
        NotPlainError: the folder is something else.
        OSError: it cannot be read.
    """
    try:
        names = names_in(run_dir, kind)
    except FileNotFoundError:
        return []
    found = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
    return sorted(rank for rank, name in found.items() if file_of(kind, rank) == f"{kind}/{name}")


class RecordFiles:
    """Where this rank writes its records, and how rank 0's folder gets them.

    Args:
        folder: the run's folder, by the same path on every host.
        control: over which ranks that do not see rank 0's folder send their records.
        tell_all: what rank 0 makes under a key, on every rank; to find out which ranks see its folder.
    """

    def __init__(
        self, folder: Path, control: Control, tell_all: Callable[[str, Callable[[], str]], str]
    ) -> None:
        self._control = control
        self._target = folder
        shared = self._sees_rank_0(tell_all)
        sees = control.all_gather([float(shared)], "who sees the run folder")[:, 0].tolist()
        self.away = [rank for rank, one in enumerate(sees) if not one]
        """Ranks that do not see rank 0's folder."""

        self._scratch = None if shared else tempfile.TemporaryDirectory(prefix="ddprun-")
        self.writer = Writer(folder if self._scratch is None else Path(self._scratch.name))
        self._sent = dict.fromkeys(FOLDERS, 0)

    def collect(self) -> None:
        """Bring all records so far to disk, and those of other hosts to rank 0; called by all ranks."""
        self.writer.flush()
        for rank in self.away:
            for kind in FOLDERS:
                if self._control.rank == rank:
                    self._control.send_bytes(self._new_bytes(kind), 0)
                elif self._control.rank == 0 and (data := self._control.receive_bytes(rank)):
                    try:
                        with open_file(self._target, file_of(kind, rank), "ab", make_folders=True) as file:
                            file.write(data)
                    except OSError as error:  # a disk that fails costs records, not the run
                        self.writer.failure = self.writer.failure or error.strerror or str(error)

    def close(self) -> None:
        """End the writing; what `collect` has not brought over is lost with its host."""
        self.writer.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _sees_rank_0(self, tell_all: Callable[[str, Callable[[], str]], str]) -> bool:
        def make() -> str:
            token = uuid.uuid4().hex
            with replacing(self._target, _TOKEN) as file:
                file.write(token.encode())
            return token

        token = tell_all("token", make)
        try:
            with open_file(self._target, _TOKEN) as file:
                seen = file.read(len(token) + 1) == token.encode()
        except OSError:
            seen = False
        self._control.barrier("the run folder")
        if self._control.rank == 0:
            (self._target / _TOKEN).unlink()
        return seen

    def _new_bytes(self, kind: str) -> bytes:
        try:
            with open_file(self.writer.folder, file_of(kind, self._control.rank)) as file:
                file.seek(self._sent[kind])
                data = file.read()
        except FileNotFoundError:
            return b""
        self._sent[kind] += len(data)
        return data


def truncate_records(run_dir: Path, step: int) -> None:
    """Cut off the records of all steps after `step`, and a torn last line: the run resumes after `step`.

    A record of a step up to a checkpoint's is always written before those of later steps.
    """
    for kind in FOLDERS:
        for rank in ranks_in(run_dir, kind):
            _truncate(run_dir, file_of(kind, rank), step)


def truncate_torn_event(run_dir: Path) -> None:
    """Cut a torn last line off the events, before more are appended; events are history."""
    with suppress(FileNotFoundError):
        _truncate(run_dir, EVENTS, None)


def _truncate(run_dir: Path, name: str, step: int | None) -> None:
    with open_file(run_dir, name, "r+b") as file:
        size = file.seek(0, 2)
        if (end := _end_of(file, size, step)) < size:
            file.truncate(end)


def _end_of(file: IO[bytes], end: int, step: int | None) -> int:
    """Where the last whole line that stays ends, in bytes; searched from the file's end."""
    rest = b""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start) + rest
        # The block's first line may have begun before it.
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
