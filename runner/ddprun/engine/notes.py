"""What ranks leave for their launcher, and for the ranks that it starts after them, on the same host."""

import os
from pathlib import Path

SCRATCH = "DDPRUN_SCRATCH"
"""Environment variable: a folder of this launcher's own, gone when it ends."""

_RUN_DIR, _OUTCOME, _PIDS = "run_dir", "outcome", "pids"


def keep_run_dir(folder: Path) -> None:
    """For ranks that are started after a failure: they go on in this folder."""
    if (scratch := _scratch()) is not None:
        _write(scratch / _RUN_DIR, str(folder))


def run_dir() -> Path | None:
    """The folder of the ranks that this host's launcher had started before."""
    scratch = _scratch()
    if scratch is None:
        return None
    try:
        return Path((scratch / _RUN_DIR).read_text())
    except OSError:
        return None


def keep_outcome(code: int) -> int:
    """Tell the launcher how the run has ended, where starting the ranks again would change nothing.

    Returns:
        The exit code for this process: 0 if a launcher of ddprun's reads the outcome, and so starts nothing
        again; else `code`.
    """
    if (scratch := _scratch()) is None:
        return code
    _write(scratch / _OUTCOME, str(code))
    return 0


def outcome(scratch: Path) -> int:
    """The exit code that ranks have left; 0 if none has."""
    try:
        return int((scratch / _OUTCOME).read_text())
    except (OSError, ValueError):
        return 0


def keep_pid() -> None:
    """Let the launcher pass signals on to this rank."""
    if (scratch := _scratch()) is not None:
        (scratch / _PIDS).mkdir(exist_ok=True)
        (scratch / _PIDS / str(os.getpid())).touch()


def pids(scratch: Path) -> list[int]:
    """The ranks that are children of this process now."""
    try:
        found = [int(entry.name) for entry in (scratch / _PIDS).iterdir()]
    except OSError:
        return []
    return [pid for pid in found if _is_our_child(pid)]


def _is_our_child(pid: int) -> bool:
    """A number may have been given to another process since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc").is_dir()
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()


def _scratch() -> Path | None:
    found = os.environ.get(SCRATCH)
    return None if found is None else Path(found)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
