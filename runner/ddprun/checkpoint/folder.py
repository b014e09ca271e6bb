"""Checkpoints in a run's folder: one folder each, whole or not there.

```
checkpoints/
  step-00000500/
    manifest.json                       written last: what is in it, with sizes and SHA-256
    shared.json, shared.safetensors     what all ranks have alike
    rank-00000.json, rank-00000.safetensors ...   what each rank has for itself
  .step-00001000.1f0c/                  being written, or what was left of that
```

A checkpoint is written beside its place, every file and the folder brought to disk, and then renamed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from ddprun.checkpoint.codec import decode, encode
from ddprun.checkpoint.tensors import DamagedError, UnreadableError, read_tensors, write_tensors
from ddprun.run_files import NotPlainError, open_file, read_object

FOLDER = "checkpoints"
"""In the folder of a run."""

VERSION = 4
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_MANIFEST_BYTES = 64 * 1024 * 1024

Files = dict[str, dict[str, Any]]
"""By name: bytes, and sha256 in hexadecimal."""

LOSS = "loss"

_KINDS = ("json", "safetensors")
_REPLACED = "replaced"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Apart:
    """State that has been taken apart: what happens to the original afterwards changes nothing."""

    tree: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Apart":
        """Take nested state apart.

        Raises:
            UnstorableError: something in it is neither a tensor nor what JSON has.
        """
        return cls(*encode(state))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest could be read."""

    path: Path
    step: int
    """Optimizer steps of the run when it was taken."""

    world_size: int
    files: Files
    own: bool = False
    """It lies in a folder that this process has made, and not in that of a run."""

    nonfinite: str | None = None
    """What in it is not finite: a parameter, optimizer state, or `LOSS` alone; None: all of these are."""

    @property
    def below(self) -> Path:
        """The folder in which nothing is followed: that of the run."""
        return self.path if self.own else self.path.parent.parent

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(int(file["bytes"]) for file in self.files.values())


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08}"


def unfinished(root: Path, step: int, token: str) -> Path:
    """Where the ranks write a checkpoint; `token` is the same on all of them, and another in each attempt."""
    return root / f".{name_of(step)}.{token}"


def write(folder: Path, name: str, state: Apart) -> Files:
    """Write state as two files, and bring them to disk.

    Args:
        folder: of the checkpoint that is being written; made if it is not there.
        name: `shared` or `rank-00000`.
        state: what they hold.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, weights = paths(folder, name)
    with open_file(folder, text.name, "wb") as file:
        file.write(json.dumps(state.tree, allow_nan=False).encode())
    digest = write_tensors(weights, state.tensors)
    return {
        text.name: _brought_to_disk(text),
        weights.name: {"bytes": weights.stat().st_size, "sha256": digest},
    }


def paths(folder: Path, name: str) -> list[Path]:
    """The files of one name."""
    return [folder / f"{name}.{kind}" for kind in _KINDS]


def check_received(folder: Path, files: Files) -> None:
    """Bring files to disk that have come from another host.

    Raises:
        OSError: they are not what was sent.
    """
    for name, told in files.items():
        if _brought_to_disk(folder / name) != told:
            raise OSError(None, f"{name} has not come over whole")


def commit(
    root: Path, step: int, token: str, world_size: int, files: Files, nonfinite: str | None = None
) -> Checkpoint:
    """Give a checkpoint whose files are all written its name: from here on it is there.

    Raises:
        OSError: it cannot be written, or a file that a rank has written is not seen here.
    """
    folder, target = unfinished(root, step, token), root / name_of(step)
    for name, told in files.items():
        if (folder / name).stat().st_size != told["bytes"]:
            raise OSError(None, f"{name} is not whole here")
    manifest = {
        "v": VERSION,
        "step": step,
        "world_size": world_size,
        "nonfinite": nonfinite,
        "files": files,
    }
    path = folder / MANIFEST
    with open_file(folder, MANIFEST, "wb") as file:
        file.write(json.dumps(manifest, indent=1).encode() + b"\n")
    _brought_to_disk(path)
    _sync_folder(folder)
    replaced = None
    if target.exists():  # of an attempt that was undone, or damaged
        replaced = root / f".{name_of(step)}.{_REPLACED}"
        _remove(replaced)
        target.rename(replaced)
    folder.rename(target)
    _sync_folder(root)
    if replaced is not None:
        _remove(replaced)
    return Checkpoint(target, step, world_size, files, nonfinite=nonfinite)


def steps_in(root: Path) -> list[int]:
    """The steps of the checkpoints that have their name, newest first; whole or not."""
    try:
        names = [entry.name for entry in root.iterdir() if entry.is_symlink() or entry.is_dir()]
    except OSError:
        return []
    found = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,18})", name))]
    return sorted((step for step in found if name_of(step) in names), reverse=True)


def opened(root: Path, step: int) -> Checkpoint:
    """A checkpoint by its manifest.

    Raises:
        DamagedError: the manifest is not there, or says what no manifest says.
    """
    folder = root / name_of(step)
    path = folder / MANIFEST
    told = _read_json(root.parent, path, MAX_MANIFEST_BYTES)
    if told.get("v") != VERSION:
        raise DamagedError(f"{path}: version {told.get('v')}, and this ddprun reads {VERSION}")
    world_size, listed, nonfinite = told.get("world_size"), told.get("files"), told.get("nonfinite")
    if told.get("step") != step:
        raise DamagedError(f"{path} tells of step {told.get('step')}")
    if not isinstance(listed, dict):
        raise DamagedError(f"{path} lists no files")
    if not isinstance(nonfinite, str | None):
        raise DamagedError(f"{path} does not tell what is not finite")
    # Two files of each rank, and two of all: nothing is made for ranks of which there are none.
    if type(world_size) is not int or not 1 <= world_size <= len(listed) // len(_KINDS):
        raise DamagedError(f"{path} tells of {world_size} ranks, and lists {len(listed):,} files")
    files = {_plain(path, name): _described(path, name, entry) for name, entry in listed.items()}
    found = Checkpoint(folder, step, world_size, files, nonfinite=nonfinite)
    wanted = {
        f"{name}.{kind}" for name in ["shared", *map(rank_name, range(found.world_size))] for kind in _KINDS
    }
    if missing := wanted - files.keys():
        raise DamagedError(f"{path} lacks {min(missing)}")
    return found


def rank_name(rank: int) -> str:
    """The name of a rank's files."""
    return f"rank-{rank:05}"


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Make sure that state is what the manifest says, and can be put together.

    Args:
        checkpoint: as `opened`.
        names: `shared`, `rank-00000` and the like; None: all.

    Raises:
        DamagedError: names the file.
    """
    for name in ["shared", *map(rank_name, range(checkpoint.world_size))] if names is None else names:
        for path in paths(checkpoint.path, name):
            _verify_file(checkpoint, path)
        read(checkpoint, name, outline=True)


def _verify_file(checkpoint: Checkpoint, path: Path) -> None:
    told = checkpoint.files[path.name]
    try:
        with open_file(checkpoint.below, path.relative_to(checkpoint.below)) as file:
            size = os.fstat(file.fileno()).st_size
            if size != told["bytes"]:
                raise DamagedError(f"{path} has {size:,} bytes and not {told['bytes']:,}")
            if _sha256(file) != told["sha256"]:
                raise DamagedError(f"{path} is not what was written: its SHA-256 differs")
    except NotPlainError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None


def read(checkpoint: Checkpoint, name: str, *, outline: bool = False) -> dict[str, Any]:
    """State that `write` wrote, from files that `verify` has found whole.

    Args:
        checkpoint: as `opened`.
        name: `shared`, or `rank-00000` and the like.
        outline: with tensors on torch's `meta` device, which have no data.

    Raises:
        DamagedError: it does not hold together.
    """
    text, weights = paths(checkpoint.path, name)
    tree = read_json(checkpoint, text)
    try:
        return decode(tree, read_tensors(weights, checkpoint.below, outline=outline))
    except OSError as error:
        raise DamagedError(f"{checkpoint.path / name}: {error.strerror}") from None
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(f"{text}: {error}") from None


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` and the newest that is finite; one that cannot be deleted stays."""
    finite = last_finite(root)
    for step in steps_in(root)[keep:]:
        if step == finite:
            continue
        gone = root / f".{name_of(step)}.old"
        _remove(gone)  # of a run that was killed while it deleted one
        try:
            (root / name_of(step)).rename(gone)  # never seen half deleted
        except OSError:
            continue
        _remove(gone)


