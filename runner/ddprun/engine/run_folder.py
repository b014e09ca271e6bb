"""The folder of a run: made once, found again by a run that is resumed, used by one run at a time."""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ddprun import __version__
from ddprun.checkpoint.folder import CHECKPOINTS_FOLDER
from ddprun.config import LoadedPipeline
from ddprun.parallel.ranks import Ranks
from ddprun.run_files import RUN_INFO_FILE, ResumeMode, check_folder_if_exists, open_file
from ddprun.telemetry.writer import RECORD_FOLDERS, truncate_torn_event

PIPELINE_FILE, SUMMARY_FILE = "pipeline.yaml", "summary.json"
_LOCK = "run.lock"
_WAIT_S, _LEASE_S = 10.0, 120.0  # for the lock of a rank 0 that was killed and is not gone yet
_MAX_FILE_BYTES = 1 << 20
_FOLDERS = (*RECORD_FOLDERS, CHECKPOINTS_FOLDER, "logs")  # what a resumed run may write into, or clear


class RunFolderError(Exception):
    """The folder for the run's files cannot be used: bad input."""


class FolderInUseError(RunFolderError):
    """Another run uses it."""


def agree_on_folder(
    loaded: LoadedPipeline, wanted: Path | None, ranks: Ranks, *, resuming: ResumeMode, known: Path | None
) -> tuple[Path, str, bool]:
    """Create or reuse the run's folder on rank 0, and tell all ranks its path; gives also a token of this
    attempt at the run, different in each, and whether the run was begun before, on any host: it resumes from
    a checkpoint, or starts again in the same folder.

    `wanted`: from the command line. `known`: the folder that this host's ranks used before they were
    restarted. Rank 0 raises RunFolderError: it cannot be made, is not empty, not a run's, or in use.
    """
    known_folder = next(filter(None, ranks.gather("known_run_dir", str(known or ""))), None)
    folder = Path(known_folder) if known_folder else wanted
    # Asked of all before rank 0 begins it.
    was_begun = any(ranks.gather("begun", folder is not None and os.path.lexists(folder / RUN_INFO_FILE)))
    begun = known_folder is not None or resuming == "yes" or (resuming == "if begun" and was_begun)

    def make() -> tuple[str, str]:
        made = folder or new_folder(loaded.pipeline.name)
        if begun and not was_begun:
            raise RunFolderError(f"cannot resume in the run folder {made}: no host has its {RUN_INFO_FILE}")
        _make_or_take_over(loaded, made, begun=begun, restarted=known_folder is not None)
        return str(made), secrets.token_hex(4)

    path, token = ranks.from_rank_0("run_dir", make)
    return Path(path), token, begun


def prepare_on_host(
    loaded: LoadedPipeline, folder: Path, ranks: Ranks, *, begun: bool, restarted: bool
) -> None:
    """Create or reuse the run's folder on a host that does not see rank 0's; raises RunFolderError."""
    try:
        _make_or_take_over(loaded, folder, begun=begun, restarted=restarted)
    except RunFolderError as error:
        raise RunFolderError(f"{error} (on {ranks.host}, which does not see rank 0's disk)") from None


def _make_or_take_over(loaded: LoadedPipeline, folder: Path, *, begun: bool, restarted: bool) -> None:
    if begun and os.path.lexists(folder / RUN_INFO_FILE):
        _take_over(folder, _lock_wait_s(loaded) if restarted else _WAIT_S, restarted=restarted)
        return
    about = {"v": 1, "ddprun": __version__, "pipeline_folder": str(loaded.folder)}
    text = loaded.resolved_yaml()
    make_folder(folder, {PIPELINE_FILE: text, RUN_INFO_FILE: json.dumps(about) + "\n"})


def new_folder(name: str) -> Path:
    """Where a run of this name keeps its files by default."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / name / f"{now}-{secrets.token_hex(2)}"


def make_folder(folder: Path, texts: Mapping[str, str], option: str = "--run-dir") -> None:
    """Make the folder of a new run, with files of these texts, and keep it locked; raises RunFolderError,
    which says by which `option` another folder is named.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(entry.name != _LOCK for entry in folder.iterdir()):
            raise RunFolderError(f"the run folder {folder} is not empty: name another with {option}")
        _lock(folder)
        if any(entry.name != _LOCK for entry in folder.iterdir()):
            raise RunFolderError(f"the run folder {folder} was just taken by another run")
        for name, text in texts.items():
            with open_file(folder, name, "xb") as file:
                file.write(text.encode())
    except OSError as error:
        raise RunFolderError(f"cannot make the run folder {folder}: {error.strerror}") from None


def _lock_wait_s(loaded: LoadedPipeline) -> float:
    """How long a host that is lost may keep the lock: a network disk releases it when its lease is over."""
    return max(_WAIT_S, min(_LEASE_S, 0.8 * loaded.pipeline.launch.timeout_s))


def _take_over(folder: Path, wait_s: float, *, restarted: bool = False) -> None:
    """Lock the folder of a run that was begun, or raise RunFolderError. After a restart a lost rank may still
    hold it: a TimeoutError, and the next attempt may get it.
    """
    try:
        for name in _FOLDERS:
            check_folder_if_exists(folder, name)
        open_file(folder, RUN_INFO_FILE).close()
        _lock(folder, wait_s)
        truncate_torn_event(folder)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)  # of an attempt that has failed
    except FolderInUseError as error:
        if restarted:
            raise TimeoutError(f"{error}, which has not released it within {wait_s:g} s") from None
        raise
    except OSError as error:
        raise RunFolderError(f"cannot resume in the run folder {folder}: {error.strerror}") from None


def _lock(folder: Path, wait_s: float = _WAIT_S) -> None:
    """Keep every other run out of the folder, however this process ends: the lock is its open file."""
    with open_file(folder, _LOCK, "a+b") as file:
        handle = os.dup(file.fileno())  # stays open as long as this process lives
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                by = os.pread(handle, _MAX_FILE_BYTES, 0).decode(errors="replace").strip() or "another run"
                os.close(handle)
                raise FolderInUseError(f"the run folder {folder} is in use by {by}") from None
            time.sleep(0.1)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
