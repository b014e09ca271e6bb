"""What signals ask a run for."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from ddprun import LAUNCHED
from ddprun.host.processes import handle
from ddprun.parallel.ranks import Ranks

_STOP, _ASK_EVERY_S = "stop", 1.0


class StopRequest:
    """Notes SIGINT and SIGTERM, after which all ranks stop after the same step, and SIGUSR1, after which all
    take a checkpoint and go on.

    Under a launcher of ddprun's a wish to stop comes as SIGINT; SIGTERM is how torchelastic ends a rank when
    another one has failed, and is left to do so at once; rank 0 tells its trackers first
    (`tracking.fail_when_ended`).
    """

    def __init__(self) -> None:
        self.wanted = False
        self._checkpoint_wanted = False
        self._asked_s = 0.0
        if LAUNCHED in os.environ:
            signal.signal(signal.SIGINT, self._note)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                handle(number, self._note)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._note_checkpoint)

    def take_checkpoint_wish(self) -> bool:
        """Whether a checkpoint was asked for since this was asked last."""
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, False
        return wanted

    def known_to_all(self, ranks: Ranks, failed: Callable[[], bool]) -> bool:
        """Whether this rank is to stop, or has heard within the last second that another one is: for ranks
        that exchange nothing else.

        Args:
            ranks: whose store tells it.
            failed: another reason for this rank to stop.
        """
        if not self.wanted:
            if time.monotonic() - self._asked_s < _ASK_EVERY_S:
                return False
            self._asked_s = time.monotonic()
            if not failed():
                with ranks.asking():
                    return bool(ranks.store.check([_STOP]))
        with ranks.asking():
            ranks.store.set(_STOP, "")
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._checkpoint_wanted = True
