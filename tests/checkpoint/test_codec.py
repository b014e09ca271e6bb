"""Nested state comes back as it was, bit for bit; what cannot be held is named. A damaged safetensors file is
refused before it costs memory.
"""

import json
import math
import os
import random
import resource
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ddprun.checkpoint.codec import (
    DamagedError,
    UnstorableError,
    decode_state,
    encode_state,
    read_tensors,
    write_tensors,
)
from tests.hooks.test_stacks import assert_same

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float8_e5m2,
        torch.float8_e4m3fn,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    encoded = encode_state(state)
    return decode_state(json.loads(json.dumps(encoded.tree, allow_nan=False)), encoded.tensors)


def test_state_comes_back_as_it_was() -> None:
    """Kinds of numbers and containers, keys that are no text, names that collide, odd tensors."""
    state: dict[str, Any] = {
        "numbers": [1, 1.0, True, None, "text", -0.0, 2**80, 1e-320, (1, (2.5, "x")), []],
        "odd": {0: torch.arange(3), "0": torch.arange(4), "$": 1, (1, 2): "tuple"},
        "count": Counter({30: 1, 60: 2}),
        "tensors": {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(0.1, dtype=torch.float64),
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "spread": torch.ones(1).expand(5),
            "bf16": torch.randn(3).bfloat16(),
            "bool": torch.tensor([True, False]),
            "complex": torch.randn(2, 3, dtype=torch.complex64).conj(),
            "infinite": torch.tensor([-math.inf, math.inf]),
        },
    }
    found = there_and_back(state)
    assert_same(found, state)
    assert type(found["numbers"][2]) is bool
    assert type(found["numbers"][1]) is float
    assert isinstance(found["count"], Counter)
    assert math.copysign(1, found["numbers"][5]) == -1


def test_numbers_that_are_none_come_back() -> None:
    """NaN and infinities, which JSON does not have."""
    values = there_and_back({"x": [math.inf, -math.inf, math.nan]})["x"]
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own
def test_sparse_tensors_come_back_as_they_were() -> None:
    """As SGD keeps the momentum of sparse gradients: rows may stand in it twice."""
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.randn(3, 4), (2, 4))
    empty = torch.zeros(3, 3, dtype=torch.float64).to_sparse()
    for given in (twice, twice.coalesce(), empty):
        found = there_and_back({"a": given})["a"]
        assert (found.shape, found.is_coalesced()) == (given.shape, given.is_coalesced())
        assert torch.equal(found._indices(), given._indices())
        assert_same({"a": found._values()}, {"a": given._values()})


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own
def test_indices_outside_of_a_sparse_tensor_are_refused() -> None:
    """They would be written to memory of others."""
    encoded = encode_state({"a": torch.eye(3).to_sparse()})
    encoded.tensors["a/indices"][0, 0] = 3
    with pytest.raises(ValueError, match="state is inconsistent"):
        decode_state(encoded.tree, encoded.tensors)


def test_numbers_of_numpy_come_back_as_pythons() -> None:
    """As a schedule may have computed them."""
    given = [np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), np.float64("-inf")]
    values = there_and_back({"x": given})["x"]
    assert values == given
    assert [type(value) for value in values] == [float, float, int, bool, float]


def test_what_is_taken_apart_no_longer_follows_the_original() -> None:
    """Training goes on while it is written."""
    weights = torch.ones(3)
    encoded = encode_state({"weights": weights})
    weights.zero_()
    assert torch.equal(encoded.tensors["weights"], torch.ones(3))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, "a.b is of type object"),
        ({"a": [1, {2}]}, "a.1 is of type set"),
        ({"a": nn.Linear(1, 1)}, "a is of type torch.nn.modules.linear.Linear"),
        ({"a": np.ones(3)}, "a is of type numpy.ndarray"),
        ({"a": torch.eye(3).to_mkldnn()}, "a is not a dense tensor"),
    ],
)
def test_what_cannot_be_held_is_told(state: dict[str, Any], words: str) -> None:
    """With its place and its kind."""
    for copy in (True, False):
        with pytest.raises(UnstorableError, match=words):
            encode_state(state, copy=copy)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"$": "tensor", "name": "gone"}},
        {"a": {"$": "tensor"}},
        {"a": {"$": "os.system", "items": ["true"]}},
        {"a": {"$": "mapping", "items": [1]}},
        {"a": {"$": ["list"]}},
        {"a": {"$": "sparse", "parts": {"indices": 1, "values": 2}, "shape": [3], "coalesced": True}},
    ],
)
def test_state_that_does_not_hold_together_is_refused(tree: dict[str, Any]) -> None:
    """An unknown tag does nothing."""
    with pytest.raises(ValueError, match="state is inconsistent"):
        decode_state(tree, {})


