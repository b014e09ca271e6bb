"""What ranks leave for their launcher, and for the ranks that it starts after them, on the same host."""

import json
import os
from contextlib import suppress
from pathlib import Path

SCRATCH = "DDPRUN_SCRATCH"
"""Environment variable: a folder of this launcher's own, gone when it ends."""

_RUN_DIR, _OUTCOME, _CHECKPOINT, _PIDS = "run_dir", "outcome", "checkpoint", "pids"
_OUTCOME_WIDTH = 4
_UNTOLD = 1
"""Exit code of a rank that has finished the run and cannot say so."""


def attempt_folder() -> Path | None:
    """Of this start of this host's ranks: torchelastic makes a new one each time."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    folder = Path(error_file).parent.parent
    return folder if error_file and folder.is_dir() else None


def prepare_outcome(scratch: Path) -> None:
    """Make room for the outcome, which a disk that fills up later cannot take away. By the launcher."""
    (scratch / _OUTCOME).write_text(" " * _OUTCOME_WIDTH)


def keep_run_dir(folder: Path) -> None:
    """For ranks that are started after a failure: they go on in this folder."""
    if (scratch := _scratch()) is not None:
        _write(scratch / _RUN_DIR, str(folder))


def run_dir() -> Path | None:
    """The folder of the ranks that this host's launcher had started before."""
    scratch = _scratch()
    return None if scratch is None else run_dir_of(scratch)


def run_dir_of(scratch: Path) -> Path | None:
    """The run's folder, as the ranks of a launcher have noted it."""
    try:
        return Path((scratch / _RUN_DIR).read_text("utf-8", "surrogateescape"))
    except OSError:
        return None


def keep_outcome(code: int) -> int:
    """Tell the launcher how the run has ended: starting the ranks again would change nothing.

    Returns:
        The exit code for this process: 0 if a launcher of ddprun's reads the outcome, and so starts nothing
        again; else `code`.
    """
    if SCRATCH not in os.environ:
        return code
    try:
        with (Path(os.environ[SCRATCH]) / _OUTCOME).open("r+") as file:
            file.write(f"{code:{_OUTCOME_WIDTH}}")
    except OSError:
        return code or _UNTOLD
    return 0


def outcome(scratch: Path) -> int | None:
    """The exit code that ranks have left; None if the run has not ended."""
    try:
        return int((scratch / _OUTCOME).read_text("ascii"))
    except (OSError, ValueError):
        return None


def keep_checkpoint(put_ns: int, written: bool) -> None:
    """Tell the launcher what has become of a checkpoint.

    Args:
        put_ns: when it was taken, by this host's monotonic clock.
        written: or left out.
    """
    if (scratch := _scratch()) is not None:
        _write(scratch / _CHECKPOINT, json.dumps([put_ns, written]))


def checkpoint(scratch: Path) -> tuple[int, bool]:
    """When the last one was taken that is over, and whether it was written."""
    try:
        put_ns, written = json.loads((scratch / _CHECKPOINT).read_text("ascii"))
    except (OSError, ValueError):
        return 0, False
    return put_ns, written


def keep_pid() -> None:
    """Let the launcher pass signals on to this rank."""
    if (scratch := _scratch()) is not None:
        with suppress(OSError):
            (scratch / _PIDS).mkdir(exist_ok=True)
            (scratch / _PIDS / str(os.getpid())).touch()


def drop_pid() -> None:
    """This rank fails: it can do nothing for its launcher any more."""
    if (scratch := _scratch()) is not None:
        with suppress(OSError):
            (scratch / _PIDS / str(os.getpid())).unlink()


def pids(scratch: Path) -> list[int]:
    """The ranks that are children of this process now, and do not fail."""
    try:
        found = [int(entry.name) for entry in (scratch / _PIDS).iterdir()]
    except OSError:
        return []
    return [pid for pid in found if _is_our_living_child(pid)]


def _is_our_living_child(pid: int) -> bool:
    """A number may have been given to another process since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return not Path("/proc").is_dir()
    state, parent, *_ = stat.rpartition(")")[2].split()
    return state != "Z" and int(parent) == os.getpid()


def _scratch() -> Path | None:
    """The launcher's folder: that of torchrun, under which each start of ranks has one, will do, too."""
    if SCRATCH in os.environ:
        return Path(os.environ[SCRATCH])
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/1/error.json
    return None if error_file is None else Path(error_file).parents[2]


def _write(path: Path, text: str) -> bool:
    """Whether it could be written: on a full disk the run goes on without."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, "utf-8", "surrogateescape")
        unfinished.replace(path)
    except OSError:
        return False
    return True
