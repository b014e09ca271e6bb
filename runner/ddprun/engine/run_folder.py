"""The folder of a run: made once, found again by a run that is resumed, used by one run at a time."""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ddprun import __version__
from ddprun.checkpoint.folder import CHECKPOINTS_FOLDER
from ddprun.config import LoadedPipeline
from ddprun.config.secrets import REDACTED
from ddprun.host.processes import lock_descriptors
from ddprun.parallel.ranks import Ranks
from ddprun.run_files import (
    RUN_INFO_FILE,
    ResumeMode,
    check_folder_if_exists,
    open_file,
    read_json_object,
    replace_atomically,
)
from ddprun.standard_streams import say
from ddprun.telemetry.writer import RECORD_FOLDERS, truncate_torn_event

PIPELINE_FILE, SUMMARY_FILE = "pipeline.yaml", "summary.json"
_LOCK, _TOKEN = "run.lock", ".token"
_WAIT_S, _LEASE_S = 10.0, 120.0  # for the lock of a rank 0 that was killed and is not gone yet
_MAX_LOCK_BYTES = 1 << 20
_FOLDERS = (*RECORD_FOLDERS, CHECKPOINTS_FOLDER, "logs")  # what a resumed run may write into, or clear


class RunFolderError(Exception):
    """The folder for the run's files cannot be used: bad input."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of this run, as all ranks have agreed on it."""

    path: Path
    run_id: str  # in the folder's run.json; the same on all hosts
    token: str  # of this attempt at the run, different in each
    begun: bool  # the run was begun before, on some host: it resumes, or starts again in the same folder
    restarted: bool  # the ranks were restarted in the folder


def agree_on_folder(
    loaded: LoadedPipeline, wanted: Path | None, ranks: Ranks, *, resuming: ResumeMode, known: Path | None
) -> RunFolder:
    """Create or reuse the run's folder on rank 0, and tell all ranks.

    `wanted`: from the command line. `known`: the folder that this host's ranks used before they were
    restarted. RunFolderError: hosts have folders of different runs, or on rank 0 it cannot be made, is not
    empty, not a run's, or in use.
    """
    known_folder = next(filter(None, ranks.gather("known_run_dir", str(known or ""))), None)
    folder = Path(known_folder) if known_folder else wanted
    # Asked of all before rank 0 begins it. That a new run has no folder yet, a network disk might remember.
    new = folder is None or (resuming == "no" and not known_folder)
    ids = ranks.gather("run_id", None if new or folder is None else _read_run_id(folder))
    own = next(filter(None, ids), None)

    def make() -> tuple[str, str, str, bool]:
        begun = known_folder is not None or resuming == "yes" or (resuming == "if begun" and own is not None)
        made = folder or default_run_folder(loaded.pipeline.name)
        if begun and own is None:
            raise RunFolderError(f"cannot resume in the run folder {made}: no host has its {RUN_INFO_FILE}")
        if begun and ids[0] is None:
            say(f"{made} is new on this host: records of earlier steps are where rank 0 was before")
        for rank, other in enumerate(ids if begun else ()):
            if other not in (own, None):
                where = f"on {ranks.placement.hosts[ids.index(own)]} and on {ranks.placement.hosts[rank]}"
                raise RunFolderError(f"{made} has different runs {where}: remove one of them")
        run_id = own if begun and own is not None else secrets.token_hex(8)
        found = RunFolder(made, run_id, secrets.token_hex(4), begun, known_folder is not None)
        _make_or_take_over(loaded, found)
        return str(made), run_id, found.token, begun

    path, run_id, token, begun = ranks.from_rank_0("run_dir", make)
    return RunFolder(Path(path), run_id, token, begun, known_folder is not None)


def find_folder_leaders(loaded: LoadedPipeline, folder: RunFolder, ranks: Ranks) -> tuple[int, ...]:
    """For each rank, the lowest rank that sees the same folder: rank 0, or on a host that does not see rank
    0's folder, the first rank of that host. That one creates or reuses a folder there, or raises
    RunFolderError.
    """
    with suppress(OSError):  # reported below
        folder.path.mkdir(parents=True, exist_ok=True)  # a network disk looks for it anew
    remote = set(ranks_not_seeing(folder.path, ranks))
    first_of_host = {rank: here[0] for here in ranks.placement.ranks_by_host() for rank in here}
    leaders = tuple(
        first_of_host[rank] if remote.issuperset([rank, first_of_host[rank]]) else 0
        for rank in range(ranks.size)
    )
    if leaders[ranks.rank] == ranks.rank != 0:
        try:
            _make_or_take_over(loaded, folder)
        except RunFolderError as error:
            where = f"on {ranks.host}, which does not see rank 0's run folder"
            where += "; hosts that share a disk must share it with rank 0's host"
            raise RunFolderError(f"{error} ({where})") from None
    ranks.gather("leaders", None)
    return leaders


