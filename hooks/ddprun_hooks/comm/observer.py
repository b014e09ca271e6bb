"""What an observer sees of collectives: that one has been issued, and that it is over.

All ranks of a sequence issue its collectives in one order, so their running numbers say who has issued one
and who has not, without a message between them. By default there is no observer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ddprun_hooks.payload import Payload


class PendingCollective(Protocol):
    """A handle to one issued collective, by which who issued it tells the observer that it has ended."""

    def mark_done(self) -> None:
        """It is over."""

    def mark_failed(self) -> None:
        """It has failed: it still counts as what this rank waits for, but its age no longer grows."""

    def done_when(self, has_ended: Callable[[], bool]) -> None:
        """`has_ended` says whether it is over; it is called on any thread, and no more once it was true."""


class CollectiveSequence(Protocol):
    """Collectives that the same ranks issue in one order."""

    def issue(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> PendingCollective:
        """This rank issues the sequence's next collective now: an `op`, and `payload`, or in words `what` it
        carries. `peers`: the ranks it waits for; None: those of the sequence that have not issued theirs.
        """


class CollectiveObserver(Protocol):
    """Sees the collectives of this rank."""

    def new_sequence(self, name: str, ranks: Sequence[int]) -> CollectiveSequence:
        """A new sequence of the collectives that `ranks` (of the whole run) issue on what is called `name`.
        All ranks of a run make theirs in one order, groups that exist side by side at once.
        """


class _NullObserver:
    def new_sequence(self, name: str, ranks: Sequence[int]) -> CollectiveSequence:
        return self

    def issue(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> PendingCollective:
        return self

    def mark_done(self) -> None: ...

    def mark_failed(self) -> None: ...

    def done_when(self, has_ended: Callable[[], bool]) -> None: ...


NULL_OBSERVER = _NullObserver()  # observer, sequence and pending collective where there is no observer


@contextmanager
def observed_wait(
    sequence: CollectiveSequence, op: str, what: str, peers: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, this rank waits for `peers`, or for all that have not come this far."""
    pending = sequence.issue(op, what=what, peers=peers)
    with marking_failed_on_error(pending):
        yield
    pending.mark_done()


@contextmanager
def marking_failed_on_error(pending: PendingCollective) -> Iterator[None]:
    """A collective has failed if the block, which starts it or waits for it, raises."""
    try:
        yield
    except BaseException:
        pending.mark_failed()
        raise
