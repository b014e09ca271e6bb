"""Files in a run's folder. Such a folder may come from anyone, so no link in it is followed.

A file is opened by its name below the folder. A symbolic link (the file itself or a folder on the way to it),
a named pipe, a socket or a device is refused: it may lead outside the run, and opening a pipe may block for
ever. A file that is written to has no other name: `wb` makes a new one in the place of the old one, and one
with hard links is not continued. The path of the folder itself comes from the user and may contain links.
"""

import errno
import json
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import ValidationError

ResumeMode = Literal["no", "yes", "if begun"]
"""Whether to resume the run in the folder: never, always, or only if the folder holds one."""

OpenMode = Literal["rb", "r+b", "a+b", "ab", "wb", "xb"]
"""As `open` has them; `a+b` is also for files that are locked."""

RUN_INFO_FILE = "run.json"
MAX_JSON_BYTES = 256 << 20  # longest JSON that is read
MAX_JSON_DEPTH = 100
"""Deepest nesting of JSON that is read; what a run writes is nested less than half as deeply."""

MAX_LINE_BYTES = 64 << 20  # longest line of a file of records that is read
_MAX_JUNK_BYTES, _MIN_LINE_BYTES = 16 << 20, 1 << 10

_OPEN_FLAGS: dict[OpenMode, int] = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
_COMMON_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class WrongFileTypeError(OSError):
    """There is something else, such as a link or a pipe, where a file or folder of a run should be."""

    def __init__(self, path: Path, found: int, wanted: str) -> None:
        link = "a symbolic link, " if stat.S_ISLNK(found) else ""
        super().__init__(errno.ELOOP, f"{path.name} is {link}not {wanted}", str(path))


class InvalidBytes:
    """How much of a file of records may be none: a lost tail after a crash, torn lines. A file that somebody
    has made of holes, or of empty lines, would take hours to read.
    """

    def __init__(self, name: str | Path) -> None:
        self._name, self._left_bytes = Path(name).name, _MAX_JUNK_BYTES

    def count_invalid_bytes(self, count: int) -> None:
        """Count bytes of a line that is no record, at least 1 KiB; raises OSError if it is too much."""
        self._left_bytes -= max(count, _MIN_LINE_BYTES)
        if self._left_bytes < 0:
            problem = f"more than {_MAX_JUNK_BYTES >> 20} MiB of {self._name} are not records"
            raise OSError(errno.EFBIG, problem, self._name)


def open_file(
    folder: Path, name: str | Path, mode: OpenMode = "rb", *, make_folders: bool = False
) -> IO[bytes]:
    """Open a regular file of a run by its name below the folder, with the folders that lead to it. Raises
    OSError: WrongFileTypeError behind a link, EMLINK if `mode` continues a file with other names.
    """
    *folders, last = Path(name).parts
    with _open_folder(folder, folders, make=make_folders) as inside:
        if mode == "wb":
            with suppress(OSError):
                os.unlink(last, dir_fd=inside)
        handle = _open_checked(folder / name, last, inside, _OPEN_FLAGS[mode])
    return os.fdopen(handle, mode)


def names_in(folder: Path, name: str | Path) -> list[str]:
    """What is in a folder of a run, in order; raises OSError, such as WrongFileTypeError if it is none."""
    with _open_folder(folder, Path(name).parts) as inside:
        return sorted(os.listdir(inside))


def resume_command(run_dir: Path) -> str:
    return f"ddprun resume {shlex.quote(str(run_dir))}"


def check_folder_if_exists(folder: Path, name: str) -> None:
    """Raise WrongFileTypeError if there is something of this name in a run that is not a folder."""
    with suppress(FileNotFoundError), _open_folder(folder, Path(name).parts):
        pass


@contextmanager
def replace_atomically(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Replace a file when the block ends without an error, else it stays as it was; raises OSError."""
    unfinished = f".{name}.{os.getpid()}"
    with _open_folder(folder) as inside:
        with suppress(FileNotFoundError):  # of a process that had the same number, or planted
            os.unlink(unfinished, dir_fd=inside)
        try:
            with os.fdopen(_open_checked(folder / name, unfinished, inside, _OPEN_FLAGS["xb"]), "wb") as file:
                yield file
            os.rename(unfinished, name, src_dir_fd=inside, dst_dir_fd=inside)
        except OSError as error:
            error.filename = error.filename or str(folder / name)
            raise
        finally:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=inside)


def read_json_object(folder: Path, name: str | Path) -> dict[str, Any]:
    """A JSON object from a file of a run. Raises OSError if the file cannot be read, ValueError with what is
    wrong with it.
    """
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size  # `read` makes room for all that it may get
        found = parse_json(file.read(min(size, MAX_JSON_BYTES) + 1))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def read_pipeline_folder(run_dir: Path) -> Path:
    """The folder of the pipeline file that a run began with; raises as `read_json_object` does."""
    folder = read_json_object(run_dir, RUN_INFO_FILE).get("pipeline_folder")
    if not isinstance(folder, str):
        raise ValueError(f"{RUN_INFO_FILE} names no folder")
    return Path(folder)


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """JSON that somebody else may have written; `finite`: without NaN and infinities, which JSON lacks.
    Raises ValueError if it is none, too long, or nested too deeply.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"longer than {MAX_JSON_BYTES:,} bytes")
    try:
        number = _parse_finite_float if finite else None
        found = json.loads(data, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    level: list[Any] = [[found]]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return found
    raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")


def describe_read_error(error: Exception) -> str:
    """What is wrong with a file that somebody else may have written; of a model, its first wrong field."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join("".join(c for c in str(key) if c.isprintable()) for key in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


@contextmanager
def _open_folder(folder: Path, names: Sequence[str] = (), *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that these names lead to."""
    with ExitStack() as stack:
        handle, path = os.open(folder, _FOLDER_FLAGS), folder
        stack.callback(os.close, handle)
        for name in names:
            path /= name
            if name == os.pardir or os.sep in name:
                raise ValueError(f"{path} is not below {folder}")
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
            handle = _open_checked(path, name, handle, _FOLDER_FLAGS | os.O_NOFOLLOW, wanted="a folder")
            stack.callback(os.close, handle)
        yield handle


def _open_checked(path: Path, name: str, folder_fd: int, flags: int, wanted: str = "a regular file") -> int:
    try:
        handle = os.open(name, flags | _COMMON_FLAGS, 0o666, dir_fd=folder_fd)
    except OSError as error:
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
            if not (stat.S_ISDIR(found) if flags & os.O_DIRECTORY else stat.S_ISREG(found)):
                raise WrongFileTypeError(path, found, wanted) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    opened = os.fstat(handle)
    if not flags & os.O_DIRECTORY and not stat.S_ISREG(opened.st_mode):
        os.close(handle)
        raise WrongFileTypeError(path, opened.st_mode, wanted)
    if flags & (os.O_WRONLY | os.O_RDWR) and opened.st_nlink > 1:
        os.close(handle)
        problem = f"{path.name} has hard links, and would change elsewhere, too; copy the folder with cp -r"
        raise OSError(errno.EMLINK, problem, str(path))
    return handle
