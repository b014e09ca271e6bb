"""What an observer sees of collectives: that one has been issued, and that it is over.

All ranks of a sequence issue its collectives in one order, so their running numbers say who has issued one
and who has not, without a message between them. By default there is no observer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ddprun_hooks.payload import Payload


class CollectiveHandle:
    """A handle to one issued collective, by which who issued it tells the observer that it has ended. It has
    failed if a `with` block of it, which starts it or waits for it, raises. The classes here observe nothing;
    those of an observer are derived from them.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.mark_failed()

    def mark_done(self) -> None:
        """It is over."""

    def mark_failed(self) -> None:
        """It has failed: it still counts as what this rank waits for, but its age no longer grows."""

    def set_completion_check(self, has_ended: Callable[[], bool]) -> None:
        """`has_ended` says whether it is over; it is called on any thread, and no more once it was true."""


class CollectiveSequence:
    """Collectives that the same ranks issue in one order."""

    def record_issued(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> CollectiveHandle:
        """This rank issues the sequence's next collective now: an `op`, and `payload`, or in words `what` it
        carries. `peers`: the ranks it waits for; None: those of the sequence that have not issued theirs.
        """
        return CollectiveHandle()


class CollectiveObserver:
    """Sees the collectives of this rank."""

    def new_sequence(self, name: str, ranks: Sequence[int]) -> CollectiveSequence:
        """A new sequence of the collectives that `ranks` (of the whole run) issue on what is called `name`.
        All ranks of a run make theirs in one order, groups that exist side by side at once.
        """
        return CollectiveSequence()


NULL_OBSERVER = CollectiveObserver()


@contextmanager
def observed_wait(
    sequence: CollectiveSequence, op: str, what: str, peers: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, this rank waits for `peers`, or for all that have not come this far."""
    pending = sequence.record_issued(op, what=what, peers=peers)
    with pending:
        yield
    pending.mark_done()
