"""Output of this process on stdout and stderr. A stream that cannot be written to never changes a run.

If the terminal is closed, `head` has read enough, the disk is full or the shell has closed the stream
(`2>&-`), output is lost, and nothing else happens. ddprun's own messages go through `say`, `print_stderr`
and `print_stdout`. `protect_standard_streams` does the same for everything else that writes to the standard
streams: `print` in a pipeline's own code, rich, click, warnings.
"""

import io
import os
import select
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class NeverFailingFileIO(io.FileIO):
    """A standard stream of this process. Writing to it never fails, even if nobody reads it any more.

    It has no buffer that could hold a lock, so a signal handler may write while the code that it interrupts
    is writing.
    """

    failure: OSError | None = None  # the first thing that went wrong

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of it, or as much as can be written; gives the size of all of it."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                written = super().write(left)
                if written is None:  # somebody has made it non-blocking, and it is full
                    select.select([], [self.fileno()], [])
                else:
                    left = left[written:]
        except OSError as error:
            self.failure = self.failure or error
        return size


def protect_standard_streams() -> None:
    """Replace the standard streams by ones that never fail; call it before any file is opened.

    A stream that the shell has closed becomes the null device. Otherwise the next file or socket would get
    its descriptor, and everything that C code writes to stderr. Characters that the stream's encoding lacks
    are written as escapes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it is the smallest that is free, so `os.open` gives it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, _make_never_failing(getattr(sys, name), descriptor))


def print_stderr(text: str) -> None:
    """Print a line, or several, on stderr; from a signal handler, too."""
    _write_line(sys.stderr, text)


def say(text: object) -> None:
    """Print a message of ddprun's own on stderr, where libraries and the pipeline's code print, too."""
    print_stderr(f"ddprun: {text}")


def print_stdout(text: str) -> None:
    """Print a line, or several, on stdout."""
    _write_line(sys.stdout, text)


def flush_standard_streams() -> None:
    """Flush stdout and stderr, before the process ends without the interpreter's normal shutdown."""
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether somebody may look at a stream as it comes."""
    return stream is not None and not stream.closed and stream.isatty()


def failure_of_stdout() -> OSError | None:
    """Why something that was written to stdout was lost; None if nothing was."""
    _flush(sys.stdout)
    raw = getattr(sys.stdout, "buffer", None)
    return raw.failure if isinstance(raw, NeverFailingFileIO) else None


def _write_line(stream: IO[str] | None, text: str) -> None:
    if stream is not None:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            stream.write(f"{text}\n")  # at once: lines of several processes do not mix
            stream.flush()


def _flush(stream: IO[str] | None) -> None:
    if stream is not None:
        with suppress(OSError, ValueError):
            stream.flush()


def _make_never_failing(stream: IO[str] | None, descriptor: int) -> IO[str] | None:
    if stream is None:  # Python has found it closed
        return io.TextIOWrapper(NeverFailingFileIO(descriptor), "utf-8", "backslashreplace")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO or raw.fileno() != descriptor:  # protected already, or somebody's own
        stream.reconfigure(errors="backslashreplace")
        return stream
    _flush(stream)
    return io.TextIOWrapper(
        NeverFailingFileIO(descriptor),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=raw is stream.buffer,  # as `python -u` asks for
    )
