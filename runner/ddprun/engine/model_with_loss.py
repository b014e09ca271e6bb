"""A loss that is a module is trained, sent, kept and switched to evaluation together with the model."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeGuard

from torch import nn

_LOSS_PREFIX = "loss"


class ModelWithLoss(nn.Module):
    """A model and its loss as one module; names of the loss begin with `loss.`, others are the model's."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        # DDP asks the module that it wraps.
        self._ddp_params_and_buffers_to_ignore = getattr(model, "_ddp_params_and_buffers_to_ignore", [])

    def forward(self, call: Callable[[nn.Module, nn.Module], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What `call` returns for the two modules, in one pass, so that DDP sees which parameters it used."""
        return call(self.model, self.loss)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; torch names parameters and buffers by it, too."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        at = f"{prefix}.{_LOSS_PREFIX}" if prefix else _LOSS_PREFIX
        yield from self.loss.named_modules(memo, at, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        prefix = options.pop("prefix", "")
        of_loss = self.loss.state_dict(*args, prefix=f"{prefix}{_LOSS_PREFIX}.", **options)
        return {**self.model.state_dict(*args, prefix=prefix, **options), **of_loss}


def loss_joins_model(loss: object) -> TypeGuard[nn.Module]:
    """Whether a loss is joined with the model: a module with parameters, buffers or code of the user's."""
    if not isinstance(loss, nn.Module):
        return False
    stateful = next(chain(loss.parameters(), loss.buffers()), None) is not None
    return stateful or not type(loss).__module__.startswith("torch.")


def bare_model(module: nn.Module) -> nn.Module:
    return module.model if isinstance(module, ModelWithLoss) else module
