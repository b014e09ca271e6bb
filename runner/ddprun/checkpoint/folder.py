"""Checkpoints in a run's folder: one folder each, whole or not there.

```
checkpoints/
  step-00000500/
    manifest.json                       written last: what is in it, with sizes and SHA-256
    shared.json, shared.safetensors     what is the same on all ranks
    rank-00000.json, rank-00000.safetensors ...   what each rank has for itself
  .step-00001000.1f0c/                  being written, or what was left of that
```

A checkpoint is written under another name, every file and the folder brought to disk, and then renamed. Where
hosts share no disk, each host's folder has a part of the files, and the manifest names all (`location.py`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveInt

from ddprun.checkpoint.codec import (
    DamagedError,
    EncodedState,
    decode_state,
    errors_naming,
    read_tensors,
    write_tensors,
)
from ddprun.run_files import open_file, read_json_object
from ddprun_hooks.comm.control_channel import ControlChannel

CHECKPOINTS_FOLDER = "checkpoints"  # in the folder of a run
MANIFEST_VERSION = 9
_CHUNK_BYTES = 64 << 20
MANIFEST = "manifest.json"

_FILE_SUFFIXES = ("json", "safetensors")
_REPLACED = "replaced"


class FileRecord(BaseModel, strict=True, frozen=True):
    """What the manifest says of a file."""

    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


FileRecords = dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}\.(json|safetensors)$")], FileRecord]
"""By name."""


class Checkpoint(BaseModel, strict=True, frozen=True):
    """A checkpoint whose manifest could be read: that has all but the path."""

    path: Annotated[Path, Field(exclude=True)]
    step: int  # optimizer steps of the run when it was taken
    world_size: PositiveInt
    nonfinite: str | None  # a parameter or optimizer state; None: all is finite
    layout: str  # how hooks' state is divided among ranks (`state.hook_state_partitioning_key`)
    files: FileRecords

    @property
    def run_dir(self) -> Path:
        """No link is followed in this folder, which is the run's."""
        return self.path.parent.parent

    @property
    def digest(self) -> str:
        """Of the manifest: folders with the same digest hold files of the same checkpoint."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files.values())


def checkpoint_name(step: int) -> str:
    return f"step-{step:08}"


def rank_part_name(rank: int) -> str:
    return f"rank-{rank:05}"


def part_names(world_size: int) -> list[str]:
    """The parts of a checkpoint: each is a JSON and a safetensors file."""
    return ["shared", *map(rank_part_name, range(world_size))]


def file_names(parts: Iterable[str]) -> list[str]:
    return [f"{name}.{suffix}" for name in parts for suffix in _FILE_SUFFIXES]


def unfinished_checkpoint_path(root: Path, step: int, token: str) -> Path:
    """Where the ranks write a checkpoint; `token` is the same on all of them, and another in each attempt."""
    return root / f".{checkpoint_name(step)}.{token}"


def write_part(folder: Path, name: str, state: EncodedState) -> FileRecords:
    """Write state as the two files of a part, in a folder made if need be, and to disk; raises OSError."""
    make_checkpoint_folder(folder)
    text, weights = (folder / file for file in file_names([name]))
    with open_file(folder, text.name, "wb") as file:
        file.write(json.dumps(state.tree, allow_nan=False).encode())
    write_tensors(weights, state.tensors)
    return {path.name: _fsync_and_hash(path) for path in (text, weights)}


def make_checkpoint_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, and that of all checkpoints, if need be; not what they are in. A link
    in its place goes: nothing is written to where it leads.
    """
    folder.parent.mkdir(exist_ok=True)
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(exist_ok=True)


def send_files(control: ControlChannel, to: int, folder: Path, files: FileRecords) -> None:
    """Send files to a rank that does not see the folder. If one cannot be read, zeros follow: the receiver
    waits for all bytes, and refuses the file by its hash.
    """
    for name, described in files.items():
        left = described.bytes
        with suppress(OSError), open_file(folder, name) as file:
            while left and (data := file.read(min(left, _CHUNK_BYTES))):
                control.send_bytes(data, to, "a checkpoint file")
                left -= len(data)
        while left:
            size = min(left, _CHUNK_BYTES)
            control.send_bytes(bytes(size), to, "a checkpoint file")
            left -= size


def receive_files(control: ControlChannel, source_rank: int, folder: Path, files: FileRecords) -> None:
    """Write the files that another rank sends, and bring them to disk; takes all of them, even if the disk is
    full after the first. Raises OSError if they cannot be written, or are not what the sender described.
    """
    problem: OSError | None = None
    for name, described in files.items():
        with suppress(OSError):
            (folder / name).unlink()  # of an attempt that was broken off
        left = described.bytes
        while left:
            data = control.receive_bytes(source_rank, "a checkpoint file")
            left -= len(data)
            try:
                with open_file(folder, name, "ab") as file:
                    file.write(data)
            except OSError as error:
                problem = error
    if problem is not None:
        raise problem
    for name, sent in files.items():
        if _fsync_and_hash(folder / name) != sent:
            raise OSError(None, f"{name} did not arrive complete")


