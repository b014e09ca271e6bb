"""Nested state as JSON and safetensors: all that a checkpoint holds, and nothing of it is ever executed."""

import math
import stat
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddprun.run_files import describe_read_error, open_file
from ddprun_hooks.comm.gpu import PinnedStaging

_TAG = "$"


class UnstorableError(TypeError):
    """State that a checkpoint cannot hold; the message says where it is and what it is."""


class DamagedError(ValueError):
    """A file that is not whole, or does not hold what it claims; the message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class EncodedState:
    """Nested state as JSON and tensors."""

    tree: dict[str, Any]
    # By path in the state, such as `optimizer/state/0/exp_avg`: copies in host memory, without gaps,
    # which no later step changes. A GPU may still be copying them (`PinnedStaging`).
    tensors: dict[str, Tensor]


def encode_state(
    state: Mapping[str, Any], *, copy: bool = True, staged: PinnedStaging | None = None
) -> EncodedState:
    """Encode nested mappings, lists, tuples, numbers, text, None and tensors; raises UnstorableError for
    anything else. `copy=False` only checks, and gives no tensors. `staged` copies what is on a GPU; without
    it a GPU is waited for, tensor by tensor.
    """
    tensors: dict[str, Tensor] = {}
    tree = {key: _encode_value(value, key, tensors) for key, value in state.items()}
    copies: dict[str, Tensor] = {}
    for name, value in tensors.items() if copy else ():
        if staged is not None and value.device.type != "cpu":
            copies[name] = staged.copy(value)
        else:
            copies[name] = value.to("cpu", copy=True).contiguous()
    return EncodedState(tree, copies)


def decode_state(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert `encode_state`; raises ValueError if a tensor is missing or misfit, or a tag is unknown."""
    try:
        return {key: _decode_value(value, tensors) for key, value in tree.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's, of a tensor
        raise ValueError(f"the state is inconsistent: {str(error) or type(error).__name__}") from None


def _encode_value(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, np.generic):
        value = value.item()  # a number of NumPy, as a schedule may compute it, comes back as Python's
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, list):
        return [_encode_value(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": _encode_value(list(value), path, tensors)}
    if isinstance(value, Counter):
        return {_TAG: "counter", "items": _encode_value(list(value.items()), path, tensors)}
    if type(value) not in (dict, OrderedDict, defaultdict):
        name = torch.typename(type(value))
        raise UnstorableError(f"{path.replace('/', '.')} is of type {name}, which a checkpoint cannot hold")
    items = {key: _encode_value(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and _TAG not in items:
        return items
    return {
        _TAG: "mapping",
        "items": [[_encode_value(key, path, tensors), item] for key, item in items.items()],
    }


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if value.layout == torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values()}
        encoded = {key: _encode_tensor(part, f"{path}/{key}", tensors) for key, part in parts.items()}
        shape, coalesced = list(value.shape), value.is_coalesced()
        return {_TAG: "sparse", "parts": encoded, "shape": shape, "coalesced": coalesced}
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise UnstorableError(f"{path.replace('/', '.')} is not a dense tensor; a checkpoint holds no others")
    name = path
    while name in tensors:  # two keys of a mapping may read alike
        name += "'"
    if value.is_complex():
        tensors[name] = torch.view_as_real(value.detach().resolve_conj())
        return {_TAG: "complex", "name": name}
    tensors[name] = value.detach()
    return {_TAG: "tensor", "name": name}


def _decode_value(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode_value(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode_value(item, tensors) for key, item in value.items()}
    match value[_TAG]:
        case "tensor":
            return tensors[value["name"]]
        case "complex":
            return torch.view_as_complex(tensors[value["name"]])
        case "sparse":
            parts, flag = _decode_value(value["parts"], tensors), value["coalesced"]
            return torch.sparse_coo_tensor(
                **parts, size=value["shape"], is_coalesced=flag, check_invariants=True
            )
        case "float":
            return float(value["value"])
        case "tuple":
            return tuple(_decode_value(value["items"], tensors))
        case "counter":
            return Counter(dict(_decode_value(value["items"], tensors)))
        case "mapping":
            return dict(_decode_value(value["items"], tensors))
        case tag:
            raise ValueError(f"unknown tag {tag!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a safetensors file, equal ones to equal bytes (of more `metadata` than one, the order
    is random), or raise OSError.
    """
    try:
        path.touch()  # with the umask's permissions: those of safetensors are for this user alone
        mode = stat.S_IMODE(path.stat().st_mode)
        save_file(dict(tensors), path, metadata)
        path.chmod(mode)
    except SafetensorError as error:  # it holds what the system said
        raise OSError(None, str(error)) from None


def read_tensors(path: Path, root: Path) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file into memory of its own; no link is followed in `root`. Raises
    DamagedError, also if there is none that can be read.
    """
    with errors_naming(path), open_file(root, path.relative_to(root)) as file:
        try:
            # By descriptor: what stands at the path now may be another file. It is mapped, not yet read.
            mapped = load_file(f"/dev/fd/{file.fileno()}")
        except (SafetensorError, TypeError, RuntimeError) as error:  # torch's, of impossible shapes
            raise ValueError(str(error)) from None
        return {name: tensor.clone() for name, tensor in mapped.items()}


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Context around reading a file: what cannot be read or is invalid is a DamagedError that names it."""
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except DamagedError:
        raise
    except ValueError as error:
        # What a hostile file says: one printable line, and not endless.
        first, *_ = describe_read_error(error).splitlines() or [""]
        raise DamagedError(f"{path}: {first[:200].encode('unicode_escape').decode('ascii')}") from None
