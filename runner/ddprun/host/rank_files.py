"""The launcher's temporary folders, and what ranks leave in them: for their launcher, and for later ranks."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from ddprun.host.dev_shm import SHM_FOLDER
from ddprun.host.processes import lock_descriptors, send_signal, state_and_parent
from ddprun.run_files import replace_atomically

SCRATCH_VARIABLE = "DDPRUN_SCRATCH"  # names a folder of this launcher's own, gone when it ends
MEMORY_VARIABLE = "DDPRUN_MEMORY"  # the same, in shared memory
SHORT_PATH_PARENT = Path("/tmp")  # where a folder's path is short enough for sockets, whatever TMPDIR says
# With what tells hosts apart, which may share TMPDIR: each sees only its own processes' locks on folders.
_PREFIX = f"ddprun-launch-{zlib.crc32(os.uname().nodename.encode()):08x}-"
_RUN_DIR, _OUTCOME, _CHECKPOINT, _PIDS = "run_dir", "outcome", "checkpoint", "pids"
_ERROR = "error"
_OUTCOME_WIDTH = 4
_OUTCOME_NOT_REPORTED = 1  # exit code of a rank that has finished the run and cannot say so


@contextmanager
def temporary_launcher_folder(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder for a launcher, gone afterwards; in `parent`, None: where the system has its own. A
    launcher that is killed has no time to clear up. Its folder is then no longer locked, and the next
    launcher of the same user on the same host removes it.
    """
    remove_dead_launcher_folders()
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock_descriptors.add(handle)
    try:
        # On the folder itself, which is also how one tells cleaners of temporary files to leave it.
        fcntl.flock(handle, fcntl.LOCK_EX)
        folder = folder.rename(folder.with_name(folder.name.removeprefix(".")))  # and so may be found
        # Room for the outcome, which a disk that fills up later cannot take away.
        (folder / _OUTCOME).write_text(" " * _OUTCOME_WIDTH)
        yield folder
    finally:
        if handle in lock_descriptors:  # else this is a fork of the launcher
            shutil.rmtree(folder, ignore_errors=True)
            lock_descriptors.remove(handle)
            os.close(handle)


@contextmanager
def temporary_memory_folder() -> Iterator[Path | None]:
    """A folder in shared memory for a launcher, of this user alone, gone afterwards: a process that waits for
    the launcher's end removes it, however the launcher ends. None: there is no shared memory.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_launcher_folder(SHM_FOLDER))
            script = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$0"'
            command = ["/bin/sh", "-c", script, str(folder)]
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0))
        except OSError:
            yield None
        else:
            yield folder


def remove_dead_launcher_folders() -> None:
    """Remove the folders of launchers that are no more, on disk and in shared memory."""
    parents = {Path(tempfile.gettempdir()), SHORT_PATH_PARENT, SHM_FOLDER}
    for folder in chain.from_iterable(parent.glob(f"{_PREFIX}*") for parent in parents):
        with suppress(OSError):  # another user's, or another launcher was faster
            if folder.stat().st_uid == os.geteuid():
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(handle)


def attempt_folder() -> Path | None:
    """The folder of this start of the host's ranks, new each time; None outside of torchelastic."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    folder = Path(error_file).parent.parent
    return folder if error_file and folder.is_dir() else None


def report_run_dir(folder: Path) -> None:
    """Note the run's folder for ranks that are started after a failure: they resume in it."""
    _write_launcher_file(_RUN_DIR, str(folder))


def read_run_dir(scratch: Path | None = None) -> Path | None:
    """The run's folder, as ranks have noted it in the folder `scratch` of their launcher (None: the launcher
    of this rank); None if there is no note.
    """
    found = _read_launcher_file(scratch or _find_launcher_folder(), _RUN_DIR)
    return None if found is None else Path(found)


def report_outcome_and_exit_code(code: int) -> int:
    """Report to the launcher how the run has ended: starting the ranks again would change nothing. Gives this
    process's exit code: 0 if a launcher of ddprun's reads the outcome, else `code`.
    """
    if SCRATCH_VARIABLE not in os.environ:
        return code
    try:
        with (Path(os.environ[SCRATCH_VARIABLE]) / _OUTCOME).open("r+") as file:
            file.write(f"{code:{_OUTCOME_WIDTH}}")
    except OSError:
        return code or _OUTCOME_NOT_REPORTED
    return 0


def read_outcome(scratch: Path) -> int | None:
    """The exit code that ranks have left; None if the run has not ended."""
    code: int | None = _read_launcher_file(scratch, _OUTCOME)
    return code


def report_checkpoint(enqueued_ns: int) -> None:
    """Tell the launcher that the checkpoint enqueued then, by the monotonic clock, is over."""
    _write_launcher_file(_CHECKPOINT, enqueued_ns)


def last_checkpoint_ns(scratch: Path) -> int:
    """When the last checkpoint that is over was enqueued; 0: none is."""
    enqueued_ns: int = _read_launcher_file(scratch, _CHECKPOINT) or 0
    return enqueued_ns


def report_error_for_restart(error: list[str | int | None]) -> None:
    """Note how a rank has failed, for ranks that are started after that."""
    _write_launcher_file(_ERROR, [_restart_count(), error])


def previous_attempt_error() -> list[str | int | None] | None:
    """How a rank of this host failed when they last ran; None if none did, or under another launcher."""
    scratch = os.environ.get(SCRATCH_VARIABLE)
    start, error = _read_launcher_file(None if scratch is None else Path(scratch), _ERROR) or (
        _restart_count(),
        None,
    )
    return None if start == _restart_count() else error


def _restart_count() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def register_pid() -> None:
    """Let the launcher pass signals on to this rank."""
    if (scratch := _find_launcher_folder()) is not None:
        with suppress(OSError):
            (scratch / _PIDS).mkdir(exist_ok=True)
            (scratch / _PIDS / str(os.getpid())).touch()


def unregister_pid() -> None:
    """This rank fails: it can do nothing for its launcher any more."""
    if (scratch := _find_launcher_folder()) is not None:
        with suppress(OSError):
            (scratch / _PIDS / str(os.getpid())).unlink()


def live_rank_pids(scratch: Path) -> list[int]:
    """The ranks that are children of this process now (numbers are given again), and do not fail."""
    try:
        found = [int(entry.name) for entry in (scratch / _PIDS).iterdir()]
    except OSError:
        return []
    states = {pid: state_and_parent(pid) for pid in found}
    return [pid for pid, (state, parent) in states.items() if state != "Z" and parent == os.getpid()]


def signal_ranks(scratch: Path, *numbers: int) -> list[int]:
    """Send signals to all ranks; gives their process ids."""
    found = live_rank_pids(scratch)
    for number in numbers:
        send_signal(found, number)
    return found


def _find_launcher_folder() -> Path | None:
    """The launcher's folder: that of torchrun, under which each start of ranks has one, will do, too."""
    if SCRATCH_VARIABLE in os.environ:
        return Path(os.environ[SCRATCH_VARIABLE])
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/1/error.json
    return None if error_file is None else Path(error_file).parents[2]


def _write_launcher_file(name: str, value: Any) -> None:
    """Write JSON in the launcher's folder; if that fails, as on a full disk, the run continues without."""
    if (scratch := _find_launcher_folder()) is not None:
        with suppress(OSError), replace_atomically(scratch, name) as file:
            file.write(json.dumps(value).encode())


def _read_launcher_file(scratch: Path | None, name: str) -> Any:
    """What a file in a launcher's folder holds; None if there is none."""
    try:
        return None if scratch is None else json.loads((scratch / name).read_bytes())
    except (OSError, ValueError):
        return None