def ranks_not_seeing(folder: Path, ranks: Ranks) -> list[int]:
    """The ranks that do not see rank 0's folder; raises RunFolderError on rank 0 if it cannot be written."""
    token = ranks.from_rank_0("token", partial(_write_token, folder))
    sees = ranks.gather("sees the token", _holds_token(folder, token))
    if ranks.rank == 0:
        (folder / _TOKEN).unlink()
    return [rank for rank, one in enumerate(sees) if not one]


def check_writable(folder: Path) -> None:
    """Raise RunFolderError if nothing can be written into a run's folder."""
    _write_token(folder)
    (folder / _TOKEN).unlink()


def _write_token(folder: Path) -> str:
    token = secrets.token_hex(4)
    try:
        with replace_atomically(folder, _TOKEN) as file:
            file.write(token.encode())
    except OSError as error:
        raise RunFolderError(f"cannot write into the run folder {folder}: {error.strerror}") from None
    return token


def _holds_token(folder: Path, token: str) -> bool:
    try:
        with open_file(folder, _TOKEN) as file:
            return file.read(len(token) + 1) == token.encode()
    except OSError:
        return False


def _read_run_id(folder: Path) -> str | None:
    """What run a folder is of; None: it is not a run's."""
    if not os.path.lexists(folder / RUN_INFO_FILE):
        return None
    try:
        return str(read_json_object(folder, RUN_INFO_FILE).get("id"))
    except (OSError, ValueError):
        return "unreadable"  # refused where it is taken over


def _make_or_take_over(loaded: LoadedPipeline, folder: RunFolder) -> None:
    if folder.begun and os.path.lexists(folder.path / RUN_INFO_FILE):
        _take_over_folder(folder.path, _lock_wait_s(loaded) if folder.restarted else _WAIT_S)
        return
    create_run_folder(folder.path, _run_description_files(loaded, folder.run_id))


def _run_description_files(loaded: LoadedPipeline, run_id: str) -> dict[str, str]:
    """The files that say what a run is."""
    about = {"v": 1, "id": run_id, "ddprun": __version__, "pipeline_folder": str(loaded.folder)}
    return {PIPELINE_FILE: loaded.resolved_yaml(), RUN_INFO_FILE: json.dumps(about) + "\n"}


def prepare_resumed_folder(folder: Path, run_id: str, loaded: LoadedPipeline, *, changed: bool) -> None:
    """Nothing keeps a run from being resumed any more: its folder loses the earlier attempt's summary and, if
    the pipeline may have `changed`, gets it as it is now. One with a redacted password would not load.
    """
    try:
        for name, text in _run_description_files(loaded, run_id).items() if changed else ():
            if REDACTED not in text:
                with replace_atomically(folder, name) as file:
                    file.write(text.encode())
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot resume in the run folder {folder}: {error.strerror}") from None


def default_run_folder(name: str) -> Path:
    """Where a run of this name keeps its files by default."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / name / f"{now}-{secrets.token_hex(2)}"


def create_run_folder(folder: Path, texts: Mapping[str, str], option: str = "--run-dir") -> None:
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


def _take_over_folder(folder: Path, wait_s: float) -> None:
    """Lock the folder of a run that was begun, or raise RunFolderError."""
    try:
        for name in _FOLDERS:
            check_folder_if_exists(folder, name)
        open_file(folder, RUN_INFO_FILE).close()
        _lock(folder, wait_s)
        truncate_torn_event(folder)
    except OSError as error:
        raise RunFolderError(f"cannot resume in the run folder {folder}: {error.strerror}") from None


def _lock(folder: Path, wait_s: float = _WAIT_S) -> None:
    """Keep every other run out of the folder, however this process ends: the lock is its open file."""
    with open_file(folder, _LOCK, "a+b") as file:
        handle = os.dup(file.fileno())  # stays open as long as this process lives
    lock_descriptors.add(handle)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                by = os.pread(handle, _MAX_LOCK_BYTES, 0).decode(errors="replace").strip() or "another run"
                lock_descriptors.remove(handle)
                os.close(handle)
                raise RunFolderError(f"the run folder {folder} is in use by {by}") from None
            time.sleep(0.1)
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
