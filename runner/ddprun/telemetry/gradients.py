"""When each parameter's gradient was complete in backward, so that a bucket says what it waited for."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn


class GradientTimes:
    """Marks the moment at which backward has accumulated each parameter's gradient.

    DDP counts a parameter as ready right after that, and sends its bucket with the last one
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html).

    Args:
        model: whose parameters.
        mark: notes this moment.
    """

    def __init__(self, model: nn.Module, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._marks: dict[str, Any] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def take(self) -> dict[str, Any]:
        """The newest mark of each parameter that had one since this was called last."""
        marks, self._marks = self._marks, {}
        return marks

    def _note(self, name: str, param: Tensor) -> None:
        self._marks[name] = self._mark()
