"""Nested state as JSON and tensors: what a checkpoint holds, and nothing that could run when it is read."""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_TAG = "$"
_NOT = "a checkpoint's state does not hold together"


class UnstorableError(TypeError):
    """State that a checkpoint cannot hold; the message says where it is and what it is."""


def encode(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take nested state apart.

    Mappings, lists, tuples, numbers, text, None and tensors are kept. Tensors are copied to host memory, so
    what happens to the originals afterwards changes nothing.

    Args:
        state: nested.

    Returns:
        (JSON, tensors by their place in `state`, such as `optimizer/state/0/exp_avg`).

    Raises:
        UnstorableError: anything else is in it.
    """
    tensors: dict[str, Tensor] = {}
    return {key: _encode(value, key, tensors) for key, value in state.items()}, tensors


def check(state: Mapping[str, Any]) -> None:
    """Make sure that `encode` could take nested state apart, without copying any of it.

    Raises:
        UnstorableError: it could not.
    """
    for key, value in state.items():
        _encode(value, key, None)


def decode(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Put together what `encode` has taken apart.

    Raises:
        ValueError: a tensor is missing or not what its place needs, or a tag is unknown.
    """
    return {key: _decode(value, tensors) for key, value in tree.items()}


def _encode(value: Any, path: str, tensors: dict[str, Tensor] | None) -> Any:
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, list):
        return [_encode(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": _encode(list(value), path, tensors)}
    if isinstance(value, Counter):
        return {_TAG: "counter", "items": _encode(list(value.items()), path, tensors)}
    if type(value) in (dict, OrderedDict, defaultdict):
        return _encode_mapping(value, path, tensors)
    raise UnstorableError(f"{path.replace('/', '.')} is {_kind(value)}, which a checkpoint cannot hold")


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    items = {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if all(isinstance(key, str) for key in items) and _TAG not in items:
        return items
    return {_TAG: "mapping", "items": [[_encode(key, path, tensors), item] for key, item in items.items()]}


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise UnstorableError(f"{path.replace('/', '.')} is {_kind(value)} that is not dense")
    name = path
    if tensors is None:
        return {}
    while name in tensors:  # two keys of a mapping may read alike
        name += "'"
    copied = value.detach().to("cpu", copy=True).contiguous()
    if copied.is_complex():
        tensors[name] = torch.view_as_real(copied.resolve_conj())
        return {_TAG: "complex", "name": name}
    tensors[name] = copied
    return {_TAG: "tensor", "name": name}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    try:
        return _TAGGED[value[_TAG]](value, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's, of a tensor
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise ValueError(first if first.startswith(_NOT) else f"{_NOT}: {first}") from None


def _items(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    return _decode(value["items"], tensors)


_TAGGED: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], Any]] = {
    "tensor": lambda value, tensors: tensors[value["name"]],
    "complex": lambda value, tensors: torch.view_as_complex(tensors[value["name"]]),
    "float": lambda value, _: float(value["value"]),
    "tuple": lambda value, tensors: tuple(_items(value, tensors)),
    "counter": lambda value, tensors: Counter(dict(_items(value, tensors))),
    "mapping": lambda value, tensors: dict(_items(value, tensors)),
}


def _kind(value: Any) -> str:
    kind = type(value)
    return (
        f"a {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"a {kind.__name__}"
    )
