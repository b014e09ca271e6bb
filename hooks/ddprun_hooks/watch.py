"""What an onlooker is told about collectives: that one has been issued, and that it has come to its end.

All ranks of a *line* issue its collectives in one order, so their running numbers say who has come to one and
who has not, without a message between them. Nothing is told here to anybody by default.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ddprun_hooks.payload import Payload


class Ticket(Protocol):
    """One collective, from its issue to its end."""

    def done(self) -> None:
        """It is over."""

    def broke(self) -> None:
        """It has failed: it stays what this rank waits for, and grows no older."""

    def done_when(self, ended: Callable[[], bool]) -> None:
        """`ended` tells whether it is over; called on any thread, and not once it has said so."""


class Line(Protocol):
    """Collectives that the same ranks issue in one order."""

    def issue(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> Ticket:
        """This rank issues the line's next collective now.

        Args:
            op: of the collective.
            payload: what it carries.
            what: what it carries, in words, if it is no payload.
            peers: the ranks it waits for whatever they have issued; None: those of the line that have not
                issued theirs.
        """


class Watch(Protocol):
    """Looks on."""

    def line(self, name: str, ranks: Sequence[int]) -> Line:
        """A new line. All ranks of a run make theirs in one order, those of equal place among other ranks at
        once.

        Args:
            name: of what its collectives travel on.
            ranks: whose collectives it has, this one's among them; numbers in the whole run.
        """


class _Nobody:
    """Looks away."""

    def line(self, name: str, ranks: Sequence[int]) -> Line:
        return self

    def issue(
        self, op: str, payload: Payload | None = None, *, what: str = "", peers: Sequence[int] | None = None
    ) -> Ticket:
        return self

    def done(self) -> None: ...

    def broke(self) -> None: ...

    def done_when(self, ended: Callable[[], bool]) -> None: ...


NOBODY = _Nobody()
"""The onlooker, the line and the ticket of whoever is not watched."""


@contextmanager
def waiting(line: Line, op: str, what: str, peers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, this rank waits for others: for `peers`, or for all that have yet to come to this place."""
    ticket = line.issue(op, what=what, peers=peers)
    try:
        yield
    except BaseException:
        ticket.broke()
        raise
    ticket.done()
