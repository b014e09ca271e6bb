"""Seeds: the same seed gives bitwise the same run (`docs/reproducibility.md`). Passes before step 1 leave no
trace: the first step finds generators, model and loss as they were seeded and built, or loaded.
"""

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_TORCHS_OWN = frozenset(vars(nn.Module()))  # attributes of every module: parameters, children, hooks


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on the CPU and on every GPU."""
    seed_cpu_generators(seed)
    torch.manual_seed(seed)


def seed_cpu_generators(seed: int) -> None:
    """The same, but for the GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_for_batch(seed: int, position: int) -> None:
    """Seed a loading process for the batch at a position in the epoch, whatever it made before. `seed`: of
    epoch and rank, whose batches draw other numbers (generators use the low 32 bits: a golden ratio apart).
    """
    seed_everything((seed * 0x9E3779B9 + position) % 2**63)


def make_deterministic(device: torch.device, *, strict: bool = False) -> None:
    """Choose deterministic algorithms where torch has them on a GPU; `strict`: raise where it has none."""
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS on several streams may differ
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True


def _torch_rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"torch": torch.get_rng_state(), **on_gpu}


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of every random generator of this rank, as plain values and tensors."""
    _, keys, *numpy = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), *numpy],
        **_torch_rng_states(device),
    }


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    keys, *numpy = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *numpy))
    _restore_torch_rng(state, device)


def _restore_torch_rng(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:  # a checkpoint taken on a CPU has none
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Save the states of all generators of random numbers, and restore them on exit."""
    state = rng_state(device)
    try:
        yield
    finally:
        restore_rng_state(state, device)


class SeparateRng:
    """Blocks `with rng():` share a state of the CPU's generators of their own: the first block seeds it, and
    each later one continues it.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._device = seed, torch.device("cpu")
        self._state: dict[str, Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with preserve_rng_state(self._device):
            if self._state is None:
                seed_cpu_generators(self._seed)
            else:
                restore_rng_state(self._state, self._device)
            yield
            self._state = rng_state(self._device)


class RepeatableRng:
    """Each `with fixed_rng():` starts torch's generators from one state, and restores them afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start = device, _torch_rng_states(device)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            _restore_torch_rng(self._start, self._device)
            yield


@contextmanager
def preserve_state(device: torch.device, *owners: Any) -> Iterator[None]:
    """Context around passes that are no part of training: afterwards `owners` and all generators of random
    numbers are as they were.

    Modules get back parameters, buffers, children, hooks and extra state. All other attributes have copies in
    their place while the passes run; one that cannot be copied stays, and keeps what changes inside of it.
    Values are kept in host memory. `owners` are the model, and the loss: a module or anything that is called.
    """
    modules = dict.fromkeys(part for one in owners if isinstance(one, nn.Module) for part in one.modules())
    tensors = dict.fromkeys(held for one in modules for held in (*one.parameters(False), *one.buffers(False)))
    values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    memo: dict[int, Any] = {id(one): one for one in (*modules, *tensors)}  # copies hold these themselves
    extra = [
        (one, _deepcopy_or_same(one.get_extra_state(), memo)) for one in modules if _has_extra_state(one)
    ]
    attributes, contents = [], []
    for owner in (*modules, *(one for one in owners if not isinstance(one, nn.Module))):
        own = getattr(owner, "__dict__", None)
        if not isinstance(own, dict) or isinstance(owner, torch.jit.ScriptModule):
            continue
        before = dict(own)
        attributes.append((own, before))
        for name, value in before.items():
            if not isinstance(owner, nn.Module) or name not in _TORCHS_OWN:
                own[name] = _deepcopy_or_same(value, memo)
            elif isinstance(value, dict | set):
                contents.append((value, value.copy()))
    try:
        with preserve_rng_state(device):
            yield
    finally:
        for held, content in (*attributes, *contents):
            held.clear()
            held.update(content)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for module, state in extra:
            module.set_extra_state(state)


def _has_extra_state(module: nn.Module) -> bool:
    names = "get_extra_state", "set_extra_state"
    return all(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)


def _deepcopy_or_same(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if there is none. What several values hold is copied once."""
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever copying somebody's object raises: a lock, a file, an inner tensor of a graph
        while len(memo) > known:
            memo.popitem()
        return value
