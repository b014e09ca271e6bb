"""Writes records to disk on a thread of its own, so that no step ever waits for a disk."""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

Lines = Callable[[], Iterable[dict[str, Any]]]

_QUEUE_LIMIT = 20_000
_FLUSH_EVERY_S = 0.5


class Writer:
    """Appends JSON lines to files under one folder.

    A full queue (the disk has stalled) drops what comes and counts it in `dropped`; a disk that fails ends
    the writing, not the run, and says why in `failure`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dropped = 0
        self.failure: str | None = None
        self._queue: queue.Queue[tuple[str, Lines | str] | threading.Event | None] = queue.Queue(_QUEUE_LIMIT)
        self._files: dict[str, IO[bytes]] = {}
        self._thread = threading.Thread(target=self._work, name="ddprun-writer", daemon=True)
        self._thread.start()

    def put(self, file: str, lines: Lines | str) -> None:
        """Append to `file`: one ready line, or what `lines()` makes, called on the writer's thread."""
        try:
            self._queue.put_nowait((file, lines))
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until everything put so far is in the files."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

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
            elif self.failure is None:
                self._write(*item)
        self._flush_files()
        for file in self._files.values():
            file.close()

    def _write(self, name: str, lines: Lines | str) -> None:
        text = lines if isinstance(lines, str) else "".join(f"{dumps(line)}\n" for line in lines())
        try:
            if name not in self._files:
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[name] = path.open("ab")
            self._files[name].write(text.encode())
        except OSError as error:
            self.failure = str(error)

    def _flush_files(self) -> None:
        try:
            for file in self._files.values():
                file.flush()
        except OSError as error:
            self.failure = str(error)


def dumps(record: dict[str, Any]) -> str:
    """One record as one line of JSON; NaN and infinities become null, which JSON has."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
