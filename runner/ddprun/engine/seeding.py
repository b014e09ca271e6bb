"""Seeds: the same seed gives bitwise the same run (`docs/reproducibility.md`)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_deterministic(device: torch.device) -> None:
    """Choose algorithms that repeat bit for bit where torch leaves a choice on a GPU."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True


def generator_state(device: torch.device) -> dict[str, Any]:
    """State of every random generator of this rank."""
    version, internal, gauss = random.getstate()
    name, keys, cursor, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(cursor),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Bring back what `generator_state` gave."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class SameDraws:
    """`with same_draws():` again and again draws the same from torch's generators, and leaves them alone.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        now = self._state()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    def _state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), cuda

    def _set(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside was never drawn."""
    state = generator_state(device)
    try:
        yield
    finally:
        restore_generators(state, device)
