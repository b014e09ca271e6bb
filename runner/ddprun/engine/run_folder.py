"""The folder of a run: made once, found again by a run that is resumed, used by one run at a time."""

import json
import os
import secrets
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddprun import __version__
from ddprun.checkpoint.folder import FOLDER as CHECKPOINTS
from ddprun.config import Loaded
from ddprun.parallel.ranks import Ranks
from ddprun.run_files import Resuming, check_folder, open_file, read_object
from ddprun.telemetry.writer import FOLDERS, truncate_torn_event

PIPELINE, ABOUT, SUMMARY = "pipeline.yaml", "run.json", "summary.json"
_LOCK = "run.lock"
_WAIT_S = 10.0
"""A rank 0 that was killed may take so long to be gone."""

_LEASE_S = 120.0
_MOST_BYTES = 1 << 20
_FOLDERS = (*FOLDERS, CHECKPOINTS, "logs")
"""What a run that goes on may write into, or clear."""


class RunFolderError(Exception):
    """The folder for the run's files cannot be used: bad input."""


class FolderInUseError(RunFolderError):
    """Another run has it."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, as rank 0 sees it."""

    path: Path
    token: str
    """Of this attempt at the run; another one in each."""

    goes_on: bool
    """The run was begun before: it goes on from a checkpoint, or starts anew in the same folder."""


def agree_on_folder(
    loaded: Loaded, wanted: Path | None, ranks: Ranks, *, resuming: Resuming, known: Path | None
) -> RunFolder:
    """Make, or find, the run's folder on rank 0 and tell all ranks.

    Args:
        loaded: the pipeline.
        wanted: what the command line says.
        ranks: this rank among the others.
        resuming: `wanted` is the folder of a run that is to go on.
        known: the folder that this host's ranks had before they were restarted.

    Raises:
        RunFolderError: on rank 0: it cannot be made, is not empty, is no run's, or is in use.
    """
    before = next(filter(None, ranks.gather("known_run_dir", str(known or ""))), None)

    def make() -> str:
        begun = resuming == "yes"
        if resuming == "if begun" and wanted is not None:  # others may see that it was, once rank 0 begins
            begun = (wanted / ABOUT).exists()
        if before is not None or begun:
            folder = Path(before) if before is not None else wanted
            assert folder is not None
            if before is None:
                _take_over(folder, _WAIT_S)
            else:
                _take_over_again(folder, _wait_s(loaded))
        else:
            now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            folder = wanted or Path("runs") / loaded.pipeline.name / f"{now}-{secrets.token_hex(2)}"
            _make(folder, loaded)
        return json.dumps([str(folder), secrets.token_hex(4), before is not None or begun])

    path, token, goes_on = json.loads(ranks.tell_all("run_dir", make))
    return RunFolder(Path(path), token, goes_on)


def pipeline_folder(run_dir: Path) -> Path | None:
    """Where the pipeline file of a run was: what it names is looked for there."""
    try:
        return Path(read_object(run_dir, ABOUT, _MOST_BYTES)["pipeline_folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(folder: Path, loaded: Loaded) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(entry.name != _LOCK for entry in folder.iterdir()):
            raise RunFolderError(f"the run folder {folder} is not empty: name another with --run-dir")
        _lock(folder)
        if any(entry.name != _LOCK for entry in folder.iterdir()):
            raise RunFolderError(f"the run folder {folder} was just taken by another run")
        about = {"v": 1, "ddprun": __version__, "pipeline_folder": str(loaded.folder)}
        for name, text in ((PIPELINE, loaded.resolved()), (ABOUT, json.dumps(about) + "\n")):
            with open_file(folder, name, "xb") as file:
                file.write(text.encode())
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {folder}: {error.strerror}") from None


def _wait_s(loaded: Loaded) -> float:
    """How long a host that is lost may keep the lock: a network disk lets go when its lease is over."""
    return max(_WAIT_S, min(_LEASE_S, 0.8 * loaded.pipeline.launch.timeout_s))


def _take_over_again(folder: Path, wait_s: float) -> None:
    """For ranks that are started again: it is a lost one of them that has the folder. The next may get it.

    Raises:
        TimeoutError: it is not let go.
    """
    try:
        _take_over(folder, wait_s)
    except FolderInUseError as error:
        raise TimeoutError(f"{error}, which has not let go of it within {wait_s:g} s") from None


def _take_over(folder: Path, wait_s: float) -> None:
    try:
        for name in _FOLDERS:
            check_folder(folder, name)
        try:
            open_file(folder, ABOUT).close()
        except FileNotFoundError:
            raise RunFolderError(
                f"cannot go on in the run folder {folder}: it has no {ABOUT} on {os.uname().nodename}, where "
                "rank 0 is now; hosts that share no disk need rank 0 on the same host as before"
            ) from None
        _lock(folder, wait_s)
        truncate_torn_event(folder)
        (folder / SUMMARY).unlink(missing_ok=True)  # of an attempt that has failed
    except OSError as error:
        raise RunFolderError(f"cannot go on in the run folder {folder}: {error.strerror}") from None


def _lock(folder: Path, wait_s: float = _WAIT_S) -> None:
    """Keep every other run out of the folder, however this process ends: the lock is its open file.

    Raises:
        FolderInUseError: another run is in it.
    """
    if sys.platform == "win32":
        return
    import fcntl

    with open_file(folder, _LOCK, "a+b") as file:
        handle = os.dup(file.fileno())  # stays open as long as this process lives
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                by = os.pread(handle, _MOST_BYTES, 0).decode(errors="replace").strip() or "another run"
                os.close(handle)
                raise FolderInUseError(f"the run folder {folder} is in use by {by}") from None
            time.sleep(0.1)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
