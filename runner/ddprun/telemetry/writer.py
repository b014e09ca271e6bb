"""Writes records and events on a thread of its own, so that no step ever waits for a disk.

Records come from the recorder (`recorder.py`), the profiler (`profile.py`) and, for events, from `event_log`.
All of them are JSON lines.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import IO, Any

import orjson
import structlog

from ddprun.run_files import open_file
from ddprun_hooks.comm.trace import now_us

EVENTS, PROFILE = "events.jsonl", "profile"

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_MOST_WAITING = 50_000
_FLUSH_EVERY_S = 0.5
_LOOK_EVERY_S = 0.05


def file_of(kind: str, rank: int) -> str:
    """A rank's file in the folder `kind` (`steps`, `buckets` or `PROFILE`), below the run's."""
    return f"{kind}/rank-{rank:05}.jsonl"


class Writer:
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
        self._thread = threading.Thread(target=self._work, name="ddprun-writer", daemon=True)
        self._thread.start()

    def put(self, file: str, lines: bytes, count: int = 1) -> None:
        """Append to `file`.

        Args:
            file: below the folder.
            lines: what to append.
            count: how many records that is.
        """
        with self._lock:
            if self._waiting + count > _MOST_WAITING:
                self.dropped += count
                return
            self._waiting += count
        self._queue.put((file, lines, count))

    def flush(self) -> None:
        """Wait until everything put so far is in the files; returns at once after `close`."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(_LOOK_EVERY_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Write what is left and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        flush_at = 0.0
        while True:
            if time.monotonic() >= flush_at:  # also when records never stop coming
                self._flush_files()
                flush_at = time.monotonic() + _FLUSH_EVERY_S
            try:
                item = self._queue.get(timeout=max(0.0, flush_at - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                break
            if isinstance(item, threading.Event):
                self._flush_files()
                item.set()
            else:
                name, lines, count = item
                if self.failure is None:
                    self._write(name, lines)
                with self._lock:
                    self._waiting -= count
        self._each_file(lambda file: file.close())

    def _write(self, name: str, lines: bytes) -> None:
        try:
            if name not in self._files:
                self._files[name] = open_file(self.folder, name, "ab", make_folders=True)
            self._files[name].write(lines)
        except OSError as error:
            self._failed(error)

    def _flush_files(self) -> None:
        self._each_file(lambda file: file.flush())

    def _each_file(self, call: Callable[[IO[bytes]], None]) -> None:
        for file in self._files.values():
            try:
                call(file)
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.failure = self.failure or error.strerror or str(error)


def dumps(record: dict[str, Any]) -> bytes:
    """One record as a line of JSON, in ASCII; NaN and infinities become null, which JSON has."""
    try:
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        if line.isascii():
            return line  # else other texts' line ends and control characters would be in it as they are
    except TypeError:  # a number of more than 64 bits, a path that is not UTF-8
        pass
    return _ENCODER.encode(finite(record)).encode() + b"\n"


def finite(value: Any) -> Any:
    """A nested value as JSON can hold it: NaN and infinities become None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def event_log(
    writer: Writer | None, redact: Callable[[dict[str, Any]], dict[str, Any]], **bound: Any
) -> structlog.typing.FilteringBoundLogger:
    """A structlog logger whose lines the writer's thread writes.

    Each line has `event`, `level`, `time` (UTC, ISO 8601), `monotonic_us` (this rank's clock, as in the
    records) and the caller's fields.

    Args:
        writer: where the lines go; None discards them (every rank but 0).
        redact: replaces secrets in an event's fields.
        bound: fields of every line, such as `rank`.
    """

    def stamp(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["monotonic_us"] = now_us()
        return event

    def render(_: Any, __: str, event: MutableMapping[str, Any]) -> bytes:
        return dumps(redact(dict(event)))

    class Sink:
        def msg(self, line: bytes) -> None:
            if writer is not None:
                writer.put(EVENTS, line)

        debug = info = warning = error = critical = msg

    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        Sink(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            stamp,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    ).bind(**bound)
    return logger
