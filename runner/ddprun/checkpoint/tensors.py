"""Safetensors files: written in one pass that hashes and syncs them, and read as if they were hostile:
everything a file claims is checked before memory is allocated for it.

A file is the header's length (8 bytes, little-endian), the header (JSON) and the data
(https://huggingface.co/docs/safetensors). The header is checked and the data read through one open file, so
nobody can exchange the file in between.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddprun.run_files import NotPlainError, open_file

MAX_HEADER_BYTES = 32 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 64
_MAX_NUMEL = 2**63 - 1
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedError(ValueError):
    """A file that is not whole, or does not hold what it claims; the message names the file and the fault."""


class UnreadableError(DamagedError):
    """A file that is not there or cannot be read: here, or now."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor as the header describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the data."""

    end: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a file and bring it to disk. The same tensors make the same file, in whatever order.

    Args:
        path: the file, made or overwritten.
        tensors: by name, on the CPU.

    Returns:
        SHA-256 of the file, in hexadecimal.

    Raises:
        OSError: it cannot be written.
    """
    assert sys.byteorder == "little", "safetensors data are little-endian"
    header, end = {}, 0
    tensors = dict(sorted(tensors.items()))
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        described = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**described, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with open_file(path.parent, path.name, "wb") as file:
        start: list[bytes | memoryview] = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
        for piece in (*start, *map(_raw, tensors.values())):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def order_metadata(path: Path) -> None:
    """Put the metadata of a file that safetensors has written into the order of its names.

    safetensors writes it in an order that is drawn anew in each process, and equal tensors would make files
    with other hashes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        metadata = dict(sorted(header.pop(_METADATA).items()))
        text = json.dumps({_METADATA: metadata, **header}, separators=(",", ":"), ensure_ascii=False)
        ordered = text.encode().ljust(length)
        assert len(ordered) == length  # the same words in another order
        file.seek(_LENGTH_BYTES)
        file.write(ordered)


def _raw(tensor: Tensor) -> memoryview:
    """The memory of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path, below: Path | None = None, *, outline: bool = False) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file into memory of its own, on the CPU.

    Args:
        path: the file.
        below: the folder in which nothing is followed; None: the file's own.
        outline: read the header alone; the tensors are on torch's `meta` device and have no data.

    Returns:
        The tensors by name, in the order in which their data stand in the file.

    Raises:
        DamagedError: the file is truncated, its header is too long, is no JSON or contradicts itself or the
            file's size, or it holds more than `MAX_TENSORS` tensors. Nothing of it is loaded then.
        OSError: the file cannot be opened or read.
    """
    assert sys.byteorder == "little", "safetensors data are little-endian"
    below = path.parent if below is None else below
    try:
        with open_file(below, path.relative_to(below)) as opened:
            file = FileIO(opened.fileno(), "rb", closefd=False)
            entries = _entries(file, os.fstat(opened.fileno()).st_size)
            if outline:
                return {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}
            return {entry.name: _tensor(file, entry) for entry in entries}
    except NotPlainError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None
    except DamagedError as error:
        raise DamagedError(f"{path}: {error}") from None


def _entries(file: FileIO, size: int) -> list[_Entry]:
    """What the header says, checked against itself and the file's size; leaves the file at its data."""
    if size < _LENGTH_BYTES:
        raise DamagedError(f"truncated: {size} bytes, and the header's length alone takes {_LENGTH_BYTES}")
    length = int.from_bytes(_read(file, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise DamagedError(f"the header claims {length:,} bytes; at most {MAX_HEADER_BYTES:,}")
    if _LENGTH_BYTES + length > size:
        raise DamagedError(f"truncated: the header claims {length:,} bytes, and the file has {size:,}")
    header = _parsed(_read(file, length))
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedError(f"{_METADATA} is not a mapping of strings")
    if len(header) > MAX_TENSORS:
        raise DamagedError(f"the header names {len(header):,} tensors; at most {MAX_TENSORS:,}")
    entries = sorted((_entry(name, told) for name, told in header.items()), key=lambda e: (e.start, e.end))
    _lie_side_by_side(entries, size - _LENGTH_BYTES - length)
    return entries


def _parsed(raw: bytes) -> dict[str, Any]:
    """The header's JSON object; a key that stands twice would let two readers see two files."""
    # A small text can stand for many Python objects: three brackets are all that a tensor needs.
    if raw.count(b"[") + raw.count(b"{") > 4 * MAX_TENSORS:
        raise DamagedError(f"the header holds more than {4 * MAX_TENSORS:,} brackets")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except DamagedError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DamagedError(f"the header is no JSON: {reason}") from None
    if not isinstance(header, dict):
        raise DamagedError("the header is no JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DamagedError(f'the header names "{_short(twice)}" twice')
    return found


def _no_constant(word: str) -> NoReturn:
    raise DamagedError(f"the header is no JSON: {word}")


def _entry(name: str, told: Any) -> _Entry:
    """One tensor of the header, consistent in itself."""
    shown = f'tensor "{_short(name)}"'
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{shown} is not described by dtype, shape and data_offsets")
    dtype = _DTYPES.get(told["dtype"]) if isinstance(told["dtype"], str) else None
    if dtype is None:
        raise DamagedError(
            f"{shown} has the dtype {_short(repr(told['dtype']))}; known are {', '.join(_DTYPES)}"
        )
    shape, offsets = told["shape"], told["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise DamagedError(f"{shown} has no shape of at most {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DamagedError(f"{shown} has no data_offsets [start, end]")
    # Torch multiplies the sizes of an empty tensor too, so zeros must not hide an overflow.
    if math.prod(length or 1 for length in shape) > _MAX_NUMEL:
        raise DamagedError(f"{shown} has a shape beyond 64 bits")
    wanted, start, end = math.prod(shape) * dtype.itemsize, offsets[0], offsets[1]
    if wanted != end - start:
        raise DamagedError(
            f"{shown} takes {wanted:,} bytes by its dtype and shape, and {end - start:,} by data_offsets"
        )
    return _Entry(name, dtype, tuple(shape), start, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_NUMEL for item in value)


def _lie_side_by_side(entries: list[_Entry], size: int) -> None:
    """Each tensor starts where the one before it ends, and the last ends with the file."""
    end = 0
    for entry in entries:
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise DamagedError(f'tensor "{_short(entry.name)}" {what}')
        end = entry.end
    if end > size:
        raise DamagedError(f"truncated: the tensors take {end:,} bytes, and the file has {size:,} for them")
    if end < size:
        raise DamagedError(f"{size - end:,} bytes after the last tensor")


def _tensor(file: FileIO, entry: _Entry) -> Tensor:
    raw = torch.empty(entry.end - entry.start, dtype=torch.uint8)
    _fill(file, raw.numpy().data)
    if entry.dtype is torch.bool and bool((raw > 1).any()):
        raise DamagedError(f'tensor "{_short(entry.name)}" holds booleans other than 0 and 1')
    return raw.view(entry.dtype).reshape(entry.shape)


def _read(file: FileIO, count: int) -> bytes:
    buffer = bytearray(count)
    _fill(file, memoryview(buffer))
    return bytes(buffer)


def _fill(file: FileIO, buffer: memoryview) -> None:
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise DamagedError(f"truncated while it was read: {len(buffer):,} bytes are missing")
        buffer = buffer[count:]


def _short(text: str) -> str:
    """A name for a message: on one line, and not endless."""
    shown = text if len(text) <= 80 else f"{text[:78]}…"
    return shown.encode("unicode_escape").decode("ascii") if not shown.isprintable() else shown
