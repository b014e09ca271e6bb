"""The files of records and events: JSON lines, written on a thread so that no step ever waits for a disk.

Each rank appends to its own files by a `RecordWriter`. On a host that does not share the run's disk they lie
in a temporary folder, and `RecordCollector.collect` sends what is new in them to rank 0 at stage ends and
checkpoints. A resume cuts off what came after the checkpoint (`truncate_records`).
"""

import json
import mmap
import platform
import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec
import structlog
import torch

from ddprun import __version__
from ddprun.run_files import MAX_LINE_BYTES, InvalidBytes, names_in, open_file, parse_json, replace_atomically
from ddprun.telemetry.records import Event, Summary
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.trace import now_us

EVENTS_FILE, PROFILE_FOLDER = "events.jsonl", "profile"
RECORD_FOLDERS = ("steps", "buckets", PROFILE_FOLDER)

_ENCODER, _ASCII_ENCODER = msgspec.json.Encoder(), json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_MAX_WAITING_RECORDS = 50_000
_POLL_S = 0.05
_FILE_PATTERN = re.compile(r"rank-(\d{5}|[1-9]\d{5,8})\.jsonl")  # as `record_file` names them


def record_file(kind: str, rank: int) -> str:
    """A rank's file in the folder `kind` (`steps`, `buckets` or `PROFILE_FOLDER`), below the run's."""
    return f"{kind}/rank-{rank:05}.jsonl"


class RecordWriter:
    """Appends JSON lines to files under one folder.

    When too much is waiting, because the disk has stalled, what comes is dropped and counted in `dropped`. A
    disk that fails ends the writing, not the run; `failure` says why it failed first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dropped = 0
        self.failure: str | None = None
        self._queue: queue.SimpleQueue[tuple[str, bytes, int] | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # records
        self._files: dict[str, IO[bytes]] = {}
        self._thread = threading.Thread(target=self._thread_main, name="ddprun-writer", daemon=True)
        self._thread.start()

    def put(self, file: str, lines: bytes, count: int = 1) -> None:
        """Append `lines`, which are `count` records, to `file`, which is below the folder."""
        with self._lock:
            if self._waiting + count > _MAX_WAITING_RECORDS:
                self.dropped += count
                return
            self._waiting += count
        self._queue.put((file, lines, count))

    def flush(self) -> None:
        """Wait until everything put so far is in the files; returns at once after `close`."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(_POLL_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Write what is left and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _thread_main(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            name, lines, count = item
            if self.failure is None:
                with self.keeping_first_error():
                    if name not in self._files:
                        self._files[name] = open_file(self.folder, name, "ab", make_folders=True)
                    self._files[name].write(lines)
                    self._files[name].flush()
            with self._lock:
                self._waiting -= count
        for file in self._files.values():
            with self.keeping_first_error():
                file.close()

    @contextmanager
    def keeping_first_error(self) -> Iterator[None]:
        """Keep the first error of a disk in `failure`."""
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error.strerror or str(error)


def encode_json_line(record: Any) -> bytes:
    """One record as a line of JSON, in ASCII; NaN and infinities become null, which JSON has."""
    try:
        line = _ENCODER.encode(record)
        if line.isascii():
            return line + b"\n"  # else line ends and control characters of Unicode would be in it as they are
    except (TypeError, UnicodeEncodeError):  # a number of numpy, a path that is not UTF-8
        pass
    plain = record if isinstance(record, dict) else msgspec.to_builtins(record)
    return _ASCII_ENCODER.encode(nonfinite_to_none(plain)).encode() + b"\n"


def nonfinite_to_none(value: Any) -> Any:
    """A nested value as JSON can hold it: NaN and infinities become None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: nonfinite_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_none(item) for item in value]
    return value


def make_event_logger(
    writer: RecordWriter | None, redact: Callable[[dict[str, Any]], dict[str, Any]], **bound: Any
) -> structlog.typing.FilteringBoundLogger:
    """A structlog logger whose lines the writer's thread writes; None discards them (every rank but 0).

    Each line has `event`, `level`, `time` (UTC, ISO 8601), `monotonic_us` (this rank's clock, as in the
    records), the caller's fields and those that are `bound`, all as `redact` returns them without secrets.
    """

    def write(_: Any, __: str, event: MutableMapping[str, Any]) -> NoReturn:
        if writer is not None:
            writer.put(EVENTS_FILE, encode_json_line(redact({**event, "monotonic_us": now_us()})))
        raise structlog.DropEvent  # structlog has nothing to print

    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        None,
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            write,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    ).bind(**bound)
    return logger


def log_event(events: structlog.typing.FilteringBoundLogger, event: Event) -> None:
    """Log one of the events that readers know."""
    fields = msgspec.to_builtins(event)
    events.info(fields.pop("event"), **fields)


def versions() -> dict[str, str]:
    """What the summary says of them."""
    return {"ddprun": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write `summary.json`, whole or not at all; NaN and infinities become null."""
    with replace_atomically(run_dir, "summary.json") as file:
        data = nonfinite_to_none(msgspec.to_builtins(summary))
        file.write(json.dumps(data, indent=2, allow_nan=False).encode() + b"\n")