# Safetensors files.


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
        for name, dtype in DTYPES.items()
    }
    wanted["bool"] = torch.tensor([[True, False], [False, True]])
    wanted["scalar"] = torch.tensor(2.5)
    wanted["empty"] = torch.empty(0, 7)
    save_file(wanted, tmp_path / "t.safetensors", {"format": "pt"})
    got = read_tensors(tmp_path / "t.safetensors", tmp_path)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_no_tensors_are_no_fault(tmp_path: Path) -> None:
    """A file without tensors is whole."""
    save_file({}, tmp_path / "t.safetensors")
    assert read_tensors(tmp_path / "t.safetensors", tmp_path) == {}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "invalid JSON"),
        (b"\xff\xfe", b"", "invalid UTF-8"),
        (b"[" * 100_000, b"", "invalid JSON"),
        (b"[]" * 500_000, b"", "invalid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "number out of range"),
        (b'{"a": NaN}', b"", "invalid JSON"),
        ({"__metadata__": {"a": 1}}, b"", "expected a string"),
        ({"a": 7}, b"", "expected struct TensorInfo"),
        ({"a": told("F33")}, b"1234", "unknown variant `F33`"),
        ({"a": told(["F32"])}, b"1234", "expected string"),
        ({"a": told("F6_E2M3", [4])}, b"123", "invalid shape, data type, or offset"),
        ({"a": told(shape=[-1])}, b"1234", "`-1`, expected usize"),
        ({"a": told(shape=[True])}, b"1234", "expected usize"),
        ({"a": told(shape=[1.0])}, b"1234", "expected usize"),
        ({"a": told(shape=[0, 2**63], offsets=[0, 0])}, b"", "Overflow"),
        ({"a": told(shape=[2**40, 2**40])}, b"1234", "overflow"),
        ({"a": told(offsets=[4, 0])}, b"1234", "invalid offset for tensor `a`"),
        ({"a": told(offsets=[0])}, b"1234", "expected a tuple of size 2"),
        ({"a": told(shape=[2])}, b"1234", "invalid shape, data type, or offset"),
        ({"a": told(shape=[2**40], offsets=[0, 2**42])}, b"1234", "file not fully covered"),
        ({"a": told(), "b": told()}, b"1234", "invalid offset for tensor `[ab]`"),
        ({"a": told(), "b": told(offsets=[2, 6])}, b"123456", "invalid offset for tensor `b`"),
        ({"a": told(), "b": told(offsets=[6, 10])}, b"1234567890", "invalid offset for tensor `b`"),
        ({"a": told()}, b"12345", "file not fully covered"),
        ({"a\x1b[31m\n": told(offsets=[4, 0])}, b"1234", r"a\\x1b\[31m"),
        ({"x" * 10_000: told(offsets=[4, 0])}, b"1234", "xxx"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    """Each contradiction is told in one line that names the file."""
    path = written(tmp_path / "t.safetensors", header, data)
    with pytest.raises(DamagedError, match=message) as caught:
        read_tensors(path, path.parent)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("length", [2**64 - 1, 2**28, 2**24, 100])
def test_a_header_that_claims_too_much_is_refused(tmp_path: Path, length: int) -> None:
    """The length that a file claims is compared with the file's size before it is believed."""
    with pytest.raises(DamagedError, match=r"header too large|invalid header length"):
        read_tensors(written(tmp_path / "t.safetensors", {}, length=length), tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A folder or a named pipe in the file's place is refused, without waiting for a writer."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DamagedError, match="not a regular file"):
            read_tensors(path, path.parent)
    with pytest.raises(DamagedError, match="cannot be read: No such file"):
        read_tensors(tmp_path / "absent", tmp_path)


def test_every_truncation_and_every_flipped_bit_is_whole_or_refused(tmp_path: Path) -> None:
    """Cut anywhere, a file is refused; with a bit flipped anywhere it is read or refused."""
    path = tmp_path / "t.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}, path, {"k": "v"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read_tensors(path, path.parent)
    for place in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            read_tensors(path, path.parent)
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
            read_tensors(written(tmp_path / "t.safetensors", header, b"\0" * 64), tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_what_is_written_is_a_safetensors_file(tmp_path: Path) -> None:
    """The library reads it, and so do we."""
    weights = {
        'odd "name" é': torch.randn(3, 2),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "bf16": torch.randn(5).bfloat16(),
    }
    path = tmp_path / "t.safetensors"
    write_tensors(path, weights)
    for found in (load_file(path), read_tensors(path, path.parent)):
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
    write_tensors(path, {})
    assert read_tensors(path, tmp_path) == load_file(path) == {}


def test_the_same_tensors_make_the_same_file(tmp_path: Path) -> None:
    """What state was made of in another order, as by a resumed run, has the same hash."""
    tensors = {name: torch.randn(3) for name in "cab"}
    again = dict(sorted(tensors.items()))
    assert list(again) != list(tensors)
    write_tensors(tmp_path / "one", tensors)
    write_tensors(tmp_path / "other", again)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