def worst(found: Iterable[str | None]) -> str | None:
    """Of what is not finite in several parts the first that is more than a loss; None: nothing is."""
    return max(filter(None, found), key=lambda name: name != LOSS, default=None)


def last_finite(root: Path) -> int | None:
    """The newest checkpoint in which all is finite, by what the manifests say; None: there is none."""
    for step in steps_in(root):
        try:
            if opened(root, step).nonfinite is None:
                return step
        except DamagedError:
            continue
    return None


def set_aside(root: Path, step: int, why: str) -> Path:
    """Rename a checkpoint that is not gone on from to `step-….why`: it is kept, and not counted any more."""
    path = root / name_of(step)
    aside = root / f"{path.name}.{why}"
    _remove(aside)
    return path.rename(aside)


def clear_unfinished(root: Path) -> None:
    """Delete what writing that did not end has left behind.

    A checkpoint that was just being replaced gets its name back, if the other one did not get it.
    """
    if root.is_dir():
        for entry in root.iterdir():
            name = entry.name.removeprefix(".").removesuffix(f".{_REPLACED}")
            if entry.name == f".{name}.{_REPLACED}" and not (root / name).exists():
                entry.rename(root / name)
        for entry in root.iterdir():
            if re.fullmatch(r"\.step-\d{8,}\..+", entry.name):
                _remove(entry)


def _remove(path: Path) -> None:
    """Delete a folder with all that is in it, or what stands in its place; never what a link leads to."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def discard(folder: Path) -> None:
    """Give up writing a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def read_json(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint, which may be damaged.

    Raises:
        DamagedError: it is not there, too long, nested too deeply, or no JSON object.
    """
    return _read_json(checkpoint.below, path, MAX_JSON_BYTES)


def _read_json(below: Path, path: Path, most_bytes: int) -> dict[str, Any]:
    try:
        return read_object(below, path.relative_to(below), most_bytes)
    except NotPlainError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path}: {error}") from None


def _plain(manifest: Path, name: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]{1,64}\.(json|safetensors)", name):
        raise DamagedError(f"{manifest} names the file {name[:64]!a}")
    return name


def _described(manifest: Path, name: str, told: Any) -> dict[str, Any]:
    size, digest = (told.get("bytes"), told.get("sha256")) if isinstance(told, dict) else (None, None)
    if type(size) is not int or not 0 <= size < 2**63 or not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
        raise DamagedError(f"{manifest} does not tell size and SHA-256 of {name}")
    return {"bytes": size, "sha256": digest}


def _brought_to_disk(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = _sha256(file)
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := file.read(_CHUNK_BYTES):
        digest.update(data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