def ranks_with_records(run_dir: Path, kind: str) -> list[int]:
    """The ranks with a file of records in the folder `kind`; raises OSError if that cannot be read."""
    try:
        names = names_in(run_dir, kind)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _FILE_PATTERN.fullmatch(name)))


class RecordCollector:
    """Where this rank writes its records, and how those of `remote_ranks`, which do not see rank 0's folder,
    reach rank 0: they have a temporary one in `scratch`; None: where the system has its own.
    """

    def __init__(
        self,
        folder: Path,
        control: ControlChannel,
        remote_ranks: Sequence[int] = (),
        scratch: Path | None = None,
    ) -> None:
        self._control, self._target, self.remote_ranks = control, folder, remote_ranks
        remote = control.rank in remote_ranks
        self._scratch = tempfile.TemporaryDirectory(prefix="ddprun-", dir=scratch) if remote else None
        self.writer = RecordWriter(folder if self._scratch is None else Path(self._scratch.name))

    def collect(self) -> None:
        """Bring all records so far to disk, and those of other hosts to rank 0; called by all ranks."""
        self.writer.flush()
        for rank in self.remote_ranks:
            for kind in RECORD_FOLDERS:
                if self._control.rank == rank:
                    self._control.send_bytes(self._take_bytes(kind), 0, "records")
                elif self._control.rank == 0 and (data := self._control.receive_bytes(rank, "records")):
                    with (
                        self.writer.keeping_first_error(),  # a disk that fails costs records, not the run
                        open_file(self._target, record_file(kind, rank), "ab", make_folders=True) as file,
                    ):
                        file.write(data)

    def close(self) -> None:
        """End the writing; what `collect` has not brought over is lost with its host."""
        self.writer.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _take_bytes(self, kind: str) -> bytes:
        """The records of this rank that rank 0 does not have yet; they leave this host's disk."""
        try:
            with open_file(self.writer.folder, record_file(kind, self._control.rank), "r+b") as file:
                data = file.read()
                file.truncate(0)
        except FileNotFoundError:
            return b""
        return data


def truncate_records(run_dir: Path, step: int) -> None:
    """Cut off the records of all steps after `step`, and a torn last line: the run resumes after `step`. A
    record of a step up to a checkpoint's is always written before those of later steps.
    """

    def stays(line: bytes) -> bool:
        return bool(parse_json(line, finite=False)["step"] <= step)

    for kind in RECORD_FOLDERS:
        for rank in ranks_with_records(run_dir, kind):
            _truncate(run_dir, record_file(kind, rank), stays)


def truncate_torn_event(run_dir: Path) -> None:
    """Cut a torn last line off the events, before more are appended; events are history."""
    with suppress(FileNotFoundError):
        _truncate(run_dir, EVENTS_FILE, lambda line: True)


def _truncate(run_dir: Path, name: str, stays: Callable[[bytes], bool]) -> None:
    """Cut a file after the last whole line that stays, on which `stays` does not fail; raises OSError."""
    with open_file(run_dir, name, "r+b") as file:
        if not (size := file.seek(0, 2)):
            return  # nothing can be mapped
        junk = InvalidBytes(name)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n", max(0, size - MAX_LINE_BYTES)) + 1
            junk.count_invalid_bytes(size - end)
            while end:
                lowest = max(0, end - MAX_LINE_BYTES)
                start = data.rfind(b"\n", lowest, end - 1) + 1
                if lowest and not start:
                    junk.count_invalid_bytes(end)  # longer than any record
                try:
                    if stays(data[start:end]):
                        break
                except (ValueError, KeyError, TypeError):
                    junk.count_invalid_bytes(end - start)
                end = start
        if end < size:
            file.truncate(end)
