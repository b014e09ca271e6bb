"""Safetensors files: what is whole is read bit for bit, and what is not is refused before it costs memory."""

import hashlib
import json
import os
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddprun.checkpoint import tensors
from ddprun.checkpoint.tensors import DamagedError, read_tensors, write_tensors


def written(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with that header, as JSON unless it is bytes already."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def told(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """What safetensors writes is read with its names, dtypes, shapes and bits, scalars and empties too."""
    wanted = {
        name: torch.randint(0, 256, (3, 4, dtype.itemsize), dtype=torch.uint8).view(dtype)
        for name, dtype in tensors._DTYPES.items()
        if dtype is not torch.bool
    }
    wanted["bool"] = torch.tensor([[True, False], [False, True]])
    wanted["scalar"] = torch.tensor(2.5)
    wanted["empty"] = torch.empty(0, 7)
    save_file(wanted, tmp_path / "t.safetensors", {"format": "pt"})
    got = read_tensors(tmp_path / "t.safetensors")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_no_tensors_are_no_fault(tmp_path: Path) -> None:
    """A file without tensors is whole."""
    save_file({}, tmp_path / "t.safetensors")
    assert read_tensors(tmp_path / "t.safetensors") == {}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "no JSON"),
        (b"\xff\xfe", b"", "no JSON"),
        (b"[" * 100_000, b"", "nested too deeply"),
        (b"[]" * 500_000, b"", "brackets"),
        (b"[]", b"", "no JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "no JSON"),
        (b'{"a": NaN}', b"", "NaN"),
        (b'{"a": 1, "a": 1}', b"", 'names "a" twice'),
        ({"__metadata__": {"a": 1}}, b"", "not a mapping of strings"),
        ({"a": 7}, b"", "not described by"),
        ({"a": told() | {"more": 1}}, b"1234", "not described by"),
        ({"a": told("F33")}, b"1234", "dtype 'F33'; known are"),
        ({"a": told(["F32"])}, b"1234", "dtype"),
        ({"a": told(shape=[-1])}, b"1234", "no shape"),
        ({"a": told(shape=[True])}, b"1234", "no shape"),
        ({"a": told(shape=[1.0])}, b"1234", "no shape"),
        ({"a": told(shape=[1] * 65)}, b"1234", "no shape"),
        ({"a": told(shape=[0, 2**62, 2**62], offsets=[0, 0])}, b"", "beyond 64 bits"),
        ({"a": told(shape=[2**40, 2**40])}, b"1234", "beyond 64 bits"),
        ({"a": told(offsets=[4, 0])}, b"1234", "no data_offsets"),
        ({"a": told(offsets=[0])}, b"1234", "no data_offsets"),
        ({"a": told(shape=[2])}, b"1234", "takes 8 bytes by its dtype and shape, and 4 by data_offsets"),
        ({"a": told(shape=[2**40], offsets=[0, 2**42])}, b"1234", "truncated: the tensors take"),
        ({"a": told(), "b": told()}, b"1234", '"b" overlaps'),
        ({"a": told(), "b": told(offsets=[2, 6])}, b"123456", '"b" overlaps'),
        ({"a": told(), "b": told(offsets=[6, 10])}, b"1234567890", '"b" leaves a gap'),
        ({"a": told()}, b"12345", "1 bytes after the last tensor"),
        ({"a": told("BOOL", [4])}, b"\0\1\2\1", "booleans other than"),
        ({"a\x1b[31m\n": 7}, b"", r"a\\x1b\[31m\\n"),
        ({"x" * 10_000: 7}, b"", "x…"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    """Each contradiction is told in one line that names the file."""
    path = written(tmp_path / "t.safetensors", header, data)
    with pytest.raises(DamagedError, match=message) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (2**64 - 1, "claims 18,446,744,073,709,551,615 bytes; at most"),
        (tensors.MAX_HEADER_BYTES + 1, "at most"),
        (tensors.MAX_HEADER_BYTES, "truncated: the header claims"),
        (100, "truncated: the header claims"),
    ],
)
def test_a_header_that_claims_too_much_is_refused(tmp_path: Path, length: int, message: str) -> None:
    """The length that a file claims is held against the cap and the file's size before it is believed."""
    with pytest.raises(DamagedError, match=message):
        read_tensors(written(tmp_path / "t.safetensors", {}, length=length))


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tensors is capped before any is read."""
    monkeypatch.setattr(tensors, "MAX_TENSORS", 8)
    entries = {str(index): told("U8", [0], [0, 0]) for index in range(9)}
    with pytest.raises(DamagedError, match="names 9 tensors; at most 8"):
        read_tensors(written(tmp_path / "t.safetensors", entries))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A folder or a named pipe in the file's place is refused, without waiting for a writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DamagedError, match="not a regular file"):
            read_tensors(path)
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "absent")


def test_every_truncation_and_every_flipped_bit_is_whole_or_refused(tmp_path: Path) -> None:
    """Cut anywhere, a file is refused; with a bit flipped anywhere it is read or refused."""
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}, path, {"k": "v"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read_tensors(path)
    for place in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            read_tensors(path)
        except DamagedError:
            continue


def test_no_header_costs_much_memory(tmp_path: Path) -> None:
    """Headers made of noise and of claims about terabytes are refused without memory for what they claim."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chance = random.Random(0)
    for _ in range(50):
        size = chance.choice([2**20, 2**40, 2**60])
        header = {"a": told("F64", [size], [0, size * 8]), "b": told("U8", [0], [size * 8, size * 8])}
        with pytest.raises(DamagedError):
            read_tensors(written(tmp_path / "t.safetensors", header, b"\0" * 64))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_what_is_written_is_a_safetensors_file(tmp_path: Path) -> None:
    """The library reads it, and so do we; the hash is the file's."""
    weights = {
        'odd "name" é': torch.randn(3, 2),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "bf16": torch.randn(5).bfloat16(),
    }
    path = tmp_path / "t.safetensors"
    digest = write_tensors(path, weights)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for found in (load_file(path), read_tensors(path)):
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
    write_tensors(path, {})
    assert read_tensors(path) == load_file(path) == {}


def test_the_same_tensors_make_the_same_file(tmp_path: Path) -> None:
    """What state was made of in another order, as by a resumed run, has the same hash."""
    tensors = {name: torch.randn(3) for name in "cab"}
    again = dict(sorted(tensors.items()))
    assert list(again) != list(tensors)
    assert write_tensors(tmp_path / "one", tensors) == write_tensors(tmp_path / "other", again)
