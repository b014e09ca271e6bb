"""Passes before step 1 leave no trace: the first step finds model and loss as they were built, or loaded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddprun.engine import seeding

_TORCHS_OWN = frozenset(vars(nn.Module()))  # attributes of every module: parameters, children, hooks


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
    extra = [(one, _copy(one.get_extra_state(), memo)) for one in modules if _has_extra_state(one)]
    attributes, contents = [], []
    for owner in (*modules, *(one for one in owners if not isinstance(one, nn.Module))):
        own = getattr(owner, "__dict__", None)
        if not isinstance(own, dict) or isinstance(owner, torch.jit.ScriptModule):
            continue
        before = dict(own)
        attributes.append((own, before))
        for name, value in before.items():
            if not isinstance(owner, nn.Module) or name not in _TORCHS_OWN:
                own[name] = _copy(value, memo)
            elif isinstance(value, dict | set):
                contents.append((value, value.copy()))
    try:
        with seeding.preserve_rng_state(device):
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
    kind = type(module)
    return (
        kind.get_extra_state is not nn.Module.get_extra_state
        and kind.set_extra_state is not nn.Module.set_extra_state
    )


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, or the value itself if there is none. What several values hold is copied once."""
    known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever copying somebody's object raises: a lock, a file, an inner tensor of a graph
        while len(memo) > known:
            memo.popitem()
        return value
