"""The errors of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.futures import Future


class HooksError(Exception):
    """Base of every error this package raises."""


class ImportPathError(HooksError, ValueError):
    """An import path that leads nowhere; the message says how far it led and what is there."""


class HookSetupError(HooksError, ValueError):
    """A hook's name, options or place in the stack cannot work."""


class ExchangeError(HooksError, RuntimeError):
    """An exchange between ranks failed."""


class DisagreementError(ExchangeError):
    """Ranks disagree about what they are about to exchange, or hold; the message names the ranks."""


def fail_future(future: Future[Any], error: BaseException) -> None:
    """Complete a future with `error`, which its waiter gets."""
    future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 0-3, 6`."""
    found = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in found:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    listed = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'' if len(found) == 1 else 's'} {listed}"
