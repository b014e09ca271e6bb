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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddprun.checkpoint.codec import decode, encode
from ddprun.checkpoint.tensors import DamagedError, UnreadableError, read_tensors, write_tensors

VERSION = 2
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 256 * 1024 * 1024

Files = dict[str, dict[str, Any]]
"""By name: bytes, and sha256 in hexadecimal."""

_KINDS = ("json", "safetensors")
_REPLACED = "replaced"


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
    text.write_text(json.dumps(state.tree, allow_nan=False))
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


def commit(root: Path, step: int, token: str, world_size: int, files: Files) -> Checkpoint:
    """Give a checkpoint whose files are all written its name: from here on it is there.

    Raises:
        OSError: it cannot be written, or a file that a rank has written is not seen here.
    """
    folder, target = unfinished(root, step, token), root / name_of(step)
    for name, told in files.items():
        if (folder / name).stat().st_size != told["bytes"]:
            raise OSError(None, f"{name} is not whole here")
    manifest = {"v": VERSION, "step": step, "world_size": world_size, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    _brought_to_disk(path)
    _sync_folder(folder)
    replaced = None
    if target.exists():  # of an attempt that was undone, or damaged
        replaced = root / f".{name_of(step)}.{_REPLACED}"
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)
    _sync_folder(root)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return Checkpoint(target, step, world_size, files)


def steps_in(root: Path) -> list[int]:
    """The steps of the checkpoints that have their name, newest first; whole or not."""
    try:
        names = [entry.name for entry in root.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(
        (int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{8,})", name))), reverse=True
    )


def opened(root: Path, step: int) -> Checkpoint:
    """A checkpoint by its manifest.

    Raises:
        DamagedError: the manifest is not there, or says what no manifest says.
    """
    folder = root / name_of(step)
    told = read_json(folder / MANIFEST)
    try:
        if told["v"] != VERSION:
            raise DamagedError(f"{folder / MANIFEST}: version {told['v']}, and this ddprun reads {VERSION}")
        files = {
            _plain(name): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])}
            for name, f in told["files"].items()
        }
        found = Checkpoint(folder, int(told["step"]), int(told["world_size"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{folder / MANIFEST} is no manifest: {error!r}") from None
    if found.step != step or found.world_size < 1:
        raise DamagedError(f"{folder / MANIFEST} tells of step {found.step}")
    wanted = {
        f"{name}.{kind}" for name in ["shared", *map(rank_name, range(found.world_size))] for kind in _KINDS
    }
    if missing := wanted - files.keys():
        raise DamagedError(f"{folder / MANIFEST} lacks {min(missing)}")
    return found


def rank_name(rank: int) -> str:
    """The name of a rank's files."""
    return f"rank-{rank:05}"


def verify(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> None:
    """Make sure that files are what the manifest says.

    Args:
        checkpoint: as `opened`.
        names: of files; None: all.

    Raises:
        DamagedError: names the file.
    """
    for name in checkpoint.files if names is None else names:
        told, path = checkpoint.files[name], checkpoint.path / name
        try:
            size = path.stat().st_size
            if size != told["bytes"]:
                raise DamagedError(f"{path} has {size:,} bytes and not {told['bytes']:,}")
            if _sha256(path) != told["sha256"]:
                raise DamagedError(f"{path} is not what was written: its SHA-256 differs")
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None


def read(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """State that `write` wrote, from files that `verify` has found whole.

    Raises:
        DamagedError: it does not hold together.
    """
    tree = read_json(checkpoint.path / f"{name}.json")
    try:
        return decode(tree, read_tensors(checkpoint.path / f"{name}.safetensors"))
    except OSError as error:
        raise DamagedError(f"{checkpoint.path / name}: {error.strerror}") from None
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(f"{checkpoint.path / name}.json: {error}") from None


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep`; one that cannot be deleted stays."""
    for step in steps_in(root)[keep:]:
        gone = root / f".{name_of(step)}.old"
        try:
            (root / name_of(step)).rename(gone)  # never seen half deleted
        except OSError:
            continue
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(root: Path, step: int, why: str) -> Path:
    """Rename a checkpoint that is not gone on from to `step-….why`: it is kept, and not counted any more."""
    path = root / name_of(step)
    aside = root / f"{path.name}.{why}"
    shutil.rmtree(aside, ignore_errors=True)
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
                shutil.rmtree(entry, ignore_errors=True)


def discard(folder: Path) -> None:
    """Give up writing a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be damaged.

    Raises:
        DamagedError: it is not there, too long, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_JSON_BYTES:
        raise DamagedError(f"{path} is longer than {MAX_JSON_BYTES:,} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is no JSON object")
    return found


def _plain(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+\.(json|safetensors)", name):
        raise DamagedError(f'a manifest names the file "{name}"')
    return name


def _brought_to_disk(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