def write_manifest(checkpoint: Checkpoint) -> None:
    """Write a checkpoint's manifest, and bring it and the names of its files to disk; raises OSError."""
    with open_file(checkpoint.path, MANIFEST, "wb") as file:
        file.write(json.dumps({"v": MANIFEST_VERSION, **checkpoint.model_dump()}, indent=1).encode() + b"\n")
    _fsync_and_hash(checkpoint.path / MANIFEST)
    fsync_folder(checkpoint.path)


def commit(unfinished: Path, checkpoint: Checkpoint, here: Iterable[str]) -> None:
    """Name a checkpoint of whose files those that are to be `here` are written: it exists now, at its path.
    Raises OSError, also if a file is unseen.
    """
    target, root = checkpoint.path, checkpoint.path.parent
    replaced = root / f".{target.name}.{_REPLACED}"
    for name in here:
        if (unfinished / name).stat().st_size != checkpoint.files[name].bytes:
            raise OSError(None, f"{name} is incomplete here")
    write_manifest(checkpoint.model_copy(update={"path": unfinished}))
    if target.exists():  # of an attempt that was undone, or damaged
        remove_tree(replaced)
        target.rename(replaced)
    unfinished.rename(target)
    fsync_folder(root)
    remove_tree(replaced)


def steps_in(root: Path) -> list[int]:
    """The steps of the checkpoints that have their name, newest first; whole or not."""
    try:
        names = [entry.name for entry in root.iterdir() if entry.is_symlink() or entry.is_dir()]
    except OSError:
        return []
    found = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,18})", name))]
    return sorted((step for step in found if checkpoint_name(step) in names), reverse=True)


def open_checkpoint(root: Path, step: int) -> Checkpoint:
    """A checkpoint by its manifest; raises DamagedError if that is missing or invalid."""
    path = root / checkpoint_name(step) / MANIFEST
    with errors_naming(path):
        found = read_json_object(root.parent, path.relative_to(root.parent))
        if found.get("v") != MANIFEST_VERSION:
            raise ValueError(f"version {found.get('v')!r:.40}, and this ddprun reads {MANIFEST_VERSION}")
        checkpoint = Checkpoint.model_validate({**found, "path": path.parent})
        files, ranks = checkpoint.files, checkpoint.world_size
        if checkpoint.step != step:
            raise ValueError(f"it is of step {checkpoint.step}")
        # Two files of each rank, and two of all: nothing is allocated for ranks that do not exist.
        if ranks > len(files) // len(_FILE_SUFFIXES):
            raise ValueError(f"{len(files):,} files for {ranks} ranks")
        if missing := set(file_names(part_names(ranks))) - files.keys():
            raise ValueError(f"it has no {min(missing)}")
        return checkpoint


def verify(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Make sure by SHA-256 that these files are what was written; a DamagedError names the file."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    root = checkpoint.run_dir
    for name in names:
        path, described = checkpoint.path / name, checkpoint.files[name]
        with errors_naming(path), open_file(root, path.relative_to(root)) as file:
            size = os.fstat(file.fileno()).st_size
            if size != described.bytes:
                raise ValueError(f"{size:,} bytes instead of {described.bytes:,}")
            if size > memory_bytes:
                raise ValueError(f"{size:,} bytes, which is more than this host's memory")
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # it has readinto
            if digest.hexdigest() != described.sha256:
                raise ValueError("not what was written: its SHA-256 differs")


def read_part(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The state of a part that `verify` has found whole; raises DamagedError if it cannot be read."""
    text, weights = (checkpoint.path / file for file in file_names([name]))
    root = checkpoint.run_dir
    with errors_naming(text):
        tree = read_json_object(root, text.relative_to(root))
        return decode_state(tree, read_tensors(weights, root))


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` and the newest that is finite; one that cannot be deleted stays."""
    finite = newest_finite_step(root)
    for step in steps_in(root)[keep:]:
        if step == finite:
            continue
        gone = root / f".{checkpoint_name(step)}.old"
        remove_tree(gone)  # of a run that was killed while it deleted one
        try:
            (root / checkpoint_name(step)).rename(gone)  # never seen half deleted
        except OSError:
            continue
        remove_tree(gone)


def newest_finite_step(root: Path) -> int | None:
    """The newest checkpoint in which all is finite, by what the manifests say; None: there is none."""
    for step in steps_in(root):
        with suppress(DamagedError):
            if open_checkpoint(root, step).nonfinite is None:
                return step
    return None


def set_aside(root: Path, step: int) -> Path:
    """Rename a checkpoint that is not used to `step-….unused`: it is kept, and no longer counts."""
    path = root / checkpoint_name(step)
    aside = root / f"{path.name}.unused"
    remove_tree(aside)
    return path.rename(aside)


def recover_interrupted_writes(root: Path) -> None:
    """Delete what interrupted writing has left; a checkpoint that was being replaced gets its name back."""
    for entry in root.iterdir() if root.is_dir() else ():
        name = entry.name.removeprefix(".").removesuffix(f".{_REPLACED}")
        if entry.name == f".{name}.{_REPLACED}" and not (root / name).exists():
            entry.rename(root / name)
        elif re.fullmatch(r"\.step-\d{8,}\..+", entry.name):
            remove_tree(entry)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, or what stands in its place; never what a link leads to."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _fsync_and_hash(path: Path) -> FileRecord:
    """Bring a file to disk; gives what the manifest says of it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileRecord(bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def fsync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
